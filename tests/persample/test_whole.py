"""A record's whole gradient has the same bits at every place and beside any number of others.

What test_alike finds by norms and at kinks, here number by number, for layers of sizes that fit no
register: of each form some are drawn, with seeds that are fixed.
"""

import math
import random
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from tests.persample.attacked import allowed
from tests.persample.test_alike import Wrapped, bits
from torch import nn

from fedpact.errors import ModelError
from fedpact.losses import cross_entropy
from fedpact.params import FlatModel
from fedpact.persample import columns, dense
from fedpact.persample.kernel import PerSampleKernel, _fixed


class Of(nn.Module):
    """layer(x), or function(w, x), with a curve and a linear layer behind it."""

    def __init__(self, shape, layer=None, function=None, w=()):
        super().__init__()
        self.layer, self.w, self.function = layer, nn.Parameter(torch.randn(w)), function
        self.head = nn.Linear(self.before(torch.zeros(2, *shape)).flatten(1).shape[1], 3)

    def before(self, x):
        return self.layer(x) if self.function is None else self.function(self.w, x)

    def forward(self, x):
        return self.head(self.before(x).tanh().flatten(1))


def convolution(rng, dims, transposed=False):
    """A convolution whose sizes are drawn, and the shape of its records."""
    while True:
        groups = rng.choice([1, 1, 1, 2, 3])
        given, out = (groups * rng.choice([1, 2, 3, 4, 5]) for _ in range(2))
        kind = getattr(nn, f"Conv{'Transpose' if transposed else ''}{dims}d")
        kernel = tuple(rng.choice([1, 1, 2, 3, 4]) for _ in range(dims))
        how = {"stride": rng.choice([1, 1, 2, 3]), "dilation": rng.choice([1, 1, 2])}
        how["padding"] = rng.choice([0, 0, 1])
        shape = given, *(rng.randint(3, 11 if dims < 3 else 7) for _ in range(dims))
        try:
            layer = kind(given, out, kernel, groups=groups, **how)
            found = layer(torch.zeros(1, *shape))
        except RuntimeError:
            continue
        if 0 < found.numel() < 2000:
            return Of(shape, layer), shape


def bilinear(rng):
    a, b, out, steps = (rng.randint(2, 11) for _ in range(4))
    layer = nn.Bilinear(a, b, out)
    shape = steps, a + b
    return Of(shape, function=lambda w, x: layer(x[..., :a], x[..., a:])), shape


class Part(nn.Module):
    """A layer of a part of each record, whose rows lie as far apart as whole records do."""

    def __init__(self, layer, of):
        super().__init__()
        self.layer, self.of = layer, of

    def forward(self, x):
        return self.layer(self.of(x))


def part(rng):
    """A dense layer of a slice, whose width fits a register while its records' does not."""
    width, more, out = rng.choice([4, 8, 12]), rng.choice([1, 2, 3]), rng.choice([3, 4, 8])
    first, shape = rng.choice([0, 1, more]), (rng.choice([1, 3, 5]), width + more)
    ways = [
        lambda x: x[..., first : first + width],
        lambda x: x[:, 0, first : first + width],
        lambda x: x.cumsum(-1)[:, -1, first : first + width],
        lambda x: x.flatten(1)[:, :width],
    ]
    return Of(shape, Part(nn.Linear(width, out), rng.choice(ways))), shape


def parts_multiplied(rng):
    """A product of two slices of a record, as attention by hand has it."""
    width, steps = rng.choice([4, 8]), rng.choice([3, 4, 5])
    shape = steps, width + rng.choice([1, 2, 3])
    layer = nn.Linear(width, width)
    return Of(shape, function=lambda w, x: layer(x[..., :width]) @ x[..., :width].mT), shape


def chain(rng):
    """Known layers one after the other, of widths that fit no register."""
    first, hidden, last = rng.choice([30, 33]), rng.choice([7, 9, 15]), rng.choice([8, 12, 16])
    layers = nn.Linear(first, hidden), nn.ReLU(), nn.Linear(hidden, last)
    return nn.Sequential(*layers, nn.Linear(last, 3)), (first,)


def chain_of_images(rng):
    channels, side = rng.randint(1, 5), rng.randint(6, 9)
    shape, outputs = (channels, side, side), rng.choice([1, 2, 3, 5])
    first = nn.Conv2d(channels, outputs, rng.choice([1, 2, 3]), padding=1)
    size = first(torch.zeros(1, *shape)).shape[-1] // 2
    last = nn.Linear(outputs * size**2, 3)
    return nn.Sequential(first, nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(), last), shape


