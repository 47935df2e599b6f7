"""Who masks with whom: the graph of neighbours, its probabilities of failure, its statement.

K sites stand on a circle, and those at distances ±a_1, ..., ±a_{k/2} are neighbours. Up to c sites
work for whoever runs the sums, and of the others it may leave out whom it likes, knowing the graph,
as long as at least t sites are in a sum and each of them has at least l of its neighbourhood (its k
neighbours and itself) among them. Let H be the others in a sum, h = t - c at the least.

**The sites of H are connected**, for every choice of who is corrupt and who is left out. Let S be a
union of components of H, T the rest of it. Each site of S has l - c of its neighbourhood in S, so
S and T have at least l - c sites each, and s + |T| >= h. No edge leads from S to T. For M = A - θ I
with A the adjacency matrix, 1_S' M 1_T = 0. M has the row sum k - θ, and on the complement of the
ones its eigenvalues lie within ρ of 0, where θ is the middle of A's other eigenvalues and ρ half
their range. So (k - θ) s|T|/K <= ρ sqrt(s (1 - s/K) |T| (1 - |T|/K)), or

    s|T| / ((K - s)(K - |T|)) <= (ρ/(k - θ))²        (Haemers, Linear Algebra Appl. 226, 1995)

The left side grows with s and |T|; where it is larger than the right one at the least that they can
be (`_least`), there is no such S. The eigenvalues of a circle are Σ_a 2 cos(2π j a/K), j = 1 to
K - 1 beside k.

**Shares of a mask's key**, l of which give it, are dealt to the neighbourhood; c < l of them are
corrupt, whoever that is. So of all this nothing fails with any probability.

**A round works** if each neighbourhood has l sites left. Where whoever is away is away by chance, a
set of t sites is as likely as any other, and k and l are such that a round fails for want of
neighbours with a probability below 2^-BITS: K sites, three sets (who is in, who is in the sum, who
opens), and for each a hypergeometric tail.

Bell, Bonawitz, Gascón, Lepoint, Raykova (CCS 2020) draw the graph at random, for k of the order of
log K, and bound the probability that it is a bad one; here it is shown to be a good one.

The graph follows from the sites' names, the threshold and how many may be against the others, so
that all parties find the same one.
"""

import hashlib
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fedpact.common.errors import InputError
from fedpact.plan import Plan
from fedpact.privacy.terms import Terms
from fedpact.simulation.secure_aggregation.encoding import coding_of

BITS: Final = 40
"""A round has too few neighbours left somewhere less often than once in 2^BITS, by chance."""

FEWEST: Final = 16
"""Among fewer sites all are neighbours: there is nothing to be saved."""

_TRIES: Final = 32
_MARGIN: Final = 1e-9


@dataclass(frozen=True)
class Neighbourhoods:
    """A graph on K sites, 0 to K - 1. distances: of neighbours on the circle, each both ways.

    shares: l, how many of a neighbourhood have to be in a sum, and how many shares give a key.
    Without distances all are neighbours, and l is t.
    """

    sites: int
    distances: tuple[int, ...]
    shares: int

    @property
    def neighbours(self) -> int:
        """How many neighbours each site has, k."""
        return 2 * len(self.distances) if self.distances else self.sites - 1

    def adjacency(self) -> NDArray[np.bool_]:
        """Return who is in whose neighbourhood, [K, K]; each site is in its own."""
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
    """Return the graph with the fewest neighbours that bears this; all are neighbours if none does.

    sites: K. threshold: t, 1 <= t <= K. against: c, 0 <= c < t. The same wherever it is computed.
    Raises InputError.

    >>> neighbourhoods(100, 67, 10).neighbours, neighbourhoods(10, 8, 1).neighbours
    (46, 9)
    """
    if not 0 <= against < threshold <= sites:
        raise InputError(
            f"{sites} sites, a threshold of {threshold} and {against} against the others: expected "
            "0 <= against < threshold <= sites"
        )
    # From the fewest neighbours on: of k and the site itself more than c have to be there, else all
    # whom one site shares masks with could be the server's. k is even, as distances go both ways.
    for k in range(max(2, against + against % 2), sites - 1, 2) if sites >= FEWEST else ():
        shares = most_shares(sites, threshold, k)
        least = _least(sites, threshold - against, shares - against)
        # Which distances are taken decides how far apart two sites are; some sets do better.
        for number in range(_TRIES if shares > against and least > 0 else 0):
            distances = _distances(sites, k, number)
            # Haemers' bound; the margin is far beyond what the FFT rounds.
            if spectral_spread(sites, distances) ** 2 < least - _MARGIN:
                return Neighbourhoods(sites, distances, shares)
    return Neighbourhoods(sites, (), threshold)


