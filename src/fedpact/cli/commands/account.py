"""`fedpact account` and `fedpact tradeoffs`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from fedpact.cli.console import AsJson, show
from fedpact.common import check
from fedpact.common.errors import InputError
from fedpact.common.format import lower, upper
from fedpact.common.notebook import print_table

if TYPE_CHECKING:
    from fedpact.privacy.accounting.accountant import Accountant, Budget, Conversion, History
    from fedpact.privacy.ledger.receipt import Remaining

_CONVERSIONS = {
    "balle": "Balle's conversion",
    "mironov": "Mironov's conversion, orders 2 to 64",
}


def account(
    q: Annotated[
        float | None, typer.Option(help="Sampling rate of the Poisson batches, in (0, 1].")
    ] = None,
    sigma: Annotated[
        float | None, typer.Option(help="Noise multiplier: noise over sensitivity, > 0.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Number of releases, >= 1.")] = None,
    epsilon: Annotated[
        float | None, typer.Option(help="The budget's ε; then --q, --sigma or --steps is computed.")
    ] = None,
    delta: Annotated[float, typer.Option(help="The budget's δ, in (0, 1).")] = 1e-5,
    accountant: Annotated[
        Literal["best", "pld", "rdp"], typer.Option(help="best: the smallest bound.")
    ] = "best",
    conversion: Annotated[
        Literal["balle", "mironov"],
        typer.Option(help="From RDP to (ε, δ): balle is tighter, mironov is the papers'."),
    ] = "balle",
    every: Annotated[
        bool, typer.Option("--all", help="Show every accountant and conversion side by side.")
    ] = False,
    ledger: Annotated[
        Path | None,
        typer.Option(
            help="A site's ledger: --epsilon and --delta cover its past runs and one more."
        ),
    ] = None,
    joint: Annotated[
        bool,
        typer.Option(
            "--joint",
            help="With --ledger: compose past and new runs as one fixed sequence. Tighter, and "
            "valid "
            "only if no setting of the new run depends on what the others released.",
        ),
    ] = False,
    per_person: Annotated[
        int | None,
        typer.Option(
            help="k: also show ε for a person with up to k records, each sampled on its own."
        ),
    ] = None,
    tuned: Annotated[
        int | None,
        typer.Option(
            help="m: also show ε of trying m settings, of all runs together and of the best alone."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compute ε, or with --epsilon the noise, the number of releases or the sampling rate."""
    from fedpact.privacy.accounting.accountant import ACCOUNTANTS, ADJACENCY_BY_UNIT, Budget
    from fedpact.privacy.ledger.receipt import remaining

    given = {"q": q, "sigma": sigma, "steps": steps, "epsilon": epsilon}
    _check_options(given, accountant, conversion, ledger, joint, per_person, tuned)
    solved = next(name for name, value in given.items() if value is None)
    budget = None if epsilon is None else Budget(epsilon, delta)
    left = remaining(ledger, budget, joint=joint) if ledger and budget else None
    if per_person is not None and left and left.unit == "person":
        raise InputError(
            f"--per-person {per_person} with a ledger whose ε are per person already: leave it out"
        )
    ways: list[tuple[Accountant, Conversion]] = [(accountant, conversion)]
    if every:
        ways = [*((name, "balle") for name in ACCOUNTANTS), ("rdp", "mironov")]
    budget, spent = (left.budget, left.spent) if left else (budget, {})
    answers = [_solve(q, sigma, steps, budget, delta, spent, *way, per_person) for way in ways]
    if tuned is not None:
        answers = [answer | {"tuned": _add_trials(answer, tuned)} for answer in answers]
    adjacency = ADJACENCY_BY_UNIT[left.unit if left else "record"]
    document = {
        **{"solved_for": solved, "adjacency": adjacency, "covers": _covers(left, joint)},
        **({"ledger": _describe(left, joint)} if left else {}),
        **({"results": answers} if every else answers[0]),
    }
    show(document, as_json, lambda: _print(document, answers, per_person))


