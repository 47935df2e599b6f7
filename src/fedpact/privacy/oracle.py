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

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedpact.check import count as at_least_one
from fedpact.check import positive
from fedpact.errors import PolicyRefused
from fedpact.privacy.kernel import PerSampleKernel, PlainKernel
from fedpact.privacy.ledger import Ledger
from fedpact.privacy.noise import Draws
from fedpact.privacy.terms import Terms
from fedpact.privacy.weighting import UNIFORM, Fair, Uniform, Weighting

__all__ = [
    "Batch",
    "Charge",
    "Fair",
    "Oracle",
    "PlainBatch",
    "PlainOracle",
    "PrivateBatch",
    "PrivateOracle",
    "Records",
    "Uniform",
    "Weighting",
]

# The kernel's float32 norms are exact to 5e-6 (tested); clipping to slightly less than C keeps the
# true length of every contribution at or below C.
_SLACK = 1e-5


class Batch(Protocol):
    """One Poisson batch, on which each declared channel answers once."""

    def gradient(self, w: Tensor, weighting: Weighting = ...) -> Tensor:
        """Return the mean weighted gradient at w: [d] -> [d]."""
        ...

    def loss(self, w: Tensor, bound: float) -> float:
        """Return the mean of the losses at w [d], each clipped to [0, bound]."""
        ...

    def below(self, w: Tensor, bound: float) -> float:
        """Return the share of records with a loss of at most bound at w [d]; may leave [0, 1]."""
        ...


class Oracle(Protocol):
    """What an algorithm's local part is given: the door, with the records behind it."""

    def batches(self, count: int, *channels: str) -> Iterator[Batch]:
        """Yield `count` batches that answer the channels; each is closed by the next one."""
        ...


@dataclass(frozen=True)
class Records:
    """A site's training records: x [n, ...], y [n]. Only oracles hold one."""

    x: Tensor
    y: Tensor


class _Channels:
    """The channels of a batch that are still to be answered."""

    def __init__(self, channels: tuple[str, ...]) -> None:
        self._open = set(channels)

    def close(self) -> None:
        """Answer no further."""
        self._open.clear()

    def _use(self, channel: str) -> None:
        if channel not in self._open:
            raise PolicyRefused(
                f"channel {channel!r} is not open on this batch: declare it when asking for the "
                "batch, use it once, and not after the next batch"
            )
        self._open.discard(channel)


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
        for _ in range(at_least_one(count=count)):
            chosen = self._draws.batch(len(self._records.y), self._rate, self._step)
            self._step += 1
            x, y = self._records.x[chosen], self._records.y[chosen]
            batch = PlainBatch(self._kernel, x, y, self._expected, channels)
            yield batch
            batch.close()


class PlainBatch(_Channels):
    """See Batch. Its channels close as a private batch's do, so that no plain run asks for more."""

    def __init__(
        self,
        kernel: PlainKernel,
        x: Tensor,
        y: Tensor,
        expected: float,
        channels: tuple[str, ...],
    ) -> None:
        self._kernel, self._x, self._y, self._expected = kernel, x, y, expected
        super().__init__(channels)

    def gradient(self, w: Tensor, weighting: Weighting = UNIFORM) -> Tensor:
        """See Batch."""
        self._use("gradient")
        self._kernel.model.load(w)
        weights = None if isinstance(weighting, Uniform) else weighting
        return self._kernel.weighted_sum(self._x, self._y, weights) / self._expected

    def loss(self, w: Tensor, bound: float) -> float:
        """See Batch; here the losses are not clipped."""
        self._use("loss")
        del bound
        self._kernel.model.load(w)
        return float(self._kernel.losses(self._x, self._y).sum()) / self._expected

    def below(self, w: Tensor, bound: float) -> float:
        """See Batch."""
        self._use("below")
        self._kernel.model.load(w)
        losses = self._kernel.losses(self._x, self._y)
        return float(((losses <= bound).double() - 0.5).sum()) / self._expected + 0.5


@dataclass(frozen=True)
class Charge:
    """How an oracle's events are written down: the ledger, and what tells this request apart.

    digest: of all that the answer follows from besides records and seed, so that what a
    hypothetical ledger takes for a repetition is one. `run` has to stand for one seed.
    """

    ledger: Ledger
    run: str
    round: int
    digest: str
    attempt: int = 0

    def __call__(self, terms: Terms, first: int, count: int, channels: tuple[str, ...]) -> None:
        """Charge `count` joint events, the first of them the request's step `first`.

        An event is charged whole, as the terms' event, even where fewer channels are asked for.
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
            terms.event,
            count,
            purpose=channels,
            round_number=self.round,
            attempt=self.attempt,
        )


class PrivateOracle:
    """Clipped, noised, charged answers: record-level (ε, δ)-DP under add/remove of one record.

    Raises PolicyRefused: draws that come again with a ledger that is not hypothetical, or fresh
    ones with one that is, which would take a second release for the first.
    """

    def __init__(
        self,
        records: Records,
        kernel: PerSampleKernel,
        terms: Terms,
        draws: Draws,
        charge: Callable[[Terms, int, int, tuple[str, ...]], None],
    ) -> None:
        if isinstance(charge, Charge) and charge.ledger.hypothetical != draws.repeats:
            raise PolicyRefused(
                f"ledger {charge.ledger.path} has hypothetical = {charge.ledger.hypothetical}, the "
                f"draws have repeats = {draws.repeats}: a simulation has both, a deployment neither"
            )
        self._records, self._kernel, self._draws = records, kernel, draws
        self._terms, self._charge = terms, charge
        self._step = 0

    def batches(self, count: int, *channels: str) -> Iterator["PrivateBatch"]:
        """See Oracle. Raises BudgetExhausted and PolicyRefused, before any record is read."""
        self._charge(self._terms, self._step, at_least_one(count=count), channels)
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


class PrivateBatch(_Channels):
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
        self._gaussian = gaussian
        self._expected = terms.rate * terms.size
        super().__init__(channels)

    def gradient(self, w: Tensor, weighting: Weighting = UNIFORM) -> Tensor:
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
