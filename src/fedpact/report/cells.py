"""The cells of a comparison's table: means ± sample standard deviations over an entry's runs."""

import math
from collections.abc import Callable, Sequence
from operator import methodcaller

from fedpact.report.outcomes import Entry, Outcome, Spread
from fedpact.tasks.measures import find_display
from fedpact.text import number, percent, upper


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
    """Return a metric (tasks.measures.find_display)."""
    spread = entry.spread(methodcaller("metric", name))
    return percent_cell(spread) if find_display(name).form == "percent" else number_cell(spread)


def number_cell(spread: Spread | None) -> str:
    """Return a plain figure."""
    return spread_cell(spread, lambda value: number(value, digits=3 if value < 1000 else 4))


def spread_cell(spread: Spread | None, form: Callable[[float], str]) -> str:
    """Return a mean and its deviation in a form of single values; a dash for None."""
    return number(None) if spread is None else spread.describe(form)
