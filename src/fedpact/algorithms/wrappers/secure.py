"""The [secure_aggregation] table of a plan, and whether a method's update can work with a sum.

The protocol is in simulation.secure_aggregation; docs/notes/secure-aggregation.md says what it
protects.
"""

from pydantic import BaseModel, Field

from fedpact.algorithms.wrappers.base import Method
from fedpact.common.configuration import FROZEN
from fedpact.common.errors import PlanError


class SecureSettings(BaseModel):
    """Whether the server only sees sums over sites."""

    model_config = FROZEN
    threshold: int = Field(default=0, ge=0)
    """t, the number of sites that must stay until the end of a round: more than half of all and at
    least 2; 0 for no secure aggregation."""

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
    """Raise PlanError if the update of a method needs more than the sum of the replies."""
    why_not = method.facts.summed.why_not
    if why_not:
        raise PlanError(
            f"[secure_aggregation] cannot be combined with these settings of algorithm = "
            f"{method.name!r}: {why_not}; leave the table out, or change the settings"
        )
