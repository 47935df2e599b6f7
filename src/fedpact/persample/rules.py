"""Rules: from an operation that uses a parameter to shares of that parameter's gradients.

A rule is given a Call: the operation's arguments, the gradient of its output, and where each has
the batch. It returns a Share for every argument that is wanted. docs/adding-a-rule.md states its
contract: exact for each record, linear in the output's gradient, and no number of one record in
another's. Operations without a rule are replayed: vmap differentiates them record by record, and
nothing around them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vjp, vmap

from fedpact.persample.apart.batch_rules import Where
from fedpact.persample.apart.vmap import for_vmap
from fedpact.persample.convolution import Convolved, Geometry
from fedpact.persample.gradients import Lookup, Made, Outer
from fedpact.persample.products import lying
from fedpact.persample.share import Share

_aten = cast(Any, torch.ops.aten)


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
        return cast(Tensor, found).detach()

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


def results_of(found: Any) -> list[Tensor]:
    """An operation's results, one or several."""
    return list(found) if type(found) in (list, tuple) else [found]


def shares_of(call: Call) -> Shares:
    """The shares that a call leaves of the arguments that are wanted."""
    return _RULES.get(str(call.op), replayed)(call)


def _linear(call: Call) -> Shares:
    """Rows x Wᵀ + b: Σ_t g_t x_tᵀ and Σ_t g_t."""
    g = call.positions(call.grad)
    found: Shares = {}
    if 1 in call.wanted:
        found[1] = Outer(g, call.positions(call.input()))
    if 2 in call.wanted:
        found[2] = Made(g.sum(1))
    return found


def _matmul(call: Call) -> Shares:
    """Rows x W with W [K, O]: Σ_t x_t g_tᵀ. Other products are replayed."""
    if call.wanted != [1] or cast(Tensor, call.args[1]).dim() != 2 or call.places[0].dim < 0:
        return replayed(call)
    x = cast(Tensor, call.args[0])
    if x.dim() < 2 or call.places[0].dim == x.dim() - 1:
        return replayed(call)
    return {1: Outer(call.positions(call.input()), call.positions(call.grad))}


def _addmm(call: Call) -> Shares:
    """b + x W for x [B, K]."""
    if call.kwargs or call.at(0).shape != call.at(2).shape[1:]:
        return replayed(call)
    g = call.positions(call.grad)
    found: Shares = {}
    if 2 in call.wanted:
        found[2] = Outer(call.positions(call.input(1)), g)
    if 0 in call.wanted:
        found[0] = Made(g.sum(1))
    return found


def _convolution(call: Call) -> Shares:
    """[B, C, L] or [B, C, H, W]."""
    weight = cast(Tensor, call.args[1])
    if weight.dim() > 4 or call.out[0] != Where(0):
        return replayed(call)
    defaults = [1, 0, 1, 1] if weight.dim() == 4 else [[1], [0], [1], 1]
    given = call.args[3:]
    settings = [*given, *defaults[len(given) :]]
    lists: list[Any] = [v if isinstance(v, (list, tuple, str)) else [v] for v in settings[:3]]
    geometry = Geometry.by(tuple(weight.shape[2:]), [*lists, settings[3]])
    g = cast(Tensor, call.grads[0])
    found: Shares = {}
    if 1 in call.wanted:
        found[1] = Convolved(geometry, weight, cast(Tensor, call.args[0]).detach(), g)
    if 2 in call.wanted:
        found[2] = Made(g.flatten(2).sum(2))
    return found


def _embedding(call: Call) -> Shares:
    """Rows of a table; by frequency of the batch's indices would mix its records."""
    padding = cast(int, call.args[2]) if len(call.args) > 2 else -1
    table = cast(Tensor, call.args[0])
    index = call.input(1).reshape(call.batch, -1)
    g = call.positions(call.grad)
    return {0: Lookup(index, g, len(table), padding if padding >= 0 else None)}


def _normalised(normal: Callable[[Call], Tensor], weight: int, bias: int, dims: int) -> Rule:
    """y = weight ⊙ x̂ + bias over the last dimensions, or over channels where dims is 0."""

    def rule(call: Call) -> Shares:
        if dims == 0 and call.out[0] != Where(0):
            return replayed(call)
        g = cast(Tensor, call.grads[0])
        found: Shares = {}
        if weight in call.wanted:
            found[weight] = Made(_summed(call, g * normal(call), weight, dims))
        if bias in call.wanted:
            found[bias] = Made(_summed(call, g, bias, dims))
        return found

    return rule


