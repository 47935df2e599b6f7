"""UCI Adult by declared columns, from made-up files of its form; the real one where it is there."""

import hashlib
from pathlib import Path

import pytest
import torch

from fedpact.common.errors import DataError
from fedpact.data import download
from fedpact.data.download import Source
from fedpact.data.load import load_dataset
from fedpact.data.schema import Scaling
from fedpact.plan import Plan
from fedpact.simulation.setup import SimulationSetup

TOML = Path(__file__).parents[2] / "experiments" / "adult" / "adult.toml"
TRAIN = (
    "50, Private, 77516, Bachelors, 13, Divorced, Sales, Husband, White, Male, 2174, 0, 40, "
    "United-States, <=50K",
    "20, ?, 1, HS-grad, 1, Divorced, ?, Wife, Other, Female, 99999, 4000, 100, ?, >50K",
    "30, Private, 1, HS-grad, 9, Engaged, Sales, Wife, Other, Female, 0, 0, 10, Peru, >50K",
    "",
)
TEST = (
    "|1x3 Cross validator",
    "100, Private, 2, 11th, 16, Widowed, Sales, Wife, Black, Male, 0, 0, 0, Peru, <=50K.",
    "",
)


@pytest.fixture
def adult(tmp_path, monkeypatch):
    """Three records to train on, of which the last has a word that nobody declared, and one."""
    parts = {"adult.data": TRAIN, "adult.test": TEST}
    home, sums = tmp_path / "adult", {}
    home.mkdir()
    for name, lines in parts.items():
        content = "\n".join(lines).encode()
        (home / name).write_bytes(content)
        sums[name] = hashlib.sha256(content).hexdigest()
    monkeypatch.setenv("FEDPACT_DATA", str(tmp_path))
    old = download.SOURCES["adult"]
    monkeypatch.setitem(download.SOURCES, "adult", Source("adult", sums, old.home, old.licence))


def test_columns_are_what_the_experiment_declares(adult, caplog):
    form = Plan.read(TOML).records.shared()
    data = load_dataset("adult", form=form)
    assert (data.y.tolist(), data.y_test.tolist()) == ([0, 1], [0])
    assert "row 3 = 'Engaged': column marital-status" in caplog.text
    scaling = Scaling.of(form, data.x.shape[1:], data.features)
    x, names = scaling(data.x), scaling.names
    first, second = (dict(zip(names, row.tolist(), strict=True)) for row in x)
    assert (first["age"], first["education-num"]) == (0.0, pytest.approx(2 * 12 / 15 - 1))
    assert first["capital-gain"] == pytest.approx(2174 / 20000)
    assert (second["capital-gain"], second["hours-per-week"]) == (1.0, 1.0)
    assert (second["workclass=not said"], second["workclass=Private"]) == (1.0, 0.0)
    assert (first["native-country"], second["native-country"]) == (0.0, 1.0)
    # One-hot: one of each; no other column is beyond [-1, 1].
    for column in ("workclass", "marital-status", "occupation", "relationship", "race"):
        chosen = [k for k, name in enumerate(names) if name.startswith(column + "=")]
        assert x[:, chosen].sum(1).tolist() == [1.0, 1.0]
    assert scaling(data.x_test).abs().max() <= 1


def test_without_a_declaration_words_are_reported(adult):
    with pytest.raises(DataError, match=r"no record is left.* adult: .* workclass"):
        load_dataset("adult")


def test_a_column_that_is_left_out_is_not_read(adult):
    """So it need not be declared, and no word in it leaves a record out."""
    records = Plan.read(TOML).records
    left = [*set(records.columns) - {"age", "sex"}, "fnlwgt"]
    declared = {name: records.columns[name] for name in ("age", "sex")}
    dropped = records.model_copy(update={"drop": left, "columns": declared})
    data = load_dataset("adult", form=dropped.shared())
    assert data.features == ("age", "sex")
    assert data.x.tolist() == [[50.0, 1.0], [20.0, 0.0], [30.0, 0.0]]
    with pytest.raises(DataError, match=r"records.drop names no such"):
        load_dataset("adult", form=records.model_copy(update={"drop": ["no such"]}).shared())


@pytest.mark.slow
def test_the_published_files(real_data):
    """Rows by label as published: 7,841 of 32,561 and 3,846 of 16,281 have more than 50,000."""
    scene = SimulationSetup.of(Plan.read(TOML))
    data = scene.dataset
    assert (len(data.y), int(data.y.sum())) == (32561, 7841)
    assert (len(data.y_test), int(data.y_test.sum())) == (16281, 3846)
    assert torch.equal(data.x.abs().amax(0) <= 1, torch.ones(data.x.shape[1], dtype=torch.bool))
