import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats

from fedpact.common.errors import DataError
from fedpact.data import splits
from fedpact.data.load import from_arrays
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
    draws = [make_partition(data, chosen, 4, seed).label_counts[:, 0] for seed in range(250)]
    shares = np.array(draws) / 4000
    variance = 3 / (16 * 9)
    # Six standard errors for the mean of the first site's share and for the mean square of all four
    # (the square's standard deviation is at most 2 * variance; sites of a draw are dependent, so
    # 250 draws count): error rate below 1e-8 each.
    assert abs(shares[:, 0].mean() - 0.25) < 6 * (variance / 250) ** 0.5
    spread = ((shares - 0.25) ** 2).mean()
    assert abs(spread - variance) < 6 * 2 * variance / 250**0.5


def test_a_dirichlet_split_that_is_not_found_is_explained(monkeypatch):
    monkeypatch.setattr(splits, "_TRIES", 5)
    data = records([60, 60])
    chosen = PartitionSettings(kind="dirichlet", beta=1e-3)
    with pytest.raises(DataError, match=r"beta = 0\.001 .*in each of 5 tries: raise beta"):
        make_partition(data, chosen, 12, seed=0)


def counts_of(data, sites, seed=1, **chosen):
    settings = PartitionSettings(held_out=0, **chosen)
    return make_partition(data, settings, sites, seed).label_counts


@pytest.mark.parametrize(
    ("name", "units"),
    [
        ("LinearPartitioner", lambda i: i),
        ("SquarePartitioner", lambda i: i**2),
        ("ExponentialPartitioner", math.exp),
    ],
)
def test_sizes_grow_as_flwr_datasets_say(name, units):
    total, number = sum(units(i) for i in range(1, 6)), len(EVEN.y)
    first = [int(units(i) / total * number) for i in range(1, 5)]
    sizes = counts_of(EVEN, 5, kind=name).sum(1).tolist()
    assert sizes == [*first, number - sum(first)]


def test_sites_too_small_for_their_growth_are_refused():
    with pytest.raises(DataError, match=r"would have 0 .*take fewer sites or a more even split"):
        counts_of(EVEN, 40, kind="exponential")


@pytest.mark.parametrize("kind", ["quantity_skew", "inner_dirichlet"])
def test_a_large_concentration_gives_sites_that_are_alike(kind):
    counts = counts_of(EVEN, 10, kind=kind, beta=1e12)
    sizes = counts.sum(1)
    assert sizes.max() - sizes.min() <= 1
    # Independent labels would pass with 1e-7; equal shares of each are evener still.
    assert stats.chi2_contingency(counts).pvalue > 1e-7


def test_quantity_skew_has_the_law_s_moments_and_ignores_labels():
    # A site's share is Beta(b, (m - 1) b), as in the test of one label above.
    data, shares, p_values = records([1000, 3000]), [], []
    for seed in range(150):
        counts = counts_of(data, 4, seed, kind="quantity_skew", beta=2)
        shares.append(counts.sum(1) / 4000)
        p_values.append(stats.chi2_contingency(counts).pvalue)
    variance = 3 / (16 * 9)
    assert abs(np.mean(shares, 0) - 0.25).max() < 6 * (variance / 150) ** 0.5
    spread = ((np.array(shares) - 0.25) ** 2).mean()
    assert abs(spread - variance) < 6 * 2 * variance / 150**0.5
    assert stats.kstest(p_values, "uniform").pvalue > 1e-6


def test_inner_dirichlet_sites_are_of_equal_size_and_few_labels():
    even = counts_of(EVEN, 7, kind="inner_dirichlet", beta=0.01)
    assert even.sum(1).max() - even.sum(1).min() <= 1
    assert even.sum() == 2000
    # At a tiny beta a site has one label for as long as that lasts; the last ones take what is
    # left. Its largest label has 1/10 of a site's records where labels are ignored.
    assert (even.max(1) / even.sum(1)).mean() > 0.5


