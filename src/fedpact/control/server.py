"""What the server makes of the sites' numbers: ρ, β, ξ, averaged over sites and rounds, and then τ.

    β² = mean change / mean distance      ρ² = mean length       ξ² = mean divergence
    s  = ξ + 2 sqrt(d) σC/B, (σC/B)² the mean over sites of the noise's variance

Means over sites have the weights p_i; over rounds every round counts alike, as the noise of one is
large (see site). They are cut off at 0 only when they are used, so that errors of both signs
cancel. The divergence of a round: with u_i = (w - w_i)/(ητ), the mean of site i's noisy gradients
under plain SGD, v_i the noise's variance and u = Σ p_i u_i,

    Σ p_i ‖u_i - u‖² = Σ p_i ‖u_i‖² - ‖u‖²
    less its noise    Σ p_i (d/τ)[(1 - p_i)² v_i + Σ_{j≠i} p_j² v_j] = (d/τ)(Σ p_i v_i - Σ p_i² v_i)

By the way a step's noise moves the next ones' points, under H_i this falls short by
Σ (p_i - p_i²)(v_i/τ)(d - mean over k < τ of tr (I - ηH_i)^(2k)), about ηv (1 - 1/τ) tr H.
Other solvers move otherwise; there the sites' squares bound it: Σ p_i ‖mean g‖² >= ξ².

An estimate is clear where it is at least CLEAR standard deviations of its noise above 0. Without a
clear β² and ρ², τ is the budgets' even split.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from torch import Tensor

from fedpact.check import positive
from fedpact.control.site import UNLIMITED, dot
from fedpact.messages import Numbers, Reply, State, split_state
from fedpact.theory import tau

CLEAR: Final = 2.0
KAPPA: Final = 10.0
"""κ over ρ² where no κ is given."""

_PAIRED: Final = ("change", "distance", "lipschitz", "smoothness")
"""What only sites that had two points to compare tell."""

_VARIANCE: Final = "_variance"


@dataclass(frozen=True)
class SiteReport:
    """A round as the sites were told of it: w [d], τ >= 1, η > 0."""

    w: Tensor
    steps: int
    learning_rate: float


@dataclass
class Fold:
    """Sums over the replies of a round, which pass through one at a time.

    prefix: of the numbers' and vectors' names in a reply.
    """

    told: SiteReport
    prefix: str
    weight: float = 0.0
    sums: dict[str, float] = field(default_factory=dict[str, float])
    least_left: float = UNLIMITED
    straight: bool = True
    mean: Tensor | None = None

    def through(self, replies: Iterable[Reply]) -> Iterator[Reply]:
        """Yield the replies, each counted."""
        for reply in replies:
            self._count(reply)
            yield reply

    def _count(self, reply: Reply) -> None:
        weight = positive(weight=reply.weight)
        sent = split_state(State(numbers=reply.numbers), self.prefix)[0].numbers
        self.weight += weight
        self.least_left = min(self.least_left, sent["steps_left"])
        self._add("noise_squares", weight**2 * sent["noise"])
        for name, value in sent.items():
            share = weight * (sent["pairs"] if name.removesuffix(_VARIANCE) in _PAIRED else 1)
            # The variance of a mean of independent values: shares enter squared.
            self._add(name, (share**2 if name.endswith(_VARIANCE) else share) * value)
        given = reply.vectors.get(self.prefix + "gradient")
        if given is None:
            self.straight = self.straight and bool(sent["straight"])
            given = self.told.w - reply.vectors["w"] if self.straight else None
        if given is not None:
            self._spread(given, weight)

    def _spread(self, x: Tensor, weight: float) -> None:
        """Take x [d] into Σ p_i x_i and Σ p_i ‖x_i‖²."""
        self._add("lengths", weight * dot(x, x))
        if self.mean is None:
            self.mean = x.clone()
        else:
            self.mean.lerp_(x, weight / self.weight)

    def _add(self, name: str, value: float) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + value

    def mean_of(self, name: str) -> float:
        """Return a number's mean over the sites that told it; of a variance, that of the mean."""
        among = self.sums["pairs"] if name.removesuffix(_VARIANCE) in _PAIRED else self.weight
        return self.sums[name] / (among**2 if name.endswith(_VARIANCE) else among)

    def variance_of(self, x: Tensor) -> float:
        """Return Σ p_i ‖x_i - x‖² >= 0, x = Σ p_i x_i the mean."""
        return max(0.0, self.sums["lengths"] / self.weight - dot(x, x))

    def divergence(self) -> float:
        """Return ξ² of this round, of either sign, or a bound of it; see the module."""
        if not self.straight or self.mean is None:
            return self.mean_of("square")
        told = self.told
        noise = self.mean_of("noise") - self.sums["noise_squares"] / self.weight**2
        spread = self.variance_of(self.mean) / (told.learning_rate * told.steps) ** 2
        return spread - len(told.w) * noise / told.steps


