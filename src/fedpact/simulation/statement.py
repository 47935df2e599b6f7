"""A run's privacy statement, written before it starts: the content of privacy.json."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedpact.algorithms.wrappers import optimizers
from fedpact.common.format import upper
from fedpact.common.user_code import is_own
from fedpact.evaluation.held_out import SumsForm
from fedpact.plan import Plan
from fedpact.privacy.accounting.accountant import epsilon, find_binding_accountant
from fedpact.privacy.accounting.group_privacy import epsilon_per_person
from fedpact.privacy.ledger.reservations import FIXED, WHY
from fedpact.privacy.mechanisms import mechanism_of
from fedpact.privacy.terms import Terms
from fedpact.simulation.secure_aggregation.graph import secure_terms
from fedpact.simulation.setup import SimulationSetup

_COVERS = [
    "Everything a site sends during training: model updates, losses and counts. The site charges "
    "its ledger first, then clips and adds noise.",
    "The final model and every intermediate model, against the server, the other sites and anyone "
    "who sees them.",
]
_DOES_NOT_COVER = [
    "How long a site takes to answer, and when it is online.",
    "Harm to a person that would occur even if the person's record were left out.",
]
_SEEDED = (
    "Rounding of floating-point noise: a simulation draws its noise from a seeded generator. It "
    "measures what a federation would do and protects nobody."
)
_UNCOUNTED = (
    "Persons with more records than stated: the records of a person are not counted, and each ε "
    "per person holds for persons with at most that many records at a site."
)
_COUNTED = (
    "ε per record, for a person with more than {k} records at a site: {k} of them are used, and "
    "one more record may change which. ε per person of {k} holds for all records of such a person."
)
_PERSON = (
    "ε is per person: a patient with five visits has the same ε as one with one visit. All of a "
    "person's m records enter a batch together, each with weight 1/m. For a person at two sites, "
    "the two ε add up."
)
_TWO_SITES = "One person under two names, or at two sites: there the two ε add up."
_UNPROTECTED = "Nothing is clipped and no noise is added."
_PUBLIC_SIZES = "The sites' declared sizes, sampling rates and label names, which are public."
_NOISY_SIZES = "The sites' sampling rates and label names, which are public."
_OWN_MODELS = (
    "Each site's own model: it is computed from what the site released and from the server's "
    "models, and may be shown as they may."
)
_POOLED = (
    "The accuracy of the global model: there is no public test set, so it is measured on the "
    "sites' held-out records."
)
_SIMULATOR_ONLY = [
    "Accuracy and loss on the sites' held-out records, and Ψ, which is computed from them.",
    "The table of labels per site.",
]
_HELD_ONLY = (
    "About {share:.0%} of a site's {unit}s are held out of its training, and nothing about them is "
    "released: only the site's owner sees how the model does on them."
)

_MEASURED = "norms, clipping and sums are computed from the resulting gradients, in float32"
_PRECISION = {
    "float32": "Gradients are computed in float32.",
    "tf32": f"Gradients are computed with TF32 products; {_MEASURED}.",
    "bf16": f"Gradients are computed in bfloat16; {_MEASURED}.",
}


# How sites place records in the slots of a pass; see per_sample.layout.
_COMPACT = "Compact, without a check of this machine: a simulation protects nobody."
_PLACED = (
    "At its start, each site checks with this model on its machine that a record's gradient "
    "depends neither on other records nor on its slot in a pass. If the check fails, records "
    "are placed at random slots (scattered). The site's log and ledger say which."
)


def statement(
    plan: Plan,
    terms: Mapping[str, Terms],
    sites: int,
    form: SumsForm,
    *,
    randomness: str,
    separation: str,
    persons: bool,
    seeded: bool = False,
    pooled: bool = False,
    simulator_only: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the content of privacy.json.

    sites: how many take part. form: which sums of held-out records they compute. separation: how
    the kernel separates records, in words. persons: whether sites know each record's person.
    seeded: whether this is a simulation. pooled: whether accuracy is measured on the sites'
    held-out records for lack of a test set. simulator_only: numbers that no site would release.
    """
    mode, each = plan.privacy.mode, site_terms(plan, terms)
    of_held = describe_held_out_releases(plan, form, persons)
    return {
        "private": plan.private,
        "why_unprotected": plan.why_unprotected,
        "unit": plan.privacy.unit,
        "per_person": per_person(each, plan.privacy.unit, of_held),
        "adjacency": plan.privacy.adjacency,
        "mechanism": mode,
        "mechanism_meaning": _UNPROTECTED if mode == "none" else mechanism_of(mode).told,
        "separation": separation,
        "placement": (_COMPACT if seeded else _PLACED) if plan.private else "",
        "precision": _PRECISION[plan.run.precision] if plan.private else "",
        "accountant": plan.privacy.accountant if plan.private else "none",
        # No algorithm chooses q or σ from releases, so the engine reserves fixed events.
        "accounting": FIXED if plan.private else "none",
        "accounting_reason": WHY if plan.private else "",
        "randomness": randomness,
        "sizes": "noisy" if plan.noisy_sizes else "public",
        "accuracy_pooled": pooled,
        "own_models": plan.method.has_own_models,
        "simulator_only": list(simulator_only),
        "features": plan.features.describe() or plan.views.describe(),
        "initial": plan.initial.describe(),
        "sites_per_round": plan.sites_per_round,
        "covers": _covers(plan, terms, sites, form, of_held) if plan.private else [],
        "does_not_cover": _list_uncovered(plan, terms, persons, seeded) if plan.private else [],
        "secure_aggregation": secure_terms(plan, sites, terms),
        "evaluation": of_held,
        "sites": each,
    }


