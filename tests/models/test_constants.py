"""Constants of an architecture, known by their content, and what could be hidden beside them."""

import math

import pytest
import torch
from torch import nn

import fedpact
from fedpact.models.constants import is_constant

N = 8


def sinusoids(n, d):
    """As "Attention is all you need" has them, and every tutorial since."""
    table = torch.zeros(n, d)
    frequencies = torch.exp(torch.arange(0, d, 2).float() * (-math.log(10000.0) / d))
    angles = torch.arange(n).float()[:, None] * frequencies
    table[:, 0::2], table[:, 1::2] = angles.sin(), angles.cos()
    return table


def windows(side):
    """As Swin has them."""
    steps = torch.arange(side)
    grid = torch.stack(torch.meshgrid(steps, steps, indexing="ij")).flatten(1)
    apart = (grid[:, :, None] - grid[:, None, :]).permute(1, 2, 0).contiguous()
    apart[:, :, 0] += side - 1
    apart[:, :, 1] += side - 1
    apart[:, :, 0] *= 2 * side - 1
    return apart.sum(-1)


def log_windows(side):
    """As Swin v2 has them, place by place."""
    table = torch.zeros(1, 2 * side - 1, 2 * side - 1, 2)
    for i in range(2 * side - 1):
        for j in range(2 * side - 1):
            table[0, i, j] = torch.tensor([i - side + 1.0, j - side + 1.0]) / (side - 1) * 8
    return torch.sign(table) * torch.log2(table.abs() + 1.0) / math.log2(8)


def with_class(side):
    """As BEiT has them."""
    table = torch.zeros(side**2 + 1, side**2 + 1, dtype=torch.int64)
    distances = (2 * side - 1) ** 2 + 3
    table[1:, 1:] = windows(side)
    table[0, 0:] = distances - 3
    table[0:, 0] = distances - 2
    table[0, 0] = distances - 1
    return table


CONSTANTS = {
    "positions": torch.arange(N)[None],
    "positions from 2": torch.arange(N) + 2,
    "positions as fractions": torch.arange(N).float(),
    "many positions": torch.arange(N).expand(5, 3, N),
    "a triangle": torch.ones(1, 1, N, N).tril(),
    "a triangle of truth values": torch.ones(N, N, dtype=torch.bool).triu(1),
    "a triangle of -inf": torch.full((N, N), -math.inf).triu(1),
    "a triangle of the least": torch.full((N, N), torch.finfo(torch.float32).min).triu(1),
    "the identity": torch.eye(N),
    "an orthogonal layer's": -torch.eye(N),
    "what is beside it": 1 - torch.eye(N, dtype=torch.int64),
    "differences": torch.arange(N)[:, None] - torch.arange(N) + N - 1,
    "distances": (torch.arange(N)[:, None] - torch.arange(N)).abs().float(),
    "windows": windows(4),
    "windows in a row": windows(4).flatten(),
    "windows on a log scale": log_windows(4),
    "windows behind a class": with_class(3),
    "frequencies": 1.0 / 10000 ** (torch.arange(0, 2 * N, 2).float() / (2 * N)),
    "frequencies of Llama 3": 1.0 / 500000.0 ** (torch.arange(0, 2 * N, 2).float() / (2 * N)),
    "sines of places": sinusoids(50, 16),
    "sines in a row": torch.sin(torch.arange(64.0).view(8, 8)),
    "a ring": torch.stack([torch.arange(5), (torch.arange(5) + 1) % 5]),
    "one-hot": torch.nn.functional.one_hot(torch.tensor(3), N),
    "zeros": torch.zeros(N),
    "ones": torch.ones(N, N),
}


def test_constants_of_architectures_are_known():
    assert [name for name, tensor in CONSTANTS.items() if not is_constant(tensor)] == []


def test_a_constant_with_one_changed_number_is_refused():
    for name, tensor in CONSTANTS.items():
        for place in {0, tensor.numel() // 3, tensor.numel() - 2}:
            other = tensor.clone().contiguous()
            flat = other.view(-1)
            flat[place] = ~flat[place] if other.dtype == torch.bool else 5
            assert not is_constant(other), (name, place)


@pytest.mark.parametrize("tensor", [v for v in CONSTANTS.values() if v.is_floating_point()])
def test_last_digits_hide_nothing(tensor):
    inside = tensor.isfinite() & (tensor != 0) & (tensor != 1)
    other = torch.where(inside, torch.nextafter(tensor, torch.tensor(9e9)), tensor)
    assert is_constant(other) == torch.equal(other, tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(N) + 1234,
        torch.arange(0, 3 * N, 3),
        torch.arange(N) * 0.1,
        1.0 / 12345 ** (torch.arange(0, 2 * N, 2) / (2 * N)),
        torch.tensor([0, 1, 1, 0, 1, 0]),
        torch.tensor([[0, 1], [1, 1], [0, 1], [1, 0], [0, 0]]),
        torch.stack([torch.arange(N), torch.full((N,), 77)]),
        torch.stack([torch.arange(N), torch.arange(N).flip(0)] * 4),
        torch.full((N, N), -12.5).triu(1),
        torch.tensor([3.5, 4.5]),
        log_windows(4) * 1.5,
        torch.randn(6, 6, generator=torch.Generator().manual_seed(0)),
    ],
    ids=str,
)
def test_a_buffer_with_free_values_is_not_a_constant(tensor):
    assert not is_constant(tensor)


class Positioned(nn.Module):
    """Holds every constant as a buffer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        for k, constant in enumerate(CONSTANTS.values()):
            self.register_buffer(f"constant{k}", constant.clone())

    def forward(self, x):
        return self.layer(x)


def test_a_private_run_needs_no_statement_about_constants(tmp_path, monkeypatch):
    monkeypatch.setattr("fedpact.api.write_report", lambda folder: None)
    data = torch.randn(20, 3), torch.arange(20) % 2
    settings = {"sites": 2, "rounds": 1, "sampling_rate": 0.5, "privacy": {"epsilon": 8.0}}
    assert fedpact.run(Positioned, data, out=tmp_path / "run", **settings).summary["private"]
