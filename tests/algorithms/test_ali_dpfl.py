"""ALI-DPFL in whole runs: its budgets, its neutral forms, and what its raw estimator costs."""

import pytest
import torch
from tests.policies import GENEROUS, write_policy

from fedpact.cli.commands.plan import forecast
from fedpact.common.errors import PlanError, PolicyRefused
from fedpact.common.messages import Reply, State, Task
from fedpact.common.params import FlatModel
from fedpact.common.randomness.seeded import SeededDraws
from fedpact.common.run_folder import Checkpoint, Folder
from fedpact.data.load import from_arrays
from fedpact.deployment.admission import expect_form
from fedpact.plan import Plan
from fedpact.privacy.ledger.hash_chain import read_entries
from fedpact.privacy.oracle import PrivateOracle, Records
from fedpact.report.page import write_report
from fedpact.simulation.secure_aggregation.encoding import Form
from fedpact.simulation.setup import SimulationSetup
from fedpact.simulation.simulate import simulate
from fedpact.simulation.threads import InProcess
from fedpact.simulation.workshop import TrainingSetup

BASE = {
    "sites": 3,
    "rounds": 12,
    "sampling_rate": 0.4,
    "partition": {"kind": "dirichlet", "held_out": 0.25},
    "run": {"workers": 1, "evaluate_every": 100},
}
FLOATS = {"compression": {"kind": "none"}}
ALI = {"algorithm": "ali_dpfl", "settings": {"iterations": 31, "learning_rate": 0.3}}
CONTROL = {
    "algorithm": "fedavg",
    "settings": {"learning_rate": 0.3},
    "control": {"kind": "ali", "iterations": 31},
}


def plan(*tables, **more):
    whole = dict(BASE)
    for table in (*tables, more):
        whole |= table
    return Plan.parse(whole)


@pytest.fixture(scope="module")
def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(90, 4, generator=generator)
    return from_arrays(x, torch.randint(3, (90,), generator=generator))


def charged(result):
    """Each site's charged events by round."""
    return [
        [e["count"] for e in read_entries(path) if e["kind"] == "charge"]
        for path in sorted(result.folder.rglob("ledger.jsonl"))
    ]


def steps(result):
    return [record.steps for record in result.records[1:]]


PRIVATE = {"privacy": {"epsilon": 2.0, "accountant": "rdp"}}
PLAIN = {"privacy": {"mode": "none"}}


@pytest.fixture(scope="module")
def ali(data, tmp_path_factory):
    return simulate(plan(ALI, PRIVATE), tmp_path_factory.mktemp("ali") / "run", data=data)


def test_it_is_fedavg_with_the_controller_bit_for_bit(ali, data, tmp_path):
    runs = [ali, simulate(plan(CONTROL, PRIVATE), tmp_path / "control", data=data)]
    # The whole state; the bytes sent differ by the length of the algorithm's name.
    states = [r.folder.joinpath("state.safetensors").read_bytes() for r in runs]
    kept = [Checkpoint.from_bytes(state).state.digest for state in states]
    assert kept[0] == kept[1]
    assert steps(runs[0]) == steps(runs[1])
    assert runs[0].records[-1].numbers == runs[1].records[-1].numbers
    assert len(set(steps(runs[0]))) > 1


def test_calibrated_noise_pays_for_all_iterations_and_no_more(ali, data, tmp_path):
    """The ledgers hold what the rounds say, within the budget, and the run ends by itself."""
    settings = {**ALI["settings"], "kappa": 1e6}
    much_work = simulate(plan(ALI, PRIVATE, settings=settings), tmp_path / "run", data=data)
    for result in (ali, much_work):
        for site in charged(result):
            assert site == steps(result)
        total = sum(steps(result))
        assert total == 31 or (total < 31 and len(result.records) == 13)
        assert max(result.records[-1].epsilon.values()) <= 2.0
    assert total == 31
    assert max(much_work.records[-1].epsilon.values()) > 1.9


def test_the_run_ends_when_the_iterations_are_used_up(data, tmp_path):
    asked = plan(ALI, PRIVATE, rounds=100, settings={**ALI["settings"], "iterations": 7})
    result = simulate(asked, tmp_path / "run", data=data)
    assert result.summary["status"] == "iterations"
    assert steps(result) == [1] * 7  # R_s >= R_c
    assert not any(record.refused for record in result.records)
    again = simulate(asked, tmp_path / "run", data=data)
    assert again.summary == result.summary
    page = write_report(result.folder).read_text()
    assert "the local iterations are used up" in page
    assert "for want of a clear estimate, in 6 of 7 rounds" in " ".join(page.split())


def test_given_noise_lets_the_tightest_site_decide(data, tmp_path):
    """Without R_c the budgets allow unlike numbers of steps; the least of them is used up."""
    grants = {"sigma": 2.0, "epsilon": [6.0, 4.0, 8.0]}
    settings = {"learning_rate": 0.3, "kappa": 1e6}
    asked = plan({"algorithm": "ali_dpfl", "settings": settings}, rounds=9, privacy=grants)
    result = simulate(asked, tmp_path / "run", data=data)
    terms = asked.terms(dict.fromkeys(result.records[-1].epsilon, 20.0))
    least = min(each.steps for each in terms.values())
    assert 9 < least == sum(steps(result)) < max(each.steps for each in terms.values())
    spent = list(result.records[-1].epsilon.values())
    assert all(e <= allowed for e, allowed in zip(spent, grants["epsilon"], strict=True))


