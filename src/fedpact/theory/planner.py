"""Choosing (q, σ, T, τ) together, from a privacy budget, a round budget and a computing budget.

At a given (ε, δ), what training gets out of the budget grows with

    snr = sqrt(T) q / σ        (for large σ nearly the Gaussian-DP parameter of the whole run)

T iterations at rate q read q T times the site's data. Fewer iterations on larger batches have the
larger snr, but a run needs its iterations; so every round does at least one, and among the plans
within the budgets the one with the largest snr is chosen, the cheaper one where they hardly differ.
"""

import math
from dataclasses import dataclass

from fedpact import check
from fedpact.theory.accounting import Accountant, Budget, History
from fedpact.theory.calibration import smallest_sigma

# Plans whose snr differs by less than this are alike; then less computing decides.
_ALIKE = 0.01
_HALVINGS = 5
_LOCAL_STEPS = (1, 2, 4, 8, 16)
MOST_STEPS = _LOCAL_STEPS[-1]


@dataclass(frozen=True)
class Choice:
    """One way to spend a budget. passes: q T, how often each site's data are read."""

    rate: float
    sigma: float
    rounds: int
    local_steps: int

    @property
    def steps(self) -> int:
        """T = τ times the rounds."""
        return self.rounds * self.local_steps

    @property
    def passes(self) -> float:
        """How many times a record is read, q T: passes over the data, as expected."""
        return self.rate * self.steps

    @property
    def snr(self) -> float:
        """sqrt(T) q / σ."""
        return math.sqrt(self.steps) * self.rate / self.sigma

    def to_dict(self) -> dict[str, float]:
        """Return it as plain data, its rate and number of iterations by their keys in a plan."""
        return {
            "sampling_rate": self.rate,
            "sigma": self.sigma,
            "rounds": self.rounds,
            "steps": self.steps,
            "local_steps": self.local_steps,
            "passes": self.passes,
            "snr": self.snr,
        }


def choice(
    budget: Budget,
    rate: float,
    rounds: int,
    local_steps: int,
    accountant: Accountant = "best",
    spent: History | None = None,
) -> Choice:
    """Return the choice with the smallest σ at which T = τ rounds iterations fit the budget.

    spent: what the budget bears besides.
    """
    check.count(rounds=rounds)
    check.count(local_steps=local_steps)
    sigma = smallest_sigma(budget, rate, rounds * local_steps, accountant, spent=spent)
    return Choice(rate, sigma, rounds, local_steps)


def candidates(
    budget: Budget,
    rounds: int,
    passes: float,
    spent: History | None = None,
    most_steps: int = MOST_STEPS,
) -> list[Choice]:
    """Return the plans within the budgets, cheapest first, with σ by RDP: enough to rank them.

    rounds: >= 1, all of them used. passes: most passes over each site's data, > 0; where even one
    record a round is more than that, rates go down to passes / rounds. spent: see `choice`.
    most_steps: τ is at most this, >= 1.
    """
    check.count(rounds=rounds)
    check.positive(passes=passes)
    found: list[Choice] = []
    for local_steps in (each for each in _LOCAL_STEPS if each <= most_steps):
        most = min(1.0, passes / (rounds * local_steps))
        # Local steps multiply what one round's message is worth, not what a batch is: once the
        # rate has to fall below a hundredth for them, they are no gain by any measure.
        if local_steps > 1 and most < 0.01:
            break
        for halvings in range(_HALVINGS):
            rate = most * 0.5**halvings
            found.append(choice(budget, rate, rounds, local_steps, "rdp", spent))
    return sorted(found, key=lambda c: c.passes)


def best(
    budget: Budget,
    rounds: int,
    passes: float,
    spent: History | None = None,
    most_steps: int = MOST_STEPS,
) -> Choice:
    """Return the candidate with the largest snr, the cheapest of those alike, with its exact σ."""
    found = candidates(budget, rounds, passes, spent, most_steps)
    top = max(c.snr for c in found)
    chosen = next(c for c in found if c.snr >= (1 - _ALIKE) * top)
    return choice(budget, chosen.rate, chosen.rounds, chosen.local_steps, spent=spent)
