"""The attack and the noise's level on a real oracle: it stands, and mistakes are found.

Draws are seeded, so the tests do not fail by chance; the stated rates are those of other seeds.
"""

import dataclasses
import math
import re

import pytest
import torch
from scipy import stats
from tests.studies.audit.conftest import scaled_noise

from fedpact.common.errors import InputError, PlanError
from fedpact.plan import Plan
from fedpact.privacy.accounting.accountant import epsilon
from fedpact.simulation.setup import SimulationSetup
from fedpact.studies.audit import one_run as one_run_module
from fedpact.studies.audit.noise import (
    check_mechanism,
    noise_levels,
    noise_over,
    noise_tests,
    queries_of,
    why_untested,
)
from fedpact.studies.audit.one_run import _gradients, _shares, one_run
from fedpact.studies.audit.target import Target, draw_mislabelled, private_oracle, simulate_rounds

FAIR = ("algorithm=fedfdp", "settings.fairness_weight=0.6")


@pytest.fixture(scope="module")
def plain(audited):
    return audited.target()


@pytest.fixture(scope="module")
def fair(audited):
    return audited.target(*FAIR)


def passes(target, canaries):
    return all(row.passed for row in one_run(target, canaries))


def measured(level):
    """The noise multiplier itself: its bound is as far above it as that at best above the claim."""
    return level.bound * level.claimed / level.power


def levels_of(target):
    return noise_levels(target, noise_over(target, queries_of(target), target.no_records))


def test_each_rounds_clip_is_attacked(audited):
    target = audited.target("privacy.clip_schedule=[1.0, 0.05]", "rounds=2", "privacy.epsilon=1.0")
    canaries = draw_mislabelled(target, 8)
    for number, asked in enumerate(simulate_rounds(target, target.records, 2, "test"), start=1):
        clip = target.terms.at(number).clip
        rows = _shares(target, canaries, asked[0])
        assert float(rows.norm(dim=1).max()) == pytest.approx(clip, rel=1e-5)


def test_gradients_without_vmap_are_the_same(plain, monkeypatch):
    """Record by record, as for a model with a layer that vmap cannot batch."""
    canaries = draw_mislabelled(plain, 5)
    rows, losses = _gradients(plain, canaries)

    def refused(*_, **__):
        raise RuntimeError

    monkeypatch.setattr(one_run_module, "vmap", lambda *_, **__: refused)
    one_by_one, same = _gradients(plain, canaries)
    assert torch.allclose(rows, one_by_one, atol=1e-6)
    assert torch.allclose(losses, same, atol=1e-6)


@pytest.mark.parametrize(("factor", "passes"), [(1.0, True), (0.9, False)])
def test_noise_level(factor, passes, fair):
    """Of three channels, by a chi-square test; a correct one fails for 0.1 % of seeds."""
    levels = levels_of(dataclasses.replace(fair, make=scaled_noise(factor, fair.make)))
    told = {level.found.split(",")[0] for level in levels}
    assert told == {f"noise of {channel}" for channel in ("gradient", "loss", "below")}
    assert all(level.passed for level in levels) == passes
    for level in levels:
        # 200 releases of one number have a relative error of 5 % (one standard deviation).
        assert measured(level) == pytest.approx(factor * level.claimed, rel=0.25)


def test_noise_level_of_batch_clipping(audited):
    target = audited.target("algorithm=ldp_fedsgd", "privacy.mode=batch_clipped")
    found = check_mechanism(target)
    assert all(row.passed for row in found)
    assert measured(found[0]) == pytest.approx(target.terms.multipliers["gradient"], rel=0.02)
    broken = dataclasses.replace(target, make=audited.broken["noise halved"])
    assert not levels_of(broken)[0].passed


def test_noise_on_a_coarse_grid_is_found_as_it_is(audited):
    """Rounded to a sixteenth of its deviation; half of it is found all the same."""
    target = audited.target("compression.kind=grid", "algorithm=fedfdp")
    assert target.terms.grid
    queries = queries_of(target)
    alone = noise_over(target, queries, target.no_records)
    for level in noise_levels(target, alone):
        assert level.passed
        assert measured(level) == pytest.approx(level.claimed, rel=0.25)
    assert all(test.passed for test in noise_tests(target, queries, alone))
    broken = dataclasses.replace(target, make=audited.broken["noise halved"])
    assert not any(
        level.passed
        for level in noise_levels(broken, noise_over(broken, queries, broken.no_records))
    )


