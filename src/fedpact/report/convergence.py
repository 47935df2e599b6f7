"""A run's bits per coordinate, and the papers' bounds on the rate of its releases.

The bound is on the differential entropy of one noisy gradient. It gives a number of bits only with
a quantisation step: here a hundredth of the noise's deviation.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedpact.algorithms.wrappers.compression import UNITS_DOWN
from fedpact.common.format import number, size, span
from fedpact.common.notebook import TextTable
from fedpact.privacy.accounting.shared_noise import SHARE_DEVIATION, rounded_entropy
from fedpact.report.run_summary import RunSummary
from fedpact.report.tradeoffs import (
    bits_on_the_wire,
    paper_rate,
    rate_bound,
)

STEP = 0.01
"""The step s of the table, in standard deviations of a coordinate's noise."""

_BOUND = (
    "R bounds the differential entropy of one site's release in one round, in exact arithmetic: no "
    "clipped gradient plus Gaussian noise has more, whatever the records. It counts nats in the "
    "gradient's own unit and can be negative. Values written to a step s take about "
    "(R - d ln s)/ln 2 bits with the best code for their law; the run's own code writes a fixed "
    "number of bits. Bytes are those of rounds without an evaluation. R says nothing about privacy."
)
_MECHANISM = "R = (d/2) ln(2πe C²(σ² + 1/d)), for a mean gradient clipped to C."
_PAPER = (
    "The paper's own (12) does not bound it: it can lie below the entropy of the noise alone "
    "(docs/notes/errata.md, L4)."
)
_WHAT = (
    "Bytes of the messages as encoded, with names, numbers and signatures' fields around the "
    "vectors, over the model's d = {d:,} coordinates, in rounds without an evaluation."
)
_ENTROPY = (
    "An entropy is that of normal noise alone, rounded to the grid: no code for it takes fewer "
    "bits a coordinate in the mean. Where sums or changes are larger than their noise, there are "
    "more. What a message's length tells follows from the whole numbers in it, which are released."
)

_Row = tuple[str, str, str, str]
"""A row's name, and its values for a message, a coordinate and the whole run."""


def wire(run: RunSummary) -> tuple[TextTable, list[str]] | str:
    """Return bits per coordinate as a table with notes, or why there is none.

    With rate bounds if replies are one noisy clipped mean.
    """
    d = int(run.summary.get("model_parameters") or 0)
    # Rounds whose bytes are those of training alone.
    rounds = [r for r in run.records if r.round and not (r.evaluation or r.unevaluated)]
    replies = {name: sum(r.replied(name) for r in rounds) for name in run.sites}
    total, asked = sum(replies.values()), sum(len(r.asked) or len(run.sites) for r in rounds)
    if not (d and total > 0):
        return (
            "No bits a coordinate yet: the run has not ended, no site has replied, or each round "
            "has an evaluation, whose messages are among its bytes."
        )
    rows, notes = list[_Row](), [_WHAT.format(d=d)]
    for name, sent, messages in (
        ("from the sites", sum(r.bytes_up for r in rounds), total),
        ("to the sites", sum(r.bytes_down for r in rounds), asked),
    ):
        rows.append(_in_bytes(f"{name}, as measured", sent, messages, d))
    for name, units in _grids(run.plan).items():
        bits, each = rounded_entropy(units), "a half" if units == UNITS_DOWN else "a quarter"
        told = f"{name}, rounded to {each} of its deviation"
        rows.append((told, size(bits * d / 8), f"{number(bits)} bits", "–"))
    notes += [_ENTROPY] if len(rows) > 2 else []
    clipped_mean = run.privacy.get("mechanism") == "batch_clipped"
    if clipped_mean and run.plan.get("algorithm") == "ldp_fedsgd":
        bounds, told = _rates(run, replies, d)
        rows, notes = rows + bounds, notes + told
    return TextTable(("one message", "one coordinate", "the run"), rows), notes


def _rates(run: RunSummary, replies: Mapping[str, int], d: int) -> tuple[list[_Row], list[str]]:
    """Return the rows of the rate bounds, and notes. replies: number by site."""
    sites = run.site_privacy.items()
    noise = {name: (site.sigmas["gradient"], site.clip) for name, site in sites}
    bounds = {name: rate_bound(d, *each) for name, each in noise.items()}
    whole = math.fsum(
        replies[name] * bits_on_the_wire(bounds[name], d, STEP * sigma * clip)
        for name, (sigma, clip) in noise.items()
    )
    rounded = f"a reply at most about, to a step of s = {STEP:g} deviations of the noise"
    paper = [paper_rate(d, *each) for each in noise.values()]
    rows = [
        _in_bytes(rounded, whole / 8, sum(replies.values()), d),
        _in_nats("R, differential entropy", list(bounds.values()), d),
        _in_nats("the paper's (12), no bound", paper, d),
    ]
    notes = [_BOUND, _MECHANISM, _PAPER]
    if run.plan.get("compression", {}).get("kind", "none") not in ("none", "grid"):
        notes.append("R describes the release before [compression], which rounds it further.")
    if run.plan.get("secure_aggregation", {}).get("threshold"):
        notes.append("Messages are masked; R describes the release before masking.")
    return rows, notes


def _in_bytes(name: str, sent: float, messages: int, d: int) -> _Row:
    return name, size(sent / messages), f"{number(8 * sent / messages / d)} bits", size(sent)


def _in_nats(name: str, values: Sequence[float], d: int) -> _Row:
    least, most = min(values), max(values)
    each = span(number(least), number(most))
    coordinate = span(number(least / d), number(most / d))
    return name, f"{each} nats", f"{coordinate} nats", "–"


def _grids(plan: Mapping[str, Any]) -> dict[str, float]:
    """Return what is rounded -> its standard deviation in units of the grid."""
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
