"""Whether floating point holds what a coarse grid is said to be worth, before anything is released.

A release is u floor(S/u + ν z + 1/2), z normal and ν u the noise's deviation: a function of
S/u + ν z, and so post-processing of a Gaussian mechanism, whatever S is and the grid's u.
That S/u + ν z is one float64 number moves the value where it is within its last bit of a half.
"""

from collections.abc import Iterable
from typing import Final

from fedpact.errors import PlanError
from fedpact.privacy.batches import most_records
from fedpact.privacy.terms import Terms

_LONGEST: Final = 2.0**27
"""Units of a sum whose last bit is 2^-26 of a unit: it moves a probability by as much of itself."""


def check_grid(terms: Iterable[Terms]) -> None:
    """Raise PlanError unless sums are short enough on their grids.

    terms: of any sites; those without a grid of their own are left alone.
    """
    for one in terms:
        for each in (one, one.opening) if one.grid else ():
            longest = most_records(each.batch_size) * one.grid / min(each.sigmas.values())
            if not longest <= _LONGEST:
                raise PlanError(
                    f"a sum of site {one.site!r} has up to {longest:.3g} units of its grid: "
                    f"expected at most {_LONGEST:.3g}, as far as floating point is shown to round "
                    'it like a real number; use smaller batches, or compression.kind = "none"'
                )
