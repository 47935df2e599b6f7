"""Passes of one shape: where records stand, and what one record moves where slots are not alike."""

import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from tests.per_sample.small import off_by
from tests.spread import spread
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedpact.common.losses import cross_entropy
from fedpact.common.params import FlatModel, threads
from fedpact.common.randomness.secure import SecureDraws
from fedpact.common.randomness.seeded import SeededDraws
from fedpact.per_sample import dense, layout, norms
from fedpact.per_sample.clipping import slack
from fedpact.per_sample.kernel import PerSampleKernel
from fedpact.per_sample.layout import Placement, length_for, scatter
from fedpact.per_sample.products import filled_attention, filled_linear, filled_matrices, products
from fedpact.per_sample.registers import fill_up
from fedpact.per_sample.tracing import replacements
from fedpact.plan import Plan
from fedpact.privacy.accounting.accountant import Budget
from fedpact.privacy.batches import measure_each
from fedpact.privacy.oracle import PrivateOracle, Records
from fedpact.privacy.terms import Terms
from fedpact.simulation.setup import SimulationSetup

C = 0.01


def scattered(kernel, x, y, expected, seed=0):
    length = kernel.scattered_length(x, y, expected)
    return scatter(SeededDraws(seed, "site", 0).positions(len(y), length, 0), length)


@pytest.mark.parametrize(("images", "count"), [(False, 1), (True, 7), (False, 40)])
def test_every_layout_gives_the_same_sum(reference, images, count):
    layers = [nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)]
    if images:
        layers = [nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)]
    module = nn.Sequential(*layers).double()
    x = torch.randn(count, *((1, 5, 5) if images else (5,))).double()
    y, shares = torch.arange(count) % 3, torch.linspace(0.5, 1, count).double()
    rows = reference.per_sample(module, cross_entropy, x, y)
    c = shares * torch.clamp(C / rows.norm(dim=1), max=1)
    expected = (c[:, None] * rows).sum(0)
    for way, kernel in reference.kernels(module, cross_entropy).items():
        losses = kernel.losses(x, y)
        for one in (None, Placement(length=1), Placement(3.0), scattered(kernel, x, y, count + 9)):
            found = kernel.clipped_sum(x, y, C, shares=shares, layout=one)
            assert float((found - expected).norm()) <= 1e-12 * float(expected.norm()), way
            assert torch.allclose(kernel.losses(x, y, one), losses, rtol=1e-12)


def test_contents_of_empty_slots_are_not_added(reference):
    """Zeros or ones, whose loss is ln 2 here; so weights may make of them what is no number."""
    module, x = nn.Linear(3, 2, bias=False).double(), torch.randn(5, 3).double()
    module.weight.data = torch.tensor([[1.0, -3, 2], [-1, -1, 2]]).double()
    y = torch.arange(5) % 2

    def weights(losses):
        return 0.1 / (losses - math.log(2)).abs()

    rows = reference.per_sample(module, cross_entropy, x, y)
    w = weights(cross_entropy(module(x), y).detach())
    for contents in (0 * x, 0 * x + 1):
        assert not weights(cross_entropy(module(contents), 0 * y)).isfinite().any()
    for way, kernel in reference.kernels(module, cross_entropy).items():
        for one in (Placement(length=8), scattered(kernel, x, y, 9)):
            found = kernel.clipped_sum(x, y, 0.5, weights, layout=one)
            assert reference.error(found, reference.clipped(rows, 0.5, w)) < 1e-12, way


def test_an_empty_scattered_batch_gives_zeros():
    kernel = PerSampleKernel(FlatModel(nn.Sequential(nn.Linear(3, 2))), cross_entropy)
    x, y = torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64)
    found = kernel.clipped_sum(x, y, C, layout=scattered(kernel, torch.zeros(1, 3), y[:0], 5))
    assert not found.any()


