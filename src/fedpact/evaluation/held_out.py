"""Held-out records: their split, their reservation, and the noisy sums released of them.

A split by shuffled places would move other records when one is added, and what that one costs would
then be what training and evaluation cost together. Here one record more is one record more on one
side; nothing else changes, and it bears the (ε, δ) of that side.

Where the site knows whose its records are, a person decides, by the name, with all records. So a
person too is on one side, and bears the (ε, δ) of that one, for however many records it holds.

hits    [groups, classes, 2]   records by group, class, and whether the model is right
    roc     [2, bins]              records by class and score, the probability of the second class
    loss    [1]                    Σ min(ℓ_j / bound, 1), each rounded down to 2^-20
    false_positives
            [groups, classes]      misses by group and the class that the model says

A record stands in one cell of a table at most, and adds at most 1 to the loss: it moves each by at
most 1. Where a person is protected, each of the m records of one weighs 1/m, rounded down to 2^-20:
so a person moves each by at most 1 as well, however many records it has, and every person counts
alike.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from fedpact.common.errors import PlanError
from fedpact.common.format import toml_key
from fedpact.common.messages import Task
from fedpact.common.params import keeping_modes
from fedpact.data.schema import RecordForm
from fedpact.evaluation.settings import EvaluationSettings
from fedpact.per_sample.kernel import PlainKernel
from fedpact.privacy.accounting.accountant import SampledGaussian
from fedpact.privacy.batches import Kernel, measure_each
from fedpact.privacy.column_scales import scale_columns
from fedpact.privacy.ledger.ledger import Ledger
from fedpact.privacy.ledger.reservations import CompanionReservation
from fedpact.privacy.terms import FullDataRelease


class Grouping(BaseModel):
    """Groups of records, by one of their columns."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )
    column: int = Field(ge=0)
    """Which place of a record [d] decides, from 0."""
    values: tuple[float, ...] = Field(min_length=2)
    """What it is in each group."""
    names: tuple[str, ...]
    """The groups', in the same order."""

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
        categories = own.categories if own is not None else None
        if name not in places or categories is None or len(categories) < 2:
            raise PlanError(
                f'evaluation.groups = "{name}": expected a column of the records with at least two '
                f"declared categories, as [records.columns.{toml_key(name)}] categories = "
                f'["a", "b"]; the columns are {", ".join(places[:20])}'
            )
        texts = isinstance(categories[0], str)
        values = tuple(float(i if texts else c) for i, c in enumerate(categories))
        return Grouping(column=places.index(name), values=values, names=tuple(map(str, categories)))


def name_reservation(run: str) -> str:
    """Return what a ledger calls a run's evaluations. No run has such a name."""
    return f"{run}/evaluation"


def charge_of(ledger: Ledger, task: Task) -> Callable[[SampledGaussian, tuple[str, ...]], None]:
    """Return what charges the evaluation that a task asks for."""

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

    key: 1 to 64 bytes, the site's own, for as long as it has these records. whose: each record's
    person; None where nobody knows. Equal records, and records of one person, fall to one side.
    share: in [0, 1].
    """
    limit = int(share * 2.0**64)
    if whose is None:
        rows = x.detach().cpu().contiguous().numpy()
        labels = y.detach().cpu().contiguous().to(torch.int64).numpy()
        told = (row.tobytes() + label.tobytes() for row, label in zip(rows, labels, strict=True))
    else:
        told = (name.encode("utf-8", "surrogatepass") for name in whose)
    found = [
        int.from_bytes(hashlib.blake2b(each, digest_size=8, key=key).digest(), "big") < limit
        for each in told
    ]
    return torch.tensor(found, dtype=torch.bool)


def key_of_seed(seed: int, site: str) -> bytes:
    """Return the secret that a simulated site has."""
    return hashlib.blake2b(f"held out/{seed}/{site}".encode(), digest_size=32).digest()


_FINE: Final = 2.0**20


@dataclass(frozen=True)
class SumsForm:
    """What a run sums of held-out records, releases of them, and when.

    groups: their names; of one group "all" where none are declared. unit: what counts as one, a
    "record" or a "person". once: what each site releases of it; None: nothing. rounds: of the run.
    """

    settings: EvaluationSettings
    classes: tuple[str, ...]
    groups: tuple[str, ...] = ("all",)
    unit: str = "record"
    once: FullDataRelease | None = None
    rounds: int = 0

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
        """All that can be summed of so many classes: what an owner sees, as it costs nobody."""
        last = "roc" if len(self.classes) == 2 else "false_positives"
        return replace(self, settings=self.settings.with_releases(["hits", "loss", last]))

    @property
    def shown(self) -> "SumsForm":
        """What a simulation has exactly: what sites release, or all where they release nothing."""
        return self.whole if self.once is None else self

    @property
    def lengths(self) -> dict[str, int]:
        """Channel -> how many numbers a site releases of it; empty where it releases nothing."""
        if self.once is None:
            return {}
        return {channel: math.prod(shape) for channel, shape in self.shapes.items()}

    @property
    def noise(self) -> dict[str, float]:
        """Channel -> the deviation of the noise in a site's sums."""
        return dict.fromkeys(self.shapes, 0.0 if self.once is None else self.once.sigma)

    def is_due(self, round_number: int) -> bool:
        """Whether the model is evaluated after this round."""
        every = self.settings.every
        regular = every > 0 and round_number % every == 0
        return self.settings.used and round_number > 0 and (regular or round_number == self.rounds)

    def split(self, key: bytes, *, persons: bool) -> str:
        """Return what a ledger knows the split by: it tells nothing of the key.

        persons: whether persons decide, with all their records, or each record.
        """
        by = "person" if persons else "record"
        return hashlib.sha256(f"{self.settings.share!r}/{by}/".encode() + key).hexdigest()[:32]

    def reserve(self, ledger: Ledger, run: str, split: str) -> None:
        """Promise a run's evaluations, of the records that a split holds out of its training.

        Raises what Ledger.reserve raises, as where the split was another one.
        """
        if self.once is not None:
            of = self.once
            beside = CompanionReservation(run, split)
            name = name_reservation(run)
            ledger.reserve(name, of.budget, of.history, beside=beside, unit=self.unit)


