"""(ε, δ) per person: a person's records are in a batch together and add at most C to its sums."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.policies import GENEROUS
from torch import nn

from fedpact.cli.commands.plan import forecast
from fedpact.common.errors import DataError, PlanError, PolicyRefused
from fedpact.common.losses import cross_entropy
from fedpact.common.params import FlatModel
from fedpact.common.randomness.seeded import SeededDraws
from fedpact.data.load import from_arrays
from fedpact.data.partition import PartitionSettings, make_partition
from fedpact.data.splits import hold_out, limit_records_per_person
from fedpact.per_sample.clipping import Fair
from fedpact.per_sample.kernel import PerSampleKernel
from fedpact.plan import Plan
from fedpact.privacy.accounting.accountant import Budget, SampledGaussian
from fedpact.privacy.ledger.ledger import Ledger
from fedpact.privacy.ledger.receipt import receipt
from fedpact.privacy.oracle import PrivateOracle, Records
from fedpact.privacy.policy import Policy
from fedpact.privacy.terms import Terms
from fedpact.report.page import write_report
from fedpact.simulation.setup import SimulationSetup
from fedpact.simulation.simulate import simulate

CLIP = 0.25
MODELS = {
    "dense": lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)),
    "graph": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)
    ),
}


def kernel_of(name):
    torch.manual_seed(3)
    return PerSampleKernel(FlatModel(MODELS[name]()), cross_entropy)


def records(persons, scale=30.0):
    """Records of so many persons, the i-th with i + 1 of them; gradients far beyond the clip."""
    torch.manual_seed(5)
    whose = torch.cat([torch.full((i + 1,), i) for i in range(persons)])
    whose = whose[torch.randperm(len(whose))]
    return Records(scale * torch.randn(len(whose), 6), torch.arange(len(whose)) % 3, persons=whose)


def silent(size=1.0, **sigmas):
    """Terms without noise or sampling."""
    sigmas = sigmas or dict.fromkeys(("gradient", "difference", "loss", "below"), 0.0)
    return Terms("s", size, 1.0, CLIP, sigmas, 1, Budget(1, 1e-5), "pld", protects="person")


def answers(kernel, held, terms):
    w = kernel.model.vector.clone()
    oracle = PrivateOracle(held, kernel, terms, SeededDraws(0), lambda *_: None)
    batch = next(iter(oracle.batches(1, *terms.sigmas)))
    return {
        "gradient": batch.gradient(w, Fair(2.0, 0.5)),
        "difference": batch.difference(w, 0.9 * w, 0.1),
        "loss": torch.tensor([batch.loss(w, 0.7)], dtype=torch.float64),
        "below": torch.tensor([batch.below(w, 2.0)], dtype=torch.float64),
    }


def without(held, person):
    left = held.persons != person
    whose = held.persons[left]
    return Records(held.x[left], held.y[left], persons=whose - (whose > person).long())


@pytest.mark.parametrize("model", MODELS)
def test_no_person_moves_a_sum_by_more_than_a_record_may(model):
    """Equal records of a person add up to the clip; another's are as they were."""
    kernel, held = kernel_of(model), records(6)
    alike = held.persons == 4
    held.x[alike] = held.x[alike][:1].clone()
    # The least likely label, so that there is a gradient to clip.
    with torch.no_grad():
        held.y[alike] = kernel.model.module(held.x[alike]).argmin(1)
    bounds = {"gradient": CLIP, "difference": 0.1, "loss": 0.7, "below": 0.5}
    whole = answers(kernel, held, silent())
    for person in range(6):
        rest = answers(kernel, without(held, person), silent())
        for channel, bound in bounds.items():
            moved = float((whole[channel] - rest[channel]).double().norm())
            assert moved <= bound * (1 + 1e-12), (person, channel)
            if person == 4 and channel == "gradient":
                assert moved > 0.97 * bound
    # Each record with a clip of its own, as where records are protected, is five times as far.
    loose = answers(kernel, replace(held, persons=None), silent())
    rest = answers(kernel, replace(without(held, 4), persons=None), silent())
    assert float((loose["gradient"] - rest["gradient"]).norm()) > 4.8 * CLIP


