"""A run as a model card, and a comparison for other programs: curves as CSV, its table as LaTeX.

Model cards are Markdown with the headings and marks of Hugging Face's cards.

Sites are not named, and their number is given as a range, such as "5 to 9": the exact number could
show which site is missing. Figures of single sites, and exact figures of held-out records, are left
out.
"""

import csv
import io
import json
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any, Final

from jinja2 import Environment, StrictUndefined
from pydantic import ValidationError

from fedpact.common.configuration import DEFAULTS_KEY, flatten, override, plan_error
from fedpact.common.errors import PlanError
from fedpact.common.format import count_noun, duration, number, percent, upper
from fedpact.common.run_settings import About
from fedpact.plan import Plan
from fedpact.report import evaluations
from fedpact.report.compared_runs import Comparison, Entry
from fedpact.report.comparison import Cell, figure_columns, guarantees, inequality, tabulate
from fedpact.report.run_summary import BUDGETS, RunSummary, largest_epsilon

MIN_SITES: Final = 5
"""A smaller number of sites is not stated."""

SIMULATED: Final = (
    "A SIMULATION, which protects nobody: its noise came from a seed. Every ε states what a "
    "deployment with these settings would guarantee."
)
_SECURE: Final = (
    "Secure aggregation: a server that follows the protocol sees weighted means over several sites "
    "and no single site's vector. Only an ε that is stated to need honest sites relies on it."
)
PLAIN: Final = "NOT PRIVATE: no (ε, δ) guarantee of any kind."


def about_of(plan: Mapping[str, Any], changes: Sequence[str]) -> About:
    """Return a plan's [about] with `about.key=value` over it. Raises PlanError: another key."""
    raw = {"about": dict(plan.get("about", {}))}
    for change in changes:
        override(raw, change)
    if set(raw) != {"about"}:
        others = ", ".join(sorted(set(raw) - {"about"}))
        raise PlanError(
            f"--set {others}: the run is finished, so only its description can change; expected "
            "about.key=value, as in about.purpose=..."
        )
    try:
        return About.model_validate(raw["about"])
    except ValidationError as error:
        raise plan_error(error, ("about",), About) from None


def find_warnings(run: RunSummary) -> list[str]:
    """Return what a reader of the card must know first."""
    if not run.private:
        return [PLAIN]
    return [SIMULATED] if run.seeded else []


def describe_count(sites: int) -> str:
    """Return a range for a number of sites, in words.

    >>> describe_count(3), describe_count(5), describe_count(12), describe_count(1999)
    ('fewer than 5 sites', '5 to 9 sites', '10 to 19 sites', '1,000 to 1,999 sites')
    """
    if sites < MIN_SITES:
        return f"fewer than {MIN_SITES} sites"
    starts = [digit * 10**power for power in range(len(str(sites)) + 1) for digit in (1, 2, 5)]
    place = bisect_right(starts, sites)
    return f"{starts[place - 1]:,} to {starts[place] - 1:,} sites"


NEEDED: Final = "[More Information Needed]"
_ALWAYS: Final = (
    *("algorithm", "rounds", "sampling_rate", "privacy.mode", "privacy.epsilon"),
    *("privacy.delta", "privacy.clip"),
)
# Describe people, places or the machine, or reveal names or the number of sites.
_NEVER: Final = (
    *("about", "data", "run", "policy", "privacy.per_site", "seed", DEFAULTS_KEY),
    *("sites", "sites_per_round", "secure_aggregation", "privacy.honest", "robust.liars"),
)
_SOFTWARE: Final = ("fedpact", "torch", "numpy", "python")


def render_model_card(run: RunSummary, about: About) -> str:
    """Return the card."""
    template = files("fedpact.report").joinpath("model_card.md.j2").read_text("utf-8")
    environment = Environment(
        autoescape=False, undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True
    )
    # For a path, the file's name.
    data = str(run.plan["data"]).rpartition("/")[2]
    name = about.name or f"{run.plan['algorithm']} on {data}"
    many, count = describe_count(len(run.sites)), run.summary.get("model_parameters")
    warnings = find_warnings(run)
    return environment.from_string(template).render(
        run=run,
        about=about,
        data=data,
        name=name,
        many=many,
        warnings=warnings,
        training=_training(run, many),
        guarantee=_guarantee(run),
        covers=_covers(run),
        needed=NEEDED,
        metadata=_metadata(run, name, about.licence),
        parameters=count_noun(count, "parameter") if count else "size not recorded",
        uncovered=run.privacy["does_not_cover"] if run.private else warnings,
        settings=_settings(run),
        seconds=duration(run.seconds),
        tested=_describe_tests(run),
        results=_results(run),
        unevaluated=evaluations.why_none(run, named=False),
        software=[(k, run.environment[k]) for k in _SOFTWARE if k in run.environment],
    )


def _training(run: RunSummary, many: str) -> str:
    protected = ". Records stayed at their sites, and each site enforced its own budget."
    return (
        f"A {run.plan['model']} model, trained by federated learning ({run.plan['algorithm']}) "
        f"with {many}, {count_noun(run.last.round, 'round')}"
        + (protected if run.private else ", without privacy.")
    )


def _guarantee(run: RunSummary) -> str:
    """Return (ε, δ) in words, with unit, adjacency and accountant, rounded up."""
    if not run.private:
        return PLAIN
    privacy, bound = run.privacy, run.reserved
    return (
        f"(ε, δ)-differential privacy per {privacy['unit']} of a site, at every site, with ε "
        f"at most {bound}, and δ = {upper(bound.delta)}; adjacency: {privacy['adjacency']}; "
        f"accountant: {privacy['accountant']}. For a person with records at two sites, both "
        "ε add up."
    )


