"""A comparison's tables, sentences, JSON document and page."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from fedpact.common.files import write_whole
from fedpact.common.format import count_noun, duration, number, percent, size, span, upper
from fedpact.common.notebook import TextTable
from fedpact.common.records import strict
from fedpact.evaluation.metrics import find_display
from fedpact.report.compared_runs import (
    Comparison,
    Entry,
    PairedDifference,
    name_swept_value,
    run_folder,
)
from fedpact.report.comparison_charts import (
    name_pair,
    on_the_way,
    series,
    sweeps,
)
from fedpact.report.drawing import draw_keys
from fedpact.report.evaluations import (
    JOINING_NOTE,
    average_figures,
    compare_evaluations,
    joining_rows,
    joining_table,
    summarise_joining,
)
from fedpact.report.meaning import explain_comparison
from fedpact.report.run_summary import RunSummary
from fedpact.report.template import page

Cell = Callable[[Entry], str]


def _hundredths(value: float) -> str:
    return f"{100 * value:.2f}"


def _percents(figure: str) -> Cell:
    """Per cent with two decimals: methods are compared by fractions of a point."""

    def cell(entry: Entry) -> str:
        spread = entry.spread(figure)
        if spread is None or not math.isfinite(spread.mean):
            return percent(spread and spread.mean)
        apart = "" if spread.deviation is None else f" ± {_hundredths(spread.deviation)}"
        return f"{_hundredths(spread.mean)}{apart} %"

    return cell


def _few_digits(value: float) -> str:
    return number(value, digits=3 if value < 1000 else 4)


def _numbers(figure: str, form: Callable[[float], str] = _few_digits) -> Cell:
    """Mean ± deviation, each formatted by form; a dash if a run has no value."""

    def cell(entry: Entry) -> str:
        spread = entry.spread(figure)
        return number(None) if spread is None else spread.describe(form)

    return cell


def _range(name: str) -> Cell:
    """The range over rounds, sites and runs."""

    def cell(entry: Entry) -> str:
        found = entry.range(name)
        return number(None) if found is None else span(*map(number, found))

    return cell


def _format_epsilon(entry: Entry) -> str:
    """ε with its δ, rounded up; a dash if no run has ended."""
    if entry.private is None:
        return number(None)
    if (spent := entry.spent) is None:
        return "NOT PRIVATE"
    alone = f" (alone {upper(spent.alone)})" if spent.condition else ""
    return f"{upper(spent.epsilon)}{alone} at δ = {upper(spent.delta)}"


def _quality(comparison: Comparison) -> dict[str, Cell]:
    """Return the columns on models and their privacy, the most important first."""
    judged, form, key = comparison.judged, _percents, "accuracy"
    if judged != "accuracy":
        form, key = _numbers, "loss"
    found = {judged: form(key), "worst site": form(f"worst_{key}"), "ε": _format_epsilon}
    if comparison.averaged:
        found[f"{judged}, averaged model"] = form(f"average_{key}")
    for name in comparison.measured:
        form = _percents if find_display(name).form == "percent" else _numbers
        found[find_display(name).label] = form(name)
    return found


def tabulate(columns: Mapping[str, Cell], comparison: Comparison) -> TextTable:
    """Return a table with a row for each entry: means ± sample deviations over its runs."""
    rows = [(e.name, *(cell(e) for cell in columns.values())) for e in comparison.entries]
    return TextTable(tuple(columns), rows)


def figure_columns(comparison: Comparison) -> dict[str, Cell]:
    """Return the main table's columns. ε is the largest over sites and seeds, rounded up."""
    columns: dict[str, Cell] = {
        **_quality(comparison),
        "seeds": lambda entry: describe_seeds([run.seed for run in entry.runs]),
        "rounds": _numbers("rounds"),
        "bytes": _numbers("bytes", size),
        "seconds": _numbers("seconds", duration),
    }
    if any(entry.statuses for entry in comparison.entries):
        columns["status"] = lambda entry: entry.statuses
    return columns


def describe_seeds(seeds: Iterable[int]) -> str:
    """Return seeds in order, more than three in a row by the first and the last.

    >>> describe_seeds([1, 0, 2, 3]), describe_seeds([5, 3])
    ('0 to 3', '3, 5')
    """
    found = sorted(seeds)
    run = len(found) > 3 and found[-1] - found[0] == len(found) - 1
    return f"{found[0]} to {found[-1]}" if run else ", ".join(map(str, found)) or "none"


def comparison_table(comparison: Comparison) -> TextTable:
    """Return the comparison's main table."""
    return tabulate(figure_columns(comparison), comparison)


