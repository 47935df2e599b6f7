"""The oracle: the only door to a site's records.

An algorithm asks for batches and, on each, for releases. In a private run the oracle has the ledger
write the events down, samples, clips, adds noise, and only then lets a number go. In a plain run it
answers with exact numbers. The algorithm cannot tell the two apart.

    for batch in oracle.batches(3, "gradient", "loss"):     three joint events, charged at once
        w = w - eta * batch.gradient(w)                     any w; each channel once a batch
        loss = batch.loss(w, bound=2.0)

    channel    release                                       sensitivity      divided by
    gradient   Σ c_j g_j,  c_j = clamp(w_j, 0, C/‖g_j‖)      C                q N
    loss       Σ clamp(ℓ_j, 0, bound)                        bound            q N
    below      Σ (1[ℓ_j <= bound] - 1/2)                     1/2              q N, then + 1/2

Each release adds N(0, σ_c² sensitivity²) to the sum (in every coordinate). All channels of a batch
see the same records: they are one joint event with σ_joint = (Σ σ_c^-2)^(-1/2) (spec: releases that
share a batch). The divisor is the expected batch size, as the realised one is itself private.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedpact.check import non_negative, positive
from fedpact.errors import PolicyRefused
from fedpact.privacy.kernel import PerSampleKernel, PlainKernel
from fedpact.privacy.ledger import Ledger
from fedpact.privacy.noise import Draws
from fedpact.privacy.terms import Terms
from fedpact.theory.accounting import joint

# The kernel's float32 norms are exact to 5e-6 (tested); clipping to slightly less than C keeps the
# true length of every contribution at or below C.
_SLACK = 1e-5


@dataclass(frozen=True)
class Uniform:
    """Every record counts alike: w_j = 1."""

    def __call__(self, losses: Tensor) -> Tensor:
        """Return w_j [B] for losses ℓ_j [B]."""
        return torch.ones_like(losses)


@dataclass(frozen=True)
class Fair:
    """FedFair's weighting, per record: w_j = max(0, 1 + λ (ℓ_j - F)) (FedFDP, equation 15).

    lam: λ >= 0. reference: F, the loss that records are compared with.
    The paper's weight has no lower bound, and its contribution none above; see docs/errata.md.
    """

    lam: float
    reference: float

    def __post_init__(self) -> None:
        non_negative(lam=self.lam)

    def __call__(self, losses: Tensor) -> Tensor:
        """Return w_j [B] for losses ℓ_j [B]."""
        return (1 + self.lam * (losses - self.reference)).clamp_(min=0)


Weighting = Uniform | Fair
"""The closed family of per-record weights: an algorithm names one, it cannot pass code."""


class Batch(Protocol):
    """One Poisson batch, on which each declared channel answers once."""

    def gradient(self, w: Tensor, weighting: Weighting = ...) -> Tensor:
        """Return the mean weighted gradient at w: [d] -> [d]."""
        ...

    def loss(self, w: Tensor, bound: float) -> float:
        """Return the mean of the losses at w [d], each clipped to [0, bound]."""
        ...

    def below(self, w: Tensor, bound: float) -> float:
        """Return the share of records whose loss at w [d] is at most bound; noise may leave [0, 1]."""
        ...


class Oracle(Protocol):
    """What an algorithm's local part is given: the door, with the records behind it."""

    def batches(self, count: int, *channels: str) -> Iterator[Batch]:
        """Yield `count` batches that answer the channels; an earlier batch is closed by the next."""
        ...


@dataclass(frozen=True)
class Records:
    """A site's training records: x [n, ...], y [n]. Only oracles hold one."""

    x: Tensor
    y: Tensor


class PlainOracle:
    """Exact answers, for runs that are explicitly not private: the private run's twin.

    Batches are Poisson batches and sums are divided by q N, as in a private run. Losses are not
    clipped.
    """

    def __init__(
        self, records: Records, kernel: PlainKernel, rate: float, size: float, draws: Draws
    ) -> None:
        self._records, self._kernel, self._draws = records, kernel, draws
        self._rate, self._expected = rate, rate * size
        self._step = 0

    def batches(self, count: int, *channels: str) -> Iterator["PlainBatch"]:
        """See Oracle."""
        del channels
        for _ in range(count):
            chosen = self._draws.batch(len(self._records.y), self._rate, self._step)
            self._step += 1
            x, y = self._records.x[chosen], self._records.y[chosen]
            yield PlainBatch(self._kernel, x, y, self._expected)


class PlainBatch:
    """See Batch."""

    def __init__(self, kernel: PlainKernel, x: Tensor, y: Tensor, expected: float) -> None:
        self._kernel, self._x, self._y, self._expected = kernel, x, y, expected

    def gradient(self, w: Tensor, weighting: Weighting = Uniform()) -> Tensor:  # noqa: B008
        """See Batch."""
        self._kernel.model.load(w)
        weights = None if isinstance(weighting, Uniform) else weighting
        return self._kernel.weighted_sum(self._x, self._y, weights) / self._expected

    def loss(self, w: Tensor, bound: float) -> float:
        """See Batch; here the losses are not clipped."""
        del bound
        self._kernel.model.load(w)
        return float(self._kernel.losses(self._x, self._y).sum()) / self._expected

    def below(self, w: Tensor, bound: float) -> float:
        """See Batch."""
        self._kernel.model.load(w)
        losses = self._kernel.losses(self._x, self._y)
        return float(((losses <= bound).double() - 0.5).sum()) / self._expected + 0.5


