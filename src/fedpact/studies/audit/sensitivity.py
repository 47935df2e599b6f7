"""Measured sensitivity: adversarial records and data sets against a plan's stated bound.

S(D + r) - S(D) is computed by the oracle under audit without noise, for every channel that the
algorithm uses; with D empty it is a single record's sum. Batches contain all records, with the
divisor and the clip of the run's batches. The terms bound all of these differences, so a single
larger one refutes the mechanism. If none is found, nothing is proven: other records may move more.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedpact.common.randomness.seeded import SeededDraws
from fedpact.per_sample.clipping import Fair, slack
from fedpact.privacy.batches import most_records
from fedpact.privacy.mechanisms import mechanism_of
from fedpact.privacy.oracle import Records
from fedpact.privacy.terms import Terms
from fedpact.report.audited import AuditRow
from fedpact.studies.audit.target import (
    Asked,
    Target,
    bound_of,
    silence,
    simulate_rounds,
)

# With many classes, only the rarest at the site are tried.
_MOST_LABELS = 16
# F is chosen such that weights 1 + λ (ℓ - F) are at least this, or at most minus this.
_WEIGHT = 20.0


@dataclass(frozen=True)
class Crafted:
    """One record, or all k records of one person: x, y [k, ...]. kind: a description."""

    kind: str
    x: Tensor
    y: Tensor

    @property
    def text(self) -> str:
        """The record in words, with its label."""
        labels = sorted({int(label) for label in self.y.flatten().tolist()})
        return f"{self.kind}, label {', '.join(map(str, labels))}"


@dataclass(frozen=True)
class BatchRequest:
    """The queries to one batch: channel -> arguments. terms: the site's, in that round.

    opening: whether the batch opens a round.
    """

    queries: dict[str, tuple[Any, ...]]
    terms: Terms
    opening: bool

    def scaled(self, factor: float) -> "BatchRequest":
        """Return the same request for weights multiplied by `factor`."""
        return replace(
            self,
            queries={
                channel: tuple(q * factor if isinstance(q, Tensor) else q for q in query)
                for channel, query in self.queries.items()
            },
        )


def crafted_records(target: Target) -> list[Crafted]:
    """Return records with long, short, opposed, partial and cancelling gradients.

    Each with its own label, the next one and the site's rarest; the first kind with all labels.
    For persons, all k records are equal, or differ in one more canary.
    """
    records, k = target.records, target.canary_records if target.records.persons is not None else 1
    lengths = records.x.flatten(1).float().norm(dim=1)
    x, y = (part[int(lengths.argmax())][None] for part in (records.x, records.y))
    kinds = _values(target, x) if x.is_floating_point() else _tokens(target, x)
    counts = torch.bincount(records.y.flatten(), minlength=target.classes)
    rare = counts.argsort()[:_MOST_LABELS].tolist()
    made = list[Crafted]()
    for number, (kind, values) in enumerate(kinds.items()):
        labels = [y, (y + 1) % target.classes]
        labels += [torch.full_like(y, label) for label in (rare if number == 0 else rare[:1])]
        for label in labels:
            one = Crafted(kind, values.repeat_interleave(k, 0), label.repeat_interleave(k, 0))
            if not any(kind == o.kind and torch.equal(one.y, o.y) for o in made):
                made.append(one)
    if k > 1:
        chosen = [made[i * len(made) // k] for i in range(k)]
        x, y = (torch.cat([getattr(one, part)[:1] for one in chosen]) for part in ("x", "y"))
        made.append(Crafted("different records of one person", x, y))
    return made


def _values(target: Target, x: Tensor) -> dict[str, Tensor]:
    signs = torch.ones_like(x).flatten()
    signs[1::2] = -1
    scaled = {
        f"a record scaled by {factor:g}": x * factor
        for factor in (1e3, -1e3, 1.0, -1.0, 10.0, -10.0, 1e18, -1e18, 1e-18)
    }
    return scaled | {
        "a record of zeros": torch.zeros_like(x),
        "a record of ones": torch.ones_like(x),
        "a record of alternating signs": 1e3 * signs.view_as(x),
        "another site's record": target.spare.x[:1],
    }


def _tokens(target: Target, x: Tensor) -> dict[str, Tensor]:
    low, high = int(target.records.x.min()), int(target.records.x.max())
    turns = torch.full_like(x, low).flatten()
    turns[1::2] = high
    return {
        "a record as it is": x,
        "a record of the lowest token": torch.full_like(x, low),
        "a record of the highest token": torch.full_like(x, high),
        "a record of two tokens in turn": turns.view_as(x),
        "a record of its first token": x.flatten(1)[:, :1].expand(1, x[0].numel()).reshape_as(x),
        "another site's record": target.spare.x[:1],
    }


def requests(target: Target, made: list[Crafted]) -> Iterator[BatchRequest]:
    """Yield the requests of the algorithm's second round, the last one of each kind.

    With the smallest and the largest clip of all rounds. For fair weightings, also with reference
    losses that make all weights very large or negative.
    """
    clips = target.terms.clips
    numbers = {clips.index(clip(clips)) + 1 for clip in (min, max)} if clips else {1}
    *_, asked = simulate_rounds(target, target.records, min(2, target.rounds), "questions")
    batches = dict[int, list[Asked]]()
    for a in asked:
        batches.setdefault(a.batch, []).append(a)
    last = {(b[0].opening, *(a.channel for a in b)): b for b in batches.values()}
    for batch in last.values():
        queries = {a.channel: a.query for a in batch}
        for number in numbers:
            request = BatchRequest(queries, target.at(number).terms, batch[0].opening)
            yield request
            yield from _fair(target, request, made)


def _fair(target: Target, request: BatchRequest, made: list[Crafted]) -> Iterator[BatchRequest]:
    lam = float(getattr(target.plan.algorithm_settings, "fairness_weight", 0.0))
    if not lam > 0 or "gradient" not in request.queries:
        return
    w = request.queries["gradient"][0]
    target.kernel.model.load(w)
    losses = [float(target.kernel.losses(one.x[:1], one.y[:1])) for one in made]
    finite = [loss for loss in losses if loss < 1e6] or [0.0]
    for weight, loss in ((_WEIGHT, min(finite)), (-_WEIGHT, max(finite))):
        fair = Fair(lam, loss - (weight - 1) / lam)
        yield replace(request, queries={**request.queries, "gradient": (w, fair)})


# Factors of the weights; the last two only if no record was long enough to be clipped.
_SCALES = (1.0, 10.0, 100.0, 1000.0)
_CLIPPED = 0.9
# Sizes of batches: all kinds of records are added to the first, few to the second.
_SOME_RECORDS, _MOST_RECORDS = 128, 1024


@dataclass(frozen=True)
class Move:
    """How far a record moves a channel's sum, in units of the channel's bound.

    record, batch: descriptions.
    """

    size: float
    record: str
    batch: str

    @property
    def text(self) -> str:
        """The record and the batch, in words."""
        return f"{self.record}, added to {self.batch}"


@dataclass(frozen=True)
class ChannelSensitivity:
    """One channel: the longest sum of a single record, and the largest change of a batch's sum.

    In units of the channel's bound, C for a gradient. sensitivity: the largest allowed change in
    these units. slack: the allowed relative rounding error. channel: "opening ..." for the batch
    that opens a round.
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
        """The larger of both relative to its limit."""
        return max(self.single.size, self.in_batch.size / self.sensitivity)

    @property
    def worst(self) -> Move:
        """The move to report: the single record's, if it exceeds its bound by itself."""
        return self.in_batch if self.single.size <= 1 + self.slack else self.single

    @property
    def row(self) -> AuditRow:
        """The row of the audit's table."""
        return AuditRow("sensitivity", "Δ", self.ratio, 1 + self.slack, None, 1.0, self.text)

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


