"""Whether joining pays for a site: what it has alone against what it has from the federation.

alone       the model that its own records choose, from the plan's initial one; never released
federated   the released model, or the site's own of an algorithm that has such
tuned       the federated one tuned on the site's own records; never released
as used     tuned where the advice is to tune, else federated: chosen without the held-out records

The difference is that of the hits of `as used` and `train_locally` on the same held-out records.
Its interval is Bonett and Price's for paired proportions (Psychological Methods 17, 2012): with a
and b records that only one of the two answers rightly, of n, p = (a + 1)/(n + 2), r = (b + 1)/(n +
2) and p - r ± 1.96 sqrt((p + r - (p - r)²)/(n + 2)), 95 %.

Where it is known whose each record is, persons count, each alike: what one's records say is not
independent. An accuracy is then the mean over persons of their shares of hits, and the interval is
that of the n persons' differences d_j and of two more, one that gains all and one that loses all:
p - r = Σ d_j/(n + 2) and p + r = (Σ d_j² + 2)/(n + 2), the same where each has one record.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from fedpact.params import FlatModel
from fedpact.personal.choice import Validated, choose_lambda, with_weight
from fedpact.personal.tuning import answers

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
        """Return that of two models' hits [n] each on the same records; NaN without records.

        whose: whose each record is, int64 [n] from 0 without gaps; None: nobody says.
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
        """What the interval says of a gain."""
        if self.low > 0:
            return "pays"
        return "does not pay" if self.high < 0 else "cannot be told"


@dataclass(frozen=True)
class SiteFigures:
    """One site's accuracies on `held_out` records; exact, for its owner alone.

    records: that it trains on. advice: of Validated. tune: whether to. gain: as used less alone.
    persons: whose the held-out ones are, where accuracies are of persons, each counting alike; None
    where they are of records.
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
    """A site by itself: its model [d], and what its own records said of it."""

    w: Tensor
    choice: Validated


def train_locally(
    model: FlatModel, x: Tensor, y: Tensor, initial: Tensor, whose: Tensor | None = None
) -> SiteModel:
    """Return a site's model of its own records x [n, ...], y [n, ...], from the initial one [d].

    whose: of choice.choose_lambda.
    """
    choice = choose_lambda(model, x, y, initial, whose)
    return SiteModel(with_weight(model, x, y, initial, choice.weight), choice)


def personalise_model(
    model: FlatModel, x: Tensor, y: Tensor, w: Tensor, whose: Tensor | None = None
) -> SiteModel:
    """Return the released model w [d] tuned on a site's records, whatever the advice is.

    whose: of choice.choose_lambda.
    """
    choice = choose_lambda(model, x, y, w, whose)
    return SiteModel(with_weight(model, x, y, w, choice.weight), choice)


def on_held_out(
    model: FlatModel,
    by_itself: SiteModel,
    tuned: SiteModel,
    w: Tensor,
    x: Tensor,
    y: Tensor,
    whose: Tensor | None = None,
) -> SiteFigures:
    """Return a site's figures on held-out records x [n, ...], y [n, ...]; they trained nothing.

    whose: of Gain.of.
    """
    hits = [answers(model, each, x, y)[0] for each in (by_itself.w, w, tuned.w)]
    return _figures(tuned.choice, whose, *hits)


def on_own_parts(by_itself: SiteModel, tuned: SiteModel) -> SiteFigures:
    """Return a site's figures where it holds nothing out: each record by models without it.

    The federated model has seen them, under its ε; alone and tuned are each the best of the λ
    tried, which flatters both a little.
    """
    choice = tuned.choice
    # Of the persons that were answered: a large site does not ask them all.
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
    """Return each person's mean of its records' values [n], float64; themselves for None."""
    if whose is None:
        return values
    sums = torch.bincount(whose, values.double())
    return sums / torch.bincount(whose)


def _share(hits: Tensor, whose: Tensor | None) -> float:
    return float(by_person(hits.double(), whose).mean()) if len(hits) else math.nan


def describe_joining(gains: Mapping[str, Gain], at: str) -> str:
    """Return in words for which sites joining pays. at: how the run was protected, "at ε = 1"."""
    by: dict[Verdict, list[str]] = {"pays": [], "does not pay": [], "cannot be told": []}
    for name, gain in sorted(gains.items()):
        by[gain.verdict].append(name)
    told = [
        f"pays for {_listed(by['pays'])}" if by["pays"] else "pays for no site",
        f"not for {_listed(by['does not pay'])}" if by["does not pay"] else "",
        f"and cannot be told for {_listed(by['cannot be told'])}" if by["cannot be told"] else "",
    ]
    return f"{at[:1].upper()}{at[1:]} joining {'; '.join(part for part in told if part)}."


def _listed(names: list[str]) -> str:
    return ", ".join(names)
