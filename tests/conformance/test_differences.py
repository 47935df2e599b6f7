"""FedProxVR's private form: the bound of a gradient difference, and the noise that follows."""

import math

import pytest
import torch

from fedpact.algorithms.fedproxvr import Settings
from fedpact.algorithms.wrappers.base import Method


class Moving:
    """An oracle around another, which notes every bound it is given and every noise-free answer."""

    def __init__(self, inner, seen):
        self.inner, self.seen = inner, seen

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def batches(self, count, *channels):
        return (Moving(batch, self.seen) for batch in self.inner.batches(count, *channels))

    def opening(self, *channels):
        return Moving(self.inner.opening(*channels), self.seen)

    def difference(self, w, anchor, bound):
        self.seen.append((float((w - anchor).norm()), bound))
        return self.inner.difference(w, anchor, bound)


@pytest.mark.parametrize(
    ("given", "slope", "most"),
    [
        ({}, 3.0, 1 / 4),
        ({"learning_rate": 1e-3}, 3.0, 1 / 4),
        ({"difference_bound": 0.25}, 0.25, math.inf),
    ],
)
def test_the_bound_follows_the_movement(given, slope, most, federation):
    """A given K alone bounds; by default L does, up to C/τ."""
    seen = []
    bed = federation(private=True, around=lambda oracle: Moving(oracle, seen))
    bed.run(Method("fedproxvr", Settings(smoothness=3.0, local_steps=4, **given)), 2)
    assert len(seen) == 2 * 3 * 4
    for moved, bound in seen:
        assert bound == pytest.approx(min(slope * moved, most * bed.clip), rel=1e-12)


def test_a_random_iterate_has_the_same_bound(federation):
    """C/τ with the settings' τ, however few steps lead to the iterate that is drawn."""
    seen, given = [], {"iterate": "random", "smoothness": 1e6, "learning_rate": 1.0}
    bed = federation(private=True, around=lambda oracle: Moving(oracle, seen))
    bed.run(Method("fedproxvr", Settings(**given)), 3)
    assert 0 < len(seen) < 3 * 3 * 10
    assert {bound for _, bound in seen} == {bed.clip / 10}


def test_the_noise_is_the_openings_and_the_differences(federation):
    """At an empty site all is noise. With η = 1, μ = 0, τ = 1: w_2 - w⁰ = -(2 v⁰ + ξ), v⁰ of
    deviation s_a = σ_a C / N in a coordinate, ξ of σ K ‖w_1 - w⁰‖ / (q N) = σ K ‖v⁰‖ / (q N): so
    E‖w_2 - w⁰‖² = d s_a² (4 + d (σ K / (q N))²).

    150 runs of d = 12: their mean spreads by about 5 %, so 20 % are four deviations. Without the
    noise of the difference, or with K twice as large, it would be 30 % less or 90 % more.
    """
    settings = Settings(proximal=0.0, learning_rate=1.0, local_steps=1, difference_bound=1.89)
    settings = settings.model_copy(update={"opening_noise": 3.0})
    method, found = Method("fedproxvr", settings), []
    for seed in range(150):
        bed = federation(private=True, counts={"a": 0}, sizes={"a": 10.0}, seed=seed)
        (reply,) = bed.replies(method, method.init(bed.w))
        found.append((reply.vectors["w"] - bed.w).square().sum())
    dimension, size = bed.w.numel(), 10.0
    opening = settings.opening_noise * bed.sigma * bed.clip / size
    factor = 4 + dimension * (bed.sigma * 1.89 / (bed.rate * size)) ** 2
    assert float(torch.stack(found).mean()) == pytest.approx(
        dimension * opening**2 * factor, rel=0.2
    )
