"""What noise that is correlated over steps would gain: DP-FTRL with banded matrices.

    python -m experiments.banded.run

Choquette-Choo, Ganesh, McKenna, McMahan, Rush, Thakurta, Xu. (Amplified) banded matrix
factorization. arXiv 2306.08153. A = B C takes T gradients to their T prefix sums; a site releases
C x + z, so the iterates have the noise B z. C is lower triangular with b bands and columns of
length 1, and a record takes part at most every b-th step: then its columns do not overlap, and T
steps cost what T/b steps of DP-SGD at the rate b q cost (their Theorem 4). b = 1 is DP-SGD.
Printed is σ ‖A C^-1‖_F / sqrt(T), the deviation of an iterate's noise in units of the clip, over
DP-SGD's. C is Toeplitz, its coefficients optimised.
"""

import math
from collections.abc import Iterator

import numpy as np
from scipy.linalg import solve_triangular, toeplitz
from scipy.optimize import minimize

from fedpact.privacy.accounting.accountant import Budget, SampledGaussian
from fedpact.privacy.accounting.calibration import smallest_scale

EPSILON, DELTA = 2.0, 1e-5
CASES = ((0.015, 317), (0.05, 600), (0.1, 100), (0.25, 60), (0.5, 30), (1.0, 30))
BANDS = (1, 2, 4, 8, 16, 32)


def spread(coefficients: np.ndarray, steps: int) -> float:
    """Return ‖A C^-1‖_F / sqrt(T) for C with these bands, its columns scaled to length 1."""
    band = np.zeros(steps)
    band[: len(coefficients)] = coefficients
    c = toeplitz(band, np.zeros(steps))
    c = c / np.linalg.norm(c, axis=0)
    # A C^-1 = (C^-T A^T)^T.
    found = solve_triangular(c, np.tril(np.ones((steps, steps))).T, lower=True, trans="T")
    return float(np.linalg.norm(found)) / math.sqrt(steps)


def best(bands: int, steps: int) -> float:
    """Return the least spread of so many bands. It begins at the square root of A."""
    root = np.cumprod([1.0, *((2 * k - 1) / (2 * k) for k in range(1, bands))])
    if bands == 1:
        return spread(root, steps)

    def of(free: np.ndarray) -> float:
        return spread(np.concatenate([[1.0], free]), steps)

    return float(minimize(of, root[1:], method="L-BFGS-B", options={"maxiter": 30}).fun)


def sigma(rate: float, steps: int) -> float:
    """Return the noise over the clip at which so many steps are within (ε, δ)."""
    return smallest_scale(Budget(EPSILON, DELTA), {SampledGaussian(rate, 1.0): steps})


def rows() -> Iterator[list[str]]:
    """Yield a row for each case: q, T, DP-SGD's noise, and each number of bands beside it."""
    for rate, steps in CASES:
        alone = sigma(rate, steps) * best(1, steps)
        cells = list[str]()
        for bands in BANDS[1:]:
            if rate * bands > 1:
                cells.append("")
                continue
            noise = sigma(rate * bands, math.ceil(steps / bands)) * best(bands, steps)
            cells.append(f"{noise / alone:.2f}")
        each = alone / (rate * steps)
        yield [f"{rate:g}", str(steps), f"{alone:.1f}", f"{each:.2f}", *cells]


if __name__ == "__main__":
    head = ["q", "T", "DP-SGD", "over q T", *(f"b = {b}" for b in BANDS[1:])]
    for line in (head, ["---"] * len(head), *rows()):
        print(f"| {' | '.join(line)} |", flush=True)