def of_simulation(scene: SimulationSetup) -> dict[str, Any]:
    """Return the content of a simulation's privacy.json."""
    headed = bool(scene.plan.head)
    pooled = headed or scene.dataset.x_test is None
    measured = [optimizers.MEASURED if headed else _POOLED] * pooled
    return statement(
        scene.plan,
        scene.terms,
        len(scene.sites),
        scene.form,
        randomness="seeded simulation",
        separation=scene.workshop.separation() if scene.plan.private else "",
        persons=scene.dataset.person is not None,
        seeded=True,
        pooled=pooled,
        simulator_only=[*_SIMULATOR_ONLY, *measured],
    )


def _covers(
    plan: Plan,
    terms: Mapping[str, Terms],
    sites: int,
    form: SumsForm,
    of_held: dict[str, Any] | None,
) -> list[str]:
    """Return the lines on what a private run's guarantee covers."""
    names, share = plan.records.released, plan.privacy.column_share
    lines = [
        *_COVERS,
        f"The scales of the columns {', '.join(names)}: means and mean squares of values in their "
        "declared ranges, released once with noise, before training, as one event over all "
        f"records. It takes {share:.3g} of the budget, measured by 1/σ²."
        if names
        else "",
        "Each site's size: a count with noise of standard deviation "
        f"{plan.privacy.size_noise:g}, released once, before training, as a separate event."
        if plan.noisy_sizes
        else "",
    ]
    if plan.head:
        lines.append(optimizers.TOLD.format(head=plan.head))
    elif plan.method.has_own_models:
        lines.append(_OWN_MODELS)
    lines.append(plan.participants(terms).describe())
    if of_held is not None:
        lines.append(state_evaluation(of_held))
    elif form.share:
        lines.append(_HELD_ONLY.format(share=form.share, unit=form.unit))
    lines.append(describe_masks(plan, sites))
    return [line for line in lines if line]


def _list_uncovered(
    plan: Plan, terms: Mapping[str, Terms], persons: bool, seeded: bool
) -> list[str]:
    """Return the lines on what a private run's guarantee does not cover."""
    most = plan.privacy.person_records
    if plan.privacy.unit == "person":
        of_person = _TWO_SITES
    else:
        of_person = _UNCOUNTED if most is None or not persons else _COUNTED.format(k=most)
    code = [name for name in (plan.model, plan.task.loss or "") if is_own(name)]
    lines = [
        *_DOES_NOT_COVER,
        _SEEDED if seeded else "",
        _NOISY_SIZES if plan.noisy_sizes else _PUBLIC_SIZES,
        of_person,
        plan.features.uncovered,
        plan.initial.uncovered,
        f"Numbers in the code of {' and '.join(code)}: its author is trusted not to have derived "
        "them from records. Initial weights are treated separately."
        if code
        else "",
        _by_delta_alone(terms),
    ]
    return [line for line in lines if line]