@pytest.mark.parametrize("model", MODELS)
def test_a_persons_part_is_the_mean_of_the_clipped_gradients(model):
    kernel, held = kernel_of(model), records(5, scale=1.0)
    w = kernel.model.vector.clone()
    rows = kernel.alone(held.x, held.y)
    clip = CLIP / (1 + 1e-2)
    clipped = rows * (clip / rows.norm(dim=1)).clamp_max(1)[:, None]
    mean = sum(clipped[held.persons == p].mean(0) for p in range(5))
    kernel.model.load(w)
    shares = held.batch(SeededDraws(0), 1.0, 0)[2]
    torch.testing.assert_close(
        kernel.clipped_sum(held.x, held.y, clip, None, None, shares), mean, atol=1e-6, rtol=1e-5
    )


def test_a_batch_far_beyond_the_declared_size_keeps_the_bound():
    kernel, held = kernel_of("dense"), records(60)
    terms = silent(size=0.01)
    whole, rest = answers(kernel, held, terms), answers(kernel, without(held, 50), terms)
    assert float((whole["gradient"] - rest["gradient"]).norm()) * terms.batch_size <= CLIP
    # A person's weight in n is one: 60 persons with 1,830 records are no more than 60 records.
    assert held.count == 60


def test_persons_are_sampled_with_all_their_records():
    held, rate = records(40), 0.3
    sizes = []
    for step in range(300):
        _, y, shares = held.batch(SeededDraws(1), rate, step)
        chosen = SeededDraws(1).batch(40, rate, step)
        assert len(y) == sum(p + 1 for p in chosen.tolist())
        assert float(shares.sum()) <= len(chosen) <= float(shares.sum()) + 1e-6
        sizes.append(len(chosen))
    # Six standard deviations of the mean: wrong once in 5e8.
    assert abs(np.mean(sizes) - 12) < 6 * math.sqrt(40 * 0.3 * 0.7 / 300)


def table(path, persons=60, visits=3):
    """A file of persons with 1 to `visits` records; person and record tell each other's label."""
    draw = np.random.default_rng(7)
    rows = ["patient_id,age,dose,sick"]
    for p in range(persons):
        for _ in range(1 + p % visits):
            age, dose = draw.normal(size=2)
            rows.append(f"p{p},{age:.4f},{dose:.4f},{int(age + dose > 0)}")
    order = draw.permutation(len(rows) - 1)
    path.write_text("\n".join([rows[0], *(rows[1 + i] for i in order)]) + "\n")
    return path


@pytest.fixture
def study(tmp_path):
    def plan(**changes):
        data = str(table(tmp_path / "visits.csv"))
        whole = {
            "data": data,
            "label": "sick",
            "person": "patient_id",
            "rounds": 2,
            "sites": 2,
            "privacy": {"unit": "person"},
        }
        return Plan.parse(whole | changes)

    return plan


def test_a_run_per_person_says_so_everywhere(study, tmp_path):
    plan = study()
    scene = SimulationSetup.of(plan)
    assert scene.dataset.features == ("age", "dose")
    for site in scene.sites:
        assert scene.terms[site.name].size == int(site.persons.max()) + 1 < len(site.y)
    result = simulate(plan, tmp_path / "run")
    told = json.loads((tmp_path / "run/privacy.json").read_text())
    adjacency = "add/remove one person with all of that person's records"
    assert (told["unit"], told["adjacency"]) == ("person", adjacency)
    assert "a patient with five visits has the same ε" in told["per_person"]
    assert result.summary["adjacency"] == adjacency
    proof = receipt(next((tmp_path / "run").rglob("ledger.jsonl")))
    assert proof["adjacency"] == adjacency
    assert [run["unit"] for run in proof["runs"].values()] == ["person"]
    page = write_report(result.folder).read_text()
    assert "person-level (ε, δ)-differential privacy" in page
    assert "add/remove one record" not in page
    shown = forecast(scene)
    assert shown["adjacency"] == adjacency
    # It costs no more noise: the event is that of records, at the same rate.
    of_records = plan.model_copy(
        update={"privacy": plan.privacy.model_copy(update={"unit": "record"})}
    )
    again = SimulationSetup.of(of_records)
    assert {t.event for t in again.terms.values()} == {t.event for t in scene.terms.values()}


