"""What the exported forms have in common: a run's guarantee as one for all of its sites.

No site is named. Of a number of sites its class is told, "fewer than MIN_CELL_SITES" or "5 to 9",
and a cell of fewer is left out: who knows the sites could tell which it is.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from pydantic import ValidationError

from fedpact.configuration import override, plan_error
from fedpact.errors import PlanError
from fedpact.ledger.about import About
from fedpact.report.reading import RunFolder
from fedpact.text import format_epsilon, upper

MIN_CELL_SITES: Final = 5
"""Sites that a cell has at least."""

SIMULATED: Final = (
    "A SIMULATION, which protects nobody: its noise came from a seed. Every ε says what a "
    "deployment on these terms would guarantee."
)
_SECURE: Final = (
    "Secure aggregation: a server that follows the protocol sees weighted means over several sites "
    "and no single site's vector. Only an ε that is said to need honest sites relies on it."
)
PLAIN: Final = "NOT PRIVATE: no (ε, δ) guarantee of any kind."


def about_of(plan: Mapping[str, Any], changes: Sequence[str]) -> About:
    """Return a plan's [about] with `about.key=value` over it. Raises PlanError: another key."""
    raw = {"about": dict(plan.get("about", {}))}
    for change in changes:
        override(raw, change)
    if set(raw) != {"about"}:
        others = ", ".join(sorted(set(raw) - {"about"}))
        raise PlanError(
            f"--set {others}: a run that has been made is only described here; expected "
            "about.key=value, as in about.purpose=..."
        )
    try:
        return About.model_validate(raw["about"])
    except ValidationError as error:
        raise plan_error(error, ("about",), About) from None


@dataclass(frozen=True)
class Facts:
    """A run and what people say of it."""

    run: RunFolder
    about: About

    @property
    def name(self) -> str:
        """What the model is called."""
        return self.about.name or f"{self.run.plan['algorithm']} on {self.data}"

    @property
    def data(self) -> str:
        """The data set's name; of a file without the folders."""
        return str(self.run.plan["data"]).rpartition("/")[2]

    @property
    def many(self) -> str:
        """How many sites there are, as far as that is told."""
        return describe_count(len(self.run.sites))

    @property
    def covers(self) -> list[str]:
        """What the guarantee covers, without the numbers of sites in it."""
        lines = list(map(str, self.run.privacy["covers"]))
        kept = [line for line in lines if not re.search(r"threshold [\d,]+ of [\d,]+ sites", line)]
        return kept if len(kept) == len(lines) else [*kept, _SECURE]

    @property
    def training(self) -> str:
        """How the model came about, in a sentence."""
        plan, last = self.run.plan, self.run.last.round
        return (
            f"A {plan['model']} model, trained by federated learning ({plan['algorithm']}) with "
            f"{self.many}, {last:,} rounds. Records stayed at their sites, and each site enforced "
            "its own budget."
            if self.run.private
            else f"A {plan['model']} model, trained by federated learning ({plan['algorithm']}) "
            f"with {self.many}, {last:,} rounds, without privacy."
        )

    @cached_property
    def delta(self) -> float:
        """The largest δ that ε is stated at."""
        held = self.run.privacy.get("evaluation") or {}
        return max(*self._of_sites("delta"), float(held.get("delta", 0.0)))

    @cached_property
    def epsilon(self) -> float:
        """The largest ε that a site reserved, for whoever is trained on or held out."""
        held = self.run.privacy.get("evaluation") or {}
        return max(*self._of_sites("epsilon_reserved"), float(held.get("epsilon_reserved", 0.0)))

    @cached_property
    def epsilon_alone(self) -> float:
        """The same without any other site's noise: what holds whoever is honest."""
        return max(self.epsilon, *self._of_sites("epsilon_alone")) if self.honest else self.epsilon

    @property
    def honest(self) -> int:
        """Of how many sites of each sum `epsilon` needs the noise."""
        return int(self.run.privacy.get("honest", 0))

    @property
    def guarantee(self) -> str:
        """(ε, δ) in words, with unit, adjacency and accountant, rounded up."""
        privacy = self.run.privacy
        if not self.run.private:
            return PLAIN
        bound = format_epsilon(self.epsilon, self.epsilon_alone, self.honest)
        return (
            f"(ε, δ)-differential privacy per {privacy['unit']} of a site, at every site, with ε "
            f"at most {bound}, and δ = {upper(self.delta)}; adjacency: {privacy['adjacency']}; "
            f"accountant: {privacy['accountant']}. A person at two sites pays the sum of both."
        )

    @property
    def warnings(self) -> list[str]:
        """What has to be said first."""
        if not self.run.private:
            return [PLAIN]
        return [SIMULATED] if self.run.seeded else []

    def _of_sites(self, key: str) -> list[float]:
        """Return a figure of every site; what nobody knows may be anything."""
        found = [site.get(key) for site in self.run.privacy["sites"].values()]
        return [math.inf if value is None else float(value) for value in found] or [math.inf]


def describe_count(sites: int) -> str:
    """Return the class of a number of sites in words: the exact one would count what is left out.

    >>> describe_count(3), describe_count(5), describe_count(12), describe_count(1999)
    ('fewer than 5 sites', '5 to 9 sites', '10 to 19 sites', '1,000 to 1,999 sites')
    """
    if sites < MIN_CELL_SITES:
        return f"fewer than {MIN_CELL_SITES} sites"
    end = int(class_end(sites + 1))
    # Of 1, 2, 5, 10, ... two neighbours are a factor of 2 apart, or of 2.5.
    start = end * 2 // 5 if str(end)[0] == "5" else end // 2
    return f"{start:,} to {end - 1:,} sites"


def class_end(value: float) -> float:
    """Return the end of the class that a figure is in: the least of 1, 2, 5 times 10^k above it.

    >>> class_end(1.0), class_end(1.001), class_end(3e-5), class_end(0.0)
    (1.0, 2.0, 5e-05, 0.0)
    """
    if not 0 < value < math.inf:
        return value
    power = math.floor(math.log10(value))
    ends = (float(f"{digit}e{power + more}") for more in (-1, 0, 1, 2) for digit in (1, 2, 5))
    return next(end for end in ends if end >= value)


def one_line(parts: Iterable[str]) -> str:
    """Return sentences one after the other."""
    return " ".join(part.strip() for part in parts if part.strip())