def test_as_many_rounds_as_iterations_give_fedavg(data, tmp_path):
    """R_s >= R_c: τ = 1 in every round, and fedavg's model bit for bit."""
    few = {**PRIVATE, **FLOATS, "rounds": 4}
    settings = {**ALI["settings"], "iterations": 4}
    ali = simulate(plan(ALI, few, settings=settings), tmp_path / "ali", data=data)
    one = {"algorithm": "fedavg", "settings": {"learning_rate": 0.3}}
    fedavg = simulate(plan(one, few), tmp_path / "fedavg", data=data)
    assert steps(ali) == [1] * 4
    models = [(r.folder / "model.safetensors").read_bytes() for r in (ali, fedavg)]
    assert models[0] == models[1]


@pytest.mark.parametrize(("rounds", "less"), [(4, 0), (7, 1)])
def test_no_budget_of_bytes_is_exceeded_by_one(rounds, less, ali, data, tmp_path):
    """A budget of just what some rounds send, or one byte less: replies differ by digits, and the
    last may be longer."""
    allowed = sum(r.bytes_down + r.bytes_up for r in ali.records[: rounds + 1]) - less
    exact = plan(ALI, PRIVATE, budget={"bytes": allowed})
    result = simulate(exact, tmp_path / "run", data=data)
    assert result.summary["bytes_up"] + result.summary["bytes_down"] <= allowed
    # What is set aside for it is half a round of these small messages.
    assert len(steps(result)) >= rounds - 2


@pytest.mark.parametrize("seconds", [1e-9, 1e9])
def test_seconds_limit_the_rounds_as_measured(seconds, data, tmp_path):
    """A budget of time that one round uses up ends the run; an ample one leaves R_s to decide."""
    asked = plan(ALI, PRIVATE, rounds=5, budget={"seconds": seconds})
    result = simulate(asked, tmp_path / "run", data=data)
    assert result.summary["status"] == ("seconds" if seconds < 1 else "finished")
    assert steps(result) == ([1] if seconds < 1 else [1, 2, 4, 8, 16])


@pytest.mark.parametrize(("d_com", "d_cmp"), [(1.0, 0.1), (0.0, 0.5)])
def test_measured_costs_decide_how_long_rounds_are(d_com, d_cmp, data, tmp_path, monkeypatch):
    """On a clock of our own that a round of τ iterations moves by d_com + d_cmp τ, 8 s in all.

    Where messages cost most, rounds of one iteration would leave 24 of the 31 undone: they become
    long. Where iterations are all that costs, τ > 1 gains nothing, and one trial of it shows that.
    """
    now, exchange = [0.0], InProcess.exchange

    def timed(self, tasks):
        yield from exchange(self, tasks)
        now[0] += d_com + d_cmp * next(iter(tasks.values())).numbers["local_steps"]

    monkeypatch.setattr(InProcess, "exchange", timed)
    monkeypatch.setattr("fedpact.rounds.time.perf_counter", lambda: now[0])
    settings = {**ALI["settings"], "kappa": 1e9}
    asked = plan(ALI, PRIVATE, rounds=99, settings=settings, budget={"seconds": 8.0})
    chosen = steps(simulate(asked, tmp_path / "run", data=data))
    if d_com:
        assert chosen[:3] == [1, 2, 4]
        assert sum(chosen) == 31
        assert sum(d_com + d_cmp * tau for tau in chosen) <= 8.0 + d_com
    else:
        assert chosen[:2] == [1, 2]
        assert set(chosen[2:]) == {1}


@pytest.mark.parametrize("tables", [ALI, CONTROL], ids=["ali_dpfl", "control"])
def test_a_server_of_a_deployment_knows_the_form_of_replies(tables, data):
    """It finds the form by made-up records, without memory: later rounds' replies have it too."""
    asked = plan(tables, PRIVATE, FLOATS)
    method = asked.method
    workshop = TrainingSetup(asked, data.x[0], 3)
    state = method.init(FlatModel(workshop.module()).vector)
    terms, kernel = asked.terms({"a": 20.0})["a"], workshop.bench().private
    memory = State()
    for number in (1, 2, 3):
        told = method.task(State(state.vectors, {**state.numbers, "left/rounds": 12.0 - number}))
        task = Task("run", number, method.name, told.vectors, told.numbers)
        draws, records = SeededDraws(0, "a", number), Records(data.x[:20], data.y[:20])
        oracle = PrivateOracle(records, kernel, terms, draws, lambda *_: None, lambda: 31.0)
        local = method.local(task, oracle, memory)
        memory = local.memory
        assert Form.of(local.vectors, local.numbers) == expect_form(workshop, task)
        reply = Reply("run", number, "a", 20.0, local.vectors, local.numbers)
        state = method.update(state, iter([reply]))


