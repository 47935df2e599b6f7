"""Whole runs in this process, on the embedded data: what they spend, write, refuse and repeat."""

import gc
import json

import pytest
import torch
from safetensors.torch import load_file
from tests import recounted
from tests.recounted import charges

from fedpact.algorithms import fedavg
from fedpact.common.errors import InputError, LedgerError, ModelError, PlanError
from fedpact.common.params import FlatModel
from fedpact.common.randomness.seeded import DRAWS
from fedpact.data.load import from_arrays
from fedpact.plan import Plan
from fedpact.privacy.ledger.receipt import receipt
from fedpact.report.page import write_report
from fedpact.simulation import setup
from fedpact.simulation import simulate as simulation
from fedpact.simulation.evaluation import Evaluator
from fedpact.simulation.simulate import simulate
from fedpact.simulation.threads import InProcess
from fedpact.simulation.workshop import TrainingSetup

SMALL = {
    "rounds": 5,
    "sites": 3,
    "settings": {"learning_rate": 1.0},
    "run": {"evaluate_every": 1, "workers": 1},
}


def plan(**changes):
    return Plan.parse({**SMALL, **changes})


def recount(folder, site, delta):
    """ε of what a ledger holds, by dp-accounting, event by event."""
    events = ((e["q"], e["sigma"], e["count"]) for e in charges(folder, site))
    return recounted.epsilon(events, delta)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One finished run of each algorithm: algorithm -> its result."""
    home = tmp_path_factory.mktemp("finished")
    return {name: simulate(plan(algorithm=name), home / name) for name in ("fedavg", "fedfdp")}


@pytest.fixture
def own_models(monkeypatch):
    """Models of users can be imported."""
    monkeypatch.syspath_prepend(str(__file__).rsplit("/", 1)[0])


@pytest.mark.parametrize("algorithm", ["fedavg", "fedfdp"])
def test_sites_stay_within_budget_by_independent_recount(finished, algorithm):
    result = finished[algorithm]
    for site, reported in result.summary["epsilon"].items():
        spent = recount(result.folder, site, 1e-5)
        # Both are discretised upper bounds of the same figure.
        assert spent <= 2 * (1 + 1e-3)
        assert reported == pytest.approx(spent, rel=1e-3)
        assert reported <= 2
        assert sum(entry["count"] for entry in charges(result.folder, site)) == 5


def test_the_final_model_is_what_the_folder_holds(finished):
    result = finished["fedavg"]
    stored = load_file(result.folder / "model.safetensors")
    for name, value in result.model.state_dict().items():
        assert torch.equal(stored[name], value)
    assert {"plan.json", "partition.json", "privacy.json", "environment.json", "summary.json"} <= {
        path.name for path in result.folder.iterdir()
    }


def test_a_finished_run_is_not_trained_again(finished):
    first = finished["fedavg"]
    before = [charges(first.folder, site) for site in first.summary["epsilon"]]
    again = simulate(plan(), first.folder)
    assert [charges(first.folder, site) for site in first.summary["epsilon"]] == before
    assert again.summary == first.summary
    assert again.records == first.records


def test_a_folder_of_another_plan_is_left_alone(finished):
    told = r"another configuration \(seed is 0 there and 1 now\)"
    with pytest.raises(PlanError, match=told):
        simulate(plan(seed=1), finished["fedavg"].folder)


def test_run_cut_off_within_a_round_charges_nothing_twice(finished, tmp_path, monkeypatch):
    whole = finished["fedfdp"]
    from fedpact.algorithms import fedfdp

    update, calls = fedfdp.update, []

    def broken(state, replies, settings):
        calls.append(1)
        if len(calls) == 3:
            next(iter(replies))
            raise KeyboardInterrupt
        return update(state, replies, settings)

    with monkeypatch.context() as patched:
        patched.setattr(fedfdp, "update", broken)
        with pytest.raises(KeyboardInterrupt):
            simulate(plan(algorithm="fedfdp"), tmp_path / "broken")
    after = simulate(plan(algorithm="fedfdp"), tmp_path / "broken")
    for site in whole.summary["epsilon"]:
        assert len(charges(after.folder, site)) == len(charges(whole.folder, site)) == 5
    assert torch.equal(FlatModel(after.model).vector, FlatModel(whole.model).vector)
    assert after.summary["epsilon"] == whole.summary["epsilon"]


def test_one_site_with_one_full_batch_is_gradient_descent(tmp_path):
    """FedAvg at q = 1, τ = 1 with one site: w - η ∇F(w), by ordinary autograd."""
    data = from_arrays(torch.randn(40, 6), torch.randint(3, (40,)))
    whole = plan(sites=1, sampling_rate=1.0, privacy={"mode": "none"}, partition={"held_out": 0.0})
    result = simulate(whole, tmp_path / "run", data=data)
    from fedpact.models.build import build

    model = build("logistic", data.x[0], 3, 0)
    for _ in range(5):
        loss = torch.nn.functional.cross_entropy(model(data.x), data.y)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for p, g in zip(model.parameters(), gradients, strict=True):
                p -= 1.0 * g
    for found, expected in zip(result.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found, expected)


def test_batch_norm_is_refused_in_private_runs_by_layer_name(tmp_path, own_models):
    with pytest.raises(InputError, match=r"\(1\).*GroupNorm"):
        simulate(plan(model="models_of_users:normalised"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_model_that_mixes_records_is_refused(tmp_path, own_models):
    with pytest.raises(InputError, match="mixes"):
        simulate(plan(model="models_of_users:centred"), tmp_path / "run")


@pytest.mark.parametrize(
    ("model", "mode"), [("Shifted", "none"), ("bounded_in_place", "per_sample")]
)
def test_a_model_that_writes_to_its_records_gets_copies(tmp_path, own_models, model, mode):
    """Even if it leaves dummy records alone; a second run is the same."""
    x, y = 200 * torch.randn(40, 6), torch.randint(3, (40,))
    data, before = from_arrays(x, y), x.clone()
    asked = plan(model=f"models_of_users:{model}", rounds=1, privacy={"mode": mode})
    one, two = (simulate(asked, tmp_path / str(i), data=data) for i in range(2))
    assert torch.equal(data.x, before)
    weights = zip(one.model.parameters(), two.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in weights)


@pytest.mark.parametrize(
    ("model", "told"),
    [
        # Nobody could say whether it mixes records.
        ("Coded", r"'models_of_users:Coded' failed on four dummy records, zeros and ones.*Index"),
        ("Pixels", "cannot be differentiated record by record"),
    ],
)
def test_value_dependent_model_trains_only_without_privacy(tmp_path, own_models, model, told):
    records = from_arrays(torch.randint(2, 5, (40, 6)), torch.randint(3, (40,)))
    data = records if model == "Coded" else None
    with pytest.raises(ModelError, match=told):
        simulate(plan(model=f"models_of_users:{model}"), tmp_path / "private", data=data)
    assert not (tmp_path / "private").exists()
    asked = plan(model=f"models_of_users:{model}", privacy={"mode": "none"})
    assert simulate(asked, tmp_path / "plain", data=data).summary["status"] == "finished"


def test_torch_has_its_threads_again_after_a_failure(tmp_path, monkeypatch, two_threads):
    """Whatever fails, in the midst of replies too: who catches it goes on with all of them."""

    def failing(state, replies, settings):
        next(iter(replies))
        raise ZeroDivisionError("at the server")

    monkeypatch.setattr(fedavg, "update", failing)
    with pytest.raises(ZeroDivisionError, match="at the server"):
        simulate(plan(), tmp_path / "run")
    gc.collect()
    assert torch.get_num_threads() == 2


def test_a_budget_that_all_have_spent_ends_the_run(tmp_path):
    given = {"sigma": 3.0, "epsilon": 1.0}
    result = simulate(plan(privacy=given, rounds=100, sampling_rate=0.5), tmp_path / "run")
    assert result.summary["status"] == "budget"
    assert 0 < result.summary["rounds"] < 100
    for site in result.summary["epsilon"]:
        assert recount(result.folder, site, 1e-5) <= 1 + 1e-3


def test_a_spent_site_leaves_and_the_rest_continue_or_stop(tmp_path):
    grants = {"site-01": {"sigma": 3.0, "epsilon": 1.0}}
    few = plan(rounds=12, sampling_rate=0.5, privacy={"per_site": grants})
    allowed = few.terms({"site-00": 9.0, "site-01": 9.0, "site-02": 9.0})["site-01"].steps
    assert 0 < allowed < 12
    going_on = simulate(few, tmp_path / "on")
    assert (going_on.summary["status"], going_on.summary["rounds"]) == ("finished", 12)
    refusals = [record.round for record in going_on.records if record.refused]
    assert refusals == list(range(allowed + 1, 13))
    assert going_on.records[-1].refused == {"site-01": "budget"}
    assert recount(going_on.folder, "site-01", 1e-5) <= 1 * (1 + 1e-3)

    stopping = few.model_copy(
        update={"budget": few.budget.model_copy(update={"when_spent": "stop"})}
    )
    stopped = simulate(stopping, tmp_path / "stop")
    assert (stopped.summary["status"], stopped.summary["rounds"]) == ("budget", allowed + 1)
    ledgers = {path: path.read_bytes() for path in (tmp_path / "stop").rglob("ledger*")}
    again = simulate(stopping, tmp_path / "stop")
    assert (again.summary["status"], again.summary["rounds"]) == ("budget", allowed + 1)
    assert ledgers
    assert all(path.read_bytes() == before for path, before in ledgers.items())


def test_server_arithmetic_is_single_threaded_and_use_is_not(tmp_path, monkeypatch, two_threads):
    """Numbers of threads as torch tells them: of the update, an evaluation and the caller's own."""
    seen = {"update": [], "evaluate": [], "on_round": []}

    def watch(owner, name, place):
        original = getattr(owner, name)

        def watched(*arguments):
            seen[place].append(torch.get_num_threads())
            return original(*arguments)

        monkeypatch.setattr(owner, name, watched)

    watch(fedavg, "update", "update")
    watch(Evaluator, "_score", "evaluate")
    simulate(
        plan(rounds=2),
        tmp_path / "run",
        on_round=lambda _: seen["on_round"].append(torch.get_num_threads()),
    )
    assert torch.get_num_threads() == 2
    assert {place: set(numbers) for place, numbers in seen.items()} == {
        "update": {1},
        "evaluate": {2},
        "on_round": {2},
    }


