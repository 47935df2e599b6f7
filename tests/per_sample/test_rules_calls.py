"""Each rule against ordinary autograd, record by record in float64, without a model around it.

An operation is called as a graph calls it, with one parameter or several among its arguments, and
what its rule says of them is compared with the gradient of each record's own call.
"""

import itertools

import pytest
import torch

from fedpact.per_sample.convolution import Convolved, Geometry, layout_of
from fedpact.per_sample.gradients import Outer, difference
from fedpact.per_sample.rules import Call, replay, shares_of
from fedpact.per_sample.tracing.batch_rules import Where

aten = torch.ops.aten
B = 11


def randn(*shape):
    return torch.randn(shape, dtype=torch.float64)


def at(args, place):
    return args[place] if isinstance(place, int) else args[place[0]][place[1]]


def put(args, values):
    args = [list(a) if isinstance(a, list) else a for a in args]
    for place, value in values.items():
        if isinstance(place, int):
            args[place] = value
        else:
            args[place[0]][place[1]] = value
    return args


def called(op, args, wanted, records, out=0, g=None, **kwargs):
    """The shares of a call, and the gradients [B, ...] of what is wanted by autograd.

    records: the dimension of each argument that has the records. out: that of the result.
    """
    y = op(*args, **kwargs)
    g = torch.randn_like(y) if g is None else g
    places = {place: Where(dim) for place, dim in records.items()}
    call = Call(op, args, kwargs, places, [Where(out)], wanted, B, [g])
    expected = {place: [] for place in wanted}
    for j in range(B):
        weights = {place: at(args, place).clone().requires_grad_() for place in wanted}
        inputs = {place: at(args, place).narrow(dim, j, 1) for place, dim in records.items()}
        one = op(*put(args, {**inputs, **weights}), **kwargs)
        found = torch.autograd.grad(one, [*weights.values()], g.narrow(out, j, 1))
        for place, gradient in zip(weights, found, strict=True):
            expected[place].append(gradient)
    return call, {place: torch.stack(rows) for place, rows in expected.items()}


def rows_of(share):
    return share.rows(slice(0, B))


def check(call, expected, shares=None):
    shares = shares_of(call) if shares is None else shares
    assert shares.keys() == expected.keys()
    for place, rows in expected.items():
        share = shares[place]
        found = rows_of(share).reshape(rows.shape)
        assert (found - rows).abs().max() <= 1e-9 * rows.abs().max()
        quick = share.quick_rows(slice(0, B))
        assert torch.equal(share.arrange(quick).reshape(B, -1), rows_of(share).reshape(B, -1))
        alone = share.rows(slice(1, 2)).reshape(1, -1)
        assert (alone - rows[1:2].reshape(1, -1)).abs().max() <= 1e-9 * rows.abs().max()
        if (part := share.special()) is not None:
            squares = rows.reshape(len(rows), -1).square().sum(1)
            assert torch.allclose(part.squares, squares, rtol=1e-9)
            total, c = torch.zeros_like(rows[0]), randn(B).abs()
            part.add(c, None, total)
            whole = (c @ rows.reshape(len(rows), -1)).view(total.shape)
            assert (total - whole).abs().max() <= 1e-9 * whole.abs().max()
        none = sum(rows_of(one) for one in share.minus(share))
        assert none.abs().max() <= 1e-9 * rows.abs().max()


def by_rule(call):
    """Whether the operation has a rule that does not replay it."""
    from fedpact.per_sample import rules

    replays = []
    before, rules.replay = rules.replay, lambda call: replays.append(call) or before(call)
    try:
        shares_of(call)
    finally:
        rules.replay = before
    return not replays


def both(*case, **kwargs):
    call, expected = called(*case, **kwargs)
    assert by_rule(call)
    check(call, expected)
    check(call, expected, replay(call))


