"""Modules without a rule: units, their promotion, recurrence, attention, random units."""

import logging
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedpact.losses import squared_error
from fedpact.params import FlatModel
from fedpact.persample import fallback, norms
from fedpact.persample.kernel import PerSampleKernel


class Block(nn.Module):
    """Attention by hand, with position embeddings as parameters of its own."""

    def __init__(self, length=4, width=6, entries=7):
        super().__init__()
        self.tokens = nn.Embedding(entries, width)
        self.positions = nn.Parameter(torch.randn(length, width))
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out = nn.Sequential(nn.Linear(width, width), nn.PReLU())  # a unit within the unit
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        h = self.tokens(x) + self.positions
        q, k, v = self.qkv(self.norm(h)).chunk(3, -1)
        h = h + self.out(torch.softmax(q @ k.mT, -1) @ v)
        return self.head(h.mean(1))


def test_a_transformer_like_block_with_parameters_of_its_own(reference):
    x = torch.randint(0, 7, (5, 4), generator=torch.Generator().manual_seed(1))
    reference.check_structure(Block(), x)


def test_a_unit_among_layers_is_announced_once(reference, caplog, monkeypatch):
    monkeypatch.setattr(fallback, "_announced", set())
    model = nn.Sequential(nn.Linear(4, 4), reference.Shift(4), nn.Linear(4, 2))
    with caplog.at_level(logging.INFO, logger="fedpact"):
        assert reference.units(reference.check_structure(model)) == {"1"}
    assert [r.message for r in caplog.records] == [
        "Shift (1) has no gradient rule: vmap replays it"
    ]


def test_first_units_and_units_that_return_their_input(reference):
    class Maybe(reference.Shift):
        def forward(self, x):
            return x

    reference.check_structure(nn.Sequential(reference.Shift(4), nn.Tanh(), nn.Linear(4, 2)))
    model = nn.Sequential(Maybe(4), nn.Linear(4, 2))
    x = reference.data(5, 4)
    reference.check_structure(model, x, rows="loop")
    assert not x.requires_grad


def test_units_whose_gradients_do_not_fit_in_memory(reference, monkeypatch):
    monkeypatch.setattr(norms, "KEEP_BYTES", 0)
    x = torch.randint(0, 7, (5, 4), generator=torch.Generator().manual_seed(1))
    reference.check_structure(Block(), x)


def test_a_unit_called_with_keywords_and_constants(reference):
    class Power(reference.Shift):
        def forward(self, x, exponent, *, other, flag=None):
            return super().forward(x) ** exponent + other * self.scale

    def call(m, x):
        return m.power(x, 2, other=torch.tanh(x), flag=None)

    kernel = reference.check_structure(reference.Apply(call, power=Power(4)))
    assert reference.units(kernel) == {"power"}


def test_a_unit_without_a_batch_is_promoted(reference):
    def shifted(m, x):
        return m.inner(x) + 1

    class Table(reference.Shift):
        def forward(self):
            return self.shift

    inner = reference.Apply(
        lambda m, x: m.linear(x) * m.table(), linear=nn.Linear(4, 4), table=Table(4)
    )
    kernel = reference.check_structure(reference.Apply(shifted, inner=inner), rows="loop")
    assert reference.units(kernel) == {"inner"}


def test_a_unit_behind_a_transposition_is_promoted_before_a_batch_is_as_long(reference):
    # [B, T, D] -> [T, B, D]: at B = T = 3 the shapes alone tell nothing, at B = 2 they do.
    inner = reference.Apply(lambda m, x: m.unit(x.mT.contiguous()).mT, unit=reference.Shift(1))
    x, y = reference.data(3, 3), reference.data(3, 3)
    kernel = PerSampleKernel(FlatModel(inner.double()), squared_error)
    rows = reference.per_sample_loop(inner, squared_error, x, y)
    kernel.verify(x, y)
    assert reference.units(kernel) == {""}
    assert reference.error(kernel.clipped_sum(x, y, 0.1), reference.clipped(rows, 0.1)) < 1e-10


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_recurrent_layer_in_a_wrapper(reference, kind, caplog, monkeypatch):
    monkeypatch.setattr(fallback, "_announced", set())

    def last(m, x):
        return m.cell(x)[0][:, -1]

    wrapped = reference.Apply(last, cell=kind(4, 3, batch_first=True))
    with caplog.at_level(logging.INFO, logger="fedpact"):
        model = nn.Sequential(nn.Linear(4, 4), wrapped, nn.Linear(3, 2))
        kernel = reference.check_structure(model, reference.data(4, 5, 4), rows="loop")
    assert reference.units(kernel) == {"1"}
    assert [(r.levelname, r.message.split(" ")[0]) for r in caplog.records] == [
        ("WARNING", "Apply")
    ]


def test_multihead_attention_and_its_encoder_layer(reference):
    def attend(m, x):
        return m.attention(x, x, x, need_weights=False)[0].mean(1)

    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    reference.check_structure(
        nn.Sequential(reference.Apply(attend, attention=attention)),
        reference.data(3, 5, 4),
        rows="loop",
    )
    encoder = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    model = nn.Sequential(encoder, nn.Linear(4, 2))
    assert reference.units(
        reference.check_structure(model, reference.data(3, 5, 4), rows="loop")
    ) == {"0"}


def test_parametrised_layers_go_through_the_fallback(reference):
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 2))
    assert reference.units(reference.check_structure(model)) == {"0"}


def test_a_unit_that_vmap_refuses_is_looped(reference):
    class Branch(reference.Shift):
        def forward(self, x):
            return super().forward(x) if float(self.scale.detach()) > -9 and x.sum().item() else x

    reference.check_structure(nn.Sequential(Branch(4), nn.Linear(4, 2)), rows="loop")


@pytest.mark.parametrize("recurrent", [True, False])
def test_a_unit_with_dropout_differentiates_the_whole_model_at_once(
    reference, recurrent, caplog, monkeypatch
):
    # With ℓ = Σ outputs the gradient by `scale` is Σ of the unit's dropped input, which the loss
    # itself shows: equal masks forward and backward are seen from (gradient, loss) pairs.
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
            self.cell = nn.GRU(1, 1) if recurrent else None

        def forward(self, x):
            return self.scale * F.dropout(x, 0.5)

    model = FlatModel(Noisy().double())
    kernel = PerSampleKernel(model, lambda out, y: out.flatten(1).sum(1))
    seen: list[torch.Tensor] = []

    def weights(losses):
        seen.append(losses)
        return torch.ones_like(losses)

    x = reference.data(40, 30)
    monkeypatch.setattr(fallback, "_announced", set())
    with caplog.at_level(logging.WARNING, logger="fedpact"):
        total = kernel.clipped_sum(x, torch.zeros(40), math.inf, weights)
    assert bool(caplog.records) == recurrent, "only what vmap cannot batch is looped"
    drawn = torch.cat(seen)
    assert len(drawn) >= 40
    assert math.isclose(float(total[0]), float(drawn[-40:].sum()), rel_tol=1e-12)
    # 30 masked normals agree with their full sum with probability 0.
    assert not torch.isclose(drawn[-40:], x.sum(1)).any()
