"""Features as a user would name them: package.module:factory."""

import math
import warnings
from dataclasses import dataclass
from threading import Lock

import torch
from torch import nn


class Made(nn.Module):
    """A module that is its own factory, whatever the records' shape."""

    def __init__(self, shape):
        super().__init__()


class Mixing(Made):
    """The batch's own mean would mix records; a record alone has none to mix with."""

    def forward(self, x):
        return torch.cat([x.flatten(1), x.flatten(1) - x.flatten(1).mean(0)], 1)


def linear(shape):
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 6))


class Picky(Made):
    def forward(self, x):
        return (x.flatten(1)[:, :4] - 3).log()


class Branching(Made):
    def forward(self, x):
        return x.flatten(1) + (1 if x.max() > 100 else 0)


def nothing(shape):
    return None


class Counting(nn.Module):
    """Keeps a mean of what it has seen, and tells it."""

    def __init__(self, shape):
        super().__init__()
        self.register_buffer("seen", torch.zeros(math.prod(shape)))

    def forward(self, x):
        self.seen.mul_(0.5).add_(x.flatten(), alpha=0.5)
        return x.flatten(1) + self.seen


BEFORE = {}


class Remembering(Made):
    def forward(self, x):
        last, BEFORE["x"] = BEFORE.get("x", 0.0), x.flatten(1).clone()
        return x.flatten(1) + last


class Times(Made):
    by = 1.0

    def forward(self, x):
        return x.flatten(1).double() * self.by


class TimesHuge(Times):
    by = 2.0**1000


class TimesTiny(Times):
    by = 2.0**-1000


class Waves(Made):
    def forward(self, x):
        return torch.fft.fft(x.flatten(1))


def lazy(shape):
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(3))


class Raising(Made):
    def forward(self, x):
        raise ValueError("never ready")


class Empty(Made):
    def forward(self, x):
        return x.flatten(1)[:, :0]


class Noisy(Made):
    def forward(self, x):
        return nn.functional.dropout(x.flatten(1) + 1, 0.5, training=True)


SCALE = 1.0


class Scaled(Made):
    def forward(self, x):
        return x.flatten(1) * SCALE + 1


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


class Threads(Made):
    def forward(self, x):
        return torch.tensor([[float(torch.get_num_threads()), 1.0]])


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
