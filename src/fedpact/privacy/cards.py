"""What is done otherwise on a card, where the host must not wait for a number.

Whoever looks at a number on a card waits for all that it was told to do before, and the card then
waits for whoever looked. So records that are not finite are not looked for there: what they left
behind in a pass is set to 0, record by record and whether or not there are any, and their loss to
NaN, by which the kernel knows them.
"""

import torch
from torch import Tensor

from fedpact.privacy.tape import Call


def at_hand(tensor: Tensor) -> bool:
    """Whether the host can look at the numbers without waiting."""
    return tensor.device.type == "cpu"


def without_bad(losses: Tensor, calls: list[list[Call]]) -> tuple[Tensor, list[list[Call]]]:
    """Return the losses [n] and calls of a pass, the calls 0 for records that are not finite.

    Nor may ‖x_j‖‖g_j‖ of a layer's input and output gradient be beyond the root of the largest
    number: no number of the layer's gradient is then beyond it, so that all of them times 0 are 0.
    """
    good = losses.isfinite()
    for call in (call for made in calls for call in made):
        sizes = [_squares(t) for t in _numbers(call)]
        product = torch.stack(sizes).prod(0) if sizes else losses
        good = good & product.isfinite()
    cleaned = [[_cleaned(call, good) for call in made] for made in calls]
    return torch.where(good, losses, torch.nan), cleaned


def rows_without_bad(losses: Tensor, rows: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """The same for losses [n] and gradients [n, ...] by name."""
    good = losses.isfinite()
    for one in rows.values():
        good = good & one.isfinite().flatten(1).all(1)
    cleaned = {name: _chosen(good, one) for name, one in rows.items()}
    return torch.where(good, losses, torch.nan), cleaned


def _numbers(call: Call) -> list[Tensor]:
    """The tensors of a call that hold numbers of records, not places."""
    found = call.tensors if call.grad is None else [*call.tensors, call.grad]
    return [t for t in found if t.is_floating_point()]


def _squares(rows: Tensor) -> Tensor:
    return rows.square().flatten(1).sum(1)


def _chosen(good: Tensor, rows: Tensor) -> Tensor:
    return torch.where(good.view(-1, *[1] * (rows.dim() - 1)), rows, 0)


def _cleaned(call: Call, good: Tensor) -> Call:
    tensors = [_chosen(good, t) if t.is_floating_point() else t for t in call.tensors]
    args, kwargs = call.rebuilt(tensors)
    grad = None if call.grad is None else _chosen(good, call.grad)
    return Call(args, kwargs, grad)
