"""Intervals cover the exact figures as often as they say."""

import math

import numpy as np
import pytest

from fedpact.common.messages import RoundRecord
from fedpact.evaluation.held_out import EvaluationSettings, SumsForm
from fedpact.evaluation.intervals import (
    Sums,
    estimate_figures,
    estimate_ratio,
    exact_outcome,
    roc_area,
)
from fedpact.report.evaluations import compare_with_classes

CLASSES, GROUPS = ("no", "yes"), ("a", "b")
TRIES = 600
# A rate of 95 % is found to be below this once in 10^5, of 600 tries (normal approximation).
LEAST = 0.95 - 4.3 * math.sqrt(0.95 * 0.05 / TRIES)
MOST = 0.95 + 4.3 * math.sqrt(0.95 * 0.05 / TRIES)
SETTINGS = EvaluationSettings(share=0.2, releases=["hits", "loss", "roc"], bins=10, loss_bound=2.0)
FORM = SumsForm(SETTINGS, CLASSES, GROUPS)


def sums(rng, of, sigma):
    noisy = {c: v.reshape(-1) + sigma * rng.standard_normal(v.size) for c, v in of.items()}
    return Sums(noisy, dict.fromkeys(of, sigma**2))


def named(found):
    return {(figure.name, figure.about): figure for figure in found}


def covers(exact, rng, of, form):
    """How often each noisy figure's interval held the exact one."""
    covered = dict.fromkeys(exact, 0)
    for _ in range(TRIES):
        found = named(estimate_figures(sums(rng, of, 4.0), form))
        for key, figure in found.items():
            covered[key] += figure.low <= exact[key].value <= figure.high
    for key, count in covered.items():
        assert count / TRIES > LEAST, key
    return covered


@pytest.mark.parametrize("scale", [1, 20])
def test_intervals_cover_the_exact_figures_as_often_as_stated(scale):
    """With 12 to 240 records of a class, and noise that leaves little of the smaller ones."""
    rng = np.random.default_rng(scale)
    hits = scale * np.array([[[9.0, 3], [2, 10]], [[12, 0], [5, 7]]])
    roc = scale * np.stack([np.arange(10, 0, -1), np.arange(10)]).astype(float)
    of = {"hits": hits, "loss": np.array([0.3 * hits.sum()]), "roc": roc}
    exact = named(estimate_figures(Sums(of, dict.fromkeys(of, 0.0)), FORM))
    covered = covers(exact, rng, of, FORM)
    # Where nothing is cut off, a single ratio's interval is no wider than it has to be.
    if scale == 20:
        assert covered["accuracy", "all"] / TRIES < MOST


def test_without_noise_they_are_the_figures_themselves():
    hits = np.array([[[9.0, 3], [2, 10]], [[12, 0], [5, 7]]])
    of = {"hits": hits, "loss": np.array([0.25 * 48])}
    found = named(estimate_figures(Sums(of, dict.fromkeys(of, 0.0)), FORM))
    assert found["accuracy", "all"].value == pytest.approx(28 / 48)
    assert found["accuracy", "class yes"].value == pytest.approx(7 / 24)
    assert found["loss", "clipped to 2"].value == pytest.approx(0.5)
    assert found["gap of accuracy", "groups"].value == pytest.approx(17 / 24 - 11 / 24)
    assert found["true positive rate of class yes", "group b"].value == pytest.approx(5 / 12)
    assert found["false positive rate of class yes", "group a"].value == pytest.approx(3 / 12)
    # True positives 2/12 and 5/12, false ones 3/12 and 0.
    assert found["equalised-odds gap", "groups"].value == pytest.approx(0.25)
    for figure in found.values():
        if figure.name not in ("records",):
            assert figure.low == pytest.approx(figure.value) == figure.high


def counted(rng):
    """Records of three classes in two groups: hits, false positives, and rates by counting."""
    group, y, said = rng.integers(2, size=900), rng.integers(3, size=900), rng.integers(3, size=900)
    said = np.where(rng.random(900) < 0.6 - 0.2 * group, y, said)
    hits = np.zeros((2, 3, 2))
    np.add.at(hits, (group, y, (said != y).astype(int)), 1.0)
    wrong = np.zeros((2, 3))
    np.add.at(wrong, (group[said != y], said[said != y]), 1.0)
    rates = {}
    for g, c in np.ndindex(2, 3):
        own, true = group == g, y == c
        rates["true", g, c] = (said == c)[own & true].mean()
        rates["false", g, c] = (said == c)[own & ~true].mean()
    return hits, wrong, rates


