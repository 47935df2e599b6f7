"""What a run says of itself: its privacy statement at the start, its outcome at the end."""

from dataclasses import asdict
from typing import Any

from fedpact.engines.scene import Scene
from fedpact.ledger.reservations import FIXED, WHY
from fedpact.messages import RoundRecord
from fedpact.metrics import METRICS, fairness
from fedpact.params import FlatModel
from fedpact.plan import Plan
from fedpact.privacy.terms import Terms
from fedpact.theory.accounting import ADJACENCY, bound_by, epsilon

_COVERS = [
    "Everything a site sends during training: model updates, losses and counts. They pass the "
    "site's oracle, which clips and adds noise, and its ledger, which charges first.",
    "The final model and every model on the way, against the server, the other sites and anyone "
    "who sees them.",
]
_DOES_NOT_COVER = [
    "How long a site takes to answer.",
    "What a record's owner could be harmed by even if the record were left out.",
    "Several records of one person: the unit is one record.",
    "Rounding of floating-point noise: a simulation draws its noise from a seeded generator, which "
    "measures a federation and protects nobody.",
]
MECHANISMS = {
    "none": "Nothing is clipped and no noise is added.",
    "per_sample": "Each record's part of a sum is clipped to its bound (a gradient to C), the sum "
    "over a Poisson batch gets Gaussian noise and is divided by the expected batch size. One "
    "record moves a sum by at most its bound.",
    "batch_clipped": "The mean gradient of a Poisson batch is clipped to C as a whole and gets "
    "Gaussian noise. One record can turn it round: it moves by at most 2C, so σ counts half.",
}
_PUBLIC_SIZES = "The sites' declared sizes, sampling rates and label names, which are public."
_NOISY_SIZES = "The sites' sampling rates and label names, which are public."
_SIMULATOR_ONLY = [
    "Accuracy and loss on the sites' held-out records, and Ψ, which is made of them.",
    "The table of labels per site.",
]


def privacy_statement(scene: Scene) -> dict[str, Any]:
    """Return the content of privacy.json."""
    pooled = "The accuracy of the global model: there is no public test set, so the sites' own "
    simulator_only = list(_SIMULATOR_ONLY)
    if scene.dataset.x_test is None:
        simulator_only.append(pooled + "held-out records stand in for one.")
    covers, uncovered = _scope(scene.plan)
    return {
        "private": scene.plan.private,
        "why_unprotected": scene.plan.why_unprotected,
        "unit": "record",
        "adjacency": ADJACENCY,
        "mechanism": scene.plan.privacy.mode,
        "mechanism_meaning": MECHANISMS[scene.plan.privacy.mode],
        "separation": scene.workshop.separation() if scene.plan.private else "",
        "accountant": scene.plan.privacy.accountant if scene.plan.private else "none",
        # No algorithm chooses q or σ from releases, so the engine reserves fixed events.
        "accounting": FIXED if scene.plan.private else "none",
        "accounting_reason": WHY if scene.plan.private else "",
        "randomness": "seeded simulation",
        "sizes": "noisy" if scene.plan.noisy_sizes else "public",
        "accuracy_pooled": scene.dataset.x_test is None,
        "simulator_only": simulator_only,
        "covers": [*covers, *secure_lines(scene.plan, len(scene.sites))],
        "does_not_cover": uncovered,
        "secure_aggregation": secure_terms(scene.plan, len(scene.sites)),
        "sites": site_terms(scene),
    }


def secure_terms(plan: Plan, sites: int) -> dict[str, int] | None:
    """Return what a run's secure aggregation is, None where it has none."""
    threshold = plan.secure_aggregation.threshold
    return {"threshold": threshold, "sites": sites} if threshold else None


def secure_lines(plan: Plan, sites: int) -> list[str]:
    """Return what secure aggregation adds to a private run's guarantee; nothing without either."""
    threshold = plan.secure_aggregation.threshold
    if not (threshold and plan.private):
        return []
    return [
        f"Secure aggregation, threshold {threshold} of {sites} sites: a server that follows the "
        f"protocol sees weighted means over at least {threshold} sites and no single site's "
        "vector. It needs others that keep their part secret, and adds nothing to (ε, δ): the ε "
        "stated here does not use it, and holds against a server that sees everything."
    ]


def _scope(plan: Plan) -> tuple[list[str], list[str]]:
    """Return what the guarantee covers, and what it does not."""
    if not plan.private:
        return [], []
    if not plan.noisy_sizes:
        return _COVERS, [*_DOES_NOT_COVER, _PUBLIC_SIZES]
    released = (
        "Each site's size: a count with noise of standard deviation "
        f"{plan.privacy.size_noise:g}, released once, before training, as an event of its own."
    )
    return [*_COVERS, released], [*_DOES_NOT_COVER, _NOISY_SIZES]


def site_terms(scene: Scene) -> dict[str, Any]:
    """Return each site's terms as plain data; empty where the run protects nobody."""
    if not scene.plan.private:
        return {}
    return {name: described(terms) for name, terms in scene.terms.items()}


def described(terms: Terms) -> dict[str, Any]:
    """Return one site's terms as plain data, with ε of all that is reserved and what bounds it."""
    history, delta = terms.history(terms.steps), terms.budget.delta
    reserved = epsilon(history, delta, terms.accountant)
    return {
        "size": terms.size,
        "size_noise": terms.size_noise,
        "rate": terms.rate,
        "clip": terms.clip,
        "sigmas": dict(terms.sigmas),
        "multipliers": terms.multipliers,
        "sigma_joint": terms.event.sigma,
        "steps": terms.steps,
        "opening": _opening(terms),
        "epsilon": terms.budget.epsilon,
        "delta": delta,
        "epsilon_reserved": reserved,
        # "best" is the smallest of several: which it was.
        "epsilon_by": bound_by(history, delta, terms.accountant).upper(),
    }


def _opening(terms: Terms) -> dict[str, Any] | None:
    """Return the event that opens each round, or None where there is none."""
    if not terms.openings:
        return None
    opening = terms.opening
    return {
        "rate": opening.rate,
        "sigmas": dict(opening.sigmas),
        "multipliers": opening.multipliers,
        "sigma_joint": opening.event.sigma,
        "count": opening.steps,
    }


def summarise(scene: Scene, records: list[RoundRecord], status: str) -> dict[str, Any]:
    """Return the content of summary.json: the last round, and totals over all of them."""
    last = records[-1]
    worst = min(last.scores, key=lambda name: last.scores[name].accuracy, default=None)
    return {
        "status": status,
        "private": scene.plan.private,
        "rounds": last.round,
        "accuracy": last.accuracy,
        "loss": last.loss,
        **{name: last.metrics.get(name) for name in METRICS},
        "worst_site": worst and {"site": worst, **asdict(last.scores[worst])},
        "fairness": fairness(last.scores) if last.scores else None,
        "seconds": sum(record.seconds for record in records),
        "bytes_down": sum(record.bytes_down for record in records),
        "bytes_up": sum(record.bytes_up for record in records),
        "epsilon": dict(last.epsilon),
        "delta": {n: t.budget.delta for n, t in scene.terms.items() if scene.plan.private},
        "adjacency": ADJACENCY if scene.plan.private else None,
        "accountant": scene.plan.privacy.accountant if scene.plan.private else None,
        "model_parameters": FlatModel(scene.module()).size,
    }
