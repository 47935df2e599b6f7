"""A record at which the model raises has weight 0, and no release fails because of it."""

import math

import pytest
import torch
from torch import nn

from fedpact.common.errors import InputError
from fedpact.common.losses import cross_entropy
from fedpact.common.params import FlatModel
from fedpact.common.randomness.seeded import SeededDraws, seeded_generator
from fedpact.per_sample.kernel import PerSampleKernel
from fedpact.privacy import batches
from fedpact.privacy.accounting.accountant import Budget
from fedpact.privacy.batches import BatchClippedKernel
from fedpact.privacy.oracle import PrivateOracle, Records
from fedpact.privacy.terms import Terms

WORDS = 9
PER_SAMPLE = {"gradient": 1.5, "difference": 2.0, "loss": 4.0, "below": 10.0}
BATCH_CLIPPED = {"gradient": 1.5, "loss": 4.0, "below": 10.0}


class Bag(nn.Module):
    """Raises at a word that it does not have, for the whole batch."""

    def __init__(self):
        super().__init__()
        self.e, self.l = nn.Embedding(WORDS, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.l(self.e(x).mean(1))


class Bessel(Bag):
    """Not shown to keep records apart, so each record is differentiated by itself."""

    def forward(self, x):
        return torch.special.i0(super().forward(x))


def texts(count):
    x = torch.randint(WORDS, (count, 5), generator=seeded_generator("words"))
    return Records(x, torch.randint(3, (count,), generator=seeded_generator("labels")))


def with_bad(good):
    """The same with two records more: an unknown word first, a negative one in the middle."""
    bad = torch.zeros(1, 5, dtype=torch.int64)
    at = len(good.y) // 2
    x = torch.cat([bad + 50, good.x[:at], bad - 1, good.x[at:]])
    zero = torch.zeros(1, dtype=torch.int64)
    return Records(x, torch.cat([zero, good.y[:at], zero, good.y[at:]]))


def released(kernel, held, sigmas):
    mode = "batch_clipped" if isinstance(kernel, BatchClippedKernel) else "per_sample"
    terms = Terms("a", 20.0, 1.0, 0.5, sigmas, 10, Budget(50.0, 1e-5), "best", mode)
    oracle = PrivateOracle(held, kernel, terms, SeededDraws(5, "a", 1), lambda *_: None)
    w = kernel.model.vector.clone()
    batch = next(oracle.batches(1, *sigmas))
    found = [batch.gradient(w), torch.tensor([batch.loss(w, 1.0), batch.below(w, 1.0)])]
    return found + ([batch.difference(w, w + 0.1, 0.3)] if "difference" in sigmas else [])


@pytest.mark.parametrize("module", [Bag, Bessel])
@pytest.mark.parametrize(
    ("kind", "sigmas"), [(PerSampleKernel, PER_SAMPLE), (BatchClippedKernel, BATCH_CLIPPED)]
)
def test_every_channel_answers_as_if_bad_records_were_not_there(kind, sigmas, module):
    """Bit for bit, noise from the same key. Of none but bad ones it is an empty batch's noise."""
    kernel = kind(FlatModel(module()), cross_entropy)
    for good in map(texts, (0, 8)):
        clean = released(kernel, good, sigmas)
        for a, b in zip(clean, released(kernel, with_bad(good), sigmas), strict=True):
            assert torch.equal(a, b)
            assert a.isfinite().all()


def test_records_that_raise_together_only_are_taken_one_by_one():
    """As where the memory is enough for one of them."""
    x, y = torch.randn(5, 3), torch.zeros(5, dtype=torch.int64)

    def take(some, _, shares=None, layout=None):
        if len(some) > 1:
            raise MemoryError
        if some[0, 0] == x[2, 0]:
            raise ValueError("not this one")
        return some.sum(0)

    like = torch.zeros(3)
    total = batches.sum_finite(take, x, y, None, like, lambda total: total / 2)
    assert torch.allclose(total, x[[0, 1, 3, 4]].sum(0) / 2)
    assert total.dtype == like.dtype
    assert not batches.sum_finite(take, x, y, None, like, None).any()
    losses = batches.measure_each(lambda some, labels, layout: take(some, labels)[:1], x, y)
    assert losses.isnan().tolist() == [False, False, True, False, False]


def test_a_fault_of_the_question_is_still_an_error():
    """It does not depend on records: a bound that no sum can keep."""
    with pytest.raises(InputError, match=r"2\^-40"):
        _ask(bound=1e-40)
    with pytest.raises(InputError, match=r"2\^100"):
        _ask(bound=1e38)


def _ask(bound):
    kernel = PerSampleKernel(FlatModel(Bag()), cross_entropy)
    terms = Terms("a", 20.0, 1.0, 0.5, PER_SAMPLE, 10, Budget(50.0, 1e-5), "best")
    oracle = PrivateOracle(texts(3), kernel, terms, SeededDraws(5), lambda *_: None)
    w = kernel.model.vector.clone()
    next(oracle.batches(1, *PER_SAMPLE)).difference(w, w, bound)


def test_sums_of_the_largest_clip_are_finite():
    """A larger one could have a sum that is infinite, or not, with one record."""
    kernel = PerSampleKernel(FlatModel(nn.Linear(2, 3)), cross_entropy)
    x, y = torch.full((500, 2), 1e37), torch.zeros(500, dtype=torch.int64)
    assert kernel.clipped_sum(x, y, 2.0**100).isfinite().all()
    assert math.isfinite(float(kernel.clipped_sum(x, y, 2.0**100).sum()))
