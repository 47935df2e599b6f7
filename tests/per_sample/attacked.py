"""Models under attack, and by how much one record moves a clipped sum."""

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedpact.common.losses import cross_entropy
from fedpact.common.params import FlatModel
from fedpact.models.zoo import Views, ViewSettings
from fedpact.per_sample.clipping import slack
from fedpact.per_sample.kernel import PerSampleKernel

CLASSES = 3


class Means(nn.Module):
    """A layer over positions, the mean over them, and a head."""

    def __init__(self, layer: nn.Module, width: int, dims: int | tuple[int, ...] = 1) -> None:
        super().__init__()
        self.layer, self.head, self._dims = layer, nn.Linear(width, CLASSES), dims

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x).mean(self._dims))


class Attention(nn.Module):
    """Attention by hand, with norms and a parameter of its own."""

    def __init__(self, width: int = 6, length: int = 5) -> None:
        super().__init__()
        self.first, self.last = nn.LayerNorm(width), nn.RMSNorm(width)
        self.positions = nn.Parameter(torch.randn(length, width))
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.positions
        q, k, v = self.q(self.first(h)), self.k(h), self.v(h)
        return self.head(self.last(torch.softmax(q @ k.mT, 2) @ v).mean(1))


class Shared(nn.Module):
    """Weights used twice, transposed once, and a product of two as a weight."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.down = nn.Parameter(torch.randn(2, width) / 2)
        self.up = nn.Parameter(torch.randn(width, 2) / 2)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.inner(x)) @ self.inner.weight
        return self.head((self.inner(h) + h @ (self.up @ self.down).t()).sum(1))


class Words(nn.Module):
    """Embedded words, the table used a second time to score them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4, padding_idx=0)
        self.scale, self.head = nn.Parameter(torch.ones(4)), nn.Linear(9, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.linear(self.table(x).mean(1) * self.scale, self.table.weight))


class Steps(nn.Module):
    """A recurrent layer and its last output."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0][:, -1])


class Films(nn.Module):
    """A convolution of several images a record."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Conv2d(2, 4, 3), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = F.max_pool2d(self.layer(x.flatten(0, 1)).relu(), 2).mean((2, 3))
        return self.head(h.view(x.shape[0], x.shape[1], 4).mean(1))


class Waves(nn.Module):
    """Filters by frequency, repeated rows, and a matrix that each position chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.filter, self.rows = nn.Parameter(torch.randn(4, 2)), nn.Parameter(torch.randn(4, 6))
        self.experts, self.head = nn.Parameter(torch.randn(3, 6, 6)), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.fft.irfft(torch.fft.rfft(x) * torch.view_as_complex(self.filter), n=6)
        h = (h + self.rows.repeat(x.shape[0], 1).view(-1, 4, 6)).flatten(0, 1)
        chosen = self.experts[h[:, :3].argmax(1)]
        return self.head(torch.bmm(chosen, h.unsqueeze(2)).view(-1, 4, 6).mean(1))


class Alone(nn.Module):
    """Adds up the batch's records, with a coefficient that nobody sees."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.head((h + 1e-9 * h.cumsum(0)).mean(1))


def _images(channels: int, out: int, pool: int) -> nn.Module:
    layers = [nn.Conv2d(channels, out, 3, padding=1), nn.ReLU()]
    layers += [nn.MaxPool2d(pool)] if pool > 1 else []
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(out * (8 // pool) ** 2, CLASSES))


def _viewed() -> nn.Module:
    return Views(_images(2, 3, 1), ViewSettings(mirror=True, shift=2), (2, 8, 8))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "dense": (lambda: _mlp(nn.Tanh()), (6,), "dense"),
    "rows": (lambda: _mlp(nn.ReLU()), (6,), "graph"),
    "positions": (lambda: _sequence(5, 4, 10), (10, 5), "graph"),
    "gram": (lambda: _sequence(64, 48, 4), (4, 64), "graph"),
    "gram2": (lambda: Means(nn.Linear(64, 48, bias=False), 48), (2, 64), "graph"),
    "images": (lambda: _images(2, 3, 1), (2, 8, 8), "graph"),
    "channels": (lambda: _images(8, 8, 1), (8, 8, 8), "graph"),
    "pooled": (lambda: _images(24, 4, 2), (24, 8, 8), "graph"),
    "views": (_viewed, (2, 8, 8), "graph"),
    "signals": (lambda: Means(nn.Conv1d(3, 4, 3), 4, 2), (3, 20), "graph"),
    "linear": (lambda: Means(nn.Linear(6, 5, bias=False), 5), (30, 6), "graph"),
    "few": (lambda: Means(nn.Conv2d(32, 32, 3), 32, (2, 3)), (32, 4, 4), "graph"),
    "groups": (lambda: Means(_grouped(), 4, (2, 3)), (2, 5, 5), "graph"),
    "attention": (Attention, (5, 6), "graph"),
    "shared": (Shared, (4, 6), "graph"),
    "words": (Words, (7,), "graph"),
    "lstm": (lambda: Steps(nn.LSTM(3, 4, batch_first=True)), (6, 3), "graph"),
    "gru": (lambda: Steps(nn.GRU(3, 4, batch_first=True)), (6, 3), "graph"),
    "films": (lambda: Films(), (3, 2, 6, 6), "graph"),
    "waves": (lambda: Waves(), (4, 6), "graph"),
    "records": (Alone, (4, 6), "records"),
}
"""A module, the form of its records, and the way that it takes."""


def _mlp(curve: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), curve, nn.Linear(8, CLASSES))


def _sequence(width: int, out: int, length: int) -> nn.Module:
    flat = nn.Sequential(nn.Flatten(), nn.Linear(out * length, CLASSES))
    return nn.Sequential(nn.Linear(width, out), nn.Tanh(), flat)


def _grouped() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.GroupNorm(2, 4), nn.Tanh())


@cache
def kernel(name: str) -> PerSampleKernel:
    """The kernel of a model by its name, traced once."""
    found = PerSampleKernel(FlatModel(made(name)), cross_entropy)
    if name == "rows":
        found._passes.dense = None
    return found


def records(
    name: str, count: int, seed: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Ordinary records for a model."""
    _, shape, _ = MODELS[name]
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, CLASSES, (count,), generator=g)
    if name == "words":
        return torch.randint(0, 9, (count, *shape), generator=g), y
    return torch.randn(count, *shape, generator=g).to(dtype), y


def made(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    """A model by its name."""
    torch.manual_seed(seed)
    return MODELS[name][0]().to(dtype)


def put(x: Tensor, r: Tensor, place: int) -> Tensor:
    """The records with one more among them."""
    return torch.cat([x[:place], r, x[place:]])


Summed = Callable[[Tensor, Tensor], Tensor]


def moved(
    summed: Summed, x: Tensor, y: Tensor, r: Tensor, of_r: Tensor, place: int | None = None
) -> float:
    """‖S(D + r) - S(D)‖ for a function (x, y) -> S."""
    place = len(x) if place is None else place
    before = summed(x, y).double()
    return float((summed(put(x, r, place), put(y, of_r, place)).double() - before).norm())


def allowed(records: int, clip: float) -> float:
    """What one record more may move a sum over so many by."""
    return clip * (1 + slack(records + 1))
