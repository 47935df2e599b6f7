"""A clip that changes from round to round: its noise changes with it, what it costs does not."""

import json

import pytest
import torch

from fedpact.common.errors import PlanError
from fedpact.common.randomness.seeded import SeededDraws
from fedpact.plan import Plan
from fedpact.privacy.ledger.receipt import receipt
from fedpact.simulation.simulate import simulate

SMALL = {"rounds": 3, "sites": 4, "run": {"workers": 1}}
SUM = {"secure_aggregation": {"threshold": 3}}
SHARED = {"trust": "sum", "honest": 2}
SIZES = dict.fromkeys(("site-00", "site-01", "site-02", "site-03"), 300.0)


def plan_of(privacy, **tables):
    return Plan.parse({**SMALL, **tables, "privacy": {"clip": 0.5, **privacy}})


def weights(result):
    return torch.cat([p.detach().reshape(-1) for p in result.model.parameters()])


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        ({"clip_schedule": [1.0, 0.5]}, [1, 0.5, 0.5]),
        ({"clip_schedule": "inverse", "clip_halved_after": 1.0}, [1, 1 / 2, 1 / 3]),
        ({"clip_schedule": "cosine"}, [1, 0.75, 0.25]),
    ],
)
def test_clip_and_noise_change_together_and_the_events_do_not(schedule, factors):
    terms = plan_of(schedule).terms(SIZES)["site-00"]
    plain = plan_of({}).terms(SIZES)["site-00"]
    assert terms.history(3) == plain.history(3)
    assert terms.sigmas == plain.sigmas
    for number, factor in enumerate(factors, start=1):
        own = terms.at(number)
        assert own.clip == pytest.approx(0.5 * factor, rel=1e-12)
        assert own.noise_variance == pytest.approx(factor**2 * plain.noise_variance, rel=1e-12)
        assert own.event == plain.event


@pytest.mark.parametrize(("privacy", "tables"), [({}, {}), (SHARED, SUM)])
def test_halved_clip_schedule_equals_the_halved_clip(tmp_path, privacy, tables):
    """Bit for bit, as halves are exact; and with it both ε, ledger and receipt."""
    half = {**privacy, "clip_schedule": [0.5]}
    one = simulate(plan_of(half, **tables), tmp_path / "one")
    other = simulate(plan_of({**privacy, "clip": 0.25}, **tables), tmp_path / "other")
    assert torch.equal(weights(one), weights(other))
    assert [r.epsilon for r in one.records] == [r.epsilon for r in other.records]
    spent = [
        next(iter(receipt(r.folder / "sites" / "site-00" / "ledger.jsonl")["runs"].values()))
        for r in (one, other)
    ]
    assert spent[0]["epsilon_spent"] == spent[1]["epsilon_spent"]
    said = json.loads((one.folder / "privacy.json").read_text())["sites"]["site-00"]
    assert said["clip_by_round"] == [0.25] * 3
    assert said["epsilon_reserved"] == pytest.approx(2.0, rel=1e-3)


def test_without_noise_a_step_is_as_long_as_its_rounds_clip(tmp_path, monkeypatch):
    """Clips so small that each record's gradient is cut: a step from zero is C_t times as long."""
    monkeypatch.setattr(SeededDraws, "add_noise", lambda self, total, *_, **__: total)
    ends = []
    for rounds, clips in ((1, [0.01]), (2, [0.01]), (2, [0.01, 0.001])):
        plan = plan_of(
            {"clip": 1.0, "clip_schedule": clips},
            rounds=rounds,
            sampling_rate=1.0,
            logistic={"start": "zero"},
            compression={"kind": "none"},
        )
        ends.append(weights(simulate(plan, tmp_path / str(len(ends)))).double())
    whole, tenth = (float((end - ends[0]).norm()) for end in ends[1:])
    assert tenth == pytest.approx(0.1 * whole, rel=1e-3)


@pytest.mark.parametrize(
    ("privacy", "tables", "why"),
    [
        ({"clip_schedule": [0.0]}, {}, "clip_schedule"),
        ({"clip_schedule": []}, {}, "clip_schedule"),
        ({"clip_schedule": "linear"}, {}, "clip_schedule"),
        ({"clip_halved_after": 2.0}, {}, "clip_halved_after"),
        ({"clip": 1e-40}, {}, "privacy.clip is 1e-40"),
        ({"clip_schedule": [1.0, 1e-40]}, {}, "clip_schedule is 1e-40"),
        ({"clip_schedule": [1e300], "clip": 1e20}, {}, "clip_schedule is 1e.300"),
        ({"clip_schedule": "cosine"}, {"algorithm": "scaffold"}, "with another clip"),
        ({"clip_schedule": "cosine"}, {"algorithm": "feddyn"}, "earlier rounds"),
        ({"clip_schedule": "cosine"}, {"algorithm": "fedproxvr"}, "one clip"),
        ({"clip_schedule": "cosine"}, {"control": {"kind": "ali", "iterations": 9}}, "estimates"),
        ({"clip_schedule": "cosine"}, {"compression": {"kind": "topk"}}, "left out"),
    ],
)
def test_invalid_input_is_refused(privacy, tables, why):
    with pytest.raises(PlanError, match=why):
        plan_of(privacy, **tables)
