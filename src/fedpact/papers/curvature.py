"""Estimates of FedProxVR's L, λ and σ̄² from gradients or Hessian-vector products. Unprotected.

Assumption 1 of the paper asks for one L, λ and σ_n at every w; what is seen here is a few points,
so L and λ are estimated from below and σ̄² for those points only. σ̄² has no bound where the global
gradient vanishes and the sites' do not (docs/errata.md, V5): it grows as a run converges.

    L    max over records i of ‖∇²f_i(w)‖                  spectra of single records' losses
    λ    max(0, max over sites n of -λ_min(∇²F_n(w)))      spectra of whole sites' losses
    σ̄²   Σ p_n ‖∇F_n(w) - ∇F(w)‖² / ‖∇F(w)‖²

All of them are exact numbers of the records. They have no (ε, δ): use them on data of your own or
public data, never as a message of a site.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedpact import check
from fedpact.errors import InputError

Vector = NDArray[np.float64]
Product = Callable[[Vector], Vector]
"""v [d] -> Hv [d], for a symmetric H."""

_SHARES = (5.0, 95.0)  # percentiles of a bootstrap interval


@dataclass(frozen=True)
class Estimate:
    """A number and its spread: the 5 % and 95 % points of a bootstrap over the parts.

    parts: what each site or record says for itself. The interval is of as many parts drawn from
    these, and need not hold the value: of a maximum `high` is never above it, and a mean over sites
    drawn twice cancels less, so that σ̄² comes out smaller.
    """

    value: float
    low: float
    high: float
    parts: tuple[float, ...]


@dataclass(frozen=True)
class Spectrum:
    """The ends of a symmetric operator's spectrum from inside: Ritz values, low <= high.

    residual: some eigenvalue is within this distance of each end, 0 where the ends are exact.
    """

    low: float
    high: float
    residual: float


def spectrum(
    product: Product, dimension: int, draws: np.random.Generator, iterations: int = 30
) -> Spectrum:
    """Return the ends of the spectrum by Lanczos' method with full reorthogonalisation.

    From a random start the ends of a wide spectrum are found first; with iterations >= dimension
    they are exact. Raises InputError: a product that is not finite or has another shape.

    >>> diagonal = np.array([-1.0, 0.5, 2.0, 7.0])
    >>> found = spectrum(lambda v: diagonal * v, 4, np.random.default_rng(0))
    >>> round(found.low, 9), round(found.high, 9)
    (-1.0, 7.0)
    """
    check.count(dimension=dimension)
    steps = min(check.count(iterations=iterations), dimension)
    start = draws.standard_normal(dimension)
    basis = np.zeros((steps, dimension))
    basis[0] = start / np.linalg.norm(start)
    diagonal, beside = np.zeros(steps), np.zeros(steps)
    for k in range(steps):
        image = np.asarray(product(basis[k]), dtype=np.float64)
        if image.shape != (dimension,) or not np.all(np.isfinite(image)):
            raise InputError(
                f"product gave shape {image.shape}, finite: {bool(np.all(np.isfinite(image)))}; "
                f"expected finite numbers of shape {(dimension,)}"
            )
        scale = float(np.linalg.norm(image))
        diagonal[k] = basis[k] @ image
        for _ in range(2):  # twice is enough to be orthogonal to rounding
            image = image - basis[: k + 1].T @ (basis[: k + 1] @ image)
        beside[k] = float(np.linalg.norm(image))
        if k + 1 == steps or beside[k] <= 1e-12 * scale:
            return _ritz(diagonal[: k + 1], beside[: k + 1])
        basis[k + 1] = image / beside[k]
    raise InputError(f"dimension is {dimension!r}: expected at least 1")


def _ritz(diagonal: Vector, beside: Vector) -> Spectrum:
    small = np.diag(diagonal) + np.diag(beside[:-1], 1) + np.diag(beside[:-1], -1)
    values, vectors = np.linalg.eigh(small)
    residuals = np.abs(beside[-1] * vectors[-1])
    return Spectrum(float(values[0]), float(values[-1]), float(max(residuals[0], residuals[-1])))


def smoothness(spectra: Sequence[Spectrum], draws: np.random.Generator) -> Estimate:
    """Return L, the largest ‖H‖ seen, from below. spectra: of single records' losses, >= 1."""
    parts = np.array([max(abs(s.low), abs(s.high)) for s in spectra])
    return _bootstrap(parts, lambda chosen: float(parts[chosen].max()), draws)


def weak_convexity(spectra: Sequence[Spectrum], draws: np.random.Generator) -> Estimate:
    """Return λ, the most negative curvature seen, from below; 0 where none is negative.

    spectra: of whole sites' losses, >= 1.
    """
    parts = np.array([max(0.0, -s.low) for s in spectra])
    return _bootstrap(parts, lambda chosen: float(parts[chosen].max()), draws)


def heterogeneity(
    gradients: Vector, weights: Sequence[float], draws: np.random.Generator
) -> Estimate:
    """Return σ̄² = Σ p_n σ_n² at one point, σ_n = ‖∇F_n - ∇F‖/‖∇F‖, ∇F = Σ p_n ∇F_n.

    gradients: [N, d], the sites' at that point; gradients of samples add their own variance.
    weights: p_n up to a factor, > 0. The interval is of sites drawn anew, with their ∇F. inf where
    ∇F is 0 and a site's is not. Raises InputError.

    >>> towards = np.array([[1.0, 0.0], [3.0, 0.0]])
    >>> heterogeneity(towards, [1, 1], np.random.default_rng(0)).value
    0.25
    """
    if gradients.ndim != 2 or not len(gradients) or not np.all(np.isfinite(gradients)):
        raise InputError(
            f"gradients has shape {gradients.shape}: expected finite numbers [N, d], N >= 1"
        )
    p = np.array([check.positive(weight=w) for w in weights])
    if p.shape != gradients.shape[:1]:
        raise InputError(f"weights has {p.size} entries: expected one a site, {len(gradients)}")

    def each(chosen: NDArray[np.intp]) -> tuple[Vector, Vector]:
        share, vectors = p[chosen] / p[chosen].sum(), gradients[chosen]
        mean = share @ vectors
        apart = ((vectors - mean) ** 2).sum(1)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(apart > 0, apart / (mean @ mean), 0.0), share

    def mean_square(chosen: NDArray[np.intp]) -> float:
        squares, share = each(chosen)
        return float(share @ squares)

    parts, _ = each(np.arange(len(p)))
    return _bootstrap(parts, mean_square, draws)


def _bootstrap(
    parts: Vector,
    statistic: Callable[[NDArray[np.intp]], float],
    draws: np.random.Generator,
    resamples: int = 200,
) -> Estimate:
    if not parts.size:
        raise InputError("parts is empty: expected at least one site or record")
    drawn = [statistic(draws.integers(parts.size, size=parts.size)) for _ in range(resamples)]
    # Not interpolated: an infinite draw must not make the others NaN.
    low, high = np.percentile(drawn, _SHARES, method="nearest")
    whole = statistic(np.arange(parts.size))
    return Estimate(whole, float(low), float(high), tuple(float(x) for x in parts))
