"""A run that ends early, by numbers that were released: what holds of it is what was reserved.

Whoever reads a released number and stops is within the reservation (post-processing). ε spent is of
what was charged, and no guarantee of its own: how long the run went depended on what it released.
Exact accuracies of records that somebody protects are no such numbers: a private run is
stopped by what its sites release of held-out records, or by a public test set.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from fedpact.errors import PlanError
from fedpact.evaluation.outcome import released_accuracy
from fedpact.evaluation.settings import EvaluationSettings
from fedpact.evaluation.totals import SumsForm
from fedpact.privacy.once import FullDataRelease
from fedpact.records.rounds import RoundRecord


@dataclass
class Early:
    """Whether a run has been good enough, or no better, for long enough.

    accuracy, patience: see control.limits.Limits. after: rounds up to this one are another
    reservation's. form, once: of what sites release of held-out records; without them a record's
    own accuracy counts, which is then public.
    """

    accuracy: float | None = None
    patience: int | None = None
    form: SumsForm | None = None
    once: FullDataRelease | None = None
    after: int = 0
    seen: list[float] = field(default_factory=list[float])

    def having_seen(self, records: Sequence[RoundRecord]) -> "Early":
        """Return it, with notice taken of a run's rounds so far."""
        self.see(records)
        return self

    def see(self, records: Sequence[RoundRecord]) -> None:
        """Take notice of rounds, in their order."""
        for record in records:
            found = record.accuracy
            if self.form is not None and self.once is not None:
                found = released_accuracy(record, self.form, self.once)
            if found is not None and record.round > self.after:
                self.seen.append(found)

    @property
    def status(self) -> str:
        """Why the run ends: "accuracy", "patience"; "" where it goes on."""
        wait, seen = self.patience, self.seen
        if self.accuracy is not None and seen and seen[-1] >= self.accuracy:
            return "accuracy"
        if wait is not None and len(seen) > wait and max(seen[-wait:]) <= max(seen[:-wait]):
            return "patience"
        return ""


def check_public(
    early: bool, private: bool, evaluation: EvaluationSettings, *, test: bool, held: bool
) -> None:
    """Raise PlanError: a run is to be stopped by a number that nobody has, or has released.

    early: whether an accuracy may end the run. test: there is a public test set that the shared
    model is tried on. held: there are held-out records, of which a plain run has the accuracy.
    """
    if not early or test or (private and evaluation.used and evaluation.releases):
        return
    told = "budget.accuracy or budget.patience in a"
    if private and evaluation.used:
        raise PlanError(
            f"{told} private run with evaluation.releases = [] and without a public test set: of "
            "the records that are held out nothing is released that it could be stopped by; set "
            'evaluation.releases = ["hits"], and evaluation.every = 1'
        )
    if private:
        raise PlanError(
            f"{told} private run without [evaluation] and without a public test set: no accuracy "
            "is released that it could be stopped by; declare [evaluation] share = 0.2, every = 1"
        )
    if not held:
        raise PlanError(
            f"{told} run without held-out records and without a public test set: no accuracy is "
            "known that it could be stopped by; set partition.held_out = 0.1"
        )
