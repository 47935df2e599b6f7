"""Per-sample losses: outputs [B, ...] and targets [B, ...] to one number a record [B].

A loss must not mix records, so none of them takes a mean over the batch.
"""

import math
from dataclasses import dataclass
from typing import Final, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

UNLABELLED: Final = -100
"""The class of pixels and tokens that a loss ignores, as in torch."""


class Loss(Protocol):
    """(outputs [B, ...], targets y [B, ...]) -> losses [B], differentiable in the outputs."""

    def __call__(self, outputs: Tensor, y: Tensor, /) -> Tensor:
        """Return the losses [B]."""
        ...


def cross_entropy(outputs: Tensor, y: Tensor, /) -> Tensor:
    """-log softmax(outputs)[y] of each record, averaged over the positions of a sequence.

    outputs: logits [B, K], y: classes [B]; or sequences: logits [B, T, K], y [B, T]; or several
    views of a record: logits [B, V, K], y [B], whose losses are averaged. The loss of a record with
    a class outside 0..K-1 is NaN and does not affect the others.

    >>> import torch
    >>> cross_entropy(torch.zeros(2, 4), torch.tensor([0, 3])).exp()
    tensor([4., 4.])
    """
    if outputs.dim() == 2:
        return _each_entropy(outputs, y)
    if y.dim() == 1:
        y = y[:, None].expand(outputs.shape[:-1])
    each = _each_entropy(outputs.flatten(0, -2), y.flatten())
    return each.view(outputs.shape[:-1]).flatten(1).mean(1)


def mask_known_classes(y: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Return a mask of the classes y [n] in 0..classes - 1, and y with 0 for the others.

    torch would raise for the whole batch, abort a GPU process, or ignore -100.
    """
    known = torch.logical_and(y >= 0, y < classes)
    return known, torch.where(known, y, 0)


def _each_entropy(logits: Tensor, y: Tensor) -> Tensor:
    known, y = mask_known_classes(y, logits.shape[-1])
    return torch.where(known, F.cross_entropy(logits, y, reduction="none"), math.nan)


@dataclass(frozen=True)
class WeightedEntropy:
    """cross_entropy times the weight of the record's class. weights: of the K classes."""

    weights: tuple[float, ...]

    def __call__(self, outputs: Tensor, y: Tensor, /) -> Tensor:
        """Return the losses [B]. outputs [B, K], y [B]."""
        # Term by term, which keeps records apart; a weight of another class's is never read.
        weight = sum(w * (y == k) for k, w in enumerate(self.weights))
        return weight * cross_entropy(outputs, y)


def pixel_entropy(outputs: Tensor, y: Tensor, /) -> Tensor:
    """-log softmax(outputs)[y], the mean over a record's pixels. outputs [B, K, ...], y [B, ...].

    Those that are UNLABELLED do not count; the loss of a record of such alone is 0.

    >>> import torch
    >>> each = pixel_entropy(torch.zeros(1, 2, 3, 3), torch.zeros(1, 3, 3, dtype=torch.int64))
    >>> round(float(each.exp()), 4)
    2.0
    """
    labelled = (y != UNLABELLED).flatten(1)
    known, y = mask_known_classes(y, outputs.shape[1])
    each = torch.where(known, F.cross_entropy(outputs, y, reduction="none"), math.nan)
    total = torch.where(labelled, each.flatten(1), 0.0).sum(1)
    return total / labelled.sum(1).clamp(min=1)


@dataclass(frozen=True)
class LabelEntropy:
    """The mean over K labels of each one's cross entropy: each is there or not, by itself.

    weights: of a label that is there, K of them, or () for 1 each; one that is not weighs 1.
    """

    weights: tuple[float, ...] = ()

    def __call__(self, outputs: Tensor, y: Tensor, /) -> Tensor:
        """Return the losses [B]. outputs: logits [B, K], y [B, K] of 0 and 1.

        >>> import torch
        >>> LabelEntropy()(torch.zeros(1, 3), torch.ones(1, 3)).exp()
        tensor([2.])
        """
        there = F.softplus(-outputs) * y
        if self.weights:
            there = there * outputs.new_tensor(self.weights)
        return (there + F.softplus(outputs) * (1 - y)).mean(1)


def squared_error(outputs: Tensor, y: Tensor, /) -> Tensor:
    """½‖outputs - y‖² of each record; outputs and y have B times the same number of entries.

    >>> import torch
    >>> squared_error(torch.zeros(1, 2), torch.tensor([[3.0, 4.0]]))
    tensor([12.5000])
    """
    # Reshaped, never broadcast: outputs [B, 1] against y [B] would pair every record with every y.
    difference = outputs - y.reshape(outputs.shape)
    return 0.5 * (difference * difference).reshape(outputs.shape[0], -1).sum(1)
