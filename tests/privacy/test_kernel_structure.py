"""Models with structure: repeated and tied modules, in-place operations, units, recurrence."""

import logging
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedpact.errors import ModelError
from fedpact.losses import cross_entropy, squared_error
from fedpact.params import FlatModel
from fedpact.privacy import fallback, parts
from fedpact.privacy.kernel import PerSampleKernel


class Apply(nn.Module):
    """A module that runs a given function of its submodules."""

    def __init__(self, function, **modules):
        super().__init__()
        self.function = function
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x):
        return self.function(self, x)


class Shift(nn.Module):
    """A module with parameters of its own, unknown to the rules."""

    def __init__(self, *shape):
        super().__init__()
        self.shift = nn.Parameter(torch.randn(shape))
        self.scale = nn.Parameter(torch.randn(()))

    def forward(self, x):
        return x * self.scale + self.shift


class Block(nn.Module):
    """Attention by hand, with position embeddings as parameters of its own."""

    def __init__(self, length=4, width=6, entries=7):
        super().__init__()
        self.tokens = nn.Embedding(entries, width)
        self.positions = nn.Parameter(torch.randn(length, width))
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            Shift(width),
        )
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        h = self.tokens(x) + self.positions
        q, k, v = self.qkv(self.norm(h)).chunk(3, -1)
        h = h + self.out(torch.softmax(q @ k.mT, -1) @ v)
        return self.head(h.mean(1))


def data(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def check(reference, module, x=None, outputs=None, rows=None):
    module = module.double()
    x = data(5, 4) if x is None else x
    with torch.no_grad():
        y = torch.randn_like(module(x))
    if rows == "loop":
        rows = reference.per_sample_loop(module, squared_error, x, y)
    return reference.check(module, squared_error, x, y, rows=rows)


def units(kernel):
    return {o.path for o in kernel._cover.owners if o.layer is None}


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(4, 4), (5, 4)),
        (nn.Linear(4, 4), (5, 3, 4)),
        (nn.Conv2d(2, 2, 3, padding=1), (5, 2, 6, 5)),
        (nn.LayerNorm(4), (5, 3, 4)),
        (nn.GroupNorm(2, 4), (5, 4, 3)),
        (Shift(4), (5, 4)),
    ],
)
def test_a_module_called_several_times(reference, layer, shape):
    def thrice(m, x):
        h = torch.tanh(m.layer(x))
        return torch.tanh(m.layer(torch.tanh(m.layer(h) + h)))

    check(reference, Apply(thrice, layer=layer), data(*shape))


def test_an_embedding_read_at_several_places(reference):
    def twice(m, x):
        return torch.cat([m.table(x[:, :2]).flatten(1), m.table(x[:, 1:]).flatten(1)], 1)

    x = torch.randint(0, 5, (6, 4), generator=torch.Generator().manual_seed(0))
    check(reference, Apply(twice, table=nn.Embedding(5, 3)), x)


def test_a_convolution_at_two_sizes(reference):
    def both(m, x):
        return m.conv(x).mean((2, 3)) + torch.tanh(m.conv(x[:, :, ::2])).mean((2, 3))

    check(reference, Apply(both, conv=nn.Conv2d(2, 3, 3)), data(5, 2, 8, 8))


def test_one_module_at_two_paths_keeps_its_rule(reference):
    layer = nn.Linear(4, 4)
    kernel = check(reference, nn.Sequential(layer, nn.Tanh(), nn.Sequential(layer)))
    assert not units(kernel)


def test_tied_weights_are_exact_through_their_common_ancestor(reference):
    encoder, decoder = nn.Linear(4, 4), nn.Linear(4, 4)
    decoder.weight = encoder.weight
    inner = nn.Sequential(encoder, nn.Tanh(), nn.Sequential(decoder))
    kernel = check(reference, nn.Sequential(nn.Linear(4, 4), inner, nn.Linear(4, 2)))
    assert units(kernel) == {"1"}


