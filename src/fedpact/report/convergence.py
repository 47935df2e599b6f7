"""A run's bits per coordinate, and the papers' bounds on the rate of its releases.

The bound is on the differential entropy of one noisy gradient. It gives a number of bits only with
a quantisation step: here a hundredth of the noise's deviation.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedpact.algorithms.wrappers.compression import UNITS_DOWN
from fedpact.common.format import number, size, span
from fedpact.common.messages import RoundRecord
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

_Row = tuple[str, str, str, str]
"""A row's name, and its values for a message, a coordinate and the whole run."""


WireTable = tuple[TextTable, list[str]]
"""Bytes or bits of messages, with notes."""


def _wire_table(message: str, rows: Sequence[_Row], notes: list[str]) -> WireTable:
    return TextTable((message, "one coordinate", "the run"), [*rows]), notes


def rates(run: RunSummary) -> WireTable | None:
    """Return the table of rate bounds; None unless replies are one noisy clipped mean."""
    rounds = _without_evaluation(run)
    replies = _replies(run, rounds)
    d, total = int(run.summary.get("model_parameters") or 0), sum(replies.values())
    clipped_mean = run.privacy.get("mechanism") == "batch_clipped"
    if not (clipped_mean and run.plan.get("algorithm") == "ldp_fedsgd" and d * total):
        return None
    sigmas = {name: site.sigmas["gradient"] for name, site in run.site_privacy.items()}
    clips = {name: site.clip for name, site in run.site_privacy.items()}
    bounds = {name: rate_bound(d, sigma, clips[name]) for name, sigma in sigmas.items()}
    whole = math.fsum(
        replies[name] * bits_on_the_wire(bounds[name], d, STEP * sigma * clips[name])
        for name, sigma in sigmas.items()
    )
    rounded = f"at most about, to a step of s = {STEP:g} deviations of the noise"
    sent = sum(record.bytes_up for record in rounds)
    paper = [paper_rate(d, sigma, clips[name]) for name, sigma in sigmas.items()]
    rows = [
        _in_bytes("sent, as measured, including the encoding", sent, total, d),
        _in_bytes(rounded, whole / 8, total, d),
        _in_nats("R, differential entropy", list(bounds.values()), d),
        _in_nats("the paper's (12), no bound", paper, d),
    ]
    notes = [_BOUND, _MECHANISM, _PAPER]
    if run.plan.get("compression", {}).get("kind", "none") not in ("none", "grid"):
        notes.append("R describes the release before [compression], which rounds it further.")
    if run.plan.get("secure_aggregation", {}).get("threshold"):
        notes.append("Messages are masked; R describes the release before masking.")
    return _wire_table("one reply", rows, notes)


def _replies(run: RunSummary, rounds: Sequence[RoundRecord]) -> dict[str, int]:
    """Return the number of replies of each site in these rounds."""
    return {name: sum(r.replied(name) for r in rounds) for name in run.sites}


def _without_evaluation(run: RunSummary) -> list[RoundRecord]:
    """Return the rounds whose bytes are those of training alone."""
    return [r for r in run.records if r.round and not (r.evaluation or r.unevaluated)]


def _in_bytes(name: str, sent: float, messages: int, d: int) -> _Row:
    return name, size(sent / messages), f"{number(8 * sent / messages / d)} bits", size(sent)


def _in_nats(name: str, values: Sequence[float], d: int) -> _Row:
    least, most = min(values), max(values)
    each = span(number(least), number(most))
    coordinate = span(number(least / d), number(most / d))
    return name, f"{each} nats", f"{coordinate} nats", "–"


_WHAT = (
    "Bytes of the messages as encoded, with names, numbers and signatures' fields around the "
    "vectors, over the model's d = {d:,} coordinates, in rounds without an evaluation."
)
_ENTROPY = (
    "An entropy is that of normal noise alone, rounded to the grid: no code for it takes fewer "
    "bits a coordinate in the mean. Where sums or changes are larger than their noise, there are "
    "more. What a message's length tells follows from the whole numbers in it, which are released."
)


def wire(run: RunSummary) -> WireTable | str:
    """Return the table of bits per coordinate, or why there is none."""
    d = int(run.summary.get("model_parameters") or 0)
    sites, rounds = len(run.sites), _without_evaluation(run)
    asked = sum(len(record.asked) or sites for record in rounds)
    replies = sum(_replies(run, rounds).values())
    if not (d and replies > 0):
        return (
            "No bits a coordinate yet: the run has not ended, no site has replied, or each round "
            "has an evaluation, whose messages are among its bytes."
        )
    down, up = sum(r.bytes_down for r in rounds), sum(r.bytes_up for r in rounds)
    rows = [
        _in_bytes("from the sites, as measured", up, replies, d),
        _in_bytes("to the sites, as measured", down, asked, d),
    ]
    rounded = list[_Row]()
    for name, units in _grids(run.plan).items():
        bits, each = rounded_entropy(units), "a half" if units == UNITS_DOWN else "a quarter"
        told = f"{name}, rounded to {each} of its deviation"
        rounded.append((told, size(bits * d / 8), f"{number(bits)} bits", "–"))
    notes = [_WHAT.format(d=d), *([_ENTROPY] if rounded else [])]
    return _wire_table("one message", rows + rounded, notes)


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