def update_averages(before: Numbers, fold: Fold) -> dict[str, float]:
    """Return the averages after a round, with those before it: every round counts alike."""
    counts = {name: before.get(name, 0.0) for name in ("rounds", "pairs")}
    after = {**before, **counts, "rounds": counts["rounds"] + 1, "noise": fold.mean_of("noise")}
    now = {name: fold.mean_of(name) for name in ("length", "length_variance")}
    now["divergence"] = fold.divergence()
    if fold.sums["pairs"]:
        after["pairs"] += 1
        names = ("change", "distance", "change_variance")
        now |= {name: fold.mean_of(name) for name in names}
    for name, value in now.items():
        count = after["pairs" if name.removesuffix(_VARIANCE) in _PAIRED else "rounds"]
        old = before.get(name, 0.0)
        if name.endswith(_VARIANCE):
            after[name] = (old * (count - 1) ** 2 + value) / count**2
        else:
            after[name] = old + (value - old) / count
    return after


def raw(before: Numbers, fold: Fold) -> dict[str, float]:
    """Return the paper's: this round's exact numbers, or the last ones where a round has none.

    But ξ is the root of a mean square over sites, which one pass gives and which is no less than
    the paper's mean.
    """
    after = {"pairs": 0.0, **before, "noise": fold.mean_of("noise")}
    if fold.mean is not None and fold.sums["pairs"]:
        after |= {
            "pairs": after["pairs"] + 1,
            "change": fold.mean_of("smoothness") ** 2,
            "distance": 1.0,
            "length": fold.mean_of("lipschitz") ** 2,
            "divergence": fold.variance_of(fold.mean),
        }
    return after


def drift(numbers: Numbers, learning_rate: float, dimension: int) -> tau.Drift | None:
    """Return ρ, β and s by the averages, None where there is no clear estimate of them.

    Nor is there where they are not finite: no site's numbers can stop the server.
    """
    if not (_is_clear(numbers, "change") and _is_clear(numbers, "length")):
        return None
    distance, noise = numbers["distance"], numbers["noise"]
    if not (distance > 0 and noise >= 0):
        return None
    squares = numbers["change"] / distance, numbers["divergence"], noise
    if not all(map(math.isfinite, squares)):
        return None
    return tau.Drift(
        learning_rate=learning_rate,
        lipschitz=math.sqrt(numbers["length"]),
        smoothness=math.sqrt(squares[0]),
        spread=tau.gradient_spread(math.sqrt(max(0.0, squares[1])), dimension, math.sqrt(noise)),
    )


def _is_clear(numbers: Numbers, name: str) -> bool:
    value, variance = numbers.get(name, 0.0), numbers.get(name + _VARIANCE, 0.0)
    return variance >= 0 and CLEAR * math.sqrt(variance) < value < math.inf


def rounds_left(left: Numbers) -> tau.Allowed:
    """Return how many rounds of τ local iterations the communication budget allows.

    left: what round.py writes into the state, without its prefix.
    """
    rounds, seconds = left.get("rounds", UNLIMITED), left.get("seconds", math.inf)

    def rounds_of(steps: int) -> float:
        each = left.get("round_seconds", 0.0) + left.get("step_seconds", 0.0) * steps
        return rounds if not each > 0 else max(0.0, min(rounds, seconds / each))

    return rounds_of