def test_relu_in_place_behind_first_and_later_layers(reference):
    relu = nn.ReLU(inplace=True)
    model = nn.Sequential(nn.Linear(4, 8), relu, nn.Linear(8, 8), relu, nn.Linear(8, 2))
    check(reference, model)
    images = nn.Sequential(
        nn.Conv2d(1, 3, 3), relu, nn.Conv2d(3, 3, 3), relu, nn.GroupNorm(1, 3), relu, nn.Flatten()
    )
    check(reference, images, data(5, 1, 7, 7))
    check(reference, nn.Sequential(nn.Linear(4, 8), relu, nn.Linear(8, 2)), data(5, 3, 4))


def test_residual_connections_in_place(reference):
    def residual(m, x):
        h = m.first(x)
        h += torch.tanh(x)  # the output of a layer, which nothing has read
        z = m.second(torch.tanh(h))
        z += h
        z[:, 1:] *= 2
        return z

    check(reference, Apply(residual, first=nn.Linear(4, 4), second=nn.Linear(4, 4)))


def test_an_input_changed_in_place_after_it_was_read_is_an_error():
    def wrong(m, x):
        h = torch.tanh(x)
        z = m.layer(h)
        h += 1
        return z + h

    for layer in (nn.Linear(4, 4), Shift(4)):
        kernel = PerSampleKernel(FlatModel(Apply(wrong, layer=layer).double()), squared_error)
        with pytest.raises(ModelError, match=r"'layer' was changed in place"):
            kernel.clipped_sum(data(3, 4), data(3, 4), 1.0)


def test_frozen_layers_pass_gradients_on(reference):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), Shift(4))
    model[1].requires_grad_(False)
    model[4].scale.requires_grad_(False)
    kernel = check(reference, model)
    assert kernel.clipped_sum(data(2, 4), data(2, 4), 1.0).numel() == 20 + 20 + 4


def test_what_no_loss_depends_on_adds_zeros(reference):
    def ignoring(m, x):
        m.unused(x)
        with torch.no_grad():
            m.still(x)
        return m.used(x)

    model = Apply(ignoring, unused=nn.Linear(4, 4), used=nn.Linear(4, 2), still=Shift(4))
    check(reference, model, rows="loop")


def test_hooks_of_the_model_are_respected(reference):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    model[0].register_forward_hook(lambda _m, _args, output: output * 3)
    model[2].register_forward_pre_hook(lambda _m, args: (args[0] + 1,))
    check(reference, model)


def test_a_transformer_like_block_with_parameters_of_its_own(reference):
    x = torch.randint(0, 7, (5, 4), generator=torch.Generator().manual_seed(1))
    check(reference, Block(), x)


def test_a_unit_among_layers_is_announced_once(reference, caplog, monkeypatch):
    monkeypatch.setattr(fallback, "_announced", set())
    model = nn.Sequential(nn.Linear(4, 4), Shift(4), nn.Linear(4, 2))
    with caplog.at_level(logging.INFO, logger="fedpact"):
        assert units(check(reference, model)) == {"1"}
    assert [r.message for r in caplog.records] == [
        "Shift (1) has no gradient rule: vmap replays it"
    ]


def test_first_units_and_units_that_return_their_input(reference):
    class Maybe(Shift):
        def forward(self, x):
            return x

    check(reference, nn.Sequential(Shift(4), nn.Tanh(), nn.Linear(4, 2)))
    model = nn.Sequential(Maybe(4), nn.Linear(4, 2))
    x = data(5, 4)
    check(reference, model, x, rows="loop")
    assert not x.requires_grad


def test_units_whose_gradients_do_not_fit_in_memory(reference, monkeypatch):
    monkeypatch.setattr(parts, "KEEP_BYTES", 0)
    x = torch.randint(0, 7, (5, 4), generator=torch.Generator().manual_seed(1))
    check(reference, Block(), x)


def test_a_unit_called_with_keywords_and_constants(reference):
    class Power(Shift):
        def forward(self, x, exponent, *, other, flag=None):
            return super().forward(x) ** exponent + other * self.scale

    def call(m, x):
        return m.power(x, 2, other=torch.tanh(x), flag=None)

    kernel = check(reference, Apply(call, power=Power(4)))
    assert units(kernel) == {"power"}


def test_a_unit_without_a_batch_is_promoted(reference):
    def shifted(m, x):
        return m.inner(x) + 1

    class Table(Shift):
        def forward(self):
            return self.shift

    inner = Apply(lambda m, x: m.linear(x) * m.table(), linear=nn.Linear(4, 4), table=Table(4))
    kernel = check(reference, Apply(shifted, inner=inner), rows="loop")
    assert units(kernel) == {"inner"}


