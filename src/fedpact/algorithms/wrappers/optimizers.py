"""Optimisers of sites and of the server, heads that sites keep, and averages of rounds' models.

At a site, momentum and schedule: in step n of all T = rounds τ steps, a solver that asks for g(w)
gets

    m ← β m + g(w),  m = 0 at the start of a round;      f(n) m

so its step is w ← w - η f(n) m. The gradient already has its noise, so this is post-processing and
costs no privacy. A reply Σ c_k g_k of releases becomes one with convolved coefficients, and by
Young's inequality neither Σ |c_k| nor (Σ c_k²)^(1/2) grows by more than
max f (1 - β^τ)/(1 - β), the factor by which a reply may be longer.

Heads: Arivazhagan, Aggarwal, Singh, Choudhary. Federated learning with personalization layers.
arXiv 1912.00818. Let w = (u, v), with v the last `head` numbers. The server sends u, and a site
with its own head v_i continues from (u, v_i):

    local     the algorithm's local part from (u, v_i) instead of w, which ends at (u', v_i')
    sent      (u', v), with v as received: nothing of v_i'
    stored    v_i', in the site's memory

The head's gradient is clipped and noised together with the body's: later replies depend on v_i, so
a head trained without noise would leak exact numbers through u. Events, noise and ε are those of
the algorithm without heads, and the bound on a reply holds, as a part of it is left out.

The server's v never changes, so w itself is not a useful model. A site's model is (u, v_i); it is
computed from released numbers only, and as private as w.

At the server, the aggregate is a step: Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar,
McMahan. Adaptive federated optimization. arXiv 2003.00295. Momentum: Hsu, Qi, Brown, arXiv
1909.06335. With Δ = (the algorithm's next w) - w:

    momentum  m ← β1 m + Δ                                        w ← w + η_s m
    adam      m ← β1 m + (1 - β1) Δ,  v ← β2 v + (1 - β2) Δ²       w ← w + η_s m / (sqrt(v) + a)
    yogi      m as above,  v ← v - (1 - β2) Δ² sign(v - Δ²)        w ← w + η_s m / (sqrt(v) + a)

with v = a² at the start. η_s may depend on the round t of T by a public function, η_s f(t); see
common.run_settings. With one local step per round this is a schedule of η itself.

An average of the models w_1, w_2, ... is kept in addition to the last one and never sent to sites
(Polyak, Juditsky, SIAM J. Control Optim. 30, 1992; tail: Rakhlin, Shamir, Sridharan,
arXiv 1109.5647):

    exponential  a_t = Σ_s (1 - β) β^(t-s) w_s / (1 - β^t)      tail  the mean of w_s, s > T - ⌈p T⌉

The state says in which round the tail begins. All of the server's part is post-processing of what
the sites released and costs no privacy.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from fedpact.algorithms.common.steps import HookedBatch
from fedpact.algorithms.wrappers.base import Method, MethodWrapper
from fedpact.common.configuration import FROZEN
from fedpact.common.errors import PlanError
from fedpact.common.messages import Local, Reply, State, Task, join, split_state
from fedpact.common.run_settings import Scheduled
from fedpact.privacy.oracle import Batch, Oracle, OracleWrapper, Weighting

_HEADS: Final = "heads/"
_OWN: Final = "own"

TOLD: Final = (
    "Each site's own head, of {head} numbers: it is trained by noisy, charged gradients and never "
    "sent. A site's whole model may be shown as the server's may. The run's final model has the "
    "initial head."
)
"""The line on heads in a privacy statement."""

MEASURED: Final = (
    "The accuracy: each site's own model on its own held-out records, as the shared part alone is "
    "not a model."
)
"""The line on what only a simulation knows about heads."""


class Headed(MethodWrapper):
    """A method in which each site has its own last `head` >= 1 numbers of w."""

    def __init__(self, inner: Method, head: int) -> None:
        super().__init__(
            inner,
            needs_own_noise="with [local] head each site's gradient is at its own head, which it "
            "stores",
            sums_releases=False,
        )
        self._head = head

    def local(self, task: Task, oracle: Oracle, memory: State) -> Local:
        own, rest = split_state(memory, _HEADS)
        told = task.vectors["w"]
        began = replace(task, vectors={**task.vectors, "w": self._whole(told, own)})
        local = self.inner.local(began, oracle, rest)
        w = self.model_of(local, "local.head")
        ended = w[-self._head :].clone()
        if not bool(ended.isfinite().all()):
            # A shared part that is not finite must not spoil the site's head for good.
            ended = began.vectors["w"][-self._head :].clone()
        sent = torch.cat([w[: -self._head], told[-self._head :]])
        kept = join(State({_OWN: ended}), _HEADS, local.memory)
        return Local({**local.vectors, "w": sent}, local.numbers, kept)

    def own_model(self, w: Tensor, memory: State) -> Tensor | None:
        return self._whole(w, split_state(memory, _HEADS)[0])

    def _whole(self, w: Tensor, own: State) -> Tensor:
        """Return (u, v_i), or w if the site has no head yet."""
        head = own.vectors.get(_OWN)
        return w if head is None else torch.cat([w[: -self._head], head])


def check_head(module: nn.Module, head: int, key: str = "local.head") -> None:
    """Raise PlanError unless the last `head` numbers are whole tensors, and not the whole model.

    head: 0 for none. key: by which the plan sets it.
    """
    tensors = [(name, p.numel()) for name, p in module.named_parameters() if p.requires_grad]
    ends, total = list[tuple[int, str]](), 0
    for name, count in reversed(tensors[1:]):
        total += count
        ends.append((total, name))
    if head and head not in (end for end, _ in ends):
        raise PlanError(
            f"{key} is {head}: expected the size of the model's last tensors: {_told(ends)}"
        )


def _told(ends: Sequence[tuple[int, str]]) -> str:
    if not ends:
        return "0, as the model has only one tensor and nothing would be shared"
    return " or ".join(f"{end} (from {name!r} on)" for end, name in ends[:4])


class LocalSettings(Scheduled):
    """Momentum and schedule f of a site's local steps, and the head that it keeps."""

    model_config = FROZEN
    momentum: float = Field(default=0.0, ge=0, lt=1)
    """β of m ← β m + g, with m = 0 at the start of a round."""
    head: int = Field(default=0, ge=0)
    """How many of the model's last numbers are each site's own, 0 for none."""

    @property
    def plain(self) -> bool:
        """Whether steps are plain SGD."""
        return self.momentum == 0 and self.schedule == "constant"