def test_inner_dirichlet_shares_have_the_law_s_moments():
    # Two labels that never run out at 8 records of 4,000: site shares of the first label are
    # Beta(b, b), seen through 8 draws: E (k/8)^2 - 1/4 = v + (1/4 - v)/8 with v = 1/(4 (2b + 1)).
    rng, b, found = np.random.default_rng(3), 1.5, []
    y = np.repeat([0, 1], 2000)
    for _ in range(6):
        parts = splits.inner_dirichlet(y, 500, SimpleNamespace(beta=b), rng)
        found += [float((y[part] == 0).mean()) for part in parts]
    v = 1 / (4 * (2 * b + 1))
    expected = v + (1 / 4 - v) / 8
    # Labels run out towards the end, which holds sums, not squares, near their mean: 5 %.
    assert np.mean((np.array(found) - 0.5) ** 2) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("strictness", [0.0, 0.5, 1.0])
def test_feature_skew_follows_its_parameter(strictness):
    rng = np.random.default_rng(5)
    values = rng.standard_normal(4000)
    parts = splits.feature_skew(values, 8, SimpleNamespace(strictness=strictness), rng)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(4000))
    assert {len(part) for part in parts} == {500}
    lows, highs = [values[p].min() for p in parts], [values[p].max() for p in parts]
    if strictness == 1:
        assert all(high <= low for high, low in zip(highs, lows[1:], strict=False))
    place = np.empty(4000)
    for k, part in enumerate(parts):
        place[part] = k
    # The blend s z + (1 - s) ε has correlation s / √(s² + (1 - s)²) with z; cut into 8 ranks it
    # loses 2 % to 3 % of it. Chance moves 4,000 pairs by 1/√4000.
    want = strictness / np.hypot(strictness, 1 - strictness)
    assert np.corrcoef(values, place)[0, 1] == pytest.approx(
        want, abs=0.05 + 6 / 4000**0.5 * (1 - want)
    )


def test_feature_noise_grows_by_site_and_moves_no_record():
    x = torch.zeros(1000, 30)
    data = from_arrays(x, [0, 1] * 500)
    whole, half = (
        make_partition(data, PartitionSettings(kind="feature_noise", noise=4.0, held_out=h), 5, 1)
        for h in (0, 0.5)
    )
    seen = {}
    for k, (name, site) in enumerate(zip(whole.train, whole.sites(data), strict=True), start=1):
        assert set(whole.train[name]) == {*half.train[name], *half.held_out[name]}
        seen |= dict(zip(whole.train[name].tolist(), site.x, strict=True))
        # 6,000 squares: their mean is within six standard errors of σ k/5.
        assert float(site.x.square().mean()) == pytest.approx(4 * k / 5, rel=6 * (2 / 6000) ** 0.5)
    for name, site in zip(half.train, half.sites(data), strict=True):
        pairs = ((half.train[name], site.x), (half.held_out[name], site.x_held))
        for index, row in ((i, r) for some, rows in pairs for i, r in zip(some, rows, strict=True)):
            assert torch.equal(row, seen[int(index)])
    none = PartitionSettings(kind="feature_noise", noise=0.0)
    assert not any(site.x.any() for site in make_partition(data, none, 5, 1).sites(data))


def test_no_noise_is_added_to_tokens():
    data = from_arrays(torch.zeros(20, 3, dtype=torch.int64), [0, 1] * 10)
    partition = make_partition(data, PartitionSettings(kind="feature_noise"), 2, 0)
    with pytest.raises(DataError, match="are tokens"):
        partition.sites(data)


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


def test_fedproxvr_devices_train_on_3_of_4_with_two_labels():
    # Fashion-MNIST with the public test set among the records: 7,000 of each label.
    data = records([7000] * 10)
    chosen = PartitionSettings(
        kind="power_law", smallest=37, largest=1350, labels_per_site=2, held_out=0.25
    )
    partition = make_partition(data, chosen, 100, seed=0)
    for site in partition.sites(data):
        size = len(site.y) + len(site.y_held)
        assert 37 <= size <= 1350
        assert len(site.y_held) == round(size / 4)
        # Two labels in equal parts, give or take one.
        counts = torch.cat([site.y, site.y_held]).bincount()
        assert abs(int(counts[counts > 0].diff())) <= 1
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


@pytest.mark.parametrize("beta", [1e-4, 3e-3])
def test_a_tiny_beta_splits_for_every_seed(beta):
    """Shares so small that a product with them is rounded: about one seed in a hundred."""
    y = np.random.default_rng(0).integers(0, 10, 200)
    for seed in range(120):
        parts = splits.inner_dirichlet(
            y, 5, SimpleNamespace(beta=beta), np.random.default_rng(seed)
        )
        assert sorted(np.concatenate(parts).tolist()) == [*range(200)]