SETTINGS = [
    # stride, padding, dilation, groups, multiplier
    (1, 1, 1, 1, 1),
    (2, 1, 2, 2, 1),
    (3, 2, 1, 4, 3),
    (1, 0, 2, 8, 2),
]
OPS = {1: aten.conv1d.default, 2: aten.conv2d.default, 3: aten.conv3d.default}
TRANSPOSED = {
    1: aten.conv_transpose1d.default,
    2: aten.conv_transpose2d.input,
    3: aten.conv_transpose3d.input,
}


@pytest.mark.parametrize("dimensions", [1, 2, 3])
@pytest.mark.parametrize("case", SETTINGS)
@pytest.mark.parametrize("channels", [8, 16])
def test_convolutions_of_every_setting(dimensions, case, channels):
    stride, padding, dilation, groups, multiplier = case
    size, kernel = (7, 6, 8)[:dimensions], (3, 2, 1)[:dimensions]
    weight = randn(groups * multiplier, channels // groups, *kernel)
    x, bias = randn(B, channels, *size), randn(len(weight))
    lists = [[v] * dimensions for v in (stride, padding, dilation)]
    both(OPS[dimensions], [x, weight, bias, *lists, groups], [1, 2], {0: 0})


@pytest.mark.parametrize("layout", ["pixel", "channel", "torch"])
@pytest.mark.parametrize("case", SETTINGS)
def test_every_layout_makes_the_same_gradients(layout, case):
    stride, padding, dilation, groups, multiplier = case
    weight, x = randn(groups * multiplier, 8 // groups, 3, 2), randn(B, 8, 7, 6)
    settings = [stride, padding, dilation, groups]
    for form in (torch.contiguous_format, torch.channels_last):
        args = [x.to(memory_format=form), weight, None, *([v, v] for v in settings[:3]), groups]
        call, expected = called(aten.conv2d.default, args, [1], {0: 0})
        geometry = Geometry.by((3, 2), settings)
        g = call.grads[0].to(memory_format=form)
        check(call, expected, {1: Convolved(geometry, weight, args[0], g, layout)})


def test_a_card_never_takes_torchs_own_routine():
    weights = [torch.empty(8, c, 3, 3) for c in (1, 3, 8, 64)]
    pairs = itertools.product(weights, (1, 16, 4096), (1, 4))
    assert "torch" not in {layout_of(groups, w, t, cpu=False) for w, t, groups in pairs}


@pytest.mark.parametrize("dimensions", [1, 2, 3])
@pytest.mark.parametrize("case", SETTINGS)
@pytest.mark.parametrize("more", [0, 1])
def test_transposed_convolutions_of_every_setting(dimensions, case, more):
    stride, padding, dilation, groups, multiplier = case
    if more >= max(stride, dilation):
        return
    size, kernel = (5, 4, 6)[:dimensions], (3, 2, 2)[:dimensions]
    weight = randn(8, multiplier, *kernel)
    x, bias = randn(B, 8, *size), randn(groups * multiplier)
    args = [x, weight, bias, *([v] * dimensions for v in (stride, padding, more)), groups]
    call, expected = called(
        TRANSPOSED[dimensions], [*args, [dilation] * dimensions], [1, 2], {0: 0}
    )
    assert by_rule(call) or more >= stride
    check(call, expected)


def test_few_positions_of_a_wide_convolution_make_no_rows():
    x, weight = torch.randn(B, 64, 2, 2), torch.randn(64, 64, 3, 3)
    g = torch.randn(B, 64, 2, 2)
    share = Convolved(Geometry.by((3, 3), [1, 1, 1, 1]), weight, x, g)
    part, rows = share.special(), share.rows(slice(0, B)).double()
    assert torch.allclose(part.squares, rows.square().sum(1), rtol=1e-5)
    total, c = torch.zeros_like(weight), torch.rand(B)
    part.add(c, None, total)
    whole = (c.double() @ rows).view(total.shape)
    assert (total - whole).norm() <= 1e-5 * whole.norm()


PRODUCTS = [
    (aten.mm.default, (B, 4), (4, 5), 0),
    (aten.mm.default, (4, 5), (5, B), 1),
    (aten.matmul.default, (B, 6, 4), (4, 5), 0),
    (aten.matmul.default, (6, B, 4), (4, 5), 0),
    (aten.matmul.default, (B, 6, 4), (4,), 0),
    (aten.matmul.default, (B, 4), (4,), 0),
    (aten.matmul.default, (5, 4), (B, 4, 6), 1),
    (aten.matmul.default, (4,), (B, 4, 6), 1),
    (aten.matmul.default, (B, 2, 6, 4), (2, 4, 5), 0),
    (aten.matmul.default, (B, 2, 6, 4), (1, 4, 5), 0),
    (aten.matmul.default, (B, 1, 6, 4), (2, 4, 5), 0),
    (aten.matmul.default, (2, 3, 4), (B, 2, 4, 6), 1),
    (aten.matmul.default, (1, 3, 4), (B, 2, 4, 6), 1),
    (aten.matmul.default, (2, 3, 4), (B, 1, 4, 6), 1),
    (aten.bmm.default, (2, B, 4), (2, 4, 5), 0),
    (aten.bmm.default, (2, 3, 4), (2, 4, B), 1),
    (aten.mv.default, (B, 4), (4,), 0),
    (aten.matmul.default, (B, 1, 4), (4, 1), 0),
]


@pytest.mark.parametrize("case", PRODUCTS)
def test_products_of_every_rank(case):
    op, left, right, records = case
    args = [randn(*left), randn(*right)]
    dim = args[records].shape.index(B)
    out = op(*args).shape.index(B)
    both(op, args, [1 - records], {records: dim}, out=out)


EQUATIONS = [
    ("bi,oi->bo", [(B, 4), (5, 4)], [1]),
    ("bi,io->bo", [(B, 4), (4, 5)], [1]),
    ("bthd,hde->bte", [(B, 6, 2, 4), (2, 4, 5)], [1]),
    ("btd,hde->bhte", [(B, 6, 4), (2, 4, 5)], [1]),
    ("bthd,hed->bthe", [(B, 6, 2, 4), (2, 5, 4)], [1]),
    ("bti,ohi->btho", [(B, 6, 4), (5, 2, 4)], [1]),
    ("bti,t->bi", [(B, 6, 4), (6,)], [1]),
    ("bi,i->bi", [(B, 4), (4,)], [1]),
    ("bij,k->bijk", [(B, 2, 4), (5,)], [1]),
    ("bti,ir,ro->bto", [(B, 6, 4), (4, 2), (2, 5)], [1, 2]),
    ("bi,oij,bj->bo", [(B, 4), (5, 4, 6), (B, 6)], [1]),
    ("bti,io->bo", [(B, 6, 4), (4, 5)], [1]),
]


@pytest.mark.parametrize("case", EQUATIONS)
def test_sums_of_products_by_letters(case):
    equation, shapes, wanted = case
    operands = [randn(*shape) for shape in shapes]
    records = {(1, i): 0 for i, shape in enumerate(shapes) if i not in wanted}
    both(aten.einsum.default, [equation, operands], [(1, i) for i in wanted], records)


@pytest.mark.parametrize("op", [aten.add, aten.sub, aten.mul, aten.div])
@pytest.mark.parametrize("shape", [(), (5,), (1,), (4, 1), (1, 4, 5), (1, 1, 1)])
@pytest.mark.parametrize("first", [True, False])
def test_pointwise_operations_with_a_parameter(op, shape, first):
    args = [randn(*shape) + 3, randn(B, 4, 5) + 3]
    both(op.Tensor, args if first else args[::-1], [0 if first else 1], {int(first): 0})


def test_a_parameter_by_a_condition():
    for shape in ((), (5,), (4, 1)):
        condition = randn(B, 4, 5) > 0
        both(aten.where.self, [condition, randn(*shape), randn(B, 4, 5)], [1], {0: 0, 2: 0})
        both(aten.where.self, [condition, randn(B, 4, 5), randn(*shape)], [2], {0: 0, 1: 0})


def test_rows_of_a_table_by_index():
    index = torch.randint(-4, 4, (B, 3))
    both(aten.index.Tensor, [randn(4, 5), [index]], [0], {(1, 0): 0})
    both(aten.index.Tensor, [randn(4, 2, 5), [index]], [0], {(1, 0): 0})
    both(aten.embedding.default, [randn(4, 5), index % 4], [0], {1: 0})
    both(aten.embedding.default, [randn(4, 5), index % 4, 2], [0], {1: 0})


def test_a_parameter_for_each_record():
    args, g = [randn(1, 4, 1), [B, 4, 5]], randn(B, 4, 5)
    for op in (aten.broadcast_to.default, aten.expand.default):
        call = Call(op, args, {}, {}, [Where(0)], [0], B, [g])
        assert (rows_of(shares_of(call)[0]) - g.sum(2)).abs().max() <= 1e-12


@pytest.mark.parametrize("shape", [(3, 1, 2), (1, 2), (3, 4, 2)])
def test_a_parameter_that_is_repeated(shape):
    """Of a record's block, each entry as often as it stands there."""
    p, times, where = randn(*shape), [2 * B, 3, 1], Where(0, 1, 2 * (shape[0] if shape[2:] else 1))
    g = torch.randn_like(aten.repeat.default(p, times))
    call = Call(aten.repeat.default, [p, times], {}, {}, [where], [0], B, [g])
    expected = []
    for block in g.chunk(B):
        one = p.clone().requires_grad_()
        expected += torch.autograd.grad(one.repeat(2, 3, 1), one, block)
    check(call, {0: torch.stack(expected)})


FILMS = itertools.product((1, 2, 3), (False, True), SETTINGS)
PLACES = itertools.cycle([Where(0, 1, 3), Where(0, 3, 1), Where(0, 2, 2), Where(0, 2, 1)])


@pytest.mark.parametrize(
    ("dimensions", "transposed", "case", "where"), [(*film, next(PLACES)) for film in FILMS]
)
def test_convolutions_of_several_images_a_record(dimensions, transposed, case, where):
    stride, padding, dilation, groups, multiplier = case
    op = (TRANSPOSED if transposed else OPS)[dimensions]
    outputs, inputs = (8, multiplier) if transposed else (groups * multiplier, 8 // groups)
    weight = randn(outputs, inputs, *(3, 2, 1)[:dimensions])
    bias = randn(groups * multiplier)
    images = where.outer * B * where.inner
    x = randn(images, 8, *(7, 6, 8)[:dimensions])
    lists = [[v] * dimensions for v in (stride, padding, dilation)]
    more = [*lists[:2], [0] * dimensions, groups, lists[2]] if transposed else [*lists, groups]
    y = op(x, weight, bias, *more)
    g = torch.randn_like(y)
    call = Call(op, [x, weight, bias, *more], {}, {0: where}, [where], [1, 2], B, [g])
    parts = where.outer, B, where.inner
    images_of = [t.unflatten(0, parts).transpose(0, 1).flatten(1, 2) for t in (x, g)]
    rows = []
    for one, back in zip(*images_of, strict=True):
        given = [v.clone().requires_grad_() for v in (weight, bias)]
        rows.append(torch.autograd.grad(op(one, *given, *more), given, back))
    check(call, dict(zip([1, 2], map(torch.stack, zip(*rows, strict=True)), strict=True)))


def test_differences_of_products_are_exact():
    weight = randn(2, 4, 5)
    points = [[randn(B, 2, 6, 4), weight], [randn(B, 2, 6, 4), weight]]
    calls = [called(aten.matmul.default, args, [1], {0: 0}) for args in points]
    (one,), (other,) = (shares_of(call).values() for call, _ in calls)
    found = sum(rows_of(share) for share in difference([one], [other]))
    expected = calls[0][1][1] - calls[1][1][1]
    assert (found.view(expected.shape) - expected).abs().max() <= 1e-9
    assert isinstance(one, Outer) is False
