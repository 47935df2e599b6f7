"""Record by record: the way for models that are not shown to keep the records of a batch apart.

vmap runs the model on single records, as a batch of one each, so no record is there for another to
meet; a branch on values cannot be taken under it, nor a number be asked for. Where torch cannot
batch an operation, the model as it was traced for a batch of one runs record by record: the trace
has no branch and no state either. What neither can do is refused.
"""

import logging
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from fedpact.errors import ModelError
from fedpact.losses import Loss
from fedpact.params import FlatModel
from fedpact.persample import norms
from fedpact.persample.gradients import Made, Share
from fedpact.persample.trace import Program, Untraceable

CHUNK = 16
"""Records that one vmap differentiates at a time."""

_logger = logging.getLogger("fedpact")
_announced: set[str] = set()


class Alone:
    """Differentiates a model and its loss for each record. why: why nothing better could."""

    def __init__(self, model: FlatModel, loss: Loss, why: str) -> None:
        self._model, self._module, self._loss, self._why = model, model.module, loss, why
        size = model.size * model.vector.element_size()
        self.step = max(1, min(CHUNK, norms.KEEP_BYTES // size))
        # Recurrent layers keep their weights in a list of their own, out of vmap's sight.
        self._by_vmap = not any(isinstance(m, nn.RNNBase) for m in model.module.modules())
        self._one: Program | None = None

    def run(self, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, list[Share]]]:
        """Losses [B] of at most `step` records, and shares by the parameters' names.

        Raises ModelError where records cannot be differentiated one by one.
        """
        losses, rows = self._rows(x, y)
        return losses, {name: [Made(found)] for name, found in rows.items()}

    def _rows(self, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        refused = "it has a recurrent layer"
        if self._by_vmap:
            try:
                found = self._vmapped(x, y)
                self._announce(logging.INFO, "vmap differentiates it record by record")
                return found
            except RuntimeError as error:
                refused, self._by_vmap = str(error).strip().splitlines()[0], False
        if self._one is None:
            self._one = self._traced(x, y, refused)
        self._announce(logging.WARNING, "its records are differentiated in a loop: exact, but slow")
        return _looped(self._one, self._model, x, y)

    def losses(self, x: Tensor, y: Tensor) -> Tensor:
        """The losses [B] of records x, y [B, ...]."""
        return torch.cat([self._rows(x[rows], y[rows])[0] for rows in self._slices(len(x))])

    def _slices(self, batch: int) -> list[slice]:
        return [slice(i, i + self.step) for i in range(0, batch, self.step)]

    def _announce(self, level: int, how: str) -> None:
        name = type(self._module).__name__
        message = f"model {name} is not shown to keep records apart ({self._why}): {how}"
        if message not in _announced:
            _announced.add(message)
            _logger.log(level, message)

    def _vmapped(self, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        def one(w: dict[str, Tensor], record: Tensor, target: Tensor) -> Tensor:
            output = cast(Tensor, functional_call(self._module, w, (record.unsqueeze(0),)))
            losses = self._loss(output, target.unsqueeze(0))
            return _only(losses)

        weights = {n: p.detach() for n, p in self._model.own.items()}
        batched = vmap(grad_and_value(one), in_dims=(None, 0, 0), randomness="different")
        switch = cast(Any, torch)._C._functorch._set_vmap_fallback_warning_enabled
        # Not warnings.catch_warnings, which other threads would see.
        switch(False)
        try:
            rows, losses = cast(Any, batched)(weights, x.detach(), y)
        finally:
            switch(True)
        return losses, rows

    def _traced(self, x: Tensor, y: Tensor, refused: str) -> Program:
        try:
            return Program(self._model, self._loss, x, y, 1)
        except Untraceable as error:
            raise ModelError(
                f"model {type(self._module).__name__} is not shown to keep the records of a batch "
                f"apart ({self._why}), and cannot be differentiated record by record: vmap says "
                f"{refused!r}, torch.export {str(error)!r}. Write it without branches on values "
                "and without state that a pass changes"
            ) from error


def _only(losses: Tensor) -> Tensor:
    """The one loss of one record. Raises ModelError for another shape."""
    if losses.shape != (1,):
        raise ModelError(
            f"the losses of 1 record have shape {tuple(losses.shape)}: expected (1,), one a "
            "record; let the model return a row for each, and the loss not reduce over the batch"
        )
    return losses[0]


def _looped(
    program: Program, model: FlatModel, x: Tensor, y: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    weights = {name: p.detach().requires_grad_() for name, p in model.own.items()}
    losses: list[Tensor] = []
    rows: list[tuple[Tensor, ...]] = []
    for j in range(len(x)):
        with torch.enable_grad():
            loss = _only(program.losses(x[j : j + 1], y[j : j + 1], weights))
        losses.append(loss.detach())
        found = torch.autograd.grad(loss, list(weights.values()), materialize_grads=True)
        rows.append(found)
    columns = zip(*rows, strict=True)
    return torch.stack(losses), {
        n: torch.stack(column) for n, column in zip(weights, columns, strict=True)
    }
