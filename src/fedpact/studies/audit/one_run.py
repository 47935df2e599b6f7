"""An attack on a whole run: many canaries, each added to the site's records or not, by a coin.

Steinke, Nasr, Jagielski 2023, arXiv 2305.08846. The attacker sees every release and knows every
record, but not the coins, and guesses those with the clearest scores. If it is right too often for
(ε, δ), the claim is wrong. Scores are the posterior means of the coins in a Gaussian model: with
one release R = q S + (q/2) Σ_j s_j c_j g_j + noise, s_j = ±1, and S the sum over known records,

    scores = (I + Σ_t (a²/v) G Gᵀ)^-1 Σ_t (a/v) G (R - q S),   a = q/2,   rows c_j g_j of G,
    v = ‖R - q S‖²/d, the measured noise

They depend on the releases only, so they need no proof (under batch clipping the model is rough).
Adding canaries at an unchanged public size matches add/remove adjacency.

Bounds on ε from right guesses (their Theorem 5.2) are each valid with the stated confidence. Who
reports the largest of k bounds uses confidence 1 - (1 - c)/k for each.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
from scipy import optimize, stats
from scipy.special import betainc, ndtr
from torch import Tensor
from torch.func import functional_call, grad, vmap

from fedpact.common.check import count
from fedpact.common.errors import InputError
from fedpact.common.losses import cross_entropy
from fedpact.common.randomness.seeded import seeded_generator
from fedpact.per_sample.clipping import coefficients, weights_of
from fedpact.per_sample.kernel import PlainKernel
from fedpact.privacy.accounting import gaussian
from fedpact.privacy.mechanisms import mechanism_of
from fedpact.privacy.oracle import Records
from fedpact.report.audited import AuditRow
from fedpact.studies.audit.noise import row_of_test
from fedpact.studies.audit.target import Asked, Target, draw_mislabelled, simulate_rounds

# Guesses as shares of the canaries; the largest bound counts, each at its part of the error.
_SHARES = (0.05, 0.2, 1.0)
# Where the claimed curve is tested, in addition to the budget's δ.
_ONE_RUN_DELTAS = (1e-4, 1e-3, 0.01, 0.03, 0.1, 0.2, 0.4)
# The most numbers in the canaries' gradients: half a gigabyte.
_MOST_NUMBERS = 1 << 27


def one_run(target: Target, canaries: int = 500, confidence: float = 0.95) -> list[AuditRow]:
    """Attack the whole run of one site with m canaries; fewer if the model is very large.

    Return the bound on ε with the accountant's ε for the run's events, and a test of the trade-off
    curve that the accountant states, at all δ together.
    """
    m = min(count(canaries=canaries), max(1, _MOST_NUMBERS // target.w.numel()))
    made = draw_mislabelled(target, m)
    coins = torch.randint(
        2, (m,), generator=seeded_generator(target.plan.seed, "audit", "coins")
    ).bool()
    # One record per canary: a person with several equal records contributes the same.
    records = target.records.join(made.x[coins], made.y[coins], len(target.records.y))
    scores, events, openings = _one_run_scores(target, records, made)
    # Each share of guesses bounds ε, and tests the curve.
    error = (1 - confidence) / (2 * len(_SHARES))
    guessed = [_guess(scores, coins, share) for share in _SHARES]
    delta = target.terms.budget.delta
    found = [(one_run_epsilon(m, r, v, delta, 1 - error), r, v) for r, v in guessed]
    best, guesses, correct = max(found)
    claimed = target.claimed(events, delta, openings)
    stated = [(target.claimed(events, d, openings), d) for d in (delta, *_ONE_RUN_DELTAS)]
    p = min(curve_p_value(make_loss_bound(stated), m, r, v) for r, v in guessed)
    told = f"{correct} of {guesses} guesses right, {m} canaries, {events + openings} events"
    power = _power(m, claimed, delta, error)
    curve = f"trade-off curve at {len(stated)} δ (Mahloujifar, Melis, Chaudhuri 2024)"
    return [
        AuditRow("one-run", "ε", best, claimed, delta, confidence, told, power),
        row_of_test(curve, p, error),
    ]


def _power(canaries: int, claimed: float, delta: float, error: float) -> float:
    """Return the bound at the expected number of right guesses, for Gaussian scores."""

    def excess(mu: float) -> float:  # of the ε by which N(0, 1) and N(μ, 1) can be told apart
        return gaussian.gaussian_epsilon(mu, delta) - claimed

    mu = cast(float, optimize.brentq(excess, 0.0, 50.0)) if excess(50.0) > 0 else 50.0
    shown = list[float]()
    for share in _SHARES:
        r = min(2 * max(1, round(share * canaries / 2)), canaries)
        right = math.floor(r * expect_right(mu, share))
        shown.append(one_run_epsilon(canaries, r, right, delta, 1 - error))
    return max(shown)


def _guess(scores: Tensor, coins: Tensor, share: float) -> tuple[int, int]:
    """Return the numbers of guesses and right guesses, from the highest and lowest scores."""
    half = max(1, round(share * len(scores) / 2))
    order = torch.argsort(scores)
    right = int(coins[order[-half:]].sum())
    lowest = order[: min(half, len(scores) - half)]
    right += int((~coins[lowest]).sum())
    return half + len(lowest), right


def _one_run_scores(target: Target, records: Records, canaries: Records) -> tuple[Tensor, int, int]:
    """Return the canaries' scores [m] after a run, and its numbers of joint events and openings.

    Only gradients are used; an attacker could use other releases, too.
    """
    m = len(canaries.y)
    precision, evidence = torch.eye(m, dtype=torch.float64), torch.zeros(m, dtype=torch.float64)
    events = openings = gradients = 0
    for asked in simulate_rounds(target, records, target.rounds, "one run"):
        opened = len({a.batch for a in asked if a.opening})
        openings += opened
        events += len({a.batch for a in asked}) - opened
        for a in asked:
            if a.channel == "gradient":
                gradients += 1
                # The factor from an answer to a sum, and the shares of known records and canaries.
                whole, known, half = 1.0, 1.0, 0.5 / len(target.records.y)
                if mechanism_of(a.terms.mechanism).summed:
                    whole, known, half = a.terms.batch_size, a.terms.rate, a.terms.rate / 2
                shares = _shares(target, canaries, a)
                rest = a.answer * whole - half * shares.sum(0)
                rest -= known * target.answer(target.records, "gradient", a.query, a.terms)
                # The measured variance, not the claimed one: sampling adds to the noise.
                variance = float(rest.square().mean())
                evidence += (half / variance) * (shares @ rest).double()
                precision += (half**2 / variance) * (shares @ shares.T).double()
    if not gradients:
        raise InputError(
            f"algorithm {target.plan.algorithm!r} releases no gradient, which an audit needs: "
            "expected an algorithm with a gradient among its channels"
        )
    return torch.linalg.solve(precision, evidence), events, openings


def _shares(target: Target, canaries: Records, asked: Asked) -> Tensor:
    """Return what each canary adds to a sum if it is in the batch: rows c_j g_j [m, d]."""
    target.kernel.model.load(asked.query[0])
    rows, losses = _gradients(target, canaries)
    norms, clip = rows.norm(dim=1), asked.terms.clip
    gamma = getattr(mechanism_of(asked.terms.mechanism).batch, "gamma", None)
    w = weights_of(asked.weighting, losses).clamp_min(0)
    c = coefficients(clip, norms, w, None, gamma).to(rows)
    return torch.nan_to_num(rows * c[:, None], nan=0.0, posinf=0.0, neginf=0.0)


def _gradients(target: Target, records: Records) -> tuple[Tensor, Tensor]:
    """Return the per-sample gradients [m, d] and losses [m] at the model's weights."""
    model = target.kernel.model
    weights = {name: view.detach() for name, view in model.views(model.vector)}

    def loss(w: dict[str, Tensor], x: Tensor, y: Tensor) -> Any:
        value = cross_entropy(functional_call(model.module, w, (x[None],)), y[None])[0]
        return value, value

    each = vmap(grad(loss, has_aux=True), (None, 0, 0), chunk_size=32, randomness="different")
    try:
        rows, losses = each(weights, records.x, records.y)
    except RuntimeError:  # a layer that vmap cannot batch
        kernel, ones = PlainKernel(model, cross_entropy), zip(records.x, records.y, strict=True)
        found = [kernel.weighted_sum(x[None], y[None]) for x, y in ones]
        return torch.stack(found), kernel.losses(records.x, records.y).detach()
    return torch.cat([rows[name].flatten(1) for name in weights], 1), losses.detach()