def tabulate_sweep(comparison: Comparison, key: str) -> list[TextTable]:
    """Return a table for each measure, with a row for each method and a column for each value."""
    found = list[TextTable]()
    for measure in comparison.key_figures:
        lines = series(comparison, key, measure)
        values = {text: value for line in lines for text, (value, _) in line.points.items()}
        form = number if measure == "mean loss" else _hundredths
        rows = list[tuple[str, ...]]()
        for line in lines:
            told = {text: spread.describe(form) for text, (_, spread) in line.points.items()}
            # In a narrow column the line breaks before the sign.
            cells = (told.get(text, "–").replace("± ", "±\u00a0") for text in values)
            rows.append((line.label, *cells))
        headings = tuple(name_swept_value(key, value) for value in values.values())
        found += [TextTable(headings, rows, measure)] if rows else []
    return found


PAIRED_NOTE: Final = (
    "over the seeds that both have run, which share each seed's partition and records: mean, 95 % "
    "interval by Student's t, and p by Holm's correction for all differences of a kind in a column "
    "(between methods, and of each method between points); below 0.05 it is more than chance; –: "
    "one seed, or equal differences, which tell nothing of their spread; accuracies are in "
    "percentage points"
)


def paired_table(comparison: Comparison) -> TextTable | None:
    """Return the differences from the first method, and from the first point of a sweep.

    None without common seeds.
    """
    found = {measure: comparison.pair(key) for measure, key in comparison.key_figures.items()}
    found = {measure: pairs for measure, pairs in found.items() if pairs}
    rows = {name_pair(comparison, one): list[str]() for pairs in found.values() for one in pairs}
    for measure, pairs in found.items():
        form = "{:+.4g}".format if measure == "mean loss" else lambda value: f"{100 * value:+.2f}"
        named = {name_pair(comparison, one): one for one in pairs}
        for name, row in rows.items():
            row += _paired_cells(named[name], form) if name in named else "–––"
    headings = [heading for measure in found for heading in (measure, "95 % interval", "p")]
    filled = [(name, *row) for name, row in rows.items()]
    return TextTable(tuple(headings), filled) if rows else None


def _paired_cells(one: PairedDifference, form: Callable[[float], str]) -> tuple[str, str, str]:
    if not one.known:
        return form(one.mean), "–", "–"
    chance = "< 0.001" if one.p < 0.001 else f"{one.p:.{2 if one.p >= 0.01 else 3}f}"
    return form(one.mean), f"{form(one.low)} to {form(one.high)}", chance


EFFORT_NOTE: Final = (
    "τ: local iterations per round; η: step size; records read: expected, in the batches of all "
    "sites; σ: combined noise multiplier of a step, smallest to largest over sites"
)


def effort(comparison: Comparison) -> TextTable:
    """Return what each entry computed."""
    columns = {
        "τ": _range("steps"),
        "η": _range("learning_rate"),
        "iterations": _numbers("iterations", number),
        "records read": _numbers("records_read", number),
        "σ": _range("sigma"),
    }
    return tabulate(columns, comparison)


def _fair(comparison: Comparison) -> TextTable:
    """Return how evenly each entry's accuracy is spread over sites."""
    columns = {
        "mean loss": _numbers("loss"),
        "deviation over sites": _percents("accuracy_deviation"),
        "worst 10 %": _percents("worst_tenth"),
        "entropy": _numbers("accuracy_entropy", "{:.4f}".format),
    }
    return tabulate(columns, comparison)


def _run_rows(comparison: Comparison, columns: Mapping[str, Cell]) -> list[dict[str, Any]]:
    """Return the page's list of runs. href: a run's page, None if it is missing."""
    found = list[dict[str, Any]]()
    for entry in comparison.entries:
        for run in entry.runs:
            alone = replace(entry, runs=[run])
            href = quote((run_folder(Path(), entry.name, run.seed) / "report.html").as_posix())
            cells = [cell(alone) for cell in columns.values()]
            row = {"seed": run.seed, "href": href, "cells": cells, "status": run.status}
            found.append({"name": entry.name, **row})
        missing = {"name": entry.name, "href": None, "cells": [number(None)] * len(columns)}
        found += [{**missing, "seed": s, "status": why} for s, why in entry.missing.items()]
    return found


_STEP: Final = 0.05
_MOST: Final = 4


def count_bytes_until(run: RunSummary, accuracy: float) -> int | None:
    """Return the bytes, both ways, up to the first evaluation with it; None if there was none."""
    reached = (
        sent for r, sent, _ in run.course if r.accuracy is not None and r.accuracy >= accuracy
    )
    return next(reached, None)


