"""One reply cannot bring a round down: what makes the update fail is found, named and left out."""

import logging
import math

import pytest
import torch

from fedpact.algorithms.common.steps import weighted_mean
from fedpact.algorithms.wrappers.robust import fold_replies
from fedpact.common.messages import Reply, State
from fedpact.common.run_folder import Checkpoint
from fedpact.plan import Plan
from fedpact.rounds import Rounds

PLAN = Plan.parse({"rounds": 2, "privacy": {"mode": "none"}})
METHOD = PLAN.method
START = State({"w": torch.zeros(2, dtype=torch.float64)})


class Choosy:
    """A method whose update takes the mean of "w" over weights 1/x, and raises where x is 0."""

    def update(self, state, replies):
        total = 0.0
        for reply in replies:
            total += 1 / reply.numbers["x"]
            if reply.vectors["w"].abs().max() > 1e200:
                raise ValueError("that long a vector")
        return State({"w": state.vectors["w"] + total})


def reply(site, w=1.0, x=1.0, number=1):
    vector = torch.full((2,), w, dtype=torch.float64)
    return Reply("run", number, site, 1.0, {"w": vector}, {"x": x})


def test_nothing_is_left_out_of_what_works():
    replies = [reply(name, w) for name, w in (("a", 1.0), ("b", 2.0))]
    after, blamed = fold_replies(METHOD, START, replies)
    assert blamed == {}
    assert torch.equal(after.vectors["w"], weighted_mean(replies).vectors["w"])


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ({"x": 0.0}, "ZeroDivisionError"),
        ({"w": 1e300}, "ValueError: that long a vector"),
        ({"x": math.nan}, "not finite"),
        ({"x": 1e-310}, "not finite"),
    ],
)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_reply_that_breaks_the_update_is_named_and_skipped(bad, why, place):
    replies = [reply(name, **(bad if i == place else {})) for i, name in enumerate("abc")]
    after, blamed = fold_replies(Choosy(), START, replies)
    assert list(blamed) == ["abc"[place]]
    assert why in blamed["abc"[place]]
    assert torch.equal(after.vectors["w"], torch.full((2,), 2.0, dtype=torch.float64))


def test_of_replies_that_fail_together_only_the_largest_goes():
    """Each alone is finite: 1.2e308 + 1e308 is not."""

    class Sum:
        def update(self, state, replies):
            return State({"w": sum(r.vectors["w"] for r in replies)})

    replies = [reply("a", 1.0), reply("b", 1e308), reply("c", 1.2e308)]
    after, blamed = fold_replies(Sum(), START, replies)
    assert list(blamed) == ["c"]
    assert after.vectors["w"].tolist() == [1e308, 1e308]


def test_an_update_handles_replies_that_all_point_away():
    """A run that diverges is to end as one that diverged, not as one without sites."""
    lost, blamed = fold_replies(METHOD, START, [reply(name, math.inf) for name in "ab"])
    assert blamed == {}
    assert not lost.vectors["w"].isfinite().any()
    with pytest.raises(ZeroDivisionError):
        fold_replies(Choosy(), START, [reply(name, x=0.0) for name in "ab"])


class Wire:
    """A transport whose site "b" sends what the test says."""

    traffic, sites = None, ("a", "b", "c")

    def __init__(self, w):
        self.w, self.tasks = w, []

    def exchange(self, tasks):
        self.tasks.append(tasks)
        number = tasks["a"].round
        yield from (reply(n, self.w if n == "b" else 1.0, number=number) for n in "abc")


def test_round_continues_and_record_and_log_name_the_site(caplog):
    """Before, one infinite reply ended the run as diverged, and nobody was named."""
    wire = Wire(math.inf)
    rounds = Rounds(PLAN, "run", wire, lambda at, record: record)
    with caplog.at_level(logging.WARNING, "fedpact.server"):
        done = list(rounds(Checkpoint(METHOD.init(torch.zeros(2)), 0, {})))
    assert rounds.status == "finished"
    assert [record.refused for _, record in done] == [{"b": "rejected: update"}] * 2
    assert done[-1][0].state.vectors["w"].tolist() == [1.0, 1.0]
    # What was left out was not included: the site is told so.
    assert {site: task.included for site, task in wire.tasks[1].items()} == {
        "a": 1,
        "b": -1,
        "c": 1,
    }
    assert "site b: reply rejected, because the update fails with it" in caplog.text


def test_a_simulations_own_sites_diverge_as_one():
    rounds = Rounds(PLAN, "run", Wire(math.inf), lambda at, record: record, in_process=True)
    assert list(rounds(Checkpoint(METHOD.init(torch.zeros(2)), 0, {}))) == []
    assert rounds.status == "diverged"
