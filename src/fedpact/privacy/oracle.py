"""The only access to a site's records: clipped, noised, and charged to the ledger beforehand.

An algorithm asks for batches and, on each batch, for releases. In a private run the oracle first
charges the ledger, then samples, clips and adds noise, and only then returns a number. In a plain
run it returns exact numbers. The algorithm cannot tell the two apart.

    for batch in oracle.batches(3, "gradient", "loss"):     three joint events, charged together
        w = w - eta * batch.gradient(w)                     at any w; each channel once per batch
        loss = batch.loss(w, bound=2.0)
    g = oracle.opening("gradient").gradient(w)              the event that opens a round, with its
                                                            own rate and noise (terms.Opening)
    channel    release                                       sensitivity      divided by
    gradient   Σ c_j g_j,  c_j = clamp(w_j, 0, C/‖g_j‖)      C                q N
    gradient   ḡ min(1, C/‖ḡ‖), ḡ the batch's mean gradient  2C               (batch clipping)
    difference Σ d_j min(1, bound/‖d_j‖), d_j = ∇ℓ_j(w) - ∇ℓ_j(w')
                                                             bound            q N
    loss       Σ clamp(ℓ_j, 0, bound)                        bound            q N
    below      Σ (1[ℓ_j <= bound] - 1/2), or of ‖g_j‖/C      1/2              q N, then + 1/2

Each release adds N(0, σ_c² b²) to every coordinate, where b is the bound: C, `bound` or 1/2. A
bound may depend on released numbers only. All channels of a batch see the same records, so they
form one joint event with σ_joint = (Σ m_c^-2)^(-1/2), where m_c = σ_c b / sensitivity. Sums are
divided by the expected batch size, because the actual size is private. The terms say how gradients
are clipped.

A wrapper overrides some methods and forwards the rest (`_Forwarding`).
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from types import MappingProxyType
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from fedpact.common.check import count as at_least_one
from fedpact.common.errors import PolicyRefused
from fedpact.common.params import copy_to_device
from fedpact.common.randomness.keystream import CHUNK
from fedpact.common.randomness.seeded import Draws
from fedpact.per_sample.clipping import UNIFORM, Fair, Uniform, Weighting
from fedpact.per_sample.kernel import PerSampleKernel, PlainKernel
from fedpact.per_sample.layout import Placement, align, scatter
from fedpact.privacy import column_scales
from fedpact.privacy.accounting.accountant import SampledGaussian
from fedpact.privacy.accounting.shared_noise import SHARE_DEVIATION
from fedpact.privacy.batches import (
    Batch,
    BatchClippedBatch,
    BatchClippedKernel,
    PerSampleBatch,
    PlainBatch,
)
from fedpact.privacy.ledger.ledger import Ledger
from fedpact.privacy.mechanisms import mechanism_of
from fedpact.privacy.reply_bounds import Range, nearly
from fedpact.privacy.terms import Opening, Terms


@dataclass(frozen=True)
class Charge:
    """Charges an oracle's events to a ledger, with what identifies the request.

    digest: of everything that determines the answer besides records and seed. A hypothetical ledger
    takes an equal digest for a repetition, which costs nothing. `run` must stand for one seed.
    """

    ledger: Ledger
    run: str
    round: int
    digest: str
    attempt: int = 0

    def steps_left(self, terms: Terms) -> float:
        """Return how many of the run's reserved batches have not been charged."""
        return terms.steps_after(self.ledger.spent(self.run))

    def __call__(self, terms: Terms, first: int, count: int, channels: tuple[str, ...]) -> None:
        """Charge `count` joint events, starting at step `first` of the request.

        The terms' whole event is charged, even if fewer channels are asked for.
        Raises PolicyRefused: no channel, one that the terms do not name, or one twice.
        """
        if not channels or len(set(channels)) < len(channels) or set(channels) - set(terms.sigmas):
            raise PolicyRefused(
                f"channels {list(channels)} were asked for: this run's terms at the site name "
                f"{sorted(terms.sigmas)}, each once a batch"
            )
        self._charge(first, terms.event, count, channels)

    def once(self, event: SampledGaussian, purpose: tuple[str, ...]) -> None:
        """Charge one event over all records, outside any batch. purpose: what it is for."""
        self._charge("once", event, 1, purpose)

    def _charge(
        self, at: int | str, event: SampledGaussian, count: int, purpose: tuple[str, ...]
    ) -> None:
        request = f"{self.round}/{at}/{self.digest}"
        self.ledger.charge(
            *(self.run, request, event, count),
            purpose=purpose,
            round_number=self.round,
            attempt=self.attempt,
        )


