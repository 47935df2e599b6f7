"""The graph of sites that share masks, with proof that it protects and works.

K sites are placed on a circle, and those at distances ±a_1, ..., ±a_{k/2} are neighbours. Up to c
sites collude with the server. Knowing the graph, it may leave out any other sites, as long as a sum
has at least t sites and each of them has at least l of its neighbourhood (its k neighbours and
itself) in it. Let H be the honest sites in a sum, at least h = t - c.

**The sites of H are connected**, for every choice of corrupt and left-out sites. Let S be a union
of components of H, and T the rest. Each site of S has l - c of its neighbourhood in S, so S and T
have at least l - c sites each, and s + |T| >= h for s = |S|. No edge joins S and T. For M = A - θ I
with the adjacency matrix A, 1_S' M 1_T = 0. M has the row sum k - θ, and on the complement of the
ones its eigenvalues lie within ρ of 0, where θ is the middle of A's other eigenvalues and ρ half
their range. So (k - θ) s|T|/K <= ρ sqrt(s (1 - s/K) |T| (1 - |T|/K)), or

    s|T| / ((K - s)(K - |T|)) <= (ρ/(k - θ))²        (Haemers, Linear Algebra Appl. 226, 1995)

The left side grows with s and |T|. If it exceeds the right side at its least value (`_least`), no
such S exists. The circle's eigenvalues other than k are Σ_a 2 cos(2π j a/K), j = 1 to K - 1.

**Shares of a mask's key** go to the neighbourhood; l of them recover it, and at most c < l are
corrupt. So protection has no probability of failure.

**A round works** if each neighbourhood has l sites left. If sites are missing at random, every set
of t sites is equally likely. k and l are such that a round fails for lack of neighbours with
probability below 2^-BITS, by a hypergeometric tail for each of K sites and three sets (the sites in
the session, in the sum, and opening).

Bell, Bonawitz, Gascón, Lepoint, Raykova (CCS 2020) draw the graph at random, with k of the order of
log K, and bound the probability that it is bad.

The graph depends on the sites' names, t and c only, so all parties compute the same one.
"""

import hashlib
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fedpact.common.errors import InputError
from fedpact.plan import Plan
from fedpact.privacy.terms import Terms
from fedpact.simulation.secure_aggregation.encoding import coding_of

BITS: Final = 40
"""A round fails for lack of neighbours with probability below 2^-BITS."""

FEWEST: Final = 16
"""With fewer sites, all are neighbours."""

_TRIES: Final = 32
_MARGIN: Final = 1e-9


@dataclass(frozen=True)
class Neighbourhoods:
    """A graph on K sites, 0 to K - 1.

    distances: of neighbours, in both directions; () if all are neighbours, with l = t. shares: l,
    the least number of a neighbourhood in a sum, and of shares that recover a key.
    """

    sites: int
    distances: tuple[int, ...]
    shares: int

    @property
    def neighbours(self) -> int:
        """k, the number of neighbours of a site."""
        return 2 * len(self.distances) if self.distances else self.sites - 1

    def adjacency(self) -> NDArray[np.bool_]:
        """Return the neighbourhoods, bool [K, K]; each site is in its own."""
        if not self.distances:
            return np.ones((self.sites, self.sites), dtype=bool)
        rows = np.arange(self.sites)
        found = np.eye(self.sites, dtype=bool)
        for distance in self.distances:
            found[rows, (rows + distance) % self.sites] = True
            found[rows, (rows - distance) % self.sites] = True
        return found


@cache
def neighbourhoods(sites: int, threshold: int, against: int) -> Neighbourhoods:
    """Return the graph with the fewest neighbours that is proven connected, else the complete one.

    sites: K. threshold: t, 1 <= t <= K. against: c, 0 <= c < t. Raises InputError.

    >>> neighbourhoods(100, 67, 10).neighbours, neighbourhoods(10, 8, 1).neighbours
    (46, 9)
    """
    if not 0 <= against < threshold <= sites:
        raise InputError(
            f"{sites} sites, a threshold of {threshold} and {against} against the others: expected "
            "0 <= against < threshold <= sites"
        )
    # A neighbourhood must exceed c, else it could be all corrupt. k is even, as distances go both
    # ways.
    for k in range(max(2, against + against % 2), sites - 1, 2) if sites >= FEWEST else ():
        shares = most_shares(sites, threshold, k)
        least = _least(sites, threshold - against, shares - against)
        # Some sets of distances connect the graph better than others.
        for number in range(_TRIES if shares > against and least > 0 else 0):
            distances = _distances(sites, k, number)
            # Haemers' bound; the margin far exceeds the FFT's rounding.
            if spectral_spread(sites, distances) ** 2 < least - _MARGIN:
                return Neighbourhoods(sites, distances, shares)
    return Neighbourhoods(sites, (), threshold)


