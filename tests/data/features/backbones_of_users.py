"""Features as a user would name them: package.module:factory."""

import math
import warnings
from dataclasses import dataclass
from threading import Lock

import torch
from torch import nn


def mixing(shape):
    """The batch's own mean would mix records; a record alone has none to mix with."""

    class Centre(nn.Module):
        def forward(self, x):
            return torch.cat([x.flatten(1), x.flatten(1) - x.flatten(1).mean(0)], 1)

    return Centre()


def linear(shape):
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 6))


class _Picky(nn.Module):
    def forward(self, x):
        return (x.flatten(1)[:, :4] - 3).log()


class _Branching(nn.Module):
    def forward(self, x):
        return x.flatten(1) + (1 if x.max() > 100 else 0)


def branching(shape):
    return _Branching()


def picky(shape):
    return _Picky()


def nothing(shape):
    return None


class _Counting(nn.Module):
    """Keeps a mean of what it has seen, and tells it."""

    def __init__(self, shape):
        super().__init__()
        self.register_buffer("seen", torch.zeros(math.prod(shape)))

    def forward(self, x):
        self.seen.mul_(0.5).add_(x.flatten(), alpha=0.5)
        return x.flatten(1) + self.seen


def counting(shape):
    return _Counting(shape)


BEFORE = {}


class _Remembering(nn.Module):
    def forward(self, x):
        last, BEFORE["x"] = BEFORE.get("x", 0.0), x.flatten(1).clone()
        return x.flatten(1) + last


def remembering(shape):
    return _Remembering()


class _Times(nn.Module):
    def __init__(self, by):
        super().__init__()
        self.by = by

    def forward(self, x):
        return x.flatten(1).double() * self.by


def times_1(shape):
    return _Times(1.0)


def times_huge(shape):
    return _Times(2.0**1000)


def times_tiny(shape):
    return _Times(2.0**-1000)


class _Waves(nn.Module):
    def forward(self, x):
        return torch.fft.fft(x.flatten(1))


def waves(shape):
    return _Waves()


def lazy(shape):
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(3))


def raising(shape):
    class Raising(nn.Module):
        def forward(self, x):
            raise ValueError("never ready")

    return Raising()


def empty(shape):
    class Empty(nn.Module):
        def forward(self, x):
            return x.flatten(1)[:, :0]

    return Empty()


class _Noisy(nn.Module):
    def forward(self, x):
        return nn.functional.dropout(x.flatten(1) + 1, 0.5, training=True)


def noisy(shape):
    return _Noisy()


SCALE = 1.0


class _Scaled(nn.Module):
    def forward(self, x):
        return x.flatten(1) * SCALE + 1


def scaled(shape):
    return _Scaled()


class Cut(nn.Module):
    """Has what it was given, and what is nowhere else the same."""

    def __init__(self, least):
        super().__init__()
        self.least, self.lock = least, Lock()

    def forward(self, x):
        return x.clamp(max=self.least)


GIVEN = nn.Identity()


def given(shape):
    return nn.Sequential(nn.Flatten(), GIVEN)


WEIGHT = 1.0


class _Threads(nn.Module):
    def forward(self, x):
        return torch.tensor([[float(torch.get_num_threads()), 1.0]])


def threads(shape):
    return _Threads()


def weighted(shape):
    module = nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 6))
    with torch.no_grad():
        module[1].weight.mul_(WEIGHT)
    return module


def scripted(shape):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 6)))


def orthogonal(shape):
    module = nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 512))
    nn.init.orthogonal_(module[1].weight)
    return module


@dataclass
class _Callable:
    width: int

    def __call__(self, shape):
        return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), self.width))


callable_without_hash = _Callable(4)
