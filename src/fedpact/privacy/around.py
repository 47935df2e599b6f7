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
    """A batch that passes every call on to another; a subclass changes some."""

    def __init__(self, inner: Batch) -> None:
        self._inner = inner

    @property
    def noise_variance(self) -> float:
        """The variance of a gradient's noise in each coordinate, public; 0 in a plain run."""
        return self._inner.noise_variance

    def gradient(self, w: Tensor, weighting: Weighting = UNIFORM) -> Tensor:
        """Return the mean weighted gradient at w: [d] -> [d], which the caller may write over."""
        return self._inner.gradient(w, weighting)

    def difference(self, w: Tensor, anchor: Tensor, bound: float) -> Tensor:
        """Return the mean of ∇ℓ_j(w) - ∇ℓ_j(anchor), each clipped to `bound`: [d], [d] -> [d]."""
        return self._inner.difference(w, anchor, bound)

    def loss(self, w: Tensor, bound: float) -> float:
        """Return the mean of the losses at w [d], each clipped to [0, bound]."""
        return self._inner.loss(w, bound)

    def below(self, w: Tensor, bound: float) -> float:
        """Return the share of records with a loss of at most bound at w [d]; may leave [0, 1]."""
        return self._inner.below(w, bound)


class OracleWrapper:
    """An oracle that passes every call on to another; a subclass changes some."""

    def __init__(self, inner: Oracle) -> None:
        self._inner = inner

    @property
    def batch_size(self) -> float:
        """The expected batch size q_i N_i, a public number."""
        return self._inner.batch_size

    @property
    def noise_variance(self) -> float:
        """The variance of a gradient's noise in each coordinate, public; 0 in a plain run."""
        return self._inner.noise_variance

    @property
    def steps_left(self) -> float:
        """How many batches the site's reservation still allows, public; inf in a plain run."""
        return self._inner.steps_left

    @property
    def shares(self) -> Mapping[str, Tensor]:
        """What was released with a share of noise: channel -> int64 [d], on the terms' grid."""
        return self._inner.shares

    def columns(self) -> Means:
        """Return what scales the site's columns, once, before the first round."""
        return self._inner.columns()

    def unprotected(self, w: Tensor) -> tuple[float, Tensor]:
        """Return F_i(w) and ∇F_i(w) [d] over all records, exact: no clip, no noise, no charge."""
        return self._inner.unprotected(w)

    def opening(self, *channels: str) -> Batch:
        """Return the batch that opens a round, of the rate that the algorithm's Opening names."""
        return self._inner.opening(*channels)

    def batches(self, count: int, *channels: str) -> Iterator[Batch]:
        """Yield `count` batches that answer the channels; each is closed by the next one."""
        return self._inner.batches(count, *channels)
