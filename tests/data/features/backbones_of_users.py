"""Features as a user would name them: package.module:factory."""

import math
import warnings
from collections import Counter
from dataclasses import dataclass
from threading import Lock

import numpy as np
import torch
from torch import nn

from fedpact.data.features.settings import FeatureSettings
from fedpact.data.features.stage import FeatureStage


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


def deaf(shape):
    return nn.Sequential(nn.Flatten(), nn.Threshold(9.0, 1.0))


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


BEFORE = {}


class _Remembering(nn.Module):
    def forward(self, x):
        last, BEFORE["x"] = BEFORE.get("x", 0.0), x.flatten(1).clone()
        return x.flatten(1) + last


def remembering(shape):
    return _Remembering()


class _Part(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.p = nn.Parameter(torch.arange(1.0, 1 + math.prod(shape)))
        self.register_buffer("b", torch.full((math.prod(shape),), 0.25), persistent=False)
        self.odd = torch.zeros(3, dtype=torch.uint8)


class _Changing(nn.Module):
    """Calls `how` of itself at a record above 100, and answers by all that it could change."""

    def __init__(self, shape, how):
        super().__init__()
        self.part, self.how = _Part(shape), how
        self.kept, self.count = [{"sum": 0.0}], 0
        self.often = Counter(seen=3)
        self.means, self.bytes = [np.zeros((2, 2))], bytearray(2)
        self.locked, self.viewed = np.zeros(2), bytearray(2)
        self.locked.flags.writeable = False
        self.view = np.frombuffer(self.viewed, np.uint8)

    def forward(self, x):
        x = x.flatten(1)
        if x.max() > 100:
            self.how(self)
        x = nn.functional.dropout(x, 0.5, self.part.training) * self.part.p.double()
        told = self.part.b.sum() + self.part.odd.sum() + self.count + self.kept[0]["sum"]
        told += self.often["seen"] + getattr(self.part.p, "told", 0.0)
        told += float(self.means[0].sum()) + self.bytes[0] + self.part.p.requires_grad
        told += self.means[0].shape[0] - 2 + float(self.means[0].dtype.kind == "i")
        told += float(self.locked.sum()) + float(self.locked.flags.writeable) + self.viewed[0]
        told += 0.0 if self.part.p.grad is None else self.part.p.grad.sum()
        return x + told + getattr(self, "told", 0.0)


def _other_numbers(it):
    it.part.p.data += 5


def _through_numpy(it):
    it.part.b.numpy()[:] += 3


def _another_buffer(it):
    it.part.b = torch.full_like(it.part.b, 9.0)


def _another_weight(it):
    it.part.p = nn.Parameter(it.part.p * 3)


def _other_data(it):
    it.part.p.data = (it.part.p * 3).detach()


def _other_type(it):
    it.part.p.data = it.part.p.data.half()


def _one_byte(it):
    it.part.odd[1:2].numpy()[:] = 7


def _trains(it):
    it.train()


def _another_part(it):
    it.part = _Part((2, 3)).double()


def _attributes(it):
    it.count += 1
    it.told = 4.0
    it.kept.insert(0, {"sum": 2.0})


def _inner_attributes(it):
    it.kept[0]["sum"] += 2.0


def _a_gradient(it):
    it.part.p.grad = torch.ones_like(it.part.p)


class _Otherwise(_Changing):
    def forward(self, x):
        return super().forward(x) + 1


def _another_class(it):
    it.__class__ = _Otherwise


def _attribute_of_a_weight(it):
    it.part.p.told = 5.0


def _counter(it):
    it.often["seen"] += 1
    it.often["more"] += 1


def _in_numpys_array(it):
    it.means[0][1:] += 3


def _in_bytes(it):
    it.bytes[0] = 9
    it.bytes.append(1)


def _size_of_an_array(it):
    it.means[0].resize((3, 2), refcheck=False)


def _shape_of_an_array(it):
    it.means[0].shape = (4, 1)


def _type_of_an_array(it):
    it.means[0].dtype = np.int64


def _locks_an_array(it):
    it.means[0].flags.writeable = False


def _a_locked_array(it):
    it.locked.flags.writeable = True
    it.locked[0] = 3


def _bytes_with_a_view(it):
    it.view[0] = 3


def _another_dictionary(it):
    it.__dict__ = {**it.__dict__, "told": 3.0}


def _what_learns(it):
    it.part.p.requires_grad_(True)


def _a_hook(it):
    it.part.p.data *= 1
    it.register_forward_hook(lambda m, x, y: y + 1)


CHANGES = {
    how.__name__.strip("_"): how
    for how in (
        _other_numbers,
        _through_numpy,
        _another_buffer,
        _another_weight,
        _other_data,
        _other_type,
        _one_byte,
        _trains,
        _another_part,
        _a_gradient,
        _another_class,
        _what_learns,
    )
}
HARMLESS = {
    how.__name__.strip("_"): how
    for how in (
        _attributes,
        _inner_attributes,
        _a_hook,
        _counter,
        _attribute_of_a_weight,
        _in_numpys_array,
        _in_bytes,
        _size_of_an_array,
        _shape_of_an_array,
        _type_of_an_array,
        _locks_an_array,
        _a_locked_array,
        _bytes_with_a_view,
        _another_dictionary,
    )
}


def _factory(how):
    return lambda shape: _Changing(shape, how)


for _name, _how in {**CHANGES, **HARMLESS}.items():
    globals()[_name] = _factory(_how)


class _Leaving(nn.Module):
    def forward(self, x):
        if x.max() > 100:
            raise SystemExit(3)
        return x.flatten(1)


def leaving(shape):
    return _Leaving()


class _Interrupted(nn.Module):
    def forward(self, x):
        if x.max() > 100:
            raise KeyboardInterrupt
        return x.flatten(1)


def interrupted(shape):
    return _Interrupted()


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


class _Nested(nn.Module):
    def forward(self, x):
        inner = FeatureStage(FeatureSettings(kind=f"{__name__}:linear", trained_on="nothing"), 0)
        return inner(x, x[0], "x", None).x


def nested(shape):
    return _Nested()
