"""What experiments/beyond publishes says what its tables rest on, and nothing else."""

import hashlib
import json
import zipfile
from pathlib import Path

import pytest
from experiments.beyond.publish import Archive, alike
from experiments.beyond.table import Stored, tallied
from experiments.recommend import unlike

ROOT = Path(__file__).parents[1] / "experiments" / "beyond"
ARCHIVES = sorted((ROOT / "published").glob("*.zip"))
LARGE = ("adult", "adult-iid")


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=pytest.mark.slow if path.stem in LARGE else ())
        for path in ARCHIVES
    ],
)
def test_receipts_and_partitions_are_those_of_the_stored_figures(path):
    stored = Stored(path.stem).found
    with zipfile.ZipFile(path) as archive:
        texts = {name: archive.read(name) for name in archive.namelist()}
    keys = [name.removeprefix("receipts/")[:-5] for name in texts if name.startswith("receipts/")]
    assert keys
    for key in keys:
        receipts = json.loads(texts[f"receipts/{key}.json"])
        assert alike(tallied(list(receipts.values())), stored[key]["spent"])
        told = dict(part.split("=") for part in key.split() if "=" in part)
        assert len(receipts) == int(told["sites"])
        for site, one in receipts.items():
            (run,) = one["runs"].values()
            assert one["site"] == site
            assert run["epsilon_spent"] <= run["epsilon_reserved"] <= float(told["ε"])
        partition = texts[f"partitions/sites={told['sites']} seed={told['seed']}.json"]
        assert hashlib.sha256(partition).hexdigest() == stored[key]["partition"]
        assert sorted(json.loads(partition)["train"]) == sorted(receipts)


@pytest.mark.parametrize("name", ["heart", "shakespeare-ngram"])
def test_every_figure_of_these_has_its_receipts(name):
    study = Stored(name)
    with zipfile.ZipFile(ROOT / "published" / f"{name}.zip") as archive:
        names = set(archive.namelist())
    for cell in study.cells():
        rounds, rate = study.chosen(cell)
        for seed in study.study.seeds:
            assert f"receipts/{cell} T={rounds} η={rate:g} seed={seed}.json" in names


def test_an_archive_keeps_old_entries_and_adds_new_ones(tmp_path):
    path = tmp_path / "a.zip"
    Archive(path).add({"a": "1", "b": "2"})
    Archive(path).add({"b": "other", "c": "3"})
    with zipfile.ZipFile(path) as archive:
        assert {name: archive.read(name) for name in archive.namelist()} == {
            **{"a": b"1", "b": b"2", "c": b"3"}
        }
    assert Archive(path).names() == {"a", "b", "c"}


def test_spent_epsilon_agrees_to_one_in_2000():
    assert alike({"1.000000": 4}, {"0.999600": 4})
    assert not alike({"1.000000": 4}, {"0.999400": 4})
    assert not alike({"1.000000": 4}, {"1.000000": 3})


@pytest.mark.parametrize("row", ["digits, 3 labels, 0.5 0.5 8 8"])
def test_published_figures_use_the_unequal_budget_advice(row):
    stored = json.loads(unlike.STORED.read_text())
    for name, plan in unlike.both(row).items():
        assert stored[f"{row}: {name}"]["plan"] == json.loads(json.dumps(plan))
