"""What the server makes of the sites' numbers: ρ, β, ξ, averaged over sites and rounds, and then τ.

    β² = mean change / mean distance      ρ² = mean product      ξ² = mean divergence
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
from fedpact.messages import Numbers, Reply
from fedpact.theory import tau

CLEAR: Final = 2.0
_PAIRED: Final = ("change", "distance", "product")
_RAW: Final = ("lipschitz", "smoothness")
_VARIANCES: Final = ("change_variance", "product_variance")


@dataclass(frozen=True)
class Told:
    """A round as the sites were told of it: w [d], τ >= 1, η > 0."""

    w: Tensor
    steps: int
    learning_rate: float


@dataclass
class Fold:
    """Sums over the replies of a round, which pass through one at a time.

    prefix: of the numbers' and vectors' names in a reply.
    """

    told: Told
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
        sent = {name.removeprefix(self.prefix): x for name, x in reply.numbers.items()}
        self.weight += weight
        self.least_left = min(self.least_left, sent["steps_left"])
        self._add("noise", weight * sent["noise"])
        self._add("noise_squares", weight**2 * sent["noise"])
        paired = weight * sent["pairs"]
        self._add("paired", paired)
        for name, value in sent.items():
            if name in (*_RAW, *_PAIRED):
                self._add(name, paired * value)
            elif name in _VARIANCES:
                self._add(name, paired**2 * value)
        raw = reply.vectors.get(self.prefix + "gradient")
        if raw is None:
            self._add("square", weight * sent["square"])
            self.straight = self.straight and bool(sent["straight"])
            raw = self.told.w - reply.vectors["w"] if self.straight else None
        if raw is not None:
            self._spread(raw, weight)

    def _spread(self, x: Tensor, weight: float) -> None:
        """Take x [d] into Σ p_i x_i and Σ p_i ‖x_i‖²."""
        self._add("lengths", weight * dot(x, x))
        if self.mean is None:
            self.mean = x.clone()
        else:
            self.mean.lerp_(x, weight / self.weight)

    def _add(self, name: str, value: float) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + value

    @property
    def noise(self) -> float:
        """Σ p_i v_i."""
        return self.sums["noise"] / self.weight

    def variance_of(self, x: Tensor) -> float:
        """Return Σ p_i ‖x_i - x‖² >= 0, x = Σ p_i x_i the mean."""
        return max(0.0, self.sums["lengths"] / self.weight - dot(x, x))

    def divergence(self) -> float:
        """Return ξ² of this round, of either sign, or a bound of it; see the module."""
        if not self.straight or self.mean is None:
            return self.sums["square"] / self.weight
        told = self.told
        noise = self.noise - self.sums["noise_squares"] / self.weight**2
        spread = self.variance_of(self.mean) / (told.learning_rate * told.steps) ** 2
        return spread - len(told.w) * noise / told.steps


def released(before: Numbers, fold: Fold) -> dict[str, float]:
    """Return the averages after a round, with those before it: every round counts alike."""
    rounds = before.get("rounds", 0) + 1
    after = {
        "rounds": rounds,
        "pairs": before.get("pairs", 0),
        "noise": fold.noise,
        "divergence": _averaged(before, "divergence", fold.divergence(), rounds),
    }
    names = [name for name in (*_PAIRED, *_VARIANCES) if name in before]
    after |= {name: before[name] for name in names}
    if not fold.sums["paired"]:
        return after
    after["pairs"] = pairs = after["pairs"] + 1
    for name in _PAIRED:
        value = fold.sums[name] / fold.sums["paired"]
        after[name] = _averaged(before, name, value, pairs)
    for name in _VARIANCES:
        # The variance of a mean of independent values: shares enter squared.
        value = fold.sums[name] / fold.sums["paired"] ** 2
        after[name] = (before.get(name, 0.0) * (pairs - 1) ** 2 + value) / pairs**2
    return after


def raw(before: Numbers, fold: Fold) -> dict[str, float]:
    """Return the paper's: this round's exact numbers, or the last ones where a round has none."""
    after = {"pairs": 0.0, **before}
    if fold.mean is not None and fold.sums["paired"]:
        means = {
            name: fold.sums[name] / fold.sums["paired"] for name in ("lipschitz", "smoothness")
        }
        after |= {
            "pairs": after["pairs"] + 1,
            "change": means["smoothness"] ** 2,
            "distance": 1.0,
            "product": means["lipschitz"] ** 2,
            "divergence": fold.variance_of(fold.mean),
        }
    return {**after, "noise": fold.noise}


def drift(numbers: Numbers, learning_rate: float, dimension: int) -> tau.Drift | None:
    """Return ρ, β and s by the averages, None where there is no clear estimate of them."""
    if not numbers.get("pairs"):
        return None
    for name in ("change", "product"):
        deviation = math.sqrt(numbers.get(f"{name}_variance", 0.0))
        if not numbers[name] > CLEAR * deviation:
            return None
    return tau.Drift(
        learning_rate=learning_rate,
        lipschitz=math.sqrt(numbers["product"]),
        smoothness=math.sqrt(numbers["change"] / numbers["distance"]),
        spread=tau.spread(
            math.sqrt(max(0.0, numbers["divergence"])), dimension, math.sqrt(numbers["noise"])
        ),
    )


def rounds_left(left: Numbers) -> tau.Allowed:
    """Return how many rounds of τ local iterations the communication budget allows.

    left: what round.py writes into the state, without its prefix.
    """
    rounds, seconds = left.get("rounds", UNLIMITED), left.get("seconds", math.inf)

    def rounds_of(steps: int) -> float:
        each = left.get("round_seconds", 0.0) + left.get("step_seconds", 0.0) * steps
        return rounds if not each > 0 else max(0.0, min(rounds, seconds / each))

    return rounds_of


def _averaged(before: Numbers, name: str, value: float, count: float) -> float:
    old = before.get(name, 0.0)
    return old + (value - old) / count