def form_of(
    settings: EvaluationSettings,
    classes: Sequence[str],
    groups: Grouping | None,
    unit: str,
    once: FullDataRelease | None = None,
    rounds: int = 0,
) -> SumsForm:
    """Return what is summed. Raises PlanError: a release that says nothing of so many classes."""
    if "roc" in settings.releases and settings.used and len(classes) != 2:
        raise PlanError(
            f'evaluation.releases has "roc", and there are {len(classes)} classes: a ROC curve is '
            'of two; leave "roc" out'
        )
    if "false_positives" in settings.releases and len(classes) == 2:
        raise PlanError(
            'evaluation.releases has "false_positives", and there are 2 classes: "hits" says '
            "already how many are said to be of the other one; leave it out, as each release more "
            "has more noise"
        )
    names = groups.names if groups else ("all",)
    return SumsForm(settings, tuple(classes), names, unit, once, rounds)


@dataclass(frozen=True)
class HeldOut:
    """A site's held-out records: x [n, ...], y [n], group [n] as places in SumsForm.groups.

    persons: whose each is, int64 [n] from 0 without gaps; None where records count, not persons.
    columns: the places in a record that are scaled by what sites release.
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

        by: what scales the columns (privacy.column_scales); None where they are as they should be.

        A record at which the model raises, or whose scores are not finite, is a miss, with score 0
        and the largest loss. Whatever it is depends on that record alone.
        """
        kernel.model.load(w.to(kernel.model.vector.device))
        x = self.x if by is None else scale_columns(self.x, self.columns, by)
        with keeping_modes(kernel.model.module):
            kernel.model.module.eval()
            losses = _losses(kernel, x, self.y, len(form.classes)).cpu()
        y, group, weights = self.y.cpu(), self.group.cpu(), self._weights()
        made: Mapping[str, Callable[[], Tensor]] = {
            "hits": lambda: _hits(losses, y, group, weights, form.shapes["hits"]),
            "roc": lambda: _scores(losses, y, weights, form.settings.bins),
            "loss": lambda: _sum(losses, y, weights, form.settings.loss_bound),
            "false_positives": lambda: _said(
                losses, y, group, weights, form.shapes["false_positives"]
            ),
        }
        return {channel: made[channel]().reshape(-1) for channel in form.shapes}

    def _weights(self) -> Tensor:
        """Return each record's weight, float64 [n]: on a grid, where sums of them are exact."""
        if self.persons is None:
            return torch.ones(len(self.y), dtype=torch.float64)
        each = torch.bincount(self.persons).double().reciprocal()
        return each.mul_(_FINE).floor_().div_(_FINE)[self.persons]


def _losses(kernel: Kernel | PlainKernel, x: Tensor, y: Tensor, classes: int) -> Tensor:
    """Return -log p_c of each record and class c, [n, classes] in float64, NaN where there is none.

    By the kernel's own passes, which keep the bits of a record whatever is beside it.
    """
    if not len(y):
        return torch.zeros(0, classes, dtype=torch.float64)
    # Where the model is: a simulation's held-out records are not.
    x, y = (part.to(kernel.model.vector.device) for part in (x, y))
    each = [measure_each(kernel.losses, x, torch.full_like(y, c)) for c in range(classes)]
    return torch.stack(each, dim=1)


def _hits(
    losses: Tensor, y: Tensor, group: Tensor, weights: Tensor, shape: tuple[int, ...]
) -> Tensor:
    known = losses.isfinite().all(1)
    right = (losses.nan_to_num().argmin(1) == y) & known
    cell = (group * shape[1] + y) * 2 + (~right).long()
    return torch.bincount(cell, weights, minlength=math.prod(shape)).double()


def _said(
    losses: Tensor, y: Tensor, group: Tensor, weights: Tensor, shape: tuple[int, ...]
) -> Tensor:
    said = losses.nan_to_num().argmin(1)
    wrong = losses.isfinite().all(1) & (said != y)
    cell = (group * shape[1] + said)[wrong]
    return torch.bincount(cell, weights[wrong], minlength=math.prod(shape)).double()


def _scores(losses: Tensor, y: Tensor, weights: Tensor, bins: int) -> Tensor:
    known = losses.isfinite().all(1)
    score = torch.where(known, torch.exp(-losses[:, 1]).nan_to_num(), 0.0)
    place = (score * bins).long().clamp(0, bins - 1)
    return torch.bincount(y * bins + place, weights, minlength=2 * bins).double()


def _sum(losses: Tensor, y: Tensor, weights: Tensor, bound: float) -> Tensor:
    own = losses.gather(1, y[:, None])[:, 0]
    # On a grid, where addition is exact, so a record moves the sum by its own part and no more.
    parts = (own / bound).nan_to_num(1.0, posinf=1.0).clamp(0, 1).mul(weights * _FINE).floor()
    return parts.sum().reshape(1) / _FINE
