"""Random uses of an operation on tensors of which one dimension holds the batch.

A Draw makes the graph that a traced model would have: records [B, ...] of no fixed B, moved by
views so that the batch lies anywhere, alone or with other entries in one dimension (see Where), and
the operation behind. `tried` says what the table claims of its result and whether it is so.
"""

import logging
import math
import operator
import random
from collections.abc import Callable

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from fedpact.per_sample.tracing.batch_rules import Mixed, Where
from fedpact.per_sample.tracing.batch_table import states
from fedpact.per_sample.tracing.program import evaluate_nodes

aten = torch.ops.aten

# Of every use that an operation does not take, it writes where in torch's own code that is.
logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)

BATCH = 5
"""Records in the batch; no other dimension is of this length."""

CHANGED = 1
"""The record that is another, or missing: not the one in the middle, which stays where it is."""


_made: list[tuple[ShapeEnv, FakeTensorMode, torch.SymInt]] = []


def _symbolic() -> tuple[ShapeEnv, FakeTensorMode, torch.SymInt]:
    """An environment, fake tensors in it, and the size of a batch there."""
    env = ShapeEnv()
    fake = FakeTensorMode(shape_env=env)
    # What it would keep is used once.
    fake.cache_enabled = False
    context = StatelessSymbolicContext([DimDynamic.DUCK])
    size = fake.from_tensor(torch.empty(BATCH), symbolic_context=context).shape[0]
    assert isinstance(size, torch.SymInt)
    return env, fake, size


def _settled(env: ShapeEnv) -> bool:
    """Whether a use has fixed anything about the batch's size."""
    return bool(env.replacements or env.guards or env.deferred_runtime_asserts)


