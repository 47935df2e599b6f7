"""Models that mix the records of a batch are refused: BatchNorm by name, any other by `verify`."""

import math
import threading
from functools import partial

import pytest
import torch
from torch import nn

from fedpact.common.errors import InputError, ModelError
from fedpact.common.losses import cross_entropy, squared_error
from fedpact.common.params import FlatModel
from fedpact.models.zoo import replace_batchnorm
from fedpact.per_sample.kernel import PerSampleKernel, PlainKernel
from fedpact.per_sample.tracing import independence
from fedpact.per_sample.tracing.independence import check_separation


class Apply(nn.Module):
    """A linear layer between two given functions."""

    def __init__(self, before=lambda x: x, after=lambda x: x):
        super().__init__()
        self.before, self.after, self.linear = before, after, nn.Linear(4, 4)

    def forward(self, x):
        return self.after(self.linear(self.before(x)))


def verify(module, x=None, y=None, dtype=torch.float64):
    module = module.to(dtype)
    torch.manual_seed(0)
    x = torch.randn(3, 4) if x is None else x
    x = x.to(dtype) if x.is_floating_point() else x
    with torch.no_grad():
        y = torch.randn_like(module(x)) if y is None else y
    PerSampleKernel(FlatModel(module), squared_error).verify(x, y)


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 2)),
        nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 8), nn.Dropout(0.9), nn.Linear(8, 2)),
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4).eval()),
        nn.Sequential(nn.Linear(4, 4), nn.Threshold(1e9, 0.0)),
    ],
)
def test_models_that_treat_records_independently_pass(module):
    verify(module, dtype=torch.float32)
    dropout = [m for m in module.modules() if isinstance(m, nn.Dropout)]
    assert all(m.training for m in dropout)


# In float32, in which more is taken for rounding than in float64.
@pytest.mark.parametrize(
    "module",
    [
        Apply(before=lambda x: x - x.mean(0)),
        Apply(after=lambda x: x / x.detach().std(0, correction=0).clamp_min(0.1)),
        Apply(after=lambda x: x + 1e-2 * x.roll(1, 0)),
    ],
)
def test_models_that_mix_records_are_found(module):
    with pytest.raises(ModelError, match="mixes the records of a batch"):
        verify(module, dtype=torch.float32)


def test_a_model_that_fits_one_batch_size_is_refused():
    flat = Apply(lambda x: x.flatten(0, 1), lambda x: x.view(3, -1, 4))
    kernel = PerSampleKernel(FlatModel(flat), squared_error)
    with pytest.raises(ModelError, match="cannot be differentiated record by record"):
        kernel.clipped_sum(torch.randn(3, 7, 4), torch.randn(3, 7, 4), 1.0)


def test_a_model_that_returns_no_row_for_each_record_is_found(reference):
    table = nn.Parameter(torch.randn(2))
    model = reference.Apply(lambda m, x: m.table.expand(x.shape[0] + 1, 2), table=table)
    kernel = PerSampleKernel(FlatModel(model), lambda out, y: out.sum(1)[: y.shape[0]])
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    # A record alone has a loss all the same, and its gradient is what is summed.
    assert torch.allclose(kernel.clipped_sum(x, y, 1.0), 3 / 2**0.5 * torch.ones(2))
    with pytest.raises(ModelError, match="mixes the records of a batch: what it returns"):
        kernel.verify(x, y)


def test_buffers_that_a_forward_pass_changes_are_found():
    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x):
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
            return self.linear(x)

    with pytest.raises(ModelError, match="a pass changes mean"):
        verify(Mean())


@pytest.mark.parametrize("add", [lambda x: x.add_(1), lambda x: x.add_(0)])
def test_models_that_write_over_their_input_are_found(add):
    with pytest.raises(ModelError, match="writes to its input"):
        verify(Apply(before=add))


@pytest.mark.parametrize("setting", [{"max_norm": 0.1}, {"scale_grad_by_freq": True}])
def test_embeddings_that_act_by_the_batch_are_refused(setting):
    model = nn.Sequential(nn.Embedding(3, 4, **setting), nn.Linear(4, 2))
    with pytest.raises(ModelError, match=rf"with .*{next(iter(setting))}.*layer '0'"):
        PerSampleKernel(FlatModel(model), squared_error)


def test_a_nearly_certain_record_is_accepted():
    """Its gradient, of e^-97, is the median of four, and half of that is no clip."""
    linear = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        linear.weight.copy_(torch.eye(2))
    x = torch.tensor([[97.0, 0.0], [500.0, 0.0], [1000.0, 0.0], [1000.0, 0.0]]) / 1e3
    kernel = PerSampleKernel(FlatModel(linear), cross_entropy)
    kernel.verify(x, torch.tensor([0, 0, 1, 1]))


