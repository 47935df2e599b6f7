"""How far can one record move a sum? Measured without noise, so nothing is left to chance.

S(D + r) - S(D) is taken from the oracle under audit with its noise at 0, for every channel that the
algorithm asks for: with D empty it is the sum of one record alone. The batches have all records,
and the divisor and the clip of a batch of the run. What the terms state bounds every one of these
differences, for all weights and all records, so a single one above it refutes the mechanism. That
none is found proves nothing: records that were not tried may move more.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fedpact.audit.crafted import BatchRequest, Crafted, crafted_records, requests
from fedpact.audit.target import Target, bound_of
from fedpact.draws.seeded import SeededDraws
from fedpact.losses import cross_entropy
from fedpact.persample.bounds import slack
from fedpact.persample.kernel import PlainKernel
from fedpact.privacy.batches import most_records
from fedpact.privacy.mechanisms import mechanism_of
from fedpact.privacy.oracle import Records
from fedpact.privacy.terms import Terms

# Of the weights as asked; the last two where no record was long enough to be clipped.
_SCALES = (1.0, 10.0, 100.0, 1000.0)
_CLIPPED = 0.9
# Of batches: one that all kinds of records join, and one that few do.
_SOME_RECORDS, _MOST_RECORDS = 128, 1024


@dataclass(frozen=True)
class Move:
    """How far a record moves a channel's sum, in units of the channel's bound.

    record, batch: what it is, and what it joins. parameters: of a move that is too long, each
    parameter's part, in the same units; factors: of a record alone, what its gradient was
    multiplied by there. A right clip has one factor for all.
    """

    size: float
    record: str
    batch: str
    parameters: dict[str, float] = field(default_factory=dict)
    factors: dict[str, float] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The record, the batch and the largest parts, in words."""
        longest = sorted(self.parameters, key=lambda name: -self.parameters[name])[:6]
        parts = (
            f"{name} {self.parameters[name]:.4g}"
            + (f" (gradient times {self.factors[name]:.3g})" if name in self.factors else "")
            for name in longest
        )
        return f"{self.record}, added to {self.batch}" + (
            f"; of it {', '.join(parts)}" * bool(longest)
        )


@dataclass(frozen=True)
class ChannelSensitivity:
    """One channel: the longest sum of a single record, and the largest change of a batch's sum.

    Both in units of the channel's bound: C for a gradient. sensitivity: the largest allowed change
    in these units; slack: the relative rounding error allowed on top. channel: "opening ..." for
    the batch that opens a round.
    """

    channel: str
    single: Move
    in_batch: Move
    sensitivity: float
    slack: float

    @property
    def passed(self) -> bool:
        """Whether both are within their bounds, and something was measured."""
        return self.single.size > 0 and self.ratio <= 1 + self.slack

    @property
    def ratio(self) -> float:
        """The larger of both, over what it may be."""
        return max(self.single.size, self.in_batch.size / self.sensitivity)

    @property
    def worst(self) -> Move:
        """The move to report: the single record's, if it exceeds its bound by itself."""
        return self.in_batch if self.single.size <= 1 + self.slack else self.single

    @property
    def text(self) -> str:
        """One line for a reader."""
        unit = "C" if self.channel.endswith("gradient") else "b"
        most = "" if self.sensitivity == 1 else f", of a move {self.sensitivity:g} times that"
        line = (
            f"{self.channel}: longest single-record sum {self.single.size:.6g} {unit}, largest "
            f"move {self.in_batch.size:.6g} {unit}; bound {unit} (1 + {self.slack:.2g}){most}; "
            "exact"
        )
        if not self.single.size > 0:
            return f"{line}; no record tried added anything, so nothing was measured: see the log"
        if not self.passed:
            return f"{line}; {self.worst.text}"
        return line if self.single.size >= _CLIPPED else f"{line}; no record tried was clipped"


@dataclass(frozen=True)
class Sensitivity:
    """What was measured of every channel."""

    channels: tuple[ChannelSensitivity, ...]

    @property
    def passed(self) -> bool:
        """Whether no record moves a sum by more than is accounted for."""
        return all(channel.passed for channel in self.channels)


def measure_sensitivity(target: Target) -> Sensitivity:
    """Return how far crafted records move the sums of the oracle under audit. Seconds."""
    made = crafted_records(target)
    found = dict[str, ChannelSensitivity]()
    for asked in requests(target, made):
        for scale in _SCALES:
            measured = _measured(target, asked.scaled(scale), made)
            for one in measured:
                found[one.channel] = _worse(found.get(one.channel), one)
            clipped = not any(0 < c.single.size < _CLIPPED for c in measured)
            if (scale >= _SCALES[1] and clipped) or not all(c.passed for c in measured):
                break
    return Sensitivity(tuple(found.values()))


