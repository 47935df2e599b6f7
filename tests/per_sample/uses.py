"""How the arguments of every operation in the table are drawn; see drawn.

A draw may give what the operation does not take, or what mixes records: the first is drawn anew,
the second must be refused.
"""

import sys
from collections.abc import Callable

import torch
from tests.per_sample.drawn import Draw, aten, factor
from torch import fx

Use = Callable[[Draw], object]

USES: dict[str, Use] = {}
"""By the name in the table."""


def add(names: str, draw: Use) -> None:
    for name in names.split():
        USES[f"aten.{name if '.' in name else name + '.default'}"] = draw


def _last(x: fx.Node) -> int:
    return x.meta["val"].shape[-1]


def _with(*extra: object, kind: str = "x") -> Use:
    """Records, and what does not depend on them."""
    return lambda g: (g.x(kind=kind), *extra)


def _then(*more: Callable[[Draw, fx.Node], object]) -> Use:
    """Records, and arguments that follow from their form."""

    def draw(g: Draw) -> tuple[object, ...]:
        x = g.x()
        return (x, *(one(g, x) for one in more))

    return draw


def _dim(g: Draw, x: fx.Node) -> int:
    return g.dim(x)


def _dims(g: Draw, x: fx.Node) -> list[int]:
    return g.dims(x)


def _keep(g: Draw, _: fx.Node) -> bool:
    return g.likely()


def _is(value: object) -> Callable[[Draw, fx.Node], object]:
    return lambda _g, _x: value


def _one_of(*values: object) -> Callable[[Draw, fx.Node], object]:
    return lambda g, _: g.rng.choice(values)


def _pair(kind: str = "x", *extra: object) -> Use:
    """Two operands, of which at least one has records."""

    def draw(g: Draw) -> tuple[object, ...]:
        x = g.x(kind=kind)
        two = [x, g.partner(x, kind)]
        return (*(two if g.likely() else two[::-1]), *extra)

    return draw


def _three(*kinds: str) -> Use:
    """Three operands of these kinds, of which at least one has records."""

    def draw(g: Draw) -> list[fx.Node]:
        place = g.rng.randrange(3)
        x = g.x(kind=kinds[place])
        return [x if i == place else g.partner(x, kind) for i, kind in enumerate(kinds)]

    return draw


add(
    "relu gelu silu mish tanh sigmoid exp exp2 expm1 log log1p log2 log10 sqrt rsqrt abs neg sin "
    "cos tan asin acos atan sinh cosh erf erfc sign square reciprocal floor ceil round trunc frac "
    "hardtanh hardswish hardsigmoid relu6 selu celu elu leaky_relu softplus softshrink hardshrink "
    "log_sigmoid rrelu isnan isinf isfinite nan_to_num detach alias clone contiguous logical_not "
    "lift_fresh_copy zeros_like ones_like rand_like randn_like bernoulli _to_copy t numpy_T mT "
    "uniform normal_functional empty_like exponential asinh "
    "atanh erfinv lgamma digamma logit angle sgn",
    _with(),
)
add("normal.float_Tensor", lambda g: (0.4, g.x()))
add("normal.Tensor_Tensor", _pair())
add("randint_like", _with(3))
add("randint_like.low_dtype", _with(1, 3))
add("multinomial", lambda g: (g.front(2), 1))
add("bitwise_not", _with(kind="q"))
add(
    "clamp_min clamp_max full_like bernoulli.p normal.Tensor_float pow.Tensor_Scalar "
    "fmod.Scalar remainder.Scalar "
    "add.Scalar sub.Scalar mul.Scalar div.Scalar rsub.Scalar floor_divide.Scalar eq.Scalar "
    "ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar",
    _with(0.4),
)
add("clamp threshold", _with(0.3, 0.6))
add("dropout feature_dropout alpha_dropout feature_alpha_dropout native_dropout", _with(0.5, True))
add("div.Scalar_mode", lambda g: (g.x(), 0.3, {"rounding_mode": "floor"}))
add("pow.Scalar", lambda g: (0.4, g.x()))
add("to.dtype", _with(torch.float32))
add("to.dtype_layout", _with({"dtype": torch.float32}))
add("to.device", _with(torch.device("cpu"), torch.float32))
add("fill.Scalar", _then(lambda g, _: g.rng.choice([2.0, g.batch])))
add("fill.Tensor", _then(lambda g, _: g.constant()))
add(
    "add.Tensor sub.Tensor mul.Tensor div.Tensor rsub.Tensor pow.Tensor_Tensor maximum minimum "
    "fmod.Tensor remainder.Tensor atan2 floor_divide xlogy.Tensor eq.Tensor ne.Tensor lt.Tensor "
    "le.Tensor gt.Tensor ge.Tensor polar logaddexp hypot copysign.Tensor",
    _pair(),
)
add(
    "logical_and logical_or logical_xor bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor "
    "__and__.Tensor __or__.Tensor __xor__.Tensor",
    _pair("q"),
)
add("div.Tensor_mode", _pair("x", {"rounding_mode": "trunc"}))
add("addcmul addcdiv lerp.Tensor clamp.Tensor", _three("x", "x", "x"))
add("lerp.Scalar", _pair("x", 0.3))
add("where.self", _three("q", "x", "x"))
add("where.ScalarSelf", lambda g: (lambda x: (g.partner(x, "q"), 0.5, x))(g.x()))
add("where.ScalarOther", lambda g: (lambda x: (g.partner(x, "q"), x, 0.5))(g.x()))
add("where.Scalar", _with(0.5, 0.25, kind="q"))
add("masked_fill.Scalar", _then(lambda g, x: g.partner(x, "q"), _is(0.5)))
add("masked_fill.Tensor", _then(lambda g, x: g.partner(x, "q"), lambda g, _: g.constant()))
add(
    "prelu", _then(lambda g, x: g.constant(factor(x.meta["val"].shape[1 % x.meta["val"].dim()])[0]))
)

