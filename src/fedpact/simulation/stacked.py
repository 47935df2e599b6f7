"""Sites stacked: each trains by itself until it asks, then all are answered at once.

A step of a small model is many operations, each of them short; stacked, the sites share them. No
site's numbers enter another's: what is summed for a site is what its own kernel sums, up to
rounding (1e-12 of the sum's length in float64, 1e-5 in float32, tested), and noise is the same
bits.

An algorithm's local part is a plain function, so each site that trains has a greenlet to be stopped
in: it hands over within the worker's thread, which costs a fiftieth of waking another thread. The
order of everything is fixed. Needs the extra `stacked` (greenlet).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch import Tensor

from fedpact.common.losses import Loss
from fedpact.common.params import FlatModel, on_cpu
from fedpact.common.randomness.keystream import KeyStream, normals_of, streams_at_once
from fedpact.common.randomness.seeded import SeededDraws
from fedpact.per_sample.clipping import SiteSum, Weights
from fedpact.per_sample.dense import Dense
from fedpact.per_sample.kernel import PerSampleKernel, PlainKernel
from fedpact.per_sample.layout import Placement


@dataclass(eq=False, slots=True)
class NoiseRequest:
    """One site's question: total [d] plus `scale` times the normal numbers made of `words`.

    Where it is answered, total is written over.
    """

    total: Tensor
    scale: float
    words: KeyStream


Ask = Callable[[SiteSum | NoiseRequest], Tensor | None]
"""A question to whoever stacks; None: the site has to answer it itself."""

Answers = Callable[[Sequence[SiteSum | NoiseRequest]], Sequence[Tensor | None]]


class Seat(PerSampleKernel):
    """A site's kernel whose sums are asked for together with other sites'."""

    def __init__(self, model: FlatModel, loss: Loss, ask: Ask) -> None:
        super().__init__(model, loss)
        self._ask = ask

    def clipped_sum(
        self,
        x: Tensor,
        y: Tensor,
        clip: float,
        weights: Weights | None = None,
        most: int | None = None,
        shares: Tensor | None = None,
        layout: Placement | None = None,
    ) -> Tensor:
        """Σ_j c_j g_j [d] over the batch x, y [B, ...], with c_j = s_j min(w_j, C/‖g_j‖)."""
        # What is to be refused, or is too long, and an empty batch, is for the site's own kernel.
        if x.shape[0] and clip > 0 and most is None:
            total = self._ask(SiteSum(self.model, x.detach(), y, clip, weights, shares=shares))
            if total is not None:
                return total
        return super().clipped_sum(x, y, clip, weights, most, shares, layout)


class PlainSeat(PlainKernel):
    """The same of a run without privacy."""

    def __init__(self, model: FlatModel, loss: Loss, ask: Ask) -> None:
        super().__init__(model, loss)
        self._ask = ask

    def weighted_sum(
        self, x: Tensor, y: Tensor, weights: Weights | None = None, shares: Tensor | None = None
    ) -> Tensor:
        """Σ_j s_j w_j g_j [d]; the weights are clamped to >= 0 and constants of the gradient."""
        if x.shape[0]:
            asked = SiteSum(self.model, x.detach(), y, math.inf, weights, plain=True, shares=shares)
            total = self._ask(asked)
            if total is not None:
                return total
        return super().weighted_sum(x, y, weights, shares)


class SeatDraws(SeededDraws):
    """A site's draws whose noise is drawn together with other sites', each from its own key."""

    def __init__(self, ask: Ask, seed: int, *around: str | int) -> None:
        super().__init__(seed, *around)
        self._ask = ask

    def add_noise(
        self, total: Tensor, sigma: float, sensitivity: float, step: int, purpose: str
    ) -> Tensor:
        """Return total [d] plus normal noise of σ times its sensitivity; total may be written
        over."""
        if on_cpu(total) and streams_at_once(total.numel(), total.dtype) > 1:
            words = self.noise_words(step, purpose)
            answer = self._ask(NoiseRequest(total, sigma * sensitivity, words))
            if answer is not None:
                return answer
        return super().add_noise(total, sigma, sensitivity, step, purpose)


class Stack:
    """Answers the questions of sites whose models `dense` knows."""

    def __init__(self, dense: Dense) -> None:
        self._dense = dense

    @staticmethod
    def of(model: FlatModel, loss: Loss) -> "Stack | None":
        """Return what stacks the model, None where it is no chain of dense layers."""
        dense = Dense.of(model, loss)
        return None if dense is None else Stack(dense)

    def answers(self, questions: Sequence[SiteSum | NoiseRequest]) -> list[Tensor | None]:
        """Return each question's answer; None where a site has to answer it itself."""
        found: list[Tensor | None] = [None] * len(questions)
        sums = {i: one for i, one in enumerate(questions) if isinstance(one, SiteSum)}
        noise = {i: one for i, one in enumerate(questions) if isinstance(one, NoiseRequest)}
        for i, answer in zip(sums, self._dense.sums(list(sums.values())), strict=True):
            found[i] = answer
        for i, answer in zip(noise, _with_noise(list(noise.values())), strict=True):
            found[i] = answer
        return found


