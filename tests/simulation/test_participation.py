"""A part of the sites each round: who is asked, what it costs whom, and what comes of it.

References: the public draw (tests/common/randomness/test_participants.py), the sites' ledgers,
dp-accounting, and a run of all sites.
"""

import itertools
import json
from collections import Counter
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
import torch
from tests import recounted

from fedpact import algorithms
from fedpact.algorithms import fedavg
from fedpact.algorithms.wrappers.base import Method
from fedpact.cli.commands.plan import forecast
from fedpact.cli.commands.plan import plan as show_plan
from fedpact.common.errors import PlanError
from fedpact.common.messages import State, from_bytes
from fedpact.common.params import FlatModel
from fedpact.plan import Plan
from fedpact.privacy.ledger.hash_chain import read_entries
from fedpact.report.exports import render_model_card
from fedpact.report.page import write_report
from fedpact.report.run_summary import read_run
from fedpact.simulation.setup import SimulationSetup
from fedpact.simulation.simulate import simulate
from fedpact.studies.circumstances import optimise_budgets

SITES = tuple(f"site-0{i}" for i in range(5))
PLAN = {
    "rounds": 6,
    "sites": 5,
    "sites_per_round": 2,
    "settings": {"local_steps": 2},
    "privacy": {"accountant": "rdp"},
    "run": {"workers": 1},
}
PLAIN = {**PLAN, "privacy": {"mode": "none"}}


def own_rounds(plan, site):
    """The rounds that are a site's, by the public draw."""
    part = plan.participants(SITES)
    return [t for t in range(1, plan.rounds + 1) if site in part.of(t)]


def entries(folder, site, kind, run=None):
    found = read_entries(folder / "sites" / site / "ledger.jsonl")
    return [e for e in found if e["kind"] == kind and run in (None, e["run"])]