@pytest.mark.parametrize(
    ("mode", "used"), [("per_sample", "fixed sequence"), ("none", "none")], ids=["private", "plain"]
)
def test_statement_and_ledger_name_the_accounting_used(tmp_path, mode, used):
    result = simulate(plan(rounds=1, privacy={"mode": mode}), tmp_path / "run")
    assert bool(result.summary["epsilon"]) == result.summary["private"] == (mode != "none")
    assert bool(list(result.folder.rglob("ledger.jsonl"))) == (mode != "none")
    told = json.loads((result.folder / "privacy.json").read_text())
    assert (told["accounting"], told["private"]) == (used, mode != "none")
    assert bool(told["accounting_reason"]) == (mode != "none")
    for path in result.folder.rglob("ledger.jsonl"):
        (run,) = receipt(path)["runs"].values()
        assert run["accounting"] == used
    shown = write_report(result.folder).read_text()
    assert ("releases were planned before the run, so the reserved" in shown) == (mode != "none")


@pytest.mark.parametrize("mode", ["per_sample", "none"])
def test_a_model_with_dropout_is_trained_and_repeated(tmp_path, own_models, mode):
    chosen = plan(model="models_of_users:dropping", rounds=2, privacy={"mode": mode})
    runs = [simulate(chosen, tmp_path / name) for name in ("run", "again")]
    stored = [load_file(run.folder / "model.safetensors") for run in runs]
    assert all(torch.equal(stored[0][name], stored[1][name]) for name in stored[0])