def test_a_unit_behind_a_transposition_is_promoted_before_a_batch_is_as_long(reference):
    # [B, T, D] -> [T, B, D]: at B = T = 3 the shapes alone tell nothing, at B = 2 they do.
    inner = Apply(lambda m, x: m.unit(x.mT.contiguous()).mT, unit=Shift(1))
    x, y = data(3, 3), data(3, 3)
    kernel = PerSampleKernel(FlatModel(inner.double()), squared_error)
    rows = reference.per_sample_loop(inner, squared_error, x, y)
    kernel.verify(x, y)
    assert units(kernel) == {""}
    assert reference.error(kernel.clipped_sum(x, y, 0.1), reference.clipped(rows, 0.1)) < 1e-10


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_recurrent_layer_in_a_wrapper(reference, kind, caplog, monkeypatch):
    monkeypatch.setattr(fallback, "_announced", set())

    def last(m, x):
        return m.cell(x)[0][:, -1]

    wrapped = Apply(last, cell=kind(4, 3, batch_first=True))
    with caplog.at_level(logging.INFO, logger="fedpact"):
        model = nn.Sequential(nn.Linear(4, 4), wrapped, nn.Linear(3, 2))
        kernel = check(reference, model, data(4, 5, 4), rows="loop")
    assert units(kernel) == {"1"}
    assert [(r.levelname, r.message.split(" ")[0]) for r in caplog.records] == [
        ("WARNING", "Apply")
    ]


def test_multihead_attention_and_its_encoder_layer(reference):
    def attend(m, x):
        return m.attention(x, x, x, need_weights=False)[0].mean(1)

    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    check(reference, nn.Sequential(Apply(attend, attention=attention)), data(3, 5, 4), rows="loop")
    encoder = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    model = nn.Sequential(encoder, nn.Linear(4, 2))
    assert units(check(reference, model, data(3, 5, 4), rows="loop")) == {"0"}


def test_parametrised_layers_go_through_the_fallback(reference):
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 2))
    assert units(check(reference, model)) == {"0"}


def test_a_unit_that_vmap_refuses_is_looped(reference):
    class Branch(Shift):
        def forward(self, x):
            return super().forward(x) if float(self.scale.detach()) > -9 and x.sum().item() else x

    check(reference, nn.Sequential(Branch(4), nn.Linear(4, 2)), rows="loop")


@pytest.mark.parametrize("recurrent", [True, False])
def test_a_unit_with_dropout_differentiates_the_whole_model_at_once(recurrent, caplog, monkeypatch):
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

    x = data(40, 30)
    monkeypatch.setattr(fallback, "_announced", set())
    with caplog.at_level(logging.WARNING, logger="fedpact"):
        total = kernel.clipped_sum(x, torch.zeros(40), math.inf, weights)
    assert bool(caplog.records) == recurrent, "only what vmap cannot batch is looped"
    drawn = torch.cat(seen)
    assert len(drawn) >= 40
    assert math.isclose(float(total[0]), float(drawn[-40:].sum()), rel_tol=1e-12)
    # 30 masked normals agree with their full sum with probability 0.
    assert not torch.isclose(drawn[-40:], x.sum(1)).any()


def test_dropout_layers_outside_units_are_part_of_the_same_pass():
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(30, 1, bias=False)).double()
    kernel = PerSampleKernel(FlatModel(model), lambda out, y: out[:, 0])
    seen: list[torch.Tensor] = []
    with torch.no_grad():
        model[1].weight.fill_(1)

    def weights(losses):
        seen.append(losses)
        return torch.ones_like(losses)

    total = kernel.clipped_sum(data(8, 30), torch.zeros(8), math.inf, weights)
    assert math.isclose(float(total.sum()), float(seen[0].sum()), rel_tol=1e-12)


def test_sequence_losses_and_outputs(reference):
    x = torch.randint(0, 7, (5, 4), generator=torch.Generator().manual_seed(1))
    model = nn.Sequential(nn.Embedding(7, 6), nn.LayerNorm(6), nn.Linear(6, 7)).double()
    reference.check(model, cross_entropy, x, x.flip(1))