def test_no_person_is_both_trained_on_and_evaluated(study):
    scene = SimulationSetup.of(study(partition={"kind": "iid", "held_out": 0.4}))
    whose = np.array(scene.dataset.person)
    train = {name: set(whose[i]) for name, i in scene.partition.train.items()}
    held = {name: set(whose[i]) for name, i in scene.partition.held_out.items()}
    everybody = [*train.values(), *held.values()]
    assert sum(map(len, everybody)) == len(set().union(*everybody)) == 60
    assert all(held.values())


def test_being_held_out_does_not_depend_on_others():
    names = [f"p{i // 2}" for i in range(200)]
    out = hold_out(names, np.arange(200), 0.3, 4, np.random.default_rng(0))
    assert (
        hold_out(names[20:], np.arange(180), 0.3, 4, np.random.default_rng(0)).tolist()
        == out[20:].tolist()
    )
    # Each with all records; and also where nobody else is left.
    assert (out[::2] == out[1::2]).all()
    for i in (0, 50, 120):
        assert (
            hold_out(names[i : i + 2], np.arange(2), 0.3, 4, np.random.default_rng(0)).all()
            == out[i]
        )
    # 100 persons at 0.3, six standard deviations.
    assert abs(out.sum() / 2 - 30) < 6 * math.sqrt(21)


def test_the_test_part_has_no_person_of_the_training_part():
    person = ["a", "a", "b", "c", "c", "d", "e", "e"]
    test = [False, True, True, False, True, False, True, True]
    data = from_arrays([[float(i)] for i in range(8)], [0, 1] * 4, site=["s"] * 8, person=person)
    data = replace(data, held=torch.tensor(test))
    made = make_partition(data, PartitionSettings(kind="natural", held_out="own"), 1, 0)
    # What is trained on is as the data set has it.
    assert made.train["s"].tolist() == [0, 3, 5]
    assert [person[i] for i in made.held_out["s"]] == ["b", "e", "e"]


def test_holding_out_all_records_is_reported():
    """Nobody is put back: who that is would depend on the others."""
    data = from_arrays([[float(i)] for i in range(6)], [0, 1] * 3, person=list("aabbcc"))
    told = []
    for seed in range(40):
        try:
            part = make_partition(data, PartitionSettings(held_out=0.6), 1, seed).held_out[
                "site-00"
            ]
        except DataError as error:
            told.append(str(error))
        else:
            assert len(part) % 2 == 0
    # A chance of 0.216 each: none in 40 once in 16,000; the seeds are fixed.
    assert told
    assert "everybody at site site-00, of 6 records, is held out by its own choice" in told[0]


def test_beyond_k_records_of_a_person_none_is_used(study):
    good = limit_records_per_person(torch.tensor([0] * 5 + [1] * 2 + [2]), 2, 0)
    assert [int(good[:5].sum()), int(good[5:7].sum()), bool(good[7])] == [2, 2, True]
    # Others' records, and where they lie among them, change nothing.
    mixed = torch.tensor([1, 0, 0, 2, 0, 1, 0, 3, 0])
    alone = limit_records_per_person(torch.zeros(5, dtype=torch.int64), 2, 0)
    assert limit_records_per_person(mixed, 2, 0)[[1, 2, 4, 6, 8]].tolist() == alone.tolist()
    scene = SimulationSetup.of(study(privacy={"unit": "record", "person_records": 2}))
    for site in scene.sites:
        assert int(torch.bincount(site.persons).max()) == 2
        assert scene.terms[site.name].size == len(site.y)