def test_a_model_with_shared_weights_is_trained_and_stored(tmp_path, own_models):
    result = simulate(plan(model="models_of_users:Tied", rounds=2), tmp_path / "run")
    stored = load_file(result.folder / "model.safetensors")
    assert torch.equal(stored["first.weight"], stored["second.weight"])
    result.model.load_state_dict(stored)


def test_a_run_is_not_resumed_with_different_records(tmp_path):
    """Its statement is of one data set, and a round carried out again would be another release."""
    out, file = tmp_path / "run", tmp_path / "t.csv"
    rows = [f"{20 + k},{k % 2}" for k in range(200)]
    file.write_text("\n".join(["age,ill", *rows]))
    mine = plan(data=str(file), label="ill", model="logistic")
    simulate(mine, out, stop=iter([False, False, True]).__next__)
    # Another age: neither classes nor the number of their records change.
    file.write_text("\n".join(["age,ill", "33,0", *rows[1:]]))
    with pytest.raises(PlanError, match="started on other records: its data have changed"):
        simulate(mine, out)
    file.write_text("\n".join(["age,ill", *rows]))
    assert simulate(mine, out).summary["status"] == "finished"


@pytest.mark.parametrize("begun", [None, DRAWS - 1, DRAWS + 1])
def test_a_run_with_other_draws_is_not_resumed(tmp_path, begun):
    """A round carried out again would be another release under the first one's charge."""
    out = tmp_path / "run"
    simulate(plan(), out, stop=iter([False, False, True]).__next__)
    written = json.loads((out / "environment.json").read_text())
    own = written.pop("draws")
    changed = written if begun is None else {**written, "draws": begun}
    (out / "environment.json").write_text(json.dumps(changed))
    with pytest.raises(PlanError, match="other random numbers"):
        simulate(plan(), out)
    (out / "environment.json").write_text(json.dumps({**written, "draws": own}))
    assert simulate(plan(), out).summary["status"] == "finished"
    # What is finished draws nothing any more.
    (out / "environment.json").write_text(json.dumps(changed))
    assert simulate(plan(), out).summary["status"] == "finished"