def _check_options(
    given: Mapping[str, float | None],
    accountant: Accountant,
    conversion: Conversion,
    ledger: Path | None,
    joint: bool,
    per_person: int | None,
    tuned: int | None,
) -> None:
    """Raise InputError for options out of range, or that cannot be combined."""
    from fedpact.privacy.accounting.accountant import ACCOUNTANTS

    options = ["--" + name for name, value in given.items() if value is not None]
    converts = conversion == "balle" or ACCOUNTANTS[accountant].converts
    rules = {
        f"given are {', '.join(options) or 'none'}: expected exactly three of --q, --sigma, "
        "--steps and --epsilon; the fourth is computed": len(options) != 3,
        f"conversion is {conversion!r} with accountant {accountant!r}, which needs no conversion: "
        "leave --conversion out, or choose --accountant rdp": not converts,
        f"--per-person is {per_person}: expected the largest number of records per person, at "
        "least 1": per_person is not None and per_person < 1,
        f"--tuned is {tuned}: expected the number of runs tried, 2 or more": tuned is not None
        and tuned < 2,
        f"--tuned {tuned} with --ledger: `fedpact ledger show` tells what all runs in a ledger "
        "cost together; leave --ledger out for the cost of new runs": tuned and ledger,
        f"--tuned {tuned} with --per-person {per_person}: the bound on the best of several runs "
        "holds per record only; for all runs together multiply --steps by their number and leave "
        "--tuned out": tuned and per_person,
        "--joint is given without --ledger: name the ledger whose runs to compose": joint
        and ledger is None,
        "--ledger is given without --epsilon: give the ε that all runs on the ledger's records "
        "share, and two of --q, --sigma and --steps; the third is computed for one more run": (
            ledger and given["epsilon"] is None
        ),
    }
    for told, broken in rules.items():
        if broken:
            raise InputError(told)


def _describe(left: Remaining, joint: bool) -> dict[str, Any]:
    told = ("site", "runs", "epsilon_reserved", "delta_reserved", "condition")
    return {key: getattr(left, key) for key in told} | {"combined": "joint" if joint else "apart"}


def _solve(
    q: float | None,
    sigma: float | None,
    steps: int | None,
    budget: Budget | None,
    delta: float,
    spent: History,
    by: Accountant,
    how: Conversion,
    per_person: int | None,
) -> dict[str, Any]:
    """Compute the number that is None, and the ε of the completed setting.

    budget: None if its ε is to be computed at δ. spent: earlier events that it covers, too.
    """
    from fedpact.privacy.accounting.accountant import (
        ACCOUNTANTS,
        SampledGaussian,
        epsilon,
        find_binding_accountant,
        max_steps,
    )
    from fedpact.privacy.accounting.calibration import largest_rate, smallest_sigma
    from fedpact.privacy.accounting.group_privacy import epsilon_per_person

    if steps is not None:
        check.count(steps=steps)
    if budget is not None:
        delta = budget.delta
        if q is None and sigma is not None and steps is not None:
            q = largest_rate(budget, sigma, steps, by, how, spent)
        elif sigma is None and q is not None and steps is not None:
            sigma = smallest_sigma(budget, q, steps, by, how, spent)
        elif q is not None and sigma is not None:
            steps = max_steps(SampledGaussian(q, sigma), budget, by, how, spent)
    if q is None or sigma is None or steps is None:
        raise InputError("one of q, sigma and steps could not be determined")
    event = SampledGaussian(q, sigma)
    history = {**spent, event: spent.get(event, 0) + steps}
    person = {}
    if per_person is not None:
        cost = epsilon_per_person(history, delta, per_person)
        person = {"person_records": per_person, "epsilon_per_person": _finite(cost)}
    return {
        "q": q,
        "sigma": sigma,
        "steps": steps,
        "epsilon": _finite(epsilon(history, delta, by, how)),
        **person,
        "delta": delta,
        "target_epsilon": budget.epsilon if budget else None,
        "accountant": by,
        "bound_by": find_binding_accountant(history, delta, by, how),
        "conversion": how if ACCOUNTANTS[by].converts else None,
    }


def _finite(epsilon: float) -> float | None:
    # JSON has no infinity: null means that no finite bound was found.
    return epsilon if math.isfinite(epsilon) else None


