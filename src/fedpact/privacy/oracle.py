"""The oracle: the only door to a site's records.

An algorithm asks for batches and, on each, for releases. In a private run the oracle has the ledger
write the events down, samples, clips, adds noise, and only then lets a number go. In a plain run it
answers with exact numbers. The algorithm cannot tell the two apart.

    for batch in oracle.batches(3, "gradient", "loss"):     three joint events, charged at once
        w = w - eta * batch.gradient(w)                     any w; each channel once a batch
        loss = batch.loss(w, bound=2.0)
    g = oracle.opening("gradient").gradient(w)              the event that opens a round: its own
                                                            rate and noise (terms.Opening)
    channel    release                                       sensitivity      divided by
    gradient   Σ c_j g_j,  c_j = clamp(w_j, 0, C/‖g_j‖)      C                q N
    gradient   ḡ min(1, C/‖ḡ‖), ḡ the batch's mean gradient  2C               (batch clipping)
    difference Σ d_j min(1, bound/‖d_j‖), d_j = ∇ℓ_j(w) - ∇ℓ_j(w')
                                                             bound            q N
    loss       Σ clamp(ℓ_j, 0, bound)                        bound            q N
    below      Σ (1[ℓ_j <= bound] - 1/2)                     1/2              q N, then + 1/2

Each release adds N(0, σ_c² b²) in every coordinate, b the bound: C, bound, 1/2; a bound
follows from released numbers only. With m_c = σ_c b over the sensitivity, all channels of a batch,
which see the same records, are one joint event with σ_joint = (Σ m_c^-2)^(-1/2) (spec: releases
that share a batch). The divisor of a sum is the expected batch size, as the realised one is itself
private. The terms say which clipping it is.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol, cast

from torch import Tensor

from fedpact.check import count as at_least_one
from fedpact.draws.keystream import CHUNK
from fedpact.draws.seeded import Draws
from fedpact.errors import PolicyRefused
from fedpact.persample.kernel import PerSampleKernel, PlainKernel
from fedpact.persample.layout import OVERFLOW, Placement, slots_for
from fedpact.persample.weighting import UNIFORM, Fair, Uniform, Weighting
from fedpact.privacy import columns, reach
from fedpact.privacy.batch_clipped import BatchClippedBatch, BatchClippedKernel
from fedpact.privacy.batches import Batch, PerSampleBatch, PlainBatch
from fedpact.privacy.charge import Charge
from fedpact.privacy.mechanisms import mechanism_of
from fedpact.privacy.reach import Range, ReplyBounds
from fedpact.privacy.records import Records
from fedpact.privacy.terms import Opening, Terms
from fedpact.theory.shares import SHARE_DEVIATION

__all__ = [
    "UNIFORM",
    "Batch",
    "Charge",
    "Fair",
    "Opening",
    "Oracle",
    "PlainOracle",
    "PrivateOracle",
    "Range",
    "Records",
    "ReplyBounds",
    "Terms",
    "Uniform",
    "Weighting",
    "reach",
]


class Oracle(Protocol):
    """What an algorithm's local part is given: the door, with the records behind it."""

    @property
    def batch_size(self) -> float:
        """The expected batch size q_i N_i, a public number."""
        ...

    @property
    def noise_variance(self) -> float:
        """The variance of a gradient's noise in each coordinate, public; 0 in a plain run."""
        ...

    @property
    def steps_left(self) -> float:
        """How many batches the site's reservation still allows, public; inf in a plain run.

        To be asked for at the end of `local`, when this request's batches have been charged.
        """
        ...

    @property
    def shares(self) -> Mapping[str, Tensor]:
        """What was released with a share of noise: channel -> int64 [d], on the terms' grid.

        Where it is not empty, this goes to the server in place of what `local` made of it.
        """
        ...

    def batches(self, count: int, *channels: str) -> Iterator[Batch]:
        """Yield `count` batches that answer the channels; each is closed by the next one."""
        ...

    def opening(self, *channels: str) -> Batch:
        """Return the batch that opens a round, of the rate that the algorithm's Opening names."""
        ...

    def columns(self) -> columns.Means:
        """Return what scales the site's columns, once, before the first round."""
        ...

    def unprotected(self, w: Tensor) -> tuple[float, Tensor]:
        """Return F_i(w) and ∇F_i(w) [d] over all records, exact: no clip, no noise, no charge.

        Only for runs that say of themselves that they are not private. Raises PolicyRefused.
        """
        ...


