"""Choosing τ in every round, around any algorithm with local steps: ALI-DPFL's controller.

Around fedavg this is ali_dpfl, bit for bit. The algorithm's own local_steps has no effect. If a
solver is not plain SGD, so that w - w_i is not η Σ g, its site notices and sends a bound on its
divergence instead.
"""

from collections.abc import Iterable, Mapping
from typing import Literal, Self

from pydantic import model_validator
from torch import Tensor

from fedpact.algorithms import BaseSettings
from fedpact.algorithms.common.tau_control import Ali, Controller
from fedpact.algorithms.wrappers.base import Method, MethodWrapper
from fedpact.common.errors import PlanError
from fedpact.common.messages import Local, Reply, State, Task
from fedpact.privacy.oracle import Oracle, Range, Terms


class ControlSettings(Ali):
    """How τ, the number of local iterations of a round, is chosen."""

    kind: Literal["fixed", "ali"] = "fixed"
    """"fixed" leaves τ to the algorithm; "ali" chooses it in every round, as ALI-DPFL does."""

    @model_validator(mode="after")
    def _used(self) -> Self:
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
