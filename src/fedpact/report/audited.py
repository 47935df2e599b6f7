"""What `fedpact audit` found of a run, as its folder's audit.json has it."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, TypeAdapter
from pydantic.dataclasses import dataclass

from fedpact.common.errors import DataError
from fedpact.common.format import format_epsilon, lower, upper

# How a quantity of an audit is written: measured, then claimed.
_MEASURED_CLAIMED: Final = {
    "ε": ("ε ≥ {}", "ε ≤ {}"),
    "σ": ("σ ≤ {}", "σ = {}"),
    "p": ("p = {}", "p ≥ {}"),
    "AUC": ("AUC ≥ {}", "AUC ≤ {}"),
    "Δ": ("Δ = {}", "Δ ≤ {}"),
}
# JSON has null for an infinite number.
_Bound = Annotated[float, BeforeValidator(lambda value: math.inf if value is None else value)]


@dataclass(frozen=True)
class AuditRow:
    """One bound that was measured, and what the accountant states of the same.

    quantity: "ε" at `delta` or "AUC", bounded from below; "σ", a noise multiplier, from above;
    "p", of a test of the mechanism, beside its level; "Δ", how far a record moved a channel's sum,
    relative to its sensitivity. power: the bound that the best attack would show, were all as
    claimed; None of a test.
    """

    method: str
    quantity: Literal["ε", "σ", "p", "AUC", "Δ"]
    bound: _Bound
    claimed: _Bound
    delta: float | None
    confidence: float
    found: str
    power: float | None

    @property
    def wrong(self) -> bool:
        """Whether the numbers contradict each other, whatever else the file says of them."""
        above = self.quantity in ("σ", "p")
        return not (self.claimed <= self.bound if above else self.bound <= self.claimed)

    @property
    def cells(self) -> tuple[str, ...]:
        """Measured, at best, claimed, δ and confidence as text."""
        measured, claimed = _MEASURED_CLAIMED[self.quantity]
        write = upper if self.quantity in ("σ", "Δ") else lower
        digits = 6 if self.quantity == "Δ" else 4
        return (
            measured.format(write(self.bound, digits)),
            "–" if self.power is None else measured.format(write(self.power)),
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


def read_audit(document: Mapping[str, Any]) -> Audit:
    """Return what audit.json holds. Raises DataError: it is not what `fedpact audit` writes."""
    try:
        return TypeAdapter(Audit).validate_python(document)
    except ValueError as error:
        raise DataError(
            f"audit.json is not what `fedpact audit` writes ({type(error).__name__}: {error}): "
            "remove it, or audit the folder again"
        ) from error