def test_multiclass_rates_are_one_against_rest():
    rng = np.random.default_rng(4)
    hits, wrong, rates = counted(rng)
    settings = EvaluationSettings(share=0.2, releases=["hits", "false_positives"])
    names, of = ("x", "y", "z"), {"hits": hits, "false_positives": wrong}
    plain = Sums(of, dict.fromkeys(of, 0.0))
    form = SumsForm(settings, names, GROUPS)
    exact = named(estimate_figures(plain, form))
    for (kind, g, c), rate in rates.items():
        figure = exact[f"{kind} positive rate of class {names[c]}", f"group {GROUPS[g]}"]
        assert figure.value == pytest.approx(rate) == figure.low == figure.high
    gaps = [abs(rates[k, 0, c] - rates[k, 1, c]) for k in ("true", "false") for c in range(3)]
    assert exact["equalised-odds gap", "groups"].value == pytest.approx(max(gaps))
    # Over both groups, with noise: as often within their intervals as stated.
    covers(exact, rng, of, form)
    # Without the false positives there is no gap of odds.
    fewer = named(estimate_figures(Sums({"hits": hits}, {"hits": 0.0}), form))
    assert ("equalised-odds gap", "groups") not in fewer
    gap = fewer["gap of true positive rates", "groups"].value
    assert gap == pytest.approx(max(gaps[:3]))


def area(negative, positive):
    """The ROC area by its definition: pairs ranked rightly, ties half."""
    right = (positive[:, None] > negative).mean() + (positive[:, None] == negative).mean() / 2
    return float(right)


@pytest.mark.parametrize(("count", "sigma"), [(60, 3.0), (1000, 3.0)])
def test_roc_interval_covers_the_exact_area(count, sigma):
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


def test_a_ratios_interval_ends_at_z_deviations():
    """|a - θ b| = z sd(a - θ b) at both ends (Fieller), z = 1.95996 at 95 %."""
    a, b, of_a, both, of_b = 30.0, 50.0, 9.0, 4.0, 16.0
    value, low, high = estimate_ratio(a, b, (of_a, both, of_b), 0.95)
    assert 0 < low < value == a / b < high < 1
    for end in (low, high):
        deviation = math.sqrt(of_a - 2 * end * both + end * end * of_b)
        assert abs(a - end * b) == pytest.approx(1.959964 * deviation, rel=1e-6)


def test_each_figures_interval_counts_the_noise_of_its_sums():
    """σ² for each entry of hits and misses [groups, classes, 2] that it adds: hits, both, all."""
    hits = np.array([[[90.0, 30], [20, 100]], [[120, 10], [50, 70]]])
    of, noise = {"hits": hits, "loss": np.array([150.0])}, {"hits": 16.0, "loss": 9.0}
    found = named(estimate_figures(Sums(of, noise), FORM))
    for key, a, b, entries in (
        (("accuracy", "all"), 280, 490, 4),
        (("accuracy", "class yes"), 70, 240, 2),
        (("accuracy", "group a"), 110, 240, 2),
        (("true positive rate of class yes", "group b"), 50, 120, 1),
        (("false positive rate of class yes", "group a"), 30, 120, 1),
    ):
        part = entries * 16.0
        expected = estimate_ratio(a, b, (part, part, 2 * part), 0.95)
        assert (found[key].value, found[key].low, found[key].high) == pytest.approx(expected)
    expected = estimate_ratio(150, 490, (9.0, 0.0, 8 * 16.0), 0.95)
    loss, records = found["loss", "clipped to 2"], found["records", "all"]
    assert (loss.low, loss.high) == pytest.approx((2 * expected[1], 2 * expected[2]))
    half = 1.959964 * math.sqrt(8 * 16.0)
    assert (records.low, records.high) == pytest.approx((490 - half, 490 + half))


def test_overwhelming_noise_gives_the_full_interval():
    assert estimate_ratio(1.0, 2.0, (100.0, 100.0, 200.0), 0.95)[1:] == (0.0, 1.0)
    value, low, high = estimate_ratio(-3.0, -1.0, (1.0, 0.0, 1.0), 0.95)
    assert math.isnan(value)
    assert (low, high) == (0.0, 1.0)
    # Beyond all that can be: an empty interval would say nothing.
    assert estimate_ratio(-50.0, 100.0, (1.0, 0.0, 1.0), 0.95) == (0.0, 0.0, 1.0)


def test_the_commonest_class_is_the_one_of_most_counts():
    settings = EvaluationSettings(share=0.2, releases=["hits"])
    form = SumsForm(settings, ("no", "yes"), ("a", "b"))
    # By group and class: hits and misses. Of 2 + 3 + 4 + 1 there are 3 + 5 of "yes".
    record = RoundRecord(round=1, held_out={"s": {"hits": [1, 1, 2, 1, 0, 0, 4, 1]}})
    found = exact_outcome([record], form)
    assert found["commonest"] == {"name": "yes", "accuracy": 0.8}
    told = compare_with_classes(found)
    assert told[0] == "no better than always answering 'yes', which gives 80.00 %"
    assert told[1].startswith("worst for class no: 50.0 %")
