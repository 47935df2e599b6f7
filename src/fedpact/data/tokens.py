"""Tokenised text: columns of lists become records [rows, T] with their mask.

The rows are input_ids, attention_mask and, if there is such a column, token_type_ids, as tokenizers
write them. The fourth is decoder_input_ids, what the decoder of a sequence-to-sequence model reads.
Records are padded to length T with 0, also in their mask, or cut at T.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import numpy as np
from torch import Tensor

from fedpact.common.losses import UNLABELLED
from fedpact.common.params import TOKENS
from fedpact.data.dataset import RecordFilter

_IDS, _MASK, _TYPES, _DECODER = TOKENS
_logger = logging.getLogger("fedpact")
_LONGEST: Final = 2**20


def token_columns(
    columns: Mapping[str, Sequence[Any]], among: Collection[str], length: int | None = None
) -> dict[str, Sequence[Any]]:
    """Return the columns of tokens in the order of a record's rows; {} if a table has none.

    among: the columns that may be features. length: the declared length of a record. If it is
    declared, or lists differ in length, a single column of lists holds the tokens, whatever its
    name. Without a mask all tokens count.
    """
    name = _IDS
    if _IDS not in columns:
        lists = [n for n in among if n not in TOKENS and _holds_lists(columns.get(n, ()))]
        known = (list, tuple, np.ndarray)
        lengths = {len(c) for n in lists for c in columns[n] if isinstance(c, known)}
        name = lists[0] if len(lists) == 1 and (length or len(lengths) > 1) else _IDS
    cells = columns.get(name) if name in among else None
    # Named as tokens, they are whatever their cells hold, so that none decides what a table is.
    if cells is None or not (_names_tokens(among) or _holds_lists(cells)):
        return {}
    columns = {**columns, _IDS: cells}
    among = {*among, _IDS}
    found = {name: columns[name] for name in TOKENS if name in columns and name in {*among, _MASK}}
    for name in filled_columns(found) - found.keys():
        lengths = (0 if row is None else len(row) for row in map(_whole, cells))
        found[name] = [np.full(length, int(name == _MASK)) for length in lengths]
    return {name: found[name] for name in TOKENS if name in found}


def filled_columns(features: Collection[str]) -> set[str]:
    """Return which of a record's columns `token_columns` fills in where a table has none."""
    if _IDS not in features:
        return set()
    return {_MASK, _TYPES} if _DECODER in features else {_MASK}


def _holds_lists(cells: Sequence[Any]) -> bool:
    """Whether a column's first list with an entry is one of whole numbers."""
    kinds = (list, tuple, np.ndarray, Tensor)
    first = next(
        (c for c in cells if c is not None and not (isinstance(c, kinds) and not len(c))), 0
    )
    return isinstance(first, kinds) and _whole(first) is not None


def is_tokens(features: Sequence[str]) -> bool:
    """Whether columns of a table are the rows of a record of tokens."""
    return features[:1] == TOKENS[:1] and _names_tokens(features)


def _names_tokens(names: Collection[str]) -> bool:
    return len(names) > 1 and _IDS in names and {*names} <= {*TOKENS}


def read_tokens(
    columns: Mapping[str, Sequence[Any]],
    length: int | None,
    vocabulary: int | None,
    sieve: RecordFilter,
) -> np.ndarray:
    """Return records int64 [n, rows, T] of tokens, and add all faults to their sieve.

    columns: from `token_columns`. length: T, None for the longest record's. vocabulary: tokens are
    smaller; None: not declared.
    """
    found = [_record(columns, n, vocabulary) for n in range(sieve.count)]
    _leave_out(sieve, found)
    good = {place: one for place, one in enumerate(found) if isinstance(one, np.ndarray)}
    size = length
    if size is None:
        size = max((one.shape[1] for one in good.values()), default=1)
        _logger.info(
            "data set %s: records.length is not declared, so its longest record's, %d tokens, is "
            "taken, and counts as public",
            *(sieve.origin, size),
        )
    x = np.zeros((sieve.count, len(columns), size), np.int64)
    for place, one in good.items():
        x[place, :, : one.shape[1]] = one[:, :size]
    long = [place for place, one in good.items() if one.shape[1] > size]
    sieve.clamp(long, _IDS, f"is cut at {size} tokens")
    empty = [place for place in good if not x[place, 1].any()]
    sieve.leave_out(empty, _MASK, f"has no 1 for the first {size} tokens; pad on the right")
    return x