@pytest.fixture
def uneven(monkeypatch):
    """A library whose products depend on the row's parity, in the last digits."""

    def product(x, weight, bias=None):
        parity = (torch.arange(len(x)) % 2).to(x.dtype)
        return F.linear(x, weight, bias) + 1e-6 * (2 * parity - 1)[:, None]

    monkeypatch.setitem(replacements.DONE_AS, torch.ops.aten.linear.default, product)


def at_a_kink(reference, count):
    """A kernel, records all alike at a ReLU's kink whose labels alternate, and one more."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    x = torch.randn(4).expand(count, 4).contiguous()
    with torch.no_grad():
        module[0].bias.copy_(-F.linear(x[:1], module[0].weight)[0])
        module[2].bias.zero_()
    kernel = reference.forced("graph", module, cross_entropy)
    return kernel, x, torch.arange(count) % 2, torch.zeros(1, 4), torch.zeros(1, dtype=torch.int64)


def test_slots_that_differ_move_compact_sums_and_are_found(reference, uneven):
    kernel, x, y, r, label = at_a_kink(reference, 100)
    more = torch.cat([r, x]), torch.cat([label, y])
    compact = Placement(length=16)
    before = kernel.clipped_sum(x, y, C, layout=compact).double()
    moved = float((kernel.clipped_sum(*more, C, layout=compact).double() - before).norm())
    assert moved > 5 * C  # else this library harms nobody
    assert not kernel.invariant(x[:8], y[:8])
    # So who names no layout gets passes of single records.
    before = kernel.clipped_sum(x, y, C).double()
    moved = float((kernel.clipped_sum(*more, C).double() - before).norm())
    assert moved <= C * (1 + slack(101))


@pytest.mark.parametrize(("count", "length"), spread((1, 20, 100, 200), (8, 32, 128), one_in=3))
def test_scattered_sums_move_by_one_record_on_any_library(reference, uneven, count, length):
    """Whatever was expected of the batch: r has a slot, and the others keep theirs."""
    kernel, x, y, r, label = at_a_kink(reference, count)
    more = torch.cat([r, x]), torch.cat([label, y])
    for seed in range(2):
        positions = SeededDraws(seed, "site", 0).positions(count + 1, length, 0)
        without, of = scatter(positions[1:], length), scatter(positions, length)
        before = kernel.clipped_sum(x, y, C, layout=without).double()
        moved = float((kernel.clipped_sum(*more, C, layout=of).double() - before).norm())
        assert moved <= C * (1 + slack(count + 1))


def test_dummy_records_without_a_loss_show_nothing(reference, uneven):
    """A record whose second row is not marked has no gradient."""
    model = reference.Apply(
        lambda m, x: m.last(torch.where(x[:, 1, :1] > 9, x[:, 1, 1:], torch.nan)),
        last=nn.Linear(4, 2),
    )
    kernel = PerSampleKernel(FlatModel(model), cross_entropy)
    marked = torch.randn(4, 3, 5)
    marked[:, :, 0] = torch.tensor([0.0, 20.0, 0.0])
    for x in (marked, torch.randn(4, 3, 5)):
        assert kernel.way(marked, torch.zeros(4, dtype=torch.int64)) == "graph"
        assert not kernel.invariant(x, torch.zeros(4, dtype=torch.int64))


def test_norms_of_dense_models_that_differ_by_slot_are_found(monkeypatch):
    """The factors of gradients may be the same where norms, by which they are clipped, differ."""
    kernel = PerSampleKernel(FlatModel(nn.Sequential(nn.Linear(5, 3))), cross_entropy)
    x, y = torch.randn(8, 5), torch.zeros(8, dtype=torch.int64)
    assert kernel.way(x, y) == "dense"
    assert kernel.invariant(x, y)
    lengths = dense._lengths
    uneven = 1 + 1e-6 * (np.arange(1024) % 2)
    monkeypatch.setattr(dense, "_lengths", lambda x: lengths(x) * uneven[: len(x)])
    assert not kernel.invariant(x, y)


def test_no_two_records_stand_in_one_slot():
    for draws in (SeededDraws(3, "site", 1), SecureDraws()):
        for count in (0, 1, 5, 300):
            positions = draws.positions(count, 24, 0)
            placed = scatter(positions, 24)
            assert torch.equal(placed.places % 24, positions)
            assert len(set(placed.places.tolist())) == count
            most = max(positions.tolist().count(slot) for slot in range(24))
            assert placed.slots == 24 * most


def test_every_slot_is_as_likely():
    """Of 24 slots, 24,000 records: chi-squared, wrong once in 10^6 (23 degrees, 71.8)."""
    for draws in (SeededDraws(3, "site", 1), SecureDraws()):
        counts = draws.positions(24_000, 24, 0).bincount(minlength=24)
        assert float((counts - 1000).double().square().sum() / 1000) < 71.8


def test_lengths_are_those_of_the_least_cost():
    """By the sum over all sizes of a Poisson batch, for a pass that costs its slots and 5 more."""
    for expected in (3.0, 16.0, 64.0, 200.0):
        sizes = torch.arange(1, 600)
        chances = torch.tensor(stats.poisson.pmf(sizes, expected))

        def cost(length, sizes=sizes, chances=chances):
            return float((chances * torch.ceil(sizes / length)).sum()) * (length + 5)

        found = length_for(expected, 1024, 5.0)
        assert cost(found) <= 1.001 * min(cost(p) for p in layout._LENGTHS)
    assert length_for(64.0, 16, 5.0) <= 16
    assert length_for(64, 1024, 1e6, exact=True) == 64


def test_scattered_lengths_are_those_of_the_least_cost():
    """By batches drawn as they are: a wrong choice costs no more than what drawing blurs."""
    generator = torch.Generator().manual_seed(0)
    for expected in (3.0, 64.0, 200.0):
        costs = {}
        for length in (8, 16, 32, 64, 128, 256):
            shares = torch.poisson(torch.full((2000, length), expected / length), generator)
            costs[length] = float(shares.amax(1).mean()) * (length + 5)
        found = length_for(expected, 256, 5.0, scattered=True)
        near = min(costs, key=lambda length, found=found: abs(length - found))
        assert costs[near] <= 1.1 * min(costs.values())


@pytest.mark.parametrize(("kept", "lengths"), [(2**20, [16, 256]), (900, [16, 16]), (180, [5, 5])])
def test_vmap_takes_all_records_at_once_that_fit(reference, monkeypatch, kept, lengths):
    """A record has 9 weights and computes fewer than 64 numbers."""
    monkeypatch.setattr(norms, "KEEP_BYTES", kept)
    kernel = reference.forced("records", nn.Sequential(nn.Linear(2, 3), nn.ReLU()), cross_entropy)
    form = torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64)
    found = [kernel._passes.length(*form, n, exact=True) for n in (16.0, 256.0)]
    assert found == lengths


@pytest.mark.parametrize("declared", [60.0, 4.0])
@pytest.mark.parametrize("persons", [False, True])
def test_an_oracles_release_is_the_same_wherever_records_stand(persons, declared):
    """Also where a site has many more records than it declared: none is left out."""
    kernel = PerSampleKernel(FlatModel(nn.Sequential(nn.Linear(4, 3)).double()), cross_entropy)
    x, y = torch.randn(60, 4).double(), torch.arange(60) % 3
    records = Records(x, y, persons=torch.arange(60) // 2 if persons else None)
    budget = Budget(1e9, 1e-5)
    terms = Terms("s", declared, 0.5, 0.5, {"gradient": 1e-3}, 1, budget, "best")
    w, found = kernel.model.vector.clone(), []
    for placement in (None, "compact", "scattered"):
        draws = SeededDraws(5, "s", 1)
        oracle = PrivateOracle(records, kernel, terms, draws, lambda *_: None, placement=placement)
        found.append(next(oracle.batches(1, "gradient")).gradient(w))
    assert torch.allclose(found[1], found[0], rtol=0, atol=1e-12)
    assert torch.allclose(found[2], found[0], rtol=0, atol=1e-12)
    assert math.isfinite(float(found[0].norm()))


def assert_slots_are_alike(passes, width, classes, expected):
    """Of passes as long as they are for so many records x [n, width]: slots have the same bits."""
    form = torch.zeros(4, width), torch.zeros(4, dtype=torch.int64)
    length = passes.length(*form, expected, traced=True)
    assert_alike(passes, torch.randn(length, width), torch.randint(classes, (length,)))


def assert_alike(passes, x, y):
    """Records x, y have the same bits in slots of a pass, a third of them in each slot."""
    with torch.no_grad():
        base = [v.clone() for v in passes.gradients(x, y).factors()]
        for shift in range(1, len(x), 3):
            found = passes.gradients(x.roll(shift, 0), y.roll(shift, 0)).factors()
            pairs = zip(base, found, strict=True)
            assert all(torch.equal(a.roll(shift, 0), b) for a, b in pairs)


@pytest.mark.parametrize(("act", "width"), [(nn.SiLU, 37), (nn.ELU, 3), (nn.Sigmoid, 1)])
def test_no_slot_is_computed_by_other_code(reference, act, width):
    """Numbers that do not fill the last registers are computed one by one, and rounded otherwise.

    Few records show it, so a check that tries some of them may miss it.
    """
    module = nn.Sequential(
        nn.Linear(64, width), act(), nn.Linear(width, 2), nn.ReLU(), nn.Linear(2, 3)
    )
    for way, expected in (("graph", 5.0), ("graph", 30.0), ("records", 30.0)):
        passes = reference.forced(way, module, off_by)._passes
        assert_slots_are_alike(passes, 64, 3, expected)


@pytest.mark.parametrize(("way", "width"), [("graph", 1100), ("records", 1103)])
def test_no_threads_share_is_computed_by_other_code(reference, way, width):
    """Three threads share a tensor, so numbers in its middle might not fill the last registers."""
    module = nn.Sequential(nn.Linear(8, width), nn.Mish(), nn.Linear(width, 2), nn.Linear(2, 3))
    passes = reference.forced(way, module, cross_entropy)._passes
    with threads(3):
        assert_alike(passes, torch.randn(64, 8), torch.randint(3, (64,)))


@pytest.mark.parametrize("slots", [1, 80])
@pytest.mark.parametrize("number", [1, 2, 3, 12])
def test_each_threads_share_has_whole_registers(number, slots):
    """torch divides an operation evenly, in parts of about 2^15 numbers or among all threads."""
    found = []

    def noted(x):
        found.append(slots * x.numel())
        return x

    with threads(number):
        for size in (99, 1100, 70400, 96064):
            assert fill_up(noted, 0, slots, torch.zeros(size)).numel() == size
    for numbers in found:
        parts = {number, min(number, -(-numbers // 2**15))} if numbers > 2**14 else {1}
        assert not any(numbers % (64 * n) for n in parts)


def test_records_are_scattered_where_slots_leave_a_rest(reference, monkeypatch):
    """Of records alone: memory does not allow passes of 64, so other code computes some slots."""
    monkeypatch.setattr(norms, "KEEP_BYTES", 900)
    x, y = torch.randn(8, 2), torch.arange(8) % 3
    for act, alike in ((nn.LogSigmoid, False), (nn.Tanh, True), (nn.ReLU, True)):
        module = nn.Sequential(nn.Linear(2, 3), act())
        assert reference.forced("records", module, cross_entropy).invariant(x, y) is alike


class TimeFirst(nn.Module):
    """Adds up over the first dimension, where a step has but a few numbers of all records."""

    def __init__(self, steps, softmax):
        super().__init__()
        self.layer, self.head = nn.Linear(4, 2), nn.Linear(2, 3)
        self.steps, self.softmax = steps, softmax

    def forward(self, x):
        h = self.layer(x.view(len(x), self.steps, 4).transpose(0, 1)).relu()
        return self.head((h.softmax(0) * h).sum(0) if self.softmax else h.mean(0))


class Gated(nn.Module):
    """Numbers of all steps times those of a record, so that gradients are summed over the steps."""

    def __init__(self, steps):
        super().__init__()
        self.layer, self.gate, self.next = nn.Linear(4, 3), nn.Linear(4 * steps, 3), nn.Linear(3, 3)
        self.head, self.steps = nn.Linear(3 * steps, 2), steps

    def forward(self, x):
        h = self.layer(x.view(len(x), self.steps, 4).transpose(0, 1)).relu()
        return self.head(self.next(h * self.gate(x)).transpose(0, 1).flatten(1))


def binary(outputs, y):
    y = y.to(outputs.dtype)
    return F.binary_cross_entropy_with_logits(outputs[:, 0], y, reduction="none")


ODD = [
    (lambda: TimeFirst(5, softmax=False), 20, cross_entropy),
    (lambda: TimeFirst(2, softmax=True), 8, cross_entropy),
    (lambda: Gated(21), 84, cross_entropy),
    (lambda: nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)), 8, binary),
    (lambda: nn.Sequential(nn.Linear(4, 9), Spectrum(), nn.Linear(5, 2)), 4, cross_entropy),
]


class Turned(nn.Module):
    """Time first in the middle alone: a layer's gradient lies in memory as it does there."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.head = layer, nn.Linear(15, 2)

    def forward(self, x):
        h = self.layer(x.unflatten(1, (5, 3)))
        return self.head(torch.tanh(h.movedim(0, -2)).movedim(-2, 0).flatten(1))


