"""Local steps and the mean of replies."""

import math
import weakref
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedpact.algorithms.common.steps import (
    follow_quantile,
    proximal_sgd,
    sgd,
    weigh_replies,
    weighted_mean,
)
from fedpact.common.errors import InputError
from fedpact.common.messages import Reply


class Line:
    """An oracle whose k-th gradient is k times ones."""

    def batches(self, count, *channels):
        assert channels == ("gradient",)
        for k in range(1, count + 1):
            self.factor = k
            yield self

    def gradient(self, w):
        return torch.full_like(w, float(self.factor))


def test_sgd_steps_against_the_gradient_and_leaves_its_start():
    start = torch.tensor([1.0, 2.0])
    assert torch.equal(sgd(Line(), start, 3, 0.5), start - 0.5 * (1 + 2 + 3))
    assert torch.equal(start, torch.tensor([1.0, 2.0]))


def test_a_proximal_step_is_the_objectives_gradient():
    """∇(F - ⟨h, w⟩ + (μ/2)‖w - w̄‖²) = g - h + μ (w - w̄); the k-th g is k ones, η = 1/2, μ = 3."""
    centre, h = torch.tensor([1.0, 2.0]), torch.tensor([0.5, -4.0])
    once = centre - 0.5 * (1 - h)
    twice = once - 0.5 * (2 - h + 3.0 * (once - centre))
    found = proximal_sgd(Line(), centre, 2, 0.5, 3.0, linear=h)
    torch.testing.assert_close(found, twice, rtol=1e-6, atol=0)
    assert torch.equal(centre, torch.tensor([1.0, 2.0]))
    assert torch.equal(h, torch.tensor([0.5, -4.0]))


def reply(site, weight, vector, number=0.0):
    return Reply("run", 1, site, weight, {"w": vector}, {"loss": number})


sizes = st.floats(1e-3, 1e6)


@given(st.lists(st.tuples(sizes, st.floats(-1e3, 1e3)), min_size=1, max_size=20))
def test_mean_is_the_weighted_mean(pairs):
    """Against exact rational arithmetic."""
    replies = [
        reply(str(i), n, torch.tensor([x], dtype=torch.float64), x)
        for i, (n, x) in enumerate(pairs)
    ]
    exact = sum(Fraction(n) * Fraction(x) for n, x in pairs) / sum(Fraction(n) for n, _ in pairs)
    mean = weighted_mean(iter(replies), numbers=("loss",))
    assert float(mean.vectors["w"]) == pytest.approx(float(exact), rel=1e-12, abs=1e-10)
    assert mean.numbers["loss"] == pytest.approx(float(exact), rel=1e-12, abs=1e-10)


@given(st.lists(sizes, min_size=1, max_size=20))
def test_mean_of_equal_vectors_is_that_vector(weights):
    vector = torch.randn(50, generator=torch.Generator().manual_seed(0))
    mean = weighted_mean(reply(str(i), n, vector, 0.1) for i, n in enumerate(weights))
    assert torch.equal(mean.vectors["w"], vector)
    assert mean.vectors["w"] is not vector


def test_only_named_values_are_averaged():
    mean = weighted_mean([reply("a", 1.0, torch.ones(2), 3.0)])
    assert set(mean.vectors) == {"w"}
    assert mean.numbers == {}


def test_one_reply_is_held_at_a_time():
    alive = []

    def replies():
        for k in range(10):
            # The consumer may hold the reply that it asked for last, and no other.
            assert [r() is None for r in alive[:-1]] == [True] * max(0, k - 1)
            made = reply(str(k), 1.0, torch.ones(3))
            alive.append(weakref.ref(made))
            yield made
            del made

    weighted_mean(replies())
    assert len(alive) == 10


@pytest.mark.parametrize("weight", [0.0, -1.0, math.nan, math.inf])
def test_weights_are_checked(weight):
    with pytest.raises(InputError, match="weight"):
        weighted_mean([reply("a", weight, torch.ones(2))])


def test_uniform_weights_are_alike_and_lazy():
    replies = [reply("a", 30.0, torch.tensor([1.0]), 2.0), reply("b", 10.0, torch.tensor([5.0]))]
    asked = iter(replies)
    even = weigh_replies(asked, "uniform")
    assert next(iter(even)).weight == 1.0
    assert next(asked) is replies[1]
    mean = weighted_mean(weigh_replies(replies, "uniform"), numbers=("loss",))
    assert (float(mean.vectors["w"]), mean.numbers["loss"]) == (3.0, 1.0)
    by_size = weighted_mean(weigh_replies(replies, "size"), numbers=("loss",))
    assert (float(by_size.vectors["w"]), by_size.numbers["loss"]) == (2.0, 1.5)


def test_no_reply_is_refused():
    with pytest.raises(InputError, match="replies is empty"):
        weighted_mean([])


@pytest.mark.parametrize("most", [10.0, 0.1, 3.0, 5.0, 20.0])
def test_a_bound_that_follows_a_quantile_stays_in_its_range(most):
    """Exactly: a site refuses a bound that is one rounding above the largest."""
    least = most / 1e3
    for share, expected in ((-1e9, most), (1e9, least), (math.nan, least)):
        found = follow_quantile(most, share, 0.5, 0.2, least, most)
        assert least <= found <= most
        assert found == pytest.approx(expected)
