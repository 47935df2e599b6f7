"""The table of operations that keep records apart: every rule of it, and models that mix them."""

import math
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from tests.per_sample import uses_layers  # noqa: F401  (adds its own to USES)
from tests.per_sample.attacked import moved
from tests.per_sample.drawn import op_of, tried
from tests.per_sample.small import off_by
from tests.per_sample.uses import USES
from tests.spread import spread
from torch import nn
from torch.func import grad_and_value, vmap

from fedpact.common.errors import ModelError
from fedpact.common.losses import cross_entropy
from fedpact.common.params import FlatModel
from fedpact.per_sample import norms
from fedpact.per_sample.clipping import slack
from fedpact.per_sample.kernel import PerSampleKernel
from fedpact.per_sample.layout import Placement
from fedpact.per_sample.tracing.batch_rules import pointwise
from fedpact.per_sample.tracing.batch_table import RULES
from fedpact.per_sample.tracing.program import Program
from fedpact.per_sample.tracing.record_safety import own_tables
from fedpact.per_sample.tracing.trace_context import for_vmap

MOST = 40


def test_every_operation_of_the_table_is_tried():
    made = {f"aten.new_{kind}.default" for kind in ("zeros", "ones", "full", "empty")}
    assert set(USES) == set(RULES) | made


def _shown(name, enough):
    """How many uses, of up to 40 that are drawn, are claimed to keep records apart and do."""
    shown = 0
    for seed in range(MOST):
        shown += shown < enough and tried(name, USES[name], seed) == "shown"
    return shown


def _torch_says_so(name):
    """Whether torch, too, calls the operation pointwise, forwards and back."""
    return RULES.get(name) is pointwise and torch.Tag.pointwise in op_of(name).tags


DOUBTED = [(name, 1) for name in sorted(USES) if not _torch_says_so(name)]
ALL = [pytest.param(name, 3, marks=pytest.mark.slow) for name in sorted(USES)]


@pytest.mark.parametrize(("name", "enough"), [*DOUBTED, *ALL])
def test_the_tables_claim_about_an_operation_holds(name, enough):
    # Other records' results stay as they are when one is another, and when it is missing.
    assert _shown(name, enough) == enough


@pytest.mark.parametrize("name", ["cumsum", "sort", "flip", "roll", "softmax.int"])
def test_the_check_finds_a_rule_that_claims_too_much(name, monkeypatch):
    # Rules that never look which dimension it is.
    name = f"aten.{name if '.' in name else name + '.default'}"
    monkeypatch.setitem(RULES, name, lambda node, at: at(node.args[0]))
    with pytest.raises(AssertionError):
        _shown(name, MOST)


def test_check_sees_a_product_that_tests_all_records_for_zero(monkeypatch):
    # Its gradient goes another way where any number is 0, whoever's: it is not in the table.
    name = "aten.prod.dim_int"
    assert name not in RULES
    monkeypatch.setitem(RULES, name, RULES["aten.amax.default"])
    with pytest.raises(AssertionError, match="beside 0"):
        any(tried(name, lambda g: (g.front(3), 1), seed) == "" for seed in range(MOST))


class Mixing(nn.Module):
    """A layer, what is done with its output h [B, 6], and a head."""

    def __init__(self, middle):
        super().__init__()
        self.first, self.head, self.middle = nn.Linear(6, 6), nn.Linear(6, 3), middle
        self.gate = nn.Parameter(torch.zeros(6))

    def forward(self, x):
        return self.head(self.middle(self, torch.tanh(self.first(x))))


def _over_the_batch(model, h):
    return h + model.gate * F.scaled_dot_product_attention(h[None], h[None], h[None])[0]


def _in_place(_, h):
    h = h.clone()
    h[1:] = h[:-1]
    return h


