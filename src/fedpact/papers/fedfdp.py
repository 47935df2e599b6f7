"""What `fedpact tune fedfdp` computes and prints: the theorem's λ, and how to choose one."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from fedpact.errors import DataError, InputError
from fedpact.folder import Folder
from fedpact.papers.facts import RunFacts
from fedpact.shown.tables import print_table
from fedpact.theory.fairness import Slopes, best_weight, bound, noise_term

PAPER_VALUES: dict[str, float] = {
    "sigma": 2.0,
    "C": 0.1,
    "d": 582_026,
    "B": 75.0,
    "Q0": -2.3,
    "T": 600,
}
SHARES = (0.03, 0.1, 0.3, 1.0)
WHY_ZERO = (
    "The theorem's λ* is 0. Its bound falls with λ only if a3 < a4 a5, and a5 = 2 Q0 where Q0 "
    "bounds ℓ - F from below. F is a mean of the losses, so Q0 <= 0 <= Q1, a3 - a4 a5 >= 0, and "
    "the bound only grows: it recommends no fairness, whatever the other numbers "
    "(docs/errata.md, F10)."
)
WHY_POSITIVE = (
    "λ* > 0 because Q0 > 0 was given: no record's loss may be below the mean loss, which no data "
    "satisfy (docs/errata.md, F10)."
)
ALTERNATIVES = (
    "Choose λ by a sweep of validation accuracy and Ψ: each fairness_weight a configuration of its "
    "own, side by side with `fedpact compare`. Or from released numbers: λ = c/F with c in (0, 1] "
    'and F the loss that the sites release, which settings = { weight_rule = "relative", '
    "fairness_weight = c } follows round by round. Weights 1 + λ(ℓ - F) are clamped at 0, so with "
    "c <= 1 no record is left out, and as ℓ and F fall together the weights keep their spread."
)


@dataclass(frozen=True)
class TheoremInputs:
    """The theorem's numbers. given: sigma, C, d, B, Q0, T, as far as they were given."""

    gradient_bound: float
    smoothness: float
    convexity: float
    gap: float
    most_difference: float
    start: float
    given: Mapping[str, float] = field(default_factory=dict[str, float])


def answer_question(question: TheoremInputs, run: RunFacts | None) -> dict[str, Any]:
    """Return what --json prints. Raises InputError, and DataError for a damaged run."""
    measured = _released(run) if run else {}
    released = measured.pop("loss", None)
    known = PAPER_VALUES | measured | dict(question.given)
    steps, dimension = int(known["T"]), int(known["d"])
    bounds = Slopes(
        gradient_bound=question.gradient_bound,
        smoothness=question.smoothness,
        convexity=question.convexity,
        gap=question.gap,
        noise=noise_term(known["sigma"], known["C"], dimension, known["B"]),
        least_difference=known["Q0"],
        most_difference=question.most_difference,
        start=question.start,
    )
    best = best_weight(bounds)
    # Q0 = -F where nothing else is known: losses are >= 0.
    loss = -known["Q0"] if known["Q0"] < 0 else None
    sweep = [share / loss for share in SHARES] if loss else []
    usable = [lam for lam in sorted({0.0, best, *sweep}) if 1 + bounds.a[4] * lam > 0]
    return {
        "lam": best,
        "why": WHY_POSITIVE if best > 0 else WHY_ZERO,
        "instead": ALTERNATIVES,
        "sweep": sweep,
        "numbers": {
            "G": question.gradient_bound,
            "L": question.smoothness,
            "mu": question.convexity,
            "Gamma": question.gap,
            "Q1": question.most_difference,
            "Delta1": question.start,
            **known,
            "T": steps,
            "d": dimension,
        },
        "from_run": sorted(set(measured) - set(question.given)),
        "a": bounds.a,
        "slope_at_0": bounds.slope,
        "bound": [{"lam": lam, "P": bound(bounds, lam, steps)} for lam in usable],
        "loss": released,
    }


def _released(run: RunFacts) -> dict[str, float]:
    """What a run made public: its terms, the worst of all sites, and its first and last F."""
    found: dict[str, float] = {}
    if terms := run.privacy["sites"]:
        try:
            found["sigma"] = max(float(t["sigmas"]["gradient"]) for t in terms.values())
        except KeyError as error:
            raise DataError(
                f"privacy.json in {run.path} lacks {error} of a site: expected the noise of the "
                "gradient; restore the file, or run the plan again into a new folder"
            ) from None
        found["C"] = max(site.clip for site in run.site_privacy.values())
        found["B"] = min(site.rate * site.size for site in run.site_privacy.values())
    if rounds := [r for r in run.records if r.round]:
        found["T"] = len(rounds)
    checkpoint = Folder(run.path).path / "state.safetensors"
    if checkpoint.exists():
        found["d"] = Folder(run.path).restore()[0].state.vectors["w"].numel()
    # FedFDP's own F, or that of [fairness] around another algorithm.
    names = ("loss", "fair/loss")
    losses = [r.numbers[name] for r in run.records for name in names if name in r.numbers]
    positive = [loss for loss in losses if loss > 0]
    if not positive:
        raise InputError(
            f"{run.path} has no released loss: expected a run of FedFDP, or with [fairness], after "
            "its first round; name the folder of such a run, or none"
        )
    return found | {"Q0": -positive[0], "loss": positive[-1]}


def print_answer(found: Mapping[str, Any]) -> None:
    """Print for a reader."""
    console = Console(highlight=False, soft_wrap=True)
    numbers = ", ".join(f"{k} = {v:.4g}" for k, v in found["numbers"].items())
    console.print(numbers, markup=False)
    if found["from_run"]:
        console.print(f"from the run's released numbers: {', '.join(found['from_run'])}")
    console.print(f"\nλ* = {found['lam']:.4g}    a3 - a4 a5 = {found['slope_at_0']:.4g}")
    console.print(found["why"] + "\n")
    console.print(found["instead"], markup=False)
    if found["loss"] is not None:
        console.print(f"The last released F is {found['loss']:.4g}: λ <= {1 / found['loss']:.3g}.")
    title = "the theorem's bound, as far as it has a meaning: 1 + 2 Q0 λ > 0"
    table = Table(title=title, title_justify="left", box=None)
    table.add_column("λ", justify="right")
    table.add_column("P(λ)", justify="right")
    for row in found["bound"]:
        table.add_row(f"{row['lam']:.3g}", f"{row['P']:.4g}")
    print_table(console, table)
    if found["sweep"]:
        console.print("sweep: λ = 0, " + ", ".join(f"{lam:.3g}" for lam in found["sweep"]))
