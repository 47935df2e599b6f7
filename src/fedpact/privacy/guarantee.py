"""What a run or a ledger guarantees: (ε, δ), and what ε assumes about other sites.

Terms, ledgers and run folders make one; reports, receipts and commands pass it on and print it.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from fedpact.common.format import upper

# Prices are computed by numpy and scipy, which commands that only print a guarantee do not need.
if TYPE_CHECKING:
    from fedpact.privacy.accounting.accountant import History, SampledGaussian


@dataclass(frozen=True)
class Guarantee:
    """(ε, δ), where ε may need the noise of other sites. alone: ε at the same δ without any of it.

    honest: the number of sites in each sum whose noise `epsilon` needs. With 0, alone is ε.

    >>> print(Guarantee(1.0, 1e-5, 1.0))
    1
    >>> print(Guarantee(1.0, 1e-5, 4.1523, 7))
    1 if at least 7 sites of each sum are honest, 4.153 if no other is
    """

    epsilon: float
    delta: float
    alone: float
    honest: int = 0

    @staticmethod
    def of(events: "History", delta: float, honest: int) -> "Guarantee":
        """Return upper bounds for events that have the noise of `honest` shares, 0 for their own.

        A part of δ is set aside for the law of a sum of shares (accounting.shared_noise).
        """
        from fedpact.privacy.accounting import shared_noise
        from fedpact.privacy.accounting.accountant import epsilon

        cost = epsilon(events, shared_noise.delta_of_events(delta, honest))
        if not honest:
            return Guarantee(cost, delta, cost)
        own = shared_noise.all_alone(events, honest)
        return Guarantee(cost, delta, epsilon(own, delta), honest)

    def after(self, events: "History") -> "Guarantee":
        """Return upper bounds at δ for some of the events that this guarantee was given for."""
        return Guarantee.of(events, self.delta, self.honest)

    def own_share(self, event: "SampledGaussian") -> "SampledGaussian | None":
        """Return an event with the noise of a site's own share only; None if noise is unshared."""
        from fedpact.privacy.accounting import shared_noise

        return shared_noise.own_share_event(event, self.honest) if self.honest else None

    def per_person(self, events: "History", records: int) -> "Guarantee":
        """Return upper bounds at δ for a person's `records` records together.

        events: those that this guarantee was given for, a run's promise.
        """
        from fedpact.privacy.accounting import shared_noise
        from fedpact.privacy.accounting.group_privacy import epsilon_per_person

        if not self.honest:
            cost = epsilon_per_person(events, self.delta, records)
            return Guarantee(cost, self.delta, cost)
        own = shared_noise.all_alone(events, self.honest)
        alone = epsilon_per_person(own, self.delta, records)
        price = partial(epsilon_per_person, events, records=records)
        cost = shared_noise.cover(price, self.delta, self.epsilon, alone)
        return Guarantee(cost, self.delta, alone, self.honest)

    @staticmethod
    def read(
        document: Mapping[str, Any], epsilon: str = "epsilon", alone: str = "epsilon_alone"
    ) -> "Guarantee":
        """Return what `entries` wrote. epsilon, alone: the names of the two ε in the document.

        An unknown ε (None or missing) is infinite. Raises what a malformed number raises.
        """
        honest = int(document.get("honest") or 0)
        cost, worst = (
            math.inf if document.get(name) is None else float(document[name])
            for name in (epsilon, alone if honest else epsilon)
        )
        return Guarantee(cost, float(document["delta"]), worst, honest)

    @staticmethod
    def largest(all_of: "Iterable[Guarantee]") -> "Guarantee":
        """Return a guarantee that covers all of these; of none, or with NaN, it is infinite."""
        known = [
            [math.inf if math.isnan(value) else value for value in astuple(one)] for one in all_of
        ]
        nothing = Guarantee(math.inf, math.inf, math.inf)
        return Guarantee(*map(max, zip(*known, strict=True))) if known else nothing

    @property
    def entries(self) -> dict[str, float | None]:
        """How documents state the assumption: beside ε, as "honest" and "epsilon_alone"."""
        return {"honest": self.honest, "epsilon_alone": self.alone if self.honest else None}

    def __str__(self) -> str:
        if not self.honest:
            return upper(self.epsilon)
        return (
            f"{upper(self.epsilon)} if at least {self.honest} sites of each sum are honest, "
            f"{upper(self.alone)} if no other is"
        )

    def counted(self, trusted: float) -> float:
        """Return the ε that counts for an owner who trusts so many sites to add their noise."""
        return self.epsilon if self.honest <= trusted else self.alone

    @property
    def condition(self) -> str:
        """What ε assumes, in words; "" if it assumes nothing about other sites."""
        return f"the noise of {self.honest} honest sites in each sum" if self.honest else ""

    @property
    def cases(self) -> list[tuple[str, float]]:
        """Pairs (condition in words, ε under it), with "" for no condition."""
        if not self.honest:
            return [("", self.epsilon)]
        return [
            (f", given {self.condition}", self.epsilon),
            (", if no other site is honest", self.alone),
        ]
