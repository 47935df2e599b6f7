"""Tuning inside a site: its two ends, an independent solver between them, and what it advises."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.stats import binom
from torch import nn

from fedpact.common.params import FlatModel
from fedpact.evaluation.personal import (
    MIN_RECORDS_TO_TUNE,
    WEIGHTS,
    Gain,
    SiteModel,
    Validated,
    _parts,
    answers,
    choose_lambda,
    describe_joining,
    on_held_out,
    on_own_parts,
    personalise_model,
    tune,
)

FEATURES, CLASSES = 3, 3


def model():
    return FlatModel(nn.Linear(FEATURES, CLASSES, dtype=torch.float64))


def drawn(count, seed=0, noise=1.0):
    """Records whose class is a linear function of them and of noise."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, FEATURES, generator=generator, dtype=torch.float64)
    hidden = torch.randn(FEATURES, CLASSES, generator=generator, dtype=torch.float64)
    scores = x @ hidden + noise * torch.randn(count, CLASSES, generator=generator).double()
    return x, scores.argmax(1)


def vector(seed):
    size = CLASSES * (FEATURES + 1)
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).double()


def reference(x, y, anchor, weight):
    """The minimum of F(w) + λ ‖w - a‖² by Newton's method on a softmax written out in numpy."""
    x, y, a = x.numpy(), y.numpy(), anchor.numpy()
    inputs = np.concatenate([x, np.ones((len(x), 1))], 1)
    one_hot = np.eye(CLASSES)[y]

    def unpack(w):
        # nn.Linear: the weight [K, D], then the bias [K].
        return np.concatenate([w[:-CLASSES].reshape(CLASSES, FEATURES), w[-CLASSES:, None]], 1)

    def pack(matrix):
        return np.concatenate([matrix[:, :-1].ravel(), matrix[:, -1]])

    def objective(w):
        scores = inputs @ unpack(w).T
        top = scores.max(1, keepdims=True)
        log_sum = top[:, 0] + np.log(np.exp(scores - top).sum(1))
        loss = np.mean(log_sum - scores[np.arange(len(y)), y])
        share = np.exp(scores - log_sum[:, None])
        gradient = pack((share - one_hot).T @ inputs / len(y)) + 2 * weight * (w - a)
        return loss + weight * np.sum((w - a) ** 2), gradient

    return minimize(objective, np.zeros(len(a)), jac=True, method="BFGS", tol=1e-10).x


@pytest.mark.parametrize("weight", [3.0, 0.1, 1e-3])
def test_it_finds_the_minimum_that_another_solver_finds(weight):
    (x, y), anchor = drawn(80), vector(1)
    w = tune(model(), x, y, anchor, weight, anchor)
    np.testing.assert_allclose(w.numpy(), reference(x, y, anchor, weight), rtol=0, atol=1e-3)


def test_lambda_0_gives_the_local_optimum_from_any_start():
    """The softmax has a direction without effect per column: the losses are compared."""
    x, y = drawn(80)
    best = reference(x, y, torch.zeros(12, dtype=torch.float64), 0.0)
    for seed in (1, 2):
        w = tune(model(), x, y, vector(seed), 0.0, vector(seed))
        found = answers(model(), w, x, y)[1].mean()
        expected = answers(model(), torch.from_numpy(best), x, y)[1].mean()
        assert float(found) == pytest.approx(float(expected), abs=1e-6)


def test_lambda_inf_returns_the_released_model_exactly():
    (x, y), anchor = drawn(20), vector(1)
    assert torch.equal(tune(model(), x, y, anchor, math.inf, vector(2)), anchor)


def test_without_records_or_finite_loss_the_model_is_kept():
    (x, y), anchor = drawn(20), vector(1)
    assert torch.equal(tune(model(), x[:0], y[:0], anchor, 0.1, anchor), anchor)
    x[3, 0] = math.nan
    assert torch.equal(tune(model(), x, y, anchor, 0.1, anchor), anchor)


@pytest.mark.parametrize("records", range(5))
def test_too_few_records_choose_nothing_and_are_advised(records):
    (x, y), wrong = drawn(20), vector(1)
    choice = choose_lambda(model(), x[:records], y[:records], wrong)
    assert (choice.gained, choice.lost, choice.tune) == (0, 0, False)
    assert "do not" in choice.told


