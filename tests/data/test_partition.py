import json
import re
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from scipy import stats

from fedpact.common.errors import DataError, InputError
from fedpact.common.files import safe_name
from fedpact.data.load import from_arrays
from fedpact.data.partition import (
    PARTITION_KINDS,
    Partition,
    PartitionKind,
    PartitionSettings,
    make_partition,
)

from .conftest import EVEN, records

EVERY_KIND = [
    {"kind": "iid"},
    {"kind": "dirichlet", "beta": 0.5},
    {"kind": "inner_dirichlet", "beta": 0.1},
    {"kind": "quantity_skew", "beta": 2.0},
    {"kind": "labels", "labels_per_site": 2},
    {"kind": "pathological", "labels_per_site": 7},
    {"kind": "shards", "shards_per_site": 3},
    # At most 30 a site: 12 sites of 3 labels use a label of 7 at most 6 times, 10 records each.
    {"kind": "feature_skew", "strictness": 0.5},
    {"kind": "feature_noise", "noise": 0.0},
    {"kind": "power_law", "smallest": 4, "largest": 30},
    {"kind": "power_law", "smallest": 4, "largest": 30, "labels_per_site": 3, "exponent": 1.0},
    {"kind": "linear"},
    {"kind": "natural"},
]
LEAVES_SOME_OVER = ("labels", "pathological", "power_law")


def joined(partition):
    """All indices of each site."""
    return [np.concatenate([partition.train[n], partition.held_out[n]]) for n in partition.train]


@pytest.mark.parametrize("choice", EVERY_KIND, ids=str)
@settings(max_examples=5, deadline=None)
@given(
    per_label=st.lists(st.integers(60, 150), min_size=7, max_size=9),
    sites=st.integers(1, 12),
    seed=st.integers(0, 2**40),
    held_out=st.sampled_from([0.0, 0.2, 0.5, 0.99]),
)
def test_every_record_goes_to_at_most_one_site(choice, per_label, sites, seed, held_out):
    names = [f"s{i % sites:02}" for i in range(sum(per_label))]
    data = records(per_label, names)
    chosen = PartitionSettings(**choice, held_out=held_out)
    partition = make_partition(data, chosen, sites, seed)
    used = np.concatenate(joined(partition))
    assert len(partition.train) == sites
    assert list(partition.train) == sorted(partition.train) == list(partition.held_out)
    assert len(np.unique(used)) == len(used)
    # `labels` covers too, unless it deals fewer labels than there are.
    dealt = "labels" in choice["kind"] and sites * choice["labels_per_site"] >= len(per_label)
    if dealt or choice["kind"] not in LEAVES_SOME_OVER:
        assert np.array_equal(np.sort(used), np.arange(len(data.y)))
    for name, everything in zip(partition.train, joined(partition), strict=True):
        n, held = len(everything), len(partition.held_out[name])
        assert held == min(round(held_out * n), n - 1)
        assert all(a < b for a, b in pairwise(partition.train[name]))
    # The counts are those of the training records, and the sites hold the records they name.
    for row, site in zip(partition.label_counts, partition.sites(data), strict=True):
        assert site.y.bincount(minlength=len(per_label)).tolist() == row.tolist()
        assert site.x[:, 0].tolist() == partition.train[site.name].tolist()
        assert site.x_held[:, 0].tolist() == partition.held_out[site.name].tolist()
        assert torch.equal(site.y_held, data.y[site.x_held[:, 0].long()])


@pytest.mark.parametrize("choice", EVERY_KIND, ids=str)
def test_the_seed_decides(choice):
    data = records([200] * 10, [f"s{i % 10}" for i in range(2000)])
    chosen = PartitionSettings(**choice)
    a, again, other = (make_partition(data, chosen, 10, seed) for seed in (1, 1, 2))
    assert same(a, again)
    assert not same(a, other)


def same(a, b):
    return (
        (a.settings, a.seed, a.classes) == (b.settings, b.seed, b.classes)
        and list(a.train) == list(b.train)
        and all(np.array_equal(a.train[n], b.train[n]) for n in a.train)
        and all(np.array_equal(a.held_out[n], b.held_out[n]) for n in a.train)
        and np.array_equal(a.label_counts, b.label_counts)
    )


