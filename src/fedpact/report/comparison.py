"""The table of compared runs: cells, effort, and bytes until a target is reached."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import methodcaller
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from fedpact.common.files import write_whole
from fedpact.common.format import (
    duration,
    format_metric,
    headline_metric,
    number,
    percent,
    size,
    span,
    upper,
)
from fedpact.evaluation.metrics import find_display
from fedpact.report import evaluations
from fedpact.report.compared_runs import Comparison, Entry, Outcome, Spread, run_folder
from fedpact.report.comparison_charts import on_the_way, sweeps
from fedpact.report.evaluations import (
    JOINING_HEADINGS,
    JOINING_NOTE,
    joining_rows,
    summarise_joining,
)
from fedpact.report.meaning import explain_comparison
from fedpact.report.run_files import RunFolder
from fedpact.report.template import page


def epsilon_cell(entry: Entry) -> str:
    """Return ε of an entry with its δ, "NOT PRIVATE", or a dash where no run has ended."""
    return number(None) if entry.private is None else spent_cell(entry)


def spent_cell(of: Entry | Outcome) -> str:
    """Return ε of an entry or a run with its δ, rounded up, or "NOT PRIVATE"."""
    if of.epsilon is None:
        return "NOT PRIVATE"
    alone = "" if of.epsilon_alone is None else f" (alone {upper(of.epsilon_alone)})"
    return f"{upper(of.epsilon)}{alone} at δ = {upper(or_nan(of.delta))}"


def or_nan(value: float | None) -> float:
    """Return the value, NaN for None."""
    return math.nan if value is None else value


def percent_cell(spread: Spread | None) -> str:
    """Return it in per cent with two decimals: methods are compared by fractions of a point."""
    if spread is None or not math.isfinite(spread.mean):
        return percent(spread and spread.mean)
    if spread.deviation is None:
        return f"{100 * spread.mean:.2f} %"
    return f"{100 * spread.mean:.2f} ± {100 * spread.deviation:.2f} %"


def fares_cells(entry: Entry, headings: Sequence[str]) -> tuple[str, ...]:
    """Return what the models are judged by, the last and their average; Comparison.headings."""
    if headings[0] == "accuracy":
        found = (entry.spread(lambda o: o.accuracy), entry.spread(lambda o: o.averaged("accuracy")))
        return tuple(map(percent_cell, found))[: len(headings)]
    found = (entry.spread(lambda o: o.loss), entry.spread(lambda o: o.averaged("loss")))
    return tuple(map(number_cell, found))[: len(headings)]


def worst_cell(entry: Entry) -> str:
    """Return accuracy at the site served worst, or mean loss there where there is none."""
    found = entry.spread(lambda o: o.worst)
    return percent_cell(found) if found else number_cell(entry.spread(lambda o: o.worst_loss))


def metric_cell(entry: Entry, name: str) -> str:
    """Return a metric (evaluation.metrics.find_display)."""
    spread = entry.spread(methodcaller("metric", name))
    return percent_cell(spread) if find_display(name).form == "percent" else number_cell(spread)


def number_cell(spread: Spread | None) -> str:
    """Return a plain figure."""
    return spread_cell(spread, lambda value: number(value, digits=3 if value < 1000 else 4))


def spread_cell(spread: Spread | None, form: Callable[[float], str]) -> str:
    """Return a mean and its deviation in a form of single values; a dash for None."""
    return number(None) if spread is None else spread.describe(form)


EFFORT_HEADINGS: Final = ("τ", "η", "iterations", "records read", "σ")
EFFORT_NOTE: Final = (
    "τ: local iterations of a round; η: the length of a step; records read: in the batches of all "
    "sites, as expected; σ: of a step's joint noise, from the least of any site to the most"
)


def effort(comparison: Comparison) -> list[tuple[str, ...]]:
    """Return the table, an entry a row: its name, then its cells in the order of the headings."""
    return [
        (
            entry.name,
            _reach(entry, lambda o: o.steps),
            _reach(entry, _rate),
            _mean(entry, lambda o: o.iterations),
            _mean(entry, lambda o: o.records_read),
            _reach(entry, lambda o: o.sigma),
        )
        for entry in comparison.entries
    ]


def effort_document(entry: Entry) -> dict[str, Any]:
    """Return the same as plain data: least and most over rounds, sites and runs, or a mean."""
    pairs = {"local_steps": lambda o: o.steps, "learning_rate": _rate, "sigma": lambda o: o.sigma}
    means = {"iterations": lambda o: o.iterations, "records_read": lambda o: o.records_read}
    found: dict[str, Any] = {name: entry.range(of) for name, of in pairs.items()}
    return found | {name: s and s.mean for name, of in means.items() for s in [entry.spread(of)]}


def _rate(outcome: Outcome) -> tuple[float, float] | None:
    eta = outcome.learning_rate
    return None if eta is None else (eta, eta)


def _reach(entry: Entry, measure: Callable[[Outcome], tuple[float, float] | None]) -> str:
    found = entry.range(measure)
    if found is None:
        return number(None)
    low, high = map(number, found)
    return span(low, high)


def _mean(entry: Entry, measure: Callable[[Outcome], float | None]) -> str:
    spread = entry.spread(measure)
    return number(None) if spread is None else spread.describe(number)


_STEP: Final = 0.05
_MOST: Final = 4


@dataclass(frozen=True)
class BytesToTarget:
    """A table: accuracies, and for each entry's name what its runs had sent by then."""

    levels: list[str]
    rows: list[tuple[str, ...]]


