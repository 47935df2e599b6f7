"""Intervals cover the exact figures as often as they say."""

import math

import numpy as np
import pytest

from fedpact.evaluation.figures import Figure, Sums, figures, ratio, roc_area
from fedpact.evaluation.settings import EvaluationSettings

CLASSES, GROUPS = ("no", "yes"), ("a", "b")
TRIES = 1500
# A rate of 95 % is found to be below this once in 10^5, of 1,500 tries (normal approximation).
LEAST = 0.95 - 4.3 * math.sqrt(0.95 * 0.05 / TRIES)
MOST = 0.95 + 4.3 * math.sqrt(0.95 * 0.05 / TRIES)
SETTINGS = EvaluationSettings(share=0.2, releases=["hits", "loss", "roc"], bins=10, loss_bound=2.0)


def sums(rng: np.random.Generator, of: dict[str, np.ndarray], sigma: float) -> Sums:
    noisy = {c: v.reshape(-1) + sigma * rng.standard_normal(v.size) for c, v in of.items()}
    return Sums(noisy, dict.fromkeys(of, sigma**2))


def named(found: list[Figure]) -> dict[tuple[str, str], Figure]:
    return {(figure.name, figure.about): figure for figure in found}


@pytest.mark.parametrize("scale", [1, 20])
def test_intervals_cover_the_exact_figures_as_often_as_stated(scale: int) -> None:
    """With 12 to 240 records of a class, and noise that leaves little of the smaller ones."""
    rng = np.random.default_rng(scale)
    hits = scale * np.array([[[9.0, 3], [2, 10]], [[12, 0], [5, 7]]])
    roc = scale * np.stack([np.arange(10, 0, -1), np.arange(10)]).astype(float)
    of = {"hits": hits, "loss": np.array([0.3 * hits.sum()]), "roc": roc}
    exact = named(figures(Sums(of, dict.fromkeys(of, 0.0)), SETTINGS, CLASSES, GROUPS))
    covered = dict.fromkeys(exact, 0)
    for _ in range(TRIES):
        found = named(figures(sums(rng, of, 4.0), SETTINGS, CLASSES, GROUPS))
        for key, figure in found.items():
            covered[key] += figure.low <= exact[key].value <= figure.high
    for key, count in covered.items():
        assert count / TRIES > LEAST, key
    # Where nothing is cut off, a single ratio's interval is no wider than it has to be.
    if scale == 20:
        assert covered["accuracy", "all"] / TRIES < MOST


def test_without_noise_they_are_the_figures_themselves() -> None:
    hits = np.array([[[9.0, 3], [2, 10]], [[12, 0], [5, 7]]])
    of = {"hits": hits, "loss": np.array([0.25 * 48])}
    found = named(figures(Sums(of, dict.fromkeys(of, 0.0)), SETTINGS, CLASSES, GROUPS))
    assert found["accuracy", "all"].value == pytest.approx(28 / 48)
    assert found["accuracy", "class yes"].value == pytest.approx(7 / 24)
    assert found["loss", "clipped to 2"].value == pytest.approx(0.5)
    assert found["gap of accuracy", "groups"].value == pytest.approx(17 / 24 - 11 / 24)
    # True positives 2/12 and 5/12; true negatives, so 1 - false positives, 9/12 and 12/12.
    assert found["equalised-odds gap", "groups"].value == pytest.approx(0.25)
    for figure in found.values():
        if figure.name not in ("records",):
            assert figure.low == pytest.approx(figure.value) == figure.high


def area(negative: np.ndarray, positive: np.ndarray) -> float:
    """The ROC area by its definition: pairs ranked rightly, ties half."""
    right = (positive[:, None] > negative).mean() + (positive[:, None] == negative).mean() / 2
    return float(right)


@pytest.mark.parametrize(("count", "sigma"), [(60, 3.0), (1000, 3.0)])
def test_the_roc_interval_covers_the_area_of_the_scores_themselves(
    count: int, sigma: float
) -> None:
    """Bins included: the exact area is of scores, the released one of a histogram."""
    rng = np.random.default_rng(count)
    negative, positive = rng.beta(2, 3, count), rng.beta(3, 2, count // 2)
    exact = area(negative, positive)
    edges = np.linspace(0, 1, 21)
    table = np.stack([np.histogram(v, edges)[0] for v in (negative, positive)]).astype(float)
    covered = 0
    for _ in range(TRIES):
        _, low, high = roc_area(table + sigma * rng.standard_normal(table.shape), sigma**2, 0.95)
        covered += low <= exact <= high
    assert covered / TRIES > LEAST
    value, low, high = roc_area(table, 0.0, 0.95)
    assert low <= exact <= high
    assert value == pytest.approx(exact, abs=0.02)


def test_where_noise_leaves_nothing_to_say_everything_is_possible() -> None:
    assert ratio(1.0, 2.0, (100.0, 100.0, 200.0), 0.95)[1:] == (0.0, 1.0)
    value, low, high = ratio(-3.0, -1.0, (1.0, 0.0, 1.0), 0.95)
    assert math.isnan(value)
    assert (low, high) == (0.0, 1.0)
    # Beyond all that can be: an empty interval would say nothing.
    assert ratio(-50.0, 100.0, (1.0, 0.0, 1.0), 0.95) == (0.0, 0.0, 1.0)
