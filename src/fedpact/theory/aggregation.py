"""How to weight sites that add unlike noise: less noise in the aggregate, for some bias.

Site k reports g_k plus noise of variance v_k in each of d coordinates. The target is Σ p_k g_k,
p_k = J_k/J from the expected batch sizes; weights ω with Σ ω_k = 1 miss it by a bias, and

    E‖Σ ω_k (g_k + noise_k) - Σ p_k g_k‖² <= d Σ ω_k² v_k + D Σ (ω_k - p_k)²,   D = Σ ‖g_k - ḡ‖²,

with ḡ any vector, as Σ (ω_k - p_k) ḡ = 0 (Cauchy-Schwarz). With κ = D/d the right side is least at

    ω_k = (κ p_k + ν) / (v_k + κ),   ν = (Σ p_k v_k/(v_k + κ)) / (Σ 1/(v_k + κ)),

where the gradient of Σ ω² v + κ Σ (ω - p)² is the multiplier 2ν of Σ ω = 1. The ω_k are positive.
Large κ gives p, small κ the least noise of all, ω_k ~ 1/v_k. For each κ no other weights have both
less noise and less bias Σ (ω - p)².
"""

import math
from collections.abc import Sequence

from fedpact import check
from fedpact.errors import InputError


def multiplier(batch_sizes: Sequence[float], variances: Sequence[float], penalty: float) -> float:
    """Return ν. batch_sizes: J_k > 0. variances: v_k >= 0. penalty: κ > 0. Raises InputError."""
    check.positive(penalty=penalty)
    sizes = [check.positive(batch_size=size) for size in batch_sizes]
    if not sizes:
        raise InputError("batch_sizes is empty: expected at least one site")
    shares = [1 / (check.non_negative(variance=v) + penalty) for v in variances]
    noises = (n * v * a for n, v, a in zip(sizes, variances, shares, strict=True))
    return math.fsum(noises) / (math.fsum(sizes) * math.fsum(shares))


def least_noise(
    batch_sizes: Sequence[float], variances: Sequence[float], penalty: float
) -> list[float]:
    """Return the weights ω_k; see above, and `multiplier` for the arguments.

    >>> [round(w, 3) for w in least_noise([10, 10], [1.0, 3.0], 1e-9)]
    [0.75, 0.25]
    >>> [round(w, 3) for w in least_noise([10, 30], [1.0, 3.0], 1e9)]
    [0.25, 0.75]
    """
    nu, total = multiplier(batch_sizes, variances, penalty), math.fsum(batch_sizes)
    return [
        (penalty * size / total + nu) / (variance + penalty)
        for size, variance in zip(batch_sizes, variances, strict=True)
    ]