def test_enough_records_that_gain_much_are_advised_for():
    x, y = drawn(100, noise=0.0)
    released = -tune(model(), x, y, torch.zeros(12).double(), 1e-3, torch.zeros(12).double())
    choice = choose_lambda(model(), x, y, released)
    assert choice.tune
    assert choice.lost == 0


def test_optimal_released_model_is_left_unchanged():
    """Its expected advice is not to tune; with no true gain it is `tune` in 5 % at most."""
    x, y = drawn(2_100)
    many = x[100:], y[100:]
    released = tune(model(), *many, torch.zeros(12).double(), 1e-4, torch.zeros(12).double())
    choice = choose_lambda(model(), x[:100], y[:100], released)
    assert not choice.tune


@pytest.mark.parametrize(("gained", "lost"), [(0, 0), (9, 0), (8, 1), (20, 3)])
def test_the_chance_is_mcnemars_times_the_choices(gained, lost):
    after = torch.tensor([True] * gained + [False] * lost + [True] * 60)
    before = torch.tensor([False] * gained + [True] * lost + [True] * 60)
    choice = Validated(0.1, len(after), torch.arange(len(after)), before, after)
    tail = sum(binom.pmf(k, gained + lost, 0.5) for k in range(gained, gained + lost + 1))
    assert choice.chance == pytest.approx(min(1.0, len(WEIGHTS) * tail))
    assert choice.tune == (len(after) >= MIN_RECORDS_TO_TUNE and len(WEIGHTS) * tail <= 0.05)


def test_no_record_is_answered_by_a_model_that_it_trained(monkeypatch):
    """Labels are noise: in its own parts a record's label cannot be known, in training it can."""
    monkeypatch.setattr("fedpact.evaluation.personal.WEIGHTS", (1e-3,))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 60, generator=generator, dtype=torch.float64)
    y = torch.randint(2, (60,), generator=generator)
    flat = FlatModel(nn.Linear(60, 2, dtype=torch.float64))
    start = torch.zeros_like(flat.vector)
    choice = choose_lambda(flat, x, y, start)
    seen = answers(flat, tune(flat, x, y, start, 1e-4, start), x, y)[0]
    assert seen.all()
    # Of 60 coins more than 45 heads have a chance of 2e-5.
    assert int(choice.after.sum()) <= 45
    assert sorted(choice.places.tolist()) == list(range(60))


def test_persons_records_are_not_scored_by_their_own_model(monkeypatch):
    """Three equal visits each, labels that are noise: who has seen one visit knows the others."""
    monkeypatch.setattr("fedpact.evaluation.personal.WEIGHTS", (1e-3,))
    generator = torch.Generator().manual_seed(0)
    whose = torch.arange(180) % 60
    x = torch.randn(60, 60, generator=generator, dtype=torch.float64)[whose]
    y = torch.randint(2, (60,), generator=generator)[whose]
    flat = FlatModel(nn.Linear(60, 2, dtype=torch.float64))
    start = torch.zeros_like(flat.vector)
    choice = choose_lambda(flat, x, y, start, whose)
    assert sorted(choice.places.tolist()) == list(range(180))
    # Of 60 coins more than 45 heads have a chance of 2e-5; each counts for three records.
    assert int(choice.after.sum()) <= 3 * 45
    # Persons are counted, not their visits: 180 coins would give the test three times its due.
    assert choice.gained + choice.lost <= 60
    assert "of 60 of its own persons" in choice.told
    few = Validated(0.1, 180, choice.places, choice.before, choice.after, whose % 49)
    assert "49 persons are too few" in few.told


@pytest.mark.parametrize(("records", "persons"), [(300, 300), (300, 60), (17, 5)])
def test_the_parts_are_of_whole_persons_and_alike(records, persons):
    whose = torch.arange(records) % persons
    parts = _parts(whose)
    assert sorted(torch.cat(parts).tolist()) == list(range(records))
    of = [set(whose[part].tolist()) for part in parts]
    assert sum(len(some) for some in of) == persons
    assert max(map(len, of)) - min(map(len, of)) <= 1
    assert not _parts(torch.arange(4))


