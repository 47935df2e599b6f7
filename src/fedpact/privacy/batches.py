"""What one Poisson batch answers: exactly in a plain run, clipped and with noise in a private one.

See oracle for the channels. A batch draws nothing and charges nothing itself: its oracle has.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from fedpact.check import non_negative, positive
from fedpact.errors import PolicyRefused
from fedpact.params import FlatModel, sent
from fedpact.persample.bounds import check_clip, slack, within
from fedpact.persample.kernel import PerSampleKernel, PlainKernel
from fedpact.persample.layout import Placement
from fedpact.persample.weighting import UNIFORM, Uniform, Weighting
from fedpact.privacy.guarded import measure_losses, sum_finite


def clip_for(clip: float, expected: float) -> float:
    """The clip that keeps what one record moves a sum by at or below C, rounding included.

    expected: q N, the expected size of a batch.
    """
    return clip / (1 + slack(most_records(expected)))


def most_records(expected: float) -> int:
    """How many records a batch of q N expected ones is reckoned with.

    A Poisson batch of N records is larger once in 10^31 batches (Chernoff: with t = 12 √(qN) + 50,
    exp(-t² / 2(qN + t/3)) is at most 10^-31). One that is, as where a site has more records than it
    has declared, is summed in another way, which keeps the same slack; see persample.bounds.
    """
    return math.ceil(expected + 12 * math.sqrt(expected) + 50)


class Batch(Protocol):
    """One Poisson batch, on which each declared channel answers once."""

    @property
    def noise_variance(self) -> float:
        """The variance of a gradient's noise in each coordinate, public; 0 in a plain run."""
        ...

    def gradient(self, w: Tensor, weighting: Weighting = ...) -> Tensor:
        """Return the mean weighted gradient at w: [d] -> [d], which the caller may write over."""
        ...

    def difference(self, w: Tensor, anchor: Tensor, bound: float) -> Tensor:
        """Return the mean of ∇ℓ_j(w) - ∇ℓ_j(anchor), each clipped to `bound`: [d], [d] -> [d].

        bound: >= 0. 0 is for w = anchor: the answer is 0 without noise, as nothing is released.
        """
        ...

    def loss(self, w: Tensor, bound: float) -> float:
        """Return the mean of the losses at w [d], each clipped to [0, bound]."""
        ...

    def below(self, w: Tensor, bound: float) -> float:
        """Return the share of records with a loss of at most bound at w [d]; may leave [0, 1]."""
        ...


class OpenChannels:
    """The channels of a batch that are still to be answered."""

    def __init__(self, channels: tuple[str, ...]) -> None:
        self._open = set(channels)

    def close(self) -> None:
        """Answer no further."""
        self._open.clear()

    def use(self, channel: str) -> None:
        """Mark a channel as answered. Raises PolicyRefused where it is not open."""
        if channel not in self._open:
            raise PolicyRefused(
                f"channel {channel!r} is not open on this batch: declare it when asking for the "
                "batch, use it once, and not after the next batch"
            )
        self._open.discard(channel)


class PlainBatch(OpenChannels):
    """A batch without noise whose channels close as a private one's do, so no run asks for more."""

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
        """Return the mean weighted gradient at w: [d] -> [d], which the caller may write over."""
        self.use("gradient")
        self._kernel.model.load(w)
        weights = None if isinstance(weighting, Uniform) else weighting
        total = self._kernel.weighted_sum(self._x, self._y, weights, self._shares)
        return total / self._expected

    def difference(self, w: Tensor, anchor: Tensor, bound: float) -> Tensor:
        """Return the mean of ∇ℓ_j(w) - ∇ℓ_j(anchor), which are not clipped."""
        self.use("difference")
        del bound
        total = self._kernel.difference(self._x, self._y, w, anchor, self._shares)
        return total / self._expected

    def loss(self, w: Tensor, bound: float) -> float:
        """Return the mean of the losses at w [d], which are not clipped."""
        self.use("loss")
        del bound
        self._kernel.model.load(w)
        losses = self._kernel.losses(self._x, self._y)
        return float(person_shares(losses, self._shares).sum()) / self._expected

    def below(self, w: Tensor, bound: float) -> float:
        """Return the share of records with a loss of at most bound at w [d]; may leave [0, 1]."""
        self.use("below")
        self._kernel.model.load(w)
        losses = self._kernel.losses(self._x, self._y)
        votes = person_shares((losses <= bound).double() - 0.5, self._shares)
        return float(votes.sum()) / self._expected + 0.5


def person_shares(values: Tensor, shares: Tensor | None) -> Tensor:
    """Return what each record [B] adds where it has a share of a person's part; None: all of it."""
    return values if shares is None else values * sent(shares, values.device)


class Kernel(Protocol):
    """What every kernel has: a model, and the losses [B] of records at its weights."""

    @property
    def model(self) -> FlatModel:
        """The model, whose weights are set by `load`."""
        ...

    def losses(self, x: Tensor, y: Tensor, layout: Placement | None = None) -> Tensor:
        """Return the losses [B] of the records x, y [B, ...]."""
        ...


