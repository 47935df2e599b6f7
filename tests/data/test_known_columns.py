"""What is known of the columns of named data sets: from their descriptions, the same everywhere."""

from pathlib import Path

import pytest

from fedpact.configuration import read_configuration
from fedpact.data import heart
from fedpact.data.columns.known import KNOWN, known
from fedpact.engines.scene import loaded
from fedpact.plan import Plan

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
PLANS = {"adult": "adult/adult.toml", "heart_disease_flamby": "heart/heart.toml"}


def declared(name):
    path = known(name)
    assert path is not None
    return Plan.parse({"records": read_configuration(path)["records"]}).records


@pytest.mark.parametrize("name", PLANS)
def test_an_experiment_on_a_named_data_set_declares_what_is_known_of_it(name):
    plan = Plan.read(EXPERIMENTS / PLANS[name])
    assert plan.data == name
    assert plan.records == declared(name)


@pytest.mark.parametrize("name", ["digits", "no_such_data", "../adult", "adult.csv"])
def test_of_others_nothing_is_known(name):
    assert known(name) is None


@pytest.mark.parametrize(
    ("name", "ranges", "count"),
    [
        ("heart_disease", heart._RANGES, 22),
        ("heart_disease_flamby", heart._FLAMBY_RANGES, 13),
    ],
)
def test_heart_disease_begins_at_the_normal_finding_and_codes_at_their_share(name, ranges, count):
    found = declared(name).columns
    share = dict.fromkeys(heart._BINARY, 1 / 2)
    share |= {code: 1 / len(codes) for code, codes in heart._CODES.items()}
    for title, column in found.items():
        raw, scaled, _ = title.partition(" scaled")
        wanted = share.get(raw.partition("=")[0])
        if scaled:
            low, high = ranges[raw]
            # Nobody's age is a finding.
            normal = heart._NORMAL.get(raw, (low + high) / 2)
            wanted = (2 * normal - low - high) / (high - low)
        assert column.mean == pytest.approx(wanted, abs=1e-6), title
    assert len(found) == count
    assert {*KNOWN[name]} < {*found}


@pytest.mark.parametrize("name", KNOWN)
def test_they_fit_the_data(name, real_data):
    data = loaded(Plan(data=name, records=declared(name)))
    assert len(data.y) > 700
    assert set(declared(name).columns) == set(data.features)