def by_lapack(rng, function):
    shape = rng.randint(3, 6), rng.randint(7, 9)

    def of(w, x):
        # No table has it, so that records are taken one by one.
        square = (x * w) @ (x * w).mT + torch.eye(shape[0])
        return function(square)

    return Of(shape, function=of, w=shape[1:]), shape


def known(rng, layer, shape):
    return Of(shape, layer()), shape


# Before, these had other bits at other places, and what is drawn besides in some cases.
FORMS = {
    "few channels": partial(known, layer=lambda: nn.Conv2d(1, 8, 3), shape=(1, 13, 16)),
    "few channels, odd": partial(known, layer=lambda: nn.Conv2d(3, 4, (2, 5)), shape=(3, 8, 13)),
    "odd outputs": partial(known, layer=lambda: nn.Conv2d(3, 5, 3), shape=(3, 9, 9)),
    "groups": partial(known, layer=lambda: nn.Conv2d(3, 3, 3, groups=3), shape=(3, 9, 9)),
    "one output": partial(known, layer=lambda: nn.Conv2d(8, 1, 1), shape=(8, 3, 3)),
    "a volume": partial(known, layer=lambda: nn.Conv3d(1, 1, 3), shape=(1, 5, 5, 5)),
    "transposed, odd": partial(known, layer=lambda: nn.ConvTranspose1d(9, 1, 3, 2), shape=(9, 11)),
    "volumes": partial(known, layer=lambda: nn.Conv3d(3, 3, (3, 1, 1)), shape=(3, 7, 6, 3)),
    "steps": partial(known, layer=lambda: nn.ConvTranspose1d(3, 5, 1), shape=(3, 9)),
    "convolution over steps": partial(convolution, dims=1),
    "convolution": partial(convolution, dims=2),
    "convolution of volumes": partial(convolution, dims=3),
    "transposed over steps": partial(convolution, dims=1, transposed=True),
    "transposed": partial(convolution, dims=2, transposed=True),
    "transposed of volumes": partial(convolution, dims=3, transposed=True),
    "chain": partial(chain),
    "chain of images": partial(chain_of_images),
    "bilinear": partial(bilinear),
    "part": partial(part),
    "parts multiplied": partial(parts_multiplied),
    "eigenvalues": partial(by_lapack, function=torch.linalg.eigvalsh),
    "singular values": partial(by_lapack, function=torch.linalg.svdvals),
    "pseudo-inverse": partial(by_lapack, function=torch.linalg.pinv),
    "determinant": partial(by_lapack, function=lambda a: torch.linalg.det(a)[:, None]),
    "qr": partial(by_lapack, function=lambda a: torch.linalg.qr(a)[1]),
}


def gradient(kernel, x, y, j):
    """Of the record j among x, y, by the way that a sum takes."""
    w = torch.zeros(len(x))
    w[j] = 1
    return kernel._by_passes(x, y, math.inf, partial(_fixed, w))


@pytest.fixture(params=[torch.float32, torch.float64], ids=["float32", "float64"])
def dtype(request):
    """What models and records are made in."""
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", FORMS)
@bits
def test_a_whole_gradient_has_the_same_bits_at_every_place(name, dtype):
    rng = random.Random(name)
    for seed in range(6 if dtype == torch.float32 else 2):
        torch.manual_seed(seed)
        model, shape = FORMS[name](rng)
        kernel = PerSampleKernel(FlatModel(model), cross_entropy)
        x, y = torch.randn(34, *shape), torch.arange(34) % 3
        for j in (1, 2):
            alone = gradient(kernel, x[j : j + 1].clone(), y[j : j + 1], 0)
            for start, count in ((j, 2), (0, j + 1), (1, 33), (0, 34), (0, 17)):
                some = slice(start, start + count)
                found = gradient(kernel, x[some].clone(), y[some], j - start)
                assert torch.equal(found, alone), (model, shape, j, start, count)


