"""Calibration of a site's noise: the least σ at which all planned events fit the budget.

`asked` is the site's Terms at unit noise: each channel's sigma is relative to the base σ, which is
computed here. Nothing is returned before an accountant has priced it.
"""

import math
from collections import Counter
from dataclasses import replace

from fedpact.common import check
from fedpact.common.errors import PlanError
from fedpact.privacy.accounting.accountant import (
    Budget,
    History,
    SampledGaussian,
    epsilon,
    joint,
    max_steps,
)
from fedpact.privacy.accounting.calibration import smallest_scale
from fedpact.privacy.terms import Terms, size_event


def calibrate(asked: Terms) -> Terms:
    """Return the terms with the least noise at which all planned events fit the budget.

    Planned are `steps` joint events, `openings` of rounds, and releases before training. With
    shared noise, σ is that of h shares together. Raises PlanError: the releases before training
    cost the whole budget. BudgetExhausted: no noise is enough.
    """
    # The batches' joint multiplier is the unit: a power of σ that the caches share.
    unit = _joint_multiplier(asked)
    planned = Counter({SampledGaussian(asked.rate, 1.0): asked.steps})
    least = 0.0
    if asked.openings:
        least = _joint_multiplier(asked.opening) / unit
        planned[SampledGaussian(asked.opening_rate, least)] += asked.openings
    before = _before_training(asked)
    whole = smallest_scale(_price(asked), planned, asked.accountant, spent=before)
    sigma = whole / unit
    # Rounding in the joint multipliers must not push the reservation past the budget.
    found = scale(asked, sigma)
    while found.event.sigma < whole or (
        asked.openings and found.opening.event.sigma < whole * least
    ):
        sigma = math.nextafter(sigma, math.inf)
        found = scale(asked, sigma)
    return found


def with_noise(asked: Terms, sigma: float) -> Terms:
    """Return terms with gradient noise `sigma` and as many of `steps` as the budget allows.

    All openings are paid for first, as every round begins with one.
    Raises PlanError: after them and a noisy size, the budget does not allow a single step.
    """
    check.positive(sigma=sigma)
    check.count(steps=asked.steps)
    full = scale(asked, sigma)
    _before_training(asked)
    whole = full.history(full.steps, full.openings)
    if epsilon(whole, asked.delta, asked.accountant) <= asked.budget.epsilon:
        # Do not search for the largest number of steps, far beyond the plan.
        return full
    before = full.history(0, full.openings)
    allowed = max_steps(full.event, _price(asked), asked.accountant, spent=before)
    if allowed < 1:
        opened = f", after the openings of {asked.openings} rounds," if asked.openings else ""
        raise PlanError(
            f"privacy.sigma is {sigma:g}: at q = {asked.rate:g} a single step of site "
            f"{asked.site!r}{opened} costs more than (ε = {asked.budget.epsilon:g}, δ = "
            f"{asked.budget.delta:g}); raise sigma, or leave it out to have it calibrated"
        )
    return replace(full, steps=min(asked.steps, allowed))


def scale(asked: Terms, sigma: float) -> Terms:
    """Return terms with all noise times sigma; if noise is shared, that of one share."""
    sigma /= math.sqrt(asked.shares)
    return replace(
        asked,
        sigmas={name: ratio * sigma for name, ratio in asked.sigmas.items()},
        opening_sigmas={name: ratio * sigma for name, ratio in asked.opening_sigmas.items()},
    )


def _joint_multiplier(asked: Terms) -> float:
    """Return the joint multiplier of a batch's channels with one site's noise."""
    return joint(1.0, asked.multipliers.values()).sigma


def _price(asked: Terms) -> Budget:
    return Budget(asked.budget.epsilon, asked.delta)


def _before_training(asked: Terms) -> History:
    """Return the releases before training. Raises PlanError: they cost the whole budget."""
    before, budget = Counter(size_event(asked.size_noise)), asked.budget
    told = f"privacy.size_noise is {asked.size_noise}: the noisy size"
    remedy = 'raise it, or declare sizes with privacy.sizes = "public"'
    if asked.columns is not None:
        before += asked.columns.history
        told = "what scales the columns, with what else comes before training,"
        remedy = "lower privacy.column_share or budget.spare_rounds, or declare mean and deviation"
    cost = epsilon(before, budget.delta, asked.accountant)
    if not cost < budget.epsilon:
        raise PlanError(
            f"{told} of site {asked.site!r} alone costs ε = {cost:.4g} at δ = {budget.delta:g} "
            f"({asked.adjacency}), of the ε = {budget.epsilon:g} that it grants; {remedy}"
        )
    return before