@pytest.mark.parametrize(
    ("asked", "model", "rate", "expected"),
    [
        # 650 and 9,610 parameters, 287 records or more at a site: below 2^20, and above it.
        (0, "logistic", 0.5, 1),
        (0, "mlp", 0.1, 1),
        (0, "mlp", 0.5, 3),
        (2, "logistic", 0.5, 2),
    ],
)
def test_short_steps_have_one_worker(tmp_path, monkeypatch, asked, model, rate, expected):
    """Unless a number is asked for: d q N multiplications decide."""
    found = []

    class Counted(InProcess):
        def __init__(self, clients, workers, table):
            found.append(workers)
            super().__init__(clients, workers, table)

    monkeypatch.setattr(simulation, "InProcess", Counted)
    monkeypatch.setattr(simulation, "available_cores", lambda: 3)
    running = {"evaluate_every": 1, "workers": asked}
    simulate(plan(model=model, rounds=1, sampling_rate=rate, run=running), tmp_path / "run")
    assert found == [expected]


def test_a_byte_budget_too_small_for_a_round_sends_nothing(tmp_path):
    result = simulate(plan(budget={"bytes": 1}), tmp_path / "run")
    assert (result.summary["status"], result.summary["rounds"]) == ("bytes", 0)
    assert all(not charges(result.folder, site) for site in result.summary["epsilon"])


def test_start_cut_off_before_first_state_leaves_no_record(tmp_path):
    simulate(plan(), tmp_path / "run", stop=lambda: True)
    # As if killed between the record of round 0 and the state that counts it as done.
    (tmp_path / "run" / "state.safetensors").unlink()
    simulate(plan(), tmp_path / "run", stop=iter([False, False, True]).__next__)
    result = simulate(plan(), tmp_path / "run")
    assert [record.round for record in result.records] == [0, 1, 2, 3, 4, 5]
    lines = (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [0, 1, 2, 3, 4, 5]


def test_a_ledger_that_a_power_failure_shortened_is_not_believed(tmp_path):
    """It lacks the charge of a round that is committed: its ε would be too small."""
    stopping = iter([False, False, True])
    result = simulate(plan(), tmp_path / "run", stop=lambda: next(stopping))
    assert result.records[-1].round == 2
    ledger = sorted((tmp_path / "run" / "sites").glob("*/ledger.jsonl"))[1]
    lines = ledger.read_bytes().splitlines(keepends=True)
    assert json.loads(lines[-1])["round"] == 2
    ledger.write_bytes(b"".join(lines[:-1]))
    with pytest.raises(LedgerError, match="no charge after round 1, but its site took part in"):
        simulate(plan(), tmp_path / "run")
    ledger.write_bytes(b"".join(lines))
    assert simulate(plan(), tmp_path / "run").records[-1].round == 5


def test_a_model_is_tried_on_the_device_before_writing(tmp_path, monkeypatch):
    """In training a model that fails there would fail at every record, which hides it."""
    bench = TrainingSetup.bench

    def benched(self, *, check=False):
        if self.device == "cuda":
            raise ModelError(f"tried: {check}")
        return bench(self, check=check)

    monkeypatch.setattr(TrainingSetup, "bench", benched)
    monkeypatch.setattr(setup, "device_of", lambda *_: None)
    with pytest.raises(ModelError, match="tried: True"):
        simulate(plan(run={"device": "cuda"}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_missing_device_is_refused_before_writing(tmp_path):
    with pytest.raises(PlanError, match=r"device is 'cuda:99': torch .* finds"):
        simulate(plan(run={"device": "cuda:99"}), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(PlanError, match=r"run.device.*'gpu'"):
        plan(run={"device": "gpu"})


def test_a_repeated_round_is_the_same_release(tmp_path):
    """Its noise is not drawn anew, so neither device nor precision may change on the way."""
    simulate(plan(rounds=2), tmp_path / "run")
    with pytest.raises(PlanError, match="another configuration"):
        simulate(plan(rounds=2, run={"precision": "bf16"}), tmp_path / "run")
    assert simulate(plan(rounds=2, run={"workers": 1}), tmp_path / "run").records[-1].round == 2


def test_evaluated_rounds_follow_from_the_plan_alone(tmp_path):
    few = from_arrays(torch.randn(20, 2), torch.arange(20) % 2)
    asked = {"rounds": 101, "sites": 1, "run": {"workers": 1}, "privacy": {"mode": "none"}}
    result = simulate(Plan.parse(asked), tmp_path, data=few)
    # Every second, with the first and the last.
    found = [record.round for record in result.records if record.accuracy is not None]
    assert found == [*range(0, 101, 2), 101]