def find_bytes_to_targets(comparison: Comparison) -> TextTable | None:
    """Return the bytes to the highest multiples of 5 % that some run reached; None without any."""
    known = [r.accuracy or 0.0 for run in comparison.runs for r in run.records]
    best = max((accuracy for accuracy in known if accuracy == accuracy), default=0.0)
    # Counted in steps, since 0.8 / 0.05 is not 16 in floating point.
    top = int(best / _STEP + 1e-9)
    levels = [round(_STEP * step, 9) for step in range(max(1, top - _MOST + 1), top + 1)]
    rows = [(e.name, *(_bytes_cell(e, level) for level in levels)) for e in comparison.entries]
    return TextTable(tuple(map(percent, levels)), rows) if levels else None


def _bytes_cell(entry: Entry, accuracy: float) -> str:
    found = [sent for run in entry.runs if (sent := count_bytes_until(run, accuracy)) is not None]
    if not found:
        return "–"
    mean = size(statistics.fmean(found))
    if len(found) < len(entry.runs):
        return f"{mean} ({len(found)} of {len(entry.runs)} runs)"
    return mean if len(found) == 1 else f"{mean} ± {size(statistics.stdev(found))}"


SHARED: Final = (
    "algorithms have different defaults: with --set settings.KEY=VALUE all algorithms with that "
    "setting use one value"
)


def inequality(comparison: Comparison) -> str | None:
    """Return why the comparison is not fair, a line for each algorithm; None if it is fair."""
    if not (found := comparison.inequalities):
        return None
    shared = [f"{SHARED[0].upper()}{SHARED[1:]}."] if comparison.left_apart else []
    return "\n".join(["NOT AN EQUAL COMPARISON; the runs differ in:", *found, *shared])


def baseline(comparison: Comparison) -> str | None:
    """Return what always answering the most frequent class gives; None unless all runs agree."""
    found = [run.summary.get("commonest") for run in comparison.runs]
    if not found or found[0] is None or any(one != found[0] for one in found):
        return None
    return f"always answering {found[0]['name']!r} gives {percent(found[0]['accuracy'])}"


def guarantees(comparison: Comparison) -> list[str]:
    """Return the guarantee of each private entry, and which entries have none."""
    told: dict[str, list[Entry]] = {}
    for entry in comparison.entries:
        for text in dict.fromkeys(_guarantee(entry, run.privacy) for run in entry.runs):
            told.setdefault(text, []).append(entry)
    return [f"{comparison.describe(entries)}: {text}" for text, entries in told.items()]


def _guarantee(entry: Entry, statement: Mapping[str, Any]) -> str:
    if (spent := entry.spent) is None:
        return "NOT PRIVATE: no (ε, δ) guarantee of any kind"
    held = ", whether it is trained on or held out for evaluations"
    return (
        f"(ε, δ) = ({spent}, {upper(spent.delta)}), the largest of any site and seed, for one "
        f"{statement['unit']} of a site{held if statement.get('evaluation') else ''}; adjacency: "
        f"{statement['adjacency']}; accountant: {statement['accountant']}"
    )


def document(comparison: Comparison) -> dict[str, Any]:
    """Return everything as plain data: per run, and mean and standard deviation per entry."""
    figures = dict.fromkeys(name for run in comparison.runs for name in run.figures)
    return {
        "equal": not comparison.inequalities,
        "differs_in": comparison.inequalities,
        "differences": {d.key: dict(d.values) for d in comparison.differences},
        "swept": comparison.swept,
        "paired": {
            measure: [
                strict({**vars(one), "entry": one.entry.name, "reference": one.reference.name})
                for one in comparison.pair(key)
            ]
            for measure, key in comparison.key_figures.items()
        },
        "entries": {
            entry.name: {
                "swept": dict(entry.point.values),
                "chosen": dict(comparison.chosen.get(entry.name, {})),
                "private": entry.private,
                **{name: (s := entry.spread(name)) and asdict(s) for name in figures},
                "local_steps": entry.range("steps"),
                "learning_rate": entry.range("learning_rate"),
                "sigma": entry.range("sigma"),
                **_cost(entry),
                "runs": {str(run.seed): _run_document(run) for run in entry.runs},
                "missing": {str(seed): why for seed, why in entry.missing.items()},
                "joining": _joining_document(entry),
                "evaluation": average_figures(run.released for run in entry.runs) or None,
                "held_out": average_figures(r.summary.get("held_out") for r in entry.runs) or None,
            }
            for entry in comparison.entries
        },
        "counted": [each.document for each in comparison.counted],
        "not_counted": _list_uncounted(comparison),
    }


def _cost(of: Entry | RunSummary) -> dict[str, float | None]:
    spent = of.spent
    return {
        "epsilon": spent and spent.epsilon,
        "epsilon_alone": spent and spent.alone if spent and spent.condition else None,
        "delta": spent and spent.delta,
    }


def run_figures(run: RunSummary) -> dict[str, float | None]:
    """Return a run's figures and its ε by JSON key."""
    return {**run.figures, **_cost(run)}


