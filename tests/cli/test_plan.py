"""`fedpact plan --optimise`: its choice keeps the budget with everything else that is released."""

import pytest

from fedpact.cli.plan import optimised
from fedpact.engines.scene import Scene
from fedpact.errors import PlanError
from fedpact.plan import Plan
from fedpact.theory.accounting import SampledGaussian, epsilon


def scene(*overrides):
    return Scene.of(Plan.read(None, ["rounds=20", "sites=2", *overrides]))


@pytest.mark.parametrize(
    "overrides",
    [(), ("privacy.sizes=noisy",), ("algorithm=fedproxvr", "settings.local_steps=2")],
    ids=["batches alone", "a noisy size", "openings of rounds"],
)
def test_the_choice_keeps_the_budget_together_with_what_is_no_batch(overrides):
    whole = scene(*overrides)
    (case,) = optimised(whole, passes=4.0)["cases"]
    chosen, terms = case["chosen"], whole.terms["site-00"]
    history = terms.history(0, terms.openings)
    history[SampledGaussian(chosen["sampling_rate"], chosen["sigma"])] += int(chosen["steps"])
    assert 0.99 * case["epsilon"] < epsilon(history, case["delta"]) <= case["epsilon"]
    assert chosen["passes"] <= 4.0
    assert case["gain"] == pytest.approx(chosen["snr"] / case["configured"]["snr"])


def test_a_small_batch_is_beaten_and_the_gain_is_shown():
    (case,) = optimised(scene("sampling_rate=0.02", "privacy.sigma=1.0"), passes=2.0)["cases"]
    assert case["gain"] > 1.2
    assert case["chosen"]["snr"] > case["configured"]["snr"]


def test_a_plain_run_has_nothing_to_choose():
    with pytest.raises(PlanError, match="there is none"):
        optimised(scene("privacy.mode=none"), None)
