"""Fairness and control of τ around any algorithm: FedFDP's weights and loss, ALI-DPFL's controller.

Fairness goes around any solver of one gradient a step (FedFDP, arXiv 2402.16028).

Each record has weight 1 + λ (ℓ_j - F), clamped within its clip. On the round's last batch the site
also releases its loss at the model it sends. The solver itself does not change: around fedavg this
is fedfdp. Under "fair/" there are F, in the server's state and the reply, and C_l, in the site's
memory, or in the server's state if all share it (algorithms.common.fairness.FairRelease).

The controller chooses τ in every round, around any algorithm with local steps. Around fedavg this
is ali_dpfl, bit for bit. The algorithm's own local_steps has no effect. If a solver is not plain
SGD, so that w - w_i is not η Σ g, its site notices and sends a bound on its divergence instead.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Literal, Self, TypeVar

from pydantic import Field, model_validator
from torch import Tensor

from fedpact.algorithms import BaseSettings
from fedpact.algorithms.common.fairness import FairOracle, FairRelease, WeightRule, weighting
from fedpact.algorithms.common.steps import weighted_mean
from fedpact.algorithms.common.tau_control import Ali, Controller
from fedpact.algorithms.wrappers.base import Method, MethodWrapper
from fedpact.common.configuration import FROZEN
from fedpact.common.errors import PlanError
from fedpact.common.messages import Local, Reply, State, Task, join, split_state
from fedpact.privacy.oracle import Oracle, Range, Terms

_PREFIX = "fair/"

V = TypeVar("V")


class FairnessSettings(FairRelease):
    """Weighting of records by loss around any algorithm, and how losses are released."""

    model_config = FROZEN
    weight: float = Field(default=0.0, ge=0)
    """λ; 0 leaves the algorithm as it is."""
    weight_rule: WeightRule = "fixed"
    """"fixed" gives a record the weight 1 + λ (ℓ - F), with its loss ℓ and the round's F;
    "relative" 1 + λ (ℓ/F - 1)."""


class FairMethod(MethodWrapper):
    """A method whose sites weight their records by loss; its replies have "w"."""

    prefix = _PREFIX

    def __init__(self, inner: Method, fairness: FairnessSettings) -> None:
        super().__init__(
            inner,
            channels={**inner.facts.channels, **fairness.loss_channels},
            task_numbers={**inner.facts.task_numbers, **_add_prefix(fairness.told)},
            weighs_records=True,
            needs_own_noise=inner.facts.needs_own_noise or fairness.why_own_noise,
        )
        self._fairness = fairness

    def init(self, w: Tensor) -> State:
        return join(State(numbers=self._fairness.first), _PREFIX, self.inner.init(w))

    def task(self, state: State) -> State:
        own, rest = split_state(state, _PREFIX)
        return join(own, _PREFIX, self.inner.task(rest))

    def local(self, task: Task, oracle: Oracle, memory: State) -> Local:
        fairness, (own, rest) = self._fairness, split_state(memory, _PREFIX)
        told, _ = split_state(State(numbers=task.numbers), _PREFIX)
        reference = told.numbers.get("loss", math.nan)
        weights = weighting(fairness.weight_rule, fairness.weight, reference)
        fair = FairOracle(oracle, weights, tuple(fairness.loss_channels))
        local = self.inner.local(task, fair, rest)
        told = State(task.vectors, told.numbers)
        sent, kept = fairness.local(
            fair.last_batch, told, self.model_of(local, "fairness"), own.numbers
        )
        memory = join(kept, _PREFIX, local.memory)
        return Local(local.vectors, {**local.numbers, **_add_prefix(sent)}, memory)

    def update(self, state: State, replies: Iterable[Reply]) -> State:
        own, rest = split_state(state, _PREFIX)
        sent = list[Reply]()

        def seen() -> Iterator[Reply]:
            for reply in replies:
                # Without its vectors, so that one of these is held at a time.
                sent.append(replace(reply, vectors={}))
                yield reply

        after = self.inner.update(rest, seen())
        names = [_PREFIX + name for name in self._fairness.sent]
        means, _ = split_state(weighted_mean(sent, vectors=(), numbers=names), _PREFIX)
        numbers = self._fairness.update(own.numbers, means.numbers)
        return join(State(numbers=numbers), _PREFIX, after)


def _add_prefix(values: Mapping[str, V]) -> dict[str, V]:
    return {_PREFIX + name: value for name, value in values.items()}


class ControlSettings(Ali):
    """How τ, the number of local iterations of a round, is chosen."""

    kind: Literal["fixed", "ali"] = "fixed"
    """"fixed" leaves τ to the algorithm; "ali" chooses it in every round, as ALI-DPFL does."""

    @model_validator(mode="after")
    def _check_used(self) -> Self:
        given = self.model_dump(exclude={"kind"}, exclude_defaults=True)
        if self.kind == "fixed" and given:
            raise ValueError(
                f'{", ".join(given)} with kind = "fixed", which does not use it: set '
                'control.kind = "ali", or leave it out'
            )
        return self


class Controlled(MethodWrapper):
    """A method whose τ is chosen by a controller. Raises PlanError: no local steps, or two
    controllers."""

    def __init__(self, inner: Method, ali: Ali) -> None:
        self._controller = Controller(ali, _step_size(inner), inner.facts.opening is not None)
        super().__init__(
            inner,
            task_numbers={**inner.facts.task_numbers, **self._controller.task_numbers},
            controlled=True,
            iterations=ali.iterations,
            unprotected=inner.facts.unprotected or ali.estimator == "raw",
            needs_all_sites="[control]: τ depends on the remaining budget of every site, and its "
            "estimates need all of them",
        )

    def steps(self, state: State | None = None) -> int:
        return self._controller.steps(state)

    def init(self, w: Tensor) -> State:
        return self._controller.init(self.inner.init(w))

    def task(self, state: State) -> State:
        return self._controller.task(state, self.inner.task)

    def public_numbers(self, task: Task, terms: Terms) -> Mapping[str, Range]:
        own = self._controller.public_numbers(task, terms)
        return {**self.inner.public_numbers(task, terms), **own}

    def local(self, task: Task, oracle: Oracle, memory: State) -> Local:
        return self._controller.local(task, oracle, memory, self.inner.local)

    def update(self, state: State, replies: Iterable[Reply]) -> State:
        return self._controller.update(state, replies, self.inner.update)


def _step_size(inner: Method) -> float:
    settings: BaseSettings = inner.settings
    rate = settings.step_size
    if inner.facts.controlled or rate is None or not hasattr(settings, "local_steps"):
        raise PlanError(
            f'control.kind = "ali" with algorithm = {inner.name!r}: expected an algorithm with '
            "local_steps and a learning_rate of its own; choose another, or leave [control] out"
        )
    if "local_steps" in settings.model_fields_set:
        raise PlanError(
            f'settings.local_steps = {settings.local_steps} with control.kind = "ali", which '  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
            "chooses τ: leave it out; control.most_local_steps limits τ"
        )
    return float(rate)