def count_bytes_until(outcome: Outcome, accuracy: float) -> float | None:
    """Return the bytes, both ways, up to the first evaluation with it; None if there was none."""
    sent = 0
    for record in outcome.run.records:
        sent += record.bytes_down + record.bytes_up
        if record.accuracy is not None and record.accuracy >= accuracy:
            return float(sent)
    return None


def find_bytes_to_targets(comparison: Comparison) -> BytesToTarget | None:
    """Return bytes to the highest multiples of 5 % that some run had; None: no run had any."""
    best = max((_best(outcome) for _, outcome in comparison.outcomes), default=0.0)
    # As a count of steps: 0.8 is no whole number of 0.05 in floating point.
    top = int(best / _STEP + 1e-9)
    levels = [_STEP * step for step in range(max(1, top - _MOST + 1), top + 1)]
    if not levels:
        return None
    rows = [(e.name, *(_cell(e, round(level, 9)) for level in levels)) for e in comparison.entries]
    return BytesToTarget([percent(level) for level in levels], rows)


def _best(outcome: Outcome) -> float:
    known = [r.accuracy for r in outcome.run.records if r.accuracy is not None]
    return max((accuracy for accuracy in known if accuracy == accuracy), default=0.0)


def _cell(entry: Entry, accuracy: float) -> str:
    found = [sent for o in entry.outcomes if (sent := count_bytes_until(o, accuracy)) is not None]
    if not found:
        return "–"
    told = size(statistics.fmean(found))
    if len(found) < len(entry.outcomes):
        return f"{told} ({len(found)} of {len(entry.outcomes)} runs)"
    return told if len(found) == 1 else f"{told} ± {size(statistics.stdev(found))}"


SHARED = (
    "algorithms have defaults of their own: give a setting with --set settings.KEY=VALUE, and all "
    "that know it have one value"
)

_HELD = ", whether it is trained on or held out for evaluations"

OutcomeMeasure = Callable[[Outcome], float | None]


@dataclass(frozen=True)
class Row:
    """One entry as it is printed: means ± sample standard deviations over its runs."""

    name: str
    seeds: str
    fares: tuple[str, ...]
    metrics: tuple[str, ...]
    worst: str
    epsilon: str
    rounds: str
    bytes: str
    seconds: str
    note: str


