"""Crafted records and requests: what a clip has to hold against, whatever the site's data are."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedpact.audit.target import Asked, Target, simulate_rounds
from fedpact.persample.weighting import Fair
from fedpact.privacy.terms import Terms

# Of many classes the rarest at the site.
_MOST_LABELS = 16
# Weights 1 + λ (ℓ - F) of at least so much, or at most minus so much, by choice of F.
_WEIGHT = 20.0


@dataclass(frozen=True)
class Crafted:
    """One record, or all k records of one person: x, y [k, ...]. kind: what it is, in words."""

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
    """What one batch is asked: channel -> its arguments. terms: the site's, in that round.

    opening: whether the batch is the one that opens a round.
    """

    queries: dict[str, tuple[Any, ...]]
    terms: Terms
    opening: bool

    def scaled(self, factor: float) -> "BatchRequest":
        """Return the same request about weights that are `factor` times as large."""
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
    """Yield the algorithm's requests of its second round, the last one of each kind.

    At the smallest and the largest clip of its rounds. With a fair weighting also at references
    that make all weights very large, or negative.
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