_other = (lambda g, x: g.partner(x), _one_of(0, 0, 0, 1, 2))
add("mse_loss l1_loss smooth_l1_loss huber_loss kl_div soft_margin_loss", _then(*_other))
_maybe = (lambda g, x: None if g.likely() else g.partner(x),)
add("binary_cross_entropy", _then(_other[0], *_maybe, _other[1]))
add("binary_cross_entropy_with_logits", _then(_other[0], *_maybe, *_maybe, _other[1]))

add("view reshape _unsafe_view", _then(lambda g, x: g.shape(x)))
add("flatten.using_ints", _then(_one_of(0, 1, 2), _one_of(-1, 1, 2)))
add("unflatten.int", _then(_dim, _one_of([1, -1], [2, -1], [-1, 1], [-1, 2])))
add("permute", _then(lambda g, x: g.rng.sample(range(n := x.meta["val"].dim()), n)))
add("transpose.int swapaxes swapdims movedim.int moveaxis.int", _then(_dim, _dim))
add("movedim.intlist moveaxis.intlist", _then(_is([0, -1]), _one_of([-1, 0], [1, 0], [-1, -2])))


def _wider(g: Draw, x: fx.Node) -> list[object]:
    """Sizes to expand x to: new dimensions, and other lengths where it has 1."""
    new = g.sizes(g.rng.randint(0, 2))
    old = [(1, g.times(m)) if power else (m, m) for m, power in map(factor, x.meta["val"].shape)]
    more = (3, 2, g.batch)
    return [*new, *(g.rng.choice(more) if m == 1 and size == 1 else size for m, size in old)]


add("expand broadcast_to", _then(_wider))
add("unsqueeze", _then(lambda g, x: g.dim(x, 1)))
add("squeeze.dim unbind.int glu cumsum cumprod logcumsumexp sort cummax cummin", _then(_dim))
add("squeeze.dims flip count_nonzero.dim_IntList", _then(_dims))
add("softmax.int log_softmax.int", _then(_dim))
add("_softmax _log_softmax", _then(_dim, _is(False)))
add("select.int", _then(_dim, _one_of(0, -1, 1)))
add("slice.Tensor", _then(_dim, _one_of(None, 0, 1, -1), _one_of(None, 2, 2**63 - 1)))
add("split.Tensor", _then(_one_of(1, 2), _dim))
add(
    "split.sizes split_with_sizes",
    _then(_one_of([1], [2], [3], [1, 1], [2, 1], [1, 2], [2, 2]), _dim),
)
add("chunk tensor_split.sections", _then(_one_of(1, 2, 3), _dim))


def _several(g: Draw) -> tuple[object, ...]:
    x = g.x()
    nothing = g.call(aten.new_zeros.default, x, [0]) if g.likely() else g.constant(0)
    return [*([] if g.likely() else [nothing]), x, g.partner(x)], g.dim(x)


add("cat concat concatenate", _several)
add("stack", lambda g: (lambda x: ([x, g.partner(x)], g.dim(x, 1)))(g.x()))
add(
    "repeat tile",
    _then(lambda g, x: [g.rng.choice([1, 1, 2]) for _ in range(x.meta["val"].dim() + g.likely())]),
)
add("repeat_interleave.self_int", _then(_is(2), _dim))
add("complex", _pair())


def _complex(g: Draw) -> fx.Node:
    x = g.x()
    return g.call(aten.complex.default, x, g.call(aten.sin.default, x))


add("real imag view_as_real _conj", lambda g: (_complex(g),))
add("view_as_complex", lambda g: (g.call(aten.view_as_real.default, _complex(g)),))
for _how in ("fft", "ifft", "rfft", "irfft"):
    add(f"fft_{_how}", _then(_is(None), _dim))
    add(f"fft_{_how}2", _then(*([] if _how[0] == "i" else [_is(None), _dims])))
    add(f"fft_{_how}n", _then(_is(None), _dims))