def rows(comparison: Comparison) -> list[Row]:
    """Return the table, an entry a row. ε is the largest over sites and seeds, rounded up."""
    return [
        Row(
            name=entry.name,
            seeds=f"{len(entry.outcomes)} of {len(entry.outcomes) + len(entry.missing)}",
            fares=fares_cells(entry, comparison.headings),
            metrics=tuple(metric_cell(entry, name) for name in comparison.measured),
            worst=worst_cell(entry),
            epsilon=epsilon_cell(entry),
            rounds=number_cell(entry.spread(lambda o: o.rounds)),
            bytes=spread_cell(entry.spread(lambda o: o.bytes), size),
            seconds=spread_cell(entry.spread(lambda o: o.seconds), duration),
            note=entry.statuses,
        )
        for entry in comparison.entries
    ]


def inequality(comparison: Comparison) -> str | None:
    """Return the sentence that has to stand beside the table where it compares unequal runs."""
    found = comparison.inequalities
    if not found:
        return None
    told = f"NOT AN EQUAL COMPARISON; it differs in {'; '.join(found)}"
    return f"{told}; {SHARED}" if comparison.left_apart else told


def guarantees(comparison: Comparison) -> list[str]:
    """Return what the ε of each private entry means, and which entries have none."""
    told: dict[str, list[str]] = {}
    for entry, outcome in comparison.outcomes:
        statement = outcome.run.privacy
        text = "NOT PRIVATE: no (ε, δ) guarantee of any kind"
        if outcome.run.private:
            text = (
                f"(ε, δ) = ({upper(or_nan(entry.epsilon))}, {upper(or_nan(entry.delta))}), the "
                f"largest of any site and seed, for one {statement['unit']} of a site"
                f"{_HELD if statement.get('evaluation') else ''}; adjacency: "
                f"{statement['adjacency']}; accountant: {statement['accountant']}"
            )
            if entry.honest:
                text += (
                    f"; if at least {entry.honest} sites of each sum are honest, and "
                    f"{upper(or_nan(entry.epsilon_alone))} if no other is"
                )
        names = told.setdefault(text, [])
        if entry.name not in names:
            names.append(entry.name)
    return [f"{', '.join(names)}: {text}" for text, names in told.items()]


def document(comparison: Comparison) -> dict[str, Any]:
    """Return everything as plain data: per run, and mean and standard deviation per entry."""
    told = _MEASURES | {name: methodcaller("metric", name) for name in comparison.measured}
    return {
        "equal": not comparison.inequalities,
        "differs_in": comparison.inequalities,
        "differences": {d.key: dict(d.values) for d in comparison.differences},
        "swept": comparison.swept,
        "entries": {
            entry.name: {
                "swept": dict(comparison.points[entry.name].values) if comparison.points else {},
                "private": entry.private,
                **{name: _pair(entry.spread(of)) for name, of in told.items()},
                **effort_document(entry),
                "epsilon": entry.epsilon,
                "epsilon_alone": entry.epsilon_alone,
                "delta": entry.delta,
                "runs": {
                    str(outcome.seed): _run_document(outcome, told) for outcome in entry.outcomes
                },
                "missing": {str(seed): why for seed, why in entry.missing.items()},
                "joining": _joining_document(entry),
                "evaluation": evaluations.means(_runs(entry)) or None,
                "held_out": evaluations.exact_means(_runs(entry)) or None,
            }
            for entry in comparison.entries
        },
        "counted": [each.document for each in comparison.counted],
        "not_counted": _uncounted(comparison),
    }


def find_joining(comparison: Comparison) -> list[Entry]:
    """Return the entries of which a run says what joining was worth to its sites."""
    return [entry for entry in comparison.entries if joining_rows(_runs(entry))]


def joining_lines(comparison: Comparison) -> list[str]:
    """Return for each such entry in one sentence for which sites joining paid."""
    return [
        f"{entry.name}: {summarise_joining(_runs(entry))}" for entry in find_joining(comparison)
    ]


