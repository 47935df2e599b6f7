"""What a statement of privacy says of evaluations: what is released, of whom, and what it costs."""

from collections.abc import Sequence
from typing import Any

from fedpact.evaluation.settings import EvaluationSettings
from fedpact.evaluation.totals import SumsForm
from fedpact.privacy.once import FullDataRelease
from fedpact.text import upper
from fedpact.theory.accounting import epsilon
from fedpact.theory.persons import epsilon_per_person

_HELD_ONLY = (
    "About {share:.0%} of a site's {unit}s are held out of its training, and nothing of them is "
    "released: what the model does on them is for the site's owner alone."
)


def describe_evaluation(
    once: FullDataRelease,
    form: SumsForm,
    persons: bool,
    records: Sequence[int],
    *,
    own_models: bool,
    masked: bool,
) -> dict[str, Any]:
    """Return what sites release of held-out records, and what it costs, as plain data.

    own_models: whether each site looks at a model of its own. masked: whether the server sees sums
    of the sites' training only.
    persons: whether persons decide who is held out. records: for how many of one person's ε is
    told; of none where it is of persons anyway.
    """
    delta, of_persons = once.budget.delta, form.unit == "person"
    several = () if of_persons else records
    return {
        **form.settings.model_dump(mode="json"),
        "groups": list(form.groups),
        "classes": list(form.classes),
        "unit": form.unit,
        "split_by": "person" if persons else "record",
        "own_models": own_models,
        "masked": masked,
        "sigma": once.sigma,
        "sigma_joint": once.event.sigma,
        "times": once.times,
        "accountant": once.accountant,
        "epsilon_reserved": epsilon(once.history, delta, once.accountant),
        "epsilon_per_person": {str(k): epsilon_per_person(once.history, delta, k) for k in several},
    }


def state_held_out(
    of: dict[str, Any] | None, settings: EvaluationSettings, unit: str, *, private: bool
) -> list[str]:
    """Return what a guarantee says of held-out records. of: what `describe_evaluation` returns, or
    None."""
    if of is not None:
        return [state_evaluation(of)]
    held = private and settings.used
    return [_HELD_ONLY.format(share=settings.share, unit=unit)] if held else []


def state_evaluation(of: dict[str, Any]) -> str:
    """Return what a guarantee says of evaluations. of: what `describe_evaluation` returns."""
    person, whole = of["unit"] == "person", of["split_by"] == "person"
    each = "person, with all records," if whole else "record"
    told = (
        f"Evaluations: about {of['share']:.0%} of a site's {of['unit']}s are held out of its "
        f"training. Each {each} decides by itself whether to be among them (a hash under a secret "
        f"of the site), and then bears (ε, δ) = ({of['epsilon']:g}, {of['delta']:g}) "
        f"{'' if person or not whole else 'a record '}for all evaluations together, and nothing "
        "of the training's; the others bear the training's, and nothing of this one."
    )
    if of["own_models"]:
        told += " What is evaluated at a site is its own model."
    if of["masked"]:
        told += (
            " Secure aggregation does not sum them: the server sees each site's noisy counts, and "
            "their noise is the site's own."
        )
    return f"{told} {of_person(of)}"


def of_person(of: dict[str, Any]) -> str:
    """Return what evaluations cost a person with several records. of: what `describe_evaluation`
    returns."""
    if of["unit"] == "person":
        return "Each of a person's m records counts 1/m in them."
    several = ", ".join(f"{k} records {upper(e)}" for k, e in of["epsilon_per_person"].items())
    both = (
        "; that, or what training costs, as all of them are on one side."
        if of["split_by"] == "person"
        else "; and where others of them are trained on, what those cost there as well: at most "
        "the sum of both ε, at the sum of both δ."
    )
    return f"A person with several records pays for evaluations at most {several}{both}"