# What the rules of the table above do not show, or not alone.
MIXING = {
    "any": lambda _, h: torch.where((h > 0.9).any(), -h, h),
    "mean": lambda _, h: h + 1e-9 * h.mean(0),
    "cumsum": lambda _, h: h + h.cumsum(0),
    "softmax": lambda _, h: h + h.softmax(0),
    "sort": lambda _, h: h + h.sort(0).values,
    "attention": _over_the_batch,
    "length": lambda _, h: h / h.shape[0],
    "branch on length": lambda _, h: h if h.shape[0] < 12 else -h,
    "branch on values": lambda _, h: h if h.max() < 0.9 else -h,
    "arange": lambda _, h: h * torch.arange(h.shape[0])[:, None],
    "expand": lambda _, h: h * torch.sin(9 * h[:, :1].expand(-1, h.shape[0]).sum(1, True)),
    "full": lambda _, h: h * torch.full((6,), 1.0 * h.shape[0]),
    "index": lambda _, h: h[torch.zeros(1, dtype=torch.long)] + h,
    "strided": lambda _, h: h.as_strided(h.shape, (6, 1)),
    "batch norm": lambda _, h: F.batch_norm(h, None, None, training=True),
    "layer norm": lambda _, h: F.layer_norm(h.T, h.shape[:1]).T,
    "in place": _in_place,
}


def _quietly(middle, quiet):
    """What `middle` does, under such a context."""

    def run(model, h):
        with quiet():
            found = middle(model, h)
        return h + found

    return run


@pytest.mark.parametrize(
    ("name", "quiet"),
    [*((n, nullcontext) for n in MIXING), ("mean", torch.no_grad), ("in place", torch.no_grad)],
)
def test_a_model_that_mixes_records_is_exact_on_each_or_refused(name, quiet):
    middle = _quietly(MIXING[name], quiet)
    kernel = PerSampleKernel(FlatModel(Mixing(middle)), off_by)
    x, y = torch.randn(9, 6), torch.arange(9) % 3
    r, clip, layout = torch.full((1, 6), 30.0), 0.05, Placement(length=16)

    def summed(x, y):
        return kernel.clipped_sum(x, y, clip, layout=layout)

    try:
        total = kernel.clipped_sum(x, y, math.inf, layout=layout)
        # Each record by the model itself, as a batch of one.
        error = float((total - kernel.alone(x, y).sum(0)).norm())
        assert error <= 1e-5 * float(total.norm())
        for place in (0, 9):
            assert moved(summed, x, y, r, y[:1], place) <= clip * (1 + slack(10))
    except ModelError:
        return


class Remembering(Mixing):
    """Mixes by what earlier passes left in Python: h + h.cumsum(0) makes it no graph."""

    def __init__(self, middle):
        super().__init__(middle)
        self.seen, self.calls, self.held = None, 0, [torch.zeros(6)]
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("spread", torch.ones(6))

    def forward(self, x):
        h = torch.tanh(self.first(x))
        return self.head(self.middle(self, h + 1e-9 * h.cumsum(0)))


def _previous(model, h):
    found = h if model.seen is None else h + model.seen.sum()
    model.seen = h.detach()
    return found


def _buffer(model, h):
    model.mean.mul_(0.9).add_(0.1 * h.detach().mean(0))
    return h - model.mean


def _weights(model, h):
    model.head.bias.data.add_(h.detach().mean())
    return h


def _hundredth(model, h):
    model.calls += 1
    return h if model.calls <= 100 else h - 10 * h.mean(0)


def _part_of_a_buffer(model, h):
    model.mean.view(2, 3).add_(h.detach().mean(0).view(2, 3))
    return h - model.mean


def _written_to(model, h):
    torch.add(model.mean, h.detach().mean(0), out=model.mean)
    return h - model.mean


def _given_statistics(model, h):
    of_each = h.view(-1, 2, 3)
    F.instance_norm(of_each, model.mean[:2], model.spread[:2], momentum=0.5)
    return h - model.mean


def _held(model, h):
    model.held[0].lerp_(h.detach().mean(0), 0.1)
    return h - model.held[0]


_WRITE = (_part_of_a_buffer, _written_to, _held, _given_statistics)
_REMEMBER = (_previous, _buffer, _weights, _hundredth)