def describe_tuning_cost(comparison: Comparison) -> list[str]:
    """Return what trying costs and for whom each ε holds; nothing where it was not asked."""
    return [
        *(f"{each.told}. {line}" for each in comparison.counted for line in each.lines),
        *_uncounted(comparison),
    ]


def _uncounted(comparison: Comparison) -> list[str]:
    """Return what the costs of trying leave out."""
    if not comparison.counted:
        return []
    found = list[str]()
    plain = [entry.name for entry in comparison.entries if entry.private is False]
    if plain:
        found.append(f"Not counted, as no ε bounds what they tell: {', '.join(plain)}.")
    if any(entry.missing for entry in comparison.entries):
        found.append("Not counted: runs that are missing. What they released costs as well.")
    if comparison.pooled:
        found.append(
            "The accuracies here are exact, on held-out records: no ε above covers choosing the "
            "winner by them. A deployment chooses by released or public numbers."
        )
    return found


def evaluation_lines(comparison: Comparison) -> list[str]:
    """Return for each entry whose sites released evaluations what they released, as a sentence."""
    told = {
        entry.name: evaluations.summarise_evaluations(_runs(entry)) for entry in comparison.entries
    }
    return [f"{name}: {line}" for name, line in told.items() if line]


def _runs(entry: Entry) -> list[RunFolder]:
    return [outcome.run for outcome in entry.outcomes]


def _joining_document(entry: Entry) -> dict[str, Any] | None:
    rows = joining_rows(_runs(entry))
    sites = {row.site: {**asdict(row), "joining": row.gain.verdict} for row in rows}
    return {"sentence": summarise_joining(_runs(entry)), "sites": sites} if rows else None


def write_comparison(comparison: Comparison) -> Path:
    """Write comparison.html into the comparison's folder and return its path."""
    path = comparison.folder / "comparison.html"
    write_whole(path, render_comparison(comparison).encode(), private=False)
    return path


def render_comparison(comparison: Comparison) -> str:
    """Return the page as one HTML document."""
    outcomes = comparison.outcomes
    names = [entry.name for entry in comparison.entries]
    bases = list(dict.fromkeys(point.base for point in comparison.points.values())) or names
    over = f" over {', '.join(comparison.swept)}" if comparison.swept else ""
    drawings = on_the_way(comparison)
    return page(
        "comparison",
        title="Comparison: " + ", ".join(bases[:4]) + (" …" if len(bases) > 4 else "") + over,
        facts=_facts(comparison),
        inequalities=comparison.inequalities,
        shared=SHARED if comparison.left_apart else "",
        differences=comparison.differences,
        names=names,
        metrics=[find_display(name).label for name in comparison.measured],
        rows=rows(comparison),
        effort=effort(comparison),
        effort_headings=EFFORT_HEADINGS,
        effort_note=EFFORT_NOTE,
        judged=comparison.judged,
        headings=comparison.headings,
        fair=_fair_rows(comparison) if comparison.judged == "accuracy" else (),
        guarantees=guarantees(comparison),
        plain=[entry.name for entry in comparison.entries if entry.private is False],
        seeded=any(outcome.run.private and outcome.run.seeded for _, outcome in outcomes),
        pooled=comparison.pooled,
        drawings=drawings,
        # One legend for all of them; a key may be missing from some.
        keys=list({key.label: key for drawing in drawings for key in drawing.keys}.values()),
        meaning=explain_comparison(comparison.entries),
        sweeps=sweeps(comparison),
        joining={
            e.name: (summarise_joining(_runs(e)), joining_rows(_runs(e)))
            for e in find_joining(comparison)
        },
        joining_note=JOINING_NOTE,
        joining_headings=JOINING_HEADINGS,
        counted=comparison.counted,
        uncounted=_uncounted(comparison),
        released=evaluations.compare_evaluations({e.name: _runs(e) for e in comparison.entries}),
        reached=find_bytes_to_targets(comparison),
        runs=_run_rows(comparison),
    )