@dataclass(frozen=True)
class Records:
    """A site's training records: x [n, ...], y [n]. Only oracles hold them.

    columns: positions in a record that are scaled by released scales; in [-1, 1] until then.
    persons: each record's person if persons are sampled, int64 [n] on the CPU, numbered from 0
    without gaps; None if records are sampled.
    """

    x: Tensor
    y: Tensor
    columns: tuple[int, ...] = ()
    persons: Tensor | None = None

    def __post_init__(self) -> None:
        # A full batch is this tensor itself, any other batch is a copy. Both need the same memory
        # alignment: otherwise the presence of one record would decide which code path of the BLAS
        # library multiplies the others.
        object.__setattr__(self, "x", align(self.x))
        object.__setattr__(self, "y", align(self.y))

    def to(self, device: torch.device) -> "Records":
        """Return the records on a device."""
        return replace(self, x=self.x.to(device), y=self.y.to(device))

    def join(self, x: Tensor, y: Tensor, at: int, *, together: bool = False) -> "Records":
        """Return the records with others x, y [m, ...] inserted at position `at`.

        If persons are sampled, each is a new person's, or all are one new person's (`together`).
        """
        persons = self.persons
        if persons is not None:
            new = torch.zeros(len(y), dtype=torch.int64) if together else torch.arange(len(y))
            persons = torch.cat([persons[:at], self.count + new, persons[at:]])
        return Records(
            torch.cat([self.x[:at], x, self.x[at:]]),
            torch.cat([self.y[:at], y, self.y[at:]]),
            self.columns,
            persons,
        )

    @cached_property
    def count(self) -> int:
        """The number of sampled units: persons, or records."""
        if self.persons is None:
            return len(self.y)
        return int(self.persons.max()) + 1 if len(self.persons) else 0

    @cached_property
    def _shares(self) -> Tensor | None:
        """1/m for each of a person's m records: float64 [n], on the CPU."""
        if self.persons is None:
            return None
        each = torch.bincount(self.persons).double()[self.persons]
        # Rounded down, so that a person's shares add up to at most 1.
        return (2.0**40 / each).floor() / 2.0**40

    def batch(
        self, draws: Draws, rate: float, step: int, *, lent: bool = False
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return a Poisson batch (x, y, shares) of records, or of persons with all their records.

        shares are always on the CPU, and None if records are sampled. lent: see `at`.
        """
        chosen = draws.batch(self.count, rate, step)
        if self.persons is None or self._shares is None:
            return *self.at(chosen, lent=lent), None
        drawn = torch.zeros(self.count, dtype=torch.bool)
        drawn[chosen] = True
        places = drawn[self.persons].nonzero()[:, 0]
        return *self.at(places, lent=lent), self._shares[places]

    def at(self, chosen: Tensor, *, lent: bool = False) -> tuple[Tensor, Tensor]:
        """Return copies of the records at these ascending indices.

        lent: if all records are chosen, return them uncopied; the caller must not change them.
        """
        if chosen.shape == self.y.shape[:1]:
            return (self.x, self.y) if lent else (self.x.clone(), self.y.clone())
        chosen = copy_to_device(chosen, self.x.device)
        # Takes a quarter of the time of x[chosen].
        return self.x.index_select(0, chosen), self.y.index_select(0, chosen)


def _seed_of(draws: Draws, step: int) -> Callable[[], int]:
    """Return the seed of a step's random layers, drawn only when first asked for."""
    return cache(lambda: draws.number(step))


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
    "Terms",
    "Uniform",
    "Weighting",
    "nearly",
]


