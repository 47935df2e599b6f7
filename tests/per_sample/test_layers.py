"""Every layer with a rule against autograd in float64, over shapes, settings and both memory paths.

Tracing a model costs more than running it, so several layers of one kind read the same input.
"""

from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedpact.common.losses import cross_entropy, squared_error
from fedpact.common.params import FlatModel
from fedpact.per_sample import norms
from fedpact.per_sample.kernel import PerSampleKernel, PlainKernel

COMMON = settings(max_examples=2, derandomize=True)
# torch warns of its own copy for padding="same" with an even kernel.
asymmetric = pytest.mark.filterwarnings("ignore:Using padding='same'")
seeds = st.integers(0, 2**16)
few = st.integers(1, 4)
shapes = st.lists(few, max_size=2)


class Scale(nn.Module):
    """Elementwise, with a weight: what follows sees an input that has a gradient."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(1, 1)

    def forward(self, x):
        return self.linear(x.unsqueeze(-1)).squeeze(-1)


class Beside(nn.Module):
    """Layers side by side: one half reads the input, the other what another layer makes of it."""

    def __init__(self, layers, behind):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.first = Scale() if behind else None

    def forward(self, x):
        h = x if self.first is None else self.first(x)
        read = [(h, x)[i % 2] for i in range(len(self.layers))]
        pairs = zip(self.layers, read, strict=True)
        return torch.cat([torch.tanh(layer(v)).flatten(1) for layer, v in pairs], 1)


@contextmanager
def keeping(size):
    """Per-sample gradients are kept up to this size; where it is 0, chunks hold a sample or two."""
    before = norms.KEEP_BYTES, norms.CHUNK_BYTES
    norms.KEEP_BYTES, norms.CHUNK_BYTES = size, norms.CHUNK_BYTES if size else 2000
    try:
        yield
    finally:
        norms.KEEP_BYTES, norms.CHUNK_BYTES = before


def check_layers(reference, layers, x, seed, keep=True):
    """All of them beside each other, by the graph."""
    torch.manual_seed(seed)
    behind = x.is_floating_point()
    if behind:
        x = torch.randn(x.shape, dtype=torch.float64)
    model = Beside(layers, behind).double()
    for p in model.parameters():
        p.data.normal_()
    y = torch.randn_like(model(x).detach())
    rows = reference.per_sample_loop(model, squared_error, x, y)
    with keeping(2**20 if keep else 0):
        reference.check(model, squared_error, x, y, rows=rows, ways=("graph",))


sizes = st.lists(st.tuples(st.integers(1, 24), st.booleans()), min_size=2, max_size=4)


@COMMON
@given(few, shapes, st.integers(1, 24), sizes, st.booleans(), seeds)
def test_linear(reference, batch, positions, inputs, outputs, keep, seed):
    layers = [nn.Linear(inputs, width, bias) for width, bias in outputs]
    check_layers(reference, layers, torch.zeros(batch, *positions, inputs), seed, keep)


@asymmetric
@pytest.mark.parametrize("keep", [True, False])
def test_convolutions_of_every_padding(reference, keep):
    """Settings of a convolution by itself are in test_rules_calls."""
    modes = "zeros", "reflect", "replicate", "circular"
    layers = [nn.Conv2d(3, 4, (2, 3), padding="same", padding_mode=mode) for mode in modes]
    check_layers(reference, layers, torch.zeros(5, 3, 6, 5), 0, keep)


@pytest.mark.parametrize("keep", [True, False])
def test_convolution_with_few_positions_and_many_channels(reference, keep):
    layers = [nn.Conv2d(16, 24, 3, groups=2), nn.Conv2d(16, 24, 3), nn.Conv2d(16, 8, 4)]
    check_layers(reference, layers, torch.zeros(9, 16, 4, 4), 0, keep)


@pytest.mark.parametrize("positions", [2, 9])
def test_few_positions_of_a_wide_layer(reference, positions):
    """2 to 8 of them are measured by Gram matrices, others are not."""
    layers = [nn.Linear(40, 48), nn.Linear(40, 48, bias=False)]
    check_layers(reference, layers, torch.zeros(5, positions, 40), 0)


@COMMON
@given(few, shapes, st.integers(2, 6), st.integers(1, 5), seeds)
def test_embedding(reference, batch, positions, entries, width, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, entries, (batch, *positions), generator=generator)
    layers = [nn.Embedding(entries, width, padding_idx=i) for i in (None, 1, -1)]
    check_layers(reference, layers, x, seed)


def test_embedding_gradients_hold_only_the_rows_read():
    """torch's `sparse`: it says in what form an optimiser is given them, and changes no number."""
    x, y, sums = torch.arange(60).view(12, 5) % 7, torch.arange(12) % 3, []
    for sparse in (False, True):
        torch.manual_seed(0)
        table = nn.Embedding(7, 4, sparse=sparse)
        model = FlatModel(nn.Sequential(table, nn.Flatten(), nn.Linear(20, 3)))
        kernel = PerSampleKernel(model, cross_entropy)
        kernel.verify(x[:4], y[:4])
        plain = PlainKernel(model, cross_entropy).weighted_sum(x, y)
        sums.append((kernel.clipped_sum(x, y, 0.1), kernel.alone(x, y), plain))
    for one, other in zip(*sums, strict=True):
        assert torch.equal(one, other)


