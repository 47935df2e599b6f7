"""Uses of parameters in a pass, and the rules for their per-sample gradients.

An operation without a rule is replayed: vmap differentiates this operation alone, record by record.

A rule receives a Call: the operation's arguments, the gradient of its output, and the batch
dimension of each. It returns a Share for every requested argument. docs/notes/adding-a-rule.md
states its contract: exact for each record, linear in the output's gradient, and independent of
other records.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.func import vjp, vmap

from fedpact.per_sample.convolution import Convolved, Geometry, Pooled, Pooled2d, sparse
from fedpact.per_sample.gradients import Lookup, Made, Outer, Share
from fedpact.per_sample.layout import align
from fedpact.per_sample.norms import flatten_rows, wide
from fedpact.per_sample.registers import LANES
from fedpact.per_sample.tracing.batch_rules import Where
from fedpact.per_sample.tracing.trace_context import for_vmap

Place = int | tuple[int, int]
"""Of an argument, or of one in a list of them."""


@dataclass(eq=False)
class Call:
    """One operation of a pass. places, out: the batch dimension of arguments and results.

    wanted: the arguments whose gradients are requested. grads: of the results, None if no loss
    depends on one. batch: B. pooled: the nonzero entries of the gradient, if only a max-pooling
    reads the result. recorded: what a recurrence reports; see recurrent.Record.
    """

    op: Callable[..., Any]
    args: list[Any]
    kwargs: dict[str, Any]
    places: dict[Place, Where]
    out: list[Where]
    wanted: list[Place]
    batch: int
    grads: list[Tensor | None] = field(default_factory=list[Tensor | None])
    pooled: Pooled | None = None
    recorded: Sequence[tuple[int, Tensor, Tensor | None]] = ()

    @property
    def grad(self) -> Tensor:
        """The gradient of the only result, per record."""
        return self.per_record(cast(Tensor, self.grads[0]), self.out[0])

    def at(self, place: Place) -> Tensor:
        """The argument at a position."""
        found = self.args[place] if isinstance(place, int) else self.args[place[0]][place[1]]
        return wide(cast(Tensor, found).detach())

    def input(self, place: Place = 0) -> Tensor:
        """An argument per record: [B, ...], each record with a batch of one in its dimension."""
        return self.per_record(self.at(place), self.places[place])

    def put(self, values: "Mapping[Place, Tensor | None]") -> list[Any]:
        """The arguments with those at some positions replaced."""
        args: list[Any] = [
            list(cast(list[Any], a)) if isinstance(a, (list, tuple)) else a for a in self.args
        ]
        for place, value in values.items():
            if isinstance(place, int):
                args[place] = value
            else:
                args[place[0]][place[1]] = value
        return args

    def per_record(self, tensor: Tensor, where: Where) -> Tensor:
        """A tensor as [B, ...], each record as if it were alone."""
        dim, outer, inner = where
        if outer == inner == 1:
            return tensor.movedim(dim, 0).unsqueeze(dim + 1)
        shape = tensor.shape
        split = tensor.reshape(*shape[:dim], outer, self.batch, inner, *shape[dim + 1 :])
        return split.movedim(dim + 1, 0).flatten(dim + 1, dim + 2)

    def alone(self, g: Tensor) -> Tensor:
        """A gradient of the only result per record, to sum; see _lying_apart."""
        return _lying_apart(self.per_record(g, self.out[0]))

    def positions(self, apart: Tensor) -> Tensor:
        """[B, ..., N] as [B, T, N]."""
        return apart.reshape(self.batch, -1, apart.shape[-1])


Shares = dict[Place, Share]
"""By the place of the argument."""

Rule = Callable[[Call], Shares]


def _lying_apart(rows: Tensor) -> Tensor:
    """Rows [B, ...], to sum within each, with no record's numbers among another's in memory.

    Sums over columns that hold all records' numbers would add the last ones by other code, where
    they do not fill registers.
    """
    first, *others = rows.stride()
    mixed = any(stride > first and stride % LANES for stride in others)
    return rows.contiguous() if mixed else rows


def results_of(found: Any) -> list[Tensor]:
    """The results of an operation as a list."""
    return list(found) if type(found) in (list, tuple) else [found]


def replay(call: Call) -> Shares:
    """The rule for any operation: vmap, or else a loop, differentiates it record by record.

    Each record is a batch of one. Raises the operation's errors.
    """
    grads = [
        call.per_record(g, where)
        for g, where in zip(call.grads, call.out, strict=True)
        if g is not None
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
        # Whether vmap supports an operation depends on its form, not on records.
        each = [
            pull({i: align(x[j]) for i, x in inputs.items()}, [align(g[j]) for g in grads])
            for j in range(call.batch)
        ]
        rows = [torch.stack(column) for column in zip(*each, strict=True)]
    return {i: Made(r) for i, r in zip(call.wanted, rows, strict=True)}


def shares_of(call: Call) -> Shares:
    """The shares of a call's requested arguments."""
    # The rules are those of real numbers, without conjugates.
    waves = any(g is not None and g.is_complex() for g in call.grads)
    return replay(call) if waves else _rule_of(call.op)(call)