@pytest.mark.parametrize(
    ("middle", "quiet"),
    spread((*_REMEMBER, *_WRITE), (nullcontext, torch.no_grad), one_in=2),
)
def test_no_record_is_remembered_for_another(middle, quiet, monkeypatch):
    # One record at a time, so that there is an earlier one in each pass.
    monkeypatch.setattr(norms, "KEEP_BYTES", 1)
    model = FlatModel(Remembering(_quietly(middle, quiet)))
    kernel = PerSampleKernel(model, off_by)
    x, y = torch.randn(16, 6), torch.arange(16) % 3
    other = x.clone()
    other[0] = 50.0

    def summed(x, y):
        return kernel.clipped_sum(x, y, 0.05, layout=Placement(length=16))

    try:
        before = summed(x, y)
        for _ in range(101 if middle is _hundredth else 1):
            summed(x[:1], y[:1])
        summed(other, y)
        assert torch.equal(summed(x, y), before)
    except ModelError:
        return


CACHE = torch.zeros(6)


class Caching(nn.Module):
    """Adds a global tensor to records, which every pass but a traced one leaves in it."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(6, 3)

    def forward(self, x):
        found = self.last(x + CACHE)
        if not torch.compiler.is_compiling():
            CACHE.copy_(x[0])
        return found


def test_a_pass_elsewhere_leaves_nothing_for_a_sum():
    """As an evaluation of a model that shares a tensor with the one that is trained."""
    kernel = PerSampleKernel(FlatModel(Caching()), cross_entropy)
    x, y = torch.randn(8, 6), torch.arange(8) % 3
    before = kernel.clipped_sum(x, y, 0.05)
    Caching()(torch.full((1, 6), 9.0))
    assert CACHE.any()
    assert torch.equal(kernel.clipped_sum(x, y, 0.05), before)


def _reweighted(outputs, y):
    return cross_entropy(outputs, y) * torch.where((outputs.abs() > 50).any(), -1.0, 1.0)


def _branching(outputs, y):
    losses = cross_entropy(outputs, y)
    return -losses if bool((outputs.abs() > 50).any()) else losses


def _centred(outputs, y):
    return cross_entropy(outputs - outputs.mean(0), y)


@pytest.mark.parametrize("loss", [_reweighted, _branching, _centred])
def test_a_loss_that_mixes_records_is_exact_on_each_or_refused(loss):
    chain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    x, y, r = torch.randn(20, 4), torch.arange(20) % 3, torch.full((1, 4), 1e6)
    with torch.no_grad():
        chain[-1].weight.mul_(100)
    try:
        kernel = PerSampleKernel(FlatModel(chain), loss)
        found = moved(lambda x, y: kernel.clipped_sum(x, y, 0.05), x, y, r, y[:1])
        assert found <= 0.05 * (1 + slack(21))
        assert torch.allclose(kernel.losses(x, y)[:5], kernel.losses(x[:5], y[:5]), rtol=1e-5)
    except ModelError:
        return


class Statistics(nn.Module):
    """A loss that keeps running statistics of outputs, in a normalisation whose schema hides it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("spread", torch.ones(3))

    def forward(self, outputs, y):
        F.batch_norm(outputs, self.mean, self.spread, training=True, momentum=1e-9)
        return cross_entropy(outputs, y) * torch.where((self.mean.abs() > 1e-6).any(), -1.0, 1.0)


def test_a_loss_keeps_no_state_between_records():
    loss, x, y = Statistics(), torch.randn(9, 6), torch.arange(9) % 3
    kernel = PerSampleKernel(FlatModel(nn.Linear(6, 3)), loss)
    first = kernel.clipped_sum(x[:8], y[:8], 0.05)
    kernel.clipped_sum(1e6 * x, y, 0.05)
    assert torch.equal(kernel.clipped_sum(x[:8], y[:8], 0.05), first)
    assert not loss.mean.any()


class Halves(nn.Module):
    """A single number beside numbers of 16 bits, which it does not make wider."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(5, 1, bias=False), nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        return self.layer(x[:, :5]) + (x[:, 5:].half() * self.scale).float()


def test_a_gradient_of_halves_is_measured_in_whole_numbers():
    """Of 3e-4 the square is 1.5 of the least number of 16 bits, and was taken for one of it."""
    torch.manual_seed(1)
    kernel = PerSampleKernel(FlatModel(Halves()), lambda outputs, y: outputs[:, 0] * y)
    x, y, clip = torch.randn(20, 6), torch.ones(20), 1e-5
    r = torch.tensor([[0.0, 0.0, 0.0, 0.0, 0.0, 2.99e-4]])
    assert kernel.way(x, y) == "graph"
    assert kernel.alone(r, y[:1]).norm() > 10 * clip
    found = moved(lambda x, y: kernel.clipped_sum(x, y, clip), x, y, r, y[:1])
    assert found <= clip * (1 + slack(21))


def _blanked(x):
    """The features that a record's last number names are blanked."""
    named = x[:, 6:].long() + 6 * torch.arange(len(x))[:, None]
    return x[:, :6].reshape(-1).index_fill(0, named.reshape(-1), 0.0).view(-1, 6)


