"""Random numbers of a pass, as dropout's: by the step's key and the record itself, alone."""

import math
from contextlib import nullcontext
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from tests.per_sample.small import off_by
from tests.spread import spread
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fedpact import per_sample
from fedpact.common.errors import ModelError
from fedpact.common.losses import cross_entropy
from fedpact.common.params import FlatModel
from fedpact.common.randomness.secure import SecureDraws
from fedpact.common.randomness.seeded import SeededDraws
from fedpact.per_sample.clipping import slack
from fedpact.per_sample.kernel import PerSampleKernel, PlainKernel
from fedpact.per_sample.layout import Placement
from fedpact.per_sample.tracing import keyed_draws
from fedpact.per_sample.tracing.batch_rules import Mixed, Where
from fedpact.per_sample.tracing.keyed_draws import PassNumbers, draw_by_key, drawing, use_means

RATE, WIDTH = 0.4, 8
LAYOUT = Placement(length=16)


def attention(x: Tensor) -> Tensor:
    q = x.view(len(x), 2, 2, 2)
    return F.scaled_dot_product_attention(q, q, q, dropout_p=RATE).flatten(1)


def drop_path(x: Tensor) -> Tensor:
    kept = x.new_empty((len(x), 1)).bernoulli_(1 - RATE).div_(1 - RATE)
    return x * kept


def nobodys(x: Tensor) -> Tensor:
    """The features' order, and one number for all: records draw none of their own."""
    return x[:, torch.rand(WIDTH).argsort()] * torch.rand(())


# Several in one model, as a trace takes longer than what is asked of it.
DRAWING = {
    "dropout": lambda x: F.dropout(x, RATE),
    "attention": attention,
    "layers": lambda x: drop_path(
        F.rrelu(F.dropout2d(x.view(len(x), 4, 2, 1), RATE).flatten(1), training=True)
    ),
    "numbers": lambda x: torch.normal(x + torch.randn_like(x), 0.1) * torch.randint(1, 4, x.shape),
    "picks": lambda x: (
        F.gumbel_softmax(x, hard=True)
        + x * (1 + torch.multinomial(x.softmax(1), 3).sum(1, keepdim=True))
    ),
    "nobody's": nobodys,
}


class Net(nn.Module):
    def __init__(self, between, mixing=False):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 3)
        self.between, self.mixing = between, mixing

    def forward(self, x):
        h = self.between(torch.tanh(self.first(x)))
        return self.last(h - h.mean(0) if self.mixing else h)


@cache
def kernel_of(between, kind=PerSampleKernel, way="graph", **more):
    """One for all tests, as a trace takes longer than what is asked of it.

    way: what the test makes the kernel take where it takes it first.
    """
    return kind(FlatModel(Net(between, **more).double()), off_by)


@pytest.fixture
def records():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(11, 5, generator=generator, dtype=torch.float64), torch.arange(11) % 3


@pytest.mark.parametrize("name", DRAWING)
def test_numbers_follow_from_the_seed_alone(name, records):
    """Neither from chance elsewhere nor from the slot, so the model can be verified."""
    between = DRAWING[name]
    kernel = kernel_of(between)
    assert kernel.way(*records) == "graph"
    assert kernel.draws(*records)
    plain, sums = kernel_of(between, PlainKernel), []
    torch.manual_seed(7)
    before = torch.get_rng_state()
    for seed in (1, 1, 2):
        for one in (kernel, plain):
            one.seed(lambda seed=seed: seed)
        found = kernel.clipped_sum(*records, 1.0, layout=LAYOUT), plain.weighted_sum(*records)
        sums.append(torch.stack(found))
    assert torch.equal(sums[0], sums[1])
    assert (sums[0] != sums[2]).any(1).all()
    assert torch.equal(torch.get_rng_state(), before)
    kernel.verify(*records)
    assert kernel.invariant(*records)