@cache
def _rule_of(op: object) -> Rule:
    return _RULES.get(str(op), replay)


def _linear(call: Call) -> Shares:
    """Rows x Wᵀ + b: Σ_t g_t x_tᵀ and Σ_t g_t."""
    g = call.positions(call.grad)
    found: Shares = {}
    if 1 in call.wanted:
        found[1] = Outer(g, call.positions(call.input()))
    if 2 in call.wanted:
        found[2] = Made(_sum(call, cast(Tensor, call.grads[0]), 2, 1))
    return found


def _matmul(call: Call) -> Shares:
    """A product a b of matrices or vectors, batched or not, with broadcasting."""
    a, b = call.at(0).dim(), call.at(1).dim()
    batch = "abcdefgh"[-max(a, b, 2) + 2 :] if max(a, b) > 2 else ""
    left = batch[len(batch) - a + 2 :] + "mk" if a > 1 else "k"
    right = batch[len(batch) - b + 2 :] + "kn" if b > 1 else "k"
    out = batch + "m" * (a > 1) + "n" * (b > 1)
    return _contract(call, {0: left, 1: right}, out)


def _einsum(call: Call) -> Shares:
    """Any einsum of a trace, which has a letter for each dimension; a diagonal is replayed."""
    equation = cast(str, call.args[0]).replace(" ", "")
    terms, _, out = equation.partition("->")
    operands: dict[Place, str] = {(1, i): one for i, one in enumerate(terms.split(","))}
    if "Z" in equation or not out or any(len({*one}) < len(one) for one in operands.values()):
        return replay(call)
    return _contract(call, operands, out)


def _contract(call: Call, operands: dict[Place, str], out: str) -> Shares:
    """A sum of products. operands, out: dimensions as einsum letters, of the arguments and of y.

    The gradient of a factor is the product of ∂/∂y and the other factors, summed over all letters
    that the factor does not have: with two factors a matrix product, batched over the letters in
    all three.
    """
    found: Shares = {}
    for place in call.wanted:
        own, sizes = operands[place], call.at(place).shape
        # A dimension of one entry was broadcast, so its gradient is summed over whatever it met.
        kept = "".join(c for c, size in zip(own, sizes, strict=True) if size > 1)
        terms = [_narrow(call.grad, "Z" + out)]
        for i, letters in operands.items():
            if i in call.places:
                terms.append(_narrow(call.input(i), "Z" + letters))
            elif i != place:
                terms.append(_narrow(call.at(i), letters))
        # A letter in no other term was summed by itself: all its entries have the same gradient.
        if not {*kept} <= {c for _, letters in terms for c in letters}:
            return replay(call)
        found[place] = _factor(terms, kept, matrix=call.at(place).dim() == len(kept) == 2)
    return found


