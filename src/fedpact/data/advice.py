"""Advice on a table's columns, and the columns of public tables that are known.

A record's gradient is as long as its numbers: beside an age of 60 a 0 or 1 is lost, clipping
shortens both alike, and a step that suits pixels of 0 .. 1 throws a model of 0 .. 255 far off; of
numbers of a thousandth it sees nothing, and noise that suits the bound drowns them. Nobody notices
but by a model that guesses.

NAME.toml, beside this file, has [records] for a plan on NAME: ranges, categories, what stands for a
gap, where a column begins. It is from the data set's own description and from what is known of such
measurements anyway. That the columns below say little was seen on the data set's training records,
too (experiments/heart), as settings of experiments are; whose records are not public asks somebody
who knows.
"""

import logging
import math
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from fedpact.common.format import toml, toml_key
from fedpact.data.schema import Column, RecordForm, ValueRange, rescale

_WIDE: Final = 10.0
_NARROWER: Final = 10.0
# How much farther from 0 than they differ numbers may be: above it they are one number to a model.
_BESIDE: Final = 10.0
# Columns without names that are a table's. Of pixels in a row some are hardly ever other numbers.
_TABLE: Final = 50
# A record's length, below which noise that suits a bound of 1 or so is more than its share.
_SHORT: Final = 0.3
_SHOWN: Final = 5
_REMEDY: Final = (
    "Declare what the values can be, by public knowledge and not by what is in the file, and have "
    "them scaled, in the plan, and of a deployment in federation.toml as well:"
)
_UNIT: Final = "Where it is declared: is the file in another unit?"

_logger = logging.getLogger("fedpact")

_Tell = Callable[[float], str]


def advise(
    origin: str,
    form: RecordForm,
    shape: Sequence[int],
    features: Sequence[str],
    x: Tensor | None,
    *,
    values: bool = True,
) -> None:
    """Warn of numbers that are to be scaled, with the lines that do it.

    shape: a record's. features: a table's columns, () without names. x: the records [n, *shape],
    where they may be looked at, on their owner's machine. Else, and wherever a range is declared,
    that counts. values: whether what is found may be told, or its power of ten alone, as in a
    site's log, which people send around.
    """
    tell = _exactly if values else _coarsely
    if len(shape) > 1:
        far = _furthest(form, x)
        if far >= _WIDE:
            _logger.warning(_told_of_all(origin, form, far, tell))
        elif x is not None:
            _advise_of_short(origin, (form,), x, tell)
        return
    names = features or tuple(map(str, range(shape[0])))
    wide = list[tuple[str, ValueRange, float]]()
    for k, name in enumerate(names):
        own = form.of(name)
        far = _furthest(own, None if x is None else x[:, k])
        if far >= _WIDE:
            wide.append((name, own, far))
    if len(wide) > _SHOWN and not features and not form.columns:
        # Without names, as pixels in a row are: what is declared is declared of all.
        most = max(far for *_, far in wide)
        _logger.warning(_told_of_all(origin, form, most, tell))
    elif wide:
        _logger.warning(_told(origin, wide, tell))
    _advise_of_little(origin, form, names, x, tell, {name for name, *_ in wide})
    if x is not None:
        if not wide and (features or len(names) <= _TABLE):
            _advise_of_narrow(origin, form, names, x, tell)
        _advise_of_short(origin, [form.of(name) for name in names], x, tell)
        _advise_of_standards(origin, form, names, x, tell)


def _exactly(far: float) -> str:
    return f"{far:.3g}"


def _coarsely(far: float) -> str:
    return f"up to {10.0 ** math.ceil(math.log10(far)):.0e}" if math.isfinite(far) else "inf"


def _advise_of_narrow(
    origin: str, form: RecordForm, names: Sequence[str], x: Tensor, tell: _Tell
) -> None:
    """Warn of columns that, as they are scaled, stay so near to 0 that others drown them."""
    few = len(names) <= _TABLE
    reach = [_reach(form.of(name), x[:, k], few) for k, name in enumerate(names)]
    most = max(reach)
    near = [(n, far) for n, far in zip(names, reach, strict=True) if 0 < far < most / _NARROWER]
    if near:
        shown = _first([f"{name} ({tell(far)})" for name, far in near])
        _logger.warning(
            f"{origin}: numbers of these columns stay near 0: {shown}, as found in the "
            f"records; others reach {tell(most)}, and a model hardly sees these beside them. "
            "Declare what they can be, and have it scaled: [records.columns.NAME] with range = "
            f'[LEAST, MOST] and scale = "range". {_UNIT}'
        )


