"""Checks of numbers given from outside: NaN fails every one, and the message shows name and value.

Each takes one keyword, the name under which the caller knows the number, and returns the value:

>>> positive(learning_rate=0.5)
0.5
>>> probability(sampling_rate=1.5)
Traceback (most recent call last):
    ...
fedpact.common.errors.InputError: sampling_rate is 1.5: expected a number with 0 <= sampling_rate
<= 1
"""

import sys
from collections.abc import Callable
from typing import Final

from fedpact.common.errors import InputError

# Integers have no upper limit in Python: one beyond the largest float is as good as infinite.
_LARGEST: Final = sys.float_info.max

WITHOUT_PRIVACY: Final = '; for a run without privacy set privacy.mode = "none"'


def _single(named: dict[str, float]) -> tuple[str, float]:
    if len(named) != 1:
        raise TypeError(f"a check takes one named number, not {sorted(named)}")
    return next(iter(named.items()))


def _require(named: dict[str, float], good: Callable[[float], bool], expected: str) -> float:
    name, value = _single(named)
    # bool is an int in Python; True is no learning rate.
    number = isinstance(value, int | float) and not isinstance(value, bool)
    # Written as "not good": every comparison with NaN is false, so NaN is refused.
    if not (number and good(value)):
        remedy = WITHOUT_PRIVACY if name == "epsilon" else ""
        raise InputError(f"{name} is {value!r}: expected {expected.format(name=name)}{remedy}")
    return value


def finite(**named: float) -> float:
    """Return the number if it is finite. Raises InputError otherwise."""
    return _require(named, lambda v: -_LARGEST <= v <= _LARGEST, "a finite number")


def positive(**named: float) -> float:
    """Return the number if it is finite and > 0. Raises InputError otherwise."""
    return _require(named, lambda v: 0 < v <= _LARGEST, "a finite number with {name} > 0")


def non_negative(**named: float) -> float:
    """Return the number if it is finite and >= 0. Raises InputError otherwise."""
    return _require(named, lambda v: 0 <= v <= _LARGEST, "a finite number with {name} >= 0")


def probability(**named: float) -> float:
    """Return the number if it lies in [0, 1]. Raises InputError otherwise."""
    return _require(named, lambda v: 0 <= v <= 1, "a number with 0 <= {name} <= 1")


def rate(**named: float) -> float:
    """Return the number if it lies in (0, 1], as a sampling rate does. Raises InputError."""
    return _require(named, lambda v: 0 < v <= 1, "a number with 0 < {name} <= 1")


def fraction(**named: float) -> float:
    """Return the number if it lies in (0, 1), as δ does. Raises InputError otherwise."""
    return _require(named, lambda v: 0 < v < 1, "a number with 0 < {name} < 1")


def _integer(named: dict[str, int], least: int) -> int:
    name, value = _single(dict(named))
    if not (isinstance(value, int) and not isinstance(value, bool) and value >= least):
        raise InputError(f"{name} is {value!r}: expected an integer with {name} >= {least}")
    return value


def count(**named: int) -> int:
    """Return the integer if it is >= 1. Raises InputError otherwise."""
    return _integer(named, 1)


def natural(**named: int) -> int:
    """Return the integer if it is >= 0. Raises InputError otherwise."""
    return _integer(named, 0)
