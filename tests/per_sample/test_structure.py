"""Models with structure: repeated and tied modules, in-place operations, frozen layers, hooks.

Each is checked by every way that it takes; see `check` in tests/conftest.py.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedpact.common.errors import ModelError
from fedpact.common.losses import cross_entropy, squared_error
from fedpact.common.params import FlatModel
from fedpact.per_sample import norms
from fedpact.per_sample.kernel import PerSampleKernel


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv2d(2, 2, 3, padding=1), (5, 2, 6, 5)),
        (nn.LayerNorm(4), (5, 3, 4)),
        (None, (5, 4)),
    ],
)
def test_a_module_called_several_times(reference, layer, shape):
    layer = layer or reference.Shift(4)

    def thrice(m, x):
        h = torch.tanh(m.layer(x))
        return torch.tanh(m.layer(torch.tanh(m.layer(h) + h)))

    reference.check_structure(reference.Apply(thrice, layer=layer), reference.data(*shape))


def test_a_convolution_at_two_sizes(reference):
    def both(m, x):
        return m.conv(x).mean((2, 3)) + torch.tanh(m.conv(x[:, :, ::2])).mean((2, 3))

    reference.check_structure(
        reference.Apply(both, conv=nn.Conv2d(2, 3, 3)), reference.data(5, 2, 8, 8)
    )


def test_relu_in_place_behind_first_and_later_layers(reference):
    relu = nn.ReLU(inplace=True)
    model = nn.Sequential(nn.Linear(4, 8), relu, nn.Linear(8, 8), relu, nn.Linear(8, 2))
    reference.check_structure(model)
    images = nn.Sequential(
        nn.Conv2d(1, 3, 3), relu, nn.Conv2d(3, 3, 3), relu, nn.GroupNorm(1, 3), relu, nn.Flatten()
    )
    reference.check_structure(images, reference.data(5, 1, 7, 7))

    def overwritten(m, x):
        # Of three dimensions, a linear layer's output is a view: overwritten, it is another tensor.
        return torch.relu_(m.second(torch.tanh(m.first(x))))

    model = reference.Apply(overwritten, first=nn.Linear(4, 8), second=nn.Linear(8, 2))
    reference.check_structure(model, reference.data(5, 3, 4))


def test_residual_connections_in_place(reference):
    def residual(m, x):
        h = m.first(x)
        h += torch.tanh(x)
        z = m.second(torch.tanh(h))
        z += h
        z.mul_(2)
        z[:, 1:] *= 2
        return z

    model = reference.Apply(residual, first=nn.Linear(4, 4), second=nn.Linear(4, 4))
    reference.check_structure(model)


def test_the_output_of_dropout_may_be_modified(reference):
    """It is dropout's own input where nothing is dropped, so that is written to as well."""

    def residual(m, x):
        h = m.layer(x)
        z = F.dropout(h, 0.0)
        z += torch.tanh(x)
        z = F.dropout(z, 0.5, training=False)
        z *= 2
        return z * h.sin()

    reference.check_structure(reference.Apply(residual, layer=nn.Linear(4, 4)))


def test_an_input_changed_in_place_after_it_was_read(reference):
    """Which autograd refuses; the gradient is that of the same model without writing over it."""

    def overwriting(m, x):
        h = torch.tanh(x)
        z = m.layer(h)
        h += 1
        return z + h

    def without(m, x):
        h = torch.tanh(x)
        return m.layer(h) + (h + 1)

    x, y, layer = reference.data(3, 4), reference.data(3, 4, seed=1), nn.Linear(4, 4)
    model = reference.Apply(overwriting, layer=layer).double()
    same = reference.Apply(without, layer=layer)
    rows = reference.per_sample_loop(same, squared_error, x, y)
    reference.check(model, squared_error, x, y, rows=rows)


def test_parameters_without_a_loss_add_zeros(reference):
    def ignoring(m, x):
        m.unused(x)
        with torch.no_grad():
            h = m.still(x)
        return m.used(x) + m.still(x).detach() + h

    model = reference.Apply(
        ignoring, unused=nn.Linear(4, 4), used=nn.Linear(4, 4), still=reference.Shift(4)
    )
    reference.check_structure(model, rows="loop")