@pytest.mark.parametrize("layer", [lambda: nn.Linear(3, 3), lambda: nn.LayerNorm(3)])
def test_no_slot_differs_where_a_gradient_lies_otherwise(layer):
    passes = PerSampleKernel(FlatModel(Turned(layer())), off_by)._passes
    for length in (24, 40):
        assert_alike(passes, torch.randn(length, 15), torch.randint(2, (length,)))


@pytest.mark.parametrize(("case", "expected"), spread(ODD, (20.0, 30.0), one_in=2))
def test_no_slot_differs_in_a_reduction_or_a_loss(case, expected):
    module, width, loss = case
    passes = PerSampleKernel(FlatModel(module()), loss)._passes
    assert_slots_are_alike(passes, width, 2, expected)
    # So that 16 records do not have to cost what 64 do, where nothing is in front of them.
    form = torch.zeros(4, width), torch.zeros(4, dtype=torch.int64)
    assert passes._trace_for(*form).multiple == 1 or isinstance(passes._modules[0][0], Gated)


class Products(TorchDispatchMode):
    """The two matrices, or the batches of matrices, of each product."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if str(func).split(".")[1] in ("mm", "addmm", "addmm_", "bmm"):
            self.seen.append(args[-2:])
        return func(*args, **(kwargs or {}))


def follows_places(a, b):
    """Where MKL without AVX-512 reads rows or matrices by other code than those before them."""
    together = b.shape[-1 if b.stride(-1) == 1 else -2]
    others = b.dim() > 2 and a.shape[-2] % 4 == 0
    return together % 4 > 0 and min(a.shape[-2], b.shape[-1]) <= 11 and not others


class ByHand(nn.Module):
    """Attention of five steps as products of matrices, and a layer as x W."""

    def __init__(self, width):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.weight = nn.Parameter(torch.randn(width, 7))
        self.head = nn.Linear(35, 2)

    def forward(self, x):
        q, k, v = (layer(x.unflatten(1, (5, -1))) for layer in self.layers)
        return self.head(((q @ k.mT).softmax(-1) @ v @ self.weight).flatten(1))


def attention(width):
    return nn.TransformerEncoderLayer(width, 1, 9, 0.0, batch_first=True)


def convolved(layer, width, *shape):
    flat = nn.Flatten()
    return nn.Sequential(nn.Unflatten(1, shape), layer, nn.Tanh(), flat, nn.Linear(width, 2))


class Steps(nn.Module):
    def __init__(self, kind, inputs, width):
        super().__init__()
        self.layer, self.head = kind(inputs, width, batch_first=True), nn.Linear(width, 2)
        self.first = nn.Linear(inputs, inputs)

    def forward(self, x):
        return self.head(self.layer(self.first(x.unflatten(1, (5, -1))))[0][:, -1])


class Multiplied(nn.Module):
    """The product of two steps, which is only differentiated record by record."""

    def __init__(self):
        super().__init__()
        self.first, self.next, self.head = nn.Linear(4, 5), nn.Linear(5, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.next(self.first(x.unflatten(1, (2, 4))).prod(1)).relu())


NARROW = [
    (Multiplied, 8),
    (
        lambda: nn.Sequential(
            nn.Unflatten(1, (5, 6)), attention(6), nn.Flatten(), nn.Linear(30, 2)
        ),
        30,
    ),
    (lambda: nn.Sequential(nn.Linear(20, 30), nn.SiLU(), nn.Linear(30, 2)), 20),
    (lambda: ByHand(9), 45),
    (lambda: convolved(nn.Conv2d(1, 6, 3), 6 * 49, 1, 9, 9), 81),
    (lambda: convolved(nn.Conv1d(8, 5, 8), 10, 8, 9), 72),
    (lambda: Steps(nn.LSTM, 3, 5), 15),
]


@pytest.mark.parametrize(
    ("module", "width", "frozen"),
    [*((*case, False) for case in NARROW), (*NARROW[1], True)],
)
def test_rows_of_narrow_products_begin_alike(module, width, frozen):
    """A library may read them by other code where they do not: MKL does without AVX-512."""
    module = module()
    for parameter in [*module.parameters()][2:-2] if frozen else []:
        parameter.requires_grad_(False)
    passes = PerSampleKernel(FlatModel(module), off_by)._passes
    form = torch.zeros(4, width), torch.zeros(4, dtype=torch.int64)
    length = passes.length(*form, 16.0, traced=True)
    x, y = torch.randn(length, width), torch.randint(2, (length,))
    passes.gradients(x, y)  # traces the model
    with Products() as found:
        passes.gradients(x, y).factors()
    assert found.seen
    assert not any(follows_places(a, b) for a, b in found.seen)
    assert_alike(passes, x, y)


def test_each_record_of_a_short_pass_is_tried_in_each_slot():
    x, y = torch.arange(1.0, 9)[:, None], torch.zeros(8, dtype=torch.int64)
    records = x[:, 0] * torch.linspace(0.5, 1.5, 8)
    for record, slot in itertools.product(range(8), repeat=2):

        def measure(x, _, record=record, slot=slot):
            found = x[:, 0].clone()
            found[slot] += found[slot] == records[record]
            return [found]

        assert not layout.is_invariant(measure, x, y, 8, [torch.zeros(1)])
    assert layout.is_invariant(lambda x, _: [x[:, 0]], x, y, 8, [torch.zeros(1)])


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("inner", [5, 8, 19])
def test_a_product_that_is_filled_up_is_the_same(turned, inner):
    a, b = torch.randn(3, 7, inner).double(), torch.randn(3, inner, 9).double()
    attend = F.scaled_dot_product_attention
    a, b = (v.mT.contiguous().mT if turned else v for v in (a, b))
    bias = torch.randn(9).double()
    pairs = [
        (filled_matrices(torch.matmul, a, b), a @ b),
        (filled_matrices(torch.matmul, a, b[0]), a @ b[0]),
        (filled_matrices(torch.matmul, a[0], b), a[0] @ b),
        (filled_matrices(torch.matmul, a, b[0, :, 0]), a @ b[0, :, 0]),
        (filled_linear(F.linear, a, b[0].t(), bias), a @ b[0] + bias),
        (filled_linear(F.linear, a, b[0, :, 0]), a @ b[0, :, 0]),
        (products(a, b), a @ b),
        (filled_attention(attend, a, a, b.mT[:, :7]), attend(a, a, b.mT[:, :7])),
    ]
    for found, expected in pairs:
        assert found.shape == expected.shape
        assert torch.allclose(found, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(
    ("op", "start", "shapes"),
    [
        (torch.tanh, 0, [(5, 3)]),
        (torch.pow, 1, [(4, 5, 3), (5, 1)]),
        (torch.atan2, 1, [(5, 3), (4, 1, 1)]),
        (lambda x: x.softmax(0), 1, [(4, 5, 3)]),
        (lambda x: x.mean((-3, 1)), 2, [(4, 2, 5)]),
        (lambda x: x.logsumexp(-4, keepdim=True), 1, [(4, 5, 3, 1)]),
        (torch.tanh, 0, [()]),
        (torch.pow, 0, [(5, 3), ()]),
    ],
)
def test_an_operation_on_filled_rows_is_the_same(op, start, shapes):
    given = [(torch.rand(s, dtype=torch.float64) + 1).requires_grad_() for s in shapes]
    found, expected = fill_up(op, start, 1 if start else 8, *given), op(*given)
    assert torch.allclose(found, expected, rtol=1e-13, atol=0)
    assert found.shape == expected.shape
    g = torch.rand_like(expected)
    pairs = (torch.autograd.grad(y, given, g) for y in (found, expected))
    assert all(torch.allclose(a, b, rtol=1e-13) for a, b in zip(*pairs, strict=True))


NOT_ROWS = [
    F.glu,
    lambda h: h.repeat(2, 1, 2).mean(0).cumsum(1),
    lambda h: h + ((4 * h.detach()).long() % torch.tensor([[[3]], [[5]]])).sum(0),
]


@pytest.mark.parametrize("function", NOT_ROWS)
def test_what_takes_no_rows_is_computed_as_it_is(reference, function):
    """Where another number of columns, or a zero behind them, would be another result."""
    module = reference.Apply(lambda m, x: function(m.first(x)), first=nn.Linear(6, 6)).double()
    x, y = torch.randn(5, 6).double(), torch.arange(5) % 3
    rows = reference.per_sample_loop(module, off_by, x, y)
    kernel = PerSampleKernel(FlatModel(module), off_by)
    assert kernel.way(x, y) == "graph"
    for one in (Placement(length=8), scattered(kernel, x, y, 5)):
        found = kernel.clipped_sum(x, y, C, layout=one)
        assert reference.error(found, reference.clipped(rows, C)) < 1e-12


class Spectrum(nn.Module):
    def forward(self, x):
        return torch.fft.rfft(x).abs()


def test_placement_is_checked_for_the_openings_batches_too():
    scene = SimulationSetup.of(Plan.parse({"algorithm": "fedproxvr", "privacy": {"epsilon": 8.0}}))
    terms = next(iter(scene.terms.values()))
    sizes = terms.batch_size, terms.opening.batch_size
    assert sizes[0] != sizes[1]
    kernel = scene.workshop.bench().private
    for good, placement in (
        (set(sizes), "compact"),
        ({sizes[0]}, "scattered"),
        (set(), "scattered"),
    ):
        kernel.invariant = lambda x, y, expected, good=good: expected in good
        assert scene.workshop.placement(kernel, *sizes) == placement


def test_a_losses_bits_do_not_follow_from_the_number_of_records():
    """Evaluations count them: the slots of their passes must not follow from how many there are."""
    module = nn.Sequential(nn.Conv2d(1, 8, 3), nn.GELU(), nn.Flatten(), nn.Linear(8 * 36, 4))
    x, y = torch.randn(257, 1, 8, 8), torch.zeros(257, dtype=torch.int64)
    for count in (8, 64, 256):
        found = [
            measure_each(PerSampleKernel(FlatModel(module), cross_entropy).losses, x[:n], y[:n])
            for n in (count, count + 1)
        ]
        assert torch.equal(found[0], found[1][:count])
