"""A deployment that protects persons: who they are is declared, and their number is the size."""

import json

import numpy as np
import pytest
from tests.privacy.test_persons import table

from fedpact.common.errors import PlanError
from fedpact.common.messages import Task
from fedpact.deployment.federation import Federation, read_plan
from fedpact.deployment.site import Site
from fedpact.deployment.site_records import SiteFiles, own_records
from fedpact.deployment.snapshot import inspect_deployment
from fedpact.privacy.ledger.receipt import receipt
from fedpact.simulation.setup import SimulationSetup
from fedpact.simulation.simulate import simulate


@pytest.fixture(scope="module")
def visits(tmp_path_factory):
    return str(table(tmp_path_factory.mktemp("visits") / "visits.csv"))


@pytest.fixture
def of_persons(make, visits, tmp_path):
    return make(
        tmp_path / "d",
        data=visits,
        label="sick",
        person="patient_id",
        sites=2,
        privacy={"unit": "person", "person_records": 2, "accountant": "rdp"},
    )


def test_a_site_counts_samples_and_promises_persons(of_persons):
    directory = of_persons / "sites" / "site-00"
    federation, plan = (
        Federation.read(directory / "federation.toml"),
        read_plan(directory / "plan.json"),
    )
    assert federation.person == "person"
    simulated = next(site for site in SimulationSetup.of(plan).sites if site.name == "site-00")
    with Site(directory) as site:
        site.take_part()
        # As a simulation has them: the same records of the same persons, under the same numbers.
        held = site._records(Task("run", 1, "fedavg", {}, {}))
        assert held.count == federation.sites["site-00"].size
        assert held.persons.tolist() == simulated.persons.tolist()
        assert held.x.equal(simulated.x)
    (run,) = receipt(directory / "ledger.jsonl")["runs"].values()
    assert run["unit"] == "person"
    assert 'unit = "person"' in (directory / "policy.toml").read_text()


@pytest.fixture
def evaluated(federate, visits):
    """A run that is over, of records of which some persons have three."""
    run = federate(
        {"seeds": "test"},
        rounds=2,
        data=visits,
        label="sick",
        person="patient_id",
        sites=2,
        privacy={"unit": "person", "person_records": 2, "accountant": "rdp"},
        evaluation={"share": 0.4, "epsilon": 3.0, "releases": ["hits", "loss", "roc"]},
    )
    run()
    return run


def test_a_person_is_evaluated_or_trained_on_and_counts_once(evaluated, tmp_path):
    """So that of the two budgets the larger holds of it, and a simulation releases the same."""
    plan = read_plan(evaluated.directory / "server" / "plan.json")
    simulated = simulate(plan, tmp_path / "simulation")
    assert evaluated.records[-1].evaluation == simulated.records[-1].evaluation
    for directory in sorted((evaluated.directory / "sites").iterdir()):
        name = directory.name
        own = inspect_deployment(directory)["own_figures"]["rounds"]["2"]
        assert own == simulated.records[-1].held_out[name]
        found = own_records(SiteFiles.read(directory))
        (node,) = [node for node in evaluated.nodes if node.directory == directory]
        out = node.site._examiner.split(found).numpy()
        whose = np.array(found.whose)
        held, trained = set(whose[out]), set(whose[~out])
        assert held
        assert trained
        assert not held & trained
        # At most two records of a person; and of persons each counts once.
        assert len(held) < out.sum() <= 2 * len(held)
        assert sum(own["hits"]) == sum(own["roc"]) == len(held)
        runs = receipt(directory / "ledger.jsonl")["runs"]
        assert [run["unit"] for run in runs.values()] == ["person", "person"]
        # The larger of the two, and not their sum.
        budgets = [run["epsilon_reserved"] for run in runs.values()]
        assert receipt(directory / "ledger.jsonl")["epsilon_reserved"] == max(budgets) == 3.0
    told = json.loads((tmp_path / "simulation" / "privacy.json").read_text())
    assert (told["evaluation"]["unit"], told["evaluation"]["split_by"]) == ("person", "person")
    assert "decides this for each person, with all records, alone" in " ".join(told["covers"])
    names = [figure["name"] for figure in simulated.summary["evaluation"]["figures"]]
    assert names[0] == "persons"


def test_where_records_are_protected_persons_are_split_too(make, visits, tmp_path):
    """So that the larger of the two budgets holds of a person: the statement says it."""
    asked = {"data": visits, "label": "sick", "person": "patient_id", "sites": 2}
    asked |= {"privacy": {"accountant": "rdp"}, "evaluation": {"share": 0.4, "epsilon": 3.0}}
    home = make(tmp_path / "d", **asked) / "sites" / "site-00"
    own = own_records(SiteFiles.read(home))
    with Site(home) as site:
        out, whose = site._examiner.split(own).numpy(), np.array(own.whose)
    scene = SimulationSetup.of(read_plan(home / "plan.json"))
    held, trained = (
        np.array(scene.dataset.person)[part["site-00"]]
        for part in (scene.partition.held_out, scene.partition.train)
    )
    for some, others in ((whose[out], whose[~out]), (held, trained)):
        assert len({*some}) < len(some)
        assert not {*some} & {*others}


def test_without_names_no_person_is_protected(of_persons):
    directory = of_persons / "sites" / "site-01"
    path = directory / "federation.toml"
    path.write_text(path.read_text().replace('person = "person"', '# person = "person"'))
    with pytest.raises(PlanError, match="no person: name the column"):
        Site(directory)
