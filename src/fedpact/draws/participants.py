"""Which sites take part in a round, where a part of them does: a public draw without replacement.

Of K names in order, m take part in round t: with the 64-bit words u_1, ..., u_m (little-endian) of
SHAKE-256 of the JSON text [seed, "participants", t], and for i = 1, ..., m, the name at place i
changes places with the one at place i + (u_i mod (K - i + 1)); the first m then take part. Every
set of m is as likely as any other, up to K / 2^64. Whoever has the plan can draw the same.
"""

import hashlib
import json
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from fedpact.errors import PlanError


def size_of_round(each: int | None, sites: int) -> int:
    """Return how many of so many sites a round asks. Raises PlanError: more than there are.

    each: m, None for all.
    """
    if each is not None and each > sites:
        raise PlanError(
            f"sites_per_round is {each} with {sites} sites: expected at most as many as there are; "
            "leave it out for all of them"
        )
    return sites if each is None else each


@dataclass(frozen=True)
class Participants:
    """Who takes part when. seed: the plan's. sites: the names of all K. each: m, None for all.

    Raises PlanError: m is more than there are.
    """

    seed: int
    sites: tuple[str, ...]
    each: int | None = None

    def __post_init__(self) -> None:
        size_of_round(self.each, len(self.sites))

    @property
    def partial(self) -> bool:
        """Whether some sites are left out of each round."""
        return self.each is not None and self.each < len(self.sites)

    def of(self, number: int) -> tuple[str, ...]:
        """Return the names of those that take part in a round, sorted. Round 0 is everybody's."""
        if self.each is None or not self.partial or number == 0:
            return tuple(sorted(self.sites))
        if number not in self._known:
            self._known[number] = self._drawn(number, self.each)
        return self._known[number]

    def rounds(self, after: int, last: int) -> Counter[str]:
        """Return T_i: in how many of the rounds after + 1, ..., last each site takes part."""
        if not self.partial:
            return Counter(dict.fromkeys(self.sites, last - after))
        return Counter(site for number in range(after + 1, last + 1) for site in self.of(number))

    def last_of(self, site: str, last: int) -> int:
        """Return the last of the rounds 1, ..., last that a site takes part in, 0 for none."""
        return next((number for number in range(last, 0, -1) if site in self.of(number)), 0)

    def newcomers(self, after: int, last: int) -> int:
        """Return how often in rounds after + 1, ..., last a site had no part in the one before.

        Round 1 has none before it.
        """
        drawn = (set(self.of(number)) for number in range(max(after, 1), last + 1))
        return sum(len(now - before) for before, now in pairwise(drawn))

    def describe(self) -> str:
        """Return what a statement says of it, "" where all sites take part in every round.

        Without numbers, which would tell a model card's reader how many sites there are.
        """
        if not self.partial:
            return ""
        return (
            "A part of the sites takes part in each round, drawn from the plan's seed and the "
            "round's number. A site's ε is of the rounds that are its own, which it knows and "
            "reserves before the run. Nothing is claimed for the draw (no amplification by "
            "sampling of sites): whoever has the plan, as the server, can tell who takes part."
        )

    @cached_property
    def _known(self) -> dict[int, tuple[str, ...]]:
        return {}

    def _drawn(self, number: int, each: int) -> tuple[str, ...]:
        text = json.dumps([self.seed, "participants", number])
        words = np.frombuffer(hashlib.shake_256(text.encode()).digest(8 * each), "<u8")
        names, count = sorted(self.sites), len(self.sites)
        for place, word in enumerate(words.tolist()):
            other = place + word % (count - place)
            names[place], names[other] = names[other], names[place]
        return tuple(sorted(names[:each]))