def describe_held_out_releases(plan: Plan, form: SumsForm, persons: bool) -> dict[str, Any] | None:
    """Return what sites release about held-out records, as plain data; None if nothing.

    persons: whether sites know each record's person, and hold persons out with all their records.
    """
    if (once := form.once) is None:
        return None
    delta = once.budget.delta
    several = () if form.unit == "person" else plan.privacy.told_records
    return {
        **form.settings.model_dump(mode="json"),
        "groups": list(form.groups),
        "classes": list(form.classes),
        "unit": form.unit,
        "split_by": "person" if persons else "record",
        "own_models": plan.method.has_own_models,
        "masked": bool(plan.secure_aggregation.threshold),
        "sigma": once.sigma,
        "sigma_joint": once.event.sigma,
        "times": once.times,
        "accountant": once.accountant,
        "epsilon_reserved": epsilon(once.history, delta, once.accountant),
        "epsilon_per_person": {str(k): epsilon_per_person(once.history, delta, k) for k in several},
    }


def _by_delta_alone(terms: Mapping[str, Terms]) -> str:
    """Return a warning if δ is so large that (ε, δ) would hold without any noise.

    terms: of each site. Nothing is released about a record that is in no batch, and the probability
    of being in one is at most Σ q_t over all releases.
    """
    found = list[tuple[float, float]]()
    for one in terms.values():
        read = sum(event.q * count for event, count in one.history(one.steps).items())
        if read <= one.delta:
            found.append((read, one.delta))
    if not found:
        return ""
    read, delta = max(found)
    return (
        f"Records that happen to be in a batch: at {len(found)} of {len(terms)} sites a record is "
        f"in one with probability at most {upper(read)}, which is within δ = {upper(delta)}, so "
        "this (ε, δ) would hold without any noise. For protection by noise, choose a far smaller δ."
    )


def site_terms(plan: Plan, terms: Mapping[str, Terms]) -> dict[str, Any]:
    """Return each site's terms as plain data, with the number of rounds it takes part in.

    Empty if the run protects nobody.
    """
    if not plan.private:
        return {}
    told, rounds = plan.privacy.told_records, plan.participants(terms).rounds(plan.rounds)
    return {n: describe_terms(one, told) | {"rounds": rounds[n]} for n, one in terms.items()}


def per_person(
    sites: Mapping[str, Mapping[str, Any]], unit: str, of_held: dict[str, Any] | None
) -> str:
    """Return in words what ε is for a person with several records; "" if nobody is protected.

    sites: from `site_terms`. unit: of the plan. of_held: from `describe_held_out_releases`.
    Each ε is the largest of any site.
    """
    if not sites or unit == "person":
        return _PERSON if sites else ""

    def told(key: str) -> str:
        each = [site[key] for site in sites.values()]
        return ", ".join(f"{k} records {upper(max(one[k] for one in each))}" for k in each[0])

    most = max(site["epsilon_per_person"]["5"] for site in sites.values())
    alone = next(iter(sites.values()))["epsilon_alone_per_person"]
    beside = f" Without other sites' noise: {told('epsilon_alone_per_person')}." if alone else ""
    return (
        "ε is per record. For a person with several records at a site it is larger: at most "
        f"{upper(most)} for a patient with five visits{', by training' if of_held else ''}. For "
        "all of a person's records together, at the same δ and the largest of any site at the "
        "plan's sizes (each ledger counts its own site): "
        f"{told('epsilon_per_person')}.{beside} For a person at two sites, the two ε add up."
        + (f" {describe_person_cost(of_held)}" if of_held else "")
    )


