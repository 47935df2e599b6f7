import numpy as np
import pytest
from scipy import stats

from fedpact.common.errors import DataError
from fedpact.data import splits
from fedpact.data.partition import PartitionSettings, make_partition

from .conftest import EVEN, records


def test_iid_is_even_and_independent_of_the_labels():
    data = records([300, 600, 900, 1200])
    p_values = []
    for seed in range(40):
        partition = make_partition(data, PartitionSettings(held_out=0), 7, seed)
        sizes = partition.label_counts.sum(1)
        assert sizes.max() - sizes.min() <= 1
        p_values.append(stats.chi2_contingency(partition.label_counts).pvalue)
    # Each p-value is uniform if the split ignores the labels. The smallest of 40 is below 1e-7
    # with probability 4e-6; Kolmogorov-Smirnov, which too even a split fails, with 1e-6.
    assert min(p_values) > 1e-7
    assert stats.kstest(p_values, "uniform").pvalue > 1e-6


@pytest.mark.parametrize(("sites", "per_site"), [(10, 2), (100, 2), (7, 3), (3, 10), (4, 1)])
def test_labels_gives_exactly_so_many_labels_in_equal_parts(sites, per_site):
    chosen = PartitionSettings(kind="labels", labels_per_site=per_site, held_out=0)
    counts = make_partition(EVEN, chosen, sites, seed=5).label_counts
    assert ((counts > 0).sum(1) == per_site).all()
    holders = (counts > 0).sum(0)
    assert holders.max() - holders.min() <= 1
    for label in range(10):
        parts = counts[counts[:, label] > 0, label]
        if len(parts):
            assert parts.sum() == 200
            assert parts.max() - parts.min() <= 1


def test_labels_are_combined_differently_by_seed():
    chosen = PartitionSettings(kind="labels", labels_per_site=2, held_out=0)
    pairs = {
        tuple(np.flatnonzero(row))
        for seed in range(200)
        for row in make_partition(EVEN, chosen, 5, seed).label_counts
    }
    # Each of 1,000 pairs is one of 45: a pair is missed with probability 45 * (44/45)^1000 < 1e-8.
    assert len(pairs) == 45


