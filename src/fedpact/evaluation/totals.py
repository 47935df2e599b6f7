"""Sums over held-out records: exact here, and with noise wherever they leave a site.

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

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor, nn

from fedpact.errors import PlanError
from fedpact.evaluation.groups import Grouping
from fedpact.evaluation.settings import EvaluationSettings
from fedpact.persample.kernel import PlainKernel
from fedpact.privacy.batches import Kernel
from fedpact.privacy.columns import scale_columns
from fedpact.privacy.guarded import measure_losses

_FINE: Final = 2.0**20


@dataclass(frozen=True)
class SumsForm:
    """What is summed. groups: their names; of one group "all" where none are declared.

    unit: what counts as one, a "record" or a "person".
    """

    settings: EvaluationSettings
    classes: tuple[str, ...]
    groups: tuple[str, ...] = ("all",)
    unit: str = "record"

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
    def lengths(self) -> dict[str, int]:
        """Channel -> how many numbers it releases."""
        return {channel: math.prod(shape) for channel, shape in self.shapes.items()}


def form_of(
    settings: EvaluationSettings, classes: Sequence[str], groups: Grouping | None, unit: str
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
    return SumsForm(settings, tuple(classes), groups.names if groups else ("all",), unit)


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

        by: what scales the columns (privacy.columns); None where they are as they should be.

        A record at which the model raises, or whose scores are not finite, is a miss, with score 0
        and the largest loss. Whatever it is depends on that record alone.
        """
        kernel.model.load(w.to(kernel.model.vector.device))
        x = self.x if by is None else scale_columns(self.x, self.columns, by)
        with _evaluating(kernel.model.module):
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
    each = [measure_losses(kernel.losses, x, torch.full_like(y, c)) for c in range(classes)]
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


@contextmanager
def _evaluating(module: nn.Module) -> Generator[None]:
    """Have a model evaluate, and leave its modes as they were."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training
