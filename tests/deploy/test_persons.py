"""A deployment that protects persons: who they are is declared, and their number is the size."""

import pytest
from tests.privacy.test_persons import table

from fedpact.engines.parties.federation import Federation, read_plan
from fedpact.engines.parties.site import Site
from fedpact.engines.scene import Scene
from fedpact.errors import PlanError
from fedpact.ledger.receipt import receipt
from fedpact.messages import Task


@pytest.fixture
def of_persons(make, tmp_path):
    return make(
        tmp_path / "d",
        data=str(table(tmp_path / "visits.csv")),
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
    simulated = next(site for site in Scene.of(plan).sites if site.name == "site-00")
    with Site(directory) as site:
        assert "add/remove one person" in site.spent()
        # As a simulation has them: the same records of the same persons, under the same numbers.
        held = site._records(Task("run", 1, "fedavg", {}, {}))
        assert held.count == federation.sites["site-00"].size
        assert held.persons.tolist() == simulated.persons.tolist()
        assert held.x.equal(simulated.x)
    (run,) = receipt(directory / "ledger.jsonl")["runs"].values()
    assert run["unit"] == "person"
    assert 'unit = "person"' in (directory / "policy.toml").read_text()


def test_without_their_names_nobody_is_protected(of_persons):
    directory = of_persons / "sites" / "site-01"
    path = directory / "federation.toml"
    path.write_text(path.read_text().replace('person = "person"', '# person = "person"'))
    with pytest.raises(PlanError, match="no person: name the column"):
        Site(directory)
