"""Tuning a model inside a site, and whether joining the federation pays for a site.

A model is tuned by minimising F(w) + λ ‖w - a‖² over the site's records, where a is the released
model (tuning), or the plan's initial model (a site alone). λ = ∞ gives a, λ = 0 the optimum of the
records. Nothing is clipped or noised: the result is not private and never leaves the site.

The solver is scipy's L-BFGS on all records, started from the solution of the next larger λ: it has
no step size to choose. Float32 models stop where rounding hides the descent.

docs/notes/evaluation.md says how λ is chosen, and how it is judged whether tuning and joining pay:
by five-fold cross-validation, of as many folds as make 1000 records, and by McNemar's exact test,
P(Bin(gained + lost, 1/2) >= gained) times the number of λ tried (Bonferroni).

alone       the model trained on the site's own records from the initial model; never released
federated   the released model, or the site's own if the algorithm has one per site
tuned       the federated model tuned on the site's own records; never released
as used     tuned if the advice is to tune, else federated; chosen without the held-out records

The gain is the difference in accuracy of `as used` and `alone` on the same held-out records. Its
95 % interval is Bonett and Price's for paired proportions (Psychological Methods 17, 2012): with a
and b of n records on which only one of the two is right, p = (a + 1)/(n + 2), r = (b + 1)/(n + 2)
and p - r ± 1.96 sqrt((p + r - (p - r)²)/(n + 2)).

Of n persons with differences d_j, one of which may have several records, it is
p - r = Σ d_j/(n + 2) and p + r = (Σ d_j² + 2)/(n + 2), which with one record each is the same.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedpact.common.losses import cross_entropy
from fedpact.common.params import FlatModel, all_finite, from_numpy
from fedpact.common.randomness.seeded import seeded_generator
from fedpact.privacy.accounting.gaussian import fair_coins_at_least

_AT_A_TIME = 1024  # records per pass, as activations of all records may not fit into memory
_ITERATIONS = 50


def tune(
    model: FlatModel, x: Tensor, y: Tensor, anchor: Tensor, weight: float, start: Tensor
) -> Tensor:
    """Return the w [d] that minimises F(w) + λ ‖w - a‖² over records x [n, ...], y [n, ...].

    model: computes F; its weights are changed. anchor: a [d]. weight: λ >= 0, may be infinite.
    start: the first iterate [d]. Returns a if no finite w is found, and without records.
    """
    if math.isinf(weight) or not len(y):
        return anchor.clone()
    # Imported here, as few runs tune anything.
    from scipy.optimize import minimize

    centre = anchor.double().numpy()

    def objective(w: NDArray[Any]) -> tuple[float, NDArray[Any]]:
        loss, gradient = _loss(model, w, x, y)
        away = w - centre
        return loss + weight * float(away @ away), gradient + 2 * weight * away

    options = {"maxiter": _ITERATIONS, "ftol": 1e-9, "gtol": 1e-6}
    begin = start.double().numpy().copy()
    found = minimize(objective, begin, jac=True, method="L-BFGS-B", options=options)
    w = from_numpy(np.asarray(found.x)).to(anchor.dtype)
    return w if all_finite(w) else anchor.clone()


def _loss(model: FlatModel, w: NDArray[Any], x: Tensor, y: Tensor) -> tuple[float, NDArray[Any]]:
    """Return F and its gradient at w [d], in float64."""
    model.load(from_numpy(w).to(model.vector.dtype))
    model.module.eval()
    own = [p for p in model.module.parameters() if p.requires_grad]
    total, gradient = 0.0, np.zeros(len(w))
    for xs, ys in zip(x.split(_AT_A_TIME), y.split(_AT_A_TIME), strict=True):
        loss = cross_entropy(model.module(xs), ys).sum() / len(y)
        parts = torch.autograd.grad(loss, own, allow_unused=True, materialize_grads=True)
        total += float(loss.detach())
        gradient += torch.cat([part.reshape(-1) for part in parts]).double().numpy()
    return total, gradient


def answers(model: FlatModel, w: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return on which records [n] the model w is right, and their losses [n].

    A sequence is right if all its positions are; a record with NaN scores is wrong.
    """
    model.load(w)
    if not len(y):
        return torch.zeros(0, dtype=torch.bool), torch.zeros(0, dtype=torch.float64)
    model.module.eval()
    right, losses = list[Tensor](), list[Tensor]()
    with torch.no_grad():
        for xs, ys in zip(x.split(_AT_A_TIME), y.split(_AT_A_TIME), strict=True):
            outputs = model.module(xs)
            losses.append(cross_entropy(outputs, ys).double())
            hit = (outputs.argmax(-1) == ys) & ~outputs.isnan().any(-1)
            right.append(hit.reshape(len(ys), -1).all(1))
    return torch.cat(right), torch.cat(losses)