def measure_sensitivity(target: Target) -> list[ChannelSensitivity]:
    """Return how far crafted records move every channel's sum of the oracle under audit."""
    made = crafted_records(target)
    found = dict[str, ChannelSensitivity]()
    for request in requests(target, made):
        for scale in _SCALES:
            measured = _measure(target, request.scaled(scale), made)
            for one in measured:
                known = found.get(one.channel, one)
                single, in_batch = (
                    max(pair, key=lambda move: move.size)
                    for pair in ((known.single, one.single), (known.in_batch, one.in_batch))
                )
                found[one.channel] = replace(one, single=single, in_batch=in_batch)
            clipped = not any(0 < c.single.size < _CLIPPED for c in measured)
            if (scale >= _SCALES[1] and clipped) or not all(c.passed for c in measured):
                break
    return list(found.values())


def _measure(
    target: Target, request: BatchRequest, made: list[Crafted]
) -> list[ChannelSensitivity]:
    """Return the sensitivity of every channel of one request."""
    asked = request.terms.opening if request.opening else request.terms
    terms = silence(request.terms, asked.batch_size)
    allowed = slack(most_records(terms.batch_size))
    known = mechanism_of(terms.mechanism).sensitivities
    moves = {name: (list[Move](), list[Move]()) for name in request.queries}
    for name, batch, records in _batches(target, terms, made):
        before = _sums(target, request, terms, batch)
        for one in records:
            joined = batch.join(one.x, one.y, len(batch.y) // 2, together=True)
            after = _sums(target, request, terms, joined)
            for channel, query in request.queries.items():
                size = _size(after[channel] - before[channel], bound_of(channel, query, terms))
                moves[channel][len(batch.y) > 0].append(Move(size, one.text, name))
    prefix = "opening " if request.opening else ""
    found = list[ChannelSensitivity]()
    for channel, both in moves.items():
        single, in_batch = (max(each, key=lambda move: move.size) for each in both)
        name = prefix + channel
        found.append(ChannelSensitivity(name, single, in_batch, known[channel], allowed))
    return found


def _size(move: Tensor, bound: float) -> float:
    """Return ‖move‖ over the bound; infinity if either is not finite or valid."""
    length = float(move.norm())
    if length == 0:
        return 0.0
    return length / bound if length < math.inf and bound > 0 else math.inf


def _sums(
    target: Target, request: BatchRequest, terms: Terms, records: Records
) -> dict[str, Tensor]:
    """Return each channel's sum over the records [d] or [1], up to a constant, in float64."""
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
    """Yield batches D, by name, and the records r to add to each."""
    no_records, site = target.no_records, target.records
    each = list({one.kind: one for one in made}.values())  # each kind with the rarest label
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
