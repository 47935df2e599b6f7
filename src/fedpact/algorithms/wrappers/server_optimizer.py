"""Server optimisers, which treat the aggregate as a step, and averages of the rounds' models.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan. Adaptive federated optimization.
arXiv 2003.00295. Momentum: Hsu, Qi, Brown, arXiv 1909.06335. With Δ = (the algorithm's next w) - w:

    momentum  m ← β1 m + Δ                                        w ← w + η_s m
    adam      m ← β1 m + (1 - β1) Δ,  v ← β2 v + (1 - β2) Δ²       w ← w + η_s m / (sqrt(v) + a)
    yogi      m as above,  v ← v - (1 - β2) Δ² sign(v - Δ²)        w ← w + η_s m / (sqrt(v) + a)

with v = a² at the start. η_s may depend on the round t of T by a public function, η_s f(t); see
common.randomness.schedules. With one local step per round this is a schedule of η itself.

An average of the models w_1, w_2, ... is kept in addition to the last one and never sent to sites
(Polyak, Juditsky, SIAM J. Control Optim. 30, 1992; tail: Rakhlin, Shamir, Sridharan,
arXiv 1109.5647):

    exponential  a_t = Σ_s (1 - β) β^(t-s) w_s / (1 - β^t)      tail  the mean of w_s, s > T - ⌈p T⌉

The state says in which round the tail begins.

All of it is post-processing of what the sites released and costs no privacy.
"""

import math
from collections.abc import Iterable
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedpact.algorithms.wrappers.base import Method, MethodWrapper, join, split_state
from fedpact.common.configuration import FROZEN
from fedpact.common.messages import Reply, State
from fedpact.common.randomness.schedules import Scheduled

_PREFIX = "server/"
_AVERAGE = "average/"


class ServerSettings(Scheduled):
    """The server's optimiser, and the average of the rounds' models."""

    model_config = FROZEN
    optimiser: Literal["none", "momentum", "adam", "yogi"] = "none"
    """"none" uses the algorithm's next model as it is; the others treat it as a step."""
    learning_rate: float | None = Field(default=None, gt=0)
    """η_s; by default 1 for momentum and 0.1 for the adaptive ones, whose steps are about η_s in
    every coordinate."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """β1, of all three."""
    second_moment: float = Field(default=0.99, ge=0, lt=1)
    """β2, of adam and yogi."""
    adaptivity: float = Field(default=1e-3, ge=1e-15, le=1e15)
    """a of adam and yogi, which limits steps where v is small."""
    average: Literal["none", "exponential", "tail"] = "none"
    """Which average of the rounds' models is kept, evaluated and saved with the last model."""
    average_decay: float = Field(default=0.9, gt=0, lt=1)
    """β of average = "exponential"."""
    average_share: float = Field(default=0.5, gt=0, le=1)
    """p of average = "tail", the share of the planned rounds that it covers; before these it equals
    the last model."""

    @model_validator(mode="after")
    def _is_used(self) -> Self:
        if self.schedule != "constant" and self.optimiser == "none":
            raise ValueError(
                f"schedule is {self.schedule!r} with optimiser = 'none', which uses the "
                'algorithm\'s next model as it is: use optimiser = "momentum", with momentum = 0 '
                "for plain steps"
            )
        return self


class Averaged(MethodWrapper):
    """A method with an average of its models, kept by the server; not for "none".

    The average is the state's vector "average/w" [d], which no site receives. The number
    "average/first" is the round in which a tail begins. rounds: T.
    """

    prefix = _AVERAGE

    def __init__(self, inner: Method, server: ServerSettings, rounds: int) -> None:
        super().__init__(inner)
        self._server = server
        # 0.3 of ten rounds are three, although 0.3 * 10 may be a bit more in floating point.
        self._first = rounds - math.ceil(server.average_share * rounds * (1 - 1e-12)) + 1

    def init(self, w: Tensor) -> State:
        return join(State({"w": w.clone()}, {"round": 0}), _AVERAGE, self.inner.init(w))

    def update(self, state: State, replies: Iterable[Reply]) -> State:
        own, rest = split_state(state, _AVERAGE)
        after, number = self.inner.update(rest, replies), int(own.numbers["round"]) + 1
        average, numbers = own.vectors["w"], {"round": number}
        if self._server.average == "tail":
            # Before the tail begins, it is the last model.
            first = min(self._first, number)
            share, numbers["first"] = 1 / (number - first + 1), first
        else:
            beta = self._server.average_decay
            share = (1 - beta) / (1 - beta**number)
        # A share of 1 gives the new model bit for bit.
        average = torch.lerp(average, after.vectors["w"], share)
        return join(State({"w": average}, numbers), _AVERAGE, after)


def read_average(state: State) -> Tensor | None:
    """Return the average [d] of models that the server keeps, or None."""
    return state.vectors.get(_AVERAGE + "w")


class ServerOptimised(MethodWrapper):
    """A method whose aggregate is a step of a server optimiser; not for "none". rounds: T."""

    prefix = _PREFIX

    def __init__(self, inner: Method, server: ServerSettings, rounds: int) -> None:
        super().__init__(inner)
        self._server, self._rounds = server, rounds

    def init(self, w: Tensor) -> State:
        own = {"momentum": torch.zeros_like(w)}
        if self._server.optimiser != "momentum":
            own["second_moment"] = torch.full_like(w, self._server.adaptivity**2)
        numbers = {"round": 0} if self._server.schedule != "constant" else {}
        return join(State(own, numbers), _PREFIX, self.inner.init(w))

    def update(self, state: State, replies: Iterable[Reply]) -> State:
        own, rest = split_state(state, _PREFIX)
        after = self.inner.update(rest, replies)
        w = rest.vectors["w"]
        vectors, step = self._stepped(own, after.vectors["w"] - w)
        numbers = dict(own.numbers)
        if "round" in numbers:
            numbers["round"] += 1
            step = self._server.factor(int(numbers["round"]), self._rounds) * step
        after = State({**after.vectors, "w": w + step}, after.numbers)
        return join(State(vectors, numbers), _PREFIX, after)

    def _stepped(self, own: State, delta: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Return the optimiser's next vectors, and its step [d] for Δ [d]."""
        server, momentum = self._server, own.vectors["momentum"]
        if server.optimiser == "momentum":
            momentum = server.momentum * momentum + delta
            return {"momentum": momentum}, (server.learning_rate or 1.0) * momentum
        momentum = server.momentum * momentum + (1 - server.momentum) * delta
        second, square = own.vectors["second_moment"], delta.square()
        if server.optimiser == "adam":
            second = server.second_moment * second + (1 - server.second_moment) * square
        else:
            second = second - (1 - server.second_moment) * square * torch.sign(second - square)
        step = (server.learning_rate or 0.1) * momentum / (second.sqrt() + server.adaptivity)
        return {"momentum": momentum, "second_moment": second}, step
