"""What is known of the columns of named data sets: from their descriptions, the same everywhere."""

from pathlib import Path

import pytest

from fedpact.common.configuration import read_configuration
from fedpact.data import public
from fedpact.data.advice import KNOWN, find_configuration
from fedpact.plan import Plan
from fedpact.simulation.setup import load_data

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
PLANS = {"adult": "adult/adult.toml", "heart_disease_flamby": "heart/heart.toml"}


def declared(name):
    path = find_configuration(name)
    assert path is not None
    return Plan.parse({"records": read_configuration(path)["records"]}).records


@pytest.mark.parametrize("name", PLANS)
def test_named_data_set_declares_its_known_columns(name):
    plan = Plan.read(EXPERIMENTS / PLANS[name])
    assert plan.data == name
    assert plan.records == declared(name)


@pytest.mark.parametrize("name", ["digits", "no_such_data", "../adult", "adult.csv"])
def test_of_others_nothing_is_known(name):
    assert find_configuration(name) is None


@pytest.mark.parametrize(
    ("name", "ranges", "count"),
    [
        ("heart_disease", public._RANGES, 22),
        ("heart_disease_flamby", public._FLAMBY_RANGES, 13),
    ],
)
def test_heart_disease_defaults_to_normal_findings(name, ranges, count):
    found = declared(name).columns
    share = dict.fromkeys(public._BINARY, 1 / 2)
    share |= {code: 1 / len(codes) for code, codes in public._CODES.items()}
    for title, column in found.items():
        raw, scaled, _ = title.partition(" scaled")
        wanted = share.get(raw.partition("=")[0])
        if scaled:
            low, high = ranges[raw]
            # Nobody's age is a finding.
            normal = public._NORMAL.get(raw, (low + high) / 2)
            wanted = (2 * normal - low - high) / (high - low)
        assert column.mean == pytest.approx(wanted, abs=1e-6), title
    assert len(found) == count
    assert {*KNOWN[name]} < {*found}


# Of Adult, whose columns are the experiment's, test_adult shows it.
@pytest.mark.parametrize("name", [name for name in KNOWN if name != "adult"])
def test_they_fit_the_data(name, real_data):
    data = load_data(Plan(data=name, records=declared(name)))
    assert len(data.y) > 700
    assert set(declared(name).columns) == set(data.features)
