"""The four older noise bounds that the LDP FedSGD paper compares. Comparison curves only.

They drop O(·) terms and are unsound even inside their own conditions: at q = 1e-3, δ = 1e-4, ε = 2,
T = 1e5 "proposed" gives σ = 1.183, whose true ε is 5.5, and MA 1.43 (2.9). No guarantee and no
calibration of a run rests on them. `exact_noise` is the sound answer to the same question.

Per client: T rounds, a batch-mean gradient clipped to C with sensitivity 2C, Poisson rate q, noise
of variance C²σ² a coordinate: a sampled Gaussian of noise multiplier σ/2. With pre = 4q²/(1-q),

    proposed  σ² = pre T [ (2/ε²) ln(1/δ) + 1/ε - (2/ε²)(ln(2 ln(1/δ)) + 1 - ln ε) ]
    MA        σ² = pre T [ (2/ε²) ln(1/δ) + 1/ε ]        moments accountant, Abadi et al. 2016
    AC1       σ² = pre 2 ln(1.25/δ0)/ε0²                 Dwork, Roth 2014, Theorems 3.20 and 3.22,
              ε = sqrt(2T ln(1/δ~)) ε0 + T ε0 (e^ε0 - 1),  δ = T δ0 + δ~
    AC2       σ² = pre 8T ln(e + ε/δ)/ε²                 Kairouz, Oh, Viswanath 2015

The factor q²/(1-q) in AC1 and AC2 is the paper's, unproven.
"""

import math
from collections.abc import Callable
from typing import Final, Literal, get_args

from fedpact import check
from fedpact.errors import InputError
from fedpact.theory import special
from fedpact.theory.accounting import Accountant, Budget
from fedpact.theory.calibration import smallest_sigma

OldBound = Literal["proposed", "MA", "AC1", "AC2"]
OLD_BOUNDS: Final[tuple[OldBound, ...]] = get_args(OldBound)

AC1_SLACK: Final = 1e-5  # the paper's δ~
LogFunction = Callable[[float], float]


def unconditional_noise(
    bound: OldBound, budget: Budget, q: float, steps: int, log: LogFunction = math.log
) -> float:
    """Return the paper's σ, noise over C a coordinate, by one of its four bounds. No guarantee.

    It is what the formula gives, whether its conditions (`violations`) hold or not.

    log: the logarithm of "proposed", MA and AC1's last step (the paper's printed numbers come of
    base 10). Raises InputError where it gives no positive variance, or q = 1.
    """
    check.count(steps=steps)
    if not 0 < q < 1:
        raise InputError(f"q is {q!r}: expected 0 < q < 1, the bounds divide by 1 - q")
    pre = 4 * q**2 / (1 - q)
    epsilon, delta = budget.epsilon, budget.delta
    moments = 2 / epsilon**2 * log(1 / delta) + 1 / epsilon
    if bound == "proposed":
        saved = 2 / epsilon**2 * (log(2 * log(1 / delta)) + 1 - log(epsilon))
        variance = pre * steps * (moments - saved)
    elif bound == "MA":
        variance = pre * steps * moments
    elif bound == "AC1":
        each = _advanced_composition(budget, steps)
        variance = pre * 2 * log(1.25 / each.delta) / each.epsilon**2
    elif bound == "AC2":
        variance = pre * 8 * steps * math.log(math.e + epsilon / delta) / epsilon**2
    else:
        raise InputError(f"bound is {bound!r}: expected one of {', '.join(OLD_BOUNDS)}")
    if not variance > 0:
        raise InputError(
            f"bound is {bound!r}: at (ε = {epsilon:g}, δ = {delta:g}) its bracket is "
            f"{variance / (pre * steps):.4g}, not positive, so it gives no noise; "
            "expected a smaller δ, a larger ε, or another bound"
        )
    return math.sqrt(variance)


def _advanced_composition(budget: Budget, steps: int) -> Budget:
    """Return the (ε0, δ0) of each of T mechanisms whose composition is the budget."""
    left = budget.delta - AC1_SLACK
    if not left > 0:
        raise InputError(
            f"δ is {budget.delta!r}: AC1 spends δ~ = {AC1_SLACK:g} of it on composition; "
            "expected a larger δ"
        )
    slope = math.sqrt(2 * steps * math.log(1 / AC1_SLACK))

    def excess(epsilon: float) -> float:
        return slope * epsilon + steps * epsilon * math.expm1(epsilon) - budget.epsilon

    # Without its second term the equation's root is larger.
    top = min(budget.epsilon / slope, 600.0)
    return Budget(special.root(excess, 0.0, top, 1e-15), left / steps)


def violations(sigma: float, budget: Budget, q: float) -> list[str]:
    """Return which of the moments bound's conditions fail at σ, each with its numbers.

    q < 1/(16σ), σ >= 1 and ε > 2 ln(1/δ) max(δ, 1/(σ² ln(1/(qσ)))).
    """
    failed: list[str] = []
    if not q < 1 / (16 * sigma):
        failed.append(f"q < 1/(16σ) fails, {q:g} against {1 / (16 * sigma):.4g}")
    if not sigma >= 1:
        failed.append(f"σ >= 1 fails, σ = {sigma:.4g}")
    spread = sigma**2 * -math.log(q * sigma)
    least = 2 * -math.log(budget.delta) * max(budget.delta, 1 / spread if spread > 0 else math.inf)
    if not budget.epsilon > least:
        failed.append(
            f"ε > 2 ln(1/δ) max(δ, 1/(σ² ln(1/(qσ)))) fails, {budget.epsilon:g} against {least:.4g}"
        )
    return failed


def exact_noise(budget: Budget, q: float, steps: int, accountant: Accountant = "best") -> float:
    """Return the smallest σ, noise over C a coordinate, that keeps the budget; twice a multiplier.

    Sensitivity 2C: adding or removing one record can turn the clipped batch mean round.
    """
    return 2 * smallest_sigma(budget, q, steps, accountant)
