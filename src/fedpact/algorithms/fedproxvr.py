"""FedProxVR. Dinh, Tran, Nguyen, Bao, Balef, Zhou, Zomaya. Federated learning with proximal
stochastic variance reduced gradient algorithms. ICPP 2020. Its private form is ours.

Symbols   paper  code              meaning, unit or range                     who chooses it
          L      smoothness        of the loss, > 0                           plan, or estimated
          β      step_divisor      > 0; Lemma 1 wants > 3                     plan, tune fedproxvr
          η      learning_rate     1/(βL), or given                           plan
          μ      proximal          weight of the proximal term, >= 0          plan, tune fedproxvr
          τ      local_steps       iterations after the first, >= 1           plan, tune fedproxvr
          θ      accuracy          local accuracy that ends a round early     plan; None: τ does
          K      difference_bound  most ‖∇ℓ(w) - ∇ℓ(u)‖/‖w - u‖ of a record   plan; None: Differs
          σ_a/σ  opening_noise     the opening's noise over a batch's, > 0   plan; None: Differs
          q_a    opening_rate      records in the opening, in (0, 1]         plan
Client    h(w) = (μ/2)‖w - w̄‖²,  prox(x) = (x + ημ w̄)/(1 + ημ)
          w⁰ = w̄,  v⁰ = ∇F_n(w̄),  w¹ = prox(w⁰ - η v⁰)
          t = 1..τ:  sarah  v_t = ∇f_b(w_t) - ∇f_b(w_{t-1}) + v_{t-1}
                     svrg   v_t = ∇f_b(w_t) - ∇f_b(w⁰) + v⁰
                     sgd    v_t = ∇f_b(w_t)
                     w_{t+1} = prox(w_t - η v_t)
          upload w_{τ+1} (iterate "last"), or w_t', t' uniform on 1..τ ("random")
Server    w ← Σ p_i w_i
Releases  v⁰: one gradient sum over the opening, an event of its own; then up to τ sums of
          gradient differences (sgd: of gradients), an event each
Neutral   none: the first step takes the full gradient, which no other algorithm here does
Differs   A private run clips each record's *difference* to K ‖w_t - u‖, u = w_{t-1} or w⁰: the
          bound and its noise shrink with the movement, and follow from released iterates alone.
          Two clipped gradients would need noise for 2C, however small the movement.
          Without K the bound is min(L ‖w_t - u‖, C/τ), and without σ_a/σ it is q_a/(q sqrt(τ)):
          v⁰ is as noisy as the mean of τ batches' gradients, and the noise of all τ differences
          together no larger, however far w moves. With [control], σ_a follows from the mean number
          of steps that are reserved for a round.
          t' is a public draw from the round's number, the same at every site, so that a repeated
          request is the same request. Steps after t' are neither computed nor charged.
          The paper's t' may be 0, a round without movement. Without it the mean of ‖∇J_n(w_t)‖² is
          at most the one with it, if that is at most θ²‖∇F_n(w̄)‖² and θ <= 1.
          θ is compared with ‖v_t + μ(w_t - w̄)‖ / ‖v⁰‖ as released, including noise, as the exact
          gradient would be a release of all records at every step.

SVRG's v_t has the noise of v⁰ and of one difference; SARAH's has that of v⁰ and of t differences.
For movements far below C/K this is far less than the noise of t clipped gradients.

A given K is best with η σ K sqrt(τ d)/(q N) at most 1. This is the factor by which noise grows
within a round relative to movement: at a few times 1 the solver amplifies its own noise and
diverges, as with K = L on most models. A smaller K clips, which costs less.
"""

import hashlib
import math
from collections import deque
from collections.abc import Iterator
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from fedpact.algorithms import BaseSettings, MethodFacts, Neutral
from fedpact.algorithms.common.steps import round_steps
from fedpact.common.messages import Local, State, Task
from fedpact.privacy.oracle import Batch, Opening, Oracle

NEUTRAL: Neutral | None = None

_SHORTEST = 2.0**-39


