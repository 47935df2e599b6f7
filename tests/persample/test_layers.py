"""Every layer's rule against torch.func in float64, over shapes, settings and both memory paths."""

from contextlib import contextmanager

import pytest
import torch
from fedpact.persample.layers import layer_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedpact.losses import squared_error
from fedpact.params import FlatModel
from fedpact.persample import norms
from fedpact.persample.kernel import PerSampleKernel

COMMON = settings(max_examples=30, deadline=None, derandomize=True)
# torch warns of its own copy for padding="same" with an even kernel.
asymmetric = pytest.mark.filterwarnings("ignore:Using padding='same'")
seeds = st.integers(0, 2**16)
few = st.integers(1, 4)


class Scale(nn.Module):
    """Elementwise, with a weight: what follows sees an input that has a gradient."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(1, 1).double()

    def forward(self, x):
        return self.linear(x.unsqueeze(-1)).squeeze(-1)


@contextmanager
def keeping(size):
    """Per-sample gradients are kept up to this size; where it is 0, chunks hold a sample or two."""
    before = norms.KEEP_BYTES, norms.CHUNK_BYTES
    norms.KEEP_BYTES, norms.CHUNK_BYTES = size, norms.CHUNK_BYTES if size else 2000
    try:
        yield
    finally:
        norms.KEEP_BYTES, norms.CHUNK_BYTES = before


def check_layer(reference, layer, x, seed, keep=True):
    """The layer alone (its input has no gradient) and behind another (its input has one)."""
    assert layer_of(layer) is not None, "the layer must be computed by its rule, not the fallback"
    torch.manual_seed(seed)
    for p in layer.parameters():
        p.data = torch.randn_like(p, dtype=torch.float64)
    if x.is_floating_point():
        x = torch.randn(x.shape, dtype=torch.float64)
    models = [nn.Sequential(layer, nn.Tanh(), nn.Flatten())]
    if x.is_floating_point():
        first = Scale()
        models.append(nn.Sequential(first, layer, nn.Tanh(), nn.Flatten()))
    for model in models:
        y = torch.randn_like(model(x).detach())
        # vmap takes 0.2 s for each new shape of a normalisation; ordinary autograd does not.
        normalises = isinstance(layer, (nn.LayerNorm, nn.GroupNorm))
        rows = (reference.per_sample_loop if normalises else reference.per_sample)(
            model, squared_error, x, y
        )
        with keeping(2**20 if keep else 0):
            reference.check(model, squared_error, x, y, rows=rows)
        for p in model.parameters():
            p.requires_grad_(True)


@COMMON
@given(few, st.lists(few, max_size=2), st.integers(1, 24), st.integers(1, 24), st.booleans(), seeds)
def test_linear(reference, batch, positions, inputs, outputs, bias, seed):
    x = torch.zeros(batch, *positions, inputs)
    check_layer(reference, nn.Linear(inputs, outputs, bias), x, seed, keep=seed % 2 == 0)


@st.composite
def convolutions(draw, dimensions):
    groups = draw(st.integers(1, 3))
    channels, filters = groups * draw(st.integers(1, 3)), groups * draw(st.integers(1, 3))
    kernel = [draw(st.integers(1, 3)) for _ in range(dimensions)]
    dilation = [draw(st.integers(1, 2)) for _ in range(dimensions)]
    mode = draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"]))
    padding = draw(st.sampled_from(["same", "valid", "numbers"]))
    stride = [1 if padding == "same" else draw(st.integers(1, 3)) for _ in range(dimensions)]
    if padding == "numbers":
        padding = [draw(st.integers(0, 2)) for _ in range(dimensions)]
    size = [draw(st.integers(5, 8)) for _ in range(dimensions)]
    kind = nn.Conv1d if dimensions == 1 else nn.Conv2d
    layer = kind(
        channels, filters, kernel, stride, padding, dilation, groups, draw(st.booleans()), mode
    )
    return layer, torch.zeros(draw(st.sampled_from([1, 2, 9])), channels, *size)


@asymmetric
@settings(COMMON, max_examples=50)
@given(convolutions(2), seeds, st.booleans())
def test_conv2d(reference, case, seed, keep):
    check_layer(reference, *case, seed, keep)


@asymmetric
@COMMON
@given(convolutions(1), seeds, st.booleans())
def test_conv1d(reference, case, seed, keep):
    check_layer(reference, *case, seed, keep)


def test_convolution_with_few_positions_and_many_channels(reference):
    # 2 T (K + O) < K O: norms from Gram matrices.
    for keep in (True, False):
        layer = nn.Conv2d(16, 24, 3, groups=2)
        check_layer(reference, layer, torch.zeros(9, 16, 4, 4), 0, keep)


@COMMON
@given(few, st.lists(few, max_size=2), st.integers(2, 6), st.integers(1, 5), st.booleans(), seeds)
def test_embedding(reference, batch, positions, entries, width, padded, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, entries, (batch, *positions), generator=generator)
    layer = nn.Embedding(entries, width, padding_idx=1 if padded else None)
    check_layer(reference, layer, x, seed)


@COMMON
@given(few, st.lists(few, max_size=2), st.lists(st.integers(2, 4), min_size=1, max_size=2), seeds)
def test_layer_norm(reference, batch, positions, shape, seed):
    layer = nn.LayerNorm(shape, bias=seed % 2 == 0)
    check_layer(reference, layer, torch.zeros(batch, *positions, *shape), seed)


@COMMON
@given(few, few, few, st.lists(few, max_size=2), seeds)
def test_group_norm(reference, batch, groups, each, positions, seed):
    channels = groups * (each + 1)
    layer = nn.GroupNorm(groups, channels)
    check_layer(reference, layer, torch.zeros(batch, channels, *positions), seed)


def test_normalisation_without_weights_passes_gradients_through(reference):
    model = nn.Sequential(
        nn.Linear(4, 6), nn.LayerNorm(6, elementwise_affine=False), nn.GroupNorm(2, 6, affine=False)
    ).double()
    x, y = torch.randn(3, 4).double(), torch.randn(3, 6).double()
    reference.check(model, squared_error, x, y)


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(4, 3), (5, 4)),
        (nn.Linear(4, 3), (5, 2, 4)),
        (nn.Conv1d(4, 3, 2), (5, 4, 6)),
        (nn.LayerNorm(4), (5, 2, 4)),
        (nn.GroupNorm(2, 4), (5, 4, 3)),
    ],
)
def test_one_parameter_of_a_layer_may_be_frozen(reference, layer, shape, name):
    model = nn.Sequential(nn.Linear(shape[-1], shape[-1]), layer, nn.Flatten()).double()
    for p in layer.parameters():
        p.requires_grad_(True)
    getattr(layer, name).requires_grad_(False)
    x = torch.randn(shape).double()
    reference.check(model, squared_error, x, torch.randn_like(model(x)).detach())


@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_a_gradient_that_cancels_is_not_taken_for_none(scale):
    # Positions 1 and 2 have equal inputs and opposite output gradients: G = 0 but for rounding.
    # A norm from rounding alone must not let that rounding be scaled up beyond C.
    layer = nn.Linear(32, 32, bias=False)
    signs = torch.tensor([1.0, -1.0]).view(1, 2, 1)
    kernel = PerSampleKernel(
        FlatModel(layer), lambda out, y: scale * (out * signs * y[:, None]).sum((1, 2))
    )
    x = torch.randn(3, 1, 32).expand(3, 2, 32)
    y = torch.randn(3, 32)
    for j in range(3):
        one = kernel.clipped_sum(x[j : j + 1], y[j : j + 1], 1e-3, lambda losses: 1e6 + 0 * losses)
        assert float(one.norm()) <= 1e-3 * (1 + 1e-5)


@pytest.mark.parametrize("apart", [1e-1, 1e-2])
def test_norms_hold_where_positions_nearly_cancel(apart):
    # ‖G‖² is about apart² of its terms: in float32 Gram matrices it would err by 1e-7 / apart².
    torch.manual_seed(0)
    kernel = PerSampleKernel(
        FlatModel(nn.Linear(32, 32, bias=False)),
        lambda out, y: (out[:, 0] * y).sum(1) - (out[:, 1] * y).sum(1),
    )
    x, y = torch.randn(1, 1, 32), torch.randn(1, 32)
    both = torch.cat([x, x + apart * torch.randn_like(x)], 1)
    one = kernel.clipped_sum(both, y, 1e-3)
    assert abs(float(one.double().norm()) / 1e-3 - 1) < 1e-5


def test_subclasses_and_changed_layers_have_no_rule():
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    replaced = nn.Linear(2, 2)
    replaced.forward = lambda x: x  # type: ignore[method-assign]
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    assert layer_of(nn.Linear(2, 2)) is not None
    for layer in (Doubled(2, 2), replaced, normed, nn.Conv3d(1, 1, 1), nn.Bilinear(1, 1, 1)):
        assert layer_of(layer) is None