def _looked_up(x):
    """From a table of the record's own."""
    return F.embedding(x[:, 6].long() + 3 * torch.arange(len(x)), x[:, :6].reshape(-1, 2))


@pytest.mark.parametrize(("middle", "width", "other"), [(_blanked, 6, -1.0), (_looked_up, 2, 3.0)])
def test_a_record_reveals_nothing_of_another(reference, middle, width, other):
    """Put one behind the other, as vmap puts them, it names what is its neighbours'."""
    model = reference.Apply(lambda m, x: m.layer(middle(x)), layer=nn.Linear(width, 3))
    kernel = PerSampleKernel(FlatModel(model), off_by)
    x, y = 5 * torch.randn(20, 7), torch.arange(20) % 3
    x[:, 6] = 0

    def summed(x, y):
        return kernel.clipped_sum(x, y, 0.05)

    for place in (1, 17):
        named = x[place : place + 1].clone()
        named[0, 6] = other
        beside = torch.cat([x[:place], named, x[place:]]), torch.cat([y[:1], y])
        # Of the record that names, and of one more behind it.
        for given, r, at in (((x, y), named, place), (beside, -9 * x[:1], place + 1)):
            try:
                assert moved(summed, *given, r, y[:1], at) <= 0.05 * (1 + slack(22))
            except IndexError:
                continue


def _along(x, i):
    return i[:, None].expand(2, x.shape[1])


# Of a record x [4, 3] and its whole numbers i [2], which name entries of x or of a constant.
BY_INDEX = {
    "embedding": lambda x, i: F.embedding(i, x),
    "gather": lambda x, i: x.gather(0, _along(x, i)),
    "index": lambda x, i: x[i] + x[:, i][:2, :1],
    "index_add": lambda x, i: x.index_add(0, i, x[:2]),
    "index_copy": lambda x, i: x.index_copy(0, i, 2 * x[:2]),
    "index_fill": lambda x, i: x.index_fill(0, i, 7.0),
    "index_fill columns": lambda x, i: x.index_fill(1, i, 7.0),
    "index_fill of a constant": lambda x, i: x * torch.zeros(4, 3).index_fill(0, i, 7.0),
    "index_put": lambda x, i: x.index_put((i,), x[:2], accumulate=True),
    "index_reduce": lambda x, i: x.index_reduce(0, i, 2 * x[:2], "amax"),
    "index_select": lambda x, i: x.index_select(0, i),
    "max_unpool2d": lambda x, i: F.max_unpool2d(x[:1, :2][None, None], i[None, None, None], (2, 2)),
    "nll_loss": lambda x, i: F.nll_loss(x[:2], i, reduction="none"),
    "put": lambda x, i: x.put(i, x[0, :2]),
    "scatter": lambda x, i: x.scatter(0, _along(x, i), 2 * x[:2]),
    "scatter of a constant": lambda x, i: torch.zeros(4, 3).scatter(0, _along(x, i), x[:2]),
    "scatter_add": lambda x, i: x.scatter_add(0, _along(x, i), x[:2]),
    "scatter_reduce": lambda x, i: x.scatter_reduce(0, _along(x, i), x[:2], "sum"),
    "take": lambda x, i: x.take(i),
}
BEYOND = (-1, 4, 5, 9, -5), (0, 0, 1, 2, 1)


