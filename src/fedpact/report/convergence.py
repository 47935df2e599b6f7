"""A run's bits per coordinate, and the papers' bounds on the rate of its releases.

The bound is on the differential entropy of one noisy gradient. It gives a number of bits only with
a quantisation step: here a hundredth of the noise's deviation.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedpact.algorithms.wrappers.compression import UNITS_DOWN
from fedpact.common.format import number, size, span
from fedpact.common.messages import RoundRecord
from fedpact.common.notebook import TextTable
from fedpact.privacy.accounting.shared_noise import SHARE_DEVIATION, rounded_entropy
from fedpact.report.run_summary import RunSummary, SitePrivacy
from fedpact.report.tradeoffs import (
    bits_on_the_wire,
    entropy_bound,
    mean_of_clipped_moment,
    paper_rate,
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
_CLIPPED_RECORDS = (
    "The paper clips the batch's mean. This run clips each record's gradient and "
    "divides by qN, so R = (d/2) ln(2πe (m/d + (σC/(qN))²)) with m = C²(1 + (1 - q)/(qN)), where "
    "each site's declared N is taken to be its number of records."
)
_MECHANISM = {
    "batch_clipped": "R = (d/2) ln(2πe C²(σ² + 1/d)), for a mean gradient clipped to C.",
    "per_sample": _CLIPPED_RECORDS,
    "automatic": _CLIPPED_RECORDS,
}
_PAPER = (
    "The paper's own (12) does not bound it: it can lie below the entropy of the noise alone "
    "(docs/notes/errata.md, L4)."
)

_Row = tuple[str, str, str, str]
"""A row's name, and its values for a message, a coordinate and the whole run."""


@dataclass(frozen=True)
class WireTable:
    """Bytes or bits of messages, with notes."""

    table: TextTable
    notes: list[str]


def _wire_table(message: str, rows: Sequence[_Row], notes: list[str]) -> WireTable:
    return WireTable(TextTable((message, "one coordinate", "the run"), [*rows]), notes)


def rates(run: RunSummary) -> WireTable | str:
    """Return the table of rate bounds, or why there is none."""
    if why := _explain_undefined(run):
        return why
    d = int(run.summary["model_parameters"])
    sites, rounds = run.site_privacy, _without_evaluation(run)
    replies = _replies(run, rounds)
    total = sum(replies.values())
    bounds = {name: _bound(run, site, d) for name, site in sites.items()}
    bits = {
        name: bits_on_the_wire(bounds[name], d, STEP * _deviation(run, site))
        for name, site in sites.items()
    }
    whole = math.fsum(bits[name] * count for name, count in replies.items())
    rounded = f"at most about, to a step of s = {STEP:g} deviations of the noise"
    rows = [_in_nats("R, differential entropy", list(bounds.values()), d)]
    if total:
        sent = sum(record.bytes_up for record in rounds)
        rows[:0] = [
            _in_bytes("sent, as measured, including the encoding", sent, total, d),
            _in_bytes(rounded, whole / 8, total, d),
        ]
    mechanism = str(run.privacy["mechanism"])
    notes = [_BOUND, _MECHANISM[mechanism]]
    if mechanism == "batch_clipped":
        paper = [paper_rate(d, site.sigmas["gradient"], site.clip) for site in sites.values()]
        rows.append(_in_nats("the paper's (12), no bound", paper, d))
        notes.append(_PAPER)
    if run.plan.get("compression", {}).get("kind", "none") not in ("none", "grid"):
        notes.append("R describes the release before [compression], which rounds it further.")
    if run.plan.get("secure_aggregation", {}).get("threshold"):
        notes.append("Messages are masked; R describes the release before masking.")
    return _wire_table("one reply", rows, notes)


def _explain_undefined(run: RunSummary) -> str:
    if not run.private:
        return "No rate bound: it needs noise, and a run without privacy adds none."
    if run.plan.get("algorithm") != "ldp_fedsgd":
        return (
            "No rate bound: it holds for algorithms that reply with one noisy gradient, as "
            f"ldp_fedsgd does, and not for {run.plan.get('algorithm')}."
        )
    mechanism = run.privacy.get("mechanism")
    if mechanism not in _MECHANISM:
        return f"No rate bound: the mechanism {mechanism!r} is not known to this version."
    if mechanism != "batch_clipped" and run.privacy["sizes"] != "public":
        return (
            "No rate bound: for clipped records it needs their exact number, and sizes are noisy."
        )
    if not run.summary.get("model_parameters") or not sum(_replies(run, run.records).values()):
        return "No rate bound yet: the run has not ended, or no site has replied."
    return ""


def _replies(run: RunSummary, rounds: Sequence[RoundRecord]) -> dict[str, int]:
    """Return the number of replies of each site in these rounds."""
    return {name: sum(r.replied(name) for r in rounds) for name in run.sites}


def _without_evaluation(run: RunSummary) -> list[RoundRecord]:
    """Return the rounds whose bytes are those of training alone."""
    return [r for r in run.records if r.round and not (r.evaluation or r.unevaluated)]


def _deviation(run: RunSummary, site: SitePrivacy) -> float:
    """Return the standard deviation of a released coordinate's noise."""
    divisor = 1.0 if run.privacy["mechanism"] == "batch_clipped" else site.rate * site.size
    return site.sigmas["gradient"] * site.clip / divisor


def _bound(run: RunSummary, site: SitePrivacy, d: int) -> float:
    moment = site.clip**2
    if run.privacy["mechanism"] != "batch_clipped":
        moment = mean_of_clipped_moment(site.size, site.rate, site.clip)
    return entropy_bound(d, moment, _deviation(run, site) ** 2)


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
    rows = [_in_bytes("from the sites, as measured", up, replies, d)]
    if run.plan.get("compression", {}).get("kind") != "grid":
        rows.append(_in_bytes("to the sites, as measured", down, asked, d))
    elif later := [record for record in rounds if record.round > 1]:
        # In the first round every site already has the model.
        told = sum(record.bytes_down for record in later)
        name = "to the sites, as measured after the first round"
        rows.append(_in_bytes(name, told, sum(len(r.asked) or sites for r in later), d))
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