# ---------------------------------------------------------------- raw estimates


@pytest.mark.parametrize(
    "tables",
    [{**ALI, "settings": {**ALI["settings"], "estimator": "raw"}},
     {**CONTROL, "control": {**CONTROL["control"], "estimator": "raw"}}],
    ids=["ali_dpfl", "control"],
)  # fmt: skip
def test_raw_estimates_make_the_run_not_private(tables, data, tmp_path):
    """Though it clips and adds noise: statement, summary, ledgers and page say so."""
    result = simulate(plan(tables, PRIVATE, rounds=3), tmp_path / "run", data=data)
    statement = Folder(result.folder).read_json("privacy.json")
    assert statement["private"] is False
    assert "raw" in statement["why_unprotected"]
    assert statement["sites"] == {}
    assert statement["covers"] == []
    assert result.summary["private"] is False
    assert result.summary["epsilon"] == result.summary["delta"] == {}
    assert result.summary["accountant"] is None
    assert all(record.epsilon == {} for record in result.records)
    for path in sorted(result.folder.rglob("ledger.jsonl")):
        kinds = [entry["kind"] for entry in read_entries(path)]
        assert kinds.count("unprotected") >= len(steps(result))
    page = " ".join(write_report(result.folder).read_text().split())
    assert "NOT PRIVATE" in page
    assert "took exact numbers over the records out of every site" in page
    assert sum(steps(result)) <= 31


def test_a_plain_run_may_have_raw_estimates(data, tmp_path):
    settings = {**ALI["settings"], "estimator": "raw"}
    result = simulate(plan(ALI, PLAIN, rounds=3, settings=settings), tmp_path / "run", data=data)
    assert result.records[-1].numbers["control/pairs"] == len(steps(result)) - 1


def test_a_site_with_a_policy_refuses_raw_estimates(data, tmp_path):
    allowed = GENEROUS | {"algorithms": ["ali_dpfl"]}
    policy = write_policy(tmp_path / "policy.toml", **allowed)
    allowed = plan(ALI, PRIVATE, rounds=2, policy=policy)
    simulate(allowed, tmp_path / "allowed", data=data)
    settings = {**ALI["settings"], "estimator": "raw"}
    raw = plan(ALI, PRIVATE, rounds=2, policy=policy, settings=settings)
    with pytest.raises(PolicyRefused, match="without privacy"):
        simulate(raw, tmp_path / "raw", data=data)


# ---------------------------------------------------------------- plans


@pytest.mark.parametrize(
    ("tables", "told"),
    [
        ({"control": {"kappa": 2.0}}, ["kappa", 'kind = "ali"']),
        ({**CONTROL, "settings": {"local_steps": 3}}, ["local_steps = 3", "most_local_steps"]),
        ({**CONTROL, "algorithm": "ldp_fedsgd"}, ["one step a round"]),
        ({**CONTROL, "algorithm": "ali_dpfl", "settings": {}}, ["chooses τ itself"]),
    ],
)
def test_invalid_input_is_refused(tables, told):
    with pytest.raises(PlanError) as refused:
        plan(tables)
    for words in told:
        assert words in str(refused.value)


@pytest.mark.parametrize(
    "tables", [{"algorithm": "ali_dpfl"}, {"control": {"kind": "ali"}}], ids=["own", "around"]
)
def test_calibrated_noise_has_an_iteration_count(tables):
    rounds, given = {"rounds": 7}, {"iterations": 5 * 7}
    key = "control" if "control" in tables else "settings"
    left, said = plan(tables, rounds), plan(tables, rounds, {key: {**tables.get(key, {}), **given}})
    assert left.steps == said.steps == 35
    assert left.terms({"a": 50.0}) == said.terms({"a": 50.0})
    # Where σ is given, the site whose budget allows least decides, and in a plain run nobody.
    for free in ({"privacy": {"sigma": 2.0}}, {"privacy": {"mode": "none"}}):
        assert plan(tables, rounds, free).method.facts.iterations is None


def test_the_forecast_says_what_it_may_spend(data):
    told = forecast(SimulationSetup.of(plan(ALI, PRIVATE), data))
    assert (told["rounds"], told["iterations"]) == (12, 31)
    for site in told["sites"].values():
        spent = site["epsilon_by_round"]
        assert spent == sorted(spent)
        assert 0 < spent[0] < spent[-1] <= 2.0
    settings = {"learning_rate": 0.3}
    asked = plan({"algorithm": "ali_dpfl", "settings": settings}, privacy={"sigma": 3.0})
    scene = SimulationSetup.of(asked, data)
    assert forecast(scene)["iterations"] == min(t.steps for t in scene.terms.values())


def test_a_fixed_controller_changes_nothing(data, tmp_path):
    tables = {"algorithm": "fedavg", "settings": {"local_steps": 2}, "rounds": 2}
    without = simulate(plan(tables, PRIVATE), tmp_path / "without", data=data)
    fixed = simulate(plan(tables, PRIVATE, control={"kind": "fixed"}), tmp_path / "f", data=data)
    states = [(r.folder / "state.safetensors").read_bytes() for r in (without, fixed)]
    assert states[0] == states[1]
