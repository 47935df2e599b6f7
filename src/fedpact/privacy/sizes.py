"""A site's size as a release of its own, where it is not declared: a count with noise.

    N_i = max(1, n_i + N(0, σ²))     sensitivity 1 under add/remove: SampledGaussian(1, σ)

It is released once, before training, and reserved together with the events of the run. What is
divided by N_i or weighted with it afterwards is post-processing. σ, q and the number of steps are
fixed before it and never follow from it: else composition would need a filter. The true count
serves only to sample.
"""

import torch

from fedpact.check import positive
from fedpact.draws import grid
from fedpact.draws.seeded import Draws
from fedpact.ledger.ledger import Ledger
from fedpact.privacy.terms import Terms, size_event


def noisy_size(records: int, noise: float, draws: Draws) -> float:
    """Return N_i >= 1, a multiple of 2^-10: `records` plus noise of standard deviation `noise`.

    The noise is added on the grid (draws.grid). Not charged here; see `charge_size`.
    Raises InputError: noise is not a finite number > 0.
    """
    total = torch.tensor([records], dtype=torch.float64)
    release = grid.noisy(
        total, positive(noise=noise), 1.0, lambda n, like: draws.gaussian(n, like, 0, "size")
    )
    return max(1.0, float(release))


def charge_size(ledger: Ledger, run: str, terms: Terms) -> None:
    """Write the released size down, before anything leaves; nothing where it is declared.

    Raises what Ledger.charge raises.
    """
    for event, count in size_event(terms.size_noise).items():
        ledger.charge(run, "size", event, count, purpose=("size",), round_number=0)
