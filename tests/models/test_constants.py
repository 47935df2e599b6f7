"""Constants of an architecture, known by their content, and what could be hidden beside them."""

import copy
import math
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from fedpact.common.errors import PlanError
from fedpact.models.constants import is_constant
from fedpact.models.initial import InitialSettings

N = 8


def sinusoids(n, d):
    """As "Attention is all you need" has them, and every tutorial since."""
    table = torch.zeros(n, d)
    frequencies = torch.exp(torch.arange(0, d, 2).float() * (-math.log(10000.0) / d))
    angles = torch.arange(n).float()[:, None] * frequencies
    table[:, 0::2], table[:, 1::2] = angles.sin(), angles.cos()
    return table


def as_whisper(n, d):
    steps = math.log(10000) / (d // 2 - 1)
    angles = torch.arange(n)[:, None] * torch.exp(-steps * torch.arange(d // 2))
    return torch.cat([angles.sin(), angles.cos()], 1)


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
    "frequencies": 1.0 / 10000 ** (torch.arange(0, 2 * N, 2).float() / (2 * N)),
    "frequencies of Llama 3": 1.0 / 500000.0 ** (torch.arange(0, 2 * N, 2).float() / (2 * N)),
    "sines of places": sinusoids(50, 16),
    "positions of Whisper": as_whisper(20, 16),
    "means of colours": torch.tensor([0.485, 0.456, 0.406])[:, None, None],
    "colours up to 255": torch.tensor([0.485, 0.456, 0.406]) * 255,
    "a short range": torch.linspace(-1, 1, 5),
    "a band": torch.ones(12, 12).tril(2).triu(-3),
    "one-hot": torch.nn.functional.one_hot(torch.tensor(3), N),
    "zeros": torch.zeros(N),
    "ones": torch.ones(N, N),
}


def test_constants_of_architectures_are_known():
    assert [name for name, tensor in CONSTANTS.items() if not is_constant(tensor)] == []


def test_a_constant_with_one_changed_number_is_refused():
    """Near its end, or a third of the way to it, by turns."""
    for k, (name, tensor) in enumerate(CONSTANTS.items()):
        other = tensor.clone().contiguous()
        flat, place = other.view(-1), (len(other.view(-1)) - 2, other.numel() // 3)[k % 2]
        flat[place] = ~flat[place] if other.dtype == torch.bool else 77
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
        torch.arange(N) * 0.123,
        torch.arange(0, 3 * N, 3)[: N - 1],
        torch.linspace(18.3, 94.7, 20),
        torch.linspace(-1.234, 5, 50),
        torch.linspace(18, 97, 9),
        torch.linspace(18, 97, 9).long(),
        torch.linspace(0, 3, 8).long(),
        torch.tensor([0.4914, 0.4822, 0.4465]),
        torch.tensor([1.0, 0.25]),
        torch.tensor([1.0, 1e-30] * 32),
        torch.tensor([1.0, math.nan, *[math.inf] * N]),
        torch.tensor([2.0, 3.5, 5.0]),
        torch.linspace(0, 30, 50),
        torch.hann_window(40),
        torch.log(torch.arange(1, 17).float()).repeat(4, 1),
        1.0 / 12345 ** (torch.arange(0, 2 * N, 2) / (2 * N)),
        torch.tensor([0, 1, 1, 0, 1, 0]),
        torch.tensor([[0, 1], [1, 1], [0, 1], [1, 0], [0, 0]]),
        torch.stack([torch.arange(N), torch.full((N,), 77)]),
        torch.stack([torch.arange(N), torch.arange(N).flip(0)] * 4),
        torch.full((N, N), -12.5).triu(1),
        torch.tensor([3.5, 4.5]),
        torch.randn(6, 6, generator=torch.Generator().manual_seed(0)),
    ],
    ids=str,
)
def test_a_buffer_with_free_values_is_not_a_constant(tensor):
    assert not is_constant(tensor)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
def test_random_numbers_of_any_length_are_not_constants(dtype):
    """Drawn, sorted, or on a line between drawn ends."""
    draws = torch.Generator().manual_seed(0)
    for n in (2, 3, 4, 5, 8, 9, 16, 36):
        ends = torch.rand(2, generator=draws, dtype=torch.float64) * 100
        drawn = torch.randn(n, generator=draws, dtype=torch.float64) * 1000
        line = ends[0] + (ends[1] - ends[0]) * torch.arange(n) / (n - 1)
        tables = torch.randn(n, 3, generator=draws, dtype=torch.float64) * 1000
        rows = drawn, drawn.sort()[0], tables, tables.T
        # Whole numbers and short rows on a line may be such as an arange.
        lines = (line,) if n >= N and dtype in (torch.float32, torch.float64) else ()
        for row in (*rows, *lines):
            assert not is_constant(row.to(dtype)), (n, row)


def test_chosen_places_and_masks_are_not_constants():
    draws = torch.Generator().manual_seed(1)
    for n in (12, 25, 64):
        chosen = torch.randperm(4 * n, generator=draws)[:n]
        mask = torch.rand(n, generator=draws) < 0.5
        graph = torch.rand(n, n, generator=draws) < 0.5
        for made in (chosen, chosen.sort()[0], mask, mask.float(), graph, graph.float()):
            assert not is_constant(made), made


class Positioned(nn.Linear):
    """Holds a constant as a buffer."""

    def __init__(self):
        super().__init__(3, 2)
        self.register_buffer("positions", sinusoids(50, 16))


def test_a_private_run_needs_no_statement_about_constants():
    InitialSettings().check_drawn("Positioned", Positioned(), Positioned())


class OfLibrary(nn.Module):
    """A layer that makes a table by its configuration, and collects statistics."""

    def __init__(self, name="table"):
        super().__init__()
        self.inner = nn.Linear(3, 2)
        self.register_buffer(name, torch.tensor([0.31, 0.77]))


class OfTorch(nn.BatchNorm1d):
    """A torch layer that a library extends."""

    def __init__(self):
        super().__init__(2)
        self.weight.data.copy_(torch.tensor([0.31, 0.77]))


@pytest.mark.parametrize("library", ["timm.layers", "transformers.models", "hospital.layers"])
def test_what_a_public_library_makes_needs_no_statement(library, monkeypatch):
    monkeypatch.setattr(OfLibrary, "__module__", library)
    monkeypatch.setattr(OfTorch, "__module__", library)
    known = library != "hospital.layers"
    for made, goes in ((OfLibrary, known), (lambda: OfLibrary("running_mean"), False)):
        with nullcontext() if goes else pytest.raises(PlanError, match="whatever the seed"):
            InitialSettings().check_drawn("Net", made(), made())
    # Trained weights are in torch's own layers, and those that extend them.
    for inside in (OfTorch(), nn.Sequential(OfLibrary(), nn.Linear(3, 2))):
        with pytest.raises(PlanError, match="whatever the seed"):
            InitialSettings().check_drawn("Net", inside, copy.deepcopy(inside))


PLAIN = 0.0, 0.25, 1e-6, -1e4, 8.0, 512.0, 45.254834, 64**-0.5, 65504.0


@pytest.mark.parametrize("number", [*PLAIN, -torch.inf, torch.finfo(torch.bfloat16).min])
def test_a_plain_number_is_a_constant_wherever_it_is_the_same(number):
    assert is_constant(torch.tensor(number))
    assert is_constant(torch.full((3, 4), number))
    assert is_constant(torch.full((3, 4), number, dtype=torch.bfloat16))


@pytest.mark.parametrize("number", [0.7312, 13.37, 1e-6 * 1.234, 517.25, torch.nan, 40213])
def test_a_mean_of_records_is_no_constant(number):
    assert not is_constant(torch.tensor(number))
    assert not is_constant(torch.full((3, 4), number))


def test_a_small_graph_is_compared_without_an_error():
    """4 nodes in a ring, of which a part is alike along a side."""
    ring = (torch.eye(4).roll(1, 0) + torch.eye(4).roll(-1, 0)) / 2
    assert not is_constant(ring)
