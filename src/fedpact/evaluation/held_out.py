"""Held-out records and [evaluation]: how they are chosen, reserved, and summed for release.

A record is held out or not by a keyed hash of its content, or of its person's name where the site
knows it, so one more record is one more on one side alone (docs/notes/proofs.md, Evaluations).

    hits    [groups, classes, 2]   records by group, class, and whether the model is right
    roc     [2, bins]              records by class and score, the probability of the second class
    loss    [1]                    Σ min(ℓ_j / bound, 1), each rounded down to 2^-20
    false_positives
            [groups, classes]      misses by group and predicted class

A record changes each by at most 1. If persons are protected, each of a person's m records weighs
1/m, rounded down to 2^-20, so a person does.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from fedpact.common.configuration import FROZEN
from fedpact.common.errors import PlanError
from fedpact.common.format import toml_key
from fedpact.common.messages import Task
from fedpact.common.params import keeping_modes
from fedpact.data.schema import RecordForm
from fedpact.per_sample.kernel import PlainKernel
from fedpact.privacy.accounting.accountant import Accountant, Budget, SampledGaussian
from fedpact.privacy.batches import Kernel, measure_each
from fedpact.privacy.column_scales import scale_columns
from fedpact.privacy.ledger.ledger import Ledger
from fedpact.privacy.ledger.reservations import CompanionReservation
from fedpact.privacy.terms import FullDataRelease

DECLARE: Final = (
    "To evaluate the model at the sites, declare [evaluation] share = 0.2 (of each site's records, "
    "which then are not trained on), epsilon and delta: sites release noisy counts of them; with "
    "releases = [] they release nothing, at no cost, and each site's owner alone sees its figures"
)
OWNERS_ONLY: Final = (
    "Sites hold out records and release nothing about them (evaluation.releases = []): "
    "`fedpact deploy status SITE_DIRECTORY` shows a site's owner its own figures"
)

ReleasedMeasure = Literal["hits", "loss", "roc", "false_positives"]


class EvaluationSettings(BaseModel):
    """Which records are held out of training, and what is released about them."""

    model_config = FROZEN
    share: float = Field(default=0.0, ge=0, lt=1)
    """The approximate share of each site's records that is held out, 0 for none; each record is
    assigned independently."""
    every: int = Field(default=0, ge=0)
    """Rounds between evaluations, 0 for the last model only, which is always evaluated."""
    epsilon: float = Field(default=1.0, gt=0)
    """(ε, δ) of a held-out record, for all evaluations together."""
    delta: float = Field(default=1e-5, gt=0, lt=1)
    """(ε, δ) of a held-out record, for all evaluations together."""
    releases: list[ReleasedMeasure] = Field(default=["hits", "loss"])
    """hits: hits and misses by class (and group); loss: the sum of losses, each clipped to
    loss_bound (needs hits, which count the records); roc: scores by class, for two classes;
    false_positives: misses by predicted class (and group), for more than two classes, needs
    hits. []: nothing leaves a site, and each owner sees its own figures."""
    loss_bound: float = Field(default=5.0, gt=0)
    """The largest loss that one record counts with."""
    bins: int = Field(default=20, ge=2, le=1000)
    """The number of bins of scores in roc."""
    level: float = Field(default=0.95, gt=0, lt=1)
    """The coverage of the intervals."""
    groups: str | None = None
    """A column of [records] with categories: hits are counted by group."""

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if not self.share and self != EvaluationSettings.model_construct():
            raise ValueError(
                "share = 0 with other settings: no record is held out, so nothing would be "
                "released; give share, as 0.2, or leave the table out"
            )
        if len(set(self.releases)) < len(self.releases):
            raise ValueError(f"releases = {self.releases}: expected each once")
        needing = {name: name in self.releases for name in ("loss", "false_positives")}
        for name, asked in {"groups": self.groups is not None, **needing}.items():
            if asked and self.releases and "hits" not in self.releases:
                raise ValueError(
                    f"{name} with releases = {self.releases}: it needs the table of hits, which "
                    'counts the records; add "hits", or leave it out'
                )
        return self

    @property
    def used(self) -> bool:
        """Whether records are held out."""
        return self.share > 0

    @property
    def why_unreleased(self) -> str:
        """Why sites release no evaluations, and how they would."""
        return OWNERS_ONLY if self.used else DECLARE

    def check_ends(
        self, accuracy: float | None, patience: int | None, private: bool, rounds: int
    ) -> None:
        """Raise ValueError if early stopping needs an accuracy that is not released during the run.

        accuracy, patience, rounds: of the plan (common.run_settings.Limits).
        """
        early = accuracy is not None or patience is not None
        if not (early and private and self.used and self.releases):
            return
        told = f"budget.accuracy = {accuracy} and patience = {patience} with evaluation."
        if "hits" not in self.releases:
            raise ValueError(
                f"{told}releases = {self.releases}: no accuracy among them could end the run; add "
                '"hits"'
            )
        if not 0 < self.every < rounds:
            raise ValueError(
                f"{told}every = {self.every} and rounds = {rounds}: only the last model is "
                "evaluated, which is too late; set evaluation.every = 1, or to the number of "
                "rounds between evaluations"
            )

    def terms(self, rounds: int, spare: int, accountant: Accountant) -> FullDataRelease | None:
        """Return the terms of a site's evaluations in this many rounds; None: it releases nothing.

        spare: the number of additional evaluations. Raises BudgetExhausted: no noise is enough.
        """
        if not self.used or not self.releases:
            return None
        times = spare + (math.ceil(rounds / self.every) if self.every else 1)
        bounds = dict.fromkeys(map(str, self.releases), 1.0)
        budget = Budget(self.epsilon, self.delta)
        return FullDataRelease.within("evaluation", bounds, times, budget, accountant)


class Grouping(BaseModel):
    """Groups of records by one of their columns."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )
    column: int = Field(ge=0)
    """The column's index in a record [d], from 0."""
    values: tuple[float, ...] = Field(min_length=2)
    """The column's value in each group."""
    names: tuple[str, ...]
    """The groups' names, in the same order."""

    @model_validator(mode="after")
    def _fit(self) -> Self:
        if not len(self.values) == len(self.names) == len(set(self.values)):
            raise ValueError(
                f"values = {self.values} and names = {self.names}: expected one name a value, and "
                "each value once"
            )
        return self

    def of(self, x: Tensor) -> Tensor:
        """Return each record's group, int64 [n], of records x [n, d] whose values are declared."""
        values = torch.tensor(self.values, dtype=x.dtype)
        return (x[:, self.column, None].cpu() == values).long().argmax(1)

    @staticmethod
    def declared(name: str, form: RecordForm, features: Sequence[str], width: int) -> "Grouping":
        """Return the groups of a column: of a table with these features, or of arrays [n, width].

        Raises PlanError: no such column, or one without at least two declared categories.
        """
        places = list(features) or [str(place) for place in range(width)]
        own = form.columns.get(name)
        if name not in places or own is None or len(own.categories or ()) < 2:
            raise PlanError(
                f'evaluation.groups = "{name}": expected a column of the records with at least two '
                f"declared categories, as [records.columns.{toml_key(name)}] categories = "
                f'["a", "b"]; the columns are {", ".join(places[:20])}'
            )
        names, numbers = map(str, own.categories or ()), own.as_numbers().categories or ()
        values = tuple(float(number) for number in numbers)
        return Grouping(column=places.index(name), values=values, names=tuple(names))


