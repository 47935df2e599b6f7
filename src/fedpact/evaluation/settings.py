"""The [evaluation] table of a plan: which records are held out, and what is released of them.

    [evaluation]
    share = 0.2                of each site's records; 0: none, and nothing is released
    every = 10                 rounds; 0: once, of the last model
    epsilon = 1.0              (ε, δ) of a record that is held out, of all evaluations together
    delta = 1e-5
    releases = ["hits", "loss", "roc"]
                               []: nothing leaves a site, and each owner sees its own figures
    groups = "sex"             a column with declared categories: hits by group

All of it is public, the same at every party, and part of the plan.
"""

from typing import Final, Literal, Self

from pydantic import BaseModel, Field, model_validator

from fedpact.common.configuration import FROZEN
from fedpact.privacy.accounting.accountant import Accountant, Budget
from fedpact.privacy.terms import FullDataRelease

DECLARE: Final = (
    "To have it evaluated at the sites, declare [evaluation] share = 0.2 (of each site's records, "
    "which then are not trained on), epsilon and delta: sites release noisy counts of them; with "
    "releases = [] they release nothing, at no cost, and each site's owner alone sees its figures"
)
"""What is said where nothing is evaluated."""

ReleasedMeasure = Literal["hits", "loss", "roc", "false_positives"]


class EvaluationSettings(BaseModel):
    """Which records are held out of training, and what is released of them. See the module."""

    model_config = FROZEN
    share: float = Field(default=0.0, ge=0, lt=1)
    """The part of each site's records that is held out, 0 for none; each falls to one side by
    itself, so it is about so large."""
    every: int = Field(default=0, ge=0)
    """Rounds between evaluations, 0 for the last model only, which is evaluated in any case."""
    epsilon: float = Field(default=1.0, gt=0)
    """(ε, δ) of a record that is held out, of all evaluations together."""
    delta: float = Field(default=1e-5, gt=0, lt=1)
    """(ε, δ) of a record that is held out, of all evaluations together."""
    releases: list[ReleasedMeasure] = Field(default=["hits", "loss"])
    """hits, a table of hits and misses by class (and group); loss, the sum of losses, each
    clipped to loss_bound (with hits, which count the records); roc, scores by class, of two
    classes only; false_positives, misses by the class that was said (and group), of more than
    two classes, with hits."""
    loss_bound: float = Field(default=5.0, gt=0)
    """The most that one record's loss counts."""
    bins: int = Field(default=20, ge=2, le=1000)
    """Of roc, into how many bins scores are counted."""
    level: float = Field(default=0.95, gt=0, lt=1)
    """How often an interval covers what it is for."""
    groups: str | None = None
    """A column of [records] with categories, by which hits are told apart."""

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if not self.share and self != EvaluationSettings.model_construct():
            raise ValueError(
                "share = 0 with other settings: no record is held out, so nothing would be "
                "released; give share, as 0.2, or leave the table out"
            )
        if len(set(self.releases)) < len(self.releases):
            raise ValueError(f"releases = {self.releases}: expected each once")
        needing = {name: name in self.releases for name in ("loss", "false_positives")}
        for name, asked in {"groups": self.groups is not None, **needing}.items():
            if asked and self.releases and "hits" not in self.releases:
                raise ValueError(
                    f"{name} with releases = {self.releases}: it needs the table of hits, which "
                    'counts the records; add "hits", or leave it out'
                )
        return self

    @property
    def used(self) -> bool:
        """Whether records are held out."""
        return self.share > 0

    def check_ends(
        self, accuracy: float | None, patience: int | None, private: bool, rounds: int
    ) -> None:
        """Raise ValueError: an accuracy is to end a private run, and is not released on the way.

        accuracy, patience, rounds: of the plan (algorithms.common.limits.Limits).
        """
        early = accuracy is not None or patience is not None
        if not (early and private and self.used and self.releases):
            return
        told = f"budget.accuracy = {accuracy} and patience = {patience} with evaluation."
        if "hits" not in self.releases:
            raise ValueError(
                f"{told}releases = {self.releases}: there is no accuracy among them that could end "
                'the run; add "hits"'
            )
        if not 0 < self.every < rounds:
            raise ValueError(
                f"{told}every = {self.every} and rounds = {rounds}: the last model alone is "
                "evaluated, when there is nothing left to end; set evaluation.every = 1, or as "
                "many rounds as there are to be between evaluations"
            )

    def with_releases(self, releases: list[ReleasedMeasure]) -> "EvaluationSettings":
        """Return the same with other sums."""
        return self.model_copy(update={"releases": releases})

    def times(self, rounds: int) -> int:
        """Return how many evaluations a run of so many rounds has."""
        return -(-rounds // self.every) if self.every else 1

    def terms(self, rounds: int, spare: int, accountant: Accountant) -> FullDataRelease | None:
        """Return what a site releases in so many rounds, and as many evaluations more as are spare.

        None: nothing. Raises BudgetExhausted: no noise is enough for it.
        """
        if not self.used or not self.releases:
            return None
        times, bounds = self.times(rounds) + spare, dict.fromkeys(map(str, self.releases), 1.0)
        budget = Budget(self.epsilon, self.delta)
        return FullDataRelease.within("evaluation", bounds, times, budget, accountant)