def describe_terms(terms: Terms, records: Sequence[int] = ()) -> dict[str, Any]:
    """Return one site's terms as plain data, with ε of all that is reserved and what bounds it.

    records: the numbers of records per person for which ε is stated, too.
    """
    history, opening, columns = terms.history(terms.steps), None, None
    persons = {str(k): terms.per_person(k) for k in records}
    reserved = epsilon(history, terms.delta, terms.accountant)
    if terms.openings:
        opening = {
            "rate": terms.opening.rate,
            "sigmas": dict(terms.opening.sigmas),
            "multipliers": terms.opening.multipliers,
            "sigma_joint": terms.opening.event.sigma,
            "count": terms.opening.steps,
        }
    if (of := terms.columns) is not None:
        alone = epsilon({of.event: 1}, terms.delta, terms.accountant)
        columns = {"sigma": of.event.sigma, "count": of.times, "epsilon": alone}
    return {
        "size": terms.size,
        "size_noise": terms.size_noise,
        "rate": terms.rate,
        "clip": terms.clip,
        # Per round if it changes; the noise changes in proportion, so multipliers stay the same.
        "clip_by_round": list(terms.clips) or None,
        "sigmas": dict(terms.sigmas),
        "multipliers": terms.multipliers,
        "sigma_joint": terms.event.sigma,
        "steps": terms.steps,
        # The events that open each round, and that release the columns' means.
        "opening": opening,
        "columns": columns,
        "epsilon": terms.budget.epsilon,
        "delta": terms.budget.delta,
        "epsilon_reserved": reserved,
        **terms.guarantee.entries,
        # 0: no coarse grid; else the noise's deviation in units of the grid.
        "grid": terms.units,
        "epsilon_per_person": {k: cost.epsilon for k, cost in persons.items()},
        "epsilon_alone_per_person": {k: cost.alone for k, cost in persons.items()}
        if terms.shares_noise
        else None,
        # Which accountant gave the smallest bound, if it is "best".
        "epsilon_by": find_binding_accountant(history, terms.delta, terms.accountant).upper(),
    }


def state_evaluation(of: dict[str, Any]) -> str:
    """Return the line on evaluations. of: from `describe_held_out_releases`, here and below."""
    person, whole = of["unit"] == "person", of["split_by"] == "person"
    each = "person, with all records," if whole else "record"
    told = (
        f"Evaluations: about {of['share']:.0%} of a site's {of['unit']}s are held out of its "
        f"training. A hash with a secret key of the site decides this for each {each} alone. Those "
        f"held out have (ε, δ) = ({upper(of['epsilon'])}, {upper(of['delta'])}) "
        f"{'' if person or not whole else 'per record '}for all evaluations together, and no cost "
        "from training; the others have the cost of training, and none from evaluations."
    )
    if of["own_models"]:
        told += " Each site evaluates its own model."
    if of["masked"]:
        told += (
            " Secure aggregation does not sum them: the server sees each site's noisy counts, and "
            "their noise is the site's own."
        )
    return f"{told} {describe_person_cost(of)}"


def describe_person_cost(of: dict[str, Any]) -> str:
    """Return the sentence on what evaluations cost a person with several records."""
    if of["unit"] == "person":
        return "Each of a person's m records counts 1/m in them."
    several = ", ".join(f"{k} records {upper(e)}" for k, e in of["epsilon_per_person"].items())
    both = (
        "; either this or the ε of training applies, as all records of a person are on one side."
        if of["split_by"] == "person"
        else "; if other records of the person are trained on, the ε of those is added: at most "
        "the sum of both ε, at the sum of both δ."
    )
    return f"For a person with several records, ε of evaluations is at most {several}{both}"


def describe_masks(plan: Plan, sites: int) -> str:
    """Return the line on secure aggregation, or on shared noise; "" without it."""
    threshold = plan.secure_aggregation.threshold
    if not threshold:
        return ""
    if plan.privacy.shares_noise:
        dishonest = plan.privacy.colluding(threshold, sites)
        return (
            "Noise for the sum: ε holds against the server together with up to "
            f"{dishonest} sites, including any that see an opened sum, if in each sum "
            f"{threshold - dishonest} other sites add their share of noise and keep it secret "
            f"(threshold {threshold} of {sites} sites), and as far as the cryptography of secure "
            "aggregation holds. Against everybody together, without any assumption, the larger ε "
            "holds that is also stated (alone)."
        )
    return (
        f"Secure aggregation, threshold {threshold} of {sites} sites: a server that follows the "
        f"protocol sees weighted means over at least {threshold} sites and no single site's "
        "vector. This requires other sites that keep their part secret. The stated (ε, δ) does not "
        "rely on it, and holds against a server that sees everything."
    )
