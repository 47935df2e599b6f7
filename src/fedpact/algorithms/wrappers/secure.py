"""Secure aggregation as a part of a plan: whether a method's update can do with a sum.

The protocol is simulation.secure_aggregation; what it protects stands in
docs/notes/secure-aggregation.md.
"""

from pydantic import BaseModel, Field

from fedpact.algorithms.wrappers.base import Method
from fedpact.common.configuration import FROZEN
from fedpact.common.errors import PlanError


class SecureSettings(BaseModel):
    """Whether the server sees sums over sites only."""

    model_config = FROZEN
    threshold: int = Field(default=0, ge=0)
    """t, how many sites have to stay to the end of a round, more than half of all and at least
    2; 0 leaves secure aggregation out."""

    def check_sites(self, count: int) -> None:
        """Raise PlanError: a threshold that `count` sites cannot have."""
        threshold = self.threshold
        if threshold and not (2 <= threshold <= count < 2 * threshold):
            raise PlanError(
                f"secure_aggregation.threshold = {threshold} with {count} sites: expected at least "
                "2, more than half of the sites, and at most all of them; with less, two halves of "
                "them could open both secrets of a site"
            )


def check_summed(method: Method) -> None:
    """Raise PlanError: the update of a method needs more of the replies than their sum."""
    why_not = method.facts.summed.why_not
    if why_not:
        raise PlanError(
            f"[secure_aggregation] cannot be combined with these settings of algorithm = "
            f"{method.name!r}: {why_not}; leave the table out, or change the settings"
        )