@pytest.mark.parametrize("choice", EVERY_KIND, ids=str)
def test_held_out_does_not_move_a_record_to_another_site(choice):
    data = records([200] * 10, [f"s{i % 10}" for i in range(2000)])
    none, half = (
        make_partition(data, PartitionSettings(**choice, held_out=f), 10, 3) for f in (0, 0.5)
    )
    for a, b in zip(joined(none), joined(half), strict=True):
        assert set(a) == set(b)


def test_held_out_records_are_a_fair_sample():
    # A fair draw holds out each of a site's 10 records with probability 0.3. The 10 counts over
    # 500 seeds are negatively correlated (3 of 10 each time), so that Pearson's sum over
    # 0.7 * 10/9 is chi-square with 9 degrees of freedom. Error rate 1e-6.
    data, hits = records([10], ["a"] * 10), np.zeros(10)
    for seed in range(500):
        chosen = PartitionSettings(kind="natural", held_out=0.3)
        hits[make_partition(data, chosen, 1, seed).held_out["a"]] += 1
    chi_square = ((hits - 150) ** 2 / 150).sum() / (0.7 * 10 / 9)
    assert hits.sum() == 1500
    assert stats.chi2.sf(chi_square, 9) > 1e-6


# Names, tables, files


def test_natural_names_are_kept_and_ordered():
    data = records([30, 30], ["Ward B/2", "ward: §", "..Ward A"] * 20)
    partition = make_partition(data, PartitionSettings(kind="natural"), 3, 0)
    assert list(partition.train) == ["..Ward A", "Ward B/2", "ward: §"]
    assert set(joined(partition)[0] % 3) == {2}


def test_file_names_have_no_accents():
    names = ["Zürich", "Łódź", "São Paulo", "Gießen", "Orléans", "Tromsø"]
    data = records([60, 60], names * 20)
    found = list(make_partition(data, PartitionSettings(kind="natural"), 6, 0).train)
    assert found == sorted(names)
    files = sorted(map(safe_name, names))
    assert files == ["Giessen", "Lodz", "Orleans", "Sao-Paulo", "Tromso", "Zurich"]
    assert list(map(safe_name, files)) == files


def test_names_in_other_letters_have_files_of_their_own():
    names = ["北京", "上海", "Москва", "Klinik 北京"]
    data = records([40, 40], names * 20)
    assert {*make_partition(data, PartitionSettings(kind="natural"), 4, 0).train} == {*names}
    for name in map(safe_name, names):
        assert re.fullmatch(r"xn--[a-zA-Z0-9-]+", name)
    assert safe_name("北京") == "xn--" + "北京".encode("punycode").decode("ascii")
    assert safe_name("が") != safe_name("か")
    long, other = ("서울" * 40 + end for end in "12")
    assert safe_name(long) != safe_name(other)
    assert len(safe_name(long)) <= 100


def test_natural_names_that_fall_together_are_refused():
    data = records([30, 30], ["Ward A", "ward/a", "C"] * 20)
    with pytest.raises(DataError, match="not different as file names"):
        make_partition(data, PartitionSettings(kind="natural"), 3, 0)


@pytest.mark.parametrize("sites", [2, 99, 100, 101, 400])
def test_the_order_of_names_is_the_order_of_numbers(sites):
    names = list(make_partition(EVEN, PartitionSettings(), sites, 0).train)
    assert names == sorted(names)
    assert [int(name.removeprefix("site-")) for name in names] == list(range(sites))
    assert names[0].startswith("site-00")


@pytest.mark.parametrize("choice", EVERY_KIND, ids=str)
def test_a_saved_partition_is_the_same_partition(choice, tmp_path):
    data = records([200] * 10, [f"s{i % 10}" for i in range(2000)])
    partition = make_partition(data, PartitionSettings(**choice), 10, 4)
    partition.save(tmp_path / "p.json")
    again = Partition.load(tmp_path / "p.json")
    assert same(partition, again)
    for a, b in zip(partition.sites(data), again.sites(data), strict=True):
        assert torch.equal(a.x, b.x)
        assert torch.equal(a.y_held, b.y_held)
    assert [p.name for p in tmp_path.iterdir()] == ["p.json"]


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"train": {}}', '{"train": {"a": [1]}, "held_out": {}}']
)
def test_a_file_that_is_not_a_partition_is_refused(tmp_path, text):
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(DataError, match=r"p\.json cannot be used"):
        Partition.load(tmp_path / "p.json")
    with pytest.raises(DataError, match=r"q\.json cannot be used"):
        Partition.load(tmp_path / "q.json")


