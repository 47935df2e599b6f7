"""Clipped sums over a batch: per record or per batch, with failing records counted as zero.

A model may raise an exception at an unforeseen record, and a refusal because of it would depend on
records. So if a batch raises, each record is tried alone, and the batch is summed again without
those at which the model raises. Whether a record is left out depends on that record and public
numbers only, so the sensitivity is unchanged. A warning goes to the site's own log, once.

The oracle module describes the channels. The oracle has sampled and charged a batch before it
exists.

Batch clipping: one record can reverse the clipped mean. With C = 1 the gradients 1 and -3 have mean
-1; without the second it is 1. Both lie in the ball of radius C, so the sensitivity is 2C whatever
the gradients are (`terms.sensitivity`). The batch's actual size is released only through the
clipped mean. Amplification by sampling requires that a record changes no batch that it is not in,
so gradients must depend on weights and batch only: they are summed by the traced kernel, as under
per-sample clipping.
"""

import logging
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from fedpact.common.check import non_negative, positive
from fedpact.common.errors import PolicyRefused
from fedpact.common.losses import Loss
from fedpact.common.params import FlatModel, copy_to_device
from fedpact.per_sample.clipping import UNIFORM, Weighting, check_clip, slack, within
from fedpact.per_sample.kernel import PerSampleKernel, PlainKernel
from fedpact.per_sample.layout import Placement

_Take = Callable[[Tensor, Tensor, Placement | None], Tensor]
_TakeShared = Callable[[Tensor, Tensor, Tensor | None, Placement | None], Tensor]
_Finish = Callable[[Tensor], Tensor]

_logger = logging.getLogger("fedpact.site")
_told: set[str] = set()


def sum_finite(
    take: _TakeShared,
    x: Tensor,
    y: Tensor,
    shares: Tensor | None,
    like: Tensor,
    finish: _Finish | None,
    layout: Placement | None = None,
) -> Tensor:
    """Return take(x, y, shares, layout) [d], a sum over a batch in which failing records count 0.

    shares: of each record [B], or None; the remaining records keep theirs, and their slots.
    like: [d], a tensor with the result's form. finish: turns the float64 sum [d] of sums over
    single records into that over all; used if the remaining records raise only together, for
    example for lack of memory. None if the result is not such a sum: it is 0 in that case.
    """

    def some(rows: Tensor | slice) -> Tensor:
        part = None if shares is None else shares[rows]
        return take(x[rows], y[rows], part, layout and layout.of(rows))

    try:
        return take(x, y, shares, layout)
    except Exception as error:  # whatever a model may raise at a record
        good = _good(some, len(y), error)
    try:
        return some(good) if len(good) else torch.zeros_like(like)
    except Exception as error:
        _tell(f"records that pass alone fail together, and are summed singly: {_words(error)}")
    if finish is None:
        return torch.zeros_like(like)
    total = torch.zeros_like(like, dtype=torch.float64)
    for j in map(int, good):
        total += some(slice(j, j + 1))
    return finish(total).to(like.dtype)


def measure_each(measure: _Take, x: Tensor, y: Tensor, layout: Placement | None = None) -> Tensor:
    """Return measure(x, y, layout) [B] in float64, NaN for records at which it raises."""

    def some(rows: slice) -> Tensor:
        return measure(x[rows], y[rows], layout and layout.of(rows))

    try:
        return measure(x, y, layout).double()
    except Exception as error:  # whatever a model may raise at a record
        good = _good(some, len(y), error)
    found = torch.full((len(y),), torch.nan, dtype=torch.float64, device=y.device)
    for j in map(int, good):
        found[j] = some(slice(j, j + 1)).double()[0]
    return found


def _good(take: Callable[[slice], Tensor], count: int, error: Exception) -> Tensor:
    """Return the indices, on the CPU, of the records at which `take` does not raise."""
    good = list[int]()
    for j in range(count):
        with suppress(Exception):  # whatever a model may raise at a record
            take(slice(j, j + 1))
            good.append(j)
    _tell(
        f"the model fails on some records of a batch, which get weight 0: {_words(error)}; "
        "declare the ranges, categories or vocabulary that the model accepts"
    )
    return torch.tensor(good, dtype=torch.int64)


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _tell(message: str) -> None:
    if message not in _told:
        _told.add(message)
        _logger.warning(message)


