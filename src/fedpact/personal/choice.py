"""How strongly a site holds its tuned model to the one that it began with, and whether it should.

λ is chosen on the site's own training records: they are cut into five parts, each part is answered
by models tuned on the other four, and the λ of the least mean loss is taken. As many parts are
answered as make 1000 records, all five where they are fewer. Where it is known whose each record
is, persons are cut into parts, each with all records: a model that has trained on one visit of a
patient knows the others.

Whether to tune at all is a test: of the records that one of the two models answers rightly and the
other wrongly (gained, lost), with no true gain each is as likely lost as gained. McNemar's exact
test has P(Bin(gained + lost, 1/2) >= gained), times the number of λ tried (Bonferroni). Above 5 %,
and with fewer than 50 records whatever they say, the advice is: do not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from fedpact.draws.seeded import seeded_generator
from fedpact.params import FlatModel
from fedpact.personal.tuning import answers, tune
from fedpact.theory.special import fair_coins_at_least

WEIGHTS: Final = (1.0, 0.1, 1e-2, 1e-3, 1e-4)
"""The λ that are tried, in nats over squared length; the largest first, as each begins the next."""

MIN_RECORDS_TO_TUNE: Final = 50
"""Records, or persons, with fewer than which no advice is to tune: a part is then ten."""

LEVEL: Final = 0.05
_PARTS: Final = 5
_ENOUGH: Final = 1000


@dataclass(frozen=True)
class Validated:
    """What a site's own validation says of tuning a model.

    weight: the λ. records: of the site's training part. places: which of them were answered [v].
    before, after: which of those the model that it began with, and the tuned ones, answer rightly
    [v]. whose: whose each record of the part is, int64 [records] from 0; None where nobody says.
    """

    weight: float
    records: int
    places: Tensor
    before: Tensor
    after: Tensor
    whose: Tensor | None = None

    @property
    def gained(self) -> int:
        """Records that only the tuned models answer rightly; or persons of whom there are more."""
        return int((self._gains > 0).sum())

    @property
    def lost(self) -> int:
        """Records that only the model before answers rightly; or persons, likewise."""
        return int((self._gains < 0).sum())

    @property
    def _gains(self) -> Tensor:
        each = self.after.long() - self.before.long()
        if self.whose is None:
            return each
        return each.new_zeros(self._count).index_add_(0, self.whose[self.places], each)

    @property
    def _count(self) -> int:
        return self.records if self.whose is None else _persons(self.whose)

    @property
    def chance(self) -> float:
        """A bound on the chance of such a gain where there is none; at most 1."""
        gained, lost = self.gained, self.lost
        return min(1.0, len(WEIGHTS) * fair_coins_at_least(gained, gained + lost))

    @property
    def tune(self) -> bool:
        """Whether the advice is to tune."""
        return self._count >= MIN_RECORDS_TO_TUNE and self.chance <= LEVEL

    @property
    def told(self) -> str:
        """The advice and its reason."""
        what = "records" if self.whose is None else "persons"
        if self._count < MIN_RECORDS_TO_TUNE:
            return (
                f"do not tune: {self._count} {what} are too few to tell a gain from chance; "
                f"expected at least {MIN_RECORDS_TO_TUNE}"
            )
        answered = (
            len(self.before) if self.whose is None else self.whose[self.places].unique().numel()
        )
        found = (
            f"of {answered:,} of its own {what}, answered by models tuned without them, "
            f"tuning gains {self.gained:,} and loses {self.lost:,}"
        )
        if self.tune:
            return f"tune: {found} (chance of that without a true gain at most {self.chance:.2g})"
        return f"do not tune: {found}, which is within what chance does"


def choose_lambda(
    model: FlatModel, x: Tensor, y: Tensor, anchor: Tensor, whose: Tensor | None = None
) -> Validated:
    """Return the λ that the records x [n, ...], y [n, ...] choose for a model anchor [d].

    whose: whose each record is, int64 [n] from 0 without gaps; None: nobody says.
    """
    wanted, places = list[Tensor](), 0
    for part in _parts(torch.arange(len(y)) if whose is None else whose):
        if places < _ENOUGH:
            wanted.append(part)
            places += len(part)
    right, losses = _answered(model, x, y, anchor, wanted)
    sums = [float(each.sum()) for each in losses]
    best = min(range(len(WEIGHTS)), key=lambda i: (not sums[i] < float("inf"), sums[i]))
    found = torch.cat(wanted) if wanted else torch.arange(0)
    before = answers(model, anchor, x[found], y[found])[0]
    return Validated(WEIGHTS[best], len(y), found, before, right[best], whose)


def _parts(whose: Tensor) -> list[Tensor]:
    """Return the places of records in parts, each of them persons with all of theirs."""
    if (persons := _persons(whose)) < _PARTS:
        return []
    order = torch.randperm(persons, generator=seeded_generator("parts of a site's own records"))
    rank = torch.argsort(order)[whose]
    drawn = torch.argsort(rank, stable=True)
    return [drawn[rank[drawn] % _PARTS == i] for i in range(_PARTS)]


def _persons(whose: Tensor) -> int:
    return int(whose.max()) + 1 if len(whose) else 0


def _answered(
    model: FlatModel, x: Tensor, y: Tensor, anchor: Tensor, parts: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return for each λ what `tuning.answers` says of the parts, each by models without it."""
    right = [torch.zeros(0, dtype=torch.bool) for _ in WEIGHTS]
    losses = [torch.zeros(0, dtype=torch.float64) for _ in WEIGHTS]
    for part in parts:
        rest = torch.ones(len(y), dtype=torch.bool)
        rest[part] = False
        w = anchor
        for i, weight in enumerate(WEIGHTS):
            w = tune(model, x[rest], y[rest], anchor, weight, w)
            hits, costs = answers(model, w, x[part], y[part])
            right[i], losses[i] = torch.cat([right[i], hits]), torch.cat([losses[i], costs])
    return right, losses


def with_weight(model: FlatModel, x: Tensor, y: Tensor, anchor: Tensor, weight: float) -> Tensor:
    """Return the model tuned on all records with one λ, by way of the larger ones."""
    w = anchor
    for larger in (*(each for each in WEIGHTS if each > weight), weight):
        w = tune(model, x, y, anchor, larger, w)
    return w