def _with_noise(requests: Sequence[NoiseRequest]) -> list[Tensor]:
    """Return each request's total [d], with its noise."""
    kinds = {(one.total.numel(), one.total.dtype): list[NoiseRequest]() for one in requests}
    for one in requests:
        kinds[one.total.numel(), one.total.dtype].append(one)
    for (size, dtype), alike in kinds.items():
        some = streams_at_once(size, dtype)
        for start in range(0, len(alike), some):
            now = alike[start : start + some]
            numbers = normals_of([one.words for one in now], size, dtype)
            for one, z in zip(now, numbers, strict=True):
                one.total.add_(z, alpha=one.scale)
    return [one.total for one in requests]


class Lockstep:
    """Trains several sites in one thread, side by side. Used by one thread at a time.

    seat: makes what a site trains with, from its way to ask. answers: of so many questions.
    """

    def __init__(self, seats: int, seat: Callable[[Ask], Any], answers: Answers) -> None:
        self._answers = answers
        self._seats = [seat(_ask) for _ in range(seats)]

    @property
    def size(self) -> int:
        """The number of seats."""
        return len(self._seats)

    def serve(self, jobs: Sequence[Callable[[Any], Any]]) -> list[Any]:
        """Carry out at most `size` jobs, and return their results in order.

        A job's exception is raised when all jobs have ended, that of the first one. What `answers`
        raises is raised in every job that asked.
        """
        pairs = zip(jobs, self._seats, strict=False)
        sites = [greenlet(partial(_outcome, job, seat)) for job, seat in pairs]
        # Each runs until it asks, or ends and returns its outcome.
        said = [site.switch() for site in sites]
        while asking := [i for i, what in enumerate(said) if not isinstance(what, _Outcome)]:
            answers = _outcome(self._answers, [said[i] for i in asking])
            for i, answer in zip(asking, answers.each(len(asking)), strict=True):
                said[i] = sites[i].switch(answer)
        return [outcome.get() for outcome in said]


@dataclass
class _Outcome:
    """What a function returned, or raised."""

    value: Any = None
    error: BaseException | None = None

    def get(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.value

    def each(self, count: int) -> "list[_Outcome]":
        """Return the outcomes of a list's items; each that of the whole, where it was raised."""
        return [self] * count if self.error else [_Outcome(value) for value in self.value]


def _outcome(function: Callable[[Any], Any], given: Any) -> _Outcome:
    try:
        return _Outcome(function(given))
    except GreenletExit:  # nobody waits for this site any more
        raise
    except BaseException as error:
        return _Outcome(error=error)


def _ask(question: SiteSum | NoiseRequest) -> Tensor | None:
    """Hand a site's question over to `serve`, and return the answer when all have asked."""
    parent = cast(greenlet, getcurrent().parent)
    # Whether gradients are recorded is the thread's, and the others' while this one waits.
    with torch.set_grad_enabled(True):
        answer: _Outcome = parent.switch(question)
    return answer.get()