@pytest.mark.parametrize(("sites", "per_site"), [(10, 2), (100, 2), (5, 3)])
def test_shards_are_slices_of_the_sorted_labels(sites, per_site):
    chosen = PartitionSettings(kind="shards", shards_per_site=per_site, held_out=0)
    counts = make_partition(EVEN, chosen, sites, seed=5).label_counts
    number = sites * per_site
    sizes = counts.sum(1)
    assert sizes.min() >= per_site * (2000 // number)
    assert sizes.max() <= per_site * -(-2000 // number)
    # A shard of at most 200 records in label order touches at most 2 of the 10 labels of 200.
    if number >= 10:
        assert (counts > 0).sum(1).max() <= 2 * per_site
    if 2000 % number == 0 and number % 10 == 0:
        assert (counts > 0).sum(1).max() <= per_site  # shards and labels end together


def test_shards_are_dealt_at_random():
    # 20 shards, two of each label: a site's second shard has the label of its first with
    # probability 1/19. Six standard errors over 2,000 sites: error rate about 1e-8.
    chosen = PartitionSettings(kind="shards", held_out=0)
    alone = [
        (make_partition(EVEN, chosen, 10, seed).label_counts > 0).sum(1) == 1 for seed in range(200)
    ]
    assert abs(np.mean(alone) - 1 / 19) < 6 * (1 / 19 * 18 / 19 / 2000) ** 0.5


def test_dirichlet_gives_every_site_ten_records():
    for beta in (0.1, 0.5, 1.0, 100.0):
        for seed in range(5):
            chosen = PartitionSettings(kind="dirichlet", beta=beta, held_out=0)
            counts = make_partition(EVEN, chosen, 10, seed).label_counts
            assert counts.sum(1).min() >= 10
            assert counts.sum() == 2000


def test_dirichlet_gives_a_full_site_no_further_label():
    for seed in range(20):
        chosen = PartitionSettings(kind="dirichlet", beta=0.3, held_out=0)
        counts = make_partition(EVEN, chosen, 10, seed).label_counts
        held_before = np.cumsum(counts, axis=1) - counts
        assert (held_before >= 200).any()
        assert (counts[held_before >= 200] == 0).all()


def test_dirichlet_of_one_label_has_the_law_s_moments():
    # With one label no site is full before it is dealt, so a site's share is Beta(b, (m - 1) b):
    # mean 1/m, variance (m - 1) / (m^2 (m b + 1)). At b = 2, m = 4 the condition of 10 records in
    # 4,000 is missed with probability < 1e-3, which moves neither beyond the bounds below.
    data, chosen = records([4000]), PartitionSettings(kind="dirichlet", beta=2, held_out=0)
    draws = [make_partition(data, chosen, 4, seed).label_counts[:, 0] for seed in range(1500)]
    shares = np.array(draws) / 4000
    variance = 3 / (16 * 9)
    # Six standard errors for the mean of the first site's share and for the mean square of all four
    # (the square's standard deviation is at most 2 * variance; sites of a draw are dependent, so
    # 1,500 draws count): error rate below 1e-8 each.
    assert abs(shares[:, 0].mean() - 0.25) < 6 * (variance / 1500) ** 0.5
    spread = ((shares - 0.25) ** 2).mean()
    assert abs(spread - variance) < 6 * 2 * variance / 1500**0.5


def test_dirichlet_s_concentration_orders_the_heterogeneity():
    def distance(beta: float) -> float:
        chosen = PartitionSettings(kind="dirichlet", beta=beta, held_out=0)
        counts = make_partition(EVEN, chosen, 10, seed=1).label_counts
        return float(np.abs(counts / counts.sum(1, keepdims=True) - 0.1).sum(1).mean())

    assert distance(0.1) > distance(1.0) > distance(100.0)


def test_a_dirichlet_split_that_is_not_found_is_explained(monkeypatch):
    monkeypatch.setattr(splits, "_TRIES", 5)
    data = records([60, 60])
    chosen = PartitionSettings(kind="dirichlet", beta=1e-3)
    with pytest.raises(DataError, match=r"beta = 0\.001 .*in each of 5 tries: raise beta"):
        make_partition(data, chosen, 12, seed=0)


@pytest.mark.parametrize("exponent", [0.0, 1.0, 2.0, 3.5])
def test_power_law_sizes_follow_the_law(exponent):
    low, high, n = 37, 1350, 20_000
    rng = np.random.default_rng(8)
    sizes = splits.power_law_sizes(n, (low, high), exponent, rng)
    assert sizes.min() >= low
    assert sizes.max() <= high
    # Independent reference: the integral of s^-exponent by quadrature. A Kolmogorov-Smirnov
    # distance above 3 / sqrt(n) has probability 2 exp(-18) = 3e-8.
    grid = np.geomspace(low, high + 1, 200_001)
    weight = grid**-exponent
    cdf = np.concatenate([[0], np.cumsum((weight[1:] + weight[:-1]) / 2 * np.diff(grid))])
    points = np.arange(low, high + 2)
    expected = np.interp(points, grid, cdf / cdf[-1])
    found = np.searchsorted(np.sort(sizes), points) / n
    assert np.abs(found - expected).max() < 3 / n**0.5


def test_power_law_with_labels_is_the_setting_of_fedproxvr():
    data = records([6000] * 10)
    chosen = PartitionSettings(
        kind="power_law", smallest=37, largest=1350, labels_per_site=2, held_out=0
    )
    counts = make_partition(data, chosen, 100, seed=0).label_counts
    sizes = counts.sum(1)
    assert ((counts > 0).sum(1) == 2).all()
    assert ((counts > 0).sum(0) == 20).all()
    assert sizes.min() >= 37
    assert sizes.max() <= 1350
    halves = np.sort(counts, axis=1)[:, -2:]
    assert (halves[:, 1] - halves[:, 0] <= 1).all()
    # Heavy tail: under s^-2 the median is 72 and 76 % of the sizes are below 144. That 95 of 100
    # are, so that this fails, has probability 5e-7 over seeds.
    assert np.quantile(sizes, 0.95) > 2 * np.median(sizes)


@pytest.mark.parametrize(("sites", "low", "high"), [(100, 37, 1350), (10, 454, 3939)])
def test_fedproxvr_devices_train_on_3_of_4_with_two_labels(sites, low, high):
    # Fashion-MNIST and MNIST with the public test set among the records: 7,000 of each label.
    data = records([7000] * 10)
    chosen = PartitionSettings(
        kind="power_law", smallest=low, largest=high, labels_per_site=2, held_out=0.25
    )
    partition = make_partition(data, chosen, sites, seed=0)
    for site in partition.sites(data):
        size = len(site.y) + len(site.y_held)
        assert low <= size <= high
        assert len(site.y_held) == round(size / 4)
        # With a fair draw from 37 records or more a label is never left out of training: each has
        # 18 or more, and 9 or 10 are held out.
        assert len(site.y.unique()) == 2
        assert set(site.y_held.tolist()) <= set(site.y.tolist())


def test_power_law_beyond_the_records_is_explained():
    chosen = {"kind": "power_law", "smallest": 300, "largest": 400}
    with pytest.raises(DataError, match="records, and there are 2000: lower `largest`"):
        make_partition(EVEN, PartitionSettings(**chosen), 10, 0)
    with pytest.raises(DataError, match="records of label 0, and there are 200"):
        make_partition(EVEN, PartitionSettings(**chosen, labels_per_site=1), 10, 0)