def clip_for(clip: float, expected: float) -> float:
    """Return the clip at which one record changes a sum by at most C, rounding included.

    expected: q N, the expected size of a batch.
    """
    return clip / (1 + slack(most_records(expected)))


def most_records(expected: float) -> int:
    """Return the largest batch that rounding bounds assume, for q N expected records.

    A Poisson batch of N records is larger once in 10^31 batches (Chernoff: with t = 12 √(qN) + 50,
    exp(-t² / 2(qN + t/3)) is at most 10^-31). A larger batch, for example at a site with more
    records than it declared, is summed in another way with the same slack; see per_sample.clipping.
    """
    return math.ceil(expected + 12 * math.sqrt(expected) + 50)


Counted = Literal["loss", "norm"]
"""What `below` compares: a record's loss, or the norm of its gradient."""


class Batch(Protocol):
    """One Poisson batch. Each declared channel answers once."""

    @property
    def noise_variance(self) -> float:
        """The variance of a gradient's noise in each coordinate, public; 0 in a plain run."""
        ...

    def gradient(self, w: Tensor, weighting: Weighting = ...) -> Tensor:
        """Return the mean weighted gradient at w: [d] -> [d], which the caller may write over."""
        ...

    def difference(self, w: Tensor, anchor: Tensor, bound: float) -> Tensor:
        """Return the mean of ∇ℓ_j(w) - ∇ℓ_j(anchor), each clipped to `bound`: [d], [d] -> [d].

        bound: >= 0. At 0, which means w = anchor, the answer is 0 without noise.
        """
        ...

    def loss(self, w: Tensor, bound: float) -> float:
        """Return the mean of the losses at w [d], each clipped to [0, bound]."""
        ...

    def below(self, w: Tensor, bound: float, of: Counted = "loss") -> float:
        """Return the share of records with a value of at most `bound` at w [d]; may leave [0, 1].

        of: "loss", or "norm": the gradient's norm over the clip C. 1 if nothing is clipped.
        """
        ...


class OpenChannels:
    """The channels of a batch that have not been answered yet."""

    def __init__(self, channels: tuple[str, ...]) -> None:
        self._open = set(channels)

    def close(self) -> None:
        """Close every channel."""
        self._open.clear()

    def use(self, channel: str) -> None:
        """Mark a channel as answered. Raises PolicyRefused if it is not open."""
        if channel not in self._open:
            raise PolicyRefused(
                f"channel {channel!r} is not open on this batch: declare it when asking for the "
                "batch, use it once, and not after the next batch"
            )
        self._open.discard(channel)


class PlainBatch(OpenChannels):
    """A batch without noise; its channels close as in a private run, so both allow the same."""

    noise_variance = 0.0

    def __init__(
        self,
        kernel: PlainKernel,
        x: Tensor,
        y: Tensor,
        expected: float,
        channels: tuple[str, ...],
        shares: Tensor | None = None,
    ) -> None:
        self._kernel, self._x, self._y, self._expected = kernel, x, y, expected
        self._shares = shares
        super().__init__(channels)

    def gradient(self, w: Tensor, weighting: Weighting = UNIFORM) -> Tensor:
        self.use("gradient")
        self._kernel.model.load(w)
        weights = None if weighting == UNIFORM else weighting
        total = self._kernel.weighted_sum(self._x, self._y, weights, self._shares)
        return total / self._expected

    def difference(self, w: Tensor, anchor: Tensor, bound: float) -> Tensor:
        self.use("difference")
        del bound
        total = self._kernel.difference(self._x, self._y, w, anchor, self._shares)
        return total / self._expected

    def loss(self, w: Tensor, bound: float) -> float:
        self.use("loss")
        del bound
        return self._mean(w, lambda losses: losses)

    def below(self, w: Tensor, bound: float, of: Counted = "loss") -> float:
        self.use("below")
        if of == "norm":
            return 1.0
        return self._mean(w, lambda losses: (losses <= bound).double() - 0.5) + 0.5

    def _mean(self, w: Tensor, of: Callable[[Tensor], Tensor]) -> float:
        self._kernel.model.load(w)
        values = of(self._kernel.losses(self._x, self._y))
        return float(person_shares(values, self._shares).sum()) / self._expected


def person_shares(values: Tensor, shares: Tensor | None) -> Tensor:
    """Return the records' values [B] times their shares of a person; unchanged without shares."""
    return values if shares is None else values * copy_to_device(shares, values.device)