@pytest.mark.parametrize(
    ("drawing", "way"), spread(tuple(DRAWING), ("graph", "vmap", "loop"), one_in=3)
)
def test_a_record_more_adds_its_own_share_alone(drawing, way, records, monkeypatch):
    """Wherever it stands: everybody else keeps their numbers, in whichever slots."""
    between = DRAWING[drawing]
    if way != "graph":
        monkeypatch.setattr("fedpact.per_sample.passes.Graph", refused)
    x, y = records
    kernel, clip = kernel_of(between, way=way), 1e-2
    kernel.seed(lambda: 3)
    if way == "loop":
        kernel._passes._trace_for(x, y)._by_vmap = False

    def summed(chosen):
        return kernel.clipped_sum(x[chosen], y[chosen], clip, layout=Placement(length=8))

    everybody = torch.arange(11)
    for r in (0, 4, 10):
        moved = summed(everybody) - summed(everybody[everybody != r])
        assert torch.allclose(moved, summed(torch.tensor([r])), rtol=0, atol=1e-12)
        assert float(moved.norm()) <= clip * (1 + slack(11))


def refused(*_):
    raise Mixed("as a model that is not shown to keep records apart")


@pytest.mark.parametrize("name", DRAWING)
def test_ways_draw_the_same_numbers_for_a_record(name, records, monkeypatch):
    between, found = DRAWING[name], []
    for way in ("graph", "vmap"):
        if way == "vmap":
            monkeypatch.setattr("fedpact.per_sample.passes.Graph", refused)
        kernel = kernel_of(between, way=way)
        kernel.seed(lambda: 5)
        found.append(kernel.clipped_sum(*records, 1.0, layout=LAYOUT))
    if name != "nobody's":
        assert torch.allclose(*found, rtol=1e-9, atol=1e-12)