@COMMON
@given(few, shapes, st.lists(st.integers(2, 4), min_size=1, max_size=2), seeds)
def test_layer_norm(reference, batch, positions, shape, seed):
    layers = [
        nn.LayerNorm(shape),
        nn.LayerNorm(shape, bias=False),
        nn.LayerNorm(shape, bias=False, eps=1e-2),
        nn.LayerNorm(shape[-1:]),
        nn.LayerNorm(shape, elementwise_affine=False),
        nn.RMSNorm(shape),
    ]
    check_layers(reference, layers, torch.zeros(batch, *positions, *shape), seed)


@COMMON
@given(few, few, few, shapes, seeds)
def test_group_norm(reference, batch, groups, each, positions, seed):
    channels = groups * (each + 1)
    layers = [
        nn.GroupNorm(groups, channels),
        nn.GroupNorm(1, channels, eps=1e-2),
        nn.GroupNorm(groups, channels, affine=False),
    ]
    check_layers(reference, layers, torch.zeros(batch, channels, *positions), seed)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (lambda: nn.Linear(4, 3), (5, 2, 4)),
        (lambda: nn.Conv2d(2, 3, 2), (5, 2, 3, 3)),
        (lambda: nn.GroupNorm(2, 4), (5, 4, 3)),
    ],
)
def test_one_parameter_of_a_layer_may_be_frozen(reference, layer, shape):
    layers = [layer(), layer()]
    layers[0].weight.requires_grad_(False)
    layers[1].bias.requires_grad_(False)
    check_layers(reference, layers, torch.zeros(shape), 0)


@pytest.mark.parametrize(("way", "scale"), [("graph", 1.0), ("graph", 1e4), ("records", 1.0)])
def test_a_gradient_that_cancels_is_not_taken_for_none(reference, way, scale):
    # Positions 1 and 2 have equal inputs and opposite output gradients: G = 0 but for rounding.
    # A norm from rounding alone must not let that rounding be scaled up beyond C.
    signs = torch.tensor([1.0, -1.0]).view(1, 2, 1)
    kernel = reference.forced(
        way,
        nn.Linear(32, 32, bias=False),
        lambda out, y: scale * (out * signs * y[:, None]).sum((1, 2)),
    )
    x = torch.randn(3, 1, 32).expand(3, 2, 32)
    y = torch.randn(3, 32)
    for j in range(3):
        one = kernel.clipped_sum(x[j : j + 1], y[j : j + 1], 1e-3, lambda losses: 1e6 + 0 * losses)
        assert float(one.norm()) <= 1e-3 * (1 + 1e-5)


@pytest.mark.parametrize("apart", [1e-1, 1e-2])
def test_norms_hold_where_positions_nearly_cancel(apart):
    # ‖G‖² is about apart² of its terms: in float32 Gram matrices it would err by 1e-7 / apart².
    kernel = PerSampleKernel(
        FlatModel(nn.Linear(32, 32, bias=False)),
        lambda out, y: (out[:, 0] * y).sum(1) - (out[:, 1] * y).sum(1),
    )
    x, y = torch.randn(1, 1, 32), torch.randn(1, 32)
    both = torch.cat([x, x + apart * torch.randn_like(x)], 1)
    one = kernel.clipped_sum(both, y, 1e-3)
    assert abs(float(one.double().norm()) / 1e-3 - 1) < 1e-5