class PlainOracle:
    """Exact answers, for runs that are explicitly not private: the private run's twin.

    Batches are Poisson batches and sums are divided by q N, as in a private run. Losses are not
    clipped.
    """

    noise_variance = 0.0
    steps_left = math.inf
    shares: Mapping[str, Tensor] = MappingProxyType({})

    def __init__(
        self,
        records: Records,
        kernel: PlainKernel,
        rate: float,
        size: float,
        draws: Draws,
        opening_rate: float = 1.0,
    ) -> None:
        self._records, self._kernel, self._draws = records, kernel, draws
        self._size, self._rate, self.batch_size = size, rate, rate * size
        self._opening_rate = opening_rate
        self._step = 0

    def batches(self, count: int, *channels: str) -> Iterator["PlainBatch"]:
        """Yield `count` batches that answer the channels; each is closed by the next one."""
        for _ in range(at_least_one(count=count)):
            batch = self._batch(self._rate, channels)
            yield batch
            batch.close()

    def opening(self, *channels: str) -> "PlainBatch":
        """Return the batch that opens a round, of the rate that the algorithm's Opening names."""
        return self._batch(self._opening_rate, channels)

    def columns(self) -> columns.Means:
        """Return what scales the site's columns, once, before the first round."""
        found = columns.sums(self._records.x[:, list(self._records.columns)])
        return columns.Means(found / self._size, 0.0, self._size)

    def unprotected(self, w: Tensor) -> tuple[float, Tensor]:
        """Return F_i(w) and ∇F_i(w) [d] over all records, exact: no clip, no noise, no charge."""
        return self._kernel.mean_over(self._records.x, self._records.y, w)

    def _batch(self, rate: float, channels: tuple[str, ...]) -> "PlainBatch":
        x, y, shares = self._records.batch(self._draws, rate, self._step)
        self._step += 1
        return PlainBatch(self._kernel, x, y, rate * self._size, channels, shares)


