"""Server optimisers: the round's aggregate is taken as a step, and the server does more with it.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan. Adaptive federated optimization.
arXiv 2003.00295. Momentum: Hsu, Qi, Brown, arXiv 1909.06335. With Δ = (the algorithm's next w) - w:

    momentum  m ← β1 m + Δ                                        w ← w + η_s m
    adam      m ← β1 m + (1 - β1) Δ,  v ← β2 v + (1 - β2) Δ²       w ← w + η_s m / (sqrt(v) + a)
    yogi      m as above,  v ← v - (1 - β2) Δ² sign(v - Δ²)        w ← w + η_s m / (sqrt(v) + a)

and v = a² at first. All of it is post-processing of what the sites released: no privacy is spent.
"""

from collections.abc import Iterable
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from fedpact.messages import Reply, State
from fedpact.methods import Around, Method, join, split

_PREFIX = "server/"


class ServerSettings(BaseModel):
    """The [server] table of a plan.

    optimiser: "none" takes the algorithm's next model as it is. learning_rate: η_s > 0; left out,
    1 for momentum and 0.1 for the adaptive ones, whose steps are about η_s in every coordinate.
    momentum: β1 in [0, 1). second_moment: β2 in [0, 1). adaptivity: a > 0, which keeps steps short
    where v is small.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
    optimiser: Literal["none", "momentum", "adam", "yogi"] = "none"
    learning_rate: float | None = Field(default=None, gt=0)
    momentum: float = Field(default=0.9, ge=0, lt=1)
    second_moment: float = Field(default=0.99, ge=0, lt=1)
    adaptivity: float = Field(default=1e-3, gt=0)


class ServerOptimised(Around):
    """A method whose aggregate is a step of a server optimiser; not "none"."""

    def __init__(self, inner: Method, server: ServerSettings) -> None:
        super().__init__(inner)
        self._server = server

    def init(self, w: Tensor) -> State:
        """See Method."""
        own = {"momentum": torch.zeros_like(w)}
        if self._server.optimiser != "momentum":
            own["second_moment"] = torch.full_like(w, self._server.adaptivity**2)
        return join(State(own), _PREFIX, self.inner.init(w))

    def steps(self, state: State | None = None) -> int:
        """See Method."""
        return self.inner.steps(None if state is None else split(state, _PREFIX)[1])

    def task(self, state: State) -> State:
        """See Method. The optimiser's vectors stay at the server."""
        return self.inner.task(split(state, _PREFIX)[1])

    def update(self, state: State, replies: Iterable[Reply]) -> State:
        """See Method."""
        own, rest = split(state, _PREFIX)
        after = self.inner.update(rest, replies)
        w = rest.vectors["w"]
        own, step = self._stepped(own, after.vectors["w"] - w)
        after = State({**after.vectors, "w": w + step}, after.numbers)
        return join(own, _PREFIX, after)

    def _stepped(self, own: State, delta: Tensor) -> tuple[State, Tensor]:
        """Return the optimiser's next memory, and the step [d] that it takes for Δ [d]."""
        server, momentum = self._server, own.vectors["momentum"]
        if server.optimiser == "momentum":
            momentum = server.momentum * momentum + delta
            return State({"momentum": momentum}), (server.learning_rate or 1.0) * momentum
        momentum = server.momentum * momentum + (1 - server.momentum) * delta
        second, square = own.vectors["second_moment"], delta.square()
        if server.optimiser == "adam":
            second = server.second_moment * second + (1 - server.second_moment) * square
        else:
            second = second - (1 - server.second_moment) * square * torch.sign(second - square)
        step = (server.learning_rate or 0.1) * momentum / (second.sqrt() + server.adaptivity)
        return State({"momentum": momentum, "second_moment": second}), step
