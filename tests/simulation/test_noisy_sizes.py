"""Runs whose sites release their sizes: what is charged, what is divided by, what is repeated."""

import json
import re

import pytest
import torch
from tests import recounted
from tests.recounted import charges

from fedpact import algorithms
from fedpact.cli.commands import plan as command
from fedpact.common.params import FlatModel
from fedpact.plan import Plan
from fedpact.privacy.accounting import planner
from fedpact.simulation.setup import SimulationSetup
from fedpact.simulation.simulate import simulate

SITES = ["site-00", "site-01", "site-02"]


def plan(**changes):
    asked = {
        "rounds": 3,
        "sites": 3,
        "partition": {"kind": "dirichlet"},
        "privacy": {"sizes": "noisy"},
        "run": {"evaluate_every": 3, "workers": 1},
    }
    return Plan.parse(asked | changes)


def true_sizes(whole):
    return {site.name: len(site.y) for site in SimulationSetup.of(whole).sites}


def stated(folder):
    return json.loads((folder / "privacy.json").read_text())


def watched(monkeypatch, name):
    """The replies that reach an algorithm's update, all rounds together."""
    module, seen = algorithms.load(name), []
    update = module.update

    def watching(state, replies, settings):
        replies = list(replies)
        seen.extend(replies)
        return update(state, replies, settings)

    monkeypatch.setattr(module, "update", watching)
    return seen


def test_the_released_size_divides_weighs_and_is_stated(tmp_path, monkeypatch):
    whole = plan(algorithm="ldp_fedsgd", sampling_rate=0.25)
    seen = watched(monkeypatch, "ldp_fedsgd")
    folder = simulate(whole, tmp_path / "run").folder
    told = stated(folder)
    released = {name: terms["size"] for name, terms in told["sites"].items()}
    assert (told["sizes"], list(released)) == ("noisy", SITES)
    assert len(seen) == 9
    for reply in seen:
        assert reply.weight == released[reply.site]
        assert reply.numbers["batch_size"] == 0.25 * released[reply.site]
    for name, size in true_sizes(whole).items():
        # σ = 10: beyond 6 σ with probability 2e-9, and on the grid equal with 4e-5 a site.
        assert 0 < abs(released[name] - size) < 60
    assert any("deviation 10" in text for text in told["covers"])
    assert not any("declared sizes" in text for text in told["does_not_cover"])


def test_size_is_charged_first_and_charges_keep_the_budget(tmp_path):
    result = simulate(plan(), tmp_path / "run")
    for site in SITES:
        entries = charges(result.folder, site)
        assert [e["purpose"] for e in entries] == [["size"], *3 * [["gradient"]]]
        assert [entries[0][key] for key in ("q", "sigma", "count")] == [1.0, 10.0, 1]
        events = [(e["q"], e["sigma"], e["count"]) for e in entries]
        recount = recounted.epsilon(events, 1e-5)
        # Both are discretised upper bounds of the same figure.
        assert 2 * (1 - 1e-2) < recount <= 2 * (1 + 1e-4)
        assert result.summary["epsilon"][site] == pytest.approx(recount, rel=1e-3)
        assert result.summary["epsilon"][site] <= 2


def test_a_resumed_run_has_the_same_sizes_and_charges_them_once(tmp_path, monkeypatch):
    expected = simulate(plan(), tmp_path / "whole")
    rounds = iter([False, True])
    assert simulate(plan(), tmp_path / "broken", stop=lambda: next(rounds)).summary["rounds"] == 1
    before = stated(tmp_path / "broken")
    seen = watched(monkeypatch, "fedavg")
    resumed = simulate(plan(), tmp_path / "broken")
    assert stated(resumed.folder) == before == stated(expected.folder)
    assert {r.site: r.weight for r in seen} == {n: t["size"] for n, t in before["sites"].items()}
    for site in SITES:
        assert [e["round"] for e in charges(resumed.folder, site)] == [0, 1, 2, 3]
    assert torch.equal(FlatModel(resumed.model).vector, FlatModel(expected.model).vector)
    other = SimulationSetup.of(plan(seed=1)).terms
    assert all(other[site].size != before["sites"][site]["size"] for site in SITES)


def test_no_size_is_shown_before_it_is_charged(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(planner, "_HALVINGS", 1)  # each of its candidates takes a search
    file, asked = tmp_path / "plan.json", plan(privacy={"sizes": "noisy", "accountant": "rdp"})
    file.write_text(json.dumps(asked.model_dump(mode="json")))
    command.plan(file, as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert [terms["size"] for terms in document["sites"].values()] == [None] * 3
    command.plan(file, optimise=True)
    shown = capsys.readouterr().out
    assert shown.count("noisy") == 3
    for name, size in true_sizes(asked).items():
        released = SimulationSetup.of(asked).terms[name].size
        for number in (size, round(released)):
            assert not re.search(rf"(?<![\d.]){number}(?![\d%])", shown)