_LARGEST_EPSILON = 100.0
_LEAST_LEVEL = 1e-9


def one_run_p_value(
    canaries: int, guesses: int, correct: int, epsilon: float, delta: float
) -> float:
    """Return a bound on P[at least `correct` right guesses] under (ε, δ)-DP.

    canaries: m records, each included by a fair coin. guesses: r of them guessed, the number fixed
    beforehand. With W ~ Binomial(r, e^ε / (1 + e^ε)) and v = correct,

        p <= P[W >= v] + 2 m δ max_{1 <= i <= v} P[v - i <= W < v] / i

    δ adds at most 2 m δ right guesses on average, so i of them with probability at most 2 m δ / i.
    """
    right = 1 / (1 + math.exp(-epsilon))
    # P[W >= v] by the incomplete beta function, ten times as fast as scipy.stats.
    p = float(betainc(correct, guesses - correct + 1, right)) if correct else 1.0
    if delta > 0 and correct > 0:
        below = np.cumsum(stats.binom.pmf(np.arange(correct - 1, -1, -1), guesses, right))
        p += 2 * canaries * delta * float(np.max(below / np.arange(1, correct + 1)))
    return min(1.0, p)


def one_run_epsilon(
    canaries: int, guesses: int, correct: int, delta: float, confidence: float = 0.95
) -> float:
    """Return a lower bound on ε, at this confidence, from the number of right guesses.

    0.0 if there is no bound. With 1,000 of 1,000 guesses right:

    >>> round(one_run_epsilon(1000, 1000, 1000, 0.0), 2)
    5.81
    """

    def excluded(epsilon: float) -> bool:
        return one_run_p_value(canaries, guesses, correct, epsilon, delta) <= 1 - confidence

    return _last(excluded, 0.0, _LARGEST_EPSILON)