def cancelling(channels, side, kernel, step):
    """An image of which every position's numbers add up to 0, for each place of a kernel."""
    out = (side - kernel) // step + 1
    x = torch.zeros(channels, side, side)
    for down in range(step):
        for along in range(step):
            base = torch.zeros(channels, out * out)
            for one in base:
                order, v = torch.randperm(out * out), torch.randn(out * out // 2)
                one[order[: len(v)]], one[order[len(v) : 2 * len(v)]] = v, -v
            part = x[:, down::step, along::step]
            tiled = base.view(channels, out, out).repeat(1, 2, 2)
            part.copy_(tiled[:, : part.shape[1], : part.shape[2]])
    return x


@pytest.mark.parametrize("wrapped", [False, True], ids=["chain", "graph"])
@pytest.mark.parametrize("shape", [(1, 8, 3, 2, 28), (3, 16, 3, 2, 32), (3, 5, 3, 1, 9)])
@bits
def test_an_image_in_front_moves_no_others(shape, wrapped):
    """Whose gradients are rounding alone: before, a sum moved by 17 clips, and by 43."""
    channels, maps, kernel, step, side = shape
    torch.manual_seed(0)
    out = (side - kernel) // step + 1
    first = nn.Conv2d(channels, maps, kernel, step, bias=False)
    last = nn.Linear(maps * out * out, 3)
    layers = [first, nn.Tanh(), nn.Flatten(), last]
    model = Wrapped(*layers) if wrapped else nn.Sequential(*layers)
    with torch.no_grad():
        first.weight.zero_()
        last.weight.zero_()
        last.bias.copy_(torch.tensor([0.0, 50.0, 0.0]))
        last.weight[1] = (1e12 * (torch.rand(maps) + 0.5))[:, None].expand(-1, out**2).reshape(-1)
    image, n = cancelling(channels, side, kernel, step), 64
    x, y = image.expand(n, *image.shape).contiguous(), torch.arange(n) % 2
    more = torch.zeros(1, *image.shape)
    of = PerSampleKernel(FlatModel(model), cross_entropy)
    before = of.clipped_sum(x.clone(), y, 1.0).double()
    # Half of the records do have a gradient of their own.
    assert before.norm() > 10
    change = of.clipped_sum(torch.cat([more, x]), torch.cat([y[1:2], y]), 1.0).double() - before
    assert change.norm() <= allowed(n, 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("widths", "most"), [((30, 9, 400), 1 << 13), ((30, 10, 3), 1 << 20)])
@bits
def test_one_more_of_dense_layers_takes_no_other_way(widths, most, dtype, monkeypatch):
    """Of outputs so wide that a pass holds few records, and of as many as end a product."""
    monkeypatch.setattr(dense, "MOST", most)
    torch.manual_seed(0)
    first, last = nn.Linear(*widths[:2]), nn.Linear(*widths[1:])
    kernel = PerSampleKernel(
        FlatModel(nn.Sequential(first, nn.ReLU(), last).to(dtype)), cross_entropy
    )
    x = torch.rand(widths[0], dtype=dtype)
    for n in (20, 31, 63, 64):
        rows, y = x.expand(n + 1, -1).contiguous(), torch.zeros(n + 1, dtype=torch.int64)
        with torch.no_grad():
            first.bias.zero_()
            made = columns.of_records(first.weight, rows[:n].clone())[:, 0]
            first.bias.copy_(-made)
        before = kernel.clipped_sum(rows[:n].clone(), y[:n], 1.0).double()
        change = kernel.clipped_sum(rows, y, 1.0).double() - before
        assert change.norm() <= allowed(n, 1.0)


class Inverting(nn.Module):
    """Raises at the zeros at which it is found out whether vmap takes a model."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(9, 3)

    def forward(self, x):
        return self.layer(torch.linalg.inv(x).flatten(1))


def test_what_raises_at_zeros_is_made_of_one_record_after_the_other():
    torch.manual_seed(0)
    kernel = PerSampleKernel(FlatModel(Inverting()), cross_entropy)
    x, y = torch.rand(9, 3, 3) + torch.eye(3), torch.arange(9) % 3
    kernel.verify(x, y)
    rows = kernel.alone(x, y)
    clipped = rows * (0.1 / rows.norm(dim=1, keepdim=True)).clamp(max=1)
    assert torch.allclose(kernel.clipped_sum(x, y, 0.1), clipped.sum(0), atol=1e-6)


class Drawing(nn.Module):
    """Draws where gradients are on, of large numbers alone: no record of a trial is one."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 3)

    def forward(self, x):
        if torch.is_grad_enabled():
            x = torch.where(x.abs() > 1e6, F.dropout(x * 1e-7), x)
        return self.layer(x)


def test_a_trace_that_draws_is_refused_before_a_site_trains():
    kernel = PerSampleKernel(FlatModel(Drawing()), cross_entropy)
    with pytest.raises(ModelError, match="draws random numbers"):
        kernel.verify(torch.rand(6, 2), torch.arange(6) % 3)
