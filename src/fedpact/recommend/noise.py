"""The noise of sites with one budget or several, as it is in what a server makes of their answers.

Site k, of N_k records, adds noise of deviation σ_k C / (q N_k) to its mean gradient, of which the
server takes Σ ω_k g_k. Where budgets are alike, or the noise is that of the sum, ω_k = N_k / N:
each record counts alike. Where they are not, one careful site's noise would drown the others'
answers: then sites count by their noise (algorithm ldp_fedsgd, theory.aggregation), for a bias of

    D Σ (ω_k - N_k / N)²,    D = Σ ‖g_k - ḡ‖²

a step. Noise averages out over T rounds and a bias does not, so T D stands beside it. D is at most
K C². Where records are dealt to sites at random, sites differ by chance alone: D is Σ C² / N_k.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedpact.privacy.once import FullDataRelease
from fedpact.theory.accounting import Budget
from fedpact.theory.aggregation import least_noise
from fedpact.theory.calibration import smallest_sigma


@dataclass(frozen=True)
class SiteNoise:
    """What is known of it beforehand.

    budgets, sizes: of each of the K sites, (ε, δ) and N_k > 0. columns: what scales columns, where
    each site releases it. clip: C. honest: of how many sites' noise a sum is protected, None where
    each site's own is. dealt: whether records are dealt to sites at random.
    """

    budgets: Sequence[Budget]
    sizes: Sequence[float]
    columns: Sequence[FullDataRelease | None]
    clip: float
    honest: int | None
    dealt: bool

    @property
    def releases(self) -> list[tuple[FullDataRelease | None, float]]:
        """Of each site what it releases to scale columns, and N_k."""
        return list(zip(self.columns, self.sizes, strict=True))

    @property
    def weighed(self) -> bool:
        """Whether sites count by their noise."""
        return self.honest is None and len(set(self.budgets)) > 1

    def sigma(self, rate: float, rounds: int, weights: int) -> float:
        """Return the σ of a site that, if all were like it, would give the noise that there is.

        rate: q in (0, 1]. rounds: T >= 1. weights: d >= 1, of the model.
        """
        each = self._each(rate, rounds)
        if not self.weighed:
            # Of noise for the sum all add what the most careful site needs.
            return max(each)
        return sigma_together(each, self.sizes, self.clip, rate, self.penalty(rounds) / weights)

    def alike(self, rate: float, rounds: int) -> float:
        """Return `sigma` of all records counting alike, whatever their sites' budgets."""
        each = self._each(rate, rounds)
        return math.hypot(*each) / math.sqrt(len(each)) if self.weighed else max(each)

    def penalty(self, rounds: int) -> float:
        """Return T D, which is the `bias_penalty` of ldp_fedsgd."""
        apart = sum(1 / n for n in self.sizes) if self.dealt else len(self.sizes)
        return rounds * apart * self.clip**2

    def settings(self, rounds: int) -> dict[str, Any]:
        """Return of the algorithm that suits its name, and its settings but η."""
        if not self.weighed:
            return {"algorithm": "fedavg", "settings": {"local_steps": 1}}
        own = {"step_schedule": "constant", "aggregation": "least_noise"}
        own |= {"bias_penalty": float(f"{self.penalty(rounds):.3g}")}
        return {"algorithm": "ldp_fedsgd", "settings": own}

    def _each(self, rate: float, rounds: int) -> list[float]:
        found = {
            budget: smallest_sigma(budget, rate, rounds, spent=once.history if once else None)
            for budget, once in dict(zip(self.budgets, self.columns, strict=True)).items()
        }
        return [found[budget] for budget in self.budgets]


def sigma_together(
    sigmas: Sequence[float],
    sizes: Sequence[float],
    clip: float,
    rate: float = 1.0,
    penalty: float | None = None,
) -> float:
    """Return the σ of K sites that are alike, whose mean over records has the noise of these.

    sigmas, sizes: σ_k and N_k > 0. clip: C. rate: q. penalty: κ of theory.aggregation by which
    sites count by their noise; None where all records count alike.
    """
    deviations = [clip * s / (rate * n) for s, n in zip(sigmas, sizes, strict=True)]
    counted = [n / sum(sizes) for n in sizes]
    if penalty is not None:
        counted = least_noise(sizes, [v * v for v in deviations], penalty)
    noise = math.hypot(*(a * v for a, v in zip(counted, deviations, strict=True)))
    return noise * sum(sizes) * rate / clip / math.sqrt(len(sizes))
