"""Random sequences of layers, by the graph, against ordinary autograd in float64."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedpact.common.losses import cross_entropy

FEW = settings(max_examples=6, deadline=None, derandomize=True)


@st.composite
def convolutions(draw, channels, out, small):
    if small:
        return nn.Conv2d(channels, out, 1)
    size, stride = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    # Padded with as much on both sides: torch warns of its own copy where "same" is not.
    same = ["same"] if stride == 1 and size % 2 else []
    padding = draw(st.sampled_from([0, 1, *same]))
    return nn.Conv2d(
        channels, out, size, stride, padding if size > 1 else 0,
        groups=draw(st.sampled_from([1, 1, 2])) if channels % 2 == 0 else 1,
        bias=draw(st.booleans()),
    )  # fmt: skip


@st.composite
def image_layers(draw, kinds):
    """Layers [B, C, H, W] -> [B, C', H', W'], ReLU before and behind pooling, overlaps, others."""
    channels, layers, side = draw(st.sampled_from([1, 3, 8])), [], 13
    start = channels
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(kinds))
        if kind == "conv":
            out = draw(st.sampled_from([2, 8, 16]))
            layers.append(draw(convolutions(channels, out, small=side <= 3)))
            channels = out
        elif kind == "pool" and side > 3:
            size, stride = draw(st.sampled_from([(2, 2), (3, 2), (2, 1)]))
            layers.append(nn.MaxPool2d(size, stride, draw(st.integers(0, 1)),
                                       ceil_mode=draw(st.booleans())))  # fmt: skip
        elif kind == "curve":
            layers.append(draw(st.sampled_from([nn.Tanh(), nn.Sigmoid()])))
        elif kind == "norm":
            layers.append(nn.GroupNorm(1, channels))
        elif kind == "other" and side > 3:
            layers.append(draw(st.sampled_from([nn.AvgPool2d(2), nn.Softplus(), nn.Identity()])))
        if draw(st.booleans()):
            # Autograd itself refuses to overwrite what a tanh, for one, has to remember.
            free = bool(layers) and isinstance(layers[-1], nn.Conv2d | nn.MaxPool2d | nn.GroupNorm)
            relu = nn.ReLU(inplace=free and draw(st.booleans()))
            layers.append(relu if draw(st.booleans()) else nn.Sequential(relu))
        side = nn.Sequential(*layers)(torch.zeros(1, start, 13, 13)).shape[-1]
    return start, layers


def check_images(reference, case, batch, seed):
    channels, layers = case
    torch.manual_seed(seed)
    x = torch.randn(batch, channels, 13, 13).double()
    width = nn.Sequential(*layers)(x[:1].float()).numel()
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(width, 3)).double()
    y = torch.arange(batch) % 3
    rows = reference.per_sample_loop(model, cross_entropy, x, y)
    reference.check(model, cross_entropy, x, y, 1e-13, rows, ways=("graph",))


KNOWN = ["conv", "conv", "pool", "curve", "flat"]


@FEW
@given(image_layers([*KNOWN, "norm", "other"]), st.integers(1, 5), st.integers(0, 2**16))
def test_graphs_of_image_layers(reference, case, batch, seed):
    check_images(reference, case, batch, seed)
