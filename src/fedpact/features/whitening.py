"""What whitens features: made images' mean and covariance, kept on disk as they take their time.

No record takes part in them, so what is kept is public. It is made of thousands of images however
few the records are: of large ones that is most of the work, and a model is asked again and again.
"""

import logging
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from fedpact.data.files import cache_dir
from fedpact.errors import ModelError
from fedpact.features import sealed

_SHRINKAGE: Final = 0.4
_MOST: Final = 8192

_logger = logging.getLogger("fedpact")


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
    path, of = cache_dir() / "whitening" / key, bytes.fromhex(key)
    held = sealed.read(path, of)
    if held is None:
        mean, whitens = _of(made().double())
        # As it lies in memory, so that products with it round as they did.
        held = {"mean": mean, "whitens'": whitens.T}
        try:
            sealed.write(path, of, held)
        except OSError as error:
            _logger.info("what whitens features is not kept: %s", error)
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
