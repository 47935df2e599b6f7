"""Record by record: the way for models that are not shown to keep the records of a batch apart.

The model is traced with a batch of one, so records cannot affect each other, no branch on values
can be taken, and no state passes from one pass to the next: Python runs once, on records without
values. vmap then differentiates the trace for many records, or a loop if torch cannot batch an
operation. A model that cannot be traced like this is refused.
"""

import logging
import math
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap
from torch.fx import Node

from fedpact.common.errors import ModelError
from fedpact.common.losses import Loss
from fedpact.common.params import FlatModel, autocast, model_name
from fedpact.per_sample import norms
from fedpact.per_sample.gradients import Made, Share
from fedpact.per_sample.layout import length_for
from fedpact.per_sample.norms import wide
from fedpact.per_sample.registers import LANES, fill_up, rounds, takes_rows
from fedpact.per_sample.tracing.batch_rules import shape_of
from fedpact.per_sample.tracing.export import Untraceable
from fedpact.per_sample.tracing.keyed_draws import (
    PassNumbers,
    drawing,
    numbers_at_hand,
    without_fused_draws,
)
from fedpact.per_sample.tracing.program import Program, operation
from fedpact.per_sample.tracing.record_safety import own_tables
from fedpact.per_sample.tracing.trace_context import for_vmap

_logger = logging.getLogger("fedpact")
_announced: set[str] = set()

_FEW, _MANY = 16, 256
"""So many records vmap takes at a time, and so many where all that it computes fits as well."""

_OVERHEAD = 16.0
"""What a call of vmap costs beside its records, in records; measured."""

_LOOPED = "its records are differentiated in a loop, exact, but slow: {}"


