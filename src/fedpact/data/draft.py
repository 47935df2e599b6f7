"""A first draft of the [records] table of a plan, for a person to confirm.

A range or a list of categories that is taken from records is a release of them. So what is found
is a proposal behind a #, without effect until a person corrects it and removes the #.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from fedpact.common.errors import DataError
from fedpact.common.format import count_noun, number, percent, toml, toml_key
from fedpact.data.cells import NOT_UTF_8, conversion, read_columns, read_npz
from fedpact.data.inputs import check_role
from fedpact.data.schema import RecordForm
from fedpact.data.summary import (
    ColumnCells,
    ColumnSummary,
    describe_codes,
    describe_form,
    summarise_array,
)

_MOST: Final = 20
"""Nobody lists all values of a text column that has more of them than this."""
_CODES: Final = 10
"""Whole numbers with at most so many different values may be codes."""
_SHOWN: Final = 3
_TAIL: Final = 2.0
"""A range this many times wider than that of 98 % of the values has a long tail."""

_HEAD: Final = """\
# Drafted from {file} by `fedpact inspect`. Lines of the form "# key = value" are proposals and have
# no effect. For each one: correct it to what such a value can be, not to what is in this file; then
# remove the "#". Delete the lines "# found:" before you share this file: they are exact figures of
# these records. docs/how-to/prepare-tables.md explains the keys.
"""


@np.errstate(all="ignore")  # as of numbers near 1e308
def draft(path: Path, roles: Mapping[str, str | None]) -> tuple[str, list[ColumnSummary]]:
    """Return a draft of [records] as TOML, and what each column holds.

    roles: the columns of labels, sites and persons, "label", "site" and "person"; None for none.
    Raises DataError: the file cannot be read, or has no such column.
    """
    head = _HEAD.format(file=path.name)
    named = {role: column for role, column in roles.items() if column is not None}
    if path.suffix.lower() == ".npz":
        if named:
            raise DataError(
                f"data file {path}: --{' --'.join(named)}: an .npz file has no columns to name, "
                "but arrays x, y, site and person; leave that out"
            )
        x = read_npz(path)["x"]
        found, finite = summarise_array(x, RecordForm()), ColumnCells.of("x", x.reshape(-1)).finite
        lines = (
            ["# found: " + _span(finite), *_ranges(finite, "low", "high")] if len(finite) else []
        )
        return "\n".join([head, "[records]", *lines, ""]), found
    table = read_columns(path)
    for role, column in named.items():
        check_role(f"data file {path}", role, column, table.cells)
    columns, broken = {n: ColumnCells.of(n, some) for n, some in table.cells.items()}, table.broken
    label, found = roles.get("label"), [one.summary() for one in columns.values()]
    features = [one for one in found if one.name not in roles.values()]
    dropped = {one.name: why for one in features if (why := _unusable(one, columns[one.name]))}
    lines = [head, *(f"{key} = {toml(of)}" for key, of in {"data": str(path), **named}.items())]
    lines += ['# label = "..."   # the column to predict'] * (label is None)
    task = [] if label is None else _task(columns[label])
    lines += [*task, "", "[records]"]
    if broken:
        rows = _rows(sorted(broken))
        lines.append(f"# found: {count_noun(len(broken), 'line')} that cannot be read ({rows})")
    if NOT_UTF_8 in broken.values():
        command = conversion(path, "read_csv", encoding="cp1252")
        lines.append(f"# found: lines that are not UTF-8 text. To convert the file: {command}")
    if label is not None and not task:
        lines += _classes(columns[label])
    if dropped:
        lines += [f"# not used: {name or '(no name)'}: {why}" for name, why in dropped.items()]
        lines.append(f"drop = {toml([*dropped])}")
    for one in features:
        if one.name not in dropped:
            lines += ["", f"[records.columns.{toml_key(one.name)}]"]
            lines += _column(one, columns[one.name])
    return "\n".join([*lines, ""]), found


def _unusable(one: ColumnSummary, cells: ColumnCells) -> str:
    if one.kind == "nothing":
        return "every cell is empty"
    if one.kind == "dates":
        return "dates or times. Convert them to a number, such as days since a fixed day"
    if one.kind == "numbers":
        if one.low == one.high:
            return "the same value in every row"
        return describe_codes(cells)
    if one.remark:
        return one.remark
    if one.distinct > _MOST:
        return "text with many different values, such as names, notes or identifiers"
    return "the same value in every row" if one.distinct == 1 and not one.missing else ""


def _task(cells: ColumnCells) -> list[str]:
    finite = cells.finite
    if len(finite) < len(cells.x) / 2 or len(np.unique(finite)) <= _MOST:
        return []
    ends = ", ".join(_around(finite))
    return ["", "[task]", 'kind = "regression"', f"# found: {_span(finite)}", f"# range = [{ends}]"]


def _classes(cells: ColumnCells) -> list[str]:
    found = sorted(cells.texts)
    if not found:
        return ["# label: every cell is empty"]
    if len(found) > _MOST:
        return [f"# label: text with {len(found)} different values: is this the right column?"]
    return [
        *_spelt_missing(cells, "classes"),
        "# found: these labels. List all classes that there can be",
        f"# classes = {toml(found)}",
    ]


def _spelt_missing(cells: ColumnCells, names: str) -> list[str]:
    """Return remarks on words that count as missing unless they are among the declared names."""
    return [
        f"# found: {word!r} in {count_noun(count, 'row')}, which counts as missing: if it is a "
        f"value of its own, add it to the {names}"
        for word, count in cells.spelt_missing.most_common()
    ]


def _column(one: ColumnSummary, cells: ColumnCells) -> list[str]:
    missing = f"; {percent(one.missing)} missing" if one.missing else ""
    if one.kind == "text":
        words = sorted(cells.texts)
        lines = [
            f"# found: text with {one.distinct} different values{missing}",
            f"# categories = {toml(words)}   # all that there can be",
            '# scale = "one-hot"   # a number for each; without it 0, 1, 2, ... in this order',
        ]
        lines += (told := _spelt_missing(cells, "categories"))
        if missing and words and not told:
            most = cells.texts.most_common(1)[0][0]
            lines.append(f"# fill = {toml(most)}   # the most frequent; for a missing value")
        return lines
    finite, values = cells.finite, np.unique(cells.finite)
    lines = [f"# found: {_span(finite)}{missing}"]
    if odd := cells.words:
        form = describe_form(Counter(odd.values())) or "these rows are left out"
        told = count_noun(len(odd), "cell")
        lines.append(f"# found: {told} without a number ({_rows([*odd])}): {form}")
    if 2 < len(values) <= _CODES and (values == np.rint(values)).all():
        codes = toml(values.tolist())
        lines.append(f"# if these are codes, in place of a range: categories = {codes}")
    lines += _ranges(finite)
    if missing and np.abs(finite).max() < 1e30:
        median = _plain(float(f"{np.median(finite):.2g}"))
        lines.append(f"# fill = {median}   # replaces a missing value; else the row is left out")
    return lines


def _rows(rows: Sequence[int]) -> str:
    """Return the first of some rows, counted from 1 below the header."""
    named = ", ".join(str(row + 1) for row in rows[:_SHOWN])
    return f"row{'s' * (len(rows) > 1)} {named}" + ", ..." * (len(rows) > _SHOWN)


def _span(values: np.ndarray) -> str:
    low, median, high = (number(float(np.quantile(values, share))) for share in (0, 0.5, 1))
    return f"numbers, {low if low == high else f'{low} to {high}'}, median {median}"


def _ranges(values: np.ndarray, *keys: str) -> list[str]:
    ends = _around(values)
    if not 0 < float(ends[1]) - float(ends[0]) < math.inf:
        return []
    lines = [f"# {key} = {end}" for key, end in zip(keys, ends, strict=False)]
    if not keys:
        lines = [f"# range = [{', '.join(ends)}]   # what such a value can be"]
        beyond = int(((values < float(ends[0])) | (values > float(ends[1]))).sum())
        what = f"sets {count_noun(beyond, 'value')} beyond it to the nearer end"
        lines += [f"# clamp = true   # {what}"] if beyond else []
    return [*lines, '# scale = "range"   # maps the range to -1..1']


def _around(values: np.ndarray) -> list[str]:
    """Return the ends of a range around most of some values, without long tails."""
    first, last = np.quantile(values, (0.01, 0.99))
    least, most = float(values.min()), float(values.max())
    if len(values) > 100 and most - least > _TAIL * (last - first) > 0:
        least, most = float(first), float(last)
    return [_plain(end) for end in propose_range(least, most)]


def propose_range(low: float, high: float) -> tuple[float, float]:
    """Return round numbers around low <= high, from 0 where that is not far off.

    >>> propose_range(18.0, 94.0), propose_range(35.1, 41.2), propose_range(-3.0, 2.0)
    ((0.0, 100.0), (35.0, 42.0), (-3.0, 2.0))
    """
    span = high - low
    if not 1e-300 < span < math.inf:  # below, its power of ten is 0
        return low, high
    step = 10.0 ** math.floor(math.log10(span))
    first, last = math.floor(low / step) * step, math.ceil(high / step) * step
    if 0 <= first <= last / 2:
        first = 0.0
    return float(f"{first:.12g}"), float(f"{last:.12g}")


def _plain(value: float) -> str:
    return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)