@dataclass(frozen=True)
class Charge:
    """How an oracle's events are written down: the ledger, and what the entries say of the request."""

    ledger: Ledger
    run: str
    round: int
    digest: str
    attempt: int = 0

    def __call__(self, terms: Terms, first: int, count: int, channels: tuple[str, ...]) -> None:
        """Charge `count` joint events of the channels, the first of them the request's step `first`.

        Raises PolicyRefused: a channel that the terms do not name, or none, or one twice.
        """
        if not channels or len(set(channels)) < len(channels) or set(channels) - set(terms.sigmas):
            raise PolicyRefused(
                f"channels {list(channels)} were asked for: this run's terms at the site name "
                f"{sorted(terms.sigmas)}, each once a batch"
            )
        self.ledger.charge(
            self.run,
            f"{self.round}/{first}/{self.digest}",
            joint(terms.rate, [terms.sigmas[c] for c in channels]),
            count,
            purpose=channels,
            round_number=self.round,
            attempt=self.attempt,
        )


class PrivateOracle:
    """Clipped, noised, charged answers: record-level (ε, δ)-DP under add/remove of one record."""

    def __init__(
        self,
        records: Records,
        kernel: PerSampleKernel,
        terms: Terms,
        draws: Draws,
        charge: Callable[[Terms, int, int, tuple[str, ...]], None],
    ) -> None:
        self._records, self._kernel, self._draws = records, kernel, draws
        self._terms, self._charge = terms, charge
        self._step = 0

    def batches(self, count: int, *channels: str) -> Iterator["PrivateBatch"]:
        """See Oracle. Raises BudgetExhausted and PolicyRefused, before any record is read."""
        self._charge(self._terms, self._step, count, channels)
        first = self._step
        self._step += count
        for step in range(first, first + count):
            chosen = self._draws.batch(len(self._records.y), self._terms.rate, step)
            batch = PrivateBatch(
                self._kernel,
                self._records.x[chosen],
                self._records.y[chosen],
                self._terms,
                lambda size, like, channel, step=step: self._draws.gaussian(
                    size, like, step, channel
                ),
                channels,
            )
            yield batch
            batch.close()


class PrivateBatch:
    """See Batch. A channel answers once: a second answer would be a second release."""

    def __init__(
        self,
        kernel: PerSampleKernel,
        x: Tensor,
        y: Tensor,
        terms: Terms,
        gaussian: Callable[[int, Tensor, str], Tensor],
        channels: tuple[str, ...],
    ) -> None:
        self._kernel, self._x, self._y, self._terms = kernel, x, y, terms
        self._gaussian, self._open = gaussian, set(channels)
        self._expected = terms.rate * terms.size

    def close(self) -> None:
        """Answer no further."""
        self._open.clear()

    def gradient(self, w: Tensor, weighting: Weighting = Uniform()) -> Tensor:  # noqa: B008
        """See Batch."""
        self._use("gradient")
        self._kernel.model.load(w)
        clip = self._terms.clip * (1 - _SLACK)
        weights = None if isinstance(weighting, Uniform) else weighting
        total = self._kernel.clipped_sum(self._x, self._y, clip, weights)
        return self._release(total, "gradient", self._terms.clip)

    def loss(self, w: Tensor, bound: float) -> float:
        """See Batch."""
        self._use("loss")
        positive(bound=bound)
        clipped = self._losses(w).clamp(0, bound)
        return float(self._release(clipped.sum().reshape(1), "loss", bound))

    def below(self, w: Tensor, bound: float) -> float:
        """See Batch."""
        self._use("below")
        votes = (self._losses(w) <= positive(bound=bound)).double() - 0.5
        return float(self._release(votes.sum().reshape(1), "below", 0.5)) + 0.5

    def _losses(self, w: Tensor) -> Tensor:
        self._kernel.model.load(w)
        losses = self._kernel.losses(self._x, self._y).double()
        return losses[torch.isfinite(losses)]

    def _release(self, total: Tensor, channel: str, sensitivity: float) -> Tensor:
        sigma = self._terms.sigmas[channel]
        if sigma > 0:
            noise = self._gaussian(total.numel(), total, channel)
            total = total.add(noise, alpha=sigma * sensitivity)
        return total / self._expected

    def _use(self, channel: str) -> None:
        if channel not in self._open:
            raise PolicyRefused(
                f"channel {channel!r} is not open on this batch: declare it when asking for the "
                "batch, use it once, and not after the next batch"
            )
        self._open.discard(channel)
