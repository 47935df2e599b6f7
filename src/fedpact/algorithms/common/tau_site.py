"""The controller's statistics at a site, computed from gradients that it releases anyway.

    change    ‖g_l - g_f‖² - d(v_f + v_l)     distance  ‖w_l - w_f‖²     β_i² = change/distance
    length    mean of ‖g‖² - dv                                          ρ_i²
    square    ‖mean of g‖² - d Σ v/τ²                                    bounds ξ_i²

g_f, g_l are the first and last of a round's τ gradients, released at w_f, w_l with noise of
variance v_f, v_l in each of d coordinates. A round with one gradient compares it with that of an
earlier such round, from the site's memory. A length is unbiased, as its point does not depend on
its noise. A change is unbiased if neither point depends on the other's noise. Along a trajectory of
plain SGD with Hessian H and noise variance v it exceeds E‖H(w_l - w_f)‖² on average by

    2ηv tr(H (I - ηH)^(τ-2)), about 2ηv tr H       (τ >= 2)

and by p_i times 2ηv tr H between rounds of one step, as w contains p_i times the site's noise. tr H
is unknown, so it is not subtracted: β_i is overestimated, which keeps τ small. All squares also
contain the sampling variance (1 - q)/(qn) mean‖g_j‖² of each gradient: the estimates are about
clipped and sampled gradients, which the iteration uses. The alternative ρ_i² = ⟨g_f, g_l⟩, without
noise to subtract, turns negative if long steps reverse the gradient, which is where τ matters most.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from fedpact.algorithms.common.steps import HookedBatch
from fedpact.common.messages import State
from fedpact.privacy.oracle import Batch, Oracle, OracleWrapper, Weighting

UNLIMITED: Final = 2.0**53
"""The remaining iterations of a plain run, as numbers in a reply must be finite."""

_STRAIGHT: Final = 1e-3
"""The largest relative deviation of w - w_i from η Σ g for plain SGD."""

# One thread sums so many numbers, so that results do not depend on the number of threads.
_BLOCK: Final = 1 << 14


def dot(x: Tensor, y: Tensor) -> float:
    """Return ⟨x, y⟩ of two vectors [d] in float64, the same for any number of threads."""
    pairs = zip(x.split(_BLOCK), y.split(_BLOCK), strict=True)
    return float(torch.stack([(a.double() * b.double()).sum() for a, b in pairs]).sum())


@dataclass(frozen=True)
class Probe:
    """A released gradient g [d] at w [d], with noise of this variance in each coordinate."""

    w: Tensor
    g: Tensor
    variance: float


class RecordingOracle(OracleWrapper):
    """An oracle that forwards everything and records what `build_report` needs."""

    def __init__(self, inner: Oracle) -> None:
        super().__init__(inner)
        self.count, self.variance = 0, 0.0
        self.lengths, self.squared_variances = 0.0, 0.0
        self.first: Probe | None = None
        self.last: Probe | None = None
        self.total: Tensor | None = None

    def batches(self, count: int, *channels: str) -> Iterator[Batch]:
        for batch in self._inner.batches(count, *channels):
            yield HookedBatch(batch, self._record)

    def opening(self, *channels: str) -> Batch:
        return HookedBatch(self._inner.opening(*channels), self._record)

    def _record(self, batch: Batch, w: Tensor, weighting: Weighting) -> Tensor:
        g, variance = batch.gradient(w, weighting), batch.noise_variance
        probe = Probe(w.clone(), g.clone(), variance)
        self.count, self.variance = self.count + 1, self.variance + variance
        self.lengths += dot(g, g)
        self.squared_variances += variance**2
        if self.first is None or self.total is None:
            self.first, self.total = probe, g.clone()
        else:
            self.total.add_(g)
        self.last = probe
        return g


def build_report(
    seen: RecordingOracle, memory: State, moved: Tensor | None, rate: float, steps: int
) -> dict[str, float]:
    """Return the numbers of a site's reply: the same names in every round, and finite.

    memory: from `build_memory` in an earlier round, or empty. moved: w - w_i [d], None if the reply
    has no model. rate: η. steps: τ. "straight" says that w - w_i = η Σ g over τ gradients, i.e.
    plain SGD.
    """
    numbers = {
        "pairs": 0.0,
        **dict.fromkeys(("change", "change_variance", "distance"), 0.0),
        **dict.fromkeys(("length", "length_variance", "square"), 0.0),
        "noise": seen.variance / max(seen.count, 1),
        "straight": float(seen.count == steps and _is_straight(seen, moved, rate)),
    }
    if seen.total is not None:
        mean, d = seen.total / seen.count, len(seen.total)
        numbers["square"] = dot(mean, mean) - d * seen.variance / seen.count**2
        numbers["length"] = (seen.lengths - d * seen.variance) / seen.count
        # The variance due to noise only, here and below; it is public, as the noise is.
        numbers["length_variance"] = 2 * d * seen.squared_variances / seen.count**2
    pair = _pair(seen, memory)
    return numbers if pair is None else {**numbers, **_compare(*pair)}


def build_memory(seen: RecordingOracle) -> State:
    """Return the memory of a round with a single gradient, for the next round's comparison."""
    if seen.first is None or seen.count > 1:
        return State()
    first = seen.first
    return State({"w": first.w, "g": first.g}, {"variance": first.variance})


def raw_report(oracle: Oracle, w: Tensor, before: Tensor | None) -> tuple[dict[str, float], Tensor]:
    """Return the paper's ρ_i and β_i as numbers, and ∇F_i(w) [d], all exact and unprotected.

    w: the round's model. before: the site's w_i at the end of the last round; without it, or if it
    equals w, the quotients are 0/0 and "pairs" is 0.
    """
    loss, gradient = oracle.unprotected(w)
    numbers = {"pairs": 0.0, "lipschitz": 0.0, "smoothness": 0.0, "noise": oracle.noise_variance}
    if before is None or not (distance := dot(before - w, before - w) ** 0.5) > 0:
        return numbers, gradient
    own_loss, own_gradient = oracle.unprotected(before)
    change = own_gradient - gradient
    numbers |= {
        "pairs": 1.0,
        "lipschitz": abs(own_loss - loss) / distance,
        "smoothness": dot(change, change) ** 0.5 / distance,
    }
    return numbers, gradient


def _pair(seen: RecordingOracle, memory: State) -> tuple[Probe, Probe] | None:
    """Return the first and the last release to compare."""
    if seen.first is None or seen.last is None:
        return None
    if seen.count > 1:
        return seen.first, seen.last
    if "g" not in memory.vectors:
        return None
    kept = memory.vectors
    return Probe(kept["w"], kept["g"], memory.numbers["variance"]), seen.last


def _compare(first: Probe, last: Probe) -> Mapping[str, float]:
    d, both = len(first.g), first.variance + last.variance
    change, moved = last.g - first.g, last.w - first.w
    distance = dot(moved, moved)
    if not distance > 0:
        return {}
    return {
        "pairs": 1.0,
        "change": dot(change, change) - d * both,
        "distance": distance,
        "change_variance": 2 * d * both**2,
    }


def _is_straight(seen: RecordingOracle, moved: Tensor | None, rate: float) -> bool:
    if moved is None or seen.total is None:
        return False
    rest = moved - rate * seen.total
    return dot(rest, rest) <= _STRAIGHT**2 * dot(moved, moved)
