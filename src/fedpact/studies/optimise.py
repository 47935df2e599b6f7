"""Better ways to spend a plan's budget: q, σ, rounds and τ, by signal-to-noise ratio."""

from dataclasses import replace
from typing import Any, Final

from fedpact.common.errors import PlanError
from fedpact.privacy.accounting.accountant import Budget
from fedpact.privacy.accounting.planner import (
    MOST_STEPS,
    Choice,
    best,
    signal_to_noise,
    useful_rounds,
)
from fedpact.privacy.mechanisms import mechanism_of
from fedpact.privacy.noise import calibrate
from fedpact.privacy.terms import Terms
from fedpact.simulation.setup import SimulationSetup
from fedpact.studies.circumstances import sigma_together

LINEAR_MODELS: Final = ("logistic", "ngram")
"""Models for which the rule for rounds is known."""


def optimise_budgets(scene: SimulationSetup, passes: float | None) -> dict[str, Any]:
    """Return the configured and the best (q, σ, T, τ) for each distinct budget.

    Raises PlanError: a plain run, partial participation, or a τ chosen during the run.
    """
    plan, rounds = scene.plan, scene.plan.rounds
    for name, why, found in (
        (plan.why_unprotected, "it chooses how to spend ε, and there is none", not plan.private),
        (
            f"sites_per_round = {plan.sites_per_round}",
            "it chooses for sites that take part in every round; leave one of them out",
            scene.participants.partial,
        ),
        ("a τ that follows the budgets", "τ is chosen on the way", plan.method.facts.controlled),
    ):
        if found:
            raise PlanError(f"--optimise with {name}: {why}")
    unlike = len({terms.budget for terms in scene.terms.values()}) > 1
    full = unlike and all(terms.rate == 1.0 for terms in scene.terms.values())
    of_all = _together(scene) if full else None
    cases = dict[tuple[Budget, float, float], dict[str, Any]]()
    for terms in scene.terms.values():
        key = (terms.budget, terms.rate, terms.event.sigma)
        if key not in cases:
            # With a given σ the budget may end the run early, even in the first round.
            tau = min(plan.method.steps(), terms.steps)
            now = Choice(terms.rate, terms.event.sigma, min(rounds, terms.steps // tau), tau)
            most = now.passes if passes is None else passes
            best_one = _best(scene, terms, rounds, most)
            kept = now
            useful = _useful(scene, terms, best_one) if of_all is None else of_all
            if useful is not None and useful < rounds:
                best_one = _best(scene, terms, useful, most)
            if useful is not None and useful < now.rounds:
                kept = _calibrated(scene, terms, replace(now, rounds=useful), useful)
            if kept.snr > best_one.snr and kept.passes <= most:
                best_one = kept
            cases[key] = {
                "epsilon": terms.budget.epsilon,
                "delta": terms.budget.delta,
                "configured": now.to_dict(),
                "chosen": best_one.to_dict(),
                "gain": best_one.snr / now.snr,
                "useful_rounds": useful,
            }
    return {"cases": list(cases.values())}


def _best(scene: SimulationSetup, terms: Terms, rounds: int, passes: float) -> Choice:
    """Return the best choice, with σ calibrated as for a plan."""
    plan, own = scene.plan, scene.plan.algorithm_settings
    # A noisy size and the openings of rounds are paid for first.
    fixed = terms.history(0, min(terms.openings, rounds))
    alone = plan.privacy.shares_noise or "local_steps" not in type(own).model_fields
    one = best(terms.budget, rounds, passes, fixed, 1 if alone else MOST_STEPS)
    return _calibrated(scene, terms, one, rounds)


def _calibrated(scene: SimulationSetup, terms: Terms, one: Choice, rounds: int) -> Choice:
    """Return a choice with a site's σ; with distributed noise, the largest of any site."""
    plan, whose = scene.plan, [terms]
    if plan.privacy.shares_noise:
        whose = list({one.budget: one for one in scene.terms.values()}.values())
    sigmas = list[float]()
    for each in whose:
        asked = plan.terms_at_unit_noise(each.site, each.size, tuple(scene.terms), rounds)
        steps = asked.steps // plan.method.steps() * one.local_steps
        sigmas.append(calibrate(replace(asked, rate=one.rate, steps=steps)).event.sigma)
    return replace(one, sigma=max(sigmas))


def _useful(scene: SimulationSetup, terms: Terms, one: Choice) -> int | None:
    """Return the useful number of rounds at a choice's signal-to-noise ratio; None if unknown.

    The ratio is nearly the same for 1 and for 200 rounds, but the accuracy is not.
    """
    if scene.plan.model not in LINEAR_MODELS or not mechanism_of(terms.mechanism).summed:
        return None
    records, shares = sum(scene.sizes.values()), scene.plan.privacy.noise_copies(len(scene.sites))
    weights = scene.workshop.size
    snr = signal_to_noise(one.rate, one.sigma, one.steps, records, shares, weights)
    return useful_rounds(snr)


def _together(scene: SimulationSetup) -> int | None:
    """Return the useful number of rounds for sites with different budgets; None as in `_useful`.

    For plans with all records in every step, with the sites weighted as the plan says.
    """
    plan, rounds = scene.plan, scene.plan.rounds
    summed = all(mechanism_of(terms.mechanism).summed for terms in scene.terms.values())
    if plan.model not in LINEAR_MODELS or not summed:
        return None
    each = [
        _calibrated(scene, t, Choice(1.0, 1.0, rounds, 1), rounds) for t in scene.terms.values()
    ]
    sizes, own = list(scene.sizes.values()), plan.algorithm_settings
    sigmas, weights = [one.sigma for one in each], scene.workshop.size
    sigma = max(sigmas)
    if not plan.privacy.shares_noise:
        weighed = getattr(own, "aggregation", "") == "least_noise"
        penalty = getattr(own, "bias_penalty", 0.0) / weights if weighed else None
        sigma = sigma_together(sigmas, sizes, plan.privacy.clip, penalty=penalty)
    shares = plan.privacy.noise_copies(len(sizes))
    return useful_rounds(signal_to_noise(1.0, sigma, rounds, sum(sizes), shares, weights))