class Stepped(MethodWrapper):
    """A method whose sites' steps have momentum or a schedule. rounds: of the run."""

    def __init__(self, inner: Method, local: LocalSettings, rounds: int) -> None:
        super().__init__(inner)
        self._local, self._rounds = local, rounds

    def local(self, task: Task, oracle: Oracle, memory: State) -> Local:
        steps = self.inner.steps()
        total, done = self._rounds * steps, (task.round - 1) * steps
        return self.inner.local(task, _Moving(oracle, self._local, done, total), memory)


class _Moving(OracleWrapper):
    """An oracle whose gradients have momentum and a schedule. done: steps of earlier rounds."""

    def __init__(self, inner: Oracle, local: LocalSettings, done: int, total: int) -> None:
        super().__init__(inner)
        self._local, self._done, self._total = local, done, total
        self._momentum: Tensor | None = None

    def batches(self, count: int, *channels: str) -> Iterator[Batch]:
        for batch in self._inner.batches(count, *channels):
            self._done += 1
            yield HookedBatch(batch, self._move)

    def _move(self, batch: Batch, w: Tensor, weighting: Weighting) -> Tensor:
        """Return f(n) m for the gradient [d] at w."""
        gradient = batch.gradient(w, weighting)
        if self._local.momentum:
            if self._momentum is not None:
                gradient.add_(self._momentum, alpha=self._local.momentum)
            self._momentum = gradient.clone()
        return gradient.mul_(self._local.factor(self._done, self._total))


_SERVER = "server/"
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

    prefix = _SERVER

    def __init__(self, inner: Method, server: ServerSettings, rounds: int) -> None:
        super().__init__(inner)
        self._server, self._rounds = server, rounds

    def init(self, w: Tensor) -> State:
        own = {"momentum": torch.zeros_like(w)}
        if self._server.optimiser != "momentum":
            own["second_moment"] = torch.full_like(w, self._server.adaptivity**2)
        numbers = {"round": 0} if self._server.schedule != "constant" else {}
        return join(State(own, numbers), _SERVER, self.inner.init(w))

    def update(self, state: State, replies: Iterable[Reply]) -> State:
        own, rest = split_state(state, _SERVER)
        after = self.inner.update(rest, replies)
        w = rest.vectors["w"]
        vectors, step = self._step(own, after.vectors["w"] - w)
        numbers = dict(own.numbers)
        if "round" in numbers:
            numbers["round"] += 1
            step = self._server.factor(int(numbers["round"]), self._rounds) * step
        after = State({**after.vectors, "w": w + step}, after.numbers)
        return join(State(vectors, numbers), _SERVER, after)

    def _step(self, own: State, delta: Tensor) -> tuple[dict[str, Tensor], Tensor]:
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
