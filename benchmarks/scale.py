"""How large a benchmark is: in full, quick, or at the tiniest size at which the code runs."""

from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Scale:
    """repetitions: turns of a timing. rounds: of a federated run. tiny: made-up miniature sizes."""

    repetitions: int
    rounds: int
    tiny: bool = False
    quick: bool = False

    def of(self, full: T, tiny: T) -> T:
        """Return the one or the other size."""
        return tiny if self.tiny else full


FULL = Scale(repetitions=15, rounds=8)
QUICK = Scale(repetitions=5, rounds=3, quick=True)
TINY = Scale(repetitions=1, rounds=1, tiny=True, quick=True)