def test_a_record_without_a_person_is_left_out(tmp_path, caplog):
    path = table(tmp_path / "t.csv", persons=30)
    lines = path.read_text().splitlines()
    lines[3] = "," + lines[3].split(",", 1)[1]
    path.write_text("\n".join(lines) + "\n")
    plan = {"data": str(path), "label": "sick", "person": "patient_id", "sites": 2}
    data = SimulationSetup.of(Plan.parse({**plan, "privacy": {"unit": "person"}})).dataset
    assert len(data.y) == len(lines) - 2
    assert "row 3 = '': column patient_id names no person" in caplog.text
    with pytest.raises(DataError, match="person has 2 entries for 3"):
        from_arrays([[1.0], [2.0], [3.0]], [0, 1, 0], person=["a", "b"])


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"privacy": {"unit": "person", "mode": "batch_clipped"}},
            "records share the person's clip",
        ),
        ({"data": "digits", "person": None, "label": None}, "does not say whose"),
        ({"person": "nobody"}, "person column is 'nobody'"),
        ({"person": "sick"}, "expected different columns"),
        ({"privacy": {"unit": "patient"}}, "unit"),
    ],
)
def test_impossible_values_are_refused(study, changes, told):
    with pytest.raises((PlanError, DataError), match=told):
        SimulationSetup.of(study(**changes))


def test_neither_unit_counts_as_the_other(tmp_path, study):
    event = {SampledGaussian(0.1, 4.0): 3}
    with Ledger(tmp_path / "ledger.jsonl", "s", hypothetical=True) as ledger:
        ledger.reserve("one", Budget(2.0, 1e-5), event)
        with pytest.raises(PolicyRefused, match="do not add up"):
            ledger.reserve("two", Budget(2.0, 1e-5), event, unit="person")
    with Ledger(tmp_path / "other.jsonl", "s", hypothetical=True) as ledger:
        ledger.reserve("two", Budget(2.0, 1e-5), event, unit="person")
    with Ledger(tmp_path / "other.jsonl", "s", hypothetical=True) as ledger:
        ledger.reserve("two", Budget(2.0, 1e-5), event, unit="person")
        with pytest.raises(PolicyRefused, match="other terms"):
            ledger.reserve("two", Budget(2.0, 1e-5), event)
    policy = Policy.parse(GENEROUS)
    terms = next(iter(SimulationSetup.of(study()).terms.values()))
    with pytest.raises(PolicyRefused, match='sets unit = "person"'):
        policy.check_run("fedavg", terms, (0.0, 0.0))
    policy.model_copy(update={"unit": "person"}).check_run("fedavg", terms, (0.0, 0.0))


def test_plain_runs_average_over_persons_too(study, tmp_path):
    """One full step from 0: w is the mean over persons of the mean over their visits."""
    plan = study(
        privacy={"unit": "person", "mode": "none"},
        rounds=1,
        sites=1,
        sampling_rate=1.0,
        settings={"local_steps": 1, "learning_rate": 1.0},
    )
    scene = SimulationSetup.of(plan)
    site, module = scene.sites[0], scene.workshop.module()
    flat = FlatModel(module)
    start = flat.vector.clone()
    rows = PerSampleKernel(flat, cross_entropy).alone(site.x, site.y)
    count = int(site.persons.max()) + 1
    mean = sum(rows[site.persons == p].mean(0) for p in range(count)) / count
    result = simulate(plan, tmp_path / "run")
    end = FlatModel(result.model).vector
    torch.testing.assert_close(end, start - mean, atol=1e-5, rtol=1e-4)
