"""Ditto, APFL and FedRep: their ends are known algorithms, their fixed points the papers'."""

import json

import pytest
import torch
from tests.conformance.test_fixed_points import SITES, START

import fedpact
from fedpact import algorithms
from fedpact.algorithms import apfl, ditto, fedavg, fedrep
from fedpact.algorithms.wrappers import optimizers
from fedpact.algorithms.wrappers.base import Method
from fedpact.common.errors import DataError, PlanError
from fedpact.common.messages import Reply, State, Task
from fedpact.data.load import from_arrays
from fedpact.plan import Plan
from fedpact.report.run_summary import read_run
from fedpact.simulation.simulate import simulate
from fedpact.studies.conformance import HandFederation


def run(module, settings, rounds):
    """The shared model and the sites' own, from START, with exact gradients."""
    state, memories = State({"w": START}), dict.fromkeys(SITES, State())
    for number in range(1, rounds + 1):
        task = Task("run", number, "any", state.vectors, state.numbers)
        replies = []
        for site, objective in SITES.items():
            local = module.local(task, objective, memories[site], settings)
            memories[site] = local.memory
            replies.append(Reply("run", number, site, objective.size, local.vectors, local.numbers))
        state = fedavg.update(state, replies, fedavg.Settings())
    w = state.vectors["w"]
    return w, {site: settings.own_model(w, memory) for site, memory in memories.items()}


def shared(steps, rounds):
    settings = fedavg.Settings(learning_rate=0.1, local_steps=steps)
    state = State({"w": START})
    for number in range(1, rounds + 1):
        task = Task("run", number, "fedavg", state.vectors, state.numbers)
        replies = [
            Reply("run", number, n, s.size, fedavg.local(task, s, State(), settings).vectors, {})
            for n, s in SITES.items()
        ]
        state = fedavg.update(state, replies, settings)
    return state.vectors["w"]


def alone(site, steps):
    """What `steps` steps of a site by itself leave: w - b is scaled by 1 - η a in each."""
    return site.b + (1 - 0.1 * site.a) ** steps * (START - site.b)


@pytest.mark.parametrize("proximal", [0.0, 0.7, 1e300])
def test_the_shared_model_of_ditto_is_fedavgs(proximal):
    settings = ditto.Settings(
        learning_rate=0.1, global_steps=3, personal_steps=2, proximal=proximal
    )
    assert torch.equal(run(ditto, settings, 7)[0], shared(3, 7))


def test_ditto_without_lambda_is_each_site_alone():
    settings = ditto.Settings(learning_rate=0.1, personal_steps=2, proximal=0.0)
    for name, own in run(ditto, settings, 5)[1].items():
        torch.testing.assert_close(own, alone(SITES[name], 10), rtol=0, atol=1e-12)


def test_ditto_with_lambda_without_end_is_the_shared_model():
    w, own = run(ditto, ditto.Settings(learning_rate=0.1, proximal=1e300), 5)
    assert all(torch.equal(one, w) for one in own.values())


