"""What is done otherwise on a card, where the host must not wait for a number.

Whoever looks at a number on a card waits for all that it was told to do before, and the card then
waits for whoever looked. So records that are not finite are not looked for there: what they left
behind in a pass is set to 0, record by record and whether or not there are any. Their loss or norm
tells the kernel to give them the weight 0.
"""

import torch
from torch import Tensor

from fedpact.privacy.tape import Call


def at_hand(tensor: Tensor) -> bool:
    """Whether the host can look at the numbers without waiting."""
    return tensor.device.type == "cpu"


def without_bad(
    losses: Tensor, calls: list[list[Call]], of_layer: list[bool]
) -> tuple[Tensor, list[list[Call]]]:
    """Return the losses [n] and calls of a pass, layers' calls 0 for records that are not finite.

    Nor may ‖x_j‖‖g_j‖ of a layer's input and output gradient be beyond the root of the largest
    number: no number of the layer's gradient is then beyond it, so that all of them times 0 are 0.
    Where a module has no rule its gradients are cleaned when they are made (parts.kept).
    """
    good = losses.isfinite()
    for call in (call for made, one in zip(calls, of_layer, strict=True) if one for call in made):
        size = _squares(call.grad) if call.grad is not None else torch.ones_like(losses)
        if call.input.is_floating_point():
            size = size * _squares(call.input)
        good = good & size.isfinite()
    cleaned = [
        [_cleaned(call, good) for call in made] if one else made
        for made, one in zip(calls, of_layer, strict=True)
    ]
    return torch.where(good, losses, torch.nan), cleaned


def chosen(good: Tensor, rows: Tensor) -> Tensor:
    """Return rows [n, ...] with zeros for those that are not good [n]."""
    return torch.where(good.view(-1, *[1] * (rows.dim() - 1)), rows, 0)


def _squares(rows: Tensor) -> Tensor:
    return rows.square().flatten(1).sum(1)


def _cleaned(call: Call, good: Tensor) -> Call:
    x = chosen(good, call.input) if call.input.is_floating_point() else call.input
    return Call((x,), {}, None if call.grad is None else chosen(good, call.grad))