def bits(folder):
    """What a run leaves, without the wall clock."""
    lines = (folder / "rounds.jsonl").read_text().splitlines()
    rounds = [{**json.loads(line), "seconds": 0} for line in lines]
    return rounds, (folder / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def private(tmp_path_factory):
    folder = tmp_path_factory.mktemp("private") / "run"
    plan = Plan.parse({**PLAN, "privacy": {"accountant": "pld"}})
    return plan, simulate(plan, folder)


def test_each_ledger_has_the_rounds_of_its_site_and_no_other(private):
    plan, result = private
    assert any(len(own_rounds(plan, site)) != 2.4 for site in SITES)
    for site in SITES:
        own = own_rounds(plan, site)
        assert [e["round"] for e in entries(result.folder, site, "charge")] == own
        (promised,) = entries(result.folder, site, "reserve")
        assert sum(number for _, _, number in promised["events"]) == 2 * len(own)
        # Its noise is the least for its own rounds: all of ε is used, and no more.
        assert 2 * 0.99 < result.summary["epsilon"][site] <= 2
    cost = recounted.epsilon(map(tuple, promised["events"]), 1e-5)
    assert result.summary["epsilon"][site] == pytest.approx(cost, rel=1e-3)
    sigmas = {len(own_rounds(plan, s)): entries(result.folder, s, "reserve")[0] for s in SITES}
    noise = [sigmas[rounds]["events"][0][1] for rounds in sorted(sigmas)]
    assert len(noise) > 1
    assert noise == sorted(noise)


def test_only_who_takes_part_is_asked_and_answers(private):
    plan, result = private
    part = plan.participants(SITES)
    for record in result.records[1:]:
        assert tuple(record.asked) == part.of(record.round)
        for site in SITES:
            before = result.records[record.round - 1].epsilon[site]
            assert (record.epsilon[site] > before) == (site in record.asked)
            assert record.took_part(site) == (site in record.asked)
    assert not any(result.records[0].was_asked(site) for site in SITES)
    sizes = {s.name: float(len(s.y)) for s in SimulationSetup.of(plan).sites}
    batches = sum(sizes[s] * 0.5 * 2 * len(own_rounds(plan, s)) for s in SITES)
    assert result.summary["records_read"] == pytest.approx(batches)


def test_it_is_written_down_and_shown(private):
    plan, result = private
    said = json.loads((result.folder / "privacy.json").read_text())
    assert said["sites_per_round"] == 2
    assert {s: each["rounds"] for s, each in said["sites"].items()} == {
        s: len(own_rounds(plan, s)) for s in SITES
    }
    (line,) = [line for line in said["covers"] if "take part in each round" in line]
    assert "no amplification by sampling of sites" in line
    page = write_report(result.folder).read_text()
    assert "2 of them in each round" in page
    for site in SITES:
        own = len(own_rounds(plan, site))
        assert f'data-of="rounds">{own} of {own}</td>' in page
    # A model card tells no number of sites.
    run = read_run(result.folder)
    card = render_model_card(run, plan.about)
    assert "no amplification by sampling of sites" in card
    assert "sites_per_round" not in card


def test_as_many_as_there_are_is_todays_run(tmp_path):
    whole = {**PLAN, "sites_per_round": None, "rounds": 3}
    simulate(Plan.parse(whole), tmp_path / "a")
    simulate(Plan.parse({**whole, "sites_per_round": 5}), tmp_path / "b")
    assert bits(tmp_path / "a") == bits(tmp_path / "b")
    for site in SITES:
        keys = ("kind", "round", "count", "q", "sigma", "events", "epsilon", "delta")
        one, other = (
            [[entry.get(key) for key in keys] for entry in read_entries(path)]
            for path in (tmp_path / n / "sites" / site / "ledger.jsonl" for n in "ab")
        )
        assert one == other


@pytest.fixture
def seen(monkeypatch):
    """The replies of a run's rounds as the server folds them."""
    found, update = [], fedavg.update

    def watching(state, replies, settings):
        found.append(list(replies))
        return update(state, found[-1], settings)

    monkeypatch.setattr(fedavg, "update", watching)
    return found


def test_the_next_model_is_the_mean_of_who_took_part(tmp_path, seen):
    """Their weights N_i over the sum of theirs, by hand."""
    unequal = {**PLAIN, "rounds": 1, "partition": {"kind": "dirichlet"}}
    result = simulate(Plan.parse(unequal), tmp_path / "run")
    (replies,) = seen
    assert tuple(r.site for r in replies) == Plan.parse(unequal).participants(SITES).of(1)
    weights = [r.weight for r in replies]
    assert weights[0] != weights[1]
    mean = np.average([r.vectors["w"].numpy() for r in replies], axis=0, weights=weights)
    found = FlatModel(result.model).vector.numpy()
    np.testing.assert_allclose(found, mean, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("weights", [[1.0] * 5, [1.0, 2.0, 3.0, 4.0, 5.0]], ids=["equal", "not"])
def test_of_equal_sites_a_part_is_an_unbiased_estimate_of_all(tmp_path, seen, weights):
    """Full batches: the mean of the next models over all pairs is the next model of all sites."""
    whole = {**PLAIN, "rounds": 1, "sites_per_round": None, "sampling_rate": 1.0}
    simulate(Plan.parse(whole), tmp_path / "run")
    replies = [
        replace(r, weight=weight, vectors={"w": r.vectors["w"].double()})
        for r, weight in zip(seen.pop(), weights, strict=True)
    ]
    settings, state = fedavg.Settings(), State({"w": replies[0].vectors["w"]})

    def next_model(part):
        return fedavg.update(state, part, settings).vectors["w"]

    pairs = [next_model(pair) for pair in itertools.combinations(replies, 2)]
    off = (torch.stack(pairs).mean(0) - next_model(replies)).abs().max()
    apart = (pairs[0] - pairs[-1]).abs().max()
    # Of unequal ones the mean is a ratio of two estimates.
    assert (off < 1e-12 * apart) == (len(set(weights)) == 1)
    assert off < 0.2 * apart


def test_a_stopped_run_resumes_with_the_same_draws(tmp_path):
    plan = Plan.parse({**PLAN, "compression": {"kind": "topk"}, "run": {"evaluate_every": 1}})
    simulate(plan, tmp_path / "a")
    asked = itertools.count()
    simulate(plan, tmp_path / "b", stop=lambda: next(asked) == 3)
    assert simulate(plan, tmp_path / "b").summary["status"] == "finished"
    assert bits(tmp_path / "a") == bits(tmp_path / "b")


def test_never_drawn_site_reserves_and_spends_nothing(tmp_path):
    plan = Plan.parse({**PLAN, "rounds": 1, "sites_per_round": 1})
    result = simulate(plan, tmp_path / "run")
    for site in SITES:
        drawn = own_rounds(plan, site) == [1]
        (promised,) = entries(result.folder, site, "reserve")
        assert sum(n for _, _, n in promised["events"]) == 2 * drawn
        assert (result.summary["epsilon"][site] > 0) == drawn
    write_report(result.folder)
    # As with noise that is given, and with an opening of each round.
    for change in (
        {"privacy": {"sigma": 3.0}},
        {"algorithm": "fedproxvr", "settings": {}},
    ):
        terms = Plan.parse({**PLAN, "rounds": 1, **change}).terms(dict.fromkeys(SITES, 90.0))
        steps = {site: (one.steps, one.openings) for site, one in terms.items()}
        assert sum(steps[site] == (0, 0) for site in SITES) == 3


def test_bytes_include_the_models_of_evaluations(tmp_path):
    """Each is sent to every site; a reply to it is a few numbers."""
    share = {"share": 0.2, "every": 1, "epsilon": 1.0, "delta": 1e-5}
    of = Plan.parse({**PLAN, "evaluation": share, "partition": {}})
    told = forecast(SimulationSetup.of(of))["bytes"]
    summary = simulate(of, tmp_path / "run").summary
    assert told == pytest.approx(summary["bytes_down"] + summary["bytes_up"], rel=0.15)


@pytest.mark.parametrize("compression", ["none", "topk"])
def test_bytes_are_of_those_that_take_part(tmp_path, compression):
    of = {**PLAN, "compression": {"kind": compression}, "server": {"average": "tail"}}
    told = forecast(SimulationSetup.of(Plan.parse(of)))["bytes"]
    summary = simulate(Plan.parse(of), tmp_path / "run").summary
    sent = summary["bytes_down"] + summary["bytes_up"]
    assert told == pytest.approx(sent, rel=0.15)
    if compression == "none":
        every = Plan.parse({**of, "sites_per_round": None})
        assert told / forecast(SimulationSetup.of(every))["bytes"] == pytest.approx(2 / 5)
    limited = Plan.parse({**of, "budget": {"bytes": sent // 2}})
    cut = simulate(limited, tmp_path / "cut").summary
    assert cut["bytes_down"] + cut["bytes_up"] <= sent // 2
    assert cut["status"] == "bytes"
    assert 0 < cut["rounds"] < 4


def test_a_plan_lists_rounds_and_epsilon_by_site(capsys):
    plan = Plan.parse(PLAN)
    scene = SimulationSetup.of(plan)
    found = forecast(scene)["sites"]
    for site in SITES:
        own = set(own_rounds(plan, site))
        assert (found[site]["rounds"], found[site]["steps"]) == (len(own), 2 * len(own))
        before = 0.0
        for number, cost in enumerate(found[site]["epsilon_by_round"], 1):
            assert (cost > before) == (number in own)
            before = cost
        assert before == pytest.approx(found[site]["epsilon_reserved"], rel=1e-2)
    show_plan(None, ["sites_per_round=2", "rounds=6"])
    shown = capsys.readouterr().out
    assert "2 in each of 6 rounds of 1 iteration," in shown
    assert f" {found['site-00']['steps']} of 6 " in shown
    assert "rounds │" not in shown
    assert "no amplification by sampling of sites" in shown
    with pytest.raises(PlanError, match="sites_per_round = 2: it chooses for sites that take part"):
        optimise_budgets(scene, None)


CHOICES = [
    {"robust": {"rule": "median"}, "sites_per_round": 3},
    {"local": {"head": 10, "momentum": 0.5}, "server": {"optimiser": "adam"}},
    {"evaluation": {"share": 0.3, "every": 2}},
    {"privacy": {"sizes": "noisy"}},
    {"budget": {"spare_rounds": 1}},
]


@pytest.mark.parametrize("choice", CHOICES, ids=json.dumps)
def test_it_combines_with_other_wrappers(tmp_path, choice):
    plan = Plan.parse({**PLAN, "rounds": 2, **choice})
    result = simulate(plan, tmp_path / "run")
    assert result.summary["status"] == "finished"
    run = json.loads((tmp_path / "run" / "environment.json").read_text())["run"]
    for site in SITES:
        own, times = own_rounds(plan, site), Counter()
        for entry in entries(result.folder, site, "charge", run):
            times[entry["round"]] += entry["count"]
        times.pop(0, None)  # a noisy size
        assert times == dict.fromkeys(own, 2)
    if plan.evaluation.used:
        # An evaluation asks everybody, and has a promise of its own.
        for record in result.records[1:]:
            asked = set(SITES) if record.round % 2 == 0 else set()
            assert set(record.evaluation) == asked


# Those that need all sites, open rounds, leave steps, and remember; the rest is alike.
KINDS = ("afl", "ali_dpfl", "fedavg", "fednova", "fedproxvr", "feddyn", "scaffold")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in KINDS else pytest.mark.slow)
        for name in algorithms.names()
    ],
)
def test_an_algorithm_says_itself_whether_a_part_will_do(name, tmp_path):
    facts = Method(name).facts
    private = not facts.plain_only
    mode = {"privacy": {"mode": "none"}} if not private else {}
    asked = {**PLAN, **mode, "rounds": 2, "algorithm": name, "settings": {}}
    if why := facts.needs_all_sites:
        with pytest.raises(PlanError, match=r"sites_per_round = \d cannot be combined") as error:
            Plan.parse(asked)
        assert why in str(error.value)
        return
    plan = Plan.parse(asked)
    result = simulate(plan, tmp_path / "run")
    assert [len(r.asked) for r in result.records] == [0, 2, 2]
    assert all(np.isfinite(v.numpy()).all() for v in result.model.state_dict().values())
    for site in SITES if private else ():
        rounds = {e["round"] for e in entries(tmp_path / "run", site, "charge")}
        assert rounds == {*own_rounds(plan, site)}
        (promised,) = entries(tmp_path / "run", site, "reserve")
        charges = entries(tmp_path / "run", site, "charge")
        # All of it was for these rounds: batches, and what opens a round. FedNova's sites make as
        # many steps as their passes take, and leave the rest.
        charged, reserved = sum(e["count"] for e in charges), sum(n for *_, n in promised["events"])
        assert charged <= reserved if name == "fednova" else charged == reserved


def test_algorithm_without_participation_claim_is_refused(monkeypatch):
    """Nor does one that borrows the facts of another file say anything of its own functions."""
    borrowing = ModuleType("borrowing")
    borrowing.facts, borrowing.Settings = fedavg.facts, fedavg.Settings
    monkeypatch.setattr(algorithms, "load", lambda name: borrowing if name == "new" else fedavg)
    assert Method("fedavg").facts.needs_all_sites == ""
    assert "does not declare" in Method("new").facts.needs_all_sites
    assert "does not declare" in Method("new").facts.needs_own_noise
    del borrowing.facts
    assert Method("new").facts == algorithms.MethodFacts()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"control": {"kind": "ali"}, "settings": {}}, "remaining budget of every site"),
        ({"secure_aggregation": {"threshold": 3}}, "one list of sites for all rounds"),
        ({"sites_per_round": 0}, "sites_per_round"),
        ({"sites_per_round": 6}, "sites_per_round is 6 with 5 sites"),
        ({"sites_per_round": 6, "privacy": {"mode": "none"}}, "sites_per_round is 6 with 5 sites"),
    ],
)
def test_options_that_need_all_sites_are_refused(change, told):
    with pytest.raises(PlanError, match=told):
        Plan.parse({**PLAN, **change})


def test_a_site_continues_with_its_last_memory(tmp_path):
    """A head of its own: in rounds that are not the site's, its own model has the same head."""
    plan = Plan.parse({**PLAIN, "local": {"head": 10}, "rounds": 5})
    result = simulate(plan, tmp_path / "run")
    last = {}
    for site in SITES:
        if own := own_rounds(plan, site):
            path = tmp_path / "run" / "sites" / site / "memory.safetensors"
            numbers = from_bytes(path.read_bytes()).numbers
            stored = [number for number in (numbers["old/"], numbers["new/"]) if number > 0]
            assert stored == own[-2:]
            last[site] = own[-1]
    assert len(set(last.values())) > 1
    assert result.records[-1].scores
