"""What is attacked where sites share noise out: an opened sum, and one site's share.

sum     what the server opens: this site's share and those of h - 1 others, against ε
alone   this site's share when all others' are known, against the ε that needs none of them

Anything else that honest sites add to a sum is known to be there, and is the same with a record as
without it. Where each site's noise is its own there is one view, of what the site sends.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fedpact.audit.target import PrivateKernel, Target
from fedpact.draws.seeded import Draws
from fedpact.privacy.oracle import Oracle, PrivateOracle, Records
from fedpact.privacy.terms import Terms

Drawn = Callable[[Draws], Draws]


def list_views(target: Target, drawn: Drawn = lambda draws: draws) -> Mapping[str, Target]:
    """Return what to attack, by name; "" for the target itself where no noise is shared.

    drawn: what a test puts in place of a site's draws.
    """
    terms, honest = target.terms, target.terms.honest
    if not honest:
        return {"": target}
    # As one share: what is accounted for is then the noise that the view has.
    together = {name: sigma * math.sqrt(honest) for name, sigma in terms.sigmas.items()}
    return {
        "sum": replace(
            target, terms=replace(terms, sigmas=together, honest=1), make=_making(honest, drawn)
        ),
        "alone": replace(target, terms=replace(terms, honest=1), make=_making(1, drawn)),
    }


def _making(shares: int, drawn: Drawn) -> Callable[[Records, PrivateKernel, Terms, Draws], Oracle]:
    def make(records: Records, kernel: PrivateKernel, terms: Terms, draws: Draws) -> Oracle:
        sigmas = {name: sigma / math.sqrt(shares) for name, sigma in terms.sigmas.items()}
        own = replace(terms, sigmas=sigmas)
        return _Attacked(records, kernel, own, _Together(drawn(draws), shares), lambda *_: None)

    return make


class _Attacked(PrivateOracle):
    """An oracle whose events are those of many rounds: each has one release of its own."""

    def _shared(
        self, total: Tensor, sigma: float, bound: float, purpose: str, *, step: int
    ) -> Tensor:
        self.shares.clear()
        return super()._shared(total, sigma, bound, purpose, step=step)


class _Together:
    """Draws of all sites at once: a share is the sum of `shares`, all but one of empty sites."""

    repeats = True

    def __init__(self, own: Draws, shares: int) -> None:
        self._own, self._shares = own, shares

    def batch(self, records: int, rate: float, step: int) -> Tensor:
        return self._own.batch(records, rate, step)

    def places(self, count: int, slots: int, step: int) -> Tensor:
        return self._own.places(count, slots, step)

    def gaussian(self, size: int, like: Tensor, step: int, purpose: str) -> Tensor:
        return self._own.gaussian(size, like, step, purpose)

    def add_noise(
        self, total: Tensor, sigma: float, sensitivity: float, step: int, purpose: str
    ) -> Tensor:
        return self._own.add_noise(total, sigma, sensitivity, step, purpose)

    def share(self, total: Tensor, unit: float, units: float, step: int, purpose: str) -> Tensor:
        found, nothing = self._own.share(total, unit, units, step, purpose), torch.zeros_like(total)
        for k in range(1, self._shares):
            found = found + self._own.share(nothing, unit, units, step, f"{purpose} of share {k}")
        return found
