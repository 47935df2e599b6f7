"""A privacy filter: a budget for events that are chosen while the run goes, from what it released.

`accounting.epsilon` needs events fixed in advance. Where q, σ or the number of releases depend on
earlier answers, it is not enough that the accountant's ε stays in the budget at every step.

Statement. Let O be m Rényi orders, fixed before the first release, and for α in O let B_α be the
largest RDP that converts to ε at (α, δ/m). If every release is admitted only while at least one
order has R(α) <= B_α, R(α) being the sum of RDP(α) over all releases so far with the new one,
then the whole run is (ε, δ)-DP against add/remove of one record, however the events were chosen.

Proof. For one order alone, stopping before R(α) exceeds B_α makes the run (α, B_α)-RDP: given the
past, each factor of E[(dP/dQ)^(α-1)] is at most exp((α-1) RDP(α)), and the sum of RDP(α) never
exceeds B_α (Feldman, Zrnic 2021. Individual privacy accounting via a Rényi filter. arXiv
2008.11193). So its hockey-stick divergence is E[(1 - e^(ε-L))+] <= δ/m. Sums of RDP only grow: a
transcript that ends with R(α) <= B_α kept to it all along, so the filter of α alone passes it too,
with the same probability and the same loss L. Every transcript of the run is one of these for
some α in O, and summing over the m orders gives δ.

The m is needed: with "some order" and the full δ at each (as is often done), an analyst who picks
the order by an outcome can collect the tails of two orders; filters for whole RDP curves are not
free (Regehr, Hu, Leeman, Manurangsi, Tholoniat, Lécuyer 2026. arXiv 2602.15815). So one order
that suits the planned events (`order_for`) costs least; several guard against a wrong guess.
"""

import math

import numpy as np

from fedpact import check
from fedpact.errors import BudgetExhausted, InputError
from fedpact.theory import rdp
from fedpact.theory.accounting import Budget, History, SampledGaussian, epsilon


def order_for(budget: Budget, event: SampledGaussian) -> float:
    """Return the one Rényi order at which the budget admits the most repeats of the event.

    A filter of this order alone then admits as many as RDP with fixed events does.
    """
    room = budget.epsilon - rdp.offset(budget.delta, "balle")
    repeats = room / rdp.renyi(event.q, event.sigma)
    return rdp.ORDERS[int(np.argmax(repeats))]


def default_orders(budget: Budget) -> tuple[float, ...]:
    """Return five orders for events not known in advance, around the one that suits Gaussians.

    For RDP(α) = αρ that fills the budget (Mironov's conversion), α = 1 + sqrt(log(1/δ)/ρ) with
    sqrt(ρ) = sqrt(log(1/δ) + ε) - sqrt(log(1/δ)). Sampled events want smaller ones.
    """
    tail = -math.log(budget.delta)
    width = math.sqrt(tail) / (math.sqrt(tail + budget.epsilon) - math.sqrt(tail))
    return tuple(1 + width * 1.5**k for k in (-3, -2, -1, 0, 1))


class RenyiFilter:
    """Admits events as long as the whole run stays (ε, δ)-DP; see the module for the proof.

    orders: Rényi orders > 1, chosen before the first release from public numbers only; None takes
    `default_orders`. charged: events already released under this same filter, as a ledger holds
    them. Raises InputError where no order leaves any room, and for orders that are no orders.

    >>> event = SampledGaussian(q=0.015, sigma=1.1)
    >>> budget = Budget(epsilon=2.0, delta=1e-5)
    >>> site = RenyiFilter(budget, orders=(order_for(budget, event),))
    >>> site.charge(event)
    >>> site.admits(SampledGaussian(q=1.0, sigma=0.5))
    False
    """

    def __init__(
        self,
        budget: Budget,
        orders: tuple[float, ...] | None = None,
        charged: History | None = None,
    ) -> None:
        self.budget = budget
        self.orders = orders if orders is not None else default_orders(budget)
        if not self.orders or len(set(self.orders)) < len(self.orders):
            raise InputError(f"orders are {orders!r}: expected at least one, and each once")
        share = budget.delta / len(self.orders)
        self._limits = budget.epsilon - rdp.offset(share, "balle", self.orders)
        if not np.any(self._limits > 0):
            raise InputError(
                f"orders are {self.orders!r}: at (ε = {budget.epsilon:g}, δ = {budget.delta:g}) "
                "none leaves any room; expected larger or fewer orders"
            )
        self._history: dict[SampledGaussian, int] = {}
        self._spent = np.zeros(len(self.orders))
        for event, count in (charged or {}).items():
            self.record(event, count)

    def admits(self, event: SampledGaussian, count: int = 1) -> bool:
        """Return whether `count` more releases of this event keep the budget."""
        cost = check.count(count=count) * rdp.renyi(event.q, event.sigma, self.orders)
        return bool(np.any(self._spent + cost <= self._limits))

    def charge(self, event: SampledGaussian) -> None:
        """Count one release of the event, before it is made. Raises BudgetExhausted."""
        if not self.admits(event):
            raise BudgetExhausted(
                f"a release with q = {event.q:g}, σ = {event.sigma:g} does not fit into what is "
                f"left of (ε = {self.budget.epsilon:g}, δ = {self.budget.delta:g}), add/remove "
                "one record, by the Rényi filter: stop, or ask for one with more noise"
            )
        self.record(event, 1)

    def record(self, event: SampledGaussian, count: int) -> None:
        """Count `count` >= 0 releases that were admitted before, as a ledger that is read again."""
        self._spent = self._spent + check.natural(count=count) * rdp.renyi(
            event.q, event.sigma, self.orders
        )
        self._history[event] = self._history.get(event, 0) + count

    def spent(self) -> float:
        """Return the ε of the charged events at δ, as if fixed in advance; at most budget.epsilon.

        By RDP, as the filter counts. A progress report: what is proven of an adaptive run is the
        whole budget, from its start.
        """
        return min(self.budget.epsilon, epsilon(self._history, self.budget.delta, "rdp"))

    @property
    def history(self) -> History:
        """The events charged so far and how often."""
        return dict(self._history)
