"""A site's policy: what its owner allows, whatever a server asks for. All else is refused.

The owner writes it as a TOML file; it never leaves the site. It is checked before any computation:
once when the site joins a run, and for every task.
"""

import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fedpact.common.configuration import plan_error
from fedpact.common.errors import PlanError, PolicyRefused
from fedpact.common.format import upper
from fedpact.privacy.accounting.accountant import Budget, add_budgets
from fedpact.privacy.guarantee import Guarantee
from fedpact.privacy.ledger.ledger import Ledger
from fedpact.privacy.terms import FullDataRelease, Terms

# Strict: a string or a truth value is not a number.
_Positive = Annotated[float, Field(gt=0, strict=True)]
_Share = Annotated[float, Field(gt=0, lt=1, strict=True)]


class Policy(BaseModel):
    """What a site's owner allows. A missing entry allows nothing."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )
    algorithms: tuple[str, ...]
    """Names of algorithms."""
    releases: tuple[str, ...]
    """Kinds of releases, such as "gradient"; "opening gradient" is that of the event that opens a
    round, "size" a noisy count of records. Unknown names allow nothing."""
    epsilon_per_run: _Positive
    """The most that one run may reserve."""
    delta_per_run: _Share
    """The most that one run may reserve."""
    epsilon_ever: _Positive
    """The most that all runs on this data set may reserve together, by basic composition."""
    delta_ever: _Share
    """The most that all runs on this data set may reserve together, by basic composition."""
    smallest_sigma: _Positive
    """The smallest noise multiplier of any single release; if sites share noise, of the site's own
    share."""
    honest: Annotated[int, Field(ge=0, strict=True)] = 0
    """The number of sites, including this one, that the owner trusts to add their shares of noise
    and keep them secret. A run that needs more is refused; by default, every run that needs any."""
    epsilon_alone_per_run: _Positive | None = None
    """The most that one run may reserve of the ε that trusts no other site; given with `honest`."""
    epsilon_alone_ever: _Positive | None = None
    """The most that all runs may reserve of the ε that trusts no site; given with `honest`."""
    approvals: Annotated[int, Field(ge=0, le=2, strict=True)] = 1
    """How many people with different names, 0 to 2, must sign (`fedpact deploy approve`) before a
    deployed site opens."""
    unit: Literal["record", "person"] = "record"
    """What all (ε, δ) protect, under adding or removing one: "record", or "person" with all
    records. A run with the other unit is refused, as neither ε follows from the other."""
    evaluation_epsilon_per_run: _Positive | None = None
    """The most ε that one run's evaluations may reserve, for a held-out record (or person);
    without it, no evaluation is released. The larger ε of a run and its evaluations counts for
    `epsilon_ever`."""
    evaluation_delta_per_run: _Share | None = None
    """The most δ that one run's evaluations may reserve, for a held-out record (or person);
    without it, no evaluation is released. The larger δ of a run and its evaluations counts for
    `delta_ever`."""

    @model_validator(mode="after")
    def _both(self) -> Self:
        given = {self.epsilon_alone_per_run is not None, self.epsilon_alone_ever is not None}
        if given != {self.honest > 0}:
            raise ValueError(
                f"honest = {self.honest}, epsilon_alone_per_run = {self.epsilon_alone_per_run}, "
                f"epsilon_alone_ever = {self.epsilon_alone_ever}: expected all three or none"
            )
        if (self.evaluation_epsilon_per_run is None) != (self.evaluation_delta_per_run is None):
            raise ValueError(
                f"evaluation_epsilon_per_run = {self.evaluation_epsilon_per_run}, "
                f"evaluation_delta_per_run = {self.evaluation_delta_per_run}: expected both or none"
            )
        return self

    @staticmethod
    def parse(raw: Any) -> "Policy":
        """Return the policy of a parsed file. Raises PlanError: missing or unknown entries."""
        try:
            return Policy.model_validate(raw)
        except ValidationError as error:
            raise PlanError(
                f"the site's policy is incomplete or invalid, so nothing is allowed: "
                f"{plan_error(error, (), Policy)}; expected {', '.join(Policy.model_fields)}"
            ) from None

    @staticmethod
    def read(path: Path) -> "Policy":
        """Read a site's policy.toml. Raises PlanError: an unreadable policy allows nothing."""
        try:
            return Policy.parse(tomllib.loads(path.read_text(encoding="utf-8-sig")))
        except (OSError, ValueError) as error:  # no TOML, or no UTF-8
            raise PlanError(
                f"policy {path} cannot be read ({error}): a site without a readable policy takes "
                "part in no run"
            ) from None

    def check_task(self, algorithm: str) -> None:
        """Raise PolicyRefused for an algorithm that the policy does not name."""
        if algorithm not in self.algorithms:
            raise PolicyRefused(
                f"algorithm {algorithm!r} is not allowed here: the site's policy names "
                f"{', '.join(self.algorithms) or 'none'}"
            )

    def check_run(
        self,
        algorithm: str,
        terms: Terms | None,
        reserved: tuple[float, float],
        reserved_alone: float | None = None,
        evaluation: FullDataRelease | None = None,
    ) -> None:
        """Raise PolicyRefused for terms that the policy does not allow.

        terms: None for a plain run, which no policy allows. reserved: (Σ ε, Σ δ) of earlier runs;
        reserved_alone: the Σ ε that trusts no other site, if it differs. evaluation: what the run
        releases about held-out records.
        """
        self.check_task(algorithm)
        if terms is None:
            raise PolicyRefused(
                "a run without privacy is not allowed here: a site with a policy takes part in "
                "private runs only"
            )
        if terms.protects != self.unit:
            raise PolicyRefused(
                f"the run's ε is per {terms.protects} ({terms.adjacency}), but the site's policy "
                f'is per {self.unit}: to allow it, the owner sets unit = "{terms.protects}", with '
                "bounds for that unit"
            )
        releases = terms.releases | (evaluation.releases if evaluation else {})
        unnamed = sorted(set(releases) - set(self.releases))
        if unnamed:
            raise PolicyRefused(
                f"releases {', '.join(unnamed)} are not allowed here: the site's policy names "
                f"{', '.join(self.releases) or 'none'}"
            )
        least = min(releases.values())
        _at_most("sigma", least, "smallest_sigma", self.smallest_sigma, least=True)
        _at_most("epsilon", terms.budget.epsilon, "epsilon_per_run", self.epsilon_per_run)
        _at_most("delta", terms.budget.delta, "delta_per_run", self.delta_per_run)
        # A record is either trained on or held out, so only one of the two budgets applies to it.
        own = [terms.budget, *([self._evaluation_budget(evaluation)] if evaluation else [])]
        epsilon = add_budgets([reserved[0], max(each.epsilon for each in own)])
        delta = add_budgets([reserved[1], max(each.delta for each in own)])
        larger = " with the larger one of the run's training and evaluations" * bool(evaluation)
        _at_most(f"epsilon{larger}", epsilon, "epsilon_ever", self.epsilon_ever)
        _at_most(f"delta{larger}", delta, "delta_ever", self.delta_ever)
        self._check_alone(terms, reserved[0] if reserved_alone is None else reserved_alone)

    def _evaluation_budget(self, evaluation: FullDataRelease) -> Budget:
        """Return what evaluations may cost. Raises PolicyRefused: more than the policy allows."""
        most = self.evaluation_epsilon_per_run, self.evaluation_delta_per_run
        if most[0] is None or most[1] is None:
            raise PolicyRefused(
                f"evaluations at (ε, δ) = ({upper(evaluation.budget.epsilon)}, "
                f"{upper(evaluation.budget.delta)}) are not allowed here: the site's policy has no "
                "evaluation_epsilon_per_run and evaluation_delta_per_run"
            )
        epsilon, delta = evaluation.budget.epsilon, evaluation.budget.delta
        _at_most("evaluation epsilon", epsilon, "evaluation_epsilon_per_run", most[0])
        _at_most("evaluation delta", delta, "evaluation_delta_per_run", most[1])
        return evaluation.budget

    def counted(self, of: Guarantee) -> float:
        """Return the ε of a run that counts for the owner."""
        return of.counted(self.honest)

    def _check_alone(self, terms: Terms, reserved: float) -> None:
        """Raise PolicyRefused for a run that needs more honest sites than the owner trusts."""
        if terms.honest > self.honest:
            raise PolicyRefused(
                f"the run's ε = {upper(terms.budget.epsilon)} needs the noise of {terms.honest} "
                f"honest sites (ε = {upper(terms.guarantee.alone)} without): the site's policy has "
                f"honest = {self.honest}; to allow it, the owner sets honest = {terms.honest}, "
                "epsilon_alone_per_run and epsilon_alone_ever"
            )
        per_run, ever = self.epsilon_alone_per_run, self.epsilon_alone_ever
        if per_run is not None and ever is not None:
            alone = terms.guarantee.alone
            _at_most("epsilon_alone", alone, "epsilon_alone_per_run", per_run)
            _at_most("epsilon_alone", add_budgets([reserved, alone]), "epsilon_alone_ever", ever)


