"""What one use of a parameter contributes to its per-sample gradients; see gradients.

docs/notes/proofs.md proves how far one record moves a sum. It assumes of the code that
* products in float32 run over at most TOGETHER records, and sums over at most IN_FLOAT32;
* where c is float64, so are all products.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

TOGETHER = 128
"""So many records' terms float32 may add in one product; docs/notes/proofs.md has why."""

IN_FLOAT32 = 512
"""Up to so many records float32 sums; more are summed in float64 and rounded once."""

PARTIAL_SUMS = 16
"""Float32 adds up so many passes' sums at most."""


@dataclass(frozen=True)
class Part:
    """Of one parameter: squares [P] is ‖G_j‖²; add(c [P], good, view) adds Σ_j c_j G_j.

    good [P]: the slots to add, c is 0 elsewhere; None where the numbers of all slots are finite. 0
    times infinity is not a number, so the others' gradients are set to 0 first. view: the
    parameter's place in the total, of c's type. Squares that underflow may be too small: below
    norms.least_square they count as that.
    """

    squares: Tensor
    add: Callable[[Tensor, Tensor | None, Tensor], None]


@dataclass(frozen=True)
class Measured:
    """One pass: losses [P] and ‖g_j‖ [P] in float64; of empty slots they are anything.

    add(c, good, total) adds Σ_j c_j g_j to total [d], for c [P] of its type; good: see Part.
    factors: whatever the sum is made of, each [P, ...].
    """

    losses: Tensor
    norms: Tensor
    add: Callable[[Tensor, Tensor | None, Tensor], None]
    factors: Callable[[], list[Tensor]]


class Share(ABC):
    """What one use of a parameter contributes to its per-sample gradients.

    batch: B. size: numbers in one gradient. like: a tensor of the type and on the device of these.
    most: the most records to make gradients of at a time.
    """

    def __init__(self, batch: int, size: int, like: Tensor, most: int = TOGETHER) -> None:
        self.batch, self.size, self.like, self.most = batch, size, like, min(most, TOGETHER)

    @abstractmethod
    def rows(self, chunk: slice) -> Tensor:
        """The gradients [n, size] of the records in the chunk."""

    def minus(self, other: "Share") -> "list[Share]":
        """Shares whose sum is this one less another one of the same parameter."""
        return [self, Mapped(other, torch.neg, other.size)]

    @property
    def nbytes(self) -> int:
        """Bytes of one gradient."""
        return self.size * self.like.element_size()

    def quick_rows(self, chunk: slice) -> Tensor:
        """The same rows in the order that is fastest to compute; see arrange."""
        return self.rows(chunk)

    def factors(self) -> list[Tensor]:
        """What the gradients are computed from, each [B, ...], to compare passes bit for bit."""
        return [self.rows(slice(0, self.batch))]

    def arrange(self, total: Tensor) -> Tensor:
        """Return a sum of quick rows [..., size] in the parameter's own order."""
        return total

    def special(self) -> Part | None:
        """Return a faster way to measure and sum, without rows; None if there is none."""
        return None


class Mapped(Share):
    """Gradients that are a linear function of those of another share, record by record.

    function: rows [n, ...] of the other share -> rows [n, size].
    """

    def __init__(self, share: Share, function: Callable[[Tensor], Tensor], size: int) -> None:
        super().__init__(share.batch, size, share.like, share.most)
        self._share, self._function = share, function

    def rows(self, chunk: slice) -> Tensor:
        """See Share."""
        return self._function(self._share.rows(chunk))


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one form are the same memory.

    The numbers are not compared: one record's would then decide how the others are summed.
    """
    return a is b or (a.data_ptr() == b.data_ptr() and a.stride() == b.stride())