class Settings(BaseSettings):
    """Symbols at the top."""

    solver: Literal["sarah", "svrg", "sgd"] = "sarah"
    """The rule for v_t: "sarah", "svrg" or "sgd", see Client."""
    iterate: Literal["last", "random"] = "last"
    """The w_t that is sent: the "last" or a "random" one."""
    smoothness: float = Field(default=1.0, gt=0)
    """L of the loss."""
    step_divisor: float = Field(default=5.0, gt=0)
    """β; Lemma 1 wants > 3."""
    learning_rate: float | None = Field(default=None, gt=0)
    """η; by default 1/(βL)."""
    proximal: float = Field(default=0.1, ge=0)
    local_steps: int = Field(default=10, ge=1)
    accuracy: float | None = Field(default=None, gt=0)
    """θ, the local accuracy that ends a round early; by default none."""
    difference_bound: float | None = Field(default=None, gt=0)
    """K, the bound on a record's change of gradient over the distance moved; by default L, with the
    change itself bounded by C/τ."""
    opening_noise: float | None = Field(default=None, gt=0)
    """σ_a/σ; by default such that v⁰ is as noisy as the mean of τ batches' gradients."""
    opening_rate: float = Field(default=1.0, gt=0, le=1)
    """Each record's probability of being in the opening."""

    @property
    def step_size(self) -> float:
        """The step size η."""
        return self.learning_rate or 1 / (self.step_divisor * self.smoothness)


def facts(settings: Settings) -> MethodFacts:
    return MethodFacts(
        {_channel(settings): 1.0},
        # v⁰, before the local steps.
        Opening(settings.opening_rate, {"gradient": settings.opening_noise}),
        adaptive=settings.accuracy is not None,
        needs_all_sites="",
        excludes={
            "fairness": "its gradient differences are clipped in proportion to the movement, which "
            "does not bound differences of gradients weighted by loss",
            "local": "its differences are clipped by the movement of plain steps",
            "local.head": "its openings are mean gradients at one model",
            "privacy.clip_schedule": "its openings and differences are bounded by one clip",
        },
    )


def _channel(settings: Settings) -> str:
    return "gradient" if settings.solver == "sgd" else "difference"


def local(task: Task, oracle: Oracle, memory: State, settings: Settings) -> Local:
    most = round_steps(task, settings.local_steps)
    last = most + 1 if settings.iterate == "last" else _draw_step(task.round, most)
    iterates = _iterates(task.vectors["w"], oracle, last, settings, oracle.clip / most)
    return Local({"w": deque(iterates, maxlen=1).pop()})


def _iterates(
    center: Tensor, oracle: Oracle, last: int, settings: Settings, most: float
) -> Iterator[Tensor]:
    """Yield w¹, w², ... up to w_last, or up to the first that θ calls accurate.

    most: bounds a difference if no K is given.
    """
    eta, mu = settings.step_size, settings.proximal
    start = v = oracle.opening("gradient").gradient(center)
    before, w = center, _prox(center, v, center, eta, mu)
    yield w
    for batch in _batches(oracle, last - 1, settings):
        v = _direction(batch, w, (before, v), (center, start), settings, most)
        if settings.accuracy is not None:
            residual = (v + mu * (w - center)).norm()
            if float(residual) <= settings.accuracy * float(start.norm()):
                return
        before, w = w, _prox(w, v, center, eta, mu)
        yield w


def _batches(oracle: Oracle, count: int, settings: Settings) -> Iterator[Batch]:
    channel = _channel(settings)
    if settings.accuracy is None:
        if count:
            yield from oracle.batches(count, channel)
    else:
        # One by one, so that unused batches are not charged.
        for _ in range(count):
            yield from oracle.batches(1, channel)


def _direction(
    batch: Batch,
    w: Tensor,
    before: tuple[Tensor, Tensor],
    start: tuple[Tensor, Tensor],
    settings: Settings,
    most: float,
) -> Tensor:
    """Return v_t [d] at w; before: (w_{t-1}, v_{t-1}), start: (w⁰, v⁰).

    most: bounds a difference if no K is given.
    """
    if settings.solver == "sgd":
        return batch.gradient(w)
    other, direction = before if settings.solver == "sarah" else start
    moved = float(torch.linalg.vector_norm(w - other, dtype=torch.float64))
    largest = torch.finfo(w.dtype).max ** 0.5
    if not moved < largest:
        # NaN shows the server that w has diverged.
        return torch.full_like(w, math.nan)
    bound = min((settings.difference_bound or settings.smoothness) * moved, largest)
    if settings.difference_bound is None:
        bound = min(bound, most)
    if moved > 0:
        # Shorter differences would underflow; a larger bound, with its noise, is also valid.
        bound = max(bound, _SHORTEST)
    return direction + batch.difference(w, other, bound)


def _prox(w: Tensor, v: Tensor, center: Tensor, eta: float, mu: float) -> Tensor:
    """Return prox(w - η v): the minimiser of (η μ/2)‖u - w̄‖² + ½‖u - (w - η v)‖²."""
    return (w - eta * v + eta * mu * center) / (1 + eta * mu)


def _draw_step(round_number: int, most: int) -> int:
    """Return t' of a round, uniform on 1..τ over the rounds."""
    digest = hashlib.blake2b(f"t' of round {round_number}".encode(), digest_size=8).digest()
    return 1 + int.from_bytes(digest, "big") % most
