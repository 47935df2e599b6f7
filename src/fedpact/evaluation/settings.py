"""The [evaluation] table of a plan: which records are held out, and what is released of them.

All of it is public and the same at every party.
"""

import math
from typing import Final, Literal, Self

from pydantic import BaseModel, Field, model_validator

from fedpact.common.configuration import FROZEN
from fedpact.privacy.accounting.accountant import Accountant, Budget
from fedpact.privacy.terms import FullDataRelease

DECLARE: Final = (
    "To evaluate the model at the sites, declare [evaluation] share = 0.2 (of each site's records, "
    "which then are not trained on), epsilon and delta: sites release noisy counts of them; with "
    "releases = [] they release nothing, at no cost, and each site's owner alone sees its figures"
)
OWNERS_ONLY: Final = (
    "Sites hold out records and release nothing about them (evaluation.releases = []): "
    "`fedpact deploy status SITE_DIRECTORY` shows a site's owner its own figures"
)

ReleasedMeasure = Literal["hits", "loss", "roc", "false_positives"]


class EvaluationSettings(BaseModel):
    """Which records are held out of training, and what is released about them."""

    model_config = FROZEN
    share: float = Field(default=0.0, ge=0, lt=1)
    """The approximate share of each site's records that is held out, 0 for none; each record is
    assigned independently."""
    every: int = Field(default=0, ge=0)
    """Rounds between evaluations, 0 for the last model only, which is always evaluated."""
    epsilon: float = Field(default=1.0, gt=0)
    """(ε, δ) of a held-out record, for all evaluations together."""
    delta: float = Field(default=1e-5, gt=0, lt=1)
    """(ε, δ) of a held-out record, for all evaluations together."""
    releases: list[ReleasedMeasure] = Field(default=["hits", "loss"])
    """hits: hits and misses by class (and group); loss: the sum of losses, each clipped to
    loss_bound (needs hits, which count the records); roc: scores by class, for two classes;
    false_positives: misses by predicted class (and group), for more than two classes, needs
    hits. []: nothing leaves a site, and each owner sees its own figures."""
    loss_bound: float = Field(default=5.0, gt=0)
    """The largest loss that one record counts with."""
    bins: int = Field(default=20, ge=2, le=1000)
    """The number of bins of scores in roc."""
    level: float = Field(default=0.95, gt=0, lt=1)
    """The coverage of the intervals."""
    groups: str | None = None
    """A column of [records] with categories: hits are counted by group."""

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

    @property
    def why_unreleased(self) -> str:
        """Why sites release no evaluations, and how they would."""
        return OWNERS_ONLY if self.used else DECLARE

    def check_ends(
        self, accuracy: float | None, patience: int | None, private: bool, rounds: int
    ) -> None:
        """Raise ValueError if early stopping needs an accuracy that is not released during the run.

        accuracy, patience, rounds: of the plan (common.run_settings.Limits).
        """
        early = accuracy is not None or patience is not None
        if not (early and private and self.used and self.releases):
            return
        told = f"budget.accuracy = {accuracy} and patience = {patience} with evaluation."
        if "hits" not in self.releases:
            raise ValueError(
                f"{told}releases = {self.releases}: no accuracy among them could end the run; add "
                '"hits"'
            )
        if not 0 < self.every < rounds:
            raise ValueError(
                f"{told}every = {self.every} and rounds = {rounds}: only the last model is "
                "evaluated, which is too late; set evaluation.every = 1, or to the number of "
                "rounds between evaluations"
            )

    def terms(self, rounds: int, spare: int, accountant: Accountant) -> FullDataRelease | None:
        """Return the terms of a site's evaluations in this many rounds; None: it releases nothing.

        spare: the number of additional evaluations. Raises BudgetExhausted: no noise is enough.
        """
        if not self.used or not self.releases:
            return None
        times = spare + (math.ceil(rounds / self.every) if self.every else 1)
        bounds = dict.fromkeys(map(str, self.releases), 1.0)
        budget = Budget(self.epsilon, self.delta)
        return FullDataRelease.within("evaluation", bounds, times, budget, accountant)