def test_interval_covers_the_true_difference_as_stated():
    """Bonett and Price's, at 95 %: over 1,000 samples it fails in 4 to 6 %; six deviations are
    4.5 %, so it leaves 0 to 10.5 % with a chance below 1e-8."""
    rng = np.random.default_rng(0)
    n, gained, lost = 60, 0.2, 0.1
    failed = 0
    for _ in range(1000):
        u = rng.random(n)
        after, before = torch.from_numpy(u < 0.5 + gained), torch.from_numpy(u < 0.5)
        before = before | torch.from_numpy(u > 1 - lost)
        gain = Gain.of(after, before)
        failed += not gain.low <= gained - lost <= gain.high
    assert 0 < failed / 1000 <= 0.105


@pytest.mark.parametrize(("gained", "lost", "n"), [(12, 6, 60), (0, 3, 9), (5, 5, 200)])
def test_the_interval_is_bonett_and_prices(gained, lost, n):
    """Of one more pair of each kind: p - q with z sqrt((p + q - (p - q)^2) / (n + 2)).

    Each person with three equal records counts once.
    """
    after = torch.arange(n) < gained
    before = torch.arange(n) >= n - lost
    p, q = (gained + 1) / (n + 2), (lost + 1) / (n + 2)
    half = 1.959964 * math.sqrt((p + q - (p - q) ** 2) / (n + 2))
    whose = torch.arange(n).repeat(3)
    for found in (Gain.of(after, before), Gain.of(after.repeat(3), before.repeat(3), whose)):
        assert found.mean == pytest.approx((gained - lost) / n)
        assert found.low == pytest.approx(max(-1, p - q - half), rel=1e-6)
        assert found.high == pytest.approx(min(1, p - q + half), rel=1e-6)


def test_the_gain_of_joining_follows_from_the_hits():
    flat = model()
    x, y = drawn(120)
    x, x_held, y, y_held = x[:80], x[80:], y[:80], y[80:]
    w = vector(3)
    by_itself, own = (
        personalise_model(flat, x, y, torch.zeros(12).double()),
        personalise_model(flat, x, y, w),
    )
    for figures, held in (
        (on_held_out(flat, by_itself, own, w, x_held, y_held), (x_held, y_held)),
        (on_own_parts(by_itself, own), None),
    ):
        if held:
            shares = [
                float(answers(flat, each, *held)[0].double().mean())
                for each in (by_itself.w, w, own.w)
            ]
            assert [figures.local, figures.federated, figures.tuned] == shares
        used = figures.tuned if figures.tune else figures.federated
        assert figures.gain.mean == pytest.approx(used - figures.local)


def test_the_sentence_names_every_site_once():
    gains = {
        "a": Gain(0.1, 0.05, 0.15),
        "b": Gain(-0.1, -0.2, -0.05),
        "c": Gain(0.0, -0.1, 0.1),
        "d": Gain(math.nan, math.nan, math.nan),
    }
    told = describe_joining(gains, "at ε = 1")
    assert told == "At ε = 1 joining pays for a; not for b; undecided for c, d."
    assert describe_joining({"c": gains["c"]}, "without privacy") == (
        "Without privacy joining pays for no site; undecided for c."
    )


def test_accuracies_are_of_persons_where_they_are_known():
    """One with three records, all right after tuning, and one with one, right before."""
    whose = torch.tensor([0, 0, 0, 1])
    before, after = torch.tensor([False] * 3 + [True]), torch.tensor([True] * 3 + [False])
    choice = Validated(0.1, 4, torch.arange(4), before, after, whose)
    found = on_own_parts(SiteModel(torch.zeros(1), choice), SiteModel(torch.zeros(1), choice))
    assert (found.federated, found.tuned, found.persons, found.held_out) == (0.5, 0.5, 2, 4)


def test_thirty_records_are_advised_against_whatever_they_gain():
    """The released model is wrong everywhere: tuning gains all there is to gain."""
    x, y = drawn(30, noise=0.0)
    wrong = vector(1)
    choice = choose_lambda(model(), x, y, wrong)
    assert choice.gained > choice.lost
    assert not choice.tune
    assert "30 records" in choice.told
