"""What holds for every algorithm in the in-process engine: resuming, and the number of workers."""

import pytest
import torch

from fedpact import algorithms
from fedpact.algorithms.wrappers.base import Method
from fedpact.common.errors import PlanError
from fedpact.data.load import from_arrays
from fedpact.plan import Plan
from fedpact.privacy.ledger.hash_chain import read_entries
from fedpact.simulation.simulate import simulate

ROUNDS = 2


def plan(case, workers=1):
    """In the private form where there is one: the engine does all that it does for a plain run."""
    mode = "none" if case.facts.plain_only else "per_sample"
    return Plan.parse(
        {
            **case.tables,
            "rounds": ROUNDS,
            "sites": 2,
            "partition": {"kind": "dirichlet", "held_out": 0.25},
            "privacy": {"mode": mode, "accountant": "rdp", "sigma": 16.0},
            "run": {"workers": workers, "evaluate_every": 1},
        }
    )


@pytest.fixture(scope="module")
def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(90, 4, generator=generator)
    return from_arrays(x, torch.randint(3, (90,), generator=generator))


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    """`run(case)`: one undisturbed run of it, which several tests hold others against."""
    done = {}

    def undisturbed(case):
        key = str(case.tables)
        if key not in done:
            folder = tmp_path_factory.mktemp("run") / "run"
            done[key] = simulate(plan(case), folder, data=data)
        return done[key]

    return undisturbed


def contents(result):
    """What two equal runs agree on: bits of model, state and memory; records; what was charged."""
    folder = result.folder
    files = ["model.safetensors", "state.safetensors", "privacy.json", "partition.json"]
    kept = {name: (folder / name).read_bytes() for name in files}
    for path in sorted(folder.rglob("*memory.safetensors")):
        kept[str(path.relative_to(folder))] = path.read_bytes()
    charged = {}
    for path in sorted(folder.rglob("ledger.jsonl")):
        charged[path.parent.name] = [
            (entry["round"], entry["q"], entry["sigma"], entry["count"], entry["purpose"])
            for entry in read_entries(path)
            if entry["kind"] == "charge"
        ]
    return kept, charged


def scores(result):
    """The records without their times; the state counts the bytes."""
    return [
        (r.round, r.accuracy, r.loss, r.metrics, r.scores, r.steps, r.epsilon, r.numbers)
        for r in result.records
    ]


def assert_same(one, other):
    assert contents(one)[0] == contents(other)[0]
    assert contents(one)[1] == contents(other)[1]
    assert scores(one) == scores(other)


def test_a_resumed_run_equals_an_uninterrupted_one(case, data, tmp_path, run):
    """By another number of workers, too."""
    whole = run(case)
    assert len(whole.records) == ROUNDS + 1
    done = []
    for workers, stop_after in enumerate((1, ROUNDS), 1):
        stopped = simulate(
            plan(case, workers),
            tmp_path / "resumed",
            data=data,
            on_round=lambda record: done.append(record.round),
            stop=lambda last=stop_after: done[-1] >= last,
        )
        assert stopped.records[-1].round == stop_after
    assert_same(stopped, whole)


def test_another_seed_is_another_run(data, tmp_path, run):
    """Else the tests above could pass for a comparison that sees nothing."""
    case = Plan.parse({"algorithm": "scaffold"}).method
    case.tables = {"algorithm": "scaffold"}
    other = plan(case).model_copy(update={"seed": 1})
    assert plan(case).seed == 0
    with pytest.raises(AssertionError):
        assert_same(simulate(other, tmp_path / "other", data=data), run(case))


def test_an_algorithm_without_a_private_form_is_refused():
    for name in algorithms.names():
        if Method(name).facts.plain_only:
            with pytest.raises(PlanError, match="no private form"):
                Plan.parse({"algorithm": name})
