"""Heads of the sites' own: never sent, charged as all else, and what a site's model then is."""

import json

import numpy as np
import pytest
import torch
from torch import nn

from fedpact import algorithms
from fedpact.algorithms.wrappers.base import Method
from fedpact.algorithms.wrappers.fairness_and_control import FairMethod, FairnessSettings
from fedpact.algorithms.wrappers.optimizers import Headed, check_head
from fedpact.client import read_memory
from fedpact.common.errors import PlanError
from fedpact.common.losses import cross_entropy
from fedpact.common.messages import State, Task
from fedpact.common.params import FlatModel
from fedpact.common.run_folder import Folder
from fedpact.data.load import from_arrays
from fedpact.evaluation.metrics import evaluate
from fedpact.plan import Plan
from fedpact.privacy.ledger.receipt import receipt
from fedpact.report.page import render_run
from fedpact.report.run_summary import read_run
from fedpact.simulation import simulate as joining
from fedpact.simulation.simulate import simulate
from fedpact.studies.conformance import HandFederation, method_of

HEAD = 3  # of the 12 numbers of the federation's nn.Linear(3, 3): its bias
both_forms = pytest.mark.parametrize("private", [False, True], ids=["plain", "private"])


def method(name="fedavg", head=HEAD, steps=2, **tables):
    return method_of(
        {
            "algorithm": name,
            "settings": {"local_steps": steps},
            "local": {"head": head},
            **tables,
        }
    )


@both_forms
@pytest.mark.parametrize("name", ["fedavg", "fedprox"])
def test_single_site_trains_as_without_heads(private, name):
    """Bit for bit: what is kept and what is sent come to the same where nobody else is."""
    ours, theirs = (HandFederation(private=private, counts={"a": 20}) for _ in range(2))
    headed, plain = method(name), method_of({"algorithm": name, "settings": {"local_steps": 2}})
    state = ours.run(headed, 4)
    w, own = state.vectors["w"], headed.own_model(state.vectors["w"], ours.memories["a"])
    expected = theirs.run(plain, 4).vectors["w"]
    if name == "fedprox":
        # It holds a head to where the site's own began, which is where the server's would be.
        np.testing.assert_allclose(own.numpy(), expected.numpy(), rtol=1e-12, atol=1e-12)
    else:
        assert torch.equal(own, expected)
    assert torch.equal(w[:-HEAD], own[:-HEAD])
    assert torch.equal(w[-HEAD:], ours.w[-HEAD:])


@both_forms
def test_nothing_of_a_head_is_sent_and_everything_else_is(private):
    bed, made = HandFederation(private=private), method()
    state = made.init(bed.w)
    for number in range(1, 4):
        replies = list(bed.replies(made, state, number))
        for reply in replies:
            assert set(reply.vectors) == {"w"}
            assert not reply.numbers
            assert torch.equal(reply.vectors["w"][-HEAD:], bed.w[-HEAD:])
            assert not torch.equal(reply.vectors["w"][:-HEAD], state.vectors["w"][:-HEAD])
        state = made.update(state, iter(replies))
    heads = [bed.memories[site].vectors["heads/own"] for site in bed.sites]
    assert all(len(head) == HEAD for head in heads)
    assert not torch.equal(heads[0], heads[1])


class Constant:
    """An oracle whose gradient is where it is asked for: it tells what it was asked."""

    def __init__(self):
        self.asked = []

    def batches(self, count, *channels):
        return (self for _ in range(count))

    def gradient(self, w):
        self.asked.append(w.clone())
        return torch.ones_like(w)