_SHARED = """
# The run's sites share noise out: its epsilon = {0.epsilon!r} holds if at least {0.honest} of the
# sites in each sum, this one too, add their noise and keep it secret. Otherwise it is {0.alone!r}.
# Only the owner can decide to rely on the others: the site takes part once these lines count.
# honest = {0.honest}
# epsilon_alone_per_run = {0.alone!r}
# epsilon_alone_ever = {0.alone!r}
"""


def shared_noise_lines(of: Guarantee) -> str:
    """Return a policy's lines on shared noise, commented out; "" if a run needs none of them."""
    return _SHARED.format(of) if of.honest else ""


def sum_reservations(ledger: Ledger, run: str, policy: Policy) -> tuple[tuple[float, float], float]:
    """Return (Σ ε, Σ δ) of a ledger's other runs under a policy, and Σ ε that trusts no other site.

    A run that needs more honest sites than the policy trusts counts as if no other site were
    honest.
    """
    counted = ledger.total(without=run, trusted=policy.honest)
    return counted, ledger.total(without=run, trusted=0)[0]


def _at_most(name: str, value: float, bound: str, limit: float, *, least: bool = False) -> None:
    """Raise PolicyRefused for a value above a limit; least: below it. NaN is refused."""
    if not (value >= limit if least else value <= limit):
        raise PolicyRefused(
            f"{name} would be {value:.15g}: the site's policy has {bound} = {limit:.15g}, which "
            "its owner alone may change"
        )