def most_shares(sites: int, threshold: int, k: int) -> int:
    """Return the largest l with which a round fails with a probability below 2^-BITS; 0: none.

    k: neighbours. Of t sites drawn from K, a site that is among them has X of t - 1 others among
    its neighbours, one that is not has X of t, X hypergeometric; l - 1 and l have to be there.
    """
    # A site that is among them is of its own neighbourhood; where all are, there is no other.
    among = 1 + _sure(sites, threshold - 1, k)
    return among if threshold == sites else min(among, _sure(sites, threshold, k))


def _sure(sites: int, there: int, k: int) -> int:
    """Return the largest l <= k with P(X < l) < 2^-BITS / 3K, in whole numbers."""
    fewer, found = 0, 0
    while found < k:
        # P(X = found) times comb(K - 1, k): no float, so all parties find the same l.
        fewer += math.comb(there, found) * math.comb(sites - 1 - there, k - found)
        if not 3 * sites * fewer << BITS < math.comb(sites - 1, k):
            break
        found += 1
    return found


def spectral_spread(sites: int, distances: tuple[int, ...]) -> float:
    """Return ρ/(k - θ), from 0 on: how far the graph is from one in which all are neighbours."""
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
    # Of s + |T| = h the product is least at an end.
    other = max(inside, honest - inside)
    if inside + other > sites:
        # There is no room for two parts.
        return math.inf
    return inside * other / ((sites - inside) * (sites - other))


def _distances(sites: int, k: int, number: int) -> tuple[int, ...]:
    """The k/2 of the distances below K/2 that come first in an order that `number` names."""

    def place(distance: int) -> bytes:
        return hashlib.sha256(f"{sites} {k} {number} {distance}".encode()).digest()

    return tuple(sorted(sorted(range(1, (sites + 1) // 2), key=place)[: k // 2]))


class MaskingGraph:
    """Who masks with whom. names: of all sites of a run. threshold: t. against: c."""

    def __init__(self, names: Iterable[str], threshold: int, against: int) -> None:
        self.threshold = threshold
        self._numbers = {name: number for number, name in enumerate(sorted(names))}
        self.graph = neighbourhoods(len(self._numbers), threshold, against)
        self._adjacency = self.graph.adjacency()

    @staticmethod
    def of(plan: Plan, names: Iterable[str]) -> "MaskingGraph":
        """Return that of a plan's run over these sites."""
        known = set(names)
        return MaskingGraph(known, plan.secure_aggregation.threshold, colluding(plan, len(known)))

    def place(self, name: str) -> int:
        """Return at which x a site has its shares, from 1 on."""
        return self._numbers[name] + 1

    def around(self, name: str) -> frozenset[str]:
        """Return a site's neighbourhood: the sites it shares masks with, and itself."""
        return self._around[name]

    def holds(self, names: Collection[str]) -> bool:
        """Whether these may be summed: known, at least t, each with l of its neighbourhood."""
        if len(names) < self.threshold or not set(names) <= self._numbers.keys():
            return False
        places = [self._numbers[name] for name in names]
        return bool((self._adjacency[places][:, places].sum(axis=1) >= self.graph.shares).all())

    @cached_property
    def _around(self) -> dict[str, frozenset[str]]:
        names = list(self._numbers)
        return {
            name: frozenset(names[n] for n in self._adjacency[at].nonzero()[0])
            for name, at in self._numbers.items()
        }


def colluding(plan: Plan, sites: int) -> int:
    """Return c, how many of the sites may work for the server: as many as h or t leave room for.

    With 2t > K + c no two lists of t sites each are signed by others than those.
    """
    threshold, honest = plan.secure_aggregation.threshold, plan.privacy.honest
    # Shared noise needs h honest sites among any t of a sum. Else two lists of t sites each, which
    # a server might have signed in one round, have 2t - K sites in common: one more than c.
    return threshold - honest if honest else 2 * threshold - sites - 1


def secure_terms(plan: Plan, sites: int, terms: Mapping[str, Terms]) -> dict[str, int] | None:
    """Return what a run's secure aggregation is, None where it has none. terms: of all sites.

    neighbours: with how many others each site shares masks. against: how many may work for the
    server, whoever they are, and whomever it leaves out. bits: of a masked coordinate.
    """
    threshold = plan.secure_aggregation.threshold
    if not threshold:
        return None
    against = colluding(plan, sites)
    neighbours = neighbourhoods(sites, threshold, against).neighbours
    told = {"threshold": threshold, "sites": sites}
    bits = coding_of(plan, {site: one.size for site, one in terms.items()}, terms).bits
    return told | {"neighbours": neighbours, "against": against, "bits": bits}