def name_reservation(run: str) -> str:
    """Return the name of a run's evaluations in a ledger. No run has such a name."""
    return f"{run}/evaluation"


def charge_of(ledger: Ledger, task: Task) -> Callable[[SampledGaussian, tuple[str, ...]], None]:
    """Return a function that charges the evaluation of a task."""

    def charge(event: SampledGaussian, purpose: tuple[str, ...]) -> None:
        ledger.charge(
            name_reservation(task.run),
            f"{task.round}/{task.digest}",
            event,
            1,
            purpose=purpose,
            round_number=task.round,
            attempt=task.attempt,
        )

    return charge


def hold_out(
    x: Tensor, y: Tensor, share: float, key: bytes, whose: Sequence[str] | None = None
) -> Tensor:
    """Return which records x [n, ...], y [n] are held out, bool [n]: about `share` of them.

    share: in [0, 1]. key: 1 to 64 secret bytes, constant as long as the site has these records.
    whose: each record's person; None if unknown. Equal records, and records of one person, are on
    the same side.
    """
    limit = int(share * 2.0**64)
    found = [
        int.from_bytes(hashlib.blake2b(each, digest_size=8, key=key).digest(), "big") < limit
        for each in _name_records(x, y, whose)
    ]
    return torch.tensor(found, dtype=torch.bool)