class NoiseTerms(Protocol):
    """What a batch uses of its site's terms; see privacy.terms.Terms."""

    @property
    def clip(self) -> float:
        """The bound on one record's contribution to a gradient sum, C."""
        ...

    @property
    def sigmas(self) -> Mapping[str, float]:
        """Channel -> the standard deviation of its noise, relative to its bound."""
        ...

    @property
    def batch_size(self) -> float: ...

    @property
    def noise_variance(self) -> float: ...


AddNoise = Callable[..., Tensor]
"""Draws.add_noise of one step: (total [k], σ_c, bound, purpose=channel) -> total + N(0, σ_c²
bound²), with independent noise for each channel."""


K = TypeVar("K", bound="Kernel")


class NoisyBatch(OpenChannels, Generic[K]):
    """Common part of private batches. A second answer of a channel would be another release."""

    def __init__(
        self,
        kernel: K,
        x: Tensor,
        y: Tensor,
        terms: NoiseTerms,
        add_noise: AddNoise,
        channels: tuple[str, ...],
        shares: Tensor | None = None,
        layout: Placement | None = None,
    ) -> None:
        self._x, self._y, self._terms, self._shares, self._layout = x, y, terms, shares, layout
        self._kernel, self._add_noise = kernel, add_noise
        super().__init__(channels)

    @property
    def noise_variance(self) -> float:
        return self._terms.noise_variance

    def loss(self, w: Tensor, bound: float) -> float:
        self.use("loss")
        check_clip("bound", positive(bound=bound))
        losses, finite = self._values(w, "loss")
        each = person_shares(torch.where(finite, losses.clamp(0, bound), 0), self._shares)
        total = each.sum().reshape(1)
        return float(self.noisy(total, "loss", bound)) / self._terms.batch_size

    def below(self, w: Tensor, bound: float, of: Counted = "loss") -> float:
        self.use("below")
        unit = 1.0 if of == "loss" else self._terms.clip
        values, finite = self._values(w, of)
        votes = (values <= positive(bound=bound) * unit).double() - 0.5
        each = person_shares(torch.where(finite, votes, 0), self._shares)
        total = self.noisy(each.sum().reshape(1), "below", 0.5)
        return float(total) / self._terms.batch_size + 0.5

    def noisy(self, total: Tensor, channel: str, bound: float) -> Tensor:
        """Return total [k] plus N(0, σ_c² bound²) in every entry; total may be written over."""
        sigma = self._terms.sigmas[channel]
        if sigma == 0:
            return total
        return self._add_noise(total, sigma, bound, purpose=channel)

    def _values(self, w: Tensor, of: Counted) -> tuple[Tensor, Tensor]:
        """Return the losses or norms [B] at w, and which of them are finite."""
        self._kernel.model.load(w)
        measure = self._kernel.losses if of == "loss" else self._kernel.norms
        values = measure_each(measure, self._x, self._y, self._layout)
        return values, values.isfinite()


class PerSampleBatch(NoisyBatch[PerSampleKernel]):
    """See Batch. The sum of individually clipped gradients, over the expected batch size.

    shares: if persons are sampled, 1/m for each of a person's m records, so that they add at most C
    together, as one record does otherwise.
    """

    def _most(self, y: Tensor, shares: Tensor | None) -> int | None:
        """Return n if the batch has more than n sampled units (records or persons), else None.

        The bound on rounding errors only needs Σ ‖v_j‖ <= n C.
        """
        most = most_records(self._terms.batch_size)
        count = len(y) if shares is None else float(shares.sum())
        return most if count > most else None

    gamma: float | None = None
    """γ of automatic clipping, where it is meant."""

    def gradient(self, w: Tensor, weighting: Weighting = UNIFORM) -> Tensor:
        self.use("gradient")
        self._kernel.model.load(w)
        clip = clip_for(self._terms.clip, self._terms.batch_size)
        weights = None if weighting == UNIFORM else weighting
        check_clip("clip", clip)
        automatic = {} if self.gamma is None else {"gamma": self.gamma}
        clipped_sum = partial(self._kernel.clipped_sum, **automatic)

        def take(x: Tensor, y: Tensor, shares: Tensor | None, layout: Placement | None) -> Tensor:
            return clipped_sum(x, y, clip, weights, self._most(y, shares), shares, layout)

        return self._release("gradient", take, w, clip, self._terms.clip)

    def difference(self, w: Tensor, anchor: Tensor, bound: float) -> Tensor:
        self.use("difference")
        if non_negative(bound=bound) == 0:
            return torch.zeros_like(w)
        clip = clip_for(bound, self._terms.batch_size)
        check_clip("bound", clip)
        clipped_difference = self._kernel.clipped_difference

        def take(x: Tensor, y: Tensor, shares: Tensor | None, layout: Placement | None) -> Tensor:
            most = self._most(y, shares)
            return clipped_difference(x, y, w, anchor, clip, most, shares, layout)

        return self._release("difference", take, w, clip, bound)

    def _release(
        self, channel: str, take: _TakeShared, w: Tensor, clip: float, bound: float
    ) -> Tensor:
        finish = partial(within, clip=clip, most=most_records(self._terms.batch_size))
        total = sum_finite(take, self._x, self._y, self._shares, w, finish, self._layout)
        return self.noisy(total, channel, bound).div_(self._terms.batch_size)


