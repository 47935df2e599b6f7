"""Per-sample losses: outputs [B, ...] and targets [B, ...] to one number a record [B].

A loss must not mix records, so none of them takes a mean over the batch.
"""

from typing import Protocol

import torch.nn.functional as F
from torch import Tensor


class Loss(Protocol):
    """(outputs [B, ...], targets y [B, ...]) -> losses [B], differentiable in the outputs."""

    def __call__(self, outputs: Tensor, y: Tensor, /) -> Tensor:
        """Return the losses [B]."""
        ...


def cross_entropy(outputs: Tensor, y: Tensor, /) -> Tensor:
    """-log softmax(outputs)[y] of each record; a mean over positions where a record is a sequence.

    outputs: logits [B, K], y: classes [B]; or a sequence: logits [B, T, K], y [B, T].

    >>> import torch
    >>> cross_entropy(torch.zeros(2, 4), torch.tensor([0, 3])).exp()
    tensor([4., 4.])
    """
    if outputs.dim() == 2:
        return F.cross_entropy(outputs, y, reduction="none")
    each = F.cross_entropy(outputs.flatten(0, -2), y.flatten(), reduction="none")
    return each.view(y.shape).flatten(1).mean(1)


def squared_error(outputs: Tensor, y: Tensor, /) -> Tensor:
    """½‖outputs - y‖² of each record; outputs and y have B times the same number of entries.

    >>> import torch
    >>> squared_error(torch.zeros(1, 2), torch.tensor([[3.0, 4.0]]))
    tensor([12.5000])
    """
    # Reshaped, never broadcast: outputs [B, 1] against y [B] would pair every record with every y.
    difference = outputs - y.reshape(outputs.shape)
    return 0.5 * (difference * difference).reshape(outputs.shape[0], -1).sum(1)