class Draw:
    """A graph of one operation behind views of its inputs."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.numbers = torch.Generator().manual_seed(seed)
        self.graph = fx.Graph()
        self.values: dict[str, Tensor] = {}
        self.records: set[str] = set()
        # Those that were used last, as to make them is a sixth of a use's time.
        if not _made or _settled(_made[-1][0]):
            _made[:] = [_symbolic()]
        self._env, self._fake, self._size = _made[-1]
        self.batch = self.graph.call_function(aten.sym_size.int, (self.placeholder((BATCH,)), 0))
        self.batch.meta["val"] = self._size

    @property
    def fixed(self) -> bool:
        """Whether the operation takes batches of one size alone: the tracer refuses those."""
        return bool(self._env.replacements)

    def call(self, op: Callable[..., object], *args: object, **kwargs: object) -> fx.Node:
        """A node, with the form that it has for a batch of no fixed size."""
        node = self.graph.call_function(op, args, kwargs)
        given = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self._fake, enable_python_dispatcher():
            node.meta["val"] = op(*given[0], **given[1])
        return node

    def placeholder(self, shape: tuple[int, ...], kind: str = "x", *, records: bool = True):
        """Numbers in (0.05, 0.95), indices 0 to 2 ("i") or truths ("q"); records [B, ...]."""
        value = torch.rand(shape, dtype=torch.float64, generator=self.numbers) * 0.9 + 0.05
        value = {"x": value, "i": (3 * value).long(), "q": value > 0.5}[kind]
        node = self.graph.placeholder(f"x{len(self.values)}")
        self.values[node.name] = value
        if records:
            self.records.add(node.name)
        with self._fake:
            sides = (self._size, *shape[1:]) if records else shape
            node.meta["val"] = torch.empty(sides, dtype=value.dtype)
        return node

    def times(self, factor: int) -> fx.Node:
        """So many times the batch's size."""
        return self.batch if factor == 1 else self.call(operator.mul, self.batch, factor)

    def sizes(self, count: int, most: int = 4) -> list[int]:
        """Lengths of dimensions without the batch."""
        return [self.rng.randint(1, most) for _ in range(count)]

    def x(self, count: int | None = None, kind: str = "x") -> fx.Node:
        """Records in `count` dimensions, one of which has the batch."""
        n = self.rng.randint(1, 4) if count is None else count
        return self.like(self.sizes(n), self.rng.randrange(n), kind)

    def front(self, *sizes: int) -> fx.Node:
        """Records [B, ...], now and then with the batch elsewhere."""
        sides = [self.rng.choice((2, 3)), *sizes]
        return self.like(sides, 0 if self.likely() else self.rng.randrange(len(sides)))

    def like(self, sizes: list[int], dim: int, kind: str = "x", plain: float = 0.4) -> fx.Node:
        """Records of these sizes with the batch in dimension `dim`, by itself if `plain`."""
        before, after = sizes[:dim], sizes[dim + 1 :]
        several = self.rng.random() > plain
        outer, inner = (self.rng.choice((1, 2)) if several else 1 for _ in range(2))
        source = self.placeholder((BATCH, *before, outer, inner, *after), kind)
        n = len(before)
        order = [*range(1, n + 2), 0, *range(n + 2, n + 3 + len(after))]
        node = self.graph.call_function(aten.permute.default, (source, order))
        shape = [*before, self.times(outer * inner), *after]
        merged = self.graph.call_function(aten.reshape.default, (node, shape))
        # Made as they are known to be: to infer their forms takes longer than all the rest.
        with self._fake:
            parts = [*before, outer, self._size, inner, *after]
            node.meta["val"] = torch.empty(parts, dtype=source.meta["val"].dtype)
            parts[n : n + 3] = [outer * inner * self._size]
            merged.meta["val"] = torch.empty(parts, dtype=source.meta["val"].dtype)
        return merged

    def constant(self, *shape: int, kind: str = "x") -> fx.Node:
        """A tensor that no record enters."""
        return self.placeholder(shape, kind, records=False)

    def partner(self, x: fx.Node, kind: str = "x") -> fx.Node:
        """To broadcast against x: x itself, other records of its form or nearly, a constant."""
        shape, way = x.meta["val"].shape, self.rng.random()
        if way < 0.15 and kind == "x":
            return x
        dim = next((i for i, size in enumerate(shape) if factor(size)[1]), 0)
        times = factor(shape[dim])[0] if len(shape) else 1
        sides = [factor(size)[0] for size in shape]
        if way < 0.5:
            place = dim if self.likely() or not dim else dim - 1
            cut = self.rng.randint(0, place) if self.rng.random() < 0.3 else 0
            source = self.like(sides[cut:], place - cut, kind, plain=1)
            return source if times == 1 else self.call(aten.cat.default, [source] * times, place)
        if way < 0.65 and not self.fixed:
            # The same places as x has, by the same views.
            same = self.call(aten.zeros_like.default, x, dtype=torch.int64)
            made = self.call(aten.add.Tensor, x, same) if kind == "x" else same
            return self.call(aten.gt.Scalar, x, 0.5) if kind == "q" else made
        sides = [s if d != dim and self.likely() else 1 for d, s in enumerate(sides)]
        return self.constant(*sides[self.rng.randint(0, len(sides)) :], kind=kind)

    def dim(self, x: fx.Node, new: int = 0) -> int:
        """A dimension of x, from the front or the end."""
        n = x.meta["val"].dim() + new
        return self.rng.randrange(-n, n)

    def dims(self, x: fx.Node) -> list[int]:
        """Some dimensions of x."""
        n = x.meta["val"].dim()
        found = self.rng.sample(range(n), self.rng.randint(1, max(1, n - 1)))
        return [d - n * self.rng.randint(0, 1) for d in found]

    def likely(self) -> bool:
        """True in three cases of four."""
        return self.rng.random() < 0.75

    def shape(self, x: fx.Node) -> list[int | fx.Node]:
        """Another shape of the same numbers: neighbours joined, then cut where they may be."""
        flat = [list(factor(size)) for size in x.meta["val"].shape]
        while len(flat) > 1 and self.rng.random() < 0.6:
            i = self.rng.randrange(len(flat) - 1)
            (a, p), (b, q) = flat[i], flat.pop(i + 1)
            flat[i] = [a * b, p + q]
        for i in reversed(range(len(flat))):
            if self.rng.random() < 0.5:
                times, power = flat[i]
                f = self.rng.choice([f for f in range(1, times + 1) if times % f == 0])
                first = power if self.rng.random() < 0.5 else 0
                flat[i : i + 1] = [[f, first], [times // f, power - first]]
        return [self.times(f) if power else f for f, power in flat]


def factor(size: int | torch.SymInt) -> tuple[int, int]:
    """(m, 1) of a size that is m times the batch, (m, 0) of a number m."""
    expression = size.node.expr if isinstance(size, torch.SymInt) else size
    symbols = list(getattr(expression, "free_symbols", []))
    return (int(expression.coeff(symbols[0])), 1) if symbols else (int(expression), 0)


def op_of(name: str) -> Callable[..., object]:
    """The operation that the table calls by this name."""
    kind, overload = name.removeprefix("aten.").split(".")
    return getattr(getattr(aten, kind), overload)


def tried(name: str, draw: Callable[[Draw], object], seed: int) -> str:
    """Draw one use: "unusable", "refused", or "shown", when every record's result is its own.

    Raises AssertionError where a record's result follows from another, and whatever the table
    raises but Mixed.
    """
    g = Draw(seed)
    try:
        found = draw(g)
        args, kwargs = (found[:-1], found[-1]) if isinstance(found[-1], dict) else (found, {})
        node = g.call(op_of(name), *args, **kwargs)
        whole = _results(g, node, lambda records: records)
    except Exception:
        return "unusable"
    if g.fixed:
        return "unusable"
    try:
        claim = states(list(g.graph.nodes), g.records)[node]
    except Mixed:
        return "refused"
    if claim is None:
        return "unusable"
    claims = [claim] if isinstance(claim, Where) else list(claim)
    others = [j for j in range(BATCH) if j != CHANGED]
    changed, without = _results(g, node, _with_another), _results(g, node, lambda v: v[others])
    for where, all_of_them, one, fewer in zip(claims, whole, changed, without, strict=True):
        mine = _apart(all_of_them, where, BATCH)[others]
        pairs = [_apart(one, where, BATCH)[others]]
        # What draws random numbers draws others for fewer records.
        pairs += [] if _draws(node) else [_apart(fewer, where, BATCH - 1)]
        for other in pairs:
            assert mine.shape == other.shape, name
            assert torch.allclose(mine, other, rtol=1e-12, atol=1e-12, equal_nan=True), name
    if not _draws(node):
        _try_gradients(name, g, node)
    return "shown"


def _try_gradients(name: str, g: Draw, node: fx.Node) -> None:
    """A record of zeros, or of no numbers, changes no bit of what others' gradients are.

    Where it raises, as of what has no derivative, a kernel leaves the record out.
    """
    others = [j for j in range(BATCH) if j != CHANGED]
    before = _gradients(g, node, None)
    for value in (0.0, math.inf, math.nan, 1e-300):
        after = _gradients(g, node, value)
        for mine, other in zip(before, after, strict=False):
            a, b = (t[others].nan_to_num(nan=0.123) for t in (mine, other))
            assert torch.equal(a, b), f"{name}: beside {value} {(a - b).abs().max()}"


def _gradients(g: Draw, node: fx.Node, value: float | None) -> list[Tensor]:
    """Of the results' sum by the records' numbers; value: what one record is made of instead."""
    values = {name: v.clone() for name, v in g.values.items()}
    floats = [values[name] for name in sorted(g.records) if values[name].is_floating_point()]
    for one in floats:
        if value is not None:
            one[CHANGED] = value
        one.requires_grad_()
    try:
        found = evaluate_nodes(list(g.graph.nodes), values)[node]
        found = found if isinstance(found, (tuple, list)) else [found]
        sums = [one.sum() for one in found if one.requires_grad]
        if not sums or not floats:
            return []
        return list(torch.autograd.grad(sum(sums), floats, materialize_grads=True))
    except RuntimeError:
        return []


def _results(g: Draw, node: fx.Node, kept: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """The operation's results, on what is kept of the records."""
    torch.manual_seed(0)
    values = {n: kept(v) if n in g.records else v for n, v in g.values.items()}
    found = evaluate_nodes(list(g.graph.nodes), values)[node]
    return list(found) if isinstance(found, (tuple, list)) else [found]


def _with_another(value: Tensor) -> Tensor:
    value = value.clone()
    one = value[CHANGED]
    value[CHANGED] = 1 - one if one.is_floating_point() else ~one if one.dtype == torch.bool else 2
    return value


def _apart(result: Tensor, where: Where, batch: int) -> Tensor:
    """[B, ...] of a result that has the batch where it is claimed to be."""
    dim, outer, inner = where
    shape = result.shape
    wide = result if result.is_complex() else result.double()
    split = wide.reshape(*shape[:dim], outer, batch, inner, *shape[dim + 1 :])
    return split.movedim(dim + 1, 0)


def _draws(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in node.target.tags
