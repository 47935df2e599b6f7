"""Models as a user would name them: package.module:factory."""

import math

from torch import nn


def normalised(shape, classes):
    return nn.Sequential(
        nn.Flatten(), nn.BatchNorm1d(math.prod(shape)), nn.Linear(math.prod(shape), classes)
    )


class _Centre(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


def centred(shape, classes):
    return nn.Sequential(nn.Flatten(), _Centre(), nn.Linear(math.prod(shape), classes))


def dropping(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(math.prod(shape), classes))


def bounded_in_place(shape, classes):
    """Which no pixel exceeds, nor any number that is made up."""
    return nn.Sequential(
        nn.Flatten(), nn.Hardtanh(-100, 100, inplace=True), nn.Linear(math.prod(shape), classes)
    )


class Tied(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        width = math.prod(shape)
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.second.weight = self.first.weight
        self.last = nn.Linear(width, classes)

    def forward(self, x):
        return self.last(self.second(self.first(x.flatten(1)).relu()).relu())


class Shifted(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.last = nn.Linear(math.prod(shape), classes)

    def forward(self, x):
        x -= 1
        return self.last(x.flatten(1))


class Pixels(Shifted):
    def forward(self, x):
        if (x < 0).any():
            raise ValueError("pixels are 0 to 1")
        return self.last(x.flatten(1))


class Coded(nn.Module):
    """Of codes that are 0 to 4 and never 1."""

    def __init__(self, shape, classes):
        super().__init__()
        self.table, self.last = nn.Embedding(9, 2), nn.Linear(2 * math.prod(shape), classes)

    def forward(self, x):
        return self.last(self.table(x * (x - 2)).flatten(1))


class Bag(nn.Module):
    """Of words 0 to 8; at any other it raises, for the whole batch."""

    def __init__(self, shape, classes):
        super().__init__()
        self.table, self.last = nn.Embedding(9, 4), nn.Linear(4, classes)

    def forward(self, x):
        return self.last(self.table(x).mean(1))