def test_play_asks_what_the_algorithm_asks(audited):
    target = audited.target("settings.local_steps=3", "rounds=2")
    rounds = list(simulate_rounds(target, target.records, 2, "test"))
    assert [[(a.batch, a.channel) for a in asked] for asked in rounds] == [
        [(0, "gradient"), (1, "gradient"), (2, "gradient")]
    ] * 2
    # w moved by the learning rate times each answer.
    first, second = rounds[0][:2]
    rate = target.plan.algorithm_settings.learning_rate
    assert torch.allclose(second.query[0], first.query[0] - rate * first.answer, atol=1e-5)


def test_canaries_are_mislabelled_and_repeatable(plain):
    made = draw_mislabelled(plain, 300)
    again = draw_mislabelled(plain, 300)
    assert torch.equal(made.x, again.x)
    assert torch.equal(made.y, again.y)
    assert 0 <= int(made.y.min()) <= int(made.y.max()) < plain.classes
    for x, y in zip(made.x, made.y, strict=True):
        same = (plain.spare.x == x).flatten(1).all(1)
        assert same.any()
        assert (plain.spare.y[same] != y).all()
    assert len(draw_mislabelled(plain, 5000).y) == 5000


def test_one_run_passes_and_learns_with_less_noise(audited):
    """At the default budget, and where nearly no noise is left."""
    default = audited.target("rounds=5", "sampling_rate=0.5", "privacy.epsilon=2.0")
    found, _ = checks = one_run(default, 200)
    assert all(row.passed for row in checks)
    assert default.terms.steps == 5
    assert found.found.endswith("200 canaries, 5 events")
    assert found.claimed == pytest.approx(2.0, abs=1e-3)
    loud = audited.target("rounds=10", "sampling_rate=0.5", "privacy.epsilon=60.0")
    assert one_run(loud, 200)[0].bound > 1.0


def test_one_run_finds_a_mechanism_that_forgot_its_noise(audited):
    """Told apart at a small ε, which the bound of one run can exceed."""
    target = audited.target("rounds=5", "sampling_rate=0.5", "privacy.epsilon=0.5")
    assert passes(target, 400)
    silent = dataclasses.replace(target, make=scaled_noise(1e-3, target.make))
    assert not passes(silent, 400)


def test_one_run_guesses_only_what_it_may(audited):
    """Releases that do not depend on the coins: right half of the time, and ε stays 0.

    More than 5 sigma of right guesses, for 1e-6 of seeds.
    """
    target = audited.target("rounds=5", "sampling_rate=0.5")

    def deaf(records, kernel, terms, draws):
        return target.make(target.records, kernel, terms, draws)

    found, _ = one_run(dataclasses.replace(target, make=deaf), 400)
    correct, guesses = map(int, re.findall(r"\d+", found.found)[:2])
    law = stats.binom(guesses, 0.5)
    assert law.ppf(1e-6) <= correct <= law.isf(1e-6)
    assert found.bound < 0.5


def test_a_plain_run_has_no_claim():
    with pytest.raises(PlanError, match="claims no ε"):
        Target.of(SimulationSetup.of(Plan.read(None, ["privacy.mode=none"])))


def test_unknown_site():
    with pytest.raises(InputError, match="site-00"):
        Target.of(SimulationSetup.of(Plan.read(None)), "nowhere")


@pytest.mark.parametrize("bad", [0, -1])
def test_counts_are_checked(bad, plain):
    with pytest.raises(InputError, match="canaries is"):
        one_run(plain, bad)


def test_claims_are_the_accountants(plain):
    delta = plain.terms.budget.delta
    assert plain.claimed(plain.terms.steps, delta) <= plain.terms.budget.epsilon
    assert math.isclose(plain.claimed(plain.terms.steps, delta), 6.0, rel_tol=1e-3)


def test_a_round_with_an_opening_event_is_audited(audited):
    # FedProxVR: one gradient over the opening, then τ differences; each has its own rate and noise.
    rounds = ("rounds=2", "settings.local_steps=3", "privacy.epsilon=1.0")
    honest = audited.target("algorithm=fedproxvr", *rounds)
    found, _ = checks = one_run(honest, 200)
    assert all(row.passed for row in checks)
    assert found.found.endswith(f"{2 * (1 + 3)} events")
    whole = honest.terms.history(2 * 3, 2)
    assert found.claimed == epsilon(whole, found.delta, honest.terms.accountant)
    assert "without an opening" in why_untested(honest)

    def faint(records, kernel, terms, draws):
        quiet = {channel: sigma / 1e4 for channel, sigma in terms.opening_sigmas.items()}
        changed = dataclasses.replace(terms, opening_sigmas=quiet)
        return private_oracle(records, kernel, changed, draws)

    assert not passes(dataclasses.replace(honest, make=faint), 200)
