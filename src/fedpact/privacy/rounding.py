"""Whether a coarse grid holds what its terms say: once d is known, before anything is released."""

from collections.abc import Iterable
from typing import Final

from fedpact.errors import PlanError
from fedpact.privacy.batches import most_records
from fedpact.privacy.terms import Terms
from fedpact.theory.shares import check_added_delta

_LONGEST: Final = 2.0**27
"""Units of a sum that floating point rounds like a real number, but within 2^-26 of a half."""


def check_grid(terms: Iterable[Terms], dimension: int) -> None:
    """Raise InputError of some kind unless coarse grids cost no more of δ than the terms say.

    terms: of any sites; those without a grid of their own are left alone. dimension: d.
    """
    for one in terms:
        if not one.grid:
            continue
        opening = len(one.opening_sigmas) * one.openings
        sums = float(dimension) * (len(one.sigmas) * one.steps + opening)
        check_added_delta(one.budget.epsilon, one.grid, 1, sums)
        for each in (one, one.opening):
            longest = most_records(each.batch_size) * one.grid / min(each.sigmas.values())
            if not longest <= _LONGEST:
                raise PlanError(
                    f"a sum of site {one.site!r} has up to {longest:.3g} units of its grid: "
                    f"expected at most {_LONGEST:.3g}, as far as floating point is shown to round "
                    'it like a real number; use smaller batches, or compression.kind = "none"'
                )
