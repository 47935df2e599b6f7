"""The outcome of `fedpact audit`, as in audit.json."""

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, TypeAdapter
from pydantic.dataclasses import dataclass

from fedpact.common.errors import DataError
from fedpact.common.format import lower, upper
from fedpact.common.records import strict
from fedpact.privacy.guarantee import Guarantee

# How each quantity is written: measured, then claimed.
_MEASURED_CLAIMED: Final = {
    "ε": ("ε ≥ {}", "ε ≤ {}"),
    "σ": ("σ ≤ {}", "σ = {}"),
    "p": ("p = {}", "p ≥ {}"),
    "Δ": ("Δ = {}", "Δ ≤ {}"),
}
# JSON has null for an infinite number.
_Bound = Annotated[float, BeforeValidator(lambda value: math.inf if value is None else value)]


@dataclass(frozen=True)
class AuditRow:
    """A measured bound and the claimed value.

    quantity: "ε" at `delta`, bounded from below; "σ", a channel's noise multiplier, from above;
    "p" of a test of the mechanism, with its level as the claim; "Δ", a record's largest change of a
    channel's sum relative to its sensitivity, exact.
    confidence: of the bound. found: how it was found. power: the bound that the best attack would
    show if the mechanism is exactly as claimed (a smaller bound is no evidence of privacy); None
    for tests.
    """

    method: str
    quantity: Literal["ε", "σ", "p", "Δ"]
    bound: _Bound
    claimed: _Bound
    delta: float | None
    confidence: float
    found: str
    power: float | None = None

    @property
    def passed(self) -> bool:
        """Whether the claim stands; false if one of the two is NaN."""
        above = self.quantity in ("σ", "p")
        return self.claimed <= self.bound if above else self.bound <= self.claimed

    @property
    def text(self) -> str:
        """One line for a terminal."""
        if self.quantity == "Δ":
            return self.found
        measured, best, claimed, delta, _ = self.cells
        best = f", at best {best}" if self.power is not None else ""
        at = f" at δ = {delta}" if self.delta is not None else ""
        return f"{measured}{best}, claimed {claimed}{at}: {self.found}"

    def document(self) -> dict[str, Any]:
        """Return it as plain data for JSON; numbers that are not finite become null."""
        return {**strict(asdict(self)), "passed": self.passed}

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
    """The content of audit.json: the claim of one site, and the checks."""

    site: str
    guarantee: Guarantee
    adjacency: str
    accountant: str
    checks: tuple[AuditRow, ...]
    unit: str = "record"

    @property
    def claim(self) -> str:
        """(ε, δ) as it was claimed, with adjacency and accountant."""
        of = self.guarantee
        return (
            f"(ε, δ) = ({of}, {upper(of.delta)}) of site {self.site} for one "
            f"{self.unit}, {self.adjacency}; accountant {self.accountant}"
        )

    @property
    def wrong(self) -> bool:
        """Whether the claim is contradicted."""
        return not all(check.passed for check in self.checks)

    @property
    def most(self) -> AuditRow | None:
        """The largest lower bound on ε at the claimed δ; None without any."""
        found = [c for c in self.checks if c.quantity == "ε" and c.delta == self.guarantee.delta]
        return max(found, key=lambda check: check.bound, default=None)


def read_audit(document: Mapping[str, Any]) -> Audit:
    """Parse audit.json. Raises DataError: it is not what `fedpact audit` writes."""
    try:
        claimed = {"guarantee": Guarantee.read(document)}
        return TypeAdapter(Audit).validate_python({**document, **claimed})
    except (LookupError, TypeError, ValueError) as error:
        raise DataError(
            f"audit.json is not what `fedpact audit` writes ({type(error).__name__}: {error}): "
            "remove it, or audit the folder again"
        ) from error
