"""The audit from one run: many canaries at once, each in or out by a fair coin.

Steinke, Nasr, Jagielski 2023, arXiv 2305.08846. The site's records stay, canaries are added; the
attacker sees every release and knows every record, but not the coins. It guesses those it is
surest of. If it is right too often for (ε, δ), the claim is wrong.

The scores are the mean of what the coins can have been, given the releases, in the Gaussian model
(one release: R = q S + (q/2) Σ_j s_j c_j g_j + noise, s_j = ±1, S the sum over what is known):

    scores = (I + Σ_t (a²/v) G Gᵀ)^-1 Σ_t (a/v) G (R - q S),   a = q/2,   rows c_j g_j of G,
    v = ‖R - q S‖²/d, the noise as it is found

They are made of releases alone, so how they are made needs no proof (under batch clipping the model
is a rough one). Adding canaries to an
unchanged public size is what add/remove adjacency is about.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from fedpact.audit.bounds import (
    curve_p_value,
    expect_right,
    gaussian_mu,
    make_loss_bound,
    one_run_epsilon,
)
from fedpact.audit.noise_level import Tested
from fedpact.audit.target import Asked, Target, draw_mislabelled, simulate_rounds
from fedpact.check import count
from fedpact.draws.seeded import seeded_generator
from fedpact.errors import InputError, ModelError
from fedpact.losses import cross_entropy
from fedpact.privacy.mechanisms import mechanism_of
from fedpact.privacy.oracle import Records
from fedpact.privacy.terms import Terms

# Guesses, as shares of the canaries; the largest of the bounds counts, each at its share of error.
_SHARES = (0.05, 0.2, 1.0)
# Where the claimed curve is tested, beside the budget's own δ.
_DELTAS = (1e-4, 1e-3, 0.01, 0.03, 0.1, 0.2, 0.4)
# Numbers that the canaries' gradients may take: half a gigabyte.
_MOST_NUMBERS = 1 << 27


@dataclass(frozen=True)
class OneRun:
    """What one run shows. Of m canaries `correct` of `guesses` were right, where ε is largest.

    epsilon: the lower bound. claimed: what the accountant states at delta for the run's events.
    power: the bound that the best attack would show, were the mechanism as claimed. curve: whether
    the guesses refute the trade-off curve that the accountant states, at all δ together.
    """

    canaries: int
    guesses: int
    correct: int
    events: int
    delta: float
    epsilon: float
    claimed: float
    power: float
    curve: Tested

    @property
    def passed(self) -> bool:
        """Whether the claim stands: ε at its δ, and the whole trade-off curve."""
        return self.epsilon <= self.claimed and self.curve.passed


def one_run(target: Target, canaries: int = 500, confidence: float = 0.95) -> OneRun:
    """Audit the whole run of one site with m canaries, fewer where the model is very large."""
    m = min(count(canaries=canaries), max(1, _MOST_NUMBERS // target.w.numel()))
    made = draw_mislabelled(target, m)
    coins = torch.randint(
        2, (m,), generator=seeded_generator(target.plan.seed, "audit", "coins")
    ).bool()
    # Each canary by itself: what a person of several equal records adds is the same.
    records = target.records.join(made.x[coins], made.y[coins], len(target.records.y))
    scores, events, openings = _scores(target, records, made)
    # Each share of guesses bounds ε, and tests the curve.
    error = (1 - confidence) / (2 * len(_SHARES))
    guessed = [_guess(scores, coins, share) for share in _SHARES]
    delta = target.terms.budget.delta
    found = [(one_run_epsilon(m, r, v, delta, 1 - error), r, v) for r, v in guessed]
    best, guesses, correct = max(found)
    claimed = target.claimed(events, delta, openings)
    stated = [(target.claimed(events, d, openings), d) for d in (delta, *_DELTAS)]
    p = min(curve_p_value(make_loss_bound(stated), m, r, v) for r, v in guessed)
    told = f"trade-off curve at {len(stated)} δ (Mahloujifar, Melis, Chaudhuri 2024)"
    return OneRun(
        m, guesses, correct, events + openings, delta, best, claimed,
        power=_power(m, claimed, delta, error),
        curve=Tested(told, p, error),
    )  # fmt: skip


def _power(canaries: int, claimed: float, delta: float, error: float) -> float:
    """The bound at the expected number of right guesses, were the scores those of Gaussians."""
    mu = min(gaussian_mu(claimed, delta), 50.0)
    shown = [0.0]
    for share in _SHARES:
        r = 2 * max(1, round(share * canaries / 2))
        r = min(r, canaries)
        right = math.floor(r * expect_right(mu, share))
        shown.append(one_run_epsilon(canaries, r, right, delta, 1 - error))
    return max(shown)


def _guess(scores: Tensor, coins: Tensor, share: float) -> tuple[int, int]:
    """Guesses, right guesses, where the highest and the lowest scores are guessed."""
    half = max(1, round(share * len(scores) / 2))
    order = torch.argsort(scores)
    right = int(coins[order[-half:]].sum())
    lowest = order[: min(half, len(scores) - half)]
    right += int((~coins[lowest]).sum())
    return half + len(lowest), right


def _scores(target: Target, records: Records, canaries: Records) -> tuple[Tensor, int, int]:
    """The canaries' scores [m] after a run on the records, and the run's joint events and openings.

    By the gradients alone: whatever else is released only adds to what an attacker might use.
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
                whole, known, half = _scale(target, a.terms)
                shares = _shares(target, canaries, a)
                rest = a.answer * whole - half * shares.sum(0)
                rest -= known * target.answer(target.records, "gradient", a.query, a.terms)
                # As loud as it is, not as it is claimed to be: batches add to the noise.
                variance = float(rest.square().mean())
                evidence += (half / variance) * (shares @ rest).double()
                precision += (half**2 / variance) * (shares @ shares.T).double()
    if not gradients:
        raise InputError(
            f"algorithm {target.plan.algorithm!r} releases no gradient, which the one-run attack "
            "reads: audit it with --method membership"
        )
    return torch.linalg.solve(precision, evidence), events, openings


