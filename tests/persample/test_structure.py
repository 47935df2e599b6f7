"""Models with structure: repeated and tied modules, in-place operations, frozen layers, hooks."""

import math

import pytest
import torch
from torch import nn

from fedpact.errors import ModelError
from fedpact.losses import cross_entropy, squared_error
from fedpact.params import FlatModel
from fedpact.persample import norms
from fedpact.persample.kernel import PerSampleKernel


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(4, 4), (5, 4)),
        (nn.Linear(4, 4), (5, 3, 4)),
        (nn.Conv2d(2, 2, 3, padding=1), (5, 2, 6, 5)),
        (nn.LayerNorm(4), (5, 3, 4)),
        (nn.GroupNorm(2, 4), (5, 4, 3)),
        (None, (5, 4)),
    ],
)
def test_a_module_called_several_times(reference, layer, shape):
    layer = layer or reference.Shift(4)

    def thrice(m, x):
        h = torch.tanh(m.layer(x))
        return torch.tanh(m.layer(torch.tanh(m.layer(h) + h)))

    reference.check_structure(reference.Apply(thrice, layer=layer), reference.data(*shape))


def test_an_embedding_read_at_several_places(reference):
    def twice(m, x):
        return torch.cat([m.table(x[:, :2]).flatten(1), m.table(x[:, 1:]).flatten(1)], 1)

    x = torch.randint(0, 5, (6, 4), generator=torch.Generator().manual_seed(0))
    reference.check_structure(reference.Apply(twice, table=nn.Embedding(5, 3)), x)


def test_a_convolution_at_two_sizes(reference):
    def both(m, x):
        return m.conv(x).mean((2, 3)) + torch.tanh(m.conv(x[:, :, ::2])).mean((2, 3))

    reference.check_structure(
        reference.Apply(both, conv=nn.Conv2d(2, 3, 3)), reference.data(5, 2, 8, 8)
    )


def test_one_module_at_two_paths_keeps_its_rule(reference):
    layer = nn.Linear(4, 4)
    kernel = reference.check_structure(nn.Sequential(layer, nn.Tanh(), nn.Sequential(layer)))
    assert not reference.units(kernel)


def test_tied_weights_are_exact_through_their_common_ancestor(reference):
    encoder, decoder = nn.Linear(4, 4), nn.Linear(4, 4)
    decoder.weight = encoder.weight
    inner = nn.Sequential(encoder, nn.Tanh(), nn.Sequential(decoder))
    kernel = reference.check_structure(nn.Sequential(nn.Linear(4, 4), inner, nn.Linear(4, 2)))
    assert reference.units(kernel) == {"1"}


def test_relu_in_place_behind_first_and_later_layers(reference):
    relu = nn.ReLU(inplace=True)
    model = nn.Sequential(nn.Linear(4, 8), relu, nn.Linear(8, 8), relu, nn.Linear(8, 2))
    reference.check_structure(model)
    images = nn.Sequential(
        nn.Conv2d(1, 3, 3), relu, nn.Conv2d(3, 3, 3), relu, nn.GroupNorm(1, 3), relu, nn.Flatten()
    )
    reference.check_structure(images, reference.data(5, 1, 7, 7))
    reference.check_structure(
        nn.Sequential(nn.Linear(4, 8), relu, nn.Linear(8, 2)), reference.data(5, 3, 4)
    )

    def overwritten(m, x):
        # Of three dimensions, a linear layer's output is a view: overwritten, it is another tensor.
        return torch.relu_(m.second(torch.tanh(m.first(x))))

    model = reference.Apply(overwritten, first=nn.Linear(4, 8), second=nn.Linear(8, 2))
    reference.check_structure(model, reference.data(5, 3, 4))


def test_residual_connections_in_place(reference):
    def residual(m, x):
        h = m.first(x)
        h += torch.tanh(x)  # the output of a layer, which nothing has read
        z = m.second(torch.tanh(h))
        z += h
        z[:, 1:] *= 2
        return z

    reference.check_structure(
        reference.Apply(residual, first=nn.Linear(4, 4), second=nn.Linear(4, 4))
    )


