"""Who of a federation masks with whom, and who holds a share of whose secrets.

theory.neighbours has the graph, and the proof of what it bears. It follows from the sites' names,
the threshold and how many may be against the others, so that all parties find the same one.
"""

from collections.abc import Collection, Iterable
from functools import cached_property

from fedpact.plan import Plan
from fedpact.theory.neighbours import neighbourhoods


class MaskingGraph:
    """names: of all sites of a run. threshold: t. against: c, see theory.neighbours."""

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
    return threshold - honest if honest else 2 * threshold - sites - 1
