"""Advice on the scaling of columns, and declarations for known public tables.

A record's gradient grows with its numbers. Next to an age of 60 a value of 0 or 1 has almost no
effect, and clipping shortens both alike. Noise drowns numbers of a thousandth.

NAME.toml, next to this file, has [records] for a plan on the data set NAME, from its description
and general knowledge of such measurements.
"""

import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from fedpact.common.format import list_some, toml, toml_key
from fedpact.data.schema import Column, RecordForm, rescale

_WIDE: Final = 10.0
# How much farther from 0 than they differ numbers may be: above it they are one number to a model.
_BESIDE: Final = 10.0
# Columns without names that are a table's. Of pixels in a row some are hardly ever other numbers.
_TABLE: Final = 50
# A record's length, below which noise that suits a bound of 1 or so is more than its share.
_SHORT: Final = 0.3
_SHOWN: Final = 5
_FOUND: Final = " (found by looking at the records, as this machine's owner may)"

_logger = logging.getLogger("fedpact")

_Tell = Callable[[float], str]
_Column = tuple[str, Column, Tensor | None]
"""Name ("" for all together), declaration, and numbers [n], if they may be read."""


def advise(
    origin: str,
    form: RecordForm,
    shape: Sequence[int],
    features: Sequence[str],
    x: Tensor | None,
    *,
    values: bool = True,
) -> None:
    """Warn of numbers far from 0, with little variation, or near 0, with lines that scale them.

    shape: a record's. features: a table's columns, () without names. x: the records [n, *shape], if
    they may be read, on their owner's machine; declared ranges take precedence. values: whether the
    warning may contain values, or only their power of ten, as in a site's log, which may be shared.
    """
    tell: _Tell = "{:.3g}".format if values else _coarsely
    columns: list[_Column] = [("", form.general, x)]
    if len(shape) == 1:
        names = features or tuple(map(str, range(shape[0])))
        columns = [
            (name, form.of(name), None if x is None else x[:, k]) for k, name in enumerate(names)
        ]
    wide = {one[0]: one for one in columns if _furthest(*one[1:]) >= _WIDE}
    if len(columns) <= _TABLE and len(shape) == 1:
        _warn_of_little(origin, [one for one in columns if one[0] not in wide], tell)
    if len(wide) > _SHOWN and not features and not form.columns:
        # Without names, such as pixels in a row: a declaration applies to all columns.
        wide = {"": ("", form.general, x)}
    if wide:
        _warn_of_wide(origin, [*wide.values()], tell)
    if x is not None and all(own.scale == "none" for _, own, _ in columns):
        _warn_of_short(origin, x, tell)
    ordered = [
        name
        for name, own, _ in columns
        if len(own.names or []) > 2 and "scale" not in own.model_fields_set
    ]
    if ordered:
        _logger.warning(
            f"{origin}: the categories of {list_some(ordered, _SHOWN)} become 0, 1, 2, ..., as if "
            'they were ordered: declare scale = "one-hot" for a number for each, or scale = "none" '
            "if they are ordered, or if the model looks them up"
        )


def _coarsely(far: float) -> str:
    return f"up to {10.0 ** math.ceil(math.log10(far)):.0e}" if math.isfinite(far) else "inf"


def _warn_of_wide(origin: str, wide: Sequence[_Column], tell: _Tell) -> None:
    # Declared values are public.
    far = [
        tell(_furthest(own, x)) if _extent(own) is None else f"{_extent(own):g}"
        for _, own, x in wide
    ]
    told = [f"{name} ({most})" for (name, *_), most in zip(wide, far, strict=True)]
    which = f"numbers of these columns get far from 0: {list_some(told, _SHOWN)}"
    how = _FOUND if any(_extent(own) is None for _, own, _ in wide) else ""
    lines = "\n\n".join(_lines(name, own) for name, own, _ in wide[:_SHOWN])
    _logger.warning(
        f"{origin}: {which if wide[0][0] else f'numbers get as far as {far[0]} from 0'}{how}. A "
        "gradient is as long as its record's numbers: narrow columns are lost next to wide ones, a "
        "step that suits numbers of about 1 is far too long, and a model may do no better than "
        "chance. Declare what the values can be, from public knowledge and not from the file, and "
        f"a scale, in the plan and in a deployment's federation.toml:\n\n{lines}"
    )


