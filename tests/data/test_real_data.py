"""The real data sets against what their sites publish; skipped where FEDPACT_DATA is not set."""

import json
import math

import numpy as np
import pytest
import torch
from experiments.recommend import check

from fedpact.data import download, public
from fedpact.data.load import load_dataset
from fedpact.data.partition import PartitionSettings, make_partition

PER_LABEL = {
    "mnist": (
        [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949],
        [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009],
    ),
    "fashion_mnist": ([6000] * 10, [1000] * 10),
    "cifar10": ([5000] * 10, [1000] * 10),
}
SHAPES = {"mnist": (1, 28, 28), "fashion_mnist": (1, 28, 28), "cifar10": (3, 32, 32)}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fashion_mnist", "mnist", "cifar10"])
def test_images_have_the_published_counts_and_moments(real_data, name):
    data = load_dataset(name)
    assert data.x_test is not None
    assert data.y_test is not None
    train, test = PER_LABEL[name]
    assert data.x.shape == (sum(train), *SHAPES[name])
    assert data.x_test.shape == (sum(test), *SHAPES[name])
    assert data.y.bincount().tolist() == train
    assert data.y_test.bincount().tolist() == test
    assert len(data.classes) == 10
    # The constants are the training set's own, rounded to four digits: at most 5e-5 off, over a
    # standard deviation of at least 0.24.
    dims = (0, 2, 3)
    deviation, mean = torch.std_mean(data.x.double(), dims)
    assert mean.abs().max() < 5e-5 / 0.24
    assert (deviation - 1).abs().max() < 5e-5 / 0.24
    # A pixel is one of 256 values: 0 and 255 are both there, in every channel.
    for channel in range(SHAPES[name][0]):
        x = data.x[:, channel]
        assert math.isclose(x.max() - x.min(), 1 / std(name)[channel], rel_tol=1e-5)


def std(name):
    return {
        "mnist": (0.3081,),
        "fashion_mnist": (0.3530,),
        "cifar10": (0.2470, 0.2435, 0.2616),
    }[name]


ROWS = {
    "cleveland": (303, 139),
    "hungarian": (294, 106),
    "switzerland": (123, 115),
    "va": (200, 149),
}


def test_heart_disease_has_the_published_rows_per_hospital(real_data):
    data = load_dataset("heart_disease")
    assert data.site is not None
    sites = np.array(data.site)
    for name, (rows, ill) in ROWS.items():
        y = data.y[torch.from_numpy(sites == name)]
        assert (len(y), int(y.sum())) == (rows, ill)
    assert data.x.shape == (920, 22)
    numeric, flags = data.x[:, :6], data.x[:, 6:]
    assert numeric.abs().max() <= 1
    assert set(flags.unique().tolist()) == {0.0, 1.0}
    # cp has 4 codes, restecg, slope and thal 3 each: every record has one of each.
    for block in flags[:, 3:].split((4, 3, 3, 3), dim=1):
        assert torch.equal(block.sum(1), torch.ones(920))


def test_heart_disease_first_record_by_hand(real_data):
    # Cleveland's first line: 63,1,1,145,233,1,2,150,0,2.3,3,0,6,0
    assert (
        (real_data / "heart_disease" / "processed.cleveland.data")
        .read_text()
        .startswith("63.0,1.0,1.0,145.0,233.0,1.0,2.0,150.0,0.0,2.3,3.0,0.0,6.0,0\n")
    )
    expected = [
        *((63 - 50) / 30, (145 - 140) / 60, (233 - 250) / 150, (150 - 130) / 70, (2.3 - 2) / 4, -1),
        *(1, 1, 0),
        *(1, 0, 0, 0),
        *(0, 0, 1),
        *(0, 0, 1),
        *(0, 1, 0),
    ]
    torch.testing.assert_close(load_dataset("heart_disease").x[0], torch.tensor(expected))


def test_a_record_is_encoded_without_looking_at_the_others(real_data):
    """No constant is estimated: cutting the other records away leaves a record's features."""
    text = (real_data / "heart_disease" / "processed.va.data").read_text()
    whole = public._features(public._columns(text), public._RANGES, 0)
    for row, line in enumerate(text.splitlines()):
        alone = public._features(public._columns(line), public._RANGES, 0)
        assert {n: v[0] for n, v in alone.items()} == {n: v[row] for n, v in whole.items()}


def test_flamby_split_has_published_sizes_and_test_parts(real_data):
    """Trained on and tested, per hospital, as FLamby's fed_heart_disease has them."""
    from sklearn.model_selection import train_test_split

    data = load_dataset("heart_disease_flamby")
    assert data.x.shape == (740, 13)
    assert data.x[:, :5].abs().max() <= 1
    for block in data.x[:, 8:].split((3, 2), dim=1):  # all 0: the code of reference
        assert set(block.sum(1).tolist()) == {0.0, 1.0}
    settings = PartitionSettings(kind="natural", held_out="own")
    partition = make_partition(data, settings, sites=4, seed=5)
    assert [len(part) for part in partition.train.values()] == [199, 172, 30, 85]
    assert [len(part) for part in partition.held_out.values()] == [104, 89, 16, 45]
    sites = np.array(data.site)
    for name, test in partition.held_out.items():
        records = np.flatnonzero(sites == name)
        y = data.y.numpy()[records]
        by = y if np.bincount(y, minlength=2).min() > 2 else None
        _, wanted = train_test_split(
            records, test_size=0.34, train_size=0.66, random_state=43, stratify=by
        )
        assert test.tolist() == sorted(wanted.tolist())


def test_flambys_first_record_by_hand(real_data):
    # Cleveland's first line: 63,1,1,145,233,1,2,150,0,2.3,3,0,6,0
    x = load_dataset("heart_disease_flamby").x[0]
    five = (63 - 50) / 30, (145 - 140) / 60, (233 - 250) / 150, (150 - 135) / 75, (2.3 - 3) / 3
    torch.testing.assert_close(x, torch.tensor([*five, 1, 1, 0, 0, 0, 0, 0, 1]))


USUAL = [("fashion_mnist", "own"), ("heart ε = 0.1", "sum")]


@pytest.mark.parametrize(
    ("row", "trust"),
    # But for that whose filters take half a minute.
    [
        pytest.param(row, trust, marks=() if (row, trust) in USUAL else pytest.mark.slow)
        for row in check.ROWS
        for trust in ("own", "sum")
        if row != "cifar10"
    ],
)
@pytest.mark.usefixtures("real_data")
def test_figures_are_of_the_recommended_settings(row, trust):
    stored = json.loads(check.STORED.read_text())[f"{row} {trust}"]["plan"]
    assert json.loads(json.dumps(check.configuration(row, trust))) == stored


def test_every_other_file_has_its_published_checksum(real_data):
    # CIFAR-10 takes 12 s and is checked in the slow test.
    for name in ("mnist", "fashion_mnist", "heart_disease"):
        source = download.SOURCES[name]
        assert {download.state(source, file) for file in source.files} == {"ok"}