def digest_records(x: Tensor, y: Tensor, whose: Sequence[str] | None = None) -> bytes:
    """Return a digest of all that sides follow from beside share and key; see `hold_out`."""
    each = {hashlib.blake2b(one, digest_size=16).digest() for one in _name_records(x, y, whose)}
    return hashlib.sha256(b"".join(sorted(each))).digest()


def _name_records(x: Tensor, y: Tensor, whose: Sequence[str] | None) -> Iterator[bytes]:
    """Yield what each record's side follows from: its values and label, or its person."""
    if whose is not None:
        yield from (name.encode("utf-8", "surrogatepass") for name in whose)
        return
    rows = x.detach().cpu().contiguous().numpy()
    labels = y.detach().cpu().contiguous().to(torch.int64).numpy()
    yield from (row.tobytes() + label.tobytes() for row, label in zip(rows, labels, strict=True))


def key_of_seed(seed: int, site: str) -> bytes:
    """Return a simulated site's key."""
    return hashlib.blake2b(f"held out/{seed}/{site}".encode(), digest_size=32).digest()


_FINE: Final = 2.0**20


@dataclass(frozen=True)
class SumsForm:
    """The sums of held-out records in a run: which, released on which terms, and when.

    groups: their names; ("all",) if none are declared. unit: what is counted, a "record" or a
    "person". once: the terms on which each site releases them; None: nothing is released. rounds:
    of the run.
    """

    settings: EvaluationSettings
    classes: tuple[str, ...]
    groups: tuple[str, ...] = ("all",)
    unit: str = "record"
    once: FullDataRelease | None = None
    rounds: int = 0

    @property
    def share(self) -> float:
        """The share of held-out records; 0: none."""
        return self.settings.share

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Channel -> the shape of its sums, in the order of the plan."""
        every = {
            "hits": (len(self.groups), len(self.classes), 2),
            "loss": (1,),
            "roc": (2, self.settings.bins),
            "false_positives": (len(self.groups), len(self.classes)),
        }
        return {channel: every[channel] for channel in self.settings.releases}

    @property
    def whole(self) -> "SumsForm":
        """All sums for this number of classes, which the owner sees without any cost."""
        last = "roc" if len(self.classes) == 2 else "false_positives"
        releases = ["hits", "loss", last]
        return replace(self, settings=self.settings.model_copy(update={"releases": releases}))

    @property
    def shown(self) -> "SumsForm":
        """The sums that a simulation computes exactly: those released, or all if none are."""
        return self.whole if self.once is None else self

    @property
    def lengths(self) -> dict[str, int]:
        """Channel -> how many numbers a site releases; empty if it releases nothing."""
        return {c: math.prod(shape) for c, shape in self.shapes.items() if self.once is not None}

    @property
    def noise(self) -> dict[str, float]:
        """Channel -> the deviation of the noise in a site's sums."""
        return dict.fromkeys(self.shapes, 0.0 if self.once is None else self.once.sigma)

    def is_due(self, round_number: int) -> bool:
        """Whether the model is evaluated after this round."""
        every = self.settings.every
        regular = every > 0 and round_number % every == 0
        return self.share > 0 and round_number > 0 and (regular or round_number == self.rounds)

    def split(self, key: bytes, *, persons: bool) -> str:
        """Return a digest of the split for the ledger, which reveals nothing about the key.

        persons: whether persons are split, with all their records, or records.
        """
        by = "person" if persons else "record"
        return hashlib.sha256(f"{self.share!r}/{by}/".encode() + key).hexdigest()[:32]

    def reserve(self, ledger: Ledger, run: str, split: str, *, only_ask: bool = False) -> None:
        """Reserve a run's evaluations. only_ask, raises: as Ledger.reserve; e.g. another split."""
        if self.once is not None:
            ledger.reserve(
                *(name_reservation(run), self.once.budget, self.once.history),
                beside=CompanionReservation(run, split),
                unit=self.unit,
                only_ask=only_ask,
            )