class Alone:
    """Differentiates a model and its loss for each record. why: why nothing better could.

    draws: whether a pass draws random numbers. multiple: multiples of it as P leave no rest of
    registers where numbers are not filled up, so that the same code computes all slots. Raises
    ModelError for what cannot be traced with a batch of one.
    """

    def __init__(self, model: FlatModel, loss: Loss, x: Tensor, y: Tensor, why: str) -> None:
        self._model, self._why, self._name = model, why, model_name(model.module)
        try:
            self._one = Program(model, loss, x, y, 1)
        except Untraceable as error:
            again = "" if str(error) == why else f" ({error})"
            raise ModelError(
                f"model {self._name} is not shown to keep the records of a batch apart ({why}), "
                f"and cannot be differentiated record by record{again}: write it without "
                "branches on values and without state that a pass changes, or choose another model "
                "where the line is a library's own"
            ) from error
        tensors = [n for n in self._one.nodes if isinstance(n.meta.get("val"), Tensor)]
        each = {t: math.prod(n for n in shape_of(t) if isinstance(n, int)) for t in tensors}
        numbers = sum(each.values())
        fit = norms.keep_bytes(model.vector) // model.vector.element_size()
        few, many = min(_FEW, fit // model.size), min(_MANY, fit // max(model.size, numbers))
        self.step = max(1, few, many)
        left = (t for t in tensors if rounds(t) and not takes_rows(t))
        rests = (LANES // math.gcd(LANES, each[t]) for t in left)
        self.multiple = max(rests, default=1)
        self._by_vmap, self.draws = self._takes_vmap(x, y), self._one.draws
        if not self._by_vmap:
            self.step = self.multiple = 1

    def run(
        self, x: Tensor, y: Tensor, *, held: bool = False
    ) -> tuple[Tensor, dict[str, list[Share]]]:
        """Losses [B] of at most `step` records, and shares by the parameters' names.

        held: the shares stay valid after a change of the weights, which these always do.
        """
        del held
        losses, rows = self._rows(x, y)
        return wide(losses), {name: [Made(found)] for name, found in rows.items()}

    def length(self, expected: float, **how: bool) -> int:
        """Return P; see layout.length_for. It is no multiple where memory does not allow one."""
        most, multiple = self.step, 1 if self.multiple > self.step else self.multiple
        if most <= _FEW:
            return most - most % multiple
        return length_for(expected, most, _OVERHEAD, multiple, **how)

    def losses(self, x: Tensor, y: Tensor) -> Tensor:
        """The losses [B] of at most `step` records."""
        return wide(self._rows(x, y)[0])

    def _takes_vmap(self, x: Tensor, y: Tensor) -> bool:
        """Whether vmap can batch the trace, tried once on zeros of the form of x, y.

        If it were tried on records, one of them could change the last bits of all the others'
        gradients. Where the model itself fails on zeros, the loop is certain to be right.
        """
        if own_tables(self._one.nodes, self._one.entered):
            told = "vmap would look up one record's entries in another's table"
            self._announce(logging.WARNING, _LOOPED.format(told))
            return False
        x, y = (v.new_zeros((min(self.step, _FEW), *v.shape[1:])) for v in (x, y))
        draws = self._one.draws
        numbers = PassNumbers.of_records(lambda: 0, x, y, leading=True) if draws else None
        with without_fused_draws(self._model), drawing(numbers):
            why = _error(self._run_by_vmap, x, y)
        if why is None:
            self._announce(logging.INFO, "vmap differentiates it record by record")
        else:
            self._announce(logging.WARNING, _LOOPED.format(_first_line(why)))
        return why is None

    def _rows(self, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return self._run_by_vmap(x, y) if self._by_vmap else self._run_in_loop(x, y)

    def _announce(self, level: int, how: str) -> None:
        message = f"model {self._name} is not shown to keep records apart ({self._why}): {how}"
        if message not in _announced:
            _announced.add(message)
            _logger.log(level, message)

    def _run_by_vmap(self, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        def op_of(node: Node) -> Callable[..., Any]:
            do = operation(node)
            return partial(fill_up, do, 0, len(x)) if takes_rows(node) else do

        def one(w: dict[str, Tensor], record: Tensor, target: Tensor) -> Tensor:
            with autocast(self._model):
                return _only(self._one.losses(record.unsqueeze(0), target.unsqueeze(0), w, op_of))

        weights = {n: p.detach() for n, p in self._model.own.items()}
        batched = vmap(grad_and_value(one), in_dims=(None, 0, 0), randomness="different")
        with for_vmap():
            rows, losses = cast(Any, batched)(weights, x.detach(), y)
        return losses, rows

    def _run_in_loop(self, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        weights = {name: p.detach().requires_grad_() for name, p in self._model.own.items()}
        losses: list[Tensor] = []
        rows: list[tuple[Tensor, ...]] = []
        numbers = numbers_at_hand()
        for j in range(len(x)):
            own = drawing(numbers and numbers.alone(j))
            with torch.enable_grad(), autocast(self._model), own:
                # Each has the same memory layout, and no other record's numbers behind it.
                one, target = (
                    v[j : j + 1].clone(memory_format=torch.contiguous_format) for v in (x, y)
                )
                loss = _only(self._one.losses(one, target, weights))
            losses.append(loss.detach())
            given = list(weights.values())
            found = torch.autograd.grad(loss, given, materialize_grads=True)
            rows.append(tuple(g.to_dense() if g.is_sparse else g for g in found))
        columns = zip(*rows, strict=True)
        made = {n: torch.stack(column) for n, column in zip(weights, columns, strict=True)}
        return torch.stack(losses), made


def _error(way: Callable[[Tensor, Tensor], object], x: Tensor, y: Tensor) -> Exception | None:
    try:
        way(x, y)
    except Exception as error:  # whatever a model may raise
        return error
    return None


def _first_line(why: Exception | None) -> str:
    return (str(why).strip() or "vmap cannot batch it").splitlines()[0]


def _only(losses: Tensor) -> Tensor:
    """The one loss of one record. Raises ModelError for another shape."""
    if losses.shape != (1,):
        raise ModelError(
            f"the losses of 1 record have shape {tuple(losses.shape)}: expected (1,), one a "
            "record; let the model return a row for each, and the loss not reduce over the batch"
        )
    return losses[0]
