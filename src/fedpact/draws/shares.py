"""A sum and its noise, rounded together to a coarse grid: a site's release, or its share of one.

What it is worth, alone or with other sites' shares, is in theory.shares. The grid is the defence
against floating-point attacks as well, and needs no finer one: sum and noise are float64, so a
value is rounded otherwise than a real number would be only within 1e-9 of a half for sums of up to
2^22 units, 2^-26 for up to 2^27, which moves its probability by as much of itself.
"""

import torch
from torch import Tensor

from fedpact.check import positive
from fedpact.draws.keystream import Parts


def round_shares(total: Tensor, unit: float, units: float, noise: Tensor) -> Tensor:
    """Return floor(s/unit + ν z + 1/2) for a sum s [d], float64 [d] where z is.

    unit: of the grid, in units of the sum. units: ν, the noise's deviation on the grid. noise: z
    [d], standard normal, float64, which may be written over.
    Raises InputError: unit or units is not a finite number > 0.
    """
    whole = noise.mul_(positive(units=units))
    whole.add_(total.detach().double() / positive(unit=unit))
    return whole.add_(0.5).floor_()


def shared(total: Tensor, unit: float, units: float, parts: Parts) -> Tensor:
    """Return the same, int64 [d], for noise that comes in parts, of float32 or float64."""
    whole = torch.empty_like(total, dtype=torch.int64)
    for part, z in parts:
        whole[part] = round_shares(total[part], unit, units, z.double())
    return whole
