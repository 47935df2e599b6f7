"""A first draft of what a federation declares of its records, for a person to confirm.

A range or a list of categories that is taken from records is a release of them. So whatever is
found stands behind a #, as a proposal, and counts for nothing until somebody who knows what such a
value can be has put it right and taken the # away.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from fedpact.common.format import number, percent, toml, toml_key
from fedpact.data.cells import (
    Cells,
    is_blank,
    list_some,
    read_columns,
    read_npz,
    text_of,
    to_numbers,
)
from fedpact.data.schema import RecordForm
from fedpact.data.summary import ColumnSummary, summarise_array, summarise_column

_MOST: Final = 20
"""Of text with more values than these nobody writes down all that there are."""
_CODES: Final = 10
"""Whole numbers of no more values than these may be codes."""

_HEAD: Final = """\
# Drafted from {file} by `fedpact inspect`, for the person who writes the federation. A line that
# begins with # and a key is a proposal, and counts for nothing: put it right, by what such a value
# can be and not by what is here, and take the # away. Lines "found" are of these records, exact:
# delete them before you pass this on. docs/how-to/prepare-tables.md has the keys.
"""
_DATE: Final = "a date is no number: write it as days since a day that is fixed, and name it again"
_TEXT: Final = (
    "free text, a name or a case's number: not usable as it is. Where it has few words, write all "
    "that there are as its categories"
)
_NOTHING: Final = "nothing in it"
_SAME: Final = "always the same: it says nothing"


def draft(path: Path, roles: Mapping[str, str | None]) -> tuple[str, list[ColumnSummary]]:
    """Return a draft of [records] as TOML, and what each column holds.

    roles: the columns of labels, sites and persons, "label", "site" and "person"; None for none.
    Raises DataError: the file cannot be read.
    """
    head = _HEAD.format(file=path.name)
    if path.suffix.lower() == ".npz":
        found = summarise_array(read_npz(path)["x"], RecordForm())
        lows = [one.low for one in found if one.low is not None]
        highs = [one.high for one in found if one.high is not None]
        lines = [f"# found: {number(min(lows))} to {number(max(highs))}"] if lows else []
        lines += _range_lines(min(lows), max(highs), ("low", "high")) if lows else []
        return "\n".join([head, "[records]", *lines, ""]), found
    columns, _ = read_columns(path)
    label = roles.get("label")
    found = [summarise_column(name, cells) for name, cells in columns.items()]
    features = [one for one in found if one.name not in roles.values()]
    dropped = {one.name: why for one in features if (why := _unusable(one))}
    named = {"data": str(path), **roles}
    lines = [head, *(f"{key} = {toml(name)}" for key, name in named.items() if name is not None)]
    lines += ['# label = "..."'] * (label is None) + ["", "[records]"]
    if label is not None:
        lines += _of_label(columns, label)
    if dropped:
        lines += [f"# {name}: {why}" for name, why in dropped.items()]
        lines.append(f"drop = {toml([*dropped])}")
    for one in features:
        if one.name not in dropped:
            lines += ["", f"[records.columns.{toml_key(one.name)}]"]
            lines += _of_column(one, columns[one.name])
    return "\n".join([*lines, ""]), found


def _unusable(one: ColumnSummary) -> str:
    """Return why a column makes no feature as it stands, "" where it does."""
    if one.kind == "nothing":
        return _NOTHING
    if one.kind == "dates":
        return _DATE
    if one.kind == "numbers":
        return _SAME if one.low == one.high else ""
    if one.distinct > _MOST:
        return _TEXT
    return _SAME if one.distinct == 1 and not one.missing else ""


def _of_label(columns: Mapping[str, Cells], label: str) -> list[str]:
    if label not in columns:
        return [f"# label: the file has no column {label!r}: it has {list_some(columns)}"]
    found = _words(columns[label])
    if len(found) > _MOST:
        return ['# label: many values: numbers to learn are [task] kind = "regression"']
    return [
        "# found: the labels below; name all classes that there can be",
        f"# classes = {toml(found)}",
    ]


def _of_column(one: ColumnSummary, cells: Cells) -> list[str]:
    missing = f"; {percent(one.missing)} missing" if one.missing else ""
    if one.kind == "text":
        words = _words(cells)
        lines = [
            f"# found: {one.distinct} words{missing}",
            f"# categories = {toml(words)}   # all that there can be",
            '# scale = "one-hot"   # the default here: a number for each category, 1 for its own',
        ]
        return lines + (
            [f"# fill = {toml(words[0])}   # stands for a missing one"] if missing else []
        )
    low, high, median = one.low or 0.0, one.high or 0.0, one.median or 0.0
    lines = [f"# found: numbers, {number(low)} to {number(high)}, median {number(median)}{missing}"]
    numbers = to_numbers(cells).tolist()
    values = {value for value in numbers if not math.isnan(value)}
    whole = all(value.is_integer() for value in values)
    if whole and len(values) == len(cells) > _MOST:
        lines.append("# another number in each row: if it counts cases, add it to drop")
    if whole and 2 < len(values) <= _CODES:
        lines.append(
            f"# if these are codes: categories = {toml(sorted(values))}, one-hot, no range"
        )
    lines += _range_lines(low, high)
    if missing:
        lines.append(
            f"# fill = {_short(median)}   # stands for a missing one; else its record is left out"
        )
    odd = sum(math.isnan(x) and not is_blank(cell) for x, cell in zip(numbers, cells, strict=True))
    if odd:
        lines.append(f"# found: {odd} cells that are no numbers: their records are left out")
    return lines


def _range_lines(low: float, high: float, keys: tuple[str, ...] = ()) -> list[str]:
    ends = propose_range(low, high)
    told = "   # the least and the most that such a value can be"
    each = (
        [f"# {key} = {_plain(end)}" for key, end in zip(keys, ends, strict=True)]
        if keys
        else [f"# range = [{', '.join(map(_plain, ends))}]{told}"]
    )
    return [*each, '# scale = "range"   # -1..1 over the range']


def propose_range(low: float, high: float) -> tuple[float, float]:
    """Return round numbers around low <= high, from 0 where that is not far off.

    >>> propose_range(18.0, 94.0), propose_range(35.1, 41.2), propose_range(-3.0, 2.0)
    ((0.0, 100.0), (35.0, 42.0), (-3.0, 2.0))
    """
    span = high - low
    if not 0 < span < math.inf:
        return low, high
    step = 10.0 ** math.floor(math.log10(span))
    first, last = math.floor(low / step) * step, math.ceil(high / step) * step
    if 0 <= first <= last / 2:
        first = 0.0
    return float(f"{first:.12g}"), float(f"{last:.12g}")


def _plain(value: float) -> str:
    return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)


def _short(value: float) -> str:
    return _plain(float(f"{value:.2g}"))


def _words(cells: Cells) -> list[str]:
    return sorted({text_of(cell) for cell in cells if not is_blank(cell)})