class NoiseTerms(Protocol):
    """What a batch knows of its site's terms; see privacy.terms.Terms."""

    @property
    def clip(self) -> float:
        """The bound on one record's contribution to a gradient sum, C."""
        ...

    @property
    def sigmas(self) -> Mapping[str, float]:
        """Channel -> the standard deviation of its noise, relative to its bound."""
        ...

    @property
    def batch_size(self) -> float:
        """The expected batch size q N."""
        ...

    @property
    def noise_variance(self) -> float:
        """The variance of a gradient's noise in each coordinate, public; 0 in a plain run."""
        ...


class AddNoise(Protocol):
    """Draws.add_noise of one step: total [k] plus N(0, σ_c² bound²) in every entry."""

    def __call__(self, total: Tensor, sigma: float, sensitivity: float, *, purpose: str) -> Tensor:
        """Return it; purpose: the channel, so that each has noise of its own."""
        ...


K = TypeVar("K", bound=Kernel)


class NoisyBatch(OpenChannels, Generic[K]):
    """What private batches share. A channel answers once: a second answer would be a release."""

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
        """The variance of a gradient's noise in each coordinate, public; 0 in a plain run."""
        return self._terms.noise_variance

    def loss(self, w: Tensor, bound: float) -> float:
        """Return the mean of the losses at w [d], each clipped to [0, bound]."""
        self.use("loss")
        check_clip("bound", positive(bound=bound))
        losses, finite = self._losses(w)
        each = person_shares(torch.where(finite, losses.clamp(0, bound), 0), self._shares)
        total = each.sum().reshape(1)
        return float(self.noisy(total, "loss", bound)) / self._terms.batch_size

    def below(self, w: Tensor, bound: float) -> float:
        """Return the share of records with a loss of at most bound at w [d]; may leave [0, 1]."""
        self.use("below")
        losses, finite = self._losses(w)
        votes = (losses <= positive(bound=bound)).double() - 0.5
        each = person_shares(torch.where(finite, votes, 0), self._shares)
        total = self.noisy(each.sum().reshape(1), "below", 0.5)
        return float(total) / self._terms.batch_size + 0.5

    def noisy(self, total: Tensor, channel: str, bound: float) -> Tensor:
        """Return total [k] plus N(0, σ_c² bound²) in every entry; total may be written over."""
        sigma = self._terms.sigmas[channel]
        if sigma == 0:
            return total
        return self._add_noise(total, sigma, bound, purpose=channel)

    def _losses(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """Return the losses [B] at w, and which of them are finite."""
        self._kernel.model.load(w)
        losses = measure_losses(self._kernel.losses, self._x, self._y, self._layout)
        return losses, losses.isfinite()


class PerSampleBatch(NoisyBatch[PerSampleKernel]):
    """See Batch. The sum of gradients that are clipped one by one, over the expected batch size.

    shares: where a batch is of persons, 1/m for each of a person's m records: all of them together
    then add at most C, as does one record otherwise.
    """

    def _most(self, y: Tensor, shares: Tensor | None) -> int | None:
        """Return n where the batch has more of whatever is sampled, records or persons; else None.

        The bound on roundings needs no more than that Σ ‖v_j‖ <= n C.
        """
        most = most_records(self._terms.batch_size)
        count = len(y) if shares is None else float(shares.sum())
        return most if count > most else None

    def gradient(self, w: Tensor, weighting: Weighting = UNIFORM) -> Tensor:
        """Return the mean weighted gradient at w: [d] -> [d], which the caller may write over."""
        self.use("gradient")
        self._kernel.model.load(w)
        clip = clip_for(self._terms.clip, self._terms.batch_size)
        weights = None if isinstance(weighting, Uniform) else weighting
        check_clip("clip", clip)
        clipped_sum = self._kernel.clipped_sum

        def take(x: Tensor, y: Tensor, shares: Tensor | None, layout: Placement | None) -> Tensor:
            return clipped_sum(x, y, clip, weights, self._most(y, shares), shares, layout)

        finish = partial(within, clip=clip, most=most_records(self._terms.batch_size))
        total = sum_finite(take, self._x, self._y, self._shares, w, finish, self._layout)
        return self.noisy(total, "gradient", self._terms.clip).div_(self._terms.batch_size)

    def difference(self, w: Tensor, anchor: Tensor, bound: float) -> Tensor:
        """Return the mean of ∇ℓ_j(w) - ∇ℓ_j(anchor), each clipped to `bound`: [d], [d] -> [d]."""
        self.use("difference")
        if non_negative(bound=bound) == 0:
            return torch.zeros_like(w)
        clip = clip_for(bound, self._terms.batch_size)
        check_clip("bound", clip)
        clipped_difference = self._kernel.clipped_difference

        def take(x: Tensor, y: Tensor, shares: Tensor | None, layout: Placement | None) -> Tensor:
            most = self._most(y, shares)
            return clipped_difference(x, y, w, anchor, clip, most, shares, layout)

        finish = partial(within, clip=clip, most=most_records(self._terms.batch_size))
        total = sum_finite(take, self._x, self._y, self._shares, w, finish, self._layout)
        return self.noisy(total, "difference", bound).div_(self._terms.batch_size)
