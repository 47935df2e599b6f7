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
from typing import Any, Final

from fedpact.common.errors import InputError

# Integers have no upper limit in Python: one beyond the largest float is as good as infinite.
_LARGEST: Final = sys.float_info.max

WITHOUT_PRIVACY: Final = '; for a run without privacy set privacy.mode = "none"'


def _check(
    good: Callable[[float], bool], expected: str, kinds: Any = int | float
) -> Callable[..., Any]:
    """Return a check: given one named number, it returns it if good, else raises InputError."""

    def check(**named: float) -> float:
        ((name, value),) = named.items()
        # bool is an int in Python; True is no learning rate.
        number = isinstance(value, kinds) and not isinstance(value, bool)
        # Written as "not good": every comparison with NaN is false, so NaN is refused.
        if not (number and good(value)):
            remedy = WITHOUT_PRIVACY if name == "epsilon" else ""
            raise InputError(f"{name} is {value!r}: expected {expected.format(name=name)}{remedy}")
        return value

    return check


finite: Callable[..., float] = _check(lambda v: -_LARGEST <= v <= _LARGEST, "a finite number")
positive: Callable[..., float] = _check(
    lambda v: 0 < v <= _LARGEST, "a finite number with {name} > 0"
)
non_negative: Callable[..., float] = _check(
    lambda v: 0 <= v <= _LARGEST, "a finite number with {name} >= 0"
)
probability: Callable[..., float] = _check(lambda v: 0 <= v <= 1, "a number with 0 <= {name} <= 1")
rate: Callable[..., float] = _check(lambda v: 0 < v <= 1, "a number with 0 < {name} <= 1")
"""Of a sampling rate, in (0, 1]."""
fraction: Callable[..., float] = _check(lambda v: 0 < v < 1, "a number with 0 < {name} < 1")
"""Of δ, in (0, 1)."""
count: Callable[..., int] = _check(lambda v: v >= 1, "an integer with {name} >= 1", int)
natural: Callable[..., int] = _check(lambda v: v >= 0, "an integer with {name} >= 0", int)