_Fault = tuple[str, str]
"""(Column, reason) of a record that is left out."""


def _leave_out(sieve: RecordFilter, found: Sequence[np.ndarray | _Fault]) -> None:
    rows = dict[_Fault, list[int]]()
    for row, one in enumerate(found):
        if isinstance(one, tuple):
            rows.setdefault(one, []).append(row)
    for fault, bad in rows.items():
        sieve.leave_out(bad, *fault)


def is_next_token(label: str | None, declared: bool = False) -> bool:
    """Whether the label of each token is the next token. declared: by the task."""
    return declared or label == _IDS


def next_labels(y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return for each token the label of the next, [n, T], UNLABELLED for the last and in padding.

    x: records [n, T] or [n, rows, T].
    """
    y = np.concatenate([y[:, 1:], np.full_like(y[:, :1], UNLABELLED)], 1)
    if _has_mask(x):
        y[:, :-1][x[:, 1, 1:] == 0] = UNLABELLED
    return y


def _has_mask(x: np.ndarray) -> bool:
    """Whether the labels of records x [n, ..., T] belong to tokens with a mask."""
    return x.ndim == 3 and 1 < x.shape[1] < len(TOKENS)


def read_token_labels(
    cells: Sequence[Any],
    x: np.ndarray,
    lists: Mapping[str, Sequence[Any]],
    label: str,
    sieve: RecordFilter,
    *,
    span: bool,
) -> np.ndarray:
    """Return a label for each token, int64 [n, T]; UNLABELLED for none, as for padding.

    cells: for each record a list of a whole number for each token. x: records [n, rows, T]. lists:
    the columns of the records; of a decoder's tokens there is no mask, so all have a label. span:
    whether the two ends of a span are labels, too. label: the column.
    """
    y = np.full((len(x), x.shape[-1]), UNLABELLED, np.int64)
    found = list[np.ndarray | _Fault]()
    for cell, text in zip(cells, lists[_DECODER if _DECODER in lists else _IDS], strict=True):
        row, count = _whole(cell), len(text) if hasattr(text, "__len__") else 0
        if row is None:
            found.append((label, "is not a list of whole numbers, one for each token"))
        elif len(row) in {count, y.shape[1], 2 if span else count}:
            found.append(row)
            y[len(found) - 1, : len(row)] = row[: y.shape[1]]
        else:
            found.append((label, "has another number of labels than the record has tokens"))
    _leave_out(sieve, found)
    if _has_mask(x):
        y[x[:, 1] == 0] = UNLABELLED
    return y


def _record(
    columns: Mapping[str, Sequence[Any]], place: int, vocabulary: int | None
) -> np.ndarray | _Fault:
    """Return a record's rows, padded to the longest of them, or its fault."""
    ids, most = _whole(columns[_IDS][place]), np.inf if vocabulary is None else vocabulary - 1
    if ids is None or (ids < 0).any() or not 0 < len(ids) <= _LONGEST:
        return _IDS, "is not a list of tokens, whole numbers from 0"
    if (ids > most).any():
        return _IDS, f"has a token outside 0 to {most}"
    found = [ids]
    for name in [*columns][1:]:
        row, apart = _whole(columns[name][place]), name == _DECODER
        limit = 1 if name == _MASK else most if apart else np.inf
        fits = row is not None and (apart or len(row) == len(ids))
        if row is None or not (fits and ((row >= 0) & (row <= limit)).all()):
            told = "whole numbers" + ", one for each token" * (not apart)
            return name, f"is not a list of {'0 or 1 for each token' if name == _MASK else told}"
        found.append(row)
    size = max(map(len, found))
    return np.stack([np.pad(row, (0, size - len(row))) for row in found])


def _whole(cell: Any) -> np.ndarray | None:
    """Return a cell as int64 [t]; None if it is not a list of whole numbers."""
    try:
        row = np.asarray(cell)
    except (TypeError, ValueError):
        return None
    return row.astype(np.int64) if row.ndim == 1 and row.dtype.kind in "iub" else None
