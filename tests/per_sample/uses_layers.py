"""How the arguments of layers and products in the table are drawn; see drawn and uses."""

from tests.per_sample.drawn import Draw, aten
from tests.per_sample.uses import Use, add
from torch import fx


def _product(left: tuple[int, ...], right: tuple[int, ...]) -> Use:
    """Matrices or vectors, or stacks of them, with the batch in any dimension of one or both."""

    def draw(g: Draw) -> tuple[fx.Node, ...]:
        k, rows, columns, lead = 2, 3, 4, g.sizes(2, 3)
        counts = g.rng.choice(left), g.rng.choice(right)
        both = (*lead, rows, k)[-counts[0] :], (*lead, k, columns)[-counts[1] :]
        sides = [list(both[0]), list(both[1]) if counts[1] > 1 else [k]]
        way = g.rng.randrange(4)
        if way == 0:
            # The same dimension, counted from the end.
            dim = g.rng.randint(1, max(counts))
            dims = [n - dim if dim <= n else None for n in counts]
        elif way == 1:
            dims = [g.rng.randrange(n) for n in counts]
        else:
            dims = [g.rng.randrange(n) if i == way - 2 else None for i, n in enumerate(counts)]
        return tuple(
            g.constant(*side) if dim is None else g.like(side, dim, plain=0.8)
            for side, dim in zip(sides, dims, strict=True)
        )

    return draw


def _einsum(g: Draw) -> tuple[str, list[fx.Node]]:
    lengths = {"b": 2, "i": 2, "j": 3}
    used = ["".join(g.rng.sample("bij", g.rng.randint(1, 3))) for _ in range(g.rng.randint(1, 2))]
    tensors: list[fx.Node] = []
    for names in used:
        sides = [lengths[name] for name in names]
        at = names.find("b") if g.likely() else g.rng.randrange(len(names))
        tensors.append(g.like(sides, at, plain=1) if at >= 0 else g.constant(*sides))
    every = sorted(set("".join(used)))
    result = "".join(g.rng.sample(every, g.rng.randint(1, len(every))))
    return ",".join(used) + "->" + result, tensors


def _sampled(g: Draw) -> tuple[object, ...]:
    dims = (0, 0) if g.likely() else (g.rng.randrange(4), g.rng.randrange(4))
    plain = g.rng.choice((0, 1))
    x, grid = (
        g.like([2, *s], d, plain=plain) for s, d in zip(((2, 3, 3), (2, 2, 2)), dims, strict=True)
    )
    return x, grid, 0, 0, False


def _attention(g: Draw) -> tuple[object, ...]:
    heads, dim = g.sizes(g.rng.randint(1, 2), 2), 0

    def made(length: int, width: int) -> fx.Node:
        place = dim if g.rng.random() < 0.9 else len(heads)
        return g.like([*heads, length, width], place, plain=1)

    mask = None if g.likely() else made(2, 3) if g.likely() else g.constant(2, 3)
    return made(2, 4), made(3, 4), made(3, 4), mask, 0.0


