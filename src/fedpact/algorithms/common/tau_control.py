"""ALI-DPFL's controller: choosing τ for a budget, its estimators, and the server's averages.

    s       = ξ + 2 sqrt(d) σC/B                    (Lemma 3; the paper's factor 2 could be 1)
    h(τ)    = (s/β)((1 + ηβ)^τ - 1) - ηsτ           (11) corrected: docs/notes/errata.md, A1
            = ηs Σ_{j<τ} ((1 + ηβ)^j - 1)           the same, without a difference
    κ       = φλ²
    T(τ)    = min(iterations left, τ · rounds left)
    G(τ)    = 1/(φ T(τ) (η - ρ h(τ)/(τκ))) + sqrt(3)/3                                       (12)
    τ*      = argmin G = argmax T(τ) (η - ρ h(τ)/(τκ))

ρ, β, ξ are the loss's Lipschitz constant, its smoothness and the sites' gradient divergence, η is
the step size, and κ the only control parameter: a larger κ means more local work. κ → ∞ spends both
budgets evenly, a small κ gives τ = 1, and 1 <= τ* <= ceil(R_c/R_s), the ratio of what is left. G
only ranks values of τ. It is not a bound: its proof omits the noise of one step and has two
inequalities in the wrong direction (docs/notes/errata.md, A2, A6).

    β² = mean change / mean distance      ρ² = mean length       ξ² = mean divergence
    s  = ξ + 2 sqrt(d) σC/B, with (σC/B)² the mean over sites of the noise's variance

Means over sites have the weights p_i. Rounds count equally, as a single round is very noisy (see
tau_site). Means are clipped at 0 only when used, so that errors of both signs cancel. For the
divergence of a round, let u_i = (w - w_i)/(ητ) be the mean of site i's noisy gradients under plain
SGD, v_i the noise's variance and u = Σ p_i u_i. Then

    Σ p_i ‖u_i - u‖² = Σ p_i ‖u_i‖² - ‖u‖²
    less its noise    Σ p_i (d/τ)[(1 - p_i)² v_i + Σ_{j≠i} p_j² v_j] = (d/τ)(Σ p_i v_i - Σ p_i² v_i)

As a step's noise moves the points of the following steps, this is too small, for Hessians H_i, by
Σ (p_i - p_i²)(v_i/τ)(d - mean over k < τ of tr (I - ηH_i)^(2k)), about ηv (1 - 1/τ) tr H. For other
solvers, the sites' squares give a bound: Σ p_i ‖mean g‖² >= ξ².

An estimate is clear if it is at least CLEAR standard deviations of its noise above 0. Without a
clear β² and ρ², τ is the even split of the budgets.

Ling, Fu, Wang, Liu, Chen. ALI-DPFL: differentially private federated learning with adaptive local
iterations. arXiv 2308.10457. `Controller` wraps any algorithm that makes τ local steps of size η;
tau_site has what a site computes. In the server's state, under "control/":

steps         τ of the last round, 0 before the first
iterations    how many the privacy budgets still allow; absent without a limit
even          the number of rounds with an even split, for lack of a clear estimate
rounds, pairs rounds averaged over, and those of them in which gradients could be compared
change, distance, length, divergence, noise, ...: the averages
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field
from torch import Tensor

from fedpact.algorithms.common import tau_site
from fedpact.algorithms.common.tau_site import UNLIMITED, dot
from fedpact.common.check import positive
from fedpact.common.configuration import FROZEN
from fedpact.common.messages import Local, Numbers, Reply, State, Task, join, split_state
from fedpact.privacy.oracle import Oracle, Range, Terms

Vector = NDArray[np.float64]
Allowed = Callable[[int], float]
"""T(τ): the total of iterations that are left if rounds have τ local iterations."""

MAX_LOCAL_STEPS: Final = 100
"""The most local iterations of a round; Algorithm 2 of the paper."""


@dataclass(frozen=True)
class Drift:
    """The quantities that determine client drift: η > 0, ρ >= 0, β >= 0, s >= 0.

    >>> Drift(learning_rate=0.5, lipschitz=1.0, smoothness=0.1, spread=1.0).h(3).round(5).tolist()
    [0.0, 0.025, 0.07625]
    """

    learning_rate: float
    lipschitz: float
    smoothness: float
    spread: float

    def h(self, most: int) -> Vector:
        """Return h(1), ..., h(most), each >= 0 and h(1) = 0; inf where it exceeds float64."""
        if self.spread == 0:
            return np.zeros(most)
        growth = math.log1p(self.learning_rate * self.smoothness)
        with np.errstate(over="ignore"):
            terms = np.expm1(growth * np.arange(most))
            return self.learning_rate * self.spread * np.cumsum(terms)

    def cost(self, most: int) -> Vector:
        """Return ρ h(τ)/τ for τ = 1, ..., most; the bracket is η minus this over κ."""
        if self.lipschitz == 0:
            return np.zeros(most)
        with np.errstate(over="ignore"):
            return self.lipschitz * self.h(most) / np.arange(1, most + 1)


def gradient_spread(divergence: float, dimension: int, noise: float) -> float:
    """Return s = ξ + 2 sqrt(d) σC/B.

    divergence: ξ >= 0. noise: σC/B >= 0, that of one local gradient in each of d coordinates.
    """
    return divergence + 2 * math.sqrt(dimension) * noise


def allowed_iterations(iterations_left: float, rounds_left: float | Allowed) -> Allowed:
    """Return T(τ) = min(iterations_left, τ · rounds_left).

    iterations_left: R_c >= 0, by the privacy budgets. rounds_left: R_s >= 0, by the communication
    budget; a function of τ if a round's cost depends on it, as with seconds.
    """

    def iterations(tau: int) -> float:
        rounds = rounds_left(tau) if callable(rounds_left) else rounds_left
        return min(iterations_left, tau * rounds)

    return iterations


def even_split(iterations: Allowed, most: int) -> int:
    """Return the least τ <= most with the largest T(τ): ceil(R_c/R_s), or `most` if that is less.

    It is used without estimates: both budgets end together. 1 if nothing is left.

    >>> even_split(allowed_iterations(1585, 317), most=100)
    5
    >>> even_split(allowed_iterations(1585, 317), most=4)
    4
    """
    return int(np.argmax(_totals(iterations, most))) + 1


def best_tau(drift: Drift, kappa: float, iterations: Allowed, most: int) -> int:
    """Return τ*, the argmax of T(τ)(η - ρ h(τ)/(τκ)) over 1..most with a positive bracket.

    kappa: κ > 0. iterations: T(τ) >= 0, see `allowed_iterations`. Of equal values the least τ; 1 if
    nothing is left.

    >>> drift = Drift(learning_rate=0.5, lipschitz=1.0, smoothness=0.1, spread=1.0)
    >>> [best_tau(drift, kappa, allowed_iterations(1585, 317), 100) for kappa in (0.03, 0.12,
    ... 100.0)]
    [1, 3, 5]
    """
    totals = _totals(iterations, most)
    with np.errstate(over="ignore"):
        brackets = drift.learning_rate - drift.cost(most) / kappa
    return int(np.argmax(np.where(brackets > 0, totals * np.maximum(brackets, 0), 0))) + 1


def tau_by_kappa(drift: Drift, iterations: Allowed, most: int) -> list[tuple[int, float]]:
    """Return every τ that is τ* for some κ, the largest first, with the least κ that gives it.

    T(τ)(η - ρ h(τ)/(τκ)) is a line in 1/κ for each τ, and τ* the highest line, found exactly.

    >>> drift = Drift(learning_rate=0.5, lipschitz=1.0, smoothness=0.1, spread=1.0)
    >>> [(tau, round(k, 3)) for tau, k in tau_by_kappa(drift, allowed_iterations(1585, 317), 100)]
    [(5, 0.216), (4, 0.158), (3, 0.103), (2, 0.05), (1, 0.0)]
    """
    totals = _totals(iterations, most)
    with np.errstate(over="ignore"):
        falls = np.where(totals > 0, drift.cost(most), 0) * totals
    # Heights at 1/κ = 0, and slopes downwards; an infinite slope is never chosen at a finite κ.
    usable = np.flatnonzero(np.isfinite(falls))
    heights, slopes = drift.learning_rate * totals[usable], falls[usable]
    at = int(np.lexsort((slopes, -heights))[0])
    found: list[tuple[int, float]] = []
    while True:
        flatter = np.flatnonzero(slopes < slopes[at])
        if not flatter.size:
            return [*found, (int(usable[at]) + 1, 0.0)]
        crossings = (heights[at] - heights[flatter]) / (slopes[at] - slopes[flatter])
        # If several lines cross at one point, the flattest is the highest afterwards.
        following = int(flatter[np.lexsort((slopes[flatter], crossings))[0]])
        first = float(crossings.min())
        if first > 0:
            found.append((int(usable[at]) + 1, 1 / first))
        at = following


def _totals(iterations: Allowed, most: int) -> Vector:
    return np.array([iterations(t) for t in range(1, most + 1)], dtype=np.float64)


CONTROL_PREFIX: Final = "control/"
_LEFT: Final = "left/"

CLEAR: Final = 2.0
KAPPA: Final = 10.0
"""The default κ over ρ²."""

_PAIRED: Final = ("change", "distance", "lipschitz", "smoothness")
"""Numbers that only sites with two points to compare send."""

_VARIANCE: Final = "_variance"


@dataclass
class Fold:
    """What the controller keeps of a round's replies, which pass through one at a time.

    w [d], steps τ >= 1, learning_rate η > 0: of the round's task. sent: each site's weight and
    numbers. weight: the sum of the weights. mean, lengths: Σ p_i x_i [d] and Σ weight ‖x_i‖² of the
    exact gradients x_i, or of x_i = w - w_i as long as all sites made plain SGD steps (`straight`).
    """

    w: Tensor
    steps: int
    learning_rate: float
    weight: float = 0.0
    sent: list[tuple[float, Numbers]] = field(default_factory=list[tuple[float, Numbers]])
    straight: bool = True
    mean: Tensor | None = None
    lengths: float = 0.0

    def through(self, replies: Iterable[Reply]) -> Iterator[Reply]:
        """Yield the replies, counting each."""
        for reply in replies:
            weight = positive(weight=reply.weight)
            numbers = split_state(State(numbers=reply.numbers), CONTROL_PREFIX)[0].numbers
            self.sent.append((weight, numbers))
            self.weight += weight
            x = reply.vectors.get(CONTROL_PREFIX + "gradient")
            if x is None:
                self.straight = self.straight and bool(numbers["straight"])
                x = self.w - reply.vectors["w"] if self.straight else None
            if x is not None:
                self.lengths += weight * dot(x, x)
                share = weight / self.weight
                self.mean = x.clone() if self.mean is None else self.mean.lerp_(x, share)
            yield reply

    @property
    def compared(self) -> bool:
        """Whether a site had two points to compare."""
        return any(numbers["pairs"] for _, numbers in self.sent)

    @property
    def least_left(self) -> float:
        """The fewest iterations that any site has left."""
        return min([UNLIMITED, *(numbers["steps_left"] for _, numbers in self.sent)])

    def mean_of(self, name: str) -> float:
        """Return a number's mean over the sites that sent it; a variance becomes the mean's."""
        paired = name.removesuffix(_VARIANCE) in _PAIRED
        # The variance of a mean of independent values: shares enter squared.
        power = 2 if name.endswith(_VARIANCE) else 1
        shares = [weight * (numbers["pairs"] if paired else 1) for weight, numbers in self.sent]
        each = zip(shares, self.sent, strict=True)
        return sum(share**power * sent[name] for share, (_, sent) in each) / sum(shares) ** power

    def spread(self) -> float:
        """Return Σ p_i ‖x_i - x‖² >= 0, x = Σ p_i x_i the mean; 0 without one."""
        if self.mean is None:
            return 0.0
        return max(0.0, self.lengths / self.weight - dot(self.mean, self.mean))

    def divergence(self) -> float:
        """Return ξ² of this round, of either sign, or a bound on it; see the module."""
        if not self.straight or self.mean is None:
            return self.mean_of("square")
        squares = sum(weight**2 * numbers["noise"] for weight, numbers in self.sent)
        noise = self.mean_of("noise") - squares / self.weight**2
        spread = self.spread() / (self.learning_rate * self.steps) ** 2
        return spread - len(self.w) * noise / self.steps


def update_averages(before: Numbers, fold: Fold) -> dict[str, float]:
    """Return the averages including this round; all rounds count equally."""
    counts = {name: before.get(name, 0.0) for name in ("rounds", "pairs")}
    after = {**before, **counts, "rounds": counts["rounds"] + 1, "noise": fold.mean_of("noise")}
    now = {name: fold.mean_of(name) for name in ("length", "length_variance")}
    now["divergence"] = fold.divergence()
    if fold.compared:
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
    """Return the paper's estimates: exact numbers of this round, or the last ones if it has none.

    Different from the paper, ξ is a root mean square over sites, which needs one pass and is at
    least the paper's mean.
    """
    after = {"pairs": 0.0, **before, "noise": fold.mean_of("noise")}
    if fold.compared:
        after |= {
            "pairs": after["pairs"] + 1,
            "change": fold.mean_of("smoothness") ** 2,
            "distance": 1.0,
            "length": fold.mean_of("lipschitz") ** 2,
            "divergence": fold.spread(),
        }
    return after


def drift(numbers: Numbers, learning_rate: float, dimension: int) -> Drift | None:
    """Return ρ, β and s from the averages, None without clear and finite estimates.

    So no site's numbers can stop the server.
    """
    if not (_is_clear(numbers, "change") and _is_clear(numbers, "length")):
        return None
    distance, noise = numbers["distance"], numbers["noise"]
    if not (distance > 0 and noise >= 0):
        return None
    squares = numbers["change"] / distance, numbers["divergence"], noise
    if not all(map(math.isfinite, squares)):
        return None
    return Drift(
        learning_rate=learning_rate,
        lipschitz=math.sqrt(numbers["length"]),
        smoothness=math.sqrt(squares[0]),
        spread=gradient_spread(math.sqrt(max(0.0, squares[1])), dimension, math.sqrt(noise)),
    )


def _is_clear(numbers: Numbers, name: str) -> bool:
    value, variance = numbers.get(name, 0.0), numbers.get(name + _VARIANCE, 0.0)
    return variance >= 0 and CLEAR * math.sqrt(variance) < value < math.inf


def rounds_left(left: Numbers) -> Allowed:
    """Return how many rounds of τ local iterations the communication budget allows.

    left: the numbers that rounds.py writes to the state, without their prefix.
    """
    rounds, seconds = left.get("rounds", UNLIMITED), left.get("seconds", math.inf)

    def rounds_of(steps: int) -> float:
        each = left.get("round_seconds", 0.0) + left.get("step_seconds", 0.0) * steps
        return rounds if not each > 0 else max(0.0, min(rounds, seconds / each))

    return rounds_of


STEPS_A_ROUND: Final = 5
"""The default R_c per round if σ is calibrated: the default τ of fedprox and scaffold."""

InnerLocal = Callable[[Task, Oracle, State], Local]
InnerUpdate = Callable[[State, Iterable[Reply]], State]


class Ali(BaseModel):
    """How τ is chosen."""

    model_config = FROZEN
    kappa: float | None = Field(default=None, gt=0)
    """κ > 0, the control parameter; a larger κ means more local work. By default 10 ρ², from the
    estimates."""
    iterations: int | None = Field(default=None, ge=1)
    """R_c, the local iterations of all rounds together; by default 5 times the rounds if σ is
    calibrated, else as many as the site with the smallest budget allows."""
    most_local_steps: int = Field(default=MAX_LOCAL_STEPS, ge=1, le=MAX_LOCAL_STEPS)
    """The most local iterations of a round."""
    estimator: Literal["released", "raw"] = "released"
    """"released": from gradients that are released anyway, at no cost. "raw": from the paper's
    exact numbers, which leave every site unprotected."""


@dataclass(frozen=True)
class ChosenTau:
    """τ of a round, 0 if the iterations are used up. even: chosen without clear estimates."""

    steps: int
    even: bool = False


_ATTEMPTS: Final = 3
"""How often a site may have been charged for the first round: it may crash in it twice."""


@dataclass(frozen=True)
class Controller:
    """Chooses τ for an algorithm with local steps of size learning_rate, η > 0.

    opens: whether a round has an opening event, which may count as one more step.
    """

    ali: Ali
    learning_rate: float
    opens: bool = False

    def init(self, rest: State) -> State:
        """Return the first state, around the algorithm's own."""
        numbers = {"steps": 0.0, "even": 0.0}
        if self.ali.iterations is not None:
            numbers["iterations"] = float(self.ali.iterations)
        return join(State({}, numbers), CONTROL_PREFIX, rest)

    def steps(self, state: State | None) -> int:
        """Return τ of the next round, 0 if nothing is left; without a state, its maximum."""
        return self.ali.most_local_steps if state is None else self.choose(state).steps

    def choose(self, state: State) -> ChosenTau:
        """Return the choice for the next round, a function of the state only."""
        own, left, rest = _parts(state)
        limit = own.numbers.get("iterations", tau_site.UNLIMITED)
        if limit < 1:
            return ChosenTau(0)
        if not own.numbers["steps"]:
            return ChosenTau(1)
        most = min(2 * int(own.numbers["steps"]), self.ali.most_local_steps, int(limit))
        allowed = allowed_iterations(limit, rounds_left(left.numbers))
        drift_ = drift(own.numbers, self.learning_rate, len(rest.vectors["w"]))
        if drift_ is None:
            return ChosenTau(even_split(allowed, most), even=True)
        kappa = self.ali.kappa or KAPPA * drift_.lipschitz**2
        return ChosenTau(best_tau(drift_, kappa, allowed, most))

    def task(self, state: State, inner: Callable[[State], State]) -> State:
        """Return the algorithm's task, with τ as "local_steps"."""
        told = inner(_parts(state)[2])
        return State(told.vectors, {**told.numbers, "local_steps": self.choose(state).steps})

    @property
    def task_numbers(self) -> dict[str, Range]:
        """The numbers that it adds to a task, with their ranges."""
        return {"local_steps": Range(1, self.ali.most_local_steps, whole=True)}

    def public_numbers(self, task: Task, terms: Terms) -> dict[str, Range]:
        """Return the range of steps that a site's reservation allows after the first round.

        Later replies cannot lower it; see `_iterations_left`.
        """
        if task.round != 1:
            return {}
        reserved = terms.history(terms.steps)[terms.event]
        spent = _ATTEMPTS * (int(task.numbers["local_steps"]) + self.opens)
        return {f"{CONTROL_PREFIX}steps_left": Range(max(0, reserved - spent), reserved)}

    def local(self, task: Task, oracle: Oracle, memory: State, inner: InnerLocal) -> Local:
        """Return the algorithm's reply, with the numbers that `update` needs."""
        own, rest = split_state(memory, CONTROL_PREFIX)
        watched = tau_site.RecordingOracle(oracle)
        local = inner(task, watched, rest)
        w, model = task.vectors["w"], local.vectors.get("w")
        extra = dict[str, Tensor]()
        if self.ali.estimator == "raw":
            numbers, extra["gradient"] = tau_site.raw_report(oracle, w, own.vectors.get("w"))
            keep = State({} if model is None else {"w": model})
        else:
            moved = None if model is None else w - model
            steps = int(task.numbers["local_steps"])
            numbers = tau_site.build_report(watched, own, moved, self.learning_rate, steps)
            keep = tau_site.build_memory(watched)
        numbers["steps_left"] = min(float(oracle.steps_left), tau_site.UNLIMITED)
        sent = join(State(extra, numbers), CONTROL_PREFIX, State(local.vectors, local.numbers))
        return Local(sent.vectors, sent.numbers, join(keep, CONTROL_PREFIX, local.memory))

    def update(self, state: State, replies: Iterable[Reply], inner: InnerUpdate) -> State:
        """Return the algorithm's next state, and the controller's."""
        own, _, rest = _parts(state)
        choice = self.choose(state)
        fold = Fold(rest.vectors["w"], choice.steps, self.learning_rate)
        after = inner(rest, fold.through(replies))
        averages = raw if self.ali.estimator == "raw" else update_averages
        numbers = averages(own.numbers, fold)
        left = self._iterations_left(own, choice.steps, fold.least_left)
        if left < tau_site.UNLIMITED / 2:
            numbers["iterations"] = left
        numbers |= {"steps": float(choice.steps), "even": own.numbers["even"] + choice.even}
        return join(State({}, numbers), CONTROL_PREFIX, after)

    def _iterations_left(self, own: State, steps: int, said: float) -> float:
        """Return the iterations that are left after a round of `steps`.

        said: the minimum that any site reports. After the first round it only counts down: a site
        that reports less has crashed in a round, or lies. It runs out before the others, but does
        not end the run for them.
        """
        left = own.numbers.get("iterations", tau_site.UNLIMITED) - steps
        if own.numbers["steps"]:
            said = max(said, left - self.opens)
        return min(left, said)


def _parts(state: State) -> tuple[State, State, State]:
    """Return the controller's part, what is left of the budgets, and the algorithm's part."""
    own, rest = split_state(state, CONTROL_PREFIX)
    left, rest = split_state(rest, _LEFT)
    return own, left, rest
