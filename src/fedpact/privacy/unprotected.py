"""Exact numbers over all records of a site, which protect nobody."""

from torch import Tensor

from fedpact.privacy.kernel import PlainKernel

_SLICE = 512


def mean_over(kernel: PlainKernel, x: Tensor, y: Tensor, w: Tensor) -> tuple[float, Tensor]:
    """Return the mean loss of the records x, y [n, ...] at w [d], and its gradient [d].

    Without records both are 0. The model is left at w.
    """
    kernel.model.load(w)
    loss, gradient = 0.0, w.new_zeros(len(w))
    for rows in (slice(i, i + _SLICE) for i in range(0, len(y), _SLICE)):
        # Copies, as in every batch: a model may write over its input.
        loss += float(kernel.losses(x[rows].clone(), y[rows]).double().sum())
        gradient += kernel.weighted_sum(x[rows].clone(), y[rows])
    count = max(len(y), 1)
    return loss / count, gradient / count
