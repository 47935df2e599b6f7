"""Features as a user would name them: package.module:factory."""

import math

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
        if x.max() > 100:
            raise ValueError("too large")
        return (x.flatten(1)[:, :4] - 3).log()


def picky(shape):
    return _Picky()


def nothing(shape):
    return None


class _Counting(nn.Module):
    """Keeps a mean of what it has seen, and tells it; from a record above 100 on, where told so."""

    def __init__(self, shape, above=-1.0):
        super().__init__()
        self.register_buffer("seen", torch.zeros(math.prod(shape)))
        self.above = above

    def forward(self, x):
        if x.max() > self.above:
            self.seen.mul_(0.5).add_(x.flatten(), alpha=0.5)
        return x.flatten(1) + self.seen


def counting(shape):
    return _Counting(shape)


def counting_some(shape):
    return _Counting(shape, above=100.0)


class _Remembering(nn.Module):
    def forward(self, x):
        self.before, last = x.flatten(1).clone(), getattr(self, "before", 0.0)
        return x.flatten(1) + last


def remembering(shape):
    return _Remembering()


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
