"""The number of local iterations, chosen anew each round under two budgets: ALI-DPFL's Algorithm 2.

Ling, Fu, Wang, Liu, Chen. ALI-DPFL: differentially private federated learning with adaptive local
iterations. arXiv 2308.10457. `Controller` goes around the functions of any algorithm that makes τ
local steps of length η. `site` has what a site computes, `server` the averages, `costs` what rounds
have cost, theory.tau the rule. In the server's state, under "control/":

steps         τ of the last round, 0 before the first
iterations    what the privacy budgets still allow; absent where nothing limits it
even          rounds whose τ was the even split, for want of a clear estimate
rounds, pairs rounds averaged over, and those of them in which gradients could be compared
change, distance, length, divergence, noise, ...: the averages, see server
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from fedpact.control import server, site
from fedpact.messages import Local, Reply, State, Task, join, split_state
from fedpact.privacy.oracle import Oracle, Range, ReplyBounds, Terms
from fedpact.theory import tau

STEPS_A_ROUND: Final = 5
"""R_c over the rounds where σ is calibrated and nobody gives R_c: the τ of fedprox and scaffold."""

CONTROL_PREFIX: Final = "control/"
_LEFT: Final = "left/"

InnerLocal = Callable[[Task, Oracle, State], Local]
InnerUpdate = Callable[[State, Iterable[Reply]], State]


class Ali(BaseModel):
    """How τ is chosen.

    kappa: κ > 0, the one control parameter; the larger, the more local work. Left out, it follows
    the estimates as 10 ρ², in units of their own. iterations: R_c, the
    local iterations of all rounds together; left out, 5 times the rounds where σ is
    calibrated, else the site whose budget allows least decides.
    most_local_steps: no round has more. estimator: "released", from gradients that were released
    anyway, at no cost; or "raw", the paper's exact numbers, which leave every site unprotected.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
    kappa: float | None = Field(default=None, gt=0)
    iterations: int | None = Field(default=None, ge=1)
    most_local_steps: int = Field(default=tau.MAX_LOCAL_STEPS, ge=1, le=tau.MAX_LOCAL_STEPS)
    estimator: Literal["released", "raw"] = "released"


@dataclass(frozen=True)
class ChosenTau:
    """τ of a round, 0 where the iterations are used up; even: for want of a clear estimate."""

    steps: int
    even: bool = False


_ATTEMPTS: Final = 3
"""How often a site may have been charged for the first round: twice it may die in it."""