def _covers(run: RunSummary) -> list[str]:
    """Return what the guarantee covers, without numbers of sites."""
    lines = list(map(str, run.privacy["covers"]))
    kept = [line for line in lines if not re.search(r"threshold [\d,]+ of [\d,]+ sites", line)]
    return kept if len(kept) == len(lines) else [*kept, _SECURE]


def _metadata(run: RunSummary, name: str, licence: str | None) -> str:
    """Return the card's YAML metadata; its values are JSON."""
    kind = "differential-privacy" if run.private else "not-private"
    found = {
        "library_name": "fedpact",
        "model_name": name,
        **({"license": licence} if licence else {}),
        "tags": ["federated-learning", kind, *(["simulation"] if run.seeded else [])],
        "metrics": ["accuracy"] if run.counted else [],
    }
    return "".join(f"{key}: {json.dumps(found[key], ensure_ascii=False)}\n" for key in found)


def _settings(run: RunSummary) -> list[tuple[str, str]]:
    """Return the settings of the training: the most important ones, and those not at defaults."""
    usual = flatten(Plan().model_dump(mode="json"))
    return [
        (key, str(value))
        for key, value in flatten(run.plan).items()
        if not (key in BUDGETS and isinstance(value, list))
        and (
            (key in _ALWAYS and value is not None)
            or (
                usual.get(key, {}) != value
                and not any(f"{key}.".startswith(f"{n}.") for n in _NEVER)
            )
        )
    ]


def _describe_tests(run: RunSummary) -> str:
    found = list[str]()
    if run.evaluated and not run.pooled:
        found.append(f"A public test set; {'accuracy and ' * run.counted}mean loss.")
    if run.released:
        found.append(
            "Records that the sites held out of training, chosen by each record alone: noisy "
            f"counts, charged in the sites' ledgers, with intervals at level "
            f"{run.released['level']:g}."
        )
    return " ".join(found) or NEEDED


def _results(run: RunSummary) -> list[tuple[str, ...]]:
    rows = list[tuple[str, str, str]]()
    if run.evaluated and not run.pooled:
        last = run.evaluated[-1]
        if run.counted:
            rows.append(("accuracy, public test set", percent(last.accuracy), "–"))
        rows.append(("mean loss, public test set", number(last.loss), "–"))
    for row in evaluations.read_figures(run):
        rows.append((f"{row['name']}, released: {row['about']}", row["value"], row["interval"]))
    # A class or a group may have the sign that ends a cell.
    return [(name.replace("|", r"\|"), *cells) for name, *cells in rows]


COLUMNS: Final = (
    *("run", "algorithm", "epsilon_allowed", "seed"),
    *("round", "accuracy", "loss", "epsilon", "bytes", "simulated_seconds"),
)
# Characters that LaTeX would interpret, and those that its fonts lack.
_TEX: Final = str.maketrans(
    {
        **{sign: f"\\{sign}" for sign in "&%$#_{}"},
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "±": r"$\pm$",
        "×": r"$\times$",
        "·": r"$\cdot$",
        "∞": r"$\infty$",
        "–": "--",
        **{
            sign: f"${name}$"
            for sign, name in zip(
                "εδτησλΨ",
                (r"\varepsilon", r"\delta", r"\tau", r"\eta", r"\sigma", r"\lambda", r"\Psi"),
                strict=True,
            )
        },
    }
)


def curves_as_csv(comparison: Comparison) -> str:
    """Return a line for each round of each run that has ended; missing figures are empty.

    epsilon_allowed: the largest budget of a site; empty without privacy. Other swept keys have
    their own columns.
    accuracy in [0, 1] and loss: of the global model. epsilon: the largest that a site's training
    has spent so far; empty without privacy. Where releases decide how many follow (Plan.adaptive),
    it is no bound: the table has the reserved ε. bytes: of all messages so far.
    simulated_seconds: by the plan's [clock], so far; empty without one.
    """
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    swept = [key for key in comparison.swept if key not in ("algorithm", "privacy.epsilon")]
    rows.writerow((*COLUMNS, *swept))
    for entry in comparison.entries:
        for run in entry.runs:
            named = (entry.name, run.plan.get("algorithm"), run.epsilon_allowed, run.seed)
            for record, sent, clock in run.course:
                spent = largest_epsilon(record.epsilon.values()) if record.epsilon else None
                accuracy = record.accuracy if run.counted else None
                figures = (record.round, accuracy, record.loss, spent, sent, clock or None)
                rows.writerow((*named, *figures, *(entry.point.values.get(key) for key in swept)))
    return text.getvalue()


def table_as_latex(comparison: Comparison) -> str:
    r"""Return the comparison's table, means ± deviations, for \usepackage{booktabs}.

    Notes on ε, and on why the comparison may be unfair, follow.
    """
    plans: dict[str, Cell] = {
        "algorithm": lambda entry: str(entry.plan.get("algorithm", "–")),
        "allowed ε": _format_allowed,
    }
    table = tabulate(plans | figure_columns(comparison), comparison)
    lines = [
        f"\\begin{{tabular}}{{l{'r' * len(table.headings)}}}",
        r"\toprule",
        _row("", *table.headings),
        r"\midrule",
        *(_row(*cells) for cells in table.rows),
        r"\bottomrule",
        r"\end{tabular}",
    ]
    notes = [inequality(comparison), *guarantees(comparison)]
    lines += [f"\\par\\smallskip\n{note.translate(_TEX)}" for note in notes if note]
    return "\n".join(lines) + "\n"


def _format_allowed(entry: Entry) -> str:
    found = [allowed for run in entry.runs if (allowed := run.epsilon_allowed) is not None]
    return upper(max(found)) if found else "–"


def _row(*cells: str) -> str:
    return " & ".join(cell.translate(_TEX) for cell in cells) + r" \\"
