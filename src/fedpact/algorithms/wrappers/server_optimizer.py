"""What becomes of the aggregate: server optimisers, which take it as a step, and iterate averages.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan. Adaptive federated optimization.
arXiv 2003.00295. Momentum: Hsu, Qi, Brown, arXiv 1909.06335. With Δ = (the algorithm's next w) - w:

    momentum  m ← β1 m + Δ                                        w ← w + η_s m
    adam      m ← β1 m + (1 - β1) Δ,  v ← β2 v + (1 - β2) Δ²       w ← w + η_s m / (sqrt(v) + a)
    yogi      m as above,  v ← v - (1 - β2) Δ² sign(v - Δ²)        w ← w + η_s m / (sqrt(v) + a)

and v = a² at first. Of round t of T, η_s may be a public function, η_s f(t); see
common.randomness.schedules.
With one local step a round this is a schedule of η itself. An average of the models w_1, w_2, ...
stands beside the last one, and is told to nobody (Polyak, Juditsky, SIAM J. Control Optim. 30,
1992; of the tail: Rakhlin, Shamir, Sridharan, arXiv 1109.5647):

    exponential  a_t = Σ_s (1 - β) β^(t-s) w_s / (1 - β^t)      tail  the mean of w_s, s > T - ⌈p T⌉

A run that is extended has another T, and of its models before only their mean and the last one are
left: the tail begins where the new T says if that is with that last one or later, and otherwise
stays what it was begun with. From which round on it is of is in the state.

All of it is post-processing of what the sites released: no privacy is spent.
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
    """What becomes of the aggregate: server optimisers, and averages of the rounds' models."""

    model_config = FROZEN
    optimiser: Literal["none", "momentum", "adam", "yogi"] = "none"
    """"none" takes the algorithm's next model as it is; the others take it as a step."""
    learning_rate: float | None = Field(default=None, gt=0)
    """η_s; left out, 1 for momentum and 0.1 for the adaptive ones, whose steps are about η_s in
    every coordinate."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """β1, of all three."""
    second_moment: float = Field(default=0.99, ge=0, lt=1)
    """β2, of adam and yogi."""
    adaptivity: float = Field(default=1e-3, ge=1e-15, le=1e15)
    """A, of adam and yogi, which keeps steps short where v is small."""
    average: Literal["none", "exponential", "tail"] = "none"
    """Which average of the rounds' models is kept, evaluated and saved beside the last model."""
    average_decay: float = Field(default=0.9, gt=0, lt=1)
    """β of average = "exponential"."""
    average_share: float = Field(default=0.5, gt=0, le=1)
    """p of average = "tail", the part of the planned rounds that it is of; before, it is the
    last model. Of an extended run it may be of more or fewer: models before the extension that
    are in a mean cannot be taken out of it, or put in."""

    @model_validator(mode="after")
    def _is_used(self) -> Self:
        if self.schedule != "constant" and self.optimiser == "none":
            raise ValueError(
                f"schedule is {self.schedule!r} with optimiser = 'none', which takes the "
                'algorithm\'s next model as it is: use optimiser = "momentum", with momentum = 0 '
                "for none"
            )
        return self


class Averaged(MethodWrapper):
    """A method beside whose model the server keeps an average of it; not "none".

    The average is the state's vector "average/w" [d], of no site's concern. Of a tail the number
    "average/first" says of which round the first model in it is. rounds: T.
    """

    prefix = _AVERAGE

    def __init__(self, inner: Method, server: ServerSettings, rounds: int) -> None:
        super().__init__(inner)
        self._server = server
        # Of ten rounds 0.3 are three, though 0.3 * 10 may be a bit more.
        self._first = rounds - math.ceil(server.average_share * rounds * (1 - 1e-12)) + 1

    def init(self, w: Tensor) -> State:
        """Return the server's first state, from the initial model w [d]."""
        return join(State({"w": w.clone()}, {"round": 0}), _AVERAGE, self.inner.init(w))

    def update(self, state: State, replies: Iterable[Reply]) -> State:
        """Return the server's next state, folding the replies."""
        own, rest = split_state(state, _AVERAGE)
        after, number = self.inner.update(rest, replies), int(own.numbers["round"]) + 1
        average, numbers = own.vectors["w"], {"round": number}
        if self._server.average == "tail":
            # Before the tail begins, the last model stands for it.
            first = min(self._first, number)
            share, numbers["first"] = 1 / (number - first + 1), first
        else:
            beta = self._server.average_decay
            share = (1 - beta) / (1 - beta**number)
        # A share of 1 is the new model itself, bit for bit.
        average = torch.lerp(average, after.vectors["w"], share)
        return join(State({"w": average}, numbers), _AVERAGE, after)


def read_average(state: State) -> Tensor | None:
    """Return the average [d] that the server keeps beside its model, None where it keeps none."""
    return state.vectors.get(_AVERAGE + "w")


class ServerOptimised(MethodWrapper):
    """A method whose aggregate is a step of a server optimiser; not "none". rounds: T."""

    prefix = _PREFIX

    def __init__(self, inner: Method, server: ServerSettings, rounds: int) -> None:
        super().__init__(inner)
        self._server, self._rounds = server, rounds

    def init(self, w: Tensor) -> State:
        """Return the server's first state, from the initial model w [d]."""
        own = {"momentum": torch.zeros_like(w)}
        if self._server.optimiser != "momentum":
            own["second_moment"] = torch.full_like(w, self._server.adaptivity**2)
        numbers = {"round": 0} if self._server.schedule != "constant" else {}
        return join(State(own, numbers), _PREFIX, self.inner.init(w))

    def update(self, state: State, replies: Iterable[Reply]) -> State:
        """Return the server's next state, folding the replies."""
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
        """Return the optimiser's next vectors, and the step [d] that it takes for Δ [d]."""
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