def _summed(call: Call, v: Tensor, place: Place, dims: int) -> Tensor:
    size = call.at(place).numel()
    if dims == 0:
        return v.flatten(2).sum(2) if v.dim() > 2 else v
    return call.apart(v, call.out[0]).reshape(call.batch, -1, size).sum(1)


def _option(call: Call, place: int, default: Any) -> Any:
    return call.args[place] if len(call.args) > place else default


def _layer_normal(call: Call) -> Tensor:
    x = cast(Tensor, call.args[0]).detach()
    return F.layer_norm(x, call.args[1], None, None, _option(call, 4, 1e-5))


def _rms_normal(call: Call) -> Tensor:
    return F.rms_norm(
        cast(Tensor, call.args[0]).detach(), call.args[1], None, _option(call, 3, None)
    )


def _group_normal(call: Call) -> Tensor:
    x = cast(Tensor, call.args[0]).detach()
    return F.group_norm(x, call.args[1], None, None, _option(call, 4, 1e-5))


def _frozen_normal(call: Call) -> Tensor:
    x, _, _, mean, variance, _, _, eps = call.args[:8]
    return F.batch_norm(x.detach(), mean, variance, None, None, False, 0.0, eps)


def _instance_normal(call: Call) -> Tensor:
    return F.instance_norm(cast(Tensor, call.args[0]).detach(), eps=call.args[7])


def _reduced(call: Call, g: Tensor, place: Place) -> Made:
    """The output's gradient, summed over what a parameter was broadcast along."""
    argument = call.at(place)
    shape = argument.shape
    # A single number does not make halves wider than they are, which it is.
    apart = call.apart(g, call.out[0]).to(argument.dtype)
    shape = torch.Size([1] * (apart.dim() - 1 - len(shape)) + list(shape))
    over = [d + 1 for d, size in enumerate(shape) if size == 1 and apart.shape[d + 1] != 1]
    return Made(apart.sum(over) if over else apart)


def _added(sign: int) -> Rule:
    """x + p and p + x, with broadcasting; the second has the sign."""

    def rule(call: Call) -> Shares:
        g = cast(Tensor, call.grads[0])
        factors = {0: 1, 1: sign * call.kwargs.get("alpha", 1)}
        found: Shares = {}
        for i in call.wanted:
            factor = factors[cast(int, i)]
            found[i] = _reduced(call, g if factor == 1 else g * factor, i)
        return found

    return rule


def _multiplied(call: Call) -> Shares:
    """x ⊙ p and p ⊙ x, with broadcasting."""
    g = cast(Tensor, call.grads[0])
    return {i: _reduced(call, g * call.at(1 - cast(int, i)), i) for i in call.wanted}


def _expanded(call: Call) -> Shares:
    """A parameter that is given to each record, as a class token is."""
    return {0: _reduced(call, cast(Tensor, call.grads[0]), 0)}


def _repeated(call: Call) -> Shares:
    """A parameter that is repeated for each record: of one record, as often as the others say."""
    times, where = list(call.args[1]), call.out[0]
    times[where.dim] = where.inner
    return replayed(replace(call, args=[call.args[0], times]))


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
            pull({i: lying(x[j]) for i, x in inputs.items()}, [lying(g[j]) for g in grads])
            for j in range(call.batch)
        ]
        rows = [torch.stack(column) for column in zip(*each, strict=True)]
    return {i: Made(r) for i, r in zip(call.wanted, rows, strict=True)}


_RULES: dict[str, Rule] = {
    "aten.linear.default": _linear,
    "aten.matmul.default": _matmul,
    "aten.mm.default": _matmul,
    "aten.addmm.default": _addmm,
    "aten.conv1d.default": _convolution,
    "aten.conv2d.default": _convolution,
    "aten.conv1d.padding": _convolution,
    "aten.conv2d.padding": _convolution,
    "aten.embedding.default": _embedding,
    "aten.layer_norm.default": _normalised(_layer_normal, 2, 3, dims=1),
    "aten.rms_norm.default": _normalised(_rms_normal, 2, -1, dims=1),
    "aten.group_norm.default": _normalised(_group_normal, 2, 3, dims=0),
    "aten.batch_norm.default": _normalised(_frozen_normal, 1, 2, dims=0),
    "aten.instance_norm.default": _normalised(_instance_normal, 1, 2, dims=0),
    "aten.add.Tensor": _added(1),
    "aten.sub.Tensor": _added(-1),
    "aten.mul.Tensor": _multiplied,
    "aten.expand.default": _expanded,
    "aten.repeat.default": _repeated,
}