@pytest.mark.parametrize("way", ["graph", "records"])
def test_a_loss_that_ignores_the_model_adds_zeros(reference, way):
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU()).double()
    kernel = reference.forced(way, model, lambda out, y: y.sum(1))
    x, y = reference.data(5, 4), reference.data(5, 3, seed=1)
    assert torch.equal(kernel.clipped_sum(x, y, 1.0), torch.zeros(15).double())


def test_sequence_losses_and_outputs(reference):
    x = torch.randint(0, 7, (5, 4), generator=torch.Generator().manual_seed(1))
    model = nn.Sequential(nn.Embedding(7, 6), nn.LayerNorm(6), nn.Linear(6, 7)).double()
    reference.check(model, cross_entropy, x, x.flip(1))


def test_a_model_that_views_its_images_in_their_usual_layout(reference):
    def run(m, x):
        return m.head(torch.tanh(m.conv(x)).view(x.shape[0], -1))  # a view by channel, then row

    def split(m, x):
        return m.head(m.conv(x.view(-1, 1, 6, 6)).view(x.shape[0], -1))

    for function, channels, shape in ((run, 2, (5, 2, 6, 6)), (split, 1, (5, 1, 36))):
        model = reference.Apply(function, conv=nn.Conv2d(channels, 3, 3), head=nn.Linear(48, 2))
        reference.check_structure(model, reference.data(*shape))


class ByLength(nn.Linear):
    def forward(self, x):
        return super().forward(x.reshape(len(x), -1))


def test_a_model_that_reads_the_batch_size(reference):
    reference.check_structure(nn.Sequential(ByLength(12, 2)), reference.data(5, 3, 4))
    # What it asks Python for is a number all the same, and Python's own again afterwards.
    assert "len" not in globals()


def test_a_batch_measured_in_several_slices(reference, monkeypatch):
    # A convolution's gradient takes 3 * 2 * 9 * 8 bytes: a pass has at most twice what fits, 80.
    monkeypatch.setattr(norms, "KEEP_BYTES", 40 * 432)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(27, 2)).double()
    kernel = reference.forced("graph", model, squared_error)
    x, y = reference.data(90, 2, 5, 5), reference.data(90, 2, seed=1)
    x[70] = math.nan
    seen: list[int] = []

    def weights(losses):
        seen.append(len(losses))
        return 1 + losses

    others = torch.arange(90) != 70
    rows = reference.per_sample(model, squared_error, x[others], y[others])
    losses = kernel.losses(x, y)[others]
    found = kernel.clipped_sum(x, y, 2.0, weights)
    # Of one length, by itself or filled up: one record more moves no other to another place.
    assert sum(seen) >= 90
    assert max(seen) <= 80
    assert len({*seen}) == 1
    assert reference.error(found, reference.clipped(rows, 2.0, 1 + losses)) < 1e-13


PLACES = {
    "weighted": lambda h: h * torch.arange(h.shape[0])[:, None],
    "next": lambda h: h[(torch.arange(h.shape[0]) + 1) % h.shape[0]],
    "twice": lambda h: h[torch.arange(2 * h.shape[0]) // 2],
    "backwards": lambda h: h[torch.arange(h.shape[0]).flip(0)],
    "columns": lambda h: (
        h + h[:, :2][torch.arange(h.shape[0]), torch.arange(h.shape[0]) % 2][:, None]
    ),
}


@pytest.mark.parametrize("name", PLACES)
def test_a_records_position_may_not_be_used(reference, name):
    model = reference.Apply(
        lambda m, x: PLACES[name](torch.tanh(m.linear(x))), linear=nn.Linear(4, 4)
    )
    kernel = PerSampleKernel(FlatModel(model), lambda out, y: out.sum(1)[: len(y)] + y)
    try:
        assert kernel.way(torch.randn(6, 4), torch.zeros(6)) == "records"
    except ModelError:
        return
