"""Attacks on a real oracle: it stands, and each of four mistakes is found.

Draws are seeded, so the tests do not fail by chance; the stated rates are those of other seeds.
"""

import dataclasses
import math

import pytest
import torch
from scipy import stats

from fedpact.common.errors import DataError, InputError, PlanError
from fedpact.plan import Plan
from fedpact.privacy.accounting.accountant import epsilon
from fedpact.privacy.batches import clip_for
from fedpact.simulation.setup import SimulationSetup
from fedpact.studies.audit.attacks import _shares, attacks, many_runs, membership, one_run
from fedpact.studies.audit.noise import noise_levels, noise_tests
from fedpact.studies.audit.target import Target, draw_mislabelled, private_oracle, simulate_rounds

FAIR = ("algorithm=fedfdp", "settings.fairness_weight=0.6")


@pytest.fixture(scope="module")
def plain(audited):
    return audited.target()


@pytest.fixture(scope="module")
def fair(audited):
    return audited.target(*FAIR)


def bounds_fail(found):
    return [bound.delta for bound in found.bounds if not bound.passed]


def test_a_correct_mechanism_passes(plain, fair):
    """Fails for 5 % of seeds at most, and 0.1 % for the noise."""
    for target in (plain, fair):
        found = many_runs(target, runs=100)
        assert found.passed
        # The attack is worth something: 100 runs show that some privacy is lost.
        assert found.bounds[0].epsilon > 0


@pytest.mark.parametrize("mistake", ["noise halved", "clip not applied", "realised batch size"])
def test_a_mistake_is_found(mistake, plain, audited, bounds_alone):
    found = many_runs(dataclasses.replace(plain, make=audited.broken[mistake]), runs=200)
    assert not found.passed
    assert bounds_fail(found), found


def test_each_rounds_clip_is_attacked(audited, monkeypatch, bounds_alone):
    """A clip that stays where the noise follows the schedule is found; a right one passes.

    That it does fails for 5 % of seeds at most, as above.
    """
    monkeypatch.setattr("fedpact.studies.audit.attacks._PILOT", 20)
    target = audited.target("privacy.clip_schedule=[1.0, 0.05]", "rounds=2", "privacy.epsilon=1.0")
    longest = target.terms.clip

    def stays(records, kernel, terms, draws):
        return private_oracle(records, audited.Constant(kernel, longest), terms, draws)

    assert many_runs(target, runs=40).passed
    assert bounds_fail(many_runs(dataclasses.replace(target, make=stays), runs=40))
    canaries = draw_mislabelled(target, 8)
    for number, asked in enumerate(simulate_rounds(target, target.records, 2, "test"), start=1):
        clip = target.terms.at(number).clip
        rows = _shares(target, canaries, asked[0])
        assert float(rows.norm(dim=1).max()) == pytest.approx(clip, rel=1e-5)


def test_false_alarms_are_rare(plain, monkeypatch, bounds_alone):
    """Six seeds of a correct mechanism: each alarms at 5 % at most, more than 3 at 9e-5.

    That holds for whatever rule the pilots give, so for one of few as well.
    """
    monkeypatch.setattr("fedpact.studies.audit.attacks._PILOT", 10)
    alarms = 0
    for seed in range(6):
        target = dataclasses.replace(plain, plan=plain.plan.model_copy(update={"seed": seed}))
        alarms += not many_runs(target, runs=40).passed
    assert alarms <= 3


@pytest.mark.parametrize(("factor", "passes"), [(1.0, True), (0.9, False), (0.5, False)])
def test_noise_level(factor, passes, fair):
    """Of three channels, by a chi-square test; a correct one fails for 0.1 % of seeds."""

    def quieter(records, kernel, terms, draws):
        sigmas = {channel: factor * sigma for channel, sigma in terms.sigmas.items()}
        return fair.make(records, kernel, dataclasses.replace(terms, sigmas=sigmas), draws)

    queries = attacks(fair)[0].queries
    levels = noise_levels(dataclasses.replace(fair, make=quieter), queries)
    assert {level.channel for level in levels} == {"gradient", "loss", "below"}
    assert all(level.passed for level in levels) == passes
    for level in levels:
        # 200 releases of one number have a relative error of 5 % (one standard deviation).
        assert level.measured == pytest.approx(factor * level.claimed, rel=0.25)


def test_noise_level_of_batch_clipping(audited):
    target = audited.target("algorithm=ldp_fedsgd", "privacy.mode=batch_clipped")
    found = many_runs(target, runs=60)
    assert found.passed
    assert found.noise[0].measured == pytest.approx(target.terms.multipliers["gradient"], rel=0.02)
    broken = dataclasses.replace(target, make=audited.broken["noise halved"])
    assert not noise_levels(broken, attacks(broken)[0].queries)[0].passed