def _narrow(tensor: Tensor, letters: str) -> tuple[Tensor, str]:
    """Drop dimensions of size 1, which may be broadcast, except the batch, Z."""
    kept = [d for d, c in enumerate(letters) if c == "Z" or tensor.shape[d] > 1]
    return tensor.reshape([tensor.shape[d] for d in kept]), "".join(letters[d] for d in kept)


def _factor(terms: list[tuple[Tensor, str]], own: str, *, matrix: bool) -> Share:
    """The share of a factor with the letters `own`, from ∂/∂y and the other factors."""
    equation = ",".join(letters for _, letters in terms) + "->Z" + own
    if len(terms) > 2:
        return Made(torch.einsum(equation, *[t for t, _ in terms]))
    (g, out), (x, read) = terms
    rows, columns = ([c for c in own if c in one] for one in (out, read))
    # A matrix with one letter from each side is an outer product summed over the positions.
    if not matrix or len(rows) != 1 or len(columns) != 1 or rows == columns:
        return Contracted(equation, g, x)
    positions = "".join(c for c in out[1:] if c in read and c not in own)

    def matrices(tensor: Tensor, letters: str, last: str) -> Tensor:
        each = torch.einsum(f"{letters}->Z{positions}{last}", tensor)
        return each.reshape(len(tensor), -1, each.shape[-1])

    g, x = matrices(g, out, rows[0]), matrices(x, read, columns[0])
    return Outer(g, x) if own[0] == rows[0] else Outer(x, g)


class Contracted(Share):
    """Gradients that are an einsum of ∂/∂y and another factor, [B, ...] each."""

    def __init__(self, equation: str, g: Tensor, x: Tensor) -> None:
        self._equation, self._g, self._x = equation, g, x
        super().__init__(len(g), self.rows(slice(0, 1)).shape[1], g)

    def quick_rows(self, chunk: slice) -> Tensor:
        """See Share."""
        return flatten_rows(torch.einsum(self._equation, self._g[chunk], self._x[chunk]))


def _convolution(call: Call) -> Shares:
    """x [B, C, ...] of one to three dimensions."""
    stride, padding, dilation, groups = [*call.args[3:], *[1, 0, 1, 1][len(call.args[3:]) :]]
    if call.out[0] != Where(0) and call.at(1).dim() > 4:
        return replay(call)
    geometry, weight, x, g = _images(call, [stride, padding, dilation, groups])
    if call.pooled is not None and sparse(geometry, weight, g, call.pooled):
        return _with_bias(call, Pooled2d(geometry, weight, x, g, call.pooled), g)
    return _with_bias(call, Convolved(geometry, weight, x, g), g)


def _transpose(call: Call) -> Shares:
    """A transposed convolution: the gradient of a convolution, with x and g exchanged."""
    settings = [*call.args[3:], *[1, 0, 0, 1, 1][len(call.args[3:]) :]]
    stride, padding, _, groups, dilation = settings
    geometry, weight, x, g = _images(call, [stride, padding, dilation, groups])
    several = call.out[0] != Where(0) and call.at(1).dim() > 4
    if several or geometry.positions(g.shape[2:]) != tuple(x.shape[2:]):
        # The output has extra steps at its end, which the convolution would read as well.
        return replay(call)
    return _with_bias(call, Convolved(geometry, weight, g, x), g)


def _images(call: Call, settings: list[Any]) -> tuple[Geometry, Tensor, Tensor, Tensor]:
    """A convolution's geometry, weight, input and gradient.

    Several images of a record, such as a film's, are one with a dimension more.
    """
    x, weight, g = call.at(0), call.at(1), cast(Tensor, call.grads[0])
    geometry = Geometry.by(weight.shape[2:], settings)
    if call.out[0] == Where(0):
        return geometry, weight, x, g
    x, g = (call.per_record(t, call.out[0]).movedim(1, 2) for t in (x, g))
    return geometry.over_several(), weight.unsqueeze(2), x, g


