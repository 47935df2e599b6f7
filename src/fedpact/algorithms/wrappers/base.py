"""An algorithm with its settings: what the two sides of the wire carry out.

`bound` makes one of an algorithm's file. What is independent of the algorithm goes around it: each
wrapper is an `MethodWrapper` that changes what passes through it, and keeps numbers and vectors of
its own in the server's state and the site's memory under a prefix, "server/momentum".
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from fedpact import algorithms
from fedpact.algorithms import BaseSettings, Summed
from fedpact.common.messages import Local, Reply, State, Task, Vectors, join, split_state
from fedpact.privacy.oracle import Opening, Oracle, Range, ReplyBounds, Terms

__all__ = ["Method", "MethodWrapper", "join", "split_state"]


class Method:
    """An algorithm's functions (algorithms.Algorithm) with the settings bound."""

    def __init__(self, name: str, settings: BaseSettings) -> None:
        self.name, self.settings = name, settings
        self._algorithm = algorithms.load(name)

    @property
    def channels(self) -> Mapping[str, float]:
        """What a batch releases: channel -> noise multiplier relative to the gradient's."""
        return self._algorithm.channels(self.settings)

    @property
    def opening(self) -> Opening | None:
        """What opens a round beside the batches, or None."""
        return self.settings.opening

    @property
    def weighs_records(self) -> bool:
        """Whether records of a batch get unlike weights."""
        return self.settings.weighs_records

    @property
    def unprotected(self) -> bool:
        """Whether exact numbers leave the sites, so that no run with it is private."""
        return self.settings.unprotected

    @property
    def controlled(self) -> bool:
        """Whether τ follows what is left of the budgets, which the loop then writes to the state.

        See rounds.py for the numbers' names.
        """
        return self.settings.controlled

    @property
    def opens_run(self) -> bool:
        """Whether sites release something before the first round, in round 0."""
        return False

    @property
    def iterations(self) -> int | None:
        """Of a controlled τ: the local iterations of all rounds together, where they are given."""
        return self.settings.total_iterations

    @property
    def coded(self) -> bool:
        """Whether a reply's vectors are blocks of codes, as long as they came out."""
        return False

    @property
    def units(self) -> float:
        """The deviation of releases' noise in units of a coarse grid (Terms.grid), or 0."""
        return 0.0

    @property
    def summed(self) -> Summed:
        """What the update takes from single replies, where it is one weighted mean of them."""
        return self.settings.summed

    @property
    def needs_own_noise(self) -> str:
        """Why noise that sites share out would not protect it; empty where it would."""
        return self._said_of_its_own("needs_own_noise")

    @property
    def needs_all_sites(self) -> str:
        """Why no part of the sites can be asked in a round; empty where it can."""
        return self._said_of_its_own("needs_all_sites")

    def _said_of_its_own(self, name: str) -> str:
        # Not what it inherits or borrows: a file that takes another's settings says it for itself.
        kind = type(self.settings)
        own = kind.__module__ == getattr(self._algorithm, "__name__", "") and name in vars(kind)
        return str(getattr(self.settings if own else BaseSettings(), name))

    def steps(self, state: State | None = None) -> int:
        """Return τ of the next round; without a state, the most that it can be."""
        return self._algorithm.steps(self.settings, state)

    def init(self, w: Tensor) -> State:
        """Return the server's first state, from the initial model w [d]."""
        return self._algorithm.init(w, self.settings)

    def task(self, state: State) -> State:
        """Return what every site is told."""
        return self._algorithm.task(state, self.settings)

    def task_numbers(self) -> Mapping[str, Range]:
        """Return the numbers that a task may carry, each in its range."""
        return self._algorithm.task_numbers(self.settings)

    def bounds(self, task: Task, terms: Terms) -> ReplyBounds:
        """Return what an honest reply to the task can be, of a site with these terms."""
        return self._algorithm.bounds(task, terms.at(task.round), self.settings)

    def local(self, task: Task, oracle: Oracle, memory: State) -> Local:
        """Return a site's reply and its next memory."""
        return self._algorithm.local(task, oracle, memory, self.settings)

    def update(self, state: State, replies: Iterable[Reply]) -> State:
        """Return the server's next state, folding the replies."""
        return self._algorithm.update(state, replies, self.settings)

    def short(self, state: State) -> Vectors | None:
        """Return what may be told in place of `task`'s vectors (algorithms.wrappers.compression),
        or None.
        """
        del state
        return None

    def own_model(self, w: Tensor, memory: State) -> Tensor | None:
        """Return a site's own model [d] from the newest w and its memory; None where w is it."""
        return self.settings.own_model(w, memory)

    @property
    def has_own_models(self) -> bool:
        """Whether each site trains a model of its own."""
        return self.own_model(torch.empty(0), State()) is not None

    def decode_reply(self, reply: Reply, told: Mapping[str, Tensor]) -> Reply:
        """Return a reply as the algorithm made it, from what was sent of it.

        told: the vectors that the sites were told. Raises InputError: no site of ours sent it.
        """
        del told
        return reply