def _worse(one: ChannelSensitivity | None, other: ChannelSensitivity) -> ChannelSensitivity:
    if one is None:
        return other
    single, in_batch = (
        max(pair, key=lambda move: move.size)
        for pair in ((one.single, other.single), (one.in_batch, other.in_batch))
    )
    return replace(one, single=single, in_batch=in_batch)


def _measured(
    target: Target, request: BatchRequest, made: list[Crafted]
) -> list[ChannelSensitivity]:
    """Return every channel of one request."""
    terms = _silent(request)
    allowed = slack(most_records(terms.batch_size))
    known = mechanism_of(terms.mechanism).sensitivities
    single, in_batch = dict[str, Move](), dict[str, Move]()
    for name, batch, records in _batches(target, terms, made):
        before = _sums(target, request, terms, batch)
        largest = in_batch if len(batch.y) else single
        for one in records:
            joined = batch.join(one.x, one.y, len(batch.y) // 2, together=True)
            after = _sums(target, request, terms, joined)
            for channel, query in request.queries.items():
                move = after[channel] - before[channel]
                bound = bound_of(channel, query, terms)
                size = _size(move, bound)
                if channel not in largest or size > largest[channel].size:
                    found = Move(size, one.text, name)
                    if not size <= known[channel] * (1 + allowed):
                        lone = None if len(batch.y) or channel != "gradient" else one
                        found = _explained(target, found, move, bound, query, lone)
                    largest[channel] = found
    prefix = "opening " if request.opening else ""
    return [
        ChannelSensitivity(prefix + name, single[name], in_batch[name], known[name], allowed)
        for name in request.queries
    ]


def _size(move: Tensor, bound: float) -> float:
    """‖move‖ over the bound; infinity where either is no number, and 0 of nothing."""
    length = float(move.norm())
    if length == 0:
        return 0.0
    return length / bound if length < math.inf and bound > 0 else math.inf


def _silent(request: BatchRequest) -> Terms:
    """Return terms under which a batch has all records, and no noise, and is else as it was."""
    terms = request.terms
    size = (terms.opening if request.opening else terms).batch_size
    return replace(
        terms,
        rate=1.0,
        size=size,
        sigmas=dict.fromkeys(terms.sigmas, 0.0),
        opening_rate=1.0,
        opening_sigmas=dict.fromkeys(terms.opening_sigmas, 0.0),
    )


def _sums(
    target: Target, request: BatchRequest, terms: Terms, records: Records
) -> dict[str, Tensor]:
    """Return each channel's sum over the records [d] or [1], but for a constant, in float64."""
    draws = SeededDraws(target.plan.seed, "audit", "sensitivity")
    oracle = target.make(records, target.kernel, terms, draws)
    channels = tuple(request.queries)
    batch: Any
    batch = oracle.opening(*channels) if request.opening else next(oracle.batches(1, *channels))
    summed = mechanism_of(terms.mechanism).summed
    found = dict[str, Tensor]()
    for channel, query in request.queries.items():
        copies = (q.clone() if isinstance(q, Tensor) else q for q in query)
        answer = torch.as_tensor(getattr(batch, channel)(*copies), dtype=torch.float64)
        divisor = terms.batch_size if summed or channel != "gradient" else 1.0
        found[channel] = answer.reshape(-1) * divisor
    return found


def _batches(
    target: Target, terms: Terms, made: list[Crafted]
) -> Iterator[tuple[str, Records, list[Crafted]]]:
    """Yield batches D, by name, and the records to try as r in each."""
    no_records, site = target.no_records, target.records
    each = list({one.kind: one for one in made}.values())  # of a kind the site's rarest label
    yield "an empty batch", no_records, made
    for one in made[:1] + each[1:2]:
        yield one.text, no_records.join(one.x, one.y, 0, together=True), made
    for one in made:
        yield "its own copy", no_records.join(one.x, one.y, 0, together=True), [one]
    for size, tried in (
        (min(_SOME_RECORDS, math.ceil(terms.batch_size)), each),
        (min(_MOST_RECORDS, most_records(terms.batch_size)), each[:2]),
    ):
        rows = torch.arange(size) % len(site.y)
        yield f"a batch of {size}", no_records.join(site.x[rows], site.y[rows], 0), tried


def _explained(
    target: Target,
    move: Move,
    vector: Tensor,
    bound: float,
    query: tuple[Any, ...],
    alone: Crafted | None,
) -> Move:
    """Return a move with its parameters' parts. alone: the record, of a single one's gradient."""
    model = target.kernel.model
    if len(vector) != len(model.vector):
        return move
    parts = {name: _size(part, bound) for name, part in model.views(vector)}
    if alone is None:
        return replace(move, parameters=parts)
    model.load(query[0])
    gradient = PlainKernel(model, cross_entropy).weighted_sum(alone.x, alone.y).double()
    lengths = {name: float(part.norm()) for name, part in model.views(gradient)}
    factors = {n: parts[n] * bound / length for n, length in lengths.items() if length > 0}
    return replace(move, parameters=parts, factors=factors)