def test_an_input_changed_in_place_after_it_was_read_is_an_error(reference):
    def wrong(m, x):
        h = torch.tanh(x)
        z = m.layer(h)
        h += 1
        return z + h

    for layer in (nn.Linear(4, 4), reference.Shift(4)):
        kernel = PerSampleKernel(
            FlatModel(reference.Apply(wrong, layer=layer).double()), squared_error
        )
        with pytest.raises(ModelError, match=r"'layer' was changed in place"):
            kernel.clipped_sum(reference.data(3, 4), reference.data(3, 4), 1.0)


def test_frozen_layers_pass_gradients_on(reference):
    model = nn.Sequential(
        nn.Linear(4, 4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), reference.Shift(4)
    )
    model[1].requires_grad_(False)
    model[4].scale.requires_grad_(False)
    kernel = reference.check_structure(model)
    assert (
        kernel.clipped_sum(reference.data(2, 4), reference.data(2, 4), 1.0).numel() == 20 + 20 + 4
    )


def test_what_no_loss_depends_on_adds_zeros(reference):
    def ignoring(m, x):
        m.unused(x)
        with torch.no_grad():
            m.still(x)
        return m.used(x)

    model = reference.Apply(
        ignoring, unused=nn.Linear(4, 4), used=nn.Linear(4, 2), still=reference.Shift(4)
    )
    reference.check_structure(model, rows="loop")


def test_hooks_of_the_model_are_respected(reference):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    model[0].register_forward_hook(lambda _m, _args, output: output * 3)
    model[2].register_forward_pre_hook(lambda _m, args: (args[0] + 1,))
    reference.check_structure(model)


def test_dropout_layers_outside_units_are_part_of_the_same_pass(reference):
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(30, 1, bias=False)).double()
    kernel = PerSampleKernel(FlatModel(model), lambda out, y: out[:, 0])
    seen: list[torch.Tensor] = []
    with torch.no_grad():
        model[1].weight.fill_(1)

    def weights(losses):
        seen.append(losses)
        return torch.ones_like(losses)

    total = kernel.clipped_sum(reference.data(8, 30), torch.zeros(8), math.inf, weights)
    assert math.isclose(float(total.sum()), float(seen[0].sum()), rel_tol=1e-12)


def test_sequence_losses_and_outputs(reference):
    x = torch.randint(0, 7, (5, 4), generator=torch.Generator().manual_seed(1))
    model = nn.Sequential(nn.Embedding(7, 6), nn.LayerNorm(6), nn.Linear(6, 7)).double()
    reference.check(model, cross_entropy, x, x.flip(1))


def test_a_model_that_views_its_images_in_their_usual_layout(reference):
    def run(m, x):
        return m.head(torch.tanh(m.conv(x)).view(len(x), -1))  # a view by channel, then row

    def split(m, x):
        return m.head(m.conv(x.view(-1, 1, 6, 6)).view(len(x), -1))

    for function in (run, split):
        model = reference.Apply(function, conv=nn.Conv2d(2, 3, 3), head=nn.Linear(48, 2))
        if function is split:
            model.conv, model.head = nn.Conv2d(1, 3, 3), nn.Linear(48, 2)
        shape = (5, 2, 6, 6) if function is run else (5, 1, 36)
        reference.check_structure(model, reference.data(*shape))


def test_a_batch_measured_in_several_slices(reference, monkeypatch):
    # A convolution's gradient takes 3 * 2 * 9 * 8 bytes: 40 of them fit, 90 records do not.
    monkeypatch.setattr(norms, "KEEP_BYTES", 40 * 432)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(27, 2)).double()
    kernel = PerSampleKernel(FlatModel(model), squared_error)
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
    assert seen == [30, 30, 30]
    assert reference.error(found, reference.clipped(rows, 2.0, 1 + losses)) < 1e-13
