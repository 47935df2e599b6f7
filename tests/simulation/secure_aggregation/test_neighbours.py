"""Neighbours on a circle: the proof of simulation.secure_aggregation.graph against exhaustive
searches, exact counts, and the eigenvalues of the graph itself."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from tests.simulation.secure_aggregation.summed import plan_of

from fedpact.common.errors import InputError
from fedpact.privacy.settings import Privacy
from fedpact.simulation.secure_aggregation.graph import (
    BITS,
    FEWEST,
    MaskingGraph,
    Neighbourhoods,
    most_shares,
    neighbourhoods,
    spectral_spread,
)

CASES = [(16, 14, 2), (17, 15, 3), (20, 18, 1), (20, 14, 2), (40, 27, 4), (100, 67, 10)]


def masks(graph):
    """Each site's neighbourhood as the bits of a whole number."""
    return [sum(1 << int(n) for n in row.nonzero()[0]) for row in graph.adjacency()]


def is_connected(around, sites):
    """Whether the sites whose bits are set are connected among themselves."""
    seen, new = 0, sites & -sites
    while new:
        seen |= new
        new = 0
        rest = seen
        while rest:
            low = rest & -rest
            new |= around[low.bit_length() - 1]
            rest ^= low
        new = new & sites & ~seen
    return seen == sites


def parts(graph, threshold, against):
    """The sites of a sum that are not corrupt, for every choice of who is, and who is left out."""
    around, everybody = masks(graph), range(graph.sites)
    for left_out in range(graph.sites - threshold + 1):
        for out in itertools.combinations(everybody, left_out):
            inside = sum(1 << n for n in everybody if n not in out)
            there = [n for n in everybody if n not in out]
            if any((around[n] & inside).bit_count() < graph.shares for n in there):
                continue
            for corrupt in itertools.combinations(there, against):
                yield around, inside & ~sum(1 << n for n in corrupt)


@pytest.mark.parametrize(("sites", "threshold", "against"), CASES[:3])
def test_remaining_graph_is_connected_for_any_dropout(sites, threshold, against):
    """Exhaustively; on fewer neighbours the same search finds a choice that splits them."""
    graph = neighbourhoods(sites, threshold, against)
    assert graph.neighbours < sites - 1
    found = list(parts(graph, threshold, against))
    assert len(found) > 100
    assert all(is_connected(around, rest) for around, rest in found)
    ring = Neighbourhoods(sites, (1,), 1)
    assert not all(is_connected(*each) for each in parts(ring, threshold, against))


@pytest.mark.parametrize(("sites", "threshold", "against"), CASES)
def test_dropouts_that_isolate_one_do_not_split_the_rest(sites, threshold, against):
    """An adversary that grows a part S and removes what is around it, from every site."""
    graph = neighbourhoods(sites, threshold, against)
    around, everybody = masks(graph), (1 << sites) - 1
    tried = 0
    for start in range(sites):
        part = 1 << start
        while part.bit_count() <= sites // 2:
            beside = 0
            for n in range(sites):
                if part >> n & 1:
                    beside |= around[n]
            beside &= ~part
            # Some of those around are corrupt and stay in the sum, all others are left out.
            gone = [1 << n for n in range(sites) if beside >> n & 1][against:]
            inside = everybody & ~sum(gone)
            tried += 1
            if inside.bit_count() >= threshold:
                assert any(
                    (around[n] & inside).bit_count() < graph.shares
                    for n in range(sites)
                    if inside >> n & 1
                )
            # Next the one that adds least to what is around it.
            part |= min((1 << n for n in range(sites) if beside >> n & 1), default=0) or everybody
    assert tried >= sites


@pytest.mark.parametrize(("sites", "threshold", "against"), CASES)
def test_graph_is_k_regular_with_its_matrixs_spread(sites, threshold, against):
    graph = neighbourhoods(sites, threshold, against)
    adjacency = graph.adjacency()
    assert (adjacency == adjacency.T).all()
    assert (adjacency.sum(axis=1) == graph.neighbours + 1).all()
    assert against < graph.shares <= graph.neighbours + 1
    values = np.linalg.eigvalsh(adjacency.astype(float) - np.eye(sites))
    assert values[-1] == pytest.approx(graph.neighbours)
    middle, half = (values[-2] + values[0]) / 2, (values[-2] - values[0]) / 2
    assert spectral_spread(sites, graph.distances) == pytest.approx(
        half / (graph.neighbours - middle)
    )