def _add_trials(answer: dict[str, Any], runs: int) -> dict[str, Any]:
    from fedpact.privacy.accounting.accountant import SampledGaussian
    from fedpact.privacy.accounting.tuning_cost import as_document, count_trials

    event = SampledGaussian(answer["q"], answer["sigma"])
    found = count_trials([{event: answer["steps"]}], answer["delta"], times=runs)
    return as_document(found)


def _covers(left: Remaining | None, joint: bool) -> str:
    new = (
        "all releases together, each computed from a Poisson batch with "
        "Gaussian noise; q, sigma and steps fixed in advance; an upper bound"
    )
    if left is None:
        return new
    site = f"the {left.runs} earlier runs of site {left.site}"
    if joint:
        return (
            f"the new run and every event that {site} reserved, as one sequence, valid if no "
            f"setting of the new run depends on what they released: {new}"
        )
    rests = f", given {left.condition}" if left.condition else ""
    return (
        f"the new run alone: {new}. With what {site} reserved, (ε, δ) = "
        f"({upper(left.epsilon_reserved)}, {upper(left.delta_reserved)}){rests}, it stays within "
        "the budget of all runs"
    )


def _print(document: dict[str, Any], answers: list[dict[str, Any]], per_person: int | None) -> None:
    solved = document["solved_for"]
    person = () if per_person is None else (f"ε, person of {per_person}",)
    rows = [
        (
            _bound(row["epsilon"]),
            *(_bound(row["epsilon_per_person"]) for _ in person),
            upper(row["delta"]),
            # What is computed is rounded to the safe side.
            lower(row["q"], 5) if solved == "q" else repr(row["q"]),
            upper(row["sigma"], 5) if solved == "sigma" else repr(row["sigma"]),
            str(row["steps"]),
            _name(row),
        )
        for row in answers
    ]
    columns = ("ε", *person, "δ", "q", "σ", "releases", "accountant")
    console, title = Console(markup=False), f"({solved} is computed)"
    print_table(console, columns, rows, title=title, title_justify="left", box=None)
    if solved == "steps" and not any(row["steps"] for row in answers):
        console.print(
            "\nNot even one such release fits in that budget: use a larger σ or a smaller q."
        )
    console.print(
        f"\n(ε, δ)-differential privacy, {document['adjacency']}. Covers {document['covers']}."
    )
    if person:
        console.print(
            f"ε, person of {per_person}: for all records together of a person with at most "
            f"{per_person} of them, as a patient with {per_person} visits, each sampled for "
            "itself; by PLD of the mixture, an upper bound at the same δ. A person at two sites "
            "pays the sum of both."
        )
    for row in answers:
        if "tuned" in row:
            title = f" ({_name(row)})" if len(answers) > 1 else ""
            console.print(f"\nTrying {row['tuned']['runs']} settings{title}:")
            for line in row["tuned"]["holds_for"]:
                console.print(f"- {line}")


def _bound(epsilon: float | None) -> str:
    return "no finite bound" if epsilon is None else upper(epsilon, 5)


def _name(row: dict[str, Any]) -> str:
    from fedpact.privacy.accounting.accountant import ACCOUNTANTS

    about = ACCOUNTANTS[row["accountant"]]
    if about.parts:
        way = " (Mironov's conversion)" if row["conversion"] == "mironov" else ""
        return f"{about.label}{way}: {row['bound_by'].upper()}"
    return about.label + (f", {_CONVERSIONS[row['conversion']]}" if about.converts else "")


def tradeoffs(
    preset: Annotated[
        str | None, typer.Option(help="'paper': the conventions behind its printed numbers.")
    ] = None,
    q: Annotated[
        float | None, typer.Option(help="Sampling rate of the Poisson batches, in (0, 1).")
    ] = None,
    delta: Annotated[float | None, typer.Option(help="The budget's δ, in (0, 1).")] = None,
    steps: Annotated[
        list[int] | None,
        typer.Option(help="T, the number of releases; once for each table."),
    ] = None,
    epsilon: Annotated[
        list[float] | None, typer.Option(help="The budget's ε; once for each part of a table.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Draw the curves into this file, .png or .svg.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare noise, utility and rate by older composition bounds and by exact accounting."""
    from fedpact.report import tradeoffs as command

    command.tradeoffs(preset, q, delta, steps or (), epsilon or (), out, as_json)