WEIGHTS: Final = (1.0, 0.1, 1e-2, 1e-3, 1e-4)
"""The values of λ, in nats per squared norm; descending, as each solution starts the next."""

MIN_RECORDS_TO_TUNE: Final = 50
"""With fewer records, or persons, the advice is never to tune: a fold is then ten."""

LEVEL: Final = 0.05
_PARTS: Final = 5
_ENOUGH: Final = 1000


@dataclass(frozen=True)
class Validated:
    """A site's cross-validation of tuning a model.

    weight: the chosen λ. records: how many the site trains on. places: which of them were evaluated
    [v]. before, after: on which of those the original and the tuned models are right [v]. whose:
    each record's person, int64 [records] from 0; None if unknown.
    """

    weight: float
    records: int
    places: Tensor
    before: Tensor
    after: Tensor
    whose: Tensor | None = None

    @property
    def gained(self) -> int:
        """The number of records on which only the tuned models are right; or of persons with more
        such records."""
        return int((self._gains > 0).sum())

    @property
    def lost(self) -> int:
        """The number of records on which only the original model is right; or persons, likewise."""
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
        """A bound on the probability of such a gain if there is no true gain; at most 1."""
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
        of = self.places if self.whose is None else self.whose[self.places]
        found = (
            f"of {of.unique().numel():,} of its own {what}, each predicted by models tuned without "
            f"it, tuning gains {self.gained:,} and loses {self.lost:,}"
        )
        if self.tune:
            return f"tune: {found} (by chance with probability at most {self.chance:.2g})"
        return f"do not tune: {found}, which may be chance"


def choose_lambda(
    model: FlatModel, x: Tensor, y: Tensor, anchor: Tensor, whose: Tensor | None = None
) -> Validated:
    """Return the cross-validated λ for tuning a model anchor [d] on records x, y [n, ...].

    whose: each record's person, int64 [n] from 0 without gaps; None if unknown.
    """
    wanted, places = list[Tensor](), 0
    for part in _parts(torch.arange(len(y)) if whose is None else whose):
        if places < _ENOUGH:
            wanted.append(part)
            places += len(part)
    right, losses = _answer(model, x, y, anchor, wanted)
    sums = [float(each.sum()) for each in losses]
    best = min(range(len(WEIGHTS)), key=lambda i: (not sums[i] < float("inf"), sums[i]))
    found = torch.cat(wanted) if wanted else torch.arange(0)
    before = answers(model, anchor, x[found], y[found])[0]
    return Validated(WEIGHTS[best], len(y), found, before, right[best], whose)


def _parts(whose: Tensor) -> list[Tensor]:
    """Return the indices of the records of each fold; a person is in one fold."""
    if (persons := _persons(whose)) < _PARTS:
        return []
    order = torch.randperm(persons, generator=seeded_generator("parts of a site's own records"))
    rank = torch.argsort(order)[whose]
    drawn = torch.argsort(rank, stable=True)
    return [drawn[rank[drawn] % _PARTS == i] for i in range(_PARTS)]


def _persons(whose: Tensor) -> int:
    return int(whose.max()) + 1 if len(whose) else 0


