"""Robust aggregates: the rules by their definitions, liars kept out, and whole runs."""

import itertools
import math

import pytest
import torch
from torch.testing import assert_close

from fedpact.algorithms.common.steps import weighted_mean
from fedpact.algorithms.fedavg import Settings
from fedpact.algorithms.wrappers.base import Method
from fedpact.algorithms.wrappers.robust import Robust, RobustSettings
from fedpact.common.errors import InputError, PlanError
from fedpact.common.messages import Reply, State
from fedpact.common.randomness.seeded import seeded_generator
from fedpact.plan import Plan
from fedpact.simulation.simulate import simulate

D = 60


def replies(values, weights=None):
    return [
        Reply("run", 1, f"site-{i}", weight, {"w": value}, {})
        for i, (value, weight) in enumerate(
            zip(values, weights or [1.0] * len(values), strict=True)
        )
    ]


def honest(count):
    return [
        torch.randn(D, generator=seeded_generator("robust", i), dtype=torch.float64)
        for i in range(count)
    ]


def aggregate(rule, values, liars=1, **more):
    method = Robust(Method("fedavg", Settings()), RobustSettings(rule=rule, liars=liars))
    return method.update(State({"w": torch.zeros(D)}), replies(values, **more)).vectors["w"]


LIES = [torch.full((D,), x, dtype=torch.float64) for x in (1e30, -1e30, 9.0, math.inf, math.nan)]


@pytest.mark.parametrize("count", [1, 2, 5, 6])
def test_the_median_is_each_coordinates(count):
    values = honest(count)
    for place in range(D):
        column = sorted(float(v[place]) for v in values)
        middle = (column[(count - 1) // 2] + column[count // 2]) / 2
        assert float(aggregate("median", values)[place]) == pytest.approx(middle, abs=1e-15)


@pytest.mark.parametrize(("count", "cut"), [(5, 0), (5, 1), (5, 2), (7, 3)])
def test_the_trimmed_mean_leaves_out_the_ends(count, cut):
    values = honest(count)
    for place in range(D):
        column = sorted(float(v[place]) for v in values)[cut : count - cut]
        expected = math.fsum(column) / len(column)
        got = float(aggregate("trimmed", values, liars=cut)[place])
        assert got == pytest.approx(expected, abs=1e-14)


def test_krum_takes_the_reply_with_the_nearest_neighbours():
    """By its definition, with loops: n = 6, f = 1, so the three nearest others count."""
    values = honest(6)

    def score(one):
        others = [v for v in values if v is not one]
        return math.fsum(sorted(float((one - v).square().sum()) for v in others)[:3])

    best = min(values, key=score)
    assert torch.equal(aggregate("krum", values), best)


@pytest.mark.parametrize("rule", ["median", "trimmed", "krum"])
@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("place", [0, 3, 5])
def test_a_liar_cannot_leave_the_honest_sites_range(rule, lie, place):
    """Every coordinate stays between the smallest and the largest honest value; the mean's not."""
    values = honest(5)
    among = [*values[:place], lie, *values[place:]]
    low, high = torch.stack(values).amin(0), torch.stack(values).amax(0)
    got = aggregate(rule, among)
    assert bool(((low <= got) & (got <= high)).all())
    mean = weighted_mean(replies(among)).vectors["w"]
    assert not bool(((low <= mean) & (mean <= high)).all())


@pytest.mark.parametrize("rule", ["median", "trimmed", "krum"])
def test_order_and_weights_do_not_matter_and_equal_replies_stay(rule):
    # With five there is more than one neighbour, so krum's scores are not equal in pairs.
    values = honest(5)
    first = aggregate(rule, values)
    for order in itertools.permutations(values):
        assert_close(aggregate(rule, order), first, rtol=0, atol=1e-15)
    assert torch.equal(aggregate(rule, values, weights=[1.0, 9.0, 2.0, 1e6, 0.5]), first)
    # A mean of three equal numbers is off by their sum's rounding.
    assert_close(aggregate(rule, [values[0]] * 5), values[0], rtol=1e-15, atol=0)


@pytest.mark.parametrize("rule", ["median", "trimmed", "krum"])
def test_few_replies_still_make_an_aggregate_and_none_do_not(rule):
    one = honest(1)
    assert torch.equal(aggregate(rule, one, liars=3), one[0])
    two = honest(2)
    got = aggregate(rule, two, liars=3)
    assert got.shape == two[0].shape
    with pytest.raises(InputError, match="replies is empty"):
        aggregate(rule, [])


@pytest.mark.parametrize(
    ("rule", "tables"),
    [
        ("median", {"algorithm": "fedfdp"}),
        ("trimmed", {"server": {"optimiser": "momentum"}, "compression": {"kind": "int8"}}),
    ],
)
def test_whole_runs_learn_within_the_same_budget(tmp_path, rule, tables):
    plan = Plan.parse(
        {
            **tables,
            "robust": {"rule": rule},
            "rounds": 6,
            "run": {"evaluate_every": 6, "workers": 1},
            "privacy": {"accountant": "rdp"},
        }
    )
    result = simulate(plan, tmp_path / "run")
    assert result.summary["status"] == "finished"
    assert result.records[-1].loss < result.records[0].loss
    assert max(result.summary["epsilon"].values()) <= 2.0


def test_an_algorithm_with_an_update_of_its_own_is_refused():
    with pytest.raises(PlanError, match=r"\[robust\] cannot be combined with"):
        Plan.parse({"algorithm": "qffl", "robust": {"rule": "median"}})


@pytest.mark.parametrize(("rule", "least"), [("median", 5), ("trimmed", 5), ("krum", 7)])
def test_a_round_that_liars_could_decide_is_refused(rule, least):
    """Yin et al. ask for n > 2f, Blanchard et al. for n >= 2f + 3: n sites in a round, not in all.

    All f may be drawn into one round.
    """
    table = {"robust": {"rule": rule, "liars": 2}}
    for few in ({"sites": 20, "sites_per_round": least - 1}, {"sites": least - 1}):
        with pytest.raises(PlanError, match=rf"liars = 2 with {least - 1} sites.*least {least}"):
            Plan.parse({**table, **few})
        Plan.parse({**few, "robust": {"rule": rule, "liars": 0 if rule == "krum" else 1}})
    for enough in ({"sites": 20, "sites_per_round": least}, {"sites": least}):
        Plan.parse({**table, **enough})
    # A deployment has as many as its federation names.
    Plan.parse({**table, "sites": 20}).check_sites(least)
    with pytest.raises(PlanError, match=f"with {least - 1} sites in a round"):
        Plan.parse({**table, "sites": 20}).check_sites(least - 1)


def test_nothing_trimmed_is_the_mean_of_equal_sites():
    values = honest(5)
    expected = weighted_mean(replies(values)).vectors["w"]
    assert_close(aggregate("trimmed", values, liars=0), expected, rtol=0, atol=1e-14)