add("gather", _then(_dim, lambda g, x: g.partner(x, "i")))
add(
    "scatter_add scatter.src",
    _then(_dim, lambda g, x: g.partner(x, "i"), lambda g, x: g.partner(x)),
)
add("scatter.value", _then(_dim, lambda g, x: g.partner(x, "i"), _is(0.5)))


def _index_add(g: Draw) -> tuple[object, ...]:
    x = g.x()
    dim = g.dim(x)
    size = x.meta["val"].shape[dim]
    length = size if isinstance(size, int) and g.likely() else g.rng.randint(1, 3)
    return x, dim, g.constant(length, kind="i"), g.partner(x)


add("index_add", _index_add)
add("index_select", _then(_dim, lambda g, _: g.constant(4, kind="i")))
add("narrow", _then(_dim, _is(0), _is(1)))
add("unfold", _then(_dim, _is(2), _is(1)))
add("roll", _then(_is([1]), lambda g, x: [g.dim(x)] if g.likely() else []))
add("sort.stable", _then(lambda g, x: {"stable": True, "dim": g.dim(x)}))
add("topk", _then(_is(1), _dim))
add(
    "new_zeros new_ones new_empty",
    _then(lambda g, x: [2, g.batch] if g.likely() else [g.batch, g.batch]),
)
add("new_full", _then(lambda g, _: [2, g.batch], lambda g, _: 0.5 if g.likely() else g.batch))


def _index(g: Draw) -> tuple[object, ...]:
    skipped = [None] * g.rng.randint(0, 2)
    if g.likely():
        return _picked(g)
    if g.likely():
        return (g.x(), [*skipped, g.constant(*g.sizes(g.rng.randint(0, 2)), kind="i")])
    return (g.constant(3, 3, *g.sizes(1)), [*skipped[:1], g.x(kind="i")])


def _picked(g: Draw) -> tuple[object, ...]:
    """x[arange(B), i], with the batch where it may be and i a constant or each record's own."""
    count = g.rng.randint(1, 3)
    place = g.rng.randrange(count)
    new = g.rng.randint(0, 2)
    x = g.like([2] * place + [1] + [2] * (count - place - 1), place, plain=0.9)
    numbers = g.call(aten.arange.default, g.batch)
    numbers = g.call(aten.view.default, numbers, [g.batch] + [1] * new)
    same = [1] * g.rng.randint(0, 1) + [g.batch] + [1] * new
    numbers = numbers if g.likely() else g.call(aten.expand.default, numbers, same)

    def other() -> fx.Node:
        chosen = (
            g.like([1] + [2] * new, 0, "i", plain=1)
            if g.likely()
            else g.constant(*[2] * new, kind="i")
        )
        return g.call(aten.remainder.Scalar, chosen, 2)

    indices = [other() if g.likely() else None for _ in range(count)]
    indices[place if g.likely() else g.rng.randrange(count)] = numbers
    return x, indices


add("index.Tensor", _index)
add("sum.dim_IntList mean.dim amax amin logsumexp any.dims all.dims", _then(_dims, _keep))
add("any.dim all.dim argmax argmin max.dim min.dim median.dim", _then(_dim, _keep))
add(
    "var.correction std.correction var_mean.correction std_mean.correction",
    _then(_dims, lambda g, _: {"correction": 0, "keepdim": g.likely()}),
)
add("var.dim std.dim var_mean.dim std_mean.dim", _then(_dims, _is(False), _keep))
add("linalg_vector_norm norm.ScalarOpt_dim", _then(_is(2), _dims, _keep))
add("tril triu", _then(_one_of(0, 1, -1)))
add("layer_norm rms_norm", _then(lambda _, x: [_last(x)], lambda g, x: g.constant(_last(x))))
add("linear", _then(lambda g, x: g.constant(3, _last(x)), lambda g, _: g.constant(3)))
add(
    "pad",
    _then(
        lambda g, _: [1, 1] * g.rng.randint(1, 3),
        _one_of("constant", "replicate", "reflect", "circular"),
    ),
)
add("constant_pad_nd", _then(lambda g, _: [1, 1] * g.rng.randint(1, 2)))


def _selected(g: Draw) -> tuple[object, ...]:
    x = g.x()
    dim = g.dim(x)
    return x, g.call(aten.select.int, g.partner(x), dim, 0), dim, 0


add("select_scatter", _selected)
_ends = _one_of(None, 2, sys.maxsize)
add("slice_scatter", _then(lambda g, x: g.partner(x), _dim, _one_of(None, 0, 1), _ends))
add("embedding", lambda g: (g.constant(3, 4), g.x(kind="i")))
add("searchsorted.Tensor", lambda g: (g.constant(5), g.x()))
add("bucketize.Tensor", lambda g: (g.x(), g.constant(5)))
add("one_hot", lambda g: (g.x(kind="i"), 3 if g.likely() else -1))