def _reach(own: ValueRange, x: Tensor, few: bool) -> float:
    """Return how far from 0 a column's numbers [n] get as they are scaled. few: of few columns."""
    if own.scale == "none":
        return _found(x)
    if own.scale in ("one-hot", "released") or not few:
        return 1.0
    low, high = _ends(x)
    # What is scaled may have a few numbers far off, beside which nothing else is narrow.
    return 1.0 if low == high else min(_found(rescale(x.double(), own)), 1.0)


def _advise_of_little(
    origin: str,
    form: RecordForm,
    names: Sequence[str],
    x: Tensor | None,
    tell: _Tell,
    told: Collection[str],
) -> None:
    """Warn of columns that, as they are scaled, differ little beside how far from 0 they are.

    told: those of which that was said.
    """
    if len(names) > _TABLE:
        return
    declared, found = list[str](), list[str]()
    for k, name in enumerate(names):
        own = form.of(name)
        looked = own.scale != "none" or _extent(own) is None
        far = _beside(own, x[:, k] if looked and x is not None else None)
        if far > _BESIDE and name not in told:
            shown = f"{name} ({tell(far) if looked else _exactly(far)} times)"
            (found if looked else declared).append(shown)
    for alike, how in ((declared, ""), (found, _how(True))):
        if alike:
            _logger.warning(
                f"{origin}: numbers of these columns are much farther from 0 than they differ: "
                f"{_first(alike)}{how}. A model hardly tells them apart, and may "
                "do no better than chance where they matter. Declare what they can be, no wider "
                "than by public knowledge, and have it scaled: [records.columns.NAME] with range "
                f'= [LEAST, MOST], clamp = true and scale = "range". {_UNIT}'
            )


def _beside(own: ValueRange, x: Tensor | None) -> float:
    """Return how much farther from 0 than they differ a column's numbers [n] are, once scaled.

    0 where nobody says, of codes, and of one number alone, which tells nothing anyway. One record
    in a hundred at either end does not count: a typing slip, or what stands for a gap.
    """
    if own.scale in ("one-hot", "released") or (isinstance(own, Column) and own.categories):
        return 0.0
    if x is not None:
        ends = _ends(x)
    elif own.scale == "none" and own.low is not None and own.high is not None:
        ends = own.low, own.high
    else:
        return 0.0
    low, high = rescale(torch.tensor(ends, dtype=torch.float64), own).tolist()
    return abs(low + high) / abs(high - low) if low != high else 0.0


def _ends(x: Tensor) -> tuple[float, float]:
    """Return the first and the last hundredth of a column's finite numbers; (0, 0) of none."""
    good = x[x.isfinite()].double().sort().values
    few = len(good) // 100
    return (float(good[few]), float(good[-1 - few])) if len(good) else (0.0, 0.0)


def _advise_of_short(origin: str, own: Sequence[ValueRange], x: Tensor, tell: _Tell) -> None:
    """Warn where nothing is scaled and whole records stay near 0, as in too large a unit."""
    if any(one.scale != "none" for one in own):
        return
    longest = _found(torch.linalg.vector_norm(x.flatten(1), dim=1))
    if 0 < longest < _SHORT:
        _logger.warning(
            f"{origin}: all numbers stay near 0: no record is longer than {tell(longest)}"
            f"{_how(True)}; expected about 1. A gradient is as long as its record's numbers, so a "
            "step that suits numbers of about 1 is far too short for these, noise is louder, and a "
            f"model may do no better than chance. {_REMEDY}\n\n"
            '[records]\nlow = ...\nhigh = ...\nscale = "range"\n\n'
            "or columns by their names: [records.columns.NAME] with range = [LEAST, MOST] and "
            'scale = "range".'
        )


def _found(x: Tensor) -> float:
    """Return how far from 0 finite numbers get."""
    good = x[x.isfinite()]
    return float(good.abs().max()) if good.numel() else 0.0


def _advise_of_standards(
    origin: str, form: RecordForm, features: Sequence[str], x: Tensor, tell: _Tell
) -> None:
    """Warn of columns whose declared mean and deviation leave their numbers far from 0."""
    far = list[str]()
    for k, name in enumerate(features):
        own = form.of(name)
        if isinstance(own, Column) and own.mean is not None and own.deviation is not None:
            scaled = (x[:, k].double() - own.mean) / own.deviation
            length = float(scaled[scaled.isfinite()].square().mean().sqrt())
            if length >= _WIDE:
                far.append(
                    f"{name} ({tell(length)}, by mean = {own.mean:g} and deviation = "
                    f"{own.deviation:g})"
                )
    if far:
        _logger.warning(
            f"{origin}: scaled by the mean and deviation that are declared, numbers of these "
            f"columns get about so far from 0: {_first(far)}{_how(True)}; "
            "expected about 1. Other columns are lost beside them, and a model may do no better "
            "than chance. Is the file in another unit? Declare mean and deviation in the file's, "
            'or its range with scale = "range"'
        )


