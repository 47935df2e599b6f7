"""What is asked of a run's folder here; `report.reading.RunFolder` has it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from fedpact.messages import RoundRecord


class SiteFacts(Protocol):
    """A site's terms in a private run."""

    @property
    def size(self) -> float:
        """N, declared or released."""
        ...

    @property
    def rate(self) -> float:
        """q, each record's chance to be in a batch."""
        ...

    @property
    def clip(self) -> float:
        """C, the gradient's bound."""
        ...

    @property
    def sigmas(self) -> Mapping[str, float]:
        """Channel -> noise over that channel's bound."""
        ...


class RunFacts(Protocol):
    """A run as its folder tells it."""

    @property
    def path(self) -> Path:
        """The run's folder."""
        ...

    @property
    def plan(self) -> Mapping[str, Any]:
        """The content of plan.json."""
        ...

    @property
    def privacy(self) -> Mapping[str, Any]:
        """privacy.json."""
        ...

    @property
    def summary(self) -> Mapping[str, Any]:
        """summary.json; empty before the run has ended."""
        ...

    @property
    def records(self) -> Sequence[RoundRecord]:
        """The rounds so far, round 0 first."""
        ...

    @property
    def private(self) -> bool:
        """Whether the sites' terms protect the run."""
        ...

    @property
    def bytes(self) -> tuple[int, int]:
        """What was sent to the sites, and by them."""
        ...

    @property
    def site_privacy(self) -> Mapping[str, SiteFacts]:
        """Each site's terms; empty in a plain run."""
        ...