@dataclass(frozen=True)
class Controller:
    """Chooses τ for an algorithm whose local steps have the length learning_rate, η > 0.

    opens: whether a round opens with an event beside its steps, which may count as one.
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
        """Return τ of the next round, 0 if nothing is left; without a state the most it can be."""
        return self.ali.most_local_steps if state is None else self.choose(state).steps

    def choose(self, state: State) -> ChosenTau:
        """Return the choice for the next round: a function of the state alone."""
        own, left, rest = _parts(state)
        limit = own.numbers.get("iterations", site.UNLIMITED)
        if limit < 1:
            return ChosenTau(0)
        if not own.numbers["steps"]:
            return ChosenTau(1)
        most = min(tau.longest(int(own.numbers["steps"])), self.ali.most_local_steps, int(limit))
        allowed = tau.allowed_iterations(limit, server.rounds_left(left.numbers))
        drift = server.drift(own.numbers, self.learning_rate, len(rest.vectors["w"]))
        if drift is None:
            return ChosenTau(tau.even_split(allowed, most), even=True)
        kappa = self.ali.kappa or server.KAPPA * drift.lipschitz**2
        return ChosenTau(tau.best_tau(drift, kappa, allowed, most))

    def task(self, state: State, inner: Callable[[State], State]) -> State:
        """Return what the sites are told: the algorithm's own, and τ as "local_steps"."""
        told = inner(_parts(state)[2])
        return State(told.vectors, {**told.numbers, "local_steps": self.choose(state).steps})

    def task_numbers(self, inner: Mapping[str, Range]) -> dict[str, Range]:
        """Return the numbers that a task may carry; inner: those of the algorithm itself."""
        return {**inner, "local_steps": Range(1, self.ali.most_local_steps, whole=True)}

    def bounds(self, task: Task, terms: Terms, inner: ReplyBounds) -> ReplyBounds:
        """See algorithms.Algorithm; inner: the algorithm's own.

        The first round's replies say how many steps a site's reservation allows, less at most what
        that round took; later ones cannot change it, see `update`.
        """
        d, reserved = len(task.vectors["w"]), terms.history(terms.steps)[terms.event]
        spent = _ATTEMPTS * (int(task.numbers["local_steps"]) + self.opens)
        least = max(0, reserved - spent) if task.round == 1 else 0
        if self.ali.estimator == "raw":
            sent, extra = site.raw_ranges(), {f"{CONTROL_PREFIX}gradient": math.inf}
        else:
            sent, extra = site.ranges(terms, d), dict[str, float]()
        sent["steps_left"] = Range(least, reserved)
        numbers = {CONTROL_PREFIX + name: bound for name, bound in sent.items()}
        return replace(
            inner, vectors={**inner.vectors, **extra}, numbers={**inner.numbers, **numbers}
        )

    def local(self, task: Task, oracle: Oracle, memory: State, inner: InnerLocal) -> Local:
        """Return the algorithm's reply, with the numbers that `server` needs."""
        own, rest = split_state(memory, CONTROL_PREFIX)
        watched = site.RecordingOracle(oracle)
        local = inner(task, watched, rest)
        w, model = task.vectors["w"], local.vectors.get("w")
        extra = dict[str, Tensor]()
        if self.ali.estimator == "raw":
            numbers, extra["gradient"] = site.raw_report(oracle, w, own.vectors.get("w"))
            keep = State({} if model is None else {"w": model})
        else:
            moved = None if model is None else w - model
            steps = int(task.numbers["local_steps"])
            numbers = site.build_report(watched, own, moved, self.learning_rate, steps)
            keep = site.build_memory(watched)
        numbers["steps_left"] = min(float(oracle.steps_left), site.UNLIMITED)
        sent = join(State(extra, numbers), CONTROL_PREFIX, State(local.vectors, local.numbers))
        return Local(sent.vectors, sent.numbers, join(keep, CONTROL_PREFIX, local.memory))

    def update(self, state: State, replies: Iterable[Reply], inner: InnerUpdate) -> State:
        """Return the algorithm's next state, and the controller's."""
        own, _, rest = _parts(state)
        choice = self.choose(state)
        told = server.SiteReport(rest.vectors["w"], choice.steps, self.learning_rate)
        fold = server.Fold(told, CONTROL_PREFIX)
        after = inner(rest, fold.through(replies))
        averages = server.raw if self.ali.estimator == "raw" else server.update_averages
        numbers = averages(own.numbers, fold)
        left = self._left(own, choice.steps, fold.least_left)
        if left < site.UNLIMITED / 2:
            numbers["iterations"] = left
        numbers |= {"steps": float(choice.steps), "even": own.numbers["even"] + choice.even}
        return join(State({}, numbers), CONTROL_PREFIX, after)

    def _left(self, own: State, steps: int, said: float) -> float:
        """Return the iterations that are left after a round of so many.

        said: by the site that has least. After the first round it is arithmetic: a site that says
        that it has less than a round takes has died in one, or lies. It runs out before the others,
        and does not end the run for them.
        """
        left = own.numbers.get("iterations", site.UNLIMITED) - steps
        if own.numbers["steps"]:
            said = max(said, left - self.opens)
        return min(left, said)


def _parts(state: State) -> tuple[State, State, State]:
    """Return the controller's own, what is left of the budgets, and the algorithm's."""
    own, rest = split_state(state, CONTROL_PREFIX)
    left, rest = split_state(rest, _LEFT)
    return own, left, rest