def _answer(
    model: FlatModel, x: Tensor, y: Tensor, anchor: Tensor, parts: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return for each λ the `answers` on all folds, each by models trained without it."""
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


_NORMAL: Final = 1.959963984540054
METHOD: Final = "95 %, Bonett and Price's interval for paired proportions"

Verdict = Literal["pays", "does not pay", "cannot be told"]


@dataclass(frozen=True)
class Gain:
    """The difference of two models' accuracies on the same records, with its 95 % interval."""

    mean: float
    low: float
    high: float

    @staticmethod
    def of(after: Tensor, before: Tensor, whose: Tensor | None = None) -> "Gain":
        """Return the gain from two models' hits [n] on the same records; NaN without records.

        whose: each record's person, int64 [n] from 0 without gaps; None if unknown.
        """
        each = by_person(after.double() - before.double(), whose)
        n = len(each)
        if not n:
            return Gain(math.nan, math.nan, math.nan)
        total, squares = float(each.sum()), float(each.square().sum())
        middle = total / (n + 2)
        half = _NORMAL * math.sqrt(((squares + 2) / (n + 2) - middle**2) / (n + 2))
        return Gain(total / n, max(-1.0, middle - half), min(1.0, middle + half))

    @property
    def verdict(self) -> Verdict:
        """What the interval says."""
        if self.low > 0:
            return "pays"
        return "does not pay" if self.high < 0 else "cannot be told"


@dataclass(frozen=True)
class SiteFigures:
    """One site's accuracies on `held_out` records; exact, for its owner only.

    records: how many it trains on. advice, tune: of Validated. gain: of `as used` over `alone`.
    persons: the number of persons held out, if accuracies are over persons; None: over records.
    """

    records: int
    held_out: int
    local: float
    federated: float
    tuned: float
    tune: bool
    advice: str
    gain: Gain
    persons: int | None = None


@dataclass(frozen=True)
class SiteModel:
    """A tuned model [d] of a site, and the cross-validation of its λ."""

    w: Tensor
    choice: Validated


def personalise_model(
    model: FlatModel, x: Tensor, y: Tensor, w: Tensor, whose: Tensor | None = None
) -> SiteModel:
    """Return a model w [d] tuned on a site's records x, y [n, ...], whatever the advice.

    w: the released model; or the plan's initial one, for a site alone. whose: as in choose_lambda.
    """
    choice, found = choose_lambda(model, x, y, w, whose), w
    # Through the larger weights, down to the chosen one.
    for weight in (each for each in WEIGHTS if each >= choice.weight):
        found = tune(model, x, y, w, weight, found)
    return SiteModel(found, choice)


def on_held_out(
    model: FlatModel,
    by_itself: SiteModel,
    tuned: SiteModel,
    w: Tensor,
    x: Tensor,
    y: Tensor,
    whose: Tensor | None = None,
) -> SiteFigures:
    """Return a site's figures on held-out records x, y [n, ...]. whose: as in Gain.of."""
    hits = [answers(model, each, x, y)[0] for each in (by_itself.w, w, tuned.w)]
    return _figures(tuned.choice, whose, *hits)


def on_own_parts(by_itself: SiteModel, tuned: SiteModel) -> SiteFigures:
    """Return a site's figures by cross-validation, if it holds nothing out.

    The federated model has been trained on these records, under its ε; alone and tuned are each the
    best λ, which flatters both a little.
    """
    choice = tuned.choice
    # Only persons in evaluated folds: a large site does not evaluate all of them.
    whose = None
    if choice.whose is not None:
        whose = torch.unique(choice.whose[choice.places], return_inverse=True)[1]
    return _figures(choice, whose, by_itself.choice.after, choice.before, choice.after)


def _figures(
    choice: Validated, whose: Tensor | None, local: Tensor, federated: Tensor, tuned: Tensor
) -> SiteFigures:
    used = tuned if choice.tune else federated
    return SiteFigures(
        records=choice.records,
        held_out=len(local),
        local=_share(local, whose),
        federated=_share(federated, whose),
        tuned=_share(tuned, whose),
        tune=choice.tune,
        advice=choice.told,
        gain=Gain.of(used, local, whose),
        persons=None if whose is None else len(by_person(local.double(), whose)),
    )


def by_person(values: Tensor, whose: Tensor | None) -> Tensor:
    """Return each person's mean over its records' values [n], float64; the values for None."""
    if whose is None:
        return values
    sums = torch.bincount(whose, values.double())
    return sums / torch.bincount(whose)


def _share(hits: Tensor, whose: Tensor | None) -> float:
    return float(by_person(hits.double(), whose).mean()) if len(hits) else math.nan


def describe_joining(gains: Mapping[str, Gain], at: str) -> str:
    """Return in words for which sites joining pays. at: the run's protection, as "at ε = 1"."""
    by = defaultdict[str, list[str]](list)
    for name, gain in sorted(gains.items()):
        by[gain.verdict].append(name)
    told = [f"pays for {', '.join(by['pays']) or 'no site'}"]
    for verdict, word in (("does not pay", "not for"), ("cannot be told", "undecided for")):
        told += [f"{word} {', '.join(by[verdict])}"] if by[verdict] else []
    return f"{at[:1].upper()}{at[1:]} joining {'; '.join(told)}."
