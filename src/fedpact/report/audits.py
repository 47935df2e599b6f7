"""The audit of a run's mechanism as its page shows it: what is claimed, and what was measured."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedpact.errors import DataError
from fedpact.text import format_epsilon, lower, upper

_WORDS = {
    "ε": ("ε ≥ {}", "ε ≤ {}"),
    "σ": ("σ ≤ {}", "σ = {}"),
    "p": ("p = {}", "p ≥ {}"),
    "AUC": ("AUC ≥ {}", "AUC ≤ {}"),
    "Δ": ("Δ = {}", "Δ ≤ {}"),
}


@dataclass(frozen=True)
class AuditRow:
    """One bound that was measured, and what the accountant states of the same.

    quantity: "ε" at `delta` or "AUC", bounded from below; "σ", a noise multiplier, from above;
    "p", of a test of the mechanism, beside its level; "Δ", how far a record moved a channel's sum,
    relative to its sensitivity. power: the bound that the best attack would show, were all as
    claimed; None of a test.
    """

    method: str
    quantity: str
    bound: float
    claimed: float
    delta: float | None
    confidence: float
    found: str
    power: float | None = None

    @property
    def wrong(self) -> bool:
        """Whether the numbers contradict each other, whatever else the file says of them."""
        above = self.quantity in ("σ", "p")
        return not (self.claimed <= self.bound if above else self.bound <= self.claimed)

    @property
    def cells(self) -> tuple[str, ...]:
        """Measured, at best, claimed, δ and confidence as text."""
        measured, claimed = _WORDS[self.quantity]
        told = upper if self.quantity in ("σ", "Δ") else lower
        digits = 6 if self.quantity == "Δ" else 4
        return (
            measured.format(told(self.bound, digits)),
            "–" if self.power is None else measured.format(told(self.power)),
            claimed.format(upper(self.claimed, digits)),
            "–" if self.delta is None else upper(self.delta),
            f"{100 * self.confidence:.4g} %",
        )


@dataclass(frozen=True)
class Audit:
    """What audit.json holds: the claim of one site, and the checks."""

    site: str
    epsilon: float
    delta: float
    adjacency: str
    accountant: str
    checks: tuple[AuditRow, ...]
    honest: int = 0
    epsilon_alone: float | None = None
    unit: str = "record"

    @staticmethod
    def of(document: Mapping[str, Any]) -> "Audit | None":
        """Return what `fedpact audit` wrote, None for an empty document. Raises DataError."""
        if not document:
            return None
        try:
            audit = Audit(
                site=str(document["site"]),
                epsilon=float(document["epsilon"]),
                delta=float(document["delta"]),
                adjacency=str(document["adjacency"]),
                accountant=str(document["accountant"]),
                checks=tuple(_check(raw) for raw in document["checks"]),
                honest=int(document.get("honest", 0)),
                epsilon_alone=document.get("epsilon_alone"),
                unit=str(document.get("unit", "record")),
            )
            # Taken here, so that a damaged file is found before anything is drawn.
            _ = [check.cells for check in audit.checks]
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"audit.json is not what `fedpact audit` writes ({type(error).__name__}: {error}): "
                "remove it, or audit the folder again"
            ) from error
        return audit

    @property
    def claim(self) -> str:
        """(ε, δ) as it was claimed, with adjacency and accountant."""
        epsilon = format_epsilon(self.epsilon, self.epsilon_alone, self.honest)
        return (
            f"(ε, δ) = ({epsilon}, {upper(self.delta)}) of site {self.site} for one "
            f"{self.unit}, {self.adjacency}; accountant {self.accountant}"
        )

    @property
    def wrong(self) -> bool:
        """Whether the claim is contradicted."""
        return any(check.wrong for check in self.checks)

    @property
    def most(self) -> AuditRow | None:
        """The largest lower bound on ε at the claim's own δ; None where none was sought."""
        found = [c for c in self.checks if c.quantity == "ε" and c.delta == self.delta]
        return max(found, key=lambda check: check.bound, default=None)


def _check(raw: Mapping[str, Any]) -> AuditRow:
    return AuditRow(
        method=str(raw["method"]),
        quantity=str(raw["quantity"]),
        bound=_number(raw["bound"]),
        claimed=_number(raw["claimed"]),
        delta=None if raw["delta"] is None else float(raw["delta"]),
        confidence=float(raw["confidence"]),
        found=str(raw["found"]),
        power=None if raw["power"] is None else float(raw["power"]),
    )


def _number(value: float | None) -> float:
    """null stands for an infinite number."""
    return math.inf if value is None else float(value)