def _convolution(n: int, transposed: bool) -> Use:
    def draw(g: Draw) -> tuple[object, ...]:
        k, groups = g.rng.choice([1, 2]), g.rng.choice([1, 2])
        x = g.front(2, *[4] * n)
        w = g.constant(*((2, 4 // groups) if transposed else (4, 2 // groups)), *[k] * n)
        bias, ones = g.constant(4) if g.likely() else None, [1] * n
        if transposed:
            return x, w, bias, ones, [0] * n, [0] * n, groups, ones
        return x, w, bias, ones, ones, ones, groups

    return draw


def _pooled(n: int, *more: object) -> Use:
    def draw(g: Draw) -> tuple[object, ...]:
        lead = g.sizes(g.rng.choice([1, 2]))
        return g.like([*lead, *[4] * n], g.rng.randrange(len(lead) + (not g.likely()))), *more

    return draw


def _shuffled(sizes: list[int]) -> Use:
    def draw(g: Draw) -> tuple[object, ...]:
        lead = g.sizes(g.rng.choice([1, 2]))
        return g.like([*lead, *sizes], g.rng.randrange(len(lead) + 1)), 2

    return draw


def _classes(extra: int) -> Use:
    def draw(g: Draw) -> tuple[object, ...]:
        sides = [2] * extra
        dim = 0 if g.likely() else g.rng.randrange(extra + 1)
        logits = g.like([2, 3, *sides], dim + (dim > 0), plain=0.7)
        place = dim if g.likely() else g.rng.randrange(extra + 1)
        y = g.like([2, *sides], place, "i", plain=1)
        return logits, y, None, 0 if g.likely() else 1, -100

    return draw


def _recurrent(kind: str, gates: int) -> Use:
    def draw(g: Draw) -> tuple[object, ...]:
        first, right = g.likely(), g.likely()
        x = g.like([2, 2, 3], int(first != right), plain=0.8)

        def state() -> fx.Node:
            if not right:
                return g.constant(1, 2, 4)
            drawn = g.like([1, 2, 4], 1, plain=0.8)
            return drawn if g.likely() else g.call(aten.zeros_like.default, drawn)

        hidden = [state(), state()] if kind == "lstm" else state()
        shapes = ((4 * gates, 3), (4 * gates, 4), (4 * gates,), (4 * gates,))
        return x, hidden, [g.constant(*s) for s in shapes], True, 1, 0.0, False, False, first

    return draw


def _distances(g: Draw) -> tuple[object, ...]:
    """Two clouds of points, with the batch in front of both, in one alone, or among points."""
    dim = 0 if g.likely() else 1
    x, y = g.like([2, 3, 2], dim, plain=0.7), g.like([2, 4, 2], dim, plain=0.7)
    alone = g.rng.randrange(4)
    return (x if alone else g.constant(3, 2)), (y if alone != 1 else g.constant(4, 2)), 2.0, None


add("cdist", _distances)
add(
    "stft",
    lambda g: (g.like([2, 8], int(not g.likely())), 4, 2, 4, g.constant(4), False, True, True),
)
add("matmul linalg_matmul", _product((1, 2, 3, 4), (1, 2, 3, 4)))
add("mm", _product((2,), (2,)))
add("bmm", _product((3,), (3,)))
add("mv", _product((2,), (1,)))
add("einsum", _einsum)
add("grid_sampler", _sampled)
add("scaled_dot_product_attention", _attention)
for _n in (1, 2, 3):
    add(f"conv{_n}d", _convolution(_n, transposed=False))
    add(f"conv_transpose{_n}d{'.input' if _n > 1 else ''}", _convolution(_n, transposed=True))
    add(f"max_pool{_n}d max_pool{_n}d_with_indices avg_pool{_n}d", _pooled(_n, [2] * _n))
    add(f"adaptive_avg_pool{_n}d adaptive_max_pool{_n}d", _pooled(_n, [2] * _n))
    if _n < 3:
        add(f"reflection_pad{_n}d replication_pad{_n}d", _pooled(_n, [1, 1] * _n))
add("pixel_shuffle", _shuffled([4, 2, 2]))
add("pixel_unshuffle", _shuffled([4, 4]))
add("channel_shuffle", lambda g: (g.front(4, 3), 2))
add("col2im", lambda g: (g.front(8, 9), [4, 4], [2, 2], [1, 1], [0, 0], [1, 1]))
add("im2col", lambda g: (g.front(2, 4, 4), [2, 2], [1, 1], [0, 0], [1, 1]))
add("upsample_nearest1d.vec", lambda g: (g.front(2, 3), None, [2.0]))
add("upsample_nearest2d.vec", lambda g: (g.front(2, 3, 3), None, [2.0, 2.0]))
add("upsample_linear1d.vec", lambda g: (g.front(2, 3), [6], True, None))
add(
    "upsample_bilinear2d.vec upsample_bicubic2d.vec",
    lambda g: (g.front(2, 3, 3), [6, 6], False, None),
)
add("upsample_nearest3d.vec", lambda g: (g.front(2, 2, 2, 2), None, [2.0] * 3))
add("upsample_trilinear3d.vec", lambda g: (g.front(2, 2, 2, 2), [4, 4, 4], False, None))
add("group_norm", lambda g: (g.front(4, 3), 2, g.constant(4), None, 1e-5))
add(
    "batch_norm",
    lambda g: (
        *(g.front(4, 3), None, None, g.constant(4), g.constant(4)),
        *(not g.likely(), 0.1, 1e-5, False),
    ),
)
add(
    "instance_norm", lambda g: (g.front(2, 3), None, None, None, None, g.likely(), 0.1, 1e-5, False)
)
add("cross_entropy_loss nll_loss_nd", _classes(1))
add("nll_loss", _classes(0))
add("nll_loss2d", _classes(2))
for _kind, _gates in (("lstm", 4), ("gru", 3), ("rnn_tanh", 1), ("rnn_relu", 1)):
    add(f"{_kind}.input", _recurrent(_kind, _gates))