class Oracle(Protocol):
    """What an algorithm's local part is given to compute with: see the module."""

    @property
    def batch_size(self) -> float:
        """The expected batch size q_i N_i, a public number."""
        ...

    @property
    def sampling_rate(self) -> float:
        """q_i, the probability that a record is in a batch; 1/q_i steps make an epoch. Public."""
        ...

    @property
    def clip(self) -> float:
        """C of this round, the bound on a record's gradient, public; inf in a plain run."""
        ...

    @property
    def noise_variance(self) -> float:
        """The variance of a gradient's noise in each coordinate, public; 0 in a plain run."""
        ...

    @property
    def steps_left(self) -> float:
        """How many batches the site's reservation still allows, public; inf in a plain run.

        Read it at the end of `local`, when this request's batches have been charged.
        """
        ...

    @property
    def shares(self) -> Mapping[str, Tensor]:
        """What was released with a share of noise: channel -> int64 [d], on the terms' grid.

        If not empty, this is sent to the server instead of the vectors that `local` returns.
        """
        ...

    def batches(self, count: int, *channels: str) -> Iterator[Batch]:
        """Yield `count` batches that answer these channels; asking for the next closes the last.

        Raises BudgetExhausted and PolicyRefused, before any record is read.
        """
        ...

    def opening(self, *channels: str) -> Batch:
        """Return the batch that opens a round, sampled at the rate of the algorithm's Opening.

        Raises BudgetExhausted, and PolicyRefused: the terms have no opening.
        """
        ...

    def columns(self) -> column_scales.Means:
        """Return the scales of the site's columns; once, before the first round.

        Raises BudgetExhausted, and PolicyRefused: the terms have no such release.
        """
        ...

    def unprotected(self, w: Tensor) -> tuple[float, Tensor]:
        """Return F_i(w) and ∇F_i(w) [d] over all records, exact: no clip, no noise, no charge.

        Only for runs that are declared as not private. Raises PolicyRefused otherwise.
        """
        ...


class EmptyOracle:
    """An oracle without records, noise or budget, that refuses what a subclass does not answer."""

    batch_size = sampling_rate = 1.0
    clip = math.inf
    noise_variance = 0.0
    steps_left = math.inf
    shares: Mapping[str, Tensor] = MappingProxyType({})

    def opening(self, *channels: str) -> Batch:
        raise PolicyRefused(f"an opening with {channels} was asked of an oracle without records")

    def columns(self) -> column_scales.Means:
        raise PolicyRefused("column scales were asked of an oracle without records")

    def unprotected(self, w: Tensor) -> tuple[float, Tensor]:
        raise PolicyRefused(f"exact numbers at w {list(w.shape)} were asked of one without records")


class PlainOracle(EmptyOracle):
    """Exact answers, for runs that are explicitly not private.

    Batches are Poisson batches and sums are divided by q N, as in a private run, so that the two
    can be compared. Losses are not clipped.
    """

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
        self._size, self.sampling_rate, self.batch_size = size, rate, rate * size
        self._opening_rate = opening_rate
        self._step = 0

    def batches(self, count: int, *channels: str) -> Iterator["PlainBatch"]:
        for _ in range(at_least_one(count=count)):
            batch = self._batch(self.sampling_rate, channels)
            yield batch
            batch.close()

    def opening(self, *channels: str) -> "PlainBatch":
        return self._batch(self._opening_rate, channels)

    def columns(self) -> column_scales.Means:
        found = column_scales.sums(self._records.x[:, list(self._records.columns)])
        return column_scales.Means(found / self._size, 0.0, self._size)

    def unprotected(self, w: Tensor) -> tuple[float, Tensor]:
        self._kernel.seed(_seed_of(self._draws, 0))
        return self._kernel.mean_over(self._records.x, self._records.y, w)

    def _batch(self, rate: float, channels: tuple[str, ...]) -> "PlainBatch":
        x, y, shares = self._records.batch(self._draws, rate, self._step)
        self._kernel.seed(_seed_of(self._draws, self._step))
        self._step += 1
        return PlainBatch(self._kernel, x, y, rate * self._size, channels, shares)