class PrivateOracle:
    """Clipped, noised, charged answers: (ε, δ)-DP under add/remove of one record.

    Where the records say whose they are, of one person with all records: a person is in a batch
    with the same chance, and has m records, each with a weight of 1/m in its own clip, so that all
    of them add at most C to a sum. Size, rate and divisor are then of persons.
    exact: answers `unprotected`, after which nothing that the run releases is private; None in
    every run that is to be. placement: "compact" or "scattered" (persample.layout); None: as the
    kernel finds for itself.
    Raises PolicyRefused: draws that come again with a ledger that is not hypothetical, or fresh
    ones with one that is, which would take a second release for the first.
    """

    def __init__(
        self,
        records: Records,
        kernel: PerSampleKernel | BatchClippedKernel,
        terms: Terms,
        draws: Draws,
        charge: Callable[[Terms, int, int, tuple[str, ...]], None],
        left: Callable[[], float] = lambda: math.inf,
        exact: PlainKernel | None = None,
        placement: str | None = None,
    ) -> None:
        if isinstance(charge, Charge) and charge.ledger.hypothetical != draws.repeats:
            raise PolicyRefused(
                f"ledger {charge.ledger.path} has hypothetical = {charge.ledger.hypothetical}, the "
                f"draws have repeats = {draws.repeats}: a simulation has both, a deployment neither"
            )
        self._records, self._kernel, self._draws = records, kernel, draws
        self._terms, self._charge, self._left, self._exact = terms, charge, left, exact
        self._step, self._placement = 0, placement
        self.shares: dict[str, Tensor] = {}

    @property
    def batch_size(self) -> float:
        """The expected batch size q_i N_i, a public number."""
        return self._terms.batch_size

    @property
    def noise_variance(self) -> float:
        """The variance of a gradient's noise in each coordinate, public; 0 in a plain run."""
        return self._terms.noise_variance

    @property
    def steps_left(self) -> float:
        """How many batches the site's reservation still allows, public; inf in a plain run."""
        return self._left()

    def batches(self, count: int, *channels: str) -> Iterator[PerSampleBatch | BatchClippedBatch]:
        """Yield `count` batches that answer the channels; each is closed by the next one. Raises
        BudgetExhausted and PolicyRefused, before any record is read."""
        self._charge(self._terms, self._step, at_least_one(count=count), channels)
        first = self._step
        self._step += count
        for step in range(first, first + count):
            batch = self._batch(self._terms, step, channels)
            yield batch
            batch.close()

    def opening(self, *channels: str) -> PerSampleBatch | BatchClippedBatch:
        """Return the batch that opens a round, of the rate that the algorithm's Opening names.
        Raises BudgetExhausted, and PolicyRefused: the terms have no opening."""
        if not self._terms.openings:
            raise PolicyRefused(
                f"an opening with {list(channels)} was asked for: this run's terms at the site "
                "name none"
            )
        opening = self._terms.opening
        self._charge(opening, self._step, 1, channels)
        self._step += 1
        return self._batch(opening, self._step - 1, channels)

    def columns(self) -> columns.Means:
        """Return what scales the site's columns, once, before the first round. Raises
        BudgetExhausted, and PolicyRefused: the terms have no such release."""
        once = self._charge.once if isinstance(self._charge, Charge) else None
        u = self._records.x[:, list(self._records.columns)]
        return columns.answer_columns(self._terms.columns, u, self._terms.size, once, self._draws)

    def unprotected(self, w: Tensor) -> tuple[float, Tensor]:
        """Return F_i(w) and ∇F_i(w) [d] over all records, exact: no clip, no noise, no charge."""
        if self._exact is None:
            raise PolicyRefused(
                "exact numbers over all records were asked for: this run protects its records; "
                "leave out what asks for them, as an estimator that is 'raw'"
            )
        if isinstance(self._charge, Charge):
            self._charge.ledger.expose(self._charge.run, self._charge.round)
        return self._exact.mean_over(self._records.x, self._records.y, w)

    def _batch(
        self, terms: Terms, step: int, channels: tuple[str, ...]
    ) -> PerSampleBatch | BatchClippedBatch:
        # What is accounted for decides, not the kernel: the wrong one has no such method.
        answering = mechanism_of(terms.mechanism).batch
        # Per-sample passes write over no record, and refuse a model that would. At q = 1 copies
        # were most of a step.
        lent = answering is PerSampleBatch
        x, y, shares = self._records.batch(self._draws, terms.rate, step, lent=lent)
        release = self._draws.add_noise
        if terms.units:
            release = self._shared if terms.honest else partial(self._rounded, terms.units)
        add_noise = partial(release, step=step)
        x, y, shares, layout = self._laid_out(terms, step, x, y, shares)
        return answering(cast(Any, self._kernel), x, y, terms, add_noise, channels, shares, layout)

    def _laid_out(
        self, terms: Terms, step: int, x: Tensor, y: Tensor, shares: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Placement | None]:
        """Return the batch with its layout; records that M slots have no place for are left out."""
        if self._placement is None or not isinstance(self._kernel, PerSampleKernel):
            return x, y, shares, None
        if self._placement == "compact":
            return x, y, shares, Placement(terms.batch_size)
        if shares is not None:
            # How many records persons have is not public: each record has a pass of its own.
            return x, y, shares, Placement(length=1)
        most = slots_for(terms.size, terms.rate, OVERFLOW / max(terms.steps, 1))
        slots, length = self._kernel.scattered(x, y, most)
        count = min(len(y), slots)
        places = self._draws.places(count, slots, step)
        return x[:count], y[:count], None, Placement(places=places, slots=slots, length=length)

    def _shared(
        self, total: Tensor, sigma: float, bound: float, purpose: str, *, step: int
    ) -> Tensor:
        """Return a sum [d] with the site's share of noise, and keep it as whole numbers.

        Raises PolicyRefused: the request has one of this channel already. Sums of several would be
        protected by each one's own share only.
        """
        if purpose in self.shares:
            raise PolicyRefused(
                f"a second release of {purpose!r} was asked for in one round: sites that share "
                "noise out make one"
            )
        unit = sigma * bound / SHARE_DEVIATION
        self.shares[purpose] = self._draws.share(total, unit, SHARE_DEVIATION, step, purpose)
        return (self.shares[purpose].double() * unit).to(total.device, total.dtype)

    def _rounded(
        self, units: float, total: Tensor, sigma: float, bound: float, purpose: str, *, step: int
    ) -> Tensor:
        """Return a sum [d] with the site's noise, both rounded to a coarse grid."""
        unit = sigma * bound / units
        whole = self._draws.share(total, unit, units, step, purpose)
        # In parts, so that what is in between stays in the processor's cache.
        for start in range(0, len(total), CHUNK):
            part = slice(start, start + CHUNK)
            total[part] = whole[part].double().mul_(unit)
        return total
