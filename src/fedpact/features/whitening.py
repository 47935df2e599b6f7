"""What whitens features: made images' mean and covariance, kept on disk as they take their time.

No record takes part in them, so what is kept is public. It is made of thousands of images however
few the records are: of large ones that is most of the work, and a model is asked again and again.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Final

import torch
from torch import Tensor

from fedpact.data.files import cache_dir
from fedpact.errors import DataError, ModelError
from fedpact.features import sealed

_SHRINKAGE: Final = 0.4
_MOST: Final = 8192


def whitening(key: str, kind: str, p: int, made: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
    """Return the mean [p] of made images' features and what whitens them [p, p], float32.

    Covariance Σ + (ρ tr Σ / p) I with ρ = 0.4; what whitens is the inverse of its Cholesky factor,
    which follows continuously from Σ, so machines that round in other ways agree.

    key: what they follow from, as a digest. made: returns made images' features [n, p].
    Raises ModelError: there are too many features for that.
    """
    if p > _MOST:
        raise ModelError(
            f"features.kind = {kind!r} finds {p} numbers in a record: expected at most {_MOST} "
            "with whiten = true; lower cells or filters, or set whiten = false"
        )
    of, held = bytes.fromhex(key), None
    # Without a directory to keep it in, as where nobody is at home, it is made each time.
    with suppress(DataError):
        held = sealed.load_tensors(cache_dir() / "whitening" / key, of)
    if held is None:
        mean, whitens = _of(made().double())
        # As it lies in memory, so that products with it round as they did.
        held = {"mean": mean, "whitens'": whitens.T}
        with suppress(DataError, OSError):
            sealed.store_tensors(cache_dir() / "whitening" / key, of, held)
    return held["mean"].clone(), held["whitens'"].clone().T


def _of(found: Tensor) -> tuple[Tensor, Tensor]:
    """Return both of features [n, p], float64, which are used up."""
    p, mean = found.shape[1], found.mean(0)
    found -= mean
    covariance = found.T @ found / len(found)
    ridge = _SHRINKAGE / p * covariance.trace()
    covariance.diagonal().add_(ridge)
    factor = torch.linalg.cholesky(covariance)
    eye = torch.eye(p, dtype=torch.float64)
    inverse = torch.linalg.solve_triangular(factor, eye, upper=False)
    return mean.float(), inverse.float()