def test_verify_needs_three_records_with_finite_gradients():
    with pytest.raises(InputError, match="2 records"):
        verify(nn.Linear(4, 4), torch.randn(2, 4))
    with pytest.raises(InputError, match="not finite"):
        verify(nn.Linear(4, 4), torch.full((3, 4), torch.inf), torch.zeros(3, 4))


KINDS = [
    nn.BatchNorm1d(4),
    nn.BatchNorm2d(4),
    nn.BatchNorm3d(4),
    nn.SyncBatchNorm(4),
    nn.InstanceNorm2d(4, track_running_stats=True),
]


@pytest.mark.parametrize("kernel", [PerSampleKernel, PlainKernel])
@pytest.mark.parametrize("layer", KINDS, ids=lambda m: type(m).__name__)
def test_batch_statistics_are_refused_with_name_and_replacement(layer, kernel):
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), layer.train()))
    remedy = "False" if isinstance(layer, nn.InstanceNorm2d) else "batch_norm='group'"
    with pytest.raises(ModelError, match=rf"Norm .*layer '1\.1'.*{remedy}"):
        kernel(FlatModel(model), squared_error)
    kernel(FlatModel(replace_batchnorm(model)), squared_error)


def test_late_or_stateless_batchnorm_is_refused():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    kernel = PerSampleKernel(FlatModel(model), squared_error)
    x = torch.randn(3, 4)
    kernel.clipped_sum(x, x, 1.0)
    model.train()
    for use in (kernel.clipped_sum, lambda *_: kernel.verify(x, x)):
        with pytest.raises(ModelError, match="BatchNorm"):
            use(x, x, 1.0)
    stateless = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False)).eval()
    with pytest.raises(ModelError, match="BatchNorm"):
        PerSampleKernel(FlatModel(stateless), squared_error)


def test_replace_batchnorm_takes_over_what_the_layer_knew():
    shared = nn.BatchNorm2d(48, eps=1e-3)
    nn.init.normal_(shared.weight)
    shared.bias.requires_grad_(False)
    plain = nn.BatchNorm2d(10, affine=False)
    model = nn.Sequential(shared, nn.Sequential(shared), plain, nn.BatchNorm1d(2)).eval()
    new = replace_batchnorm(model)
    assert isinstance(model[0], nn.BatchNorm2d), "the given model is left as it was"
    assert new[0] is new[1][0]
    assert isinstance(new[0], nn.GroupNorm)
    assert torch.equal(new[0].weight, shared.weight)
    assert new[0].weight is not shared.weight
    assert not new[0].bias.requires_grad
    assert (new[0].num_groups, new[0].eps, new[0].training) == (12, 1e-3, False)
    # At least 4 channels a group where there are as many: fewer leave nothing to normalise.
    assert (new[2].num_groups, new[2].affine, new[3].num_groups) == (2, False, 1)
    assert isinstance(replace_batchnorm(nn.BatchNorm1d(8)), nn.GroupNorm)


class Step(torch.autograd.Function):
    """A sign whose derivative is said to be 1."""

    @staticmethod
    def forward(ctx, x):
        return x.sign()

    @staticmethod
    def backward(ctx, *grads):
        return grads[0]


class Stepped(nn.Module):
    def __init__(self, step):
        super().__init__()
        self.first, self.last, self.step = nn.Linear(4, 6), nn.Linear(6, 2), step

    def forward(self, x):
        return self.last(self.step(self.first(x)))


