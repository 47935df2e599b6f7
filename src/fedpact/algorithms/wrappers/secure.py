"""The [secure_aggregation] table of a plan.

The protocol is in simulation.secure_aggregation; docs/notes/secure-aggregation.md says what it
protects.
"""

from pydantic import BaseModel, Field

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