@pytest.mark.parametrize("proximal", [0.5, 20.0])
def test_dittos_own_model_minimises_its_objective(proximal):
    """a (v - b) + λ (v - w̄) = 0, w̄ the fixed point of what is shared."""
    settings = ditto.Settings(learning_rate=0.1, proximal=proximal)
    w, own = run(ditto, settings, 600)
    for name, v in own.items():
        site = SITES[name]
        expected = (site.a * site.b + proximal * w) / (site.a + proximal)
        torch.testing.assert_close(v, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_the_shared_model_of_apfl_is_fedavgs(share):
    settings = apfl.Settings(learning_rate=0.1, paired_steps=3, own_share=share)
    assert torch.equal(run(apfl, settings, 7)[0], shared(3, 7))


def test_apfls_ends_are_the_shared_model_and_the_site_alone():
    w, own = run(apfl, apfl.Settings(learning_rate=0.1, own_share=0.0), 5)
    assert all(torch.equal(one, w) for one in own.values())
    _, own = run(apfl, apfl.Settings(learning_rate=0.1, paired_steps=2, own_share=1.0), 5)
    for name, one in own.items():
        torch.testing.assert_close(one, alone(SITES[name], 10), rtol=0, atol=1e-12)


def test_apfls_own_model_is_the_sites_best_at_its_fixed_point():
    """∇F_i(α v_i + (1 - α) w) = 0: with any part of its own, a site can reach its own optimum."""
    _, own = run(apfl, apfl.Settings(learning_rate=0.1, own_share=0.5), 1200)
    for name, one in own.items():
        torch.testing.assert_close(one, SITES[name].b, rtol=0, atol=1e-10)


def test_apfls_own_part_moves_by_its_share_of_the_step():
    """From v = w the site's model has both's gradient g: v - η α g, with α = 1/4."""
    settings, site = apfl.Settings(learning_rate=0.1, own_share=0.25), SITES["b"]
    local = apfl.local(Task("run", 1, "apfl", {"w": START}, {}), site, State(), settings)
    expected = START - 0.1 * 0.25 * site.gradient(START)
    torch.testing.assert_close(local.memory.vectors["v"], expected, rtol=0, atol=1e-14)


def test_fedrep_trains_the_head_first_and_then_the_body():
    """By hand, of one round at site b: its head twice, its body three times, from START."""
    settings = fedrep.Settings(learning_rate=0.1, head_steps=2, body_steps=3, head=1)
    site = SITES["b"]
    local = fedrep.local(Task("run", 1, "fedrep", {"w": START}, {}), site, State(), settings)
    scale = 1 - 0.1 * site.a  # coordinates of a quadratic do not see each other
    torch.testing.assert_close(
        local.vectors["w"][0], site.b[0] + scale**3 * (START - site.b)[0], rtol=0, atol=1e-14
    )
    assert local.vectors["w"][1] == START[1]  # nothing of a head is sent
    own = settings.own_model(local.vectors["w"], local.memory)
    expected = site.b[1] + scale**2 * (START - site.b)[1]
    torch.testing.assert_close(own[1], expected, rtol=0, atol=1e-14)


def test_fedreps_body_is_stepped_with_the_trained_head():
    """With a loss (u v - 1)²/2 the body's gradient follows from the head: (u v - 1) v."""

    class Product:
        def batches(self, count, *channels):
            yield from [self] * count

        def gradient(self, w):
            return (w[0] * w[1] - 1) * w.flip(0)

    settings = fedrep.Settings(learning_rate=0.1, head=1)
    w = torch.tensor([2.0, 3.0], dtype=torch.float64)
    local = fedrep.local(Task("run", 1, "fedrep", {"w": w}, {}), Product(), State(), settings)
    head = 3.0 - 0.1 * (2 * 3 - 1) * 2
    assert float(local.memory.vectors["head"]) == pytest.approx(head, rel=1e-15)
    body = 2.0 - 0.1 * (2 * head - 1) * head
    assert float(local.vectors["w"][0]) == pytest.approx(body, rel=1e-15)


def test_a_head_that_is_all_of_the_model_is_refused():
    with pytest.raises(PlanError, match="head is 2"):
        fedrep.init(START, fedrep.Settings(head=2))


@pytest.mark.parametrize("name", ["ditto", "apfl", "fedrep"])
def test_noise_of_a_private_run_reaches_a_sites_own_model(name):
    """Else what a site keeps for itself would be of exact gradients."""
    own = []
    for sigma in (0.0, 1.0):
        bed = HandFederation(private=True, sigma=sigma)
        method = Method(name, algorithms.load(name).Settings())
        w = bed.run(method, 2).vectors["w"]
        memory = bed.memories["a"]
        own.append(torch.cat(list(memory.vectors.values())))
        assert method.own_model(w, memory) is not None
    assert not torch.equal(*own)


def test_a_head_that_cuts_a_tensor_is_refused(tmp_path):
    plan = Plan.parse({"algorithm": "fedrep", "model": "mlp", "settings": {"head": 9}})
    with pytest.raises(PlanError, match=r"settings.head is 9: .* 10 \(from .* or 1290"):
        simulate(plan, tmp_path / "run")


def test_fedreps_accuracy_is_that_of_the_sites_models(tmp_path):
    """w itself has a head that is never trained, so its accuracy says nothing."""
    raw = {
        "algorithm": "fedrep",
        "rounds": 3,
        "sites": 3,
        "model": "mlp",
        "privacy": {"mode": "none"},
    }
    raw |= {"settings": {"head": 1290, "head_steps": 5, "body_steps": 5}}
    raw |= {"partition": {"kind": "labels", "labels_per_site": 2, "held_out": 0.3}}
    plan = Plan.parse(raw)
    done = simulate(plan, tmp_path / "run")
    scores = done.records[-1].scores.values()
    hits = sum(score.accuracy * score.records for score in scores)
    assert done.summary["accuracy"] == pytest.approx(hits / sum(s.records for s in scores))
    assert (plan.head, Plan.parse({"algorithm": "fedavg"}).head) == (1290, 0)
    assert read_run(done.folder).head == 1290
    with pytest.raises(DataError, match="each site's model has its own head"):
        fedpact.load(done.folder)


def test_fedreps_statement_says_whose_records_its_accuracy_is_of(tmp_path):
    """Although there is a public test set: it is of no use without a head."""
    x, y = torch.randn(60, 4, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 3
    tables = {"algorithm": "fedrep", "settings": {"head": 3}, "sites": 2, "rounds": 1}
    plan = Plan.parse({**tables, "partition": {"kind": "iid", "held_out": 0.2}})
    done = simulate(plan, tmp_path / "run", data=from_arrays(x, y, test=(x, y)))
    held = sum(score.records for score in done.records[-1].scores.values())
    assert done.summary["judged_records"] == held < 60
    stated = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert stated["accuracy_pooled"]
    assert optimizers.MEASURED in stated["simulator_only"]
    assert optimizers.TOLD.format(head=3) in stated["covers"]