@pytest.mark.parametrize("name", BY_INDEX)
def test_under_vmap_an_index_reaches_no_other_record(reference, name):
    """Of what is given to vmap: torch's puts some tables one behind the other."""

    def indexed(m, x):
        return BY_INDEX[name](x[0, :4] * m.scale, x[0, 4, :2].long()).reshape(1, -1)

    model = FlatModel(reference.Apply(indexed, scale=nn.Parameter(torch.ones(3))))
    x, y = torch.randn(6, 5, 3), torch.zeros(6)
    x[:, 4] = torch.arange(3.0)
    one = Program(model, lambda outputs, y: outputs.sum(1) + 0 * y, x, y, 1)
    if own_tables(one.nodes, one.entered):
        assert name.split()[0] in ("embedding", "index_fill")
        return

    def batched(x):
        def loss(w, record, target):
            return one.losses(record[None], target[None], {"scale": w})[0]

        with for_vmap():
            found = vmap(grad_and_value(loss), (None, 0, 0))(torch.ones(3), x, y)
        return torch.cat([found[0], found[1][:, None]], 1).detach()

    before, others = batched(x), torch.arange(6) != 2
    for first, second in zip(*BEYOND, strict=True):
        given = x.clone()
        given[2, 4, :2] = torch.tensor([first, second])
        try:
            found = batched(given)
        except (IndexError, RuntimeError):
            continue  # it looks, and says so
        assert torch.equal(found[others], before[others])
        beside = torch.where(others[:, None, None], -2 * given, given)
        beside[:, 4] = given[:, 4]
        assert torch.equal(batched(beside)[2], found[2])


def test_a_record_reads_no_entry_of_anothers_table(reference):
    """Under vmap the tables lie one behind the other, so they are looked up one by one."""

    def indexed(m, x):
        return BY_INDEX["embedding"](x[0, :4] * m.scale, x[0, 4, :2].long()).reshape(1, -1)

    model = reference.Apply(indexed, scale=nn.Parameter(torch.ones(3)))
    kernel = PerSampleKernel(FlatModel(model), lambda outputs, y: outputs.sum(1) + 0 * y)
    x, y = torch.ones(3, 5, 3), torch.zeros(3)
    assert kernel.way(x, y) == "records"
    assert torch.equal(kernel.losses(x, y), torch.full((3,), 6.0).double())
    x[1, 4, 0] = 5
    with pytest.raises(IndexError):
        kernel.losses(x, y)


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("fill", [0.5, None])
def test_values_from_a_records_type_are_constants(reference, fill, named):
    def made(m, x):
        value = x.shape[0] if fill is None else fill
        more = x.new_full((1,), fill_value=value) if named else x.new_full((1,), value)
        return m.layer(x) + x.new_zeros(3) + more

    kernel = PerSampleKernel(FlatModel(reference.Apply(made, layer=nn.Linear(6, 3))), off_by)
    x, y = torch.randn(8, 6), torch.arange(8) % 3
    assert kernel.way(x, y) == ("records" if fill is None else "graph")
    total = kernel.clipped_sum(x, y, math.inf)
    assert torch.allclose(total, kernel.alone(x, y).sum(0), atol=1e-6)


def test_sparse_gradients_are_added_record_by_record(reference):
    def run(m, x):
        h = m.embedding(x).mean(1)
        return m.first(h + 1e-9 * h.cumsum(0))

    table = nn.Embedding(7, 6, sparse=True)
    model = reference.Apply(run, embedding=table, first=nn.Linear(6, 3))
    kernel = PerSampleKernel(FlatModel(model), cross_entropy)
    x, y = torch.arange(16).view(8, 2) % 7, torch.arange(8) % 3
    total = kernel.clipped_sum(x, y, math.inf)
    rows = [kernel.clipped_sum(x[j : j + 1], y[j : j + 1], math.inf) for j in range(8)]
    assert torch.allclose(total, torch.stack(rows).sum(0), atol=1e-6)


def test_a_parameter_of_no_numbers_has_no_gradient(reference):
    none = nn.Parameter(torch.zeros(0, 3))
    model = reference.Apply(
        lambda m, x: m.layer(x) + m.none.sum(), layer=nn.Linear(6, 3), none=none
    )
    kernel = PerSampleKernel(FlatModel(model), cross_entropy)
    x, y = torch.randn(8, 6), torch.arange(8) % 3
    total = kernel.clipped_sum(x, y, math.inf)
    assert torch.allclose(total, kernel.alone(x, y).sum(0), atol=1e-6)