def test_the_sum_is_of_gradients_behind_the_masks(records):
    """At ℓ = Σ outputs of a last layer of ones the gradient is the dropped record."""
    x, _ = records
    y = torch.zeros(11)
    last = nn.Linear(5, 1, bias=False).double()
    nn.init.ones_(last.weight)
    model = nn.Sequential(nn.Dropout(RATE), last)
    kernel = PerSampleKernel(FlatModel(model), lambda out, y: out[:, 0])
    kernel.seed(lambda: 9)
    numbers = PassNumbers.of_records(lambda: 9, x, y, leading=False)
    with drawing(numbers):
        mask = draw_by_key(torch.dropout, Where(0))(torch.ones_like(x), RATE, True)
    assert {round(v, 9) for v in mask.unique().tolist()} == {0.0, round(1 / (1 - RATE), 9)}
    assert len(mask.unique(dim=0)) > 5
    rows = x * mask
    clipped = rows * (1.5 / rows.norm(dim=1, keepdim=True)).clamp(max=1)
    found = kernel.clipped_sum(x, y, 1.5, layout=Placement(length=16))
    assert torch.allclose(found, clipped.sum(0), rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("where", [Where(0), Where(1), Where(1, 2), Where(1, 1, 3), Where(2, 2, 2)])
def test_draws_belong_to_the_record_in_any_slot(where, records):
    """With the batch folded among other dimensions, as of heads, behind and in front of it."""
    x, y = records
    size = where.outer * where.inner
    forms = {n: [4, 4, 4] for n in (11, 3)}
    for n, form in forms.items():
        form[where.dim] = n * size

    def made(n):
        with drawing(PassNumbers.of_records(lambda: 2, x[:n], y[:n], leading=False)):
            found = draw_by_key(torch.rand, where)(forms[n])
        split = [*found.shape]
        split[where.dim : where.dim + 1] = [where.outer, n, where.inner]
        return found.view(split).movedim(where.dim + 1, 0)

    assert torch.equal(made(11)[:3], made(3))
    assert len({tuple(one.flatten().tolist()) for one in made(11)}) == 11


def test_numbers_that_are_nobodys_are_refused(records):
    with (
        drawing(PassNumbers.of_records(lambda: 2, *records, leading=False)),
        pytest.raises(ModelError, match="which are whose"),
    ):
        draw_by_key(torch.rand, Where(0))([12, 4])


def test_recurrent_layers_drop_between_their_layers(reference):
    first = nn.LSTM(2, 4, num_layers=2, dropout=RATE, batch_first=True)
    model = reference.Apply(
        lambda m, x: m.last(m.first(x)[0][:, -1]), first=first, last=nn.Linear(4, 3)
    )
    x, y = torch.randn(6, 3, 2), torch.arange(6) % 3
    kernel = PerSampleKernel(FlatModel(model), off_by)
    assert kernel.way(x, y) == "graph"
    kernel.seed(lambda: 1)
    parts = sum(kernel.clipped_sum(x[[j]], y[[j]], 0.1, layout=LAYOUT) for j in range(6))
    found = kernel.clipped_sum(x, y, 0.1, layout=LAYOUT)
    assert torch.allclose(found, parts, rtol=1e-4, atol=1e-6)
    kernel.seed(lambda: 2)
    assert not torch.allclose(found, kernel.clipped_sum(x, y, 0.1, layout=LAYOUT), rtol=1e-3)


class Dropped(nn.Module):
    """A layer, some of whose weights are dropped at each step, as in an AWD-LSTM."""

    def __init__(self):
        super().__init__()
        self.layer, self.last = nn.LSTM(5, WIDTH, batch_first=True), nn.Linear(WIDTH, 3)
        parametrize.register_parametrization(self.layer, "weight_hh_l0", nn.Dropout(RATE))

    def forward(self, x):
        return self.last(torch.tanh(self.layer(x)[0])[:, -1])


def test_dropped_weights_have_the_gradient_of_the_loss():
    kernel = PerSampleKernel(FlatModel(Dropped().double()), off_by)
    kernel.seed(lambda: 5)
    x, y = torch.randn(4, 3, 5, dtype=torch.float64), torch.arange(4) % 3
    w = kernel.model.vector.clone()
    found = kernel.clipped_sum(x, y, math.inf, layout=LAYOUT)
    assert kernel.way(x, y) == "graph"
    along, step = torch.randn(len(w), dtype=torch.float64), 1e-5
    ends = []
    for sign in (1, -1):
        kernel.model.load(w + sign * step * along)
        ends.append(float(kernel.losses(x, y, LAYOUT).sum()))
    assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(float(found @ along), rel=1e-6)


def test_both_points_of_a_difference_have_the_same_numbers(records):
    kernel = kernel_of(DRAWING["dropout"])
    w = kernel.model.vector.clone()
    kernel.seed(lambda: 4)
    assert not kernel.clipped_difference(*records, w, w, math.inf).any()


def test_mixing_is_found_in_a_model_with_dropout(records):
    with pytest.raises(ModelError, match="mixes the records"):
        kernel_of(DRAWING["dropout"], mixing=True).verify(*records)


@pytest.mark.parametrize(
    ("between", "way"),
    [
        # What a sort makes of one record by itself is that record.
        (lambda x: x + x[torch.rand(len(x), dtype=x.dtype).argsort()], "graph"),
        (
            lambda x: x + torch.bernoulli(torch.full((len(x), len(x)), 0.5, dtype=x.dtype)) @ x,
            "records",
        ),
    ],
    ids=["order", "pairs"],
)
def test_random_mixing_runs_on_each_record_alone(between, way, records):
    kernel = kernel_of(between)
    assert kernel.way(*records) == way
    x, y = records
    whole, others = (kernel.clipped_sum(x[n:], y[n:], math.inf) for n in (0, 1))
    one = kernel.clipped_sum(x[:1], y[:1], math.inf)
    assert torch.allclose(whole, others + one)


@pytest.mark.parametrize(
    "between",
    [
        lambda x: x + x[torch.randperm(len(x))],
        lambda x: x + torch.poisson(x.detach().abs()),
        lambda x: x * torch.distributions.Gamma(2.0, 2.0).sample(x.shape),
    ],
    ids=["order", "poisson", "gamma"],
)
def test_other_draws_are_refused_in_our_words(between, records):
    with pytest.raises(ModelError, match=r"mixes|draws random numbers by|not known to look"):
        kernel_of(between).verify(*records)


def test_without_chance_dropout_does_nothing():
    x = torch.randn(4, 3)
    with use_means():
        assert torch.allclose(F.dropout(x, 0.3), x)
        assert torch.equal(torch.rand(2), torch.full((2,), 0.5))
        # What is keyed inside stays without chance.
        with drawing(PassNumbers.of(lambda: 1)):
            assert torch.allclose(draw_by_key(torch.dropout)(x, 0.3, True), x)


def test_each_step_of_a_run_has_its_own_number():
    draws = SeededDraws(1, "site", 2)
    assert [draws.number(s) for s in (0, 1, 0)] == [draws.number(s) for s in (0, 1, 0)]
    assert draws.number(0) != draws.number(1)
    secure = SecureDraws()
    assert len({secure.number(0) for _ in range(8)}) == 8


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.GRU(5, 4, 2, batch_first=True, dropout=RATE)

    def forward(self, x):
        return self.layer(x.unsqueeze(1))[0][:, -1]


def works_alone():
    cuda = torch.backends.cuda
    fused = cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.cudnn_sdp_enabled()
    return any(fused), torch.backends.cudnn.enabled


@pytest.mark.parametrize(("module", "cudnn"), [(lambda: Net(attention), True), (Recurrent, False)])
def test_a_gpu_draws_where_it_is_seen(module, cudnn, records, monkeypatch):
    """A GPU's fused attention and cuDNN's recurrent layers, which draw inside, are not used."""
    seen = list[tuple[bool, bool]]()

    class Watched(keyed_draws.KeyedDraws):
        def __torch_dispatch__(self, *args, **kwargs):
            seen.append(works_alone())
            return super().__torch_dispatch__(*args, **kwargs)

    before = works_alone()
    for place in (keyed_draws, per_sample.kernel):
        monkeypatch.setattr(place, "KeyedDraws", Watched)
    monkeypatch.setattr(keyed_draws, "on_cpu", lambda tensor: False)
    model = FlatModel(module().double())
    private, plain = PerSampleKernel(model, off_by), PlainKernel(model, off_by)
    for run in (private.losses, plain.losses, private.norms):
        seen.clear()
        run(*records)
        assert set(seen) == {(False, cudnn)}
        assert works_alone() == before


@pytest.mark.parametrize("rate", [0.0, RATE])
def test_cudnn_may_do_what_draws_nothing(rate):
    x, h = torch.empty(5, 2, 3, device="meta"), torch.empty(1, 2, 4, device="meta")
    weights = [torch.empty(size, device="meta") for size in ((16, 3), (16, 4), (16,), (16,))]
    settings = 2, 4, 0, 1, False, rate, True, False, [], None
    with keyed_draws.KeyedDraws(None), pytest.raises(ModelError) if rate else nullcontext():
        assert torch.ops.aten._cudnn_rnn(x, weights, 4, None, h, h, *settings)[0].shape == (5, 2, 4)


@pytest.mark.parametrize("training", [True, False])
def test_a_randomised_rectifier_is_random_in_training_only(training):
    module = nn.Sequential(nn.Linear(4, 6), nn.RReLU().train(training), nn.Linear(6, 2))
    kernel = PerSampleKernel(FlatModel(module), cross_entropy)
    x, y = torch.randn(5, 4), torch.arange(5) % 2
    assert kernel.way(x, y) == "graph"
    kernel.verify(x, y)
    expected = kernel.alone(x, y).sum(0)
    found = kernel.clipped_sum(x, y, torch.inf)
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6) == (not training)
