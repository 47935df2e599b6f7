"""Calls: operations of a pass that use parameters, and their gradients by vmap where no rule is.

Operations without a rule are replayed: vmap differentiates them record by record, and nothing
around them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.func import vjp, vmap

from fedpact.persample.apart.batch_rules import Where
from fedpact.persample.apart.vmap import for_vmap
from fedpact.persample.gradients import Made
from fedpact.persample.layout import aligned
from fedpact.persample.share import Share

Place = int | tuple[int, int]
"""Of an argument, or of one in a list of them."""


@dataclass(eq=False)
class Call:
    """One operation of a pass. places: of each argument that has records; out: of the results.

    wanted: the arguments whose gradients are asked for. grads: those of the results, None where no
    loss depends on one. batch: B.
    """

    op: Callable[..., Any]
    args: list[Any]
    kwargs: dict[str, Any]
    places: dict[Place, Where]
    out: list[Where]
    wanted: list[Place]
    batch: int
    grads: list[Tensor | None] = field(default_factory=list[Tensor | None])

    @property
    def grad(self) -> Tensor:
        """The gradient of the only result, apart."""
        return self.apart(cast(Tensor, self.grads[0]), self.out[0])

    def at(self, place: Place) -> Tensor:
        """The argument at a place."""
        found = self.args[place] if isinstance(place, int) else self.args[place[0]][place[1]]
        return wide(cast(Tensor, found).detach())

    def input(self, place: Place = 0) -> Tensor:
        """An argument with records, apart: [B, ...], each with a batch of one in its place."""
        return self.apart(self.at(place), self.places[place])

    def put(self, values: "dict[Place, Tensor]") -> list[Any]:
        """The arguments with others in these places."""
        args: list[Any] = [
            list(cast(list[Any], a)) if isinstance(a, (list, tuple)) else a for a in self.args
        ]
        for place, value in values.items():
            if isinstance(place, int):
                args[place] = value
            else:
                args[place[0]][place[1]] = value
        return args

    def apart(self, tensor: Tensor, where: Where) -> Tensor:
        """[B, ...] of a tensor that has the batch elsewhere, each record as if it were alone."""
        dim, outer, inner = where
        if outer == inner == 1:
            return tensor.movedim(dim, 0).unsqueeze(dim + 1)
        shape = tensor.shape
        split = tensor.reshape(*shape[:dim], outer, self.batch, inner, *shape[dim + 1 :])
        return split.movedim(dim + 1, 0).flatten(dim + 1, dim + 2)

    def positions(self, apart: Tensor) -> Tensor:
        """[B, ..., N] as [B, T, N]."""
        return apart.reshape(self.batch, -1, apart.shape[-1])


Shares = dict[Place, Share]
"""By the place of the argument."""

Rule = Callable[[Call], Shares]


def wide(tensor: Tensor) -> Tensor:
    """A tensor in float32 where it has 16 bits, whose sums and squares would be none."""
    return tensor.float() if tensor.is_floating_point() and tensor.itemsize < 4 else tensor


def results_of(found: Any) -> list[Tensor]:
    """An operation's results, one or several."""
    return list(found) if type(found) in (list, tuple) else [found]


def replayed(call: Call) -> Shares:
    """Any operation: vmap differentiates it record by record, a loop where vmap cannot or may not.

    Each record is given as a batch of one. Raises whatever the operation does.
    """
    grads = [
        call.apart(g, where) for g, where in zip(call.grads, call.out, strict=True) if g is not None
    ]
    given = [g is not None for g in call.grads]
    inputs = {i: call.input(i) for i in call.places}
    weights = [call.at(i) for i in call.wanted]

    def pull(inputs: dict[Place, Tensor], grads: list[Tensor]) -> tuple[Tensor, ...]:
        def run(*weights: Tensor) -> tuple[Tensor, ...]:
            given_args = call.put({**inputs, **dict(zip(call.wanted, weights, strict=True))})
            found: Any = call.op(*given_args, **call.kwargs)
            several: list[Tensor] = results_of(found)
            return tuple(v for v, wanted in zip(several, given, strict=False) if wanted)

        return cast(tuple[Tensor, ...], vjp(run, *weights)[1](tuple(grads)))

    try:
        with for_vmap():
            rows = cast(Any, vmap(pull, randomness="error"))(inputs, grads)
    except RuntimeError:
        each = [
            pull({i: aligned(x[j]) for i, x in inputs.items()}, [aligned(g[j]) for g in grads])
            for j in range(call.batch)
        ]
        rows = [torch.stack(column) for column in zip(*each, strict=True)]
    return {i: Made(r) for i, r in zip(call.wanted, rows, strict=True)}