class AutomaticBatch(PerSampleBatch):
    """See Batch. Each record's gradient is scaled to the norm C ‖g_j‖ / (‖g_j‖ + γ), below C.

    C / (‖g_j‖ + γ) enters as a weight, and the kernel still clips to C, which gives the bound.
    """

    gamma = 0.01  # the paper's


# Scaling rounds each entry by up to 2^-24 in float32; this keeps the true norm at or below C.
_SLACK = 1e-6


class BatchClippedKernel:
    """Clipped mean gradients of one model. All else is as PerSampleKernel's, which it uses.

    Raises ModelError, as that does.
    """

    def __init__(self, model: FlatModel, loss: Loss) -> None:
        self.model, self.loss = model, loss
        self._apart = apart = PerSampleKernel(model, loss)
        self.seed, self.losses, self.norms = apart.seed, apart.losses, apart.norms
        self.way = apart.way

    def verify(self, x: Tensor, y: Tensor) -> None:
        """Check that the model does not mix a batch's records. Raises ModelError otherwise."""
        self._apart.verify(x, y)

    def clipped_mean(self, x: Tensor, y: Tensor, clip: float) -> Tensor:
        """Return ḡ min(1, C/‖ḡ‖) [d], ḡ the mean gradient of the records x, y [B, ...].

        clip: C > 0, or infinity. A record whose loss or gradient is not finite adds 0 to the mean's
        sum; see PerSampleKernel. Zeros for an empty batch, and where ‖ḡ‖ is not finite.
        """
        if len(x) == 0:
            return torch.zeros_like(self.model.vector)
        mean = self._apart.clipped_sum(x, y, math.inf) / len(x)
        exact = mean.double()
        norm = exact.square().sum().sqrt()
        scale = (clip * (1 - _SLACK) / norm).clamp_max(1)
        return torch.where(norm.isfinite(), exact * scale, 0).to(mean.dtype)


Kernel = PerSampleKernel | BatchClippedKernel
"""What computes gradients in a private run."""


class BatchClippedBatch(NoisyBatch[BatchClippedKernel]):
    """A batch whose mean gradient is clipped as a whole."""

    def gradient(self, w: Tensor, weighting: Weighting = UNIFORM) -> Tensor:
        self.use("gradient")
        if weighting != UNIFORM:
            raise PolicyRefused(
                f"weighting is {weighting}: under batch clipping there is no clip per record that "
                'a weight could be part of; use privacy.mode = "per_sample"'
            )
        self._kernel.model.load(w)
        clipped_mean = self._kernel.clipped_mean

        def take(x: Tensor, y: Tensor, _: Tensor | None, layout: Placement | None) -> Tensor:
            del layout  # the bound does not depend on slots
            return clipped_mean(x, y, self._terms.clip)

        # Any value lies in the ball of radius C, so one record changes it by at most 2C.
        mean = sum_finite(take, self._x, self._y, None, w, None)
        return self.noisy(mean, "gradient", self._terms.clip)

    def difference(self, w: Tensor, anchor: Tensor, bound: float) -> Tensor:
        del w, anchor, bound
        raise PolicyRefused(
            "a gradient difference was asked for under batch clipping, which has no sensitivity "
            'for it; use privacy.mode = "per_sample"'
        )