def form_of(
    settings: EvaluationSettings,
    classes: Sequence[str],
    groups: Grouping | None,
    unit: str,
    once: FullDataRelease | None = None,
    rounds: int = 0,
) -> SumsForm:
    """Return the sums' form. Raises PlanError: a release that does not fit classes or groups."""
    if (settings.groups is None) != (groups is None):
        raise PlanError(
            f"evaluation.groups is {settings.groups!r} with groups = {groups}: expected both or "
            "none; federation.toml has the groups that `fedpact deploy init` wrote with plan.json"
        )
    if "roc" in settings.releases and settings.used and len(classes) != 2:
        raise PlanError(
            f'evaluation.releases has "roc", but there are {len(classes)} classes: a ROC curve '
            'needs two; leave "roc" out'
        )
    if "false_positives" in settings.releases and len(classes) == 2:
        raise PlanError(
            'evaluation.releases has "false_positives", but there are 2 classes: "hits" already '
            "implies them; leave it out, as every further release adds noise to all"
        )
    names = groups.names if groups else ("all",)
    return SumsForm(settings, tuple(classes), names, unit, once, rounds)


@dataclass(frozen=True)
class HeldOut:
    """A site's held-out records: x [n, ...], y [n], group [n] as indices into SumsForm.groups.

    persons: each record's person, int64 [n] from 0 without gaps; None if records are counted.
    columns: the positions in a record that are scaled by released means.
    """

    x: Tensor
    y: Tensor
    group: Tensor
    persons: Tensor | None = None
    columns: tuple[int, ...] = ()

    def totals(
        self, form: SumsForm, kernel: Kernel | PlainKernel, w: Tensor, by: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return the exact sums at w [d], float64 and flat, by channel; the model is left at w.

        by: the columns' scales (privacy.column_scales); None if they are scaled already.

        A record at which the model raises, or with scores that are not finite, is a miss with score
        0 and the largest loss. This depends on that record only.
        """
        kernel.model.load(w.to(kernel.model.vector.device))
        x = self.x if by is None else scale_columns(self.x, self.columns, by)
        with keeping_modes(kernel.model.module):
            kernel.model.module.eval()
            losses = _losses(kernel, x, self.y, len(form.classes)).cpu()
        weights = self._weights()
        return {
            channel: _sums(channel, form, losses, self.y.cpu(), self.group.cpu(), weights)
            for channel in form.shapes
        }

    def _weights(self) -> Tensor:
        """Return each record's weight, float64 [n], on a grid on which sums are exact."""
        if self.persons is None:
            return torch.ones(len(self.y), dtype=torch.float64)
        each = torch.bincount(self.persons).double().reciprocal()
        return each.mul_(_FINE).floor_().div_(_FINE)[self.persons]


def _losses(kernel: Kernel | PlainKernel, x: Tensor, y: Tensor, classes: int) -> Tensor:
    """Return -log p_c of each record and class c: float64 [n, classes], NaN if undefined.

    The kernel's passes are used, in which a record's bits do not depend on other records.
    """
    if not len(y):
        return torch.zeros(0, classes, dtype=torch.float64)
    # A simulation's held-out records may be on another device than the model.
    x, y = (part.to(kernel.model.vector.device) for part in (x, y))
    each = [measure_each(kernel.losses, x, torch.full_like(y, c)) for c in range(classes)]
    return torch.stack(each, dim=1)


def _sums(
    channel: str, form: SumsForm, losses: Tensor, y: Tensor, group: Tensor, weights: Tensor
) -> Tensor:
    """Return a channel's sums, flat float64, from `_losses` and each record's group and weight."""
    shape, places = form.shapes[channel], torch.arange(len(y))
    if channel == "loss":
        parts = (losses[places, y] / form.settings.loss_bound).nan_to_num(1.0, posinf=1.0)
        # On a grid, addition is exact, so a record changes the sum by exactly its own part.
        return parts.clamp(0, 1).mul(weights * _FINE).floor().sum().reshape(1) / _FINE
    known, said = losses.isfinite().all(1), losses.nan_to_num().argmin(1)
    if channel == "hits":
        cell = (group * shape[1] + y) * 2 + (~known | (said != y)).long()
    elif channel == "roc":
        score = torch.where(known, torch.exp(-losses[:, 1]).nan_to_num(), 0.0)
        cell = y * shape[1] + (score * shape[1]).long().clamp(0, shape[1] - 1)
    else:
        places = (known & (said != y)).nonzero()[:, 0]
        cell = group * shape[1] + said
    return torch.bincount(cell[places], weights[places], minlength=math.prod(shape)).double()
