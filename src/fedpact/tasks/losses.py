"""A loss of one's own is tried before it is used."""

import torch
from torch import Tensor, nn

from fedpact.errors import ModelError
from fedpact.losses import Loss


def check_loss(
    name: str, loss: Loss, module: nn.Module, x: Tensor, y: Tensor, *, finite: bool
) -> None:
    """Raise ModelError unless a loss gives one number a record, of that record alone.

    x, y [n, ...]: made-up records. The kernel keeps records apart whatever the loss does; but one
    that mixes them would be another loss in every batch. finite: whether a loss has to be a number,
    as in a private run, which leaves out whoever has none, so that nobody sees what it would do.
    """
    device = next((p.device for p in module.parameters()), x.device)
    x, y = x.to(device), y.to(device)
    with torch.no_grad():
        outputs = module(x)
        try:
            losses, again = loss(outputs, y), loss(outputs, y)
            alone = [loss(outputs[i : i + 1], y[i : i + 1]) for i in range(len(y))]
        except Exception as error:
            raise ModelError(
                f"task.loss = {name!r} failed on {len(y)} made-up records, outputs "
                f"{tuple(outputs.shape)} and labels {tuple(y.shape)}: {type(error).__name__}: "
                f"{error}; expected loss(outputs, labels) -> losses [{len(y)}]"
            ) from error
        for found, count in ((losses, len(y)), *((one, 1) for one in alone)):
            shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            if shape != (count,):
                raise ModelError(
                    f"task.loss = {name!r} answers {count} records with {shape}: expected "
                    f"({count},), one number a record; do not reduce over the batch "
                    '(reduction="none"), but over what is inside a record'
                )
        if finite and not bool(losses.isfinite().all()):
            raise ModelError(
                f"task.loss = {name!r} gives {losses.tolist()} on {len(y)} made-up records: "
                "expected finite numbers, whatever a record holds, as one without is left out of "
                "every sum; keep logarithms, roots and quotients from what may be 0 or less, for "
                "example by torch.nn.functional.logsigmoid, log_softmax or .clamp(min=1e-6)"
            )
        if not torch.equal(losses.nan_to_num(), again.nan_to_num()):
            raise ModelError(
                f"task.loss = {name!r} gives the same records other losses the second time: "
                "expected one that draws no random numbers and keeps nothing between calls, as a "
                "request that comes again has to be the same release"
            )
        if not torch.allclose(losses, torch.cat(alone), rtol=1e-4, atol=1e-5, equal_nan=True):
            raise ModelError(
                f"task.loss = {name!r} gives a record another loss where others are beside it: "
                "expected the loss of each record to follow from its own output and label alone"
            )