def test_step_updates_body_and_the_sites_own_head():
    made, oracle = method(steps=1), Constant()
    told, own = torch.arange(12.0), torch.tensor([7.0, 8.0, 9.0])
    task = Task("run", 1, "fedavg", {"w": told}, {})
    local = made.local(task, oracle, State({"heads/own": own}))
    assert torch.equal(oracle.asked[0], torch.cat([told[:-3], own]))
    rate = 0.5
    assert torch.equal(local.vectors["w"], torch.cat([told[:-3] - rate, told[-3:]]))
    assert torch.equal(local.memory.vectors["heads/own"], own - rate)
    # The task's vectors are everybody's.
    assert torch.equal(told, torch.arange(12.0))


def test_a_shared_part_out_of_all_range_does_not_stay_in_a_head():
    class Broken(Constant):
        def gradient(self, w):
            return torch.full_like(w, torch.inf)

    task = Task("run", 1, "fedavg", {"w": torch.zeros(12)}, {})
    own = torch.tensor([7.0, 8.0, 9.0])
    local = method(steps=1).local(task, Broken(), State({"heads/own": own}))
    assert torch.equal(local.memory.vectors["heads/own"], own)


def opposite():
    """Two sites whose labels are opposite on the same features."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(400, 4)).astype(np.float32)
    site = np.arange(400) % 2
    y = ((x[:, 0] + x[:, 1] > 0) ^ (site == 1)).astype(int)
    return from_arrays(x, y, site=[f"s{i}" for i in site], name="opposite")


# The last layer of the mlp: 2 classes of 128 numbers each, and their biases.
LAST = 2 * 128 + 2
TABLES = {
    "model": "mlp",
    "rounds": 12,
    "sites": 2,
    "sampling_rate": 0.5,
    "partition": {"kind": "natural", "held_out": 0.3},
    "privacy": {"accountant": "rdp"},
    "settings": {"local_steps": 3},
}


def run(folder, head=LAST, **tables):
    plan = Plan.parse({**TABLES, "local": {"head": head}, **tables})
    return plan, simulate(plan, folder, data=opposite())


@pytest.fixture(scope="module")
def headed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("heads") / "run"
    return folder, *run(folder, privacy={"epsilon": 8.0})


def test_sites_sharing_only_the_body_learn_their_own_heads(headed, tmp_path):
    _, _, result = headed
    _, without = run(tmp_path, head=0, privacy={"epsilon": 8.0})
    ours, theirs = (
        [score.accuracy for score in each.records[-1].scores.values()] for each in (result, without)
    )
    # One model for both can have half of the answers of each; deviations are below 0.06.
    assert min(ours) > 0.75
    assert max(theirs) < 0.7
    assert result.records[-1].accuracy == pytest.approx(np.mean(ours), abs=0.01)


def test_heads_do_not_change_the_cost(headed, tmp_path):
    folder, plan, _ = headed
    other = Plan.parse({**TABLES, "privacy": {"epsilon": 8.0}})
    assert plan.terms({"s0": 140.0, "s1": 140.0}) == other.terms({"s0": 140.0, "s1": 140.0})
    for site in ("s0", "s1"):
        (spend,) = receipt(folder / "sites" / site / "ledger.jsonl")["runs"].values()
        ((events),) = spend["events"]
        assert events["spent"] == events["reserved"] == 36


def test_figures_and_text_are_of_the_sites_own_models(headed):
    folder, plan, result = headed
    checkpoint, _ = Folder(folder).restore()
    w, model, data = checkpoint.state.vectors["w"], FlatModel(result.model), opposite()
    partition = json.loads((folder / "partition.json").read_text())
    right = records = 0
    for site, score in result.records[-1].scores.items():
        memory = read_memory(Folder(folder).site(site) / "memory.safetensors", plan.rounds)
        model.load(plan.method.own_model(w, memory))
        held = partition["held_out"][site]
        assert evaluate(model.module, cross_entropy, data.x[held], data.y[held]) == score
        right, records = right + score.accuracy * score.records, records + score.records
    assert result.records[-1].accuracy == pytest.approx(right / records)
    privacy = json.loads((folder / "privacy.json").read_text())
    assert privacy["own_models"] is True
    assert privacy["accuracy_pooled"] is True
    assert any(f"own head, of {LAST} numbers" in line for line in privacy["covers"])
    assert any("shared part alone is not a model" in line for line in privacy["simulator_only"])
    page = " ".join(render_run(read_run(folder)).split())
    assert f"all of the global model but the last {LAST} numbers" in page
    assert "each site has its own head" in page


def test_the_gain_of_joining_uses_a_sites_own_model(headed, monkeypatch):
    folder, _, result = headed
    # Tuning itself has tests of its own.
    monkeypatch.setattr(joining, "personalise_model", lambda *_: None)
    monkeypatch.setattr(joining, "on_held_out", lambda model, alone, tuned, w, *held: w)
    monkeypatch.setattr(joining, "asdict", lambda w: w.tolist())
    found = joining.of_run(folder, opposite())
    assert found["own_models"] is True
    model, data = FlatModel(result.model), opposite()
    partition = json.loads((folder / "partition.json").read_text())
    for site, w in found["sites"].items():
        model.load(torch.tensor(w))
        held = partition["held_out"][site]
        score = evaluate(model.module, cross_entropy, data.x[held], data.y[held])
        assert score.accuracy == result.records[-1].scores[site].accuracy


NEEDS_ONE_MODEL = {
    name: Method(name).facts.excludes["local.head"]
    for name in algorithms.names()
    if "local.head" in Method(name).facts.excludes
}


@pytest.mark.parametrize("name", NEEDS_ONE_MODEL)
def test_options_that_need_one_model_are_refused(name):
    with pytest.raises(PlanError, match=r"local\.head = 3 cannot be combined") as told:
        Plan.parse({"algorithm": name, "local": {"head": 3}, "privacy": {"mode": "none"}})
    assert NEEDS_ONE_MODEL[name] in str(told.value)


@pytest.mark.parametrize(
    ("tables", "reason"),
    [
        ({"fairness": {"weight": 0.1}}, "its own head"),
        ({"control": {"kind": "ali", "iterations": 9}}, "at one model"),
        ({"server": {"average": "tail"}}, "average"),
        (
            {
                "privacy": {"trust": "sum", "honest": 3},
                "secure_aggregation": {"threshold": 4},
                "sites": 5,
            },
            "its own head",
        ),
    ],
)
def test_incompatible_options_are_refused_with_the_reason(tables, reason):
    Plan.parse(tables)
    with pytest.raises(PlanError, match=reason):
        Plan.parse({**tables, "local": {"head": 3}})


def test_a_head_is_whole_tensors_and_not_the_whole_model():
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))
    for head in (0, 2, 12, 17):
        check_head(model, head)
    for head in (1, 3, 37, 38):
        with pytest.raises(PlanError, match=r"2 \(from '2.bias' on\) or 12"):
            check_head(model, head)
    with pytest.raises(PlanError, match="only one tensor"):
        check_head(nn.Linear(3, 2, bias=False), 6)


def test_a_head_that_cuts_a_tensor_ends_the_run_before_it_begins(tmp_path):
    with pytest.raises(PlanError, match=r"local\.head is 100: expected the size .*: 2 "):
        run(tmp_path / "run", head=100)
    assert not (tmp_path / "run" / "sites").exists()


@pytest.mark.parametrize("around", ["fairness", "local.head"])
def test_a_reply_without_a_model_is_refused_with_its_remedy(around):
    """By a wrapper that reads w; ldp_fedsgd's reply is a gradient, and its facts exclude both."""
    inner = Method("ldp_fedsgd")
    wrapped = FairMethod(inner, FairnessSettings()) if around == "fairness" else Headed(inner, HEAD)
    bed = HandFederation(private=True)
    with pytest.raises(PlanError, match=rf"replies with gradient, and {around} needs the model, w"):
        list(bed.replies(wrapped, wrapped.init(bed.w)))