def _with_bias(call: Call, weight: Share, g: Tensor) -> Shares:
    """The shares of a weight, and of a bias per output channel."""
    return {i: weight if i == 1 else Made(_lying_apart(g).flatten(2).sum(2)) for i in call.wanted}


def _embedding(call: Call) -> Shares:
    """Rows of a table; scaling by frequency in the batch would mix records."""
    padding = cast(int, call.args[2]) if len(call.args) > 2 else -1
    table = cast(Tensor, call.args[0])
    index = call.input(1).reshape(call.batch, -1)
    g = call.positions(call.grad)
    return {0: Lookup(index, g, len(table), padding if padding >= 0 else None)}


def _normalise(weight: int, bias: int | None, dims: int) -> Rule:
    """y = weight ⊙ x̂ + bias over the last `dims` dimensions, or over channels if dims is 0."""

    def rule(call: Call) -> Shares:
        if dims == 0 and call.out[0] != Where(0):
            return replay(call)
        g = cast(Tensor, call.grads[0])
        found: Shares = {}
        if weight in call.wanted:
            # x̂ is the result without weight and bias; a trace omits a bias that is None.
            without = [at for at in (weight, bias) if at is not None and at < len(call.args)]
            args = call.put({0: call.at(0), **dict.fromkeys(without)})
            found[weight] = Made(_sum(call, g * call.op(*args), weight, dims))
        if bias in call.wanted:
            found[bias] = Made(_sum(call, g, bias, dims))
        return found

    return rule


def _sum(call: Call, v: Tensor, place: Place, dims: int) -> Tensor:
    size = call.at(place).numel()
    if dims == 0:
        return _lying_apart(v).flatten(2).sum(2) if v.dim() > 2 else v
    return call.alone(v).reshape(call.batch, -1, size).sum(1)


def _reduce(call: Call, g: Tensor, place: Place) -> Made:
    """The output's gradient, summed over the dimensions along which a parameter was broadcast."""
    argument = call.at(place)
    shape = argument.shape
    # A scalar does not promote 16-bit tensors, so convert it.
    apart = call.alone(g).to(argument.dtype)
    shape = torch.Size([1] * (apart.dim() - 1 - len(shape)) + list(shape))
    over = [d + 1 for d, size in enumerate(shape) if size == 1 and apart.shape[d + 1] != 1]
    return Made(apart.sum(over) if over else apart)


def _each_number(call: Call) -> Shares:
    """An elementwise operation with broadcasting: differentiated by autograd, per record."""
    g = cast(Tensor, call.grads[0])
    given = {i: call.at(i).expand_as(g).requires_grad_() for i in call.wanted}
    with torch.enable_grad():
        found = call.op(*call.put({i: call.at(i) for i in call.places} | given), **call.kwargs)
    rows = torch.autograd.grad(found, list(given.values()), g)
    return {i: _reduce(call, row, i) for i, row in zip(given, rows, strict=True)}


def _index(call: Call) -> Shares:
    """Entries p[i] of a table by integers."""
    table, index = call.at(0), cast(list[Any], call.args[1])
    if len(index) != 1 or index[0].dtype == torch.bool:
        return replay(call)
    index = call.input((1, 0)).reshape(call.batch, -1) % len(table)
    return {0: Lookup(index, call.grad.reshape(*index.shape, -1), len(table), None)}