def _warn_of_little(origin: str, columns: Sequence[_Column], tell: _Tell) -> None:
    told, how = list[str](), ""
    for name, own, x in columns:
        looked = own.scale != "none" or _extent(own) is None
        far = _beside(own, x if looked else None)
        if far > _BESIDE:
            told.append(f"{name} ({tell(far) if looked else f'{far:.3g}'} times)")
            how = _FOUND if looked else how
    if told:
        _logger.warning(
            f"{origin}: numbers of these columns are much farther from 0 than they differ: "
            f"{list_some(told, _SHOWN)}{how}. A model can hardly tell them apart. Correct a file "
            "in another unit, or declare a range from public knowledge, as narrow as it allows: "
            '[records.columns.NAME] with range = [LEAST, MOST], clamp = true and scale = "range"; '
            'or scale = "standard" with a mean and deviation from public knowledge.'
        )


def _warn_of_short(origin: str, x: Tensor, tell: _Tell) -> None:
    lengths = torch.linalg.vector_norm(x.flatten(1), dim=1)
    longest = float(lengths[lengths.isfinite()].max().item()) if lengths.isfinite().any() else 0.0
    if 0 < longest < _SHORT:
        _logger.warning(
            f"{origin}: all numbers stay near 0: no record is longer than {tell(longest)}{_FOUND}; "
            "expected about 1. A step that suits numbers of about 1 is far too short for these, "
            "and noise is louder. Declare what the values can be, from public knowledge and not "
            'from the file, and a scale:\n\n[records]\nlow = ...\nhigh = ...\nscale = "range"\n\n'
            "or columns by their names: [records.columns.NAME] with range = [LEAST, MOST] and "
            'scale = "range".'
        )


def _beside(own: Column, x: Tensor | None) -> float:
    """Return the distance from 0 of a column's scaled numbers [n], divided by their spread.

    0 if it is unknown, for codes, and if all are equal. The outer one per cent is ignored.
    """
    if own.scale in ("one-hot", "released") or own.categories:
        return 0.0
    if x is not None:
        good = x[x.isfinite()].double().sort().values
        few = len(good) // 100
        ends = (float(good[few]), float(good[-1 - few])) if len(good) else (0.0, 0.0)
    elif own.scale == "none" and own.low is not None and own.high is not None:
        ends = own.low, own.high
    else:
        return 0.0
    low, high = rescale(torch.tensor(ends, dtype=torch.float64), own).tolist()
    return abs(low + high) / abs(high - low) if low != high else 0.0


def find_undeclared(form: RecordForm, features: Sequence[str]) -> str:
    """Name the columns without declared range, scale or categories; "" for none."""
    return list_some([name for name in features if _extent(form.of(name)) is None], _SHOWN)


def square(form: RecordForm, features: Sequence[str]) -> float:
    """Estimate the squared norm of a scaled record: 1 for a one-hot code, else a mean square.

    A value uniform in -1 .. 1 has 1/3, which is assumed if no range is declared.
    """
    total = 0.0
    for own in map(form.of, features):
        far = _extent(own)
        far = 1.0 if far is None else far
        coded = own.scale in ("one-hot", "standard", "released")
        # Infinite if it exceeds floats, instead of Python's OverflowError.
        total += 1.0 if coded else far * far / 3
    return total


def _extent(own: Column) -> float | None:
    """Return the largest magnitude of a column by its declaration; None if undeclared."""
    if own.scale != "none":
        return 1.0
    if own.categories is not None:
        return max(abs(float(c)) for c in own.as_numbers().categories or [])
    if own.low is None or own.high is None:
        return None
    return max(abs(own.low), abs(own.high))


def _furthest(own: Column, x: Tensor | None) -> float:
    declared = _extent(own)
    if declared is not None or x is None:
        return declared or 0.0
    good = x[x.isfinite()]
    return float(good.abs().max()) if good.numel() else 0.0


def _lines(name: str, own: Column) -> str:
    if not name:
        return f'[records]\nlow = {_end(own.low)}\nhigh = {_end(own.high)}\nscale = "range"'
    key = toml_key(name)
    if own.categories is not None:
        return f'[records.columns.{key}]\ncategories = {toml(own.categories)}\nscale = "one-hot"'
    ends = f"[{_end(own.low)}, {_end(own.high)}]"
    return f'[records.columns.{key}]\nrange = {ends}\nclamp = true\nscale = "range"'


def _end(value: float | None) -> str:
    return "..." if value is None else f"{value:g}"


_LITTLE: Final = ("trestbps scaled", "chol scaled", "fbs", "restecg=1", "restecg=2")
KNOWN: Final = {
    "adult": (),
    "heart_disease": (*_LITTLE, "restecg=0"),
    "heart_disease_flamby": _LITTLE,
    "shakespeare": (),
}
"""Data set -> those of its columns that are known to say little beside the others.

That was also seen on the training records (experiments/heart).
"""


def find_configuration(data: str) -> Path | None:
    """Return the configuration file with [records] for a data set; None without one."""
    return Path(__file__).with_name(f"{data}.toml") if data in KNOWN else None