def _first(told: Sequence[str]) -> str:
    """Return the first of what is told of columns, and how many more there are."""
    more = f" and {len(told) - _SHOWN} more" if len(told) > _SHOWN else ""
    return ", ".join(told[:_SHOWN]) + more


def find_undeclared(form: RecordForm, features: Sequence[str]) -> str:
    """Name the columns of which neither range, scale nor categories are declared; "" for none."""
    bare = [name for name in features if _extent(form.of(name)) is None]
    more = f" and {len(bare) - _SHOWN} more columns" if len(bare) > _SHOWN else ""
    return ", ".join(bare[:_SHOWN]) + more


def square(form: RecordForm, features: Sequence[str]) -> float:
    """About the squared length of a record of these numbers, as they are scaled.

    A value that is evenly spread over -1 .. 1 has the square 1/3, and is taken for such a one where
    nothing says how far it gets; of a one-hot code one is 1.
    """
    return sum(_square(form.of(name)) for name in features)


def _square(own: ValueRange) -> float:
    if own.scale in ("one-hot", "standard", "released"):
        return 1.0
    far = _extent(own)
    far = 1.0 if far is None else far
    # Infinite, where it is beyond what floats hold, in place of Python's OverflowError.
    return far * far / 3


def _extent(own: ValueRange) -> float | None:
    """Return how far from 0 a column's numbers get, by its declaration; None: it does not say."""
    if own.scale != "none":
        return 1.0
    if isinstance(own, Column) and own.categories is not None:
        return max(abs(float(c)) for c in own.as_numbers().categories or [])
    if own.low is None or own.high is None:
        return None
    return max(abs(own.low), abs(own.high))


def _furthest(own: ValueRange, x: Tensor | None) -> float:
    """Return how far from 0 numbers get, as declared or as found; 0 where nobody says."""
    declared = _extent(own)
    if declared is not None or x is None or not x.numel():
        return declared or 0.0
    low, high = x.aminmax()
    return max(-float(low), float(high))


def _told(origin: str, wide: Sequence[tuple[str, ValueRange, float]], tell: _Tell) -> str:
    shown = wide[:_SHOWN]
    named = ", ".join(f"{name} ({_far(own, far, tell)})" for name, own, far in shown)
    more = f" and {len(wide) - _SHOWN} more" if len(wide) > _SHOWN else ""
    found = any(_extent(own) is None for _, own, _ in wide)
    lines = "\n\n".join(_lines(name, own) for name, own, _ in shown)
    return (
        f"{origin}: numbers of these columns get far from 0: {named}{more}{_how(found)}. A "
        "gradient is as long as its record's numbers, so narrow columns are lost beside wide ones, "
        f"and a model may do no better than chance. {_REMEDY}\n\n{lines}"
    )


def _far(own: ValueRange, far: float, tell: _Tell) -> str:
    """Return how far numbers get; what is declared is public."""
    return tell(far) if _extent(own) is None else f"{far:g}"


def _told_of_all(origin: str, form: RecordForm, far: float, tell: _Tell) -> str:
    how = _how(_extent(form) is None)
    return (
        f"{origin}: numbers get as far as {_far(form, far, tell)} from 0{how}. A gradient "
        "is as long as its record's numbers, so a step that suits numbers of about 1 is far too "
        f"long for these, and a model may do no better than chance. {_REMEDY}\n\n"
        f'[records]\nlow = {_end(form.low)}\nhigh = {_end(form.high)}\nscale = "range"'
    )


def _how(found: bool) -> str:
    return " (found by looking at the records, as this machine's owner may)" if found else ""


def _lines(name: str, own: ValueRange) -> str:
    key = toml_key(name)
    if isinstance(own, Column) and own.categories is not None:
        return f'[records.columns.{key}]\ncategories = {toml(own.categories)}\nscale = "one-hot"'
    ends = f"[{_end(own.low)}, {_end(own.high)}]"
    return f'[records.columns.{key}]\nrange = {ends}\nclamp = true\nscale = "range"'


def _end(value: float | None) -> str:
    return "..." if value is None else f"{value:g}"


# Narrowed arteries show in a history and in an exercise test.
_LITTLE: Final = ("trestbps scaled", "chol scaled", "fbs", "restecg=1", "restecg=2")
KNOWN: Final = {
    "adult": (),
    "heart_disease": (*_LITTLE, "restecg=0"),
    "heart_disease_flamby": _LITTLE,
    "shakespeare": (),
}
"""Data set -> those of its columns that are known to say little beside the others."""


def find_configuration(data: str) -> Path | None:
    """Return the configuration whose [records] goes with a data set, None where there is none."""
    return Path(__file__).with_name(f"{data}.toml") if data in KNOWN else None