class PrivateOracle:
    """Clipped, noised, charged answers: (ε, δ)-DP under adding or removing one record.

    If `records.persons` is set, of one person with all its records: persons are sampled at the same
    rate, and each of a person's m records is clipped and weighted by 1/m, so that together they add
    at most C to a sum. Size, rate and divisor then count persons.
    exact: answers `unprotected`, after which nothing that the run releases is private; None in
    every private run. placement: "compact" or "scattered" (per_sample.layout); None: the kernel's
    default.
    Raises PolicyRefused: seeded draws with a real ledger, or fresh draws with a hypothetical one,
    which would take a second release for a repetition of the first.
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
        self.sampling_rate, self.batch_size = terms.rate, terms.batch_size
        self.clip, self.noise_variance = terms.clip, terms.noise_variance
        self.shares: dict[str, Tensor] = {}

    @property
    def steps_left(self) -> float:
        return self._left()

    def batches(self, count: int, *channels: str) -> Iterator[PerSampleBatch | BatchClippedBatch]:
        self._charge(self._terms, self._step, at_least_one(count=count), channels)
        first = self._step
        self._step += count
        for step in range(first, first + count):
            batch = self._batch(self._terms, step, channels)
            yield batch
            batch.close()

    def opening(self, *channels: str) -> PerSampleBatch | BatchClippedBatch:
        if not self._terms.openings:
            raise PolicyRefused(
                f"an opening with {list(channels)} was asked for: this run's terms at the site "
                "name none"
            )
        step, opening = self._step, self._terms.opening
        self._charge(opening, step, 1, channels)
        self._step += 1
        return self._batch(opening, step, channels)

    def columns(self) -> column_scales.Means:
        once = self._charge.once if isinstance(self._charge, Charge) else None
        u = self._records.x[:, list(self._records.columns)]
        return column_scales.answer_columns(
            self._terms.columns, u, self._terms.size, once, self._draws
        )

    def unprotected(self, w: Tensor) -> tuple[float, Tensor]:
        if self._exact is None:
            raise PolicyRefused(
                "exact numbers over all records were asked for, but this run is private; remove "
                "what asks for them, such as an estimator that is 'raw'"
            )
        if isinstance(self._charge, Charge):
            self._charge.ledger.expose(self._charge.run, self._charge.round)
        self._exact.seed(_seed_of(self._draws, 0))
        return self._exact.mean_over(self._records.x, self._records.y, w)

    def _batch(
        self, terms: Terms, step: int, channels: tuple[str, ...]
    ) -> PerSampleBatch | BatchClippedBatch:
        # The mechanism that is accounted for decides; a kernel of another kind lacks the method.
        answering = mechanism_of(terms.mechanism).batch
        # Per-sample passes never write to records, and refuse a model that would. At q = 1 the
        # copies took most of a step.
        lent = issubclass(answering, PerSampleBatch)
        x, y, shares = self._records.batch(self._draws, terms.rate, step, lent=lent)
        self._kernel.seed(_seed_of(self._draws, step))
        release = self._draws.add_noise
        if terms.units:
            release = self._share if terms.shares_noise else partial(self._round, terms.units)
        add_noise = partial(release, step=step)
        layout = self._lay_out(terms, step, x, y)
        return answering(cast(Any, self._kernel), x, y, terms, add_noise, channels, shares, layout)

    def _lay_out(self, terms: Terms, step: int, x: Tensor, y: Tensor) -> Placement | None:
        """Return the slots of the batch's records; None: the kernel's default."""
        if self._placement is None or not isinstance(self._kernel, PerSampleKernel):
            return None
        if self._placement == "compact":
            return Placement(terms.batch_size)
        length = self._kernel.scattered_length(x, y, terms.batch_size)
        return scatter(self._draws.positions(len(y), length, step), length)

    def _share(
        self, total: Tensor, sigma: float, bound: float, purpose: str, *, step: int
    ) -> Tensor:
        """Return a sum [d] with the site's share of noise, and store it as whole numbers.

        Raises PolicyRefused: this channel has been released in this request. Several releases
        could be combined so that only one site's share protects them.
        """
        if purpose in self.shares:
            raise PolicyRefused(
                f"a second release of {purpose!r} was asked for in one round: sites that share "
                "noise make one"
            )
        unit = sigma * bound / SHARE_DEVIATION
        self.shares[purpose] = self._draws.share(total, unit, SHARE_DEVIATION, step, purpose)
        return (self.shares[purpose].double() * unit).to(total.device, total.dtype)

    def _round(
        self, units: float, total: Tensor, sigma: float, bound: float, purpose: str, *, step: int
    ) -> Tensor:
        """Return a sum [d] with the site's own noise, on a coarse grid."""
        unit = sigma * bound / units
        whole = self._draws.share(total, unit, units, step, purpose)
        # In chunks that stay in the processor's cache.
        for start in range(0, len(total), CHUNK):
            part = slice(start, start + CHUNK)
            total[part] = whole[part].double().mul_(unit)
        return total


class _Forwarding:
    """Forwards public attributes that a subclass does not define to another object."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        # While an object is being copied, "_inner" is not set yet.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._inner, name)


BatchAround = cast(Any, _Forwarding)
"""A batch that forwards every call to another; a subclass changes some."""

OracleWrapper = cast(Any, _Forwarding)
"""An oracle that forwards every call to another; a subclass changes some."""