def _run_document(run: RunSummary) -> dict[str, Any]:
    return {
        "folder": str(run.path),
        "status": run.status,
        **run_figures(run),
        "fairness": run.fairness,
        "adjacency": run.privacy["adjacency"] if run.private else None,
        "accountant": run.privacy["accountant"] if run.private else None,
    }


def _joining_document(entry: Entry) -> dict[str, Any] | None:
    rows = joining_rows(entry.runs)
    sites = {row.site: {**asdict(row), "joining": row.gain.verdict} for row in rows}
    return {"sentence": summarise_joining(entry.runs), "sites": sites} if rows else None


def describe_tuning_cost(comparison: Comparison) -> list[str]:
    """Return the cost of trying, and for whom each ε holds; empty if not requested."""
    return [
        *(f"{each.told}. {line}" for each in comparison.counted for line in each.lines),
        *_list_uncounted(comparison),
    ]


def _list_uncounted(comparison: Comparison) -> list[str]:
    """Return what the cost of trying leaves out."""
    if not comparison.counted:
        return []
    found = list[str]()
    plain = [entry.name for entry in comparison.entries if entry.private is False]
    if plain:
        found.append(f"Not counted, as no ε bounds what they release: {', '.join(plain)}.")
    if any(entry.missing for entry in comparison.entries):
        found.append(
            "Missing runs are not counted, although what they released costs privacy as well."
        )
    if comparison.pooled:
        found.append(
            "The accuracies here are exact, on held-out records: no ε above covers choosing the "
            "best run by them. A deployment must choose by released or public numbers."
        )
    return found


def lines_by_entry(
    comparison: Comparison, of: Callable[[Sequence[RunSummary]], str | None]
) -> list[str]:
    """Return each entry's sentence, if it has one."""
    told = {entry.name: of(entry.runs) for entry in comparison.entries}
    return [f"{name}: {line}" for name, line in told.items() if line]


def write_comparison(comparison: Comparison) -> Path:
    """Write comparison.html into the comparison's folder and return its path."""
    path = comparison.folder / "comparison.html"
    write_whole(path, render_comparison(comparison).encode(), private=False)
    return path


def render_comparison(comparison: Comparison) -> str:
    """Return the page as one HTML document."""
    entries = comparison.entries
    bases = list(dict.fromkeys(entry.base for entry in entries))
    over = f" over {', '.join(comparison.swept)}" if comparison.swept else ""
    curves, quality = on_the_way(comparison), _quality(comparison)
    return page(
        "comparison",
        title="Comparison: " + ", ".join(bases[:4]) + (" …" if len(bases) > 4 else "") + over,
        facts=_facts(comparison),
        inequalities=comparison.inequalities,
        shared=SHARED if comparison.left_apart else "",
        differences=[(d.key, d.unequal, comparison.by_base(d)) for d in comparison.differences],
        bases=bases,
        metrics=[find_display(name).label for name in comparison.measured],
        table=comparison_table(comparison),
        effort=effort(comparison),
        effort_note=EFFORT_NOTE,
        judged=comparison.judged,
        averaged=comparison.averaged,
        fair=_fair(comparison) if comparison.judged == "accuracy" else None,
        guarantees=guarantees(comparison),
        choice=comparison.choice,
        plain=[entry.name for entry in entries if entry.private is False],
        seeded=any(run.private and run.seeded for run in comparison.runs),
        pooled=comparison.pooled,
        curves=curves,
        # One legend for all of them; a key may be missing from some.
        keys=draw_keys(drawing for row in curves for drawing in row),
        meaning=explain_comparison(comparison),
        sweeps={k: (tabulate_sweep(comparison, k), d) for k, d in sweeps(comparison).items()},
        paired=paired_table(comparison),
        paired_note=PAIRED_NOTE,
        joining={
            e.name: (sentence, joining_table(joining_rows(e.runs)))
            for e in entries
            if (sentence := summarise_joining(e.runs))
        },
        joining_note=JOINING_NOTE,
        trying=comparison.counted,
        uncounted=_list_uncounted(comparison),
        released=compare_evaluations({e.name: e.runs for e in entries}),
        reached=find_bytes_to_targets(comparison),
        quality=list(quality),
        runs=_run_rows(comparison, quality),
    )


def _facts(comparison: Comparison) -> list[str]:
    entries, runs = comparison.entries, comparison.runs
    data = dict.fromkeys(str(entry.plan.get("data", "own data")) for entry in entries)
    seeds = {run.seed for run in runs} | {seed for entry in entries for seed in entry.missing}
    sites = dict.fromkeys(count_noun(len(run.sites), "site") for run in runs)
    return [
        *data,
        *sites,
        f"seeds {describe_seeds(seeds)}",
        count_noun(len(runs), "run"),
        *filter(None, [baseline(comparison)]),
        str(comparison.folder.resolve().name),
    ]
