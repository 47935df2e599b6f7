"""An oracle around another one, and a batch around another one: all is forwarded.

A subclass overrides what it changes, so a new question to the oracle is forwarded in one place.
"""

from collections.abc import Iterator, Mapping

from torch import Tensor

from fedpact.persample.weighting import UNIFORM, Weighting
from fedpact.privacy.batches import Batch
from fedpact.privacy.columns import Means
from fedpact.privacy.oracle import Oracle


class BatchAround:
    """See Batch."""

    def __init__(self, inner: Batch) -> None:
        self._inner = inner

    @property
    def noise_variance(self) -> float:
        """See Batch."""
        return self._inner.noise_variance

    def gradient(self, w: Tensor, weighting: Weighting = UNIFORM) -> Tensor:
        """See Batch."""
        return self._inner.gradient(w, weighting)

    def difference(self, w: Tensor, anchor: Tensor, bound: float) -> Tensor:
        """See Batch."""
        return self._inner.difference(w, anchor, bound)

    def loss(self, w: Tensor, bound: float) -> float:
        """See Batch."""
        return self._inner.loss(w, bound)

    def below(self, w: Tensor, bound: float) -> float:
        """See Batch."""
        return self._inner.below(w, bound)


class OracleAround:
    """See Oracle."""

    def __init__(self, inner: Oracle) -> None:
        self._inner = inner

    @property
    def batch_size(self) -> float:
        """See Oracle."""
        return self._inner.batch_size

    @property
    def noise_variance(self) -> float:
        """See Oracle."""
        return self._inner.noise_variance

    @property
    def steps_left(self) -> float:
        """See Oracle."""
        return self._inner.steps_left

    @property
    def shares(self) -> Mapping[str, Tensor]:
        """See Oracle."""
        return self._inner.shares

    def columns(self) -> Means:
        """See Oracle."""
        return self._inner.columns()

    def unprotected(self, w: Tensor) -> tuple[float, Tensor]:
        """See Oracle."""
        return self._inner.unprotected(w)

    def opening(self, *channels: str) -> Batch:
        """See Oracle."""
        return self._inner.opening(*channels)

    def batches(self, count: int, *channels: str) -> Iterator[Batch]:
        """See Oracle."""
        return self._inner.batches(count, *channels)
