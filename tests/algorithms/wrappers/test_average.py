"""Averages of the server's models: by their definitions, in files, and what stays as it was."""

import json

import pytest
import torch
from safetensors.torch import load_file
from tests.algorithms.made_up import SMALL

from fedpact.algorithms.fedavg import Settings
from fedpact.algorithms.wrappers.base import Method
from fedpact.algorithms.wrappers.optimizers import Averaged, ServerSettings, read_average
from fedpact.common.errors import PlanError
from fedpact.common.losses import cross_entropy
from fedpact.common.messages import Reply
from fedpact.common.run_folder import Folder
from fedpact.evaluation.metrics import evaluate
from fedpact.plan import Plan
from fedpact.report.page import write_report
from fedpact.simulation.setup import SimulationSetup
from fedpact.simulation.simulate import simulate
from fedpact.studies.conformance import HandFederation

KINDS = [{"average": "exponential", "average_decay": 0.7}, {"average": "tail"}]


def beside(server, rounds):
    return Averaged(Method("fedavg", Settings()), server, rounds)


def next_state(method, state, w):
    return method.update(state, iter([Reply("r", 1, "a", 1.0, {"w": w}, {})]))


def path(server, rounds, models):
    """The average after each of the models, of a run of so many rounds."""
    method = beside(server, rounds)
    state = method.init(torch.zeros(3, dtype=torch.float64))
    found = []
    for w in models:
        state = next_state(method, state, w)
        assert torch.equal(state.vectors["w"], w)
        assert set(method.task(state).vectors) == {"w"}
        found.append(read_average(state))
    return found


@pytest.fixture(scope="module")
def models():
    generator = torch.Generator().manual_seed(3)
    return list(torch.randn(10, 3, generator=generator, dtype=torch.float64))


@pytest.mark.parametrize("beta", [0.01, 0.5, 0.99])
def test_exponential_weights_fall_by_beta_and_add_up_to_one(models, beta):
    found = path(ServerSettings(average="exponential", average_decay=beta), 10, models)
    for t, average in enumerate(found, start=1):
        weights = [(1 - beta) * beta ** (t - s) / (1 - beta**t) for s in range(1, t + 1)]
        assert sum(weights) == pytest.approx(1.0)
        mean = sum(a * w for a, w in zip(weights, models, strict=False))
        torch.testing.assert_close(average, mean, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("share", "last"), [(0.3, 3), (0.25, 3), (1.0, 10), (0.01, 1)])
def test_tail_is_the_mean_of_the_last_rounds(models, share, last):
    found = path(ServerSettings(average="tail", average_share=share), 10, models)
    for t, average in enumerate(found, start=1):
        tail = models[10 - last : t] or [models[t - 1]]
        torch.testing.assert_close(average, torch.stack(tail).mean(0), rtol=0, atol=1e-12)


def values(folder):
    return torch.cat([v.reshape(-1) for v in load_file(folder).values()])


@pytest.mark.parametrize(
    ("table", "tables"),
    [
        (KINDS[0], {"privacy": {"mode": "none"}}),
        # Whoever was there in the last round is sent codes in place of the model.
        (KINDS[1], {"compression": {"kind": "grid"}}),
    ],
)
def test_averaging_leaves_the_run_itself_unchanged(tmp_path, table, tables):
    plan = Plan.parse({**SMALL, "server": table, **tables})
    alone = simulate(Plan.parse({**SMALL, **tables}), tmp_path / "alone")
    models = []
    result = simulate(
        plan,
        tmp_path / "run",
        on_round=lambda _: models.append(Folder(tmp_path / "run").restore()[0].state.vectors["w"]),
    )
    whole = tmp_path / "run"
    last = values(whole / "model.safetensors")
    assert torch.equal(last, values(tmp_path / "alone" / "model.safetensors"))
    assert not (tmp_path / "alone" / "average.safetensors").exists()
    assert alone.summary["average"] is None
    for one, other in zip(result.records, alone.records, strict=True):
        assert (one.accuracy, one.epsilon) == (other.accuracy, other.epsilon)
        assert (one.bytes_up, one.bytes_down) == (other.bytes_up, other.bytes_down)
        assert not other.average
    w, weights = torch.stack(models[1:]), torch.tensor([0.0, 0.0, 0.5, 0.5])
    if table["average"] == "exponential":
        weights = 0.7 ** torch.arange(3.0, -1.0, -1.0)
    average = (weights / weights.sum()) @ w
    state = Folder(whole).restore()[0].state
    torch.testing.assert_close(read_average(state), average, rtol=0, atol=1e-5)
    # The model's file has its tensors in the order of their names, as this one.
    assert torch.equal(
        values(whole / "average.safetensors").sort()[0], read_average(state).sort()[0]
    )
    module = result.model
    torch.nn.utils.vector_to_parameters(read_average(state), module.parameters())
    data = dataset_of(plan)
    score = evaluate(module, cross_entropy, data.x_test, data.y_test)
    said = json.loads((whole / "summary.json").read_text())["average"]
    assert said == result.records[-1].average
    assert (said["accuracy"], said["loss"]) == pytest.approx((score.accuracy, score.loss))
    assert "psi" in said
    page = write_report(whole).read_text()
    assert "averaged model" in page
    assert f"the {table['average']} average" in page


def dataset_of(plan):
    return SimulationSetup.of(plan, None, None).dataset


@pytest.mark.parametrize("name", ["feddyn", "fedproxvr", "ldp_fedsgd"])
def test_an_algorithm_has_an_average_of_its_models(name):
    tables = {"algorithm": name, "privacy": {"mode": "none"}, "rounds": 4}
    with_one = Plan.parse({**tables, "server": {"average": "tail", "average_share": 1.0}}).method
    paths = {}
    for key, method in (("alone", Plan.parse(tables).method), ("beside", with_one)):
        made = HandFederation(private=False)
        paths[key] = [made.run(method, rounds) for rounds in (1, 2, 3)]
    for one, other in zip(paths["alone"], paths["beside"], strict=True):
        assert torch.equal(one.vectors["w"], other.vectors["w"])
    mean = torch.stack([one.vectors["w"] for one in paths["alone"]]).mean(0)
    torch.testing.assert_close(read_average(paths["beside"][-1]), mean, rtol=0, atol=1e-12)


def test_an_average_with_an_untrained_head_is_refused():
    Plan.parse({"algorithm": "fedrep"})
    with pytest.raises(PlanError, match=r"server\.average = 'tail' .* 'fedrep': .* never trained"):
        Plan.parse({"algorithm": "fedrep", "server": {"average": "tail"}})


@pytest.mark.parametrize(
    ("table", "why"),
    [
        ({"average": "mean"}, "'none', 'exponential' or 'tail'"),
        ({"average_decay": 0.5}, "average_decay is 0.5 with server.average = 'none'"),
        ({"average": "tail", "average_decay": 0.5}, "average_decay is 0.5"),
        ({"average": "exponential", "average_share": 0.1}, "average_share is 0.1"),
        ({"average": "exponential", "average_decay": 1.0}, "average_decay"),
        ({"average": "tail", "average_share": 0.0}, "average_share"),
        ({"average": "tail", "average_share": float("nan")}, "average_share"),
    ],
)
def test_an_average_of_nothing_is_refused(table, why):
    with pytest.raises(PlanError, match=why):
        Plan.parse({"server": table})
