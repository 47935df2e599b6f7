"""Traces serve every model of their code and form, and no other."""

import math
import threading

import pytest
import torch
from tests.per_sample.small import off_by
from torch import nn

from fedpact.common.errors import ModelError
from fedpact.common.params import FlatModel
from fedpact.common.user_code import digest_of_form
from fedpact.per_sample.kernel import PerSampleKernel
from fedpact.per_sample.layout import Placement
from fedpact.per_sample.tracing import export

SLOPE = 2.0


class Net(nn.Module):
    """Its outputs follow from weights, a buffer, a tensor and numbers of its own, and a global."""

    def __init__(self, factor=1.0, shift=0.0, curve=torch.tanh):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3)
        self.register_buffer("scale", torch.rand(6))
        self.factor, self.shift, self.curve = factor, torch.full((3,), shift), curve

    def forward(self, x):
        h = self.drop(self.curve(self.first(x)) * self.scale)
        return SLOPE * self.factor * self.last(h) + self.shift


X, Y = torch.randn(7, 4), torch.arange(7) % 3


def check(model, loss=off_by):
    """Compare the kernel's sum with autograd's; return how many traces were added to the store."""
    before = len(export._traces)
    kernel = PerSampleKernel(FlatModel(model), loss)
    total = kernel.clipped_sum(X, Y, math.inf, layout=Placement(length=8))
    assert kernel.way(X, Y) == "graph"
    assert torch.allclose(total, kernel.alone(X, Y).sum(0), atol=1e-5)
    return len(export._traces) - before


@pytest.fixture(autouse=True)
def no_traces(monkeypatch):
    monkeypatch.setattr(export, "_traces", type(export._traces)())


def test_models_of_one_form_share_a_trace_and_keep_their_weights():
    assert [check(Net().eval()) for _ in range(3)] == [1, 0, 0]


def test_values_that_a_model_reads_change_its_digest():
    check(Net().eval())
    for options in (
        {"factor": 2.0}, {"shift": 1.0}, {"curve": torch.sin}, {"curve": lambda h: h * h},
    ):  # fmt: skip
        assert check(Net(**options).eval()) == 1


def test_undecidable_models_are_traced_again():
    model = Net().eval()
    model.lock = threading.Lock()
    assert check(model) == 0
    assert check(model) == 0
    assert digest_of_form(model) is None


def test_a_global_that_a_model_reads_changes_its_digest(monkeypatch):
    check(Net().eval())
    monkeypatch.setitem(globals(), "SLOPE", 3.0)
    assert check(Net().eval()) == 1


def test_closure_loss_and_frozen_layer_change_the_digest():
    def net(k):
        return Net(curve=lambda h: k * torch.tanh(h)).eval()

    assert [check(net(k)) for k in (1.0, 1.0, 2.0)] == [1, 0, 1]
    assert check(net(1.0), lambda outputs, y: 2 * off_by(outputs, y)) == 1
    frozen = net(1.0)
    frozen.first.requires_grad_(False)
    assert check(frozen) == 1
    shared = net(1.0)
    shared.first.bias = nn.Parameter(shared.first.bias[:6].detach())
    assert check(shared) == 0


def test_tied_weights_tell_a_model_from_one_of_the_same_shapes():
    def net(tied):
        layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Softsign())
        if tied:
            layers[2].weight = layers[0].weight
        return layers

    assert [check(net(tied)) for tied in (False, True, True)] == [1, 1, 0]


def test_training_and_recurrent_layers_have_traces_of_their_own():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.last = nn.LSTM(1, 5, batch_first=True), nn.Linear(5, 3)

        def forward(self, x):
            return self.last(self.lstm(x[:, :, None])[0][:, -1])

    assert [check(Recurrent()) for _ in range(2)] == [1, 0]
    kernel = PerSampleKernel(FlatModel(Net()), off_by)
    before = len(export._traces)
    first = kernel.losses(X, Y)
    kernel.seed(lambda: 1)
    assert not torch.equal(kernel.losses(X, Y), first)
    kernel.model.module.eval()
    assert torch.equal(kernel.losses(X, Y), kernel.losses(X, Y))
    assert len(export._traces) - before == 2


def test_the_reason_for_a_missing_trace_is_kept():
    class Branching(Net):
        def forward(self, x):
            return super().forward(x if x.sum() > 0 else -x)

    before, told = len(export._traces), []
    for _ in range(2):
        with pytest.raises(ModelError, match="a branch on a value, or a number taken") as error:
            PerSampleKernel(FlatModel(Branching().eval()), off_by).clipped_sum(X, Y, 1.0)
        told.append(str(error.value))
    assert told[0] == told[1]
    assert "test_export.py, line" in told[0]
    assert len(export._traces) - before == 2  # of any batch, and of one


class Hooked(nn.Module):
    """Puts a hook on a layer in its first pass, as transformers does to collect hidden states."""

    def __init__(self):
        super().__init__()
        self.layer, self.hooked = nn.Linear(4, 3), False

    def forward(self, x):
        if not self.hooked:
            self.hooked = True
            self.layer.register_forward_hook(lambda layer, given, found: 2 * found)
        return self.layer(x)


def test_a_hook_that_a_trace_puts_there_is_taken_away():
    check(Hooked())