def test_disconnected_parts_obey_the_spreads_bound():
    """Haemers' inequality for every S of 14 sites, with all that are not beside S for T."""
    sites, distances = 14, (1, 4)
    around = masks(Neighbourhoods(sites, distances, 1))
    most = 0.0
    for part in range(1, 1 << sites):
        beside = 0
        for n in range(sites):
            if part >> n & 1:
                beside |= around[n]
        s, other = part.bit_count(), sites - beside.bit_count()
        if other:
            most = max(most, s * other / ((sites - s) * (sites - other)))
    assert 0 < most <= spectral_spread(sites, distances) ** 2 + 1e-12


@pytest.mark.parametrize(("sites", "threshold", "k"), [(20, 14, 10), (40, 40, 8), (100, 67, 46)])
def test_too_few_neighbours_are_as_rare_as_stated(sites, threshold, k):
    """Exact hypergeometric tails, summed in another order; one more share would be too many."""

    def failure(shares):
        def tail(fewer, there):
            rest = [
                math.comb(there, x) * math.comb(sites - 1 - there, k - x)
                for x in range(max(0, fewer), k + 1)
            ]
            return 1 - Fraction(sum(rest), math.comb(sites - 1, k))

        beside = tail(shares, threshold) if threshold < sites else 0
        return 3 * sites * max(tail(shares - 1, threshold - 1), beside)

    shares = most_shares(sites, threshold, k)
    assert failure(shares) < Fraction(1, 2**BITS)
    if shares <= k:
        assert failure(shares + 1) >= Fraction(1, 2**BITS)


def test_simulated_dropouts_leave_the_counted_neighbours():
    """At l so large that it fails often; 4000 draws, within 6 deviations: wrong once in 10^8."""
    sites, threshold, k, shares = 30, 20, 12, 7
    graph = Neighbourhoods(sites, (1, 3, 4, 8, 9, 13), shares)
    adjacency, generator = graph.adjacency(), np.random.default_rng(1)
    fails = 0
    for _ in range(4000):
        there = generator.choice(sites, threshold, replace=False)
        fails += int(adjacency[0][there].sum()) < shares if 0 not in there else 0
    tail = sum(
        math.comb(threshold, x) * math.comb(sites - 1 - threshold, k - x) for x in range(shares)
    ) / math.comb(sites - 1, k)
    chance = tail * (1 - threshold / sites)
    assert abs(fails - 4000 * chance) < 6 * math.sqrt(4000 * chance * (1 - chance))


@pytest.mark.parametrize(("sites", "threshold"), [(5, 4), (9, 6), (20, 14)])
def test_colluding_sites_are_all_that_the_threshold_bears(sites, threshold):
    """Of any t sites c leave h honest ones; and two lists of t have an honest signer in common."""
    for honest in (2, 3):
        shared = Privacy(trust="sum", honest=honest)
        assert threshold - shared.colluding(threshold, sites) == honest
    own = Privacy().colluding(threshold, sites)
    assert 2 * threshold - sites - own == 1


def test_few_sites_or_too_many_against_them_are_all_neighbours():
    for sites, threshold, against in ((5, 4, 1), (FEWEST - 1, 12, 1), (16, 15, 13), (100, 100, 99)):
        graph = neighbourhoods(sites, threshold, against)
        assert (graph.neighbours, graph.shares) == (sites - 1, threshold)
        assert graph.adjacency().all()


@pytest.mark.parametrize("wrong", [(5, 6, 1), (5, 3, 3), (5, 3, -1), (0, 0, 0)])
def test_impossible_values_are_refused(wrong):
    with pytest.raises(InputError, match="0 <= against < threshold <= sites"):
        neighbourhoods(*wrong)


def test_a_plans_graph_takes_colluders_into_account():
    plan = plan_of(secure_aggregation={"threshold": 14}, privacy={"trust": "sum", "honest": 2})
    graph = MaskingGraph.of(plan, [str(n) for n in range(20)]).graph
    assert graph == neighbourhoods(20, 14, 12) != neighbourhoods(20, 14, 0)