class MethodWrapper(Method):
    """A method around another one, which it leaves as it is. Wrappers override what they change."""

    def __init__(self, inner: Method) -> None:
        self.inner, self.name, self.settings = inner, inner.name, inner.settings

    @property
    def channels(self) -> Mapping[str, float]:
        """What a batch releases: channel -> noise multiplier relative to the gradient's."""
        return self.inner.channels

    @property
    def opening(self) -> Opening | None:
        """What opens a round beside the batches, or None."""
        return self.inner.opening

    @property
    def weighs_records(self) -> bool:
        """Whether records of a batch get unlike weights."""
        return self.inner.weighs_records

    @property
    def unprotected(self) -> bool:
        """Whether exact numbers leave the sites, so that no run with it is private."""
        return self.inner.unprotected

    @property
    def controlled(self) -> bool:
        """Whether τ follows what is left of the budgets, which the loop then writes to the
        state."""
        return self.inner.controlled

    @property
    def iterations(self) -> int | None:
        """Of a controlled τ: the local iterations of all rounds together, where they are given."""
        return self.inner.iterations

    @property
    def coded(self) -> bool:
        """Whether a reply's vectors are blocks of codes, as long as they came out."""
        return self.inner.coded

    @property
    def units(self) -> float:
        """The deviation of releases' noise in units of a coarse grid (Terms.grid), or 0."""
        return self.inner.units

    @property
    def summed(self) -> Summed:
        """What the update takes from single replies, where it is one weighted mean of them."""
        return self.inner.summed

    @property
    def needs_own_noise(self) -> str:
        """Why noise that sites share out would not protect it; empty where it would."""
        return self.inner.needs_own_noise

    @property
    def needs_all_sites(self) -> str:
        """Why no part of the sites can be asked in a round; empty where it can."""
        return self.inner.needs_all_sites

    def steps(self, state: State | None = None) -> int:
        """Return τ of the next round; without a state, the most that it can be."""
        return self.inner.steps(state)

    def init(self, w: Tensor) -> State:
        """Return the server's first state, from the initial model w [d]."""
        return self.inner.init(w)

    def task(self, state: State) -> State:
        """Return what every site is told."""
        return self.inner.task(state)

    def task_numbers(self) -> Mapping[str, Range]:
        """Return the numbers that a task may carry, each in its range."""
        return self.inner.task_numbers()

    def bounds(self, task: Task, terms: Terms) -> ReplyBounds:
        """Return what an honest reply to the task can be, of a site with these terms."""
        return self.inner.bounds(task, terms)

    def local(self, task: Task, oracle: Oracle, memory: State) -> Local:
        """Return a site's reply and its next memory."""
        return self.inner.local(task, oracle, memory)

    def update(self, state: State, replies: Iterable[Reply]) -> State:
        """Return the server's next state, folding the replies."""
        return self.inner.update(state, replies)

    def short(self, state: State) -> Vectors | None:
        """Return what may be told in place of `task`'s vectors (algorithms.wrappers.compression),
        or None.
        """
        return self.inner.short(state)

    def own_model(self, w: Tensor, memory: State) -> Tensor | None:
        """Return a site's own model [d] from the newest w and its memory; None where w is it. A
        wrapper's own part of the memory has a prefix, and is passed over."""
        return self.inner.own_model(w, memory)

    def decode_reply(self, reply: Reply, told: Mapping[str, Tensor]) -> Reply:
        """Return a reply as the algorithm made it, from what was sent of it."""
        return self.inner.decode_reply(reply, told)