_MEASURES: dict[str, OutcomeMeasure] = {
    "accuracy": lambda o: o.accuracy,
    "loss": lambda o: o.loss,
    "average_accuracy": lambda o: o.averaged("accuracy"),
    "average_loss": lambda o: o.averaged("loss"),
    "worst_accuracy": lambda o: o.worst,
    "worst_tenth": lambda o: o.fairness and o.fairness["worst_tenth"],
    "accuracy_variance": lambda o: o.fairness and o.fairness["variance"],
    "accuracy_entropy": lambda o: o.fairness and o.fairness["entropy"],
    "rounds": lambda o: o.rounds,
    "bytes": lambda o: o.bytes,
    "seconds": lambda o: o.seconds,
}


def _run_document(outcome: Outcome, told: Mapping[str, OutcomeMeasure]) -> dict[str, Any]:
    run = outcome.run
    return {
        "folder": str(run.path),
        "status": run.status,
        **{name: of(outcome) for name, of in told.items()},
        "fairness": outcome.fairness,
        "epsilon": outcome.epsilon,
        "epsilon_alone": outcome.epsilon_alone,
        "delta": outcome.delta,
        "adjacency": run.privacy["adjacency"] if run.private else None,
        "accountant": run.privacy["accountant"] if run.private else None,
    }


def _pair(spread: Spread | None) -> dict[str, Any] | None:
    return asdict(spread) if spread else None


def _facts(comparison: Comparison) -> list[str]:
    runs = [outcome.run for _, outcome in comparison.outcomes]
    data = dict.fromkeys(str(entry.plan.get("data", "own data")) for entry in comparison.entries)
    seeds = {o.seed for _, o in comparison.outcomes} | {
        seed for entry in comparison.entries for seed in entry.missing
    }
    sites = dict.fromkeys(f"{len(run.sites):,} sites" for run in runs)
    return [
        *data,
        *sites,
        f"seeds {', '.join(map(str, sorted(seeds)))}",
        f"{len(runs)} runs",
        str(comparison.folder.resolve().name),
    ]


def _fair_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    return [
        (
            entry.name,
            number_cell(entry.spread(lambda o: o.loss)),
            percent_cell(entry.spread(lambda o: o.fairness and math.sqrt(o.fairness["variance"]))),
            percent_cell(entry.spread(lambda o: o.fairness and o.fairness["worst_tenth"])),
            spread_cell(
                entry.spread(lambda o: o.fairness and o.fairness["entropy"]), lambda v: f"{v:.4f}"
            ),
        )
        for entry in comparison.entries
    ]


def _run_rows(comparison: Comparison) -> list[dict[str, Any]]:
    found, names = [], comparison.measured
    for entry in comparison.entries:
        by_seed = {outcome.seed: outcome for outcome in entry.outcomes}
        for seed in sorted({*by_seed, *entry.missing}):
            outcome = by_seed.get(seed)
            folder = run_folder(Path(), entry.name, seed)
            row: dict[str, Any] = {
                "name": entry.name,
                "seed": seed,
                "cells": ("–",) * (2 + len(comparison.headings) + len(names)),
            }
            row["why"] = entry.missing.get(seed, "")
            row["href"] = quote((folder / "report.html").as_posix()) if outcome else None
            if outcome:
                row["why"] = outcome.run.status
                row["cells"] = (
                    headline_metric(outcome.accuracy, outcome.loss)[1],
                    *(_averaged(outcome),) * (len(comparison.headings) - 1),
                    *(
                        format_metric(find_display(name).form, outcome.metric(name))
                        for name in names
                    ),
                    headline_metric(outcome.worst, outcome.worst_loss)[1],
                    spent_cell(outcome),
                )
            found.append(row)
    return found


def _averaged(outcome: Outcome) -> str:
    return headline_metric(outcome.averaged("accuracy"), outcome.averaged("loss"))[1]