class Square(torch.autograd.Function):
    """A square, and its derivative."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, *grads):
        return 2 * ctx.saved_tensors[0] * grads[0]


@pytest.mark.parametrize("count", [3, 8])
def test_a_model_that_takes_no_empty_slot_is_checked(reference, count):
    """It picks rows by a mark, of which an empty slot has none."""

    def marked(m, x):
        return m.layer(x[..., 1:][x[..., 0] > 0])

    model = reference.Apply(marked, layer=nn.Linear(2, 3))
    x, y = torch.randn(count, 4, 3), torch.arange(count) % 3
    x[..., 0] = torch.eye(4)[torch.arange(count) % 4] - 0.5
    PerSampleKernel(FlatModel(model), cross_entropy).verify(x, y)


def test_a_correct_custom_derivative_is_accepted(reference, monkeypatch):
    x, y = reference.data(5, 4), torch.arange(5) % 2
    kernel = PerSampleKernel(FlatModel(Stepped(Square.apply).double()), cross_entropy)
    kernel.verify(x, y)
    right = kernel._passes.gradients

    def turned(x, y):
        count = int(x.any(1).sum())  # empty slots come last, and hold zeros
        return right(torch.cat([x[:count].flip(0), x[count:]]), y)

    monkeypatch.setattr(kernel._passes, "gradients", turned)
    with pytest.raises(ModelError, match="mixes the records"):
        kernel.verify(x, y)


def test_a_wrong_derivative_is_found_and_the_advice_is_exact(reference):
    x, y = reference.data(5, 4), torch.arange(5) % 2
    torch.manual_seed(0)
    own = Stepped(Step.apply).double()
    with pytest.raises(ModelError, match=r"autograd\.Function .*detach"):
        PerSampleKernel(FlatModel(own), cross_entropy).verify(x, y)
    advised = Stepped(lambda h: h + (h.sign() - h).detach()).double()
    advised.load_state_dict(own.state_dict())
    kernel = PerSampleKernel(FlatModel(advised), cross_entropy)
    kernel.verify(x, y)
    loss = cross_entropy(own(x), y).sum()
    expected = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, [*own.parameters()])])
    torch.testing.assert_close(kernel.clipped_sum(x, y, 1e6), expected)


@pytest.mark.parametrize("way", ["dense", "graph"])
def test_verify_tries_every_way_that_a_batch_may_take(reference, way, monkeypatch):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x, y = reference.data(5, 4), torch.arange(5) % 2
    kernel = reference.forced(way, model, cross_entropy)
    kernel.verify(x, y)
    right = kernel._passes.gradients
    monkeypatch.setattr(kernel._passes, "gradients", lambda x, y: right(x.flip(0), y))
    with pytest.raises(ModelError, match="mixes the records"):
        kernel.verify(x, y)


class Counted:
    """A kernel's sums that are right, but for record `wrong`, of which `part` is another's."""

    def __init__(self, kernel, wrong=None, part=0.0):
        self.kernel, self.model, self.loss = kernel, kernel.model, kernel.loss
        self.wrong, self.part = wrong, part
        self.sums, self.gradients = [], []

    def summed(self, x, y, clip, w):
        self.sums.append(len(x))
        rows = self.kernel.alone(x, y)
        if self.wrong is not None and self.wrong < len(x):
            rows[self.wrong] += self.part * rows[(self.wrong + 1) % len(x)]
        return (torch.minimum(w, clip / rows.norm(dim=1)) @ rows).clone()

    def alone(self, x, y):
        self.gradients.append(len(x))
        return self.kernel.alone(x, y)


@pytest.mark.parametrize("records", [3, 4, 60])
def test_verify_takes_the_time_and_memory_of_a_few_steps(reference, records):
    x, y = reference.data(records, 4), torch.arange(records) % 2
    tried = Counted(PerSampleKernel(FlatModel(nn.Linear(4, 2).double()), cross_entropy))
    check_separation(tried, x, y)
    assert len(tried.sums) <= 6
    assert sum(tried.sums) <= 40
    assert max(tried.gradients) == 1
    assert len(tried.gradients) <= 10


@pytest.mark.parametrize("part", [0.01, 1e-6])
@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_verify_finds_a_little_of_one_record_in_another(reference, wrong, part):
    x, y = reference.data(4, 4), torch.arange(4) % 2
    kernel = PerSampleKernel(FlatModel(nn.Linear(4, 2).double()), cross_entropy)
    with pytest.raises(ModelError, match="mixes the records"):
        check_separation(Counted(kernel, wrong, part), x, y)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda summed, x, y, clip, w: summed(x, y, math.inf, w),
        lambda summed, x, y, clip, w: summed(x, y, clip, w if len(x) <= 4 else w.flip(0)),
    ],
    ids=["unclipped", "turned in a larger batch"],
)
def test_verify_finds_what_only_a_large_clipped_sum_shows(reference, wrong):
    x, y = reference.data(4, 4), torch.arange(4) % 2
    tried = Counted(PerSampleKernel(FlatModel(nn.Linear(4, 2).double()), cross_entropy))
    tried.summed = partial(wrong, tried.summed)
    with pytest.raises(ModelError, match="mixes the records"):
        check_separation(tried, x, y)


def test_gradients_beyond_float32_are_accepted_in_float64(reference):
    x, y = 1e40 * reference.data(4, 4), torch.arange(4) % 2
    kernel = PerSampleKernel(FlatModel(nn.Linear(4, 2).double()), cross_entropy)
    check_separation(Counted(kernel), x, y)


def test_verify_says_in_the_log_that_it_is_at_work(reference, monkeypatch, caplog):
    said = threading.Event()

    def slow(x):
        assert said.wait(60)
        return x

    monkeypatch.setattr(independence, "_PATIENCE", 0.0)

    def heard(record):
        if "is tried on made-up records" in record.getMessage():
            said.set()

    monkeypatch.setattr(caplog.handler, "emit", heard)
    with caplog.at_level("INFO", "fedpact"):
        kernel = PerSampleKernel(FlatModel(Apply(after=slow).double()), squared_error)
        kernel.verify(reference.data(3, 4), reference.data(3, 4, seed=1))
    assert said.is_set()


def test_rounding_in_a_model_is_found():
    class Rounding(Apply):
        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return super().forward(x).float()

    with pytest.raises(ModelError, match=r"may round, as in torch\.autocast"):
        verify(Rounding(), dtype=torch.float32)