def refutes(
    lost: Callable[[float], float], canaries: int, guesses: int, correct: int, level: float
) -> bool:
    """Return whether this number of right guesses refutes a trade-off curve at this error level.

    lost: x = P[E] under one of two neighbours -> the smallest P[E] under the other that the curve
    allows; increasing. Mahloujifar, Melis, Chaudhuri 2024, arXiv 2410.22235: with m canaries,
    r guesses, v right ones and τ = level, were P[at least v right] = τ, then r_v = τ v/m, h_v =
    τ (r - v)/m, and downwards

        h_i = max(h_{i+1}, lost(r_{i+1})),    r_i = r_{i+1} + i/(r - i) (h_i - h_{i+1})

    are lower bounds for right and wrong guesses, whose sum is at most r/m.
    """
    right, wrong = level * correct / canaries, level * (guesses - correct) / canaries
    for i in range(correct - 1, -1, -1):
        more = max(wrong, lost(right))
        right += i / (guesses - i) * (more - wrong)
        wrong = more
    return right + wrong > guesses / canaries


def curve_p_value(
    lost: Callable[[float], float], canaries: int, guesses: int, correct: int
) -> float:
    """Return the smallest level, within 1 %, at which `refutes` is true; 1.0 without any."""

    def refuted(digits: float) -> bool:
        return refutes(lost, canaries, guesses, correct, math.exp(-digits))

    return math.exp(-_last(refuted, 0.0, -math.log(_LEAST_LEVEL), within=0.01))


def make_loss_bound(curve: Sequence[tuple[float, float]]) -> Callable[[float], float]:
    """Return `lost` of `refutes` for a mechanism that is (ε, δ)-private for all these pairs."""
    pairs = [(e, d) for e, d in curve if e < math.inf]

    def lost(x: float) -> float:
        lower = [math.exp(-e) * (x - d) for e, d in pairs]
        # For the event's complement.
        upper = [1 - d - math.exp(min(e, 700.0)) * (1 - x) for e, d in pairs]
        return max([0.0, *lower, *upper])

    return lost


def expect_right(mu: float, share: float) -> float:
    """Return the share of right guesses among the `share` of canaries with the clearest scores.

    Scores are N(μ/2, 1) with a canary and N(-μ/2, 1) without it, independent.
    """

    def exceed(t: float) -> tuple[float, float]:
        return float(ndtr(mu / 2 - t)), float(ndtr(-t - mu / 2))

    # Canaries with |score| > t are guessed, by the sign.
    t = optimize.brentq(lambda t: sum(exceed(t)) - share, 0.0, mu / 2 + 10)
    right, wrong = exceed(cast(float, t))
    return right / (right + wrong)


def _last(holds: Callable[[float], bool], low: float, high: float, within: float = 1e-6) -> float:
    """Return the largest point, up to `within`, at which `holds` is true; `low` if it never is.

    Unlike scipy's root finders it returns a point at which it holds, the safe side of a bound.
    """
    if not holds(low):
        return low
    if holds(high):
        return high
    while high - low > within:
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