def most_shares(sites: int, threshold: int, k: int) -> int:
    """Return the largest l with which a round fails with probability below 2^-BITS; 0: none.

    k: neighbours. Of t sites drawn from K, a drawn site has X of the t - 1 others as neighbours and
    needs l - 1; any other site has X of t and needs l; X is hypergeometric.
    """
    # A drawn site is in its own neighbourhood.
    among = 1 + _sure(sites, threshold - 1, k)
    return among if threshold == sites else min(among, _sure(sites, threshold, k))


def _sure(sites: int, there: int, k: int) -> int:
    """Return the largest l <= k with P(X < l) < 2^-BITS / 3K, in integer arithmetic."""
    fewer, found = 0, 0
    while found < k:
        # P(X = found) times comb(K - 1, k), without floats, so all parties find the same l.
        fewer += math.comb(there, found) * math.comb(sites - 1 - there, k - found)
        if not 3 * sites * fewer << BITS < math.comb(sites - 1, k):
            break
        found += 1
    return found


def spectral_spread(sites: int, distances: tuple[int, ...]) -> float:
    """Return ρ/(k - θ) >= 0; see the module."""
    # The adjacency matrix is circulant: its eigenvalues are its first row's Fourier transform.
    row = np.zeros(sites)
    for distance in distances:
        row[[distance, -distance]] = 1.0
    others = np.fft.fft(row).real[1:]
    middle, half = (others.max() + others.min()) / 2, (others.max() - others.min()) / 2
    return float(half / (2 * len(distances) - middle))


def _least(sites: int, honest: int, inside: int) -> float:
    """Return the least of s|T| / ((K - s)(K - |T|)) with s, |T| >= l - c and s + |T| >= h."""
    if inside < 1:
        return 0.0
    # With s + |T| = h the product is least at an end.
    other = max(inside, honest - inside)
    if inside + other > sites:
        # Two parts do not fit.
        return math.inf
    return inside * other / ((sites - inside) * (sites - other))


def _distances(sites: int, k: int, number: int) -> tuple[int, ...]:
    """Return the first k/2 of the distances below K/2, in a pseudo-random order by `number`."""

    def place(distance: int) -> bytes:
        return hashlib.sha256(f"{sites} {k} {number} {distance}".encode()).digest()

    return tuple(sorted(sorted(range(1, (sites + 1) // 2), key=place)[: k // 2]))


class MaskingGraph:
    """Neighbourhoods by site name. names: all sites of a run. threshold: t. against: c."""

    def __init__(self, names: Iterable[str], threshold: int, against: int) -> None:
        self.threshold = threshold
        self._numbers = {name: number for number, name in enumerate(sorted(names))}
        self.graph = neighbourhoods(len(self._numbers), threshold, against)
        self._adjacency, known = self.graph.adjacency(), list(self._numbers)
        self._around = {
            name: frozenset(known[n] for n in row.nonzero()[0])
            for name, row in zip(known, self._adjacency, strict=True)
        }

    @staticmethod
    def of(plan: Plan, names: Iterable[str]) -> "MaskingGraph":
        """Return the graph of a plan's run over these sites."""
        known, threshold = set(names), plan.secure_aggregation.threshold
        return MaskingGraph(known, threshold, plan.privacy.colluding(threshold, len(known)))

    def place(self, name: str) -> int:
        """Return the x >= 1 of a site's shares."""
        return self._numbers[name] + 1

    def around(self, name: str) -> frozenset[str]:
        """Return a site's neighbourhood: its neighbours and itself."""
        return self._around[name]

    def holds(self, names: Collection[str]) -> bool:
        """Whether these may be summed: known, at least t, each with l of its neighbourhood."""
        if len(names) < self.threshold or not set(names) <= self._numbers.keys():
            return False
        places = [self._numbers[name] for name in names]
        return bool((self._adjacency[places][:, places].sum(axis=1) >= self.graph.shares).all())


def secure_terms(plan: Plan, sites: int, terms: Mapping[str, Terms]) -> dict[str, int] | None:
    """Return a run's secure aggregation as plain data, None without it. terms: of all sites.

    neighbours: the number of sites with which a site shares masks. against: how many sites may
    collude with the server. bits: of a masked coordinate.
    """
    threshold = plan.secure_aggregation.threshold
    if not threshold:
        return None
    against = plan.privacy.colluding(threshold, sites)
    neighbours = neighbourhoods(sites, threshold, against).neighbours
    told = {"threshold": threshold, "sites": sites}
    bits = coding_of(plan, {site: one.size for site, one in terms.items()}, terms).bits
    return told | {"neighbours": neighbours, "against": against, "bits": bits}