@pytest.mark.parametrize("tables", [[], ["algorithm=fedfdp"]])
def test_noise_on_a_coarse_grid_is_found_as_it_is(audited, tables):
    """Rounded to a quarter of its deviation, or a sixteenth; half of it is found all the same."""
    target = audited.target("compression.kind=grid", *tables)
    assert target.terms.grid
    queries = attacks(target)[0].queries
    for level in noise_levels(target, queries):
        assert level.passed
        assert level.measured == pytest.approx(level.claimed, rel=0.25)
    assert all(test.passed for test in noise_tests(target, queries))
    broken = dataclasses.replace(target, make=audited.broken["noise halved"])
    assert not any(level.passed for level in noise_levels(broken, queries))


def test_the_canary_is_as_bad_as_it_can_be(plain):
    """Its clipped contribution is as long as the oracle allows, and its direction is its own."""
    longest = clip_for(plain.terms.clip, 1.0)  # of the canary alone, at a rate of 1
    for attack in attacks(plain):
        answer = plain.answer(attack.canary, "gradient", attack.queries["gradient"]).double()
        assert float(answer.norm()) == pytest.approx(longest, rel=1e-5)
        assert float(answer @ attack.directions["gradient"]) == pytest.approx(longest, rel=1e-5)


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
    default = audited.target("rounds=60", "sampling_rate=0.5", "privacy.epsilon=2.0")
    found = one_run(default, 300)
    assert found.passed
    assert found.events == default.terms.steps == 60
    assert found.claimed == pytest.approx(2.0, abs=1e-3)
    loud = audited.target("rounds=20", "sampling_rate=0.5", "privacy.epsilon=60.0")
    assert one_run(loud, 300).epsilon > 1.0


def test_one_run_finds_a_mechanism_that_forgot_its_noise(audited):
    """Told apart at a small ε, which the bound of one run can exceed."""
    target = audited.target("rounds=20", "sampling_rate=0.5", "privacy.epsilon=0.5")

    def silent(records, kernel, terms, draws):
        sigmas = {channel: sigma / 1000 for channel, sigma in terms.sigmas.items()}
        return target.make(records, kernel, dataclasses.replace(terms, sigmas=sigmas), draws)

    assert one_run(target, 400).passed
    assert not one_run(dataclasses.replace(target, make=silent), 400).passed


def test_one_run_guesses_only_what_it_may(audited):
    """Releases that do not depend on the coins: right half of the time, and ε stays 0.

    More than 5 sigma of right guesses, for 1e-6 of seeds.
    """
    target = audited.target("rounds=5", "sampling_rate=0.5")

    def deaf(records, kernel, terms, draws):
        return target.make(target.records, kernel, terms, draws)

    found = one_run(dataclasses.replace(target, make=deaf), 400)
    law = stats.binom(found.guesses, 0.5)
    assert law.ppf(1e-6) <= found.correct <= law.isf(1e-6)
    assert found.epsilon < 0.5


def test_membership():
    """An overfitted plain twin gives members away, the private model does not."""
    private = SimulationSetup.of(Plan.read(None, ["rounds=5", "partition.held_out=0.3"]))
    found = membership(private)
    assert found.passed
    assert found.auc.low <= 0.5 + 0.05
    assert found.members + found.others == sum(len(s.y) + len(s.y_held) for s in private.sites)
    # AUC is at most 1/2 + advantage (1 - advantage/2): the hull over one best threshold.
    assert found.auc.value <= 0.5 + found.advantage
    assert 0.5 < found.ceiling < 1


def test_membership_needs_others(monkeypatch):
    scene = SimulationSetup.of(Plan.read(None, ["partition.held_out=0.0"]))
    alone = dataclasses.replace(scene.dataset, x_test=None, y_test=None)
    with pytest.raises(DataError, match=r"partition\.held_out"):
        membership(dataclasses.replace(scene, dataset=alone))


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
    with pytest.raises(InputError, match="runs is"):
        many_runs(plain, bad)


def test_claims_are_the_accountants(plain):
    delta = plain.terms.budget.delta
    assert plain.claimed(plain.terms.steps, delta) <= plain.terms.budget.epsilon
    assert math.isclose(plain.claimed(plain.terms.steps, delta), 6.0, rel_tol=1e-3)


def test_a_round_with_an_opening_event_is_audited(audited):
    # FedProxVR: one gradient over the opening, then τ differences; each has its own rate and noise.
    rounds = ("rounds=2", "settings.local_steps=3", "privacy.epsilon=1.0")
    honest = audited.target("algorithm=fedproxvr", *rounds)
    found = one_run(honest, 200)
    assert found.passed
    assert found.events == 2 * (1 + 3)
    whole = honest.terms.history(2 * 3, 2)
    assert found.claimed == epsilon(whole, found.delta, honest.terms.accountant)
    with pytest.raises(InputError, match="many-runs attack only knows gradient"):
        many_runs(honest)

    def faint(records, kernel, terms, draws):
        quiet = {channel: sigma / 1e4 for channel, sigma in terms.opening_sigmas.items()}
        changed = dataclasses.replace(terms, opening_sigmas=quiet)
        return private_oracle(records, kernel, changed, draws)

    assert not one_run(dataclasses.replace(honest, make=faint), 200).passed
