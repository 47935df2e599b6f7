"""The simulated clock: whose time a round takes, who is late, and that it changes nothing else."""

import math
import statistics

import pytest
import torch

import fedpact
from fedpact.common.errors import PlanError
from fedpact.common.run_settings import SimulatedClock

SITES = ("a", "b", "c")
NOTHING = dict.fromkeys(SITES, (0, 0))


def test_a_round_takes_as_long_as_its_slowest_site():
    """T rounds of τ steps take T (d_com + d_cmp τ), the time that FedProxVR minimises."""
    clock = SimulatedClock(message_seconds=[1.0, 2.0, 3.0], step_seconds=[0.5, 0.1, 0.1])
    assert clock.round(0, 1, 1, SITES, NOTHING) == (pytest.approx(3.1), frozenset())
    assert clock.round(0, 2, 10, SITES, NOTHING) == (6.0, frozenset())
    assert clock.round(0, 2, 10, SITES, {"b": (0, 0)}) == (3.0, frozenset())
    assert SimulatedClock().round(0, 1, 5, SITES, NOTHING) == (0.0, frozenset())


def test_bytes_take_their_time_up_and_down():
    clock = SimulatedClock(down_seconds=[0.0, 1.0, 0.0], up_seconds=2.0, deadline=25.0)
    sent = {"a": (7, 10), "b": (7, 10), "c": (7, 1)}
    assert clock.round(0, 1, 1, SITES, sent) == (25.0, {"b"})
    assert clock.round(0, 1, 1, SITES, sent | {"b": (5, 10)}) == (25.0, frozenset())


def test_sites_after_the_deadline_are_left_out():
    clock = SimulatedClock(message_seconds=[1.0, 2.0, 3.0], deadline=2.0)
    assert clock.round(0, 1, 1, SITES, NOTHING) == (2.0, {"c"})
    assert clock.round(0, 1, 1, SITES, {"b": (0, 0), "c": (0, 0)}) == (2.0, {"c"})
    assert clock.round(0, 1, 1, SITES, {"c": (0, 0)}) == (3.0, frozenset())


def test_factors_have_the_law_that_is_stated():
    clock = SimulatedClock(message_seconds=1.0, spread=0.5)
    own = [clock.round(0, n, 1, SITES, {"a": (0, 0)})[0] for n in (1, 2)]
    assert own[0] == own[1] != clock.round(1, 1, 1, SITES, {"a": (0, 0)})[0]
    clock = SimulatedClock(
        message_seconds=1.0, jitter=0.5, straggler_chance=0.2, straggler_factor=1e6
    )
    found = [math.log(clock.round(0, n, 1, SITES, {"a": (0, 0)})[0]) for n in range(500)]
    slow = [x for x in found if x > 7]
    # 100 ± 9 expected.
    assert 70 < len(slow) < 130
    quick = [x for x in found if x <= 7]
    assert statistics.stdev(quick) == pytest.approx(0.5, rel=0.15)
    assert statistics.fmean(quick) == pytest.approx(0.0, abs=0.1)


@pytest.mark.parametrize(
    ("tables", "why"),
    [
        ({"clock": {"message_seconds": [1.0]}}, "lists 1 values for 5 sites"),
        ({"clock": {"deadline": 1.0}, "algorithm": "scaffold"}, "each round needs all its sites"),
        ({"clock": {"deadline": 1.0}, "secure_aggregation": {"threshold": 3}}, "masked sums"),
    ],
)
def test_a_clock_that_does_not_fit_is_refused(tables, why):
    with pytest.raises(PlanError, match=why):
        fedpact.Plan.parse(tables)


def test_without_a_deadline_it_changes_no_bit(tmp_path):
    models, read = {}, {}
    small = {"data": "digits", "sites": 3, "rounds": 2}
    slow = {"message_seconds": [1.0, 1.0, 50.0]}
    for name, clock in (("none", {}), ("slow", slow), ("late", {**slow, "deadline": 2.0})):
        done = fedpact.run(fedpact.Plan.parse({**small, "clock": clock}), tmp_path / name)
        models[name] = torch.cat([p.detach().flatten() for p in done.model.parameters()])
        refused = {"site-02": "late"} if name == "late" else {}
        assert [dict(r.refused) for r in done.records[1:]] == [refused] * 2
        seconds = {"none": 0.0, "slow": 50.0, "late": 2.0}[name]
        read[name] = done.summary["records_read"]
        assert [r.simulated_seconds for r in done.records[1:]] == [seconds] * 2
    # The third site takes a second for each byte of its messages, a third of all.
    clock = {"up_seconds": [1.0, 0.0, 1.0], "down_seconds": [0.0, 1.0, 1.0]}
    alone = fedpact.run(fedpact.Plan.parse({**small, "clock": clock}), tmp_path / "bytes")
    for record in alone.records[1:]:
        assert record.simulated_seconds == pytest.approx(
            (record.bytes_down + record.bytes_up) / 3, rel=0.05
        )
    assert torch.equal(models["none"], models["slow"])
    assert not torch.equal(models["none"], models["late"])
    # A late site has read its records, and is charged.
    assert read["late"] == read["none"]


def test_a_refusal_is_not_the_fastest_site():
    """It comes at once, and the round waits for the fastest of those that send something."""
    clock = SimulatedClock(step_seconds=[1.0, 10.0, 20.0], deadline=5.0)
    sites, sent = ("a", "b", "c"), dict.fromkeys("abc", (1, 1))
    assert clock.round(0, 1, 1, sites, sent, {"b", "c"}) == (10.0, frozenset("c"))
    assert clock.round(0, 1, 1, sites, sent, {"a", "b", "c"}) == (5.0, frozenset("bc"))
    assert clock.round(0, 1, 1, sites, sent, ())[0] == 5.0
