"""What a run has cost a site, by the site's own ledger: of all its reservations, if extended."""

from dataclasses import dataclass

from fedpact.ledger.ledger import Ledger
from fedpact.privacy.terms import Terms
from fedpact.theory.accounting import add_budgets, epsilon


@dataclass(frozen=True)
class Cost:
    """Sums over the run's reservations. run: the last one's name. terms: of that one."""

    run: str
    terms: Terms
    ledger: Ledger

    @property
    def epsilon(self) -> float:
        """ε spent so far at `delta`, an upper bound; adjacency and accountant are the terms'."""
        return self._before + self.terms.epsilon_after(self.ledger.spent(self.run))

    @property
    def most(self) -> float:
        """ε of all that the last reservation may spend, beside what those before have spent."""
        return self._before + self.terms.budget.epsilon

    @property
    def delta(self) -> float:
        """Σ δ of the reservations."""
        earlier = self.ledger.earlier(self.run)
        return add_budgets([self.terms.budget.delta, *(budget.delta for _, budget in earlier)])

    @property
    def _before(self) -> float:
        each, by = self.ledger.earlier(self.run), self.terms.accountant
        return sum(epsilon(events, budget.delta, by) for events, budget in each)

    def describe(self) -> str:
        """Return `epsilon` in words, to the last digit: rounded down it would be no bound."""
        alone = ""
        if self.terms.honest:
            spent = self.terms.epsilon_alone_after(self.ledger.spent(self.run))
            alone = f" with {self.terms.honest} honest sites, ε <= {spent!r} with none,"
        return (
            f"spent ε <= {self.epsilon!r}{alone} at δ = {self.delta!r}, "
            f"{self.terms.adjacency}, accountant {self.terms.accountant}"
        )