def test_a_partition_of_other_records_is_refused(tmp_path):
    partition = make_partition(EVEN, PartitionSettings(), 10, 4)
    other = from_arrays(EVEN.x, EVEN.y.roll(1), classes=EVEN.classes)
    fewer = from_arrays(EVEN.x[:-1], EVEN.y[:-1], classes=EVEN.classes)
    for data in (other, fewer):
        with pytest.raises(DataError, match="made from other records"):
            partition.sites(data)
    partition.save(tmp_path / "p.json")
    raw = json.loads((tmp_path / "p.json").read_text())
    raw["held_out"]["site-00"][0] = raw["train"]["site-01"][0]  # one record at two sites
    (tmp_path / "p.json").write_text(json.dumps(raw))
    with pytest.raises(DataError, match="made from other records"):
        Partition.load(tmp_path / "p.json").sites(EVEN)


# Refusals


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"kind": "iid", "beta": 0.1},
            "beta is 0.1 with kind = 'iid': only kind = 'dirichlet' or 'inner_dirichlet' or",
        ),
        ({"kind": "shards", "labels_per_site": 2}, "'labels' or 'pathological' or 'power_law'"),
        ({"kind": "labels"}, "labels_per_site is missing"),
        ({"kind": "pathological"}, "kind = 'pathological' needs it"),
        ({"kind": "power_law", "smallest": 5}, "largest is None"),
        ({"kind": "power_law", "smallest": 5, "largest": 4}, "smallest <= largest"),
        ({"kind": "dirichlet", "beta": float("nan")}, "beta"),
        ({"kind": "SizePartitioner"}, "use natural and name each record's site"),
        ({"kind": "ShardPartitioner", "beta": 2.0}, "beta is 2.0 with kind = 'shards'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(given, message):
    with pytest.raises(ValidationError, match=message):
        PartitionSettings(**given)


@pytest.mark.parametrize(
    ("given", "sites", "message"),
    [
        ({}, 11, "sites is 11 for the 20 records .* take at most 10 sites"),
        ({"kind": "dirichlet"}, 3, "at least 10; take at most 2 sites"),
        ({"kind": "labels", "labels_per_site": 3}, 2, "expected at most 2, the number of labels"),
        ({"kind": "labels", "labels_per_site": 2}, 9, "label 0 has 4 records for 9 sites"),
        (
            {"kind": "labels", "labels_per_site": 1},
            8,
            "site site-0. would have 1 of the 20 records",
        ),
        ({"kind": "shards", "shards_per_site": 7}, 3, "21 shards"),
        ({"kind": "quantity_skew"}, 3, "at least 10; take at most 2 sites"),
        ({"kind": "quantity_skew", "beta": 1e-6}, 2, "beta = 1e-06 left a site with fewer than 10"),
        ({"kind": "feature_skew", "feature": 1}, 2, "has 1 numbers; expected at most 0"),
        ({"kind": "natural"}, 2, "has no sites of its own"),
    ],
)
def test_a_split_that_the_records_do_not_allow_is_explained(given, sites, message):
    data = records([4, 16, 0])
    with pytest.raises(DataError, match=message):
        make_partition(data, PartitionSettings(**given), sites, 0)


@pytest.mark.parametrize("kind", ["iid", "natural"])
def test_no_number_of_sites_is_advised_for_a_single_record(kind):
    data = records([1], ["a"])
    with pytest.raises(DataError) as error:
        make_partition(data, PartitionSettings(kind=kind), 1, 0)
    assert "take" not in str(error.value)
    assert re.search(r"expected (at least )?2", str(error.value))


def test_a_natural_site_of_one_record_is_refused():
    data = records([5], ["a", "a", "b", "b", "c"])
    with pytest.raises(DataError, match="site c would have 1 of the 5 records"):
        make_partition(data, PartitionSettings(kind="natural"), 3, 0)


def test_sites_and_seed_are_checked():
    with pytest.raises(InputError, match="sites is 0"):
        make_partition(EVEN, PartitionSettings(), 0, 0)
    with pytest.raises(InputError, match="seed is -1"):
        make_partition(EVEN, PartitionSettings(), 2, -1)


def with_test_parts():
    """Two sites of ten records, of which the odd ones are the data set's own test parts."""
    x = torch.arange(20.0).reshape(20, 1)
    data = from_arrays(x, [0, 1] * 10, site=["a"] * 10 + ["b"] * 10)
    return replace(data, held=torch.arange(20) % 2 == 1)


def test_a_data_sets_test_parts_are_the_held_out_records():
    data = with_test_parts()
    own = make_partition(data, PartitionSettings(kind="natural", held_out="own"), 2, seed=0)
    for name, first in (("a", 0), ("b", 10)):
        assert own.train[name].tolist() == list(range(first, first + 10, 2))
        assert own.held_out[name].tolist() == list(range(first + 1, first + 10, 2))
    # Cut down to some records, each keeps its part.
    some = data.only(torch.arange(20) >= 4, None)
    cut = make_partition(some, PartitionSettings(kind="natural", held_out="own"), 2, seed=0)
    assert cut.sites(some)[0].x_held.flatten().tolist() == [5.0, 7.0, 9.0]


@pytest.mark.parametrize("kind", ["natural", "iid"])
def test_with_a_fraction_the_test_parts_are_not_seen(kind):
    """So settings can be chosen by records that are set aside from training."""
    data = with_test_parts()
    partition = make_partition(data, PartitionSettings(kind=kind, held_out=0.4), 2, seed=0)
    for site in partition.sites(data):
        assert (len(site.y), len(site.y_held)) == (3, 2)
        assert not (torch.cat([site.x, site.x_held]) % 2).any()


def test_own_test_parts_are_of_own_sites_and_have_to_be_there():
    with pytest.raises(ValidationError, match="at its own sites"):
        PartitionSettings(kind="iid", held_out="own")
    data = replace(with_test_parts(), held=None)
    with pytest.raises(DataError, match="has no test parts"):
        make_partition(data, PartitionSettings(kind="natural", held_out="own"), 2, seed=0)


@pytest.mark.parametrize("persons", [False, True])
def test_validation_records_are_training_records(persons):
    whose = [f"p{i // 3}" for i in range(180)] if persons else None
    data = replace(records([60, 60, 60], [f"s{i % 4}" for i in range(180)]), person=whose)
    plain, split = (
        make_partition(data, PartitionSettings(kind="natural", validation=share), 4, 1)
        for share in (0.0, 0.25)
    )
    for name, train in plain.train.items():
        both = np.concatenate([split.train[name], split.held_out[name]])
        assert sorted(both) == train.tolist()
        assert 0 < len(split.held_out[name]) < len(train) / 2
    held = np.concatenate([*plain.held_out.values()])
    assert not np.isin(np.concatenate(joined(split)), held).any()
    if persons:  # although each is at three sites
        train, validation = (
            {i // 3 for part in parts.values() for i in part.tolist()}
            for parts in (split.train, split.held_out)
        )
        assert not train & validation


@pytest.mark.parametrize(
    "split",
    [
        lambda y, sites: [],
        lambda y, sites: np.array_split(np.arange(len(y)), sites - 1),
        lambda y, sites: [np.arange(len(y))] * sites,
        lambda y, sites: [np.repeat(part, 2) for part in np.array_split(np.arange(len(y)), sites)],
        lambda y, sites: np.array_split(np.arange(len(y)) - 1, sites),
        lambda y, sites: np.array_split(np.arange(len(y)) + 1, sites),
        lambda y, sites: [np.arange(len(y)) % sites == site for site in range(sites)],
        lambda y, sites: np.array_split(1.0 * np.arange(len(y)), sites),
    ],
    ids=["none", "too few", "every site all", "twice", "negative", "beyond", "masks", "floats"],
)
def test_a_split_of_ones_own_gives_a_record_once(monkeypatch, split):
    kind = PartitionKind(lambda y, sites, *_: split(y, sites))
    monkeypatch.setitem(PARTITION_KINDS, "mine", kind)
    with pytest.raises(DataError, match=r"the split 'mine' gave .*correct its function"):
        make_partition(records([30, 30]), PartitionSettings(kind="mine"), 3, 0)