def _scale(target: Target, terms: Terms) -> tuple[float, float, float]:
    """What turns an answer into a sum, the share of known records in it, and half a canary's."""
    if not mechanism_of(terms.mechanism).summed:
        return 1.0, 1.0, 0.5 / len(target.records.y)
    return terms.batch_size, terms.rate, terms.rate / 2


def _shares(target: Target, canaries: Records, asked: Asked) -> Tensor:
    """What each canary adds to the sum when it is in the batch: rows c_j g_j [m, d]."""
    target.kernel.model.load(asked.query[0])
    rows, losses = _gradients(target, canaries)
    weights = asked.weighting(losses).clamp_min(0)
    c = torch.minimum(weights, asked.terms.clip / rows.norm(dim=1))
    return torch.nan_to_num(rows * c[:, None], nan=0.0, posinf=0.0, neginf=0.0)


def _gradients(target: Target, records: Records) -> tuple[Tensor, Tensor]:
    """The per-sample gradients [m, d] and losses [m] at the model's weights."""
    model = target.kernel.model
    weights = {name: view.detach() for name, view in model.views(model.vector)}

    def loss(w: dict[str, Tensor], x: Tensor, y: Tensor) -> Any:
        value = cross_entropy(functional_call(model.module, w, (x[None],)), y[None])[0]
        return value, value

    each = vmap(grad(loss, has_aux=True), (None, 0, 0), chunk_size=32, randomness="different")
    try:
        rows, losses = each(weights, records.x, records.y)
    except RuntimeError as error:
        raise ModelError(
            f"model {type(model.module).__name__} has a layer that torch.func.vmap cannot batch "
            f"({error}): audit it with --method membership"
        ) from error
    return torch.cat([rows[name].flatten(1) for name in weights], 1), losses.detach()
