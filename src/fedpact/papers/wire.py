"""Bits a coordinate as they crossed the wire, beside the entropy of the noise in them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedpact.methods.gridded import UNITS_DOWN
from fedpact.papers.facts import RunFacts
from fedpact.text import number, size
from fedpact.theory.shares import SHARE_DEVIATION, rounded_entropy

_WHAT = (
    "Bytes of the messages as encoded, with names, numbers and signatures' fields around the "
    "vectors, over the model's d = {d:,} coordinates."
)
_ENTROPY = (
    "An entropy is that of normal noise alone, rounded to the grid: no code for it takes fewer "
    "bits a coordinate in the mean. Where sums or changes are larger than their noise, there are "
    "more. What a message's length tells follows from the whole numbers in it, which are released."
)


@dataclass(frozen=True)
class Wire:
    """The table: rows of (name, one message, one coordinate, the run), and what it says."""

    rows: list[tuple[str, str, str, str]]
    notes: list[str]


def wire(run: RunFacts, sites: int) -> Wire | str:
    """Return the table, or in a sentence why there is none. sites: how many take part."""
    d = int(run.summary.get("model_parameters") or 0)
    rounds = [record for record in run.records if record.round]
    asked = sum(len(record.asked) or sites for record in rounds)
    replies = asked - sum(len(record.refused) for record in rounds)
    if not (d and replies > 0):
        return "No bits a coordinate yet: the run has not ended, or no site has replied."
    down, up = run.bytes
    rows = [_measured("from the sites, as measured", up, replies, d)]
    if run.plan.get("compression", {}).get("kind") != "grid":
        rows.append(_measured("to the sites, as measured", down, asked, d))
    elif later := rounds[1:]:
        # Before the first one every site has the model.
        told = sum(record.bytes_down for record in later)
        name = "to the sites, as measured after the first round"
        rows.append(_measured(name, told, sum(len(r.asked) or sites for r in later), d))
    rounded = [_entropy(name, units, d) for name, units in _grids(run.plan).items()]
    notes = [_WHAT.format(d=d), *([_ENTROPY] if rounded else [])]
    return Wire(rows + rounded, notes)


def _grids(plan: Mapping[str, Any]) -> dict[str, float]:
    """Return what is rounded to how coarse a grid: its deviation in units."""
    found = dict[str, float]()
    grid = plan.get("compression", {}).get("kind") == "grid"
    masked = plan.get("secure_aggregation", {}).get("threshold", 0)
    if plan.get("privacy", {}).get("trust") == "sum":
        found["entropy of a share's noise, below its mask"] = SHARE_DEVIATION
    elif grid and not masked:
        found["entropy of a reply's noise"] = SHARE_DEVIATION
    if grid:
        found["entropy of a change of the model"] = UNITS_DOWN
    return found


def _measured(name: str, sent: float, messages: int, d: int) -> tuple[str, str, str, str]:
    return name, size(sent / messages), f"{number(8 * sent / messages / d)} bits", size(sent)


def _entropy(name: str, units: float, d: int) -> tuple[str, str, str, str]:
    bits = rounded_entropy(units)
    each = "a half" if units == UNITS_DOWN else "a quarter"
    told = f"{name}, rounded to {each} of its deviation"
    return told, size(bits * d / 8), f"{number(bits)} bits", "–"
