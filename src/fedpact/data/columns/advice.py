"""Advice to who reads a table in: columns far wider than others keep a model from learning.

A record's gradient is as long as its numbers: beside an age of 60 a 0 or 1 is lost, and clipping
shortens both alike. Nobody notices but by a model that guesses.
"""

import json
import logging
import re
from collections.abc import Sequence
from typing import Final

from torch import Tensor

from fedpact.data.form import Column, RecordForm, ValueRange

_WIDE: Final = 10.0
_SHOWN: Final = 5

_logger = logging.getLogger("fedpact")


def advise(origin: str, form: RecordForm, features: Sequence[str], x: Tensor | None) -> None:
    """Warn of a table's columns that are to be scaled, with the lines that do it.

    x: the records [n, d], where they may be looked at: in a simulation, on their owner's machine.
    Else, and wherever a range is declared, that counts.
    """
    columns = [(name, form.of(name)) for name in features]
    wide = list[tuple[str, ValueRange, float]]()
    for k, (name, own) in enumerate(columns):
        far = _extent(own)
        if far is None and x is not None:
            far = float(x[:, k].abs().max())
        if far is not None and far >= _WIDE:
            wide.append((name, own, far))
    if wide:
        _logger.warning(_told(origin, wide, looked=x is not None))


def undeclared(form: RecordForm, features: Sequence[str]) -> str:
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
    return (1.0 if far is None else far) ** 2 / 3


def _extent(own: ValueRange) -> float | None:
    """Return how far from 0 a column's numbers get, by its declaration; None: it does not say."""
    if own.scale != "none":
        return 1.0
    if isinstance(own, Column) and own.categories is not None:
        return max(abs(float(c)) for c in own.as_numbers().categories or [])
    if own.low is None or own.high is None:
        return None
    return max(abs(own.low), abs(own.high))


def _told(origin: str, wide: Sequence[tuple[str, ValueRange, float]], *, looked: bool) -> str:
    shown = wide[:_SHOWN]
    named = ", ".join(f"{name} ({far:g})" for name, _, far in shown)
    more = f" and {len(wide) - _SHOWN} more" if len(wide) > _SHOWN else ""
    unknown = any(_extent(own) is None for _, own, _ in wide)
    how = " (found by looking at the records, as this machine's owner may)" if unknown else ""
    lines = "\n\n".join(_lines(name, own) for name, own, _ in shown)
    where = "the plan" if looked else "the plan and federation.toml"
    return (
        f"{origin}: numbers of these columns get far from 0: {named}{more}{how}. A gradient is as "
        "long as its record's numbers, so narrow columns are lost beside wide ones, and a model "
        "may do no better than chance. Declare what the values can be, by public knowledge and "
        f"not by what is in the file, and have them scaled, in {where}:\n\n{lines}"
    )


def _lines(name: str, own: ValueRange) -> str:
    key = name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name, ensure_ascii=False)
    if isinstance(own, Column) and own.categories is not None:
        return f'[records.columns.{key}]\ncategories = {own.categories}\nscale = "one-hot"'
    low = "..." if own.low is None else f"{own.low:g}"
    high = "..." if own.high is None else f"{own.high:g}"
    return f'[records.columns.{key}]\nrange = [{low}, {high}]\nclamp = true\nscale = "range"'
