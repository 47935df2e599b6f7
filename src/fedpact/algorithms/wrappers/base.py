"""An algorithm with its settings, as the server and the sites execute it.

`Method` is made from an algorithm's file. What is independent of the algorithm is added by a
`MethodWrapper`, which changes what passes through it, and stores its own numbers and vectors in the
server's state and the sites' memory under a prefix, such as "server/momentum".
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedpact import algorithms
from fedpact.algorithms import BaseSettings, MethodFacts, fedavg
from fedpact.common.errors import PlanError
from fedpact.common.messages import Local, Reply, State, Task, Vectors, split_state
from fedpact.privacy.oracle import Oracle, Range, Terms


class Method:
    """An algorithm's functions with settings bound, by default defaults."""

    def __init__(self, name: str, settings: BaseSettings | None = None) -> None:
        self._algorithm = algorithms.load(name)
        self.name, self.settings = name, settings or self._algorithm.Settings()
        self.facts = self._facts()

    def _facts(self) -> MethodFacts:
        of = getattr(self._algorithm, "facts", None)
        found = MethodFacts() if of is None else of(self.settings)
        # A user's algorithm may be a class; its functions know the module that contains it.
        place = getattr(self._algorithm, "__module__", None) or self._algorithm.__name__
        if of is None or of.__module__ == place:
            return found
        # Facts borrowed from another file say nothing about how this file's functions use replies.
        unknown = MethodFacts()
        return replace(
            found,
            needs_all_sites=unknown.needs_all_sites,
            needs_own_noise=unknown.needs_own_noise,
            sums_releases=unknown.sums_releases,
        )

    def _function(self, name: str) -> Callable[..., Any]:
        # A function that the file lacks is FedAvg's.
        return getattr(self._algorithm, name, None) or getattr(fedavg, name)

    def steps(self, state: State | None = None) -> int:
        """Return the local iterations τ of the next round, the most batches that `local` asks for.

        state: the server's, for an algorithm that changes τ; None: return the maximum.
        If a controller around the algorithm chooses τ, the task has it as "local_steps".
        """
        return self._function("steps")(self.settings, state)

    def init(self, w: Tensor) -> State:
        """Return the server's first state, from the initial model w [d]."""
        return self._function("init")(w, self.settings)

    def task(self, state: State) -> State:
        """Return what is sent to every site: "w" [d] and whatever else it needs."""
        return self._function("task")(state, self.settings)

    def public_numbers(self, task: Task, terms: Terms) -> Mapping[str, Range]:
        """Return the numbers of a reply that follow from the task and a site's terms.

        The server rejects a reply with other values, so that no site can choose its own weight.
        All other numbers and vectors may be anything within privacy.reply_bounds, so `update` has
        to clamp what it divides by or takes a root of.
        """
        return self._function("public_numbers")(task, terms.at(task.round), self.settings)

    def local(self, task: Task, oracle: Oracle, memory: State) -> Local:
        """Return a site's reply and its next memory, without changing the task or the memory.

        memory: what this function returned when its reply was last included; empty at first.
        """
        return self._function("local")(task, oracle, memory, self.settings)

    def update(self, state: State, replies: Iterable[Reply]) -> State:
        """Return the server's next state.

        replies: at least one, in the order of site names. They are computed on demand, so combine
        them one by one instead of collecting them. If this function raises, or the state is not
        finite, the loop finds out which reply causes it (algorithms.wrappers.robust).
        reply.weight is N_i, so p_i = N_i / Σ N.
        """
        return self._function("update")(state, replies, self.settings)

    def short(self, state: State) -> Vectors | None:
        """Return a short form of `task`'s vectors, or None; see wrappers.compression."""
        return None

    def own_model(self, w: Tensor, memory: State) -> Tensor | None:
        """Return a site's own model [d] from the latest w and its memory; None if it is w."""
        return self.settings.own_model(w, memory)

    @property
    def has_own_models(self) -> bool:
        """Whether each site trains its own model."""
        return self.own_model(torch.empty(0), State()) is not None

    def decode_reply(self, reply: Reply, told: Mapping[str, Tensor]) -> Reply:
        """Return a reply as the algorithm returned it, from its encoded form.

        told: the task's vectors. Raises InputError: it cannot be decoded.
        """
        return reply


class MethodWrapper(Method):
    """A method around another one, `inner`. Wrappers override what they change.

    prefix: of its entries in the server's state and a site's memory, "" for none. facts: those that
    it changes.
    """

    prefix: ClassVar[str] = ""

    def __init__(self, inner: Method, **facts: Any) -> None:
        self.inner, self.name, self.settings = inner, inner.name, inner.settings
        self.facts = replace(inner.facts, **facts)

    def model_of(self, local: Local, key: str) -> Tensor:
        """Return a reply's w [d]. Raises PlanError: it has none. key: the setting that reads it."""
        if "w" not in local.vectors:
            raise PlanError(
                f"algorithm {self.name!r} replies with {', '.join(local.vectors)}, and {key} needs "
                f"the model, w: leave it out, and list {key!r} in the excludes of its facts"
            )
        return local.vectors["w"]

    def _rest(self, state: State) -> State:
        """Return a state without this wrapper's part."""
        return split_state(state, self.prefix)[1] if self.prefix else state

    def steps(self, state: State | None = None) -> int:
        return self.inner.steps(None if state is None else self._rest(state))

    def init(self, w: Tensor) -> State:
        return self.inner.init(w)

    def task(self, state: State) -> State:
        return self.inner.task(self._rest(state))

    def public_numbers(self, task: Task, terms: Terms) -> Mapping[str, Range]:
        return self.inner.public_numbers(task, terms)

    def local(self, task: Task, oracle: Oracle, memory: State) -> Local:
        return self.inner.local(task, oracle, memory)

    def update(self, state: State, replies: Iterable[Reply]) -> State:
        return self.inner.update(state, replies)

    def short(self, state: State) -> Vectors | None:
        return self.inner.short(self._rest(state))

    def own_model(self, w: Tensor, memory: State) -> Tensor | None:
        # A wrapper's part of the memory has a prefix, and is ignored.
        return self.inner.own_model(w, memory)

    def decode_reply(self, reply: Reply, told: Mapping[str, Tensor]) -> Reply:
        return self.inner.decode_reply(reply, told)