def _repeat(call: Call) -> Shares:
    """A parameter that is repeated for each record, such as a class token, and otherwise."""
    g, shape = call.alone(cast(Tensor, call.grads[0])), call.at(0).shape
    shape = [1] * (g.dim() - 1 - len(shape)) + list(shape)
    tiles = [(size // own, own) for size, own in zip(g.shape[1:], shape, strict=True)]
    g = g.reshape(len(g), *(n for tile in tiles for n in tile))
    return {0: Made(g.sum([*range(1, g.dim(), 2)]))}


def of_arguments(share: Share, op: str, args: list[Any]) -> Shares | None:
    """Shares of the arguments from which an operation made a weight; None if it has no rule.

    If the weight is made of parameters alone, such as Wᵀ or W + B A, an outer product is passed on
    unchanged: no matrix of the weight's size is needed per record, and no vmap. Operations that
    only rearrange numbers are applied to the gradients, and rows of a table are looked up. args:
    numbers and tensors of the operation.
    """
    if type(share) is Made:
        return _of_made(share, op, args)
    if type(share) is not Outer:
        return None
    g, u = share.g, share.u
    if op == "aten.add.Tensor" and args[0].shape == args[1].shape:
        return {0: share, 1: share}
    if op == "aten.mul.Tensor" and not (isinstance(args[1], Tensor) and args[1].dim()):
        # Numbers have no share: if one is needed, the matrix is materialised.
        return {0: Outer(g * args[1], u)}
    if op in _PRODUCTS and args[0].dim() == args[1].dim() == 2:
        return {0: Outer(g, u @ args[1].t()), 1: Outer(g @ args[0], u)}
    turned = op in _TURNS or (op == "aten.transpose.int" and (args[1] - args[2]) % 2)
    turned |= op == "aten.permute.default" and args[1][0] % 2 == 1
    return {0: Outer(u, g)} if turned and args[0].dim() == 2 else None


def _of_made(share: Made, op: str, args: list[Any]) -> Shares | None:
    rows, of = share.rows(slice(0, share.batch)), args[0]
    if op in _VIEWS:
        return {0: share}
    if op == "aten.permute.default":
        dims = [d % of.dim() for d in args[1]]
        turned = rows.view(-1, *(of.shape[d] for d in dims))
        return {0: Made(turned.permute(0, *(dims.index(d) + 1 for d in range(of.dim()))))}
    index = args[1] if op == "aten.embedding.default" else None
    if op == "aten.index.Tensor" and len(args[1]) == 1 and args[1][0].dtype == torch.int64:
        index = args[1][0] % len(of)
    # vmap handles an index without gradient and a source that is not a table.
    if index is None or of.dim() != 2 or args[2:]:
        return None
    index = index.reshape(1, -1).expand(share.batch, -1)
    return {0: Lookup(index, rows.view(*index.shape, -1), len(of), None)}


_VIEWS = tuple(
    f"aten.{name}"
    for name in (
        *("unsqueeze.default", "view.default", "reshape.default", "_unsafe_view.default"),
        *("squeeze.dim", "flatten.using_ints", "clone.default", "contiguous.default"),
    )
)
_PRODUCTS = ("aten.matmul.default", "aten.mm.default")
_TURNS = ("aten.t.default", "aten.numpy_T.default", "aten.mT.default")
_POINTWISE = (
    *("add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "where.self"),
    *("pow.Tensor_Tensor", "maximum.default", "minimum.default", "lerp.Tensor"),
    *("addcmul.default", "clamp.Tensor"),
)
_REPEATING = ("expand", "broadcast_to", "repeat")

_RULES: dict[str, Rule] = {
    "aten.linear.default": _linear,
    **dict.fromkeys([f"aten.{name}.default" for name in ("matmul", "mm", "bmm", "mv")], _matmul),
    "aten.einsum.default": _einsum,
    **dict.fromkeys([f"aten.conv{n}d.default" for n in "123"], _convolution),
    "aten.conv_transpose1d.default": _transpose,
    "aten.conv_transpose2d.input": _transpose,
    "aten.conv_transpose3d.input": _transpose,
    "aten.index.Tensor": _index,
    "aten.embedding.default": _embedding,
    "aten.layer_norm.default": _normalise(2, 3, dims=1),
    "aten.rms_norm.default": _normalise(2, None, dims=1),
    "aten.group_norm.default": _normalise(2, 3, dims=0),
    "aten.batch_norm.default": _normalise(1, 2, dims=0),
    "aten.instance_norm.default": _normalise(1, 2, dims=0),
    **dict.fromkeys([f"aten.{one}" for one in _POINTWISE], _each_number),
    **dict.fromkeys([f"aten.{one}.default" for one in _REPEATING], _repeat),
}
