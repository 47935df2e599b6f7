"""A snapshot in the text format that Prometheus reads (exposition format 0.0.4).

Source: https://prometheus.io/docs/instrumenting/exposition_formats/
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

Sample = tuple[str, Mapping[str, str], float | None]
"""A metric's name, its labels, its value; None where there is none yet."""

_MARKED: Final = (
    "simulator_only: of held-out records, exactly, which no site of a deployment would release."
)
_HELP: Final = {
    "fedpact_round": ("gauge", "The last round."),
    "fedpact_rounds_planned": ("gauge", "How many rounds the plan has."),
    "fedpact_epsilon_spent": ("gauge", "Epsilon spent, an upper bound at the run's delta."),
    "fedpact_epsilon_reserved": ("gauge", "Epsilon reserved in the ledger."),
    "fedpact_delta": ("gauge", "The delta that epsilon is stated at."),
    "fedpact_refusals_total": ("counter", "Questions that were refused, by code."),
    "fedpact_answers_total": ("counter", "Questions that were answered or refused."),
    "fedpact_ledger_entries": ("gauge", "Entries of the site's ledger."),
    "fedpact_answer_seconds": ("gauge", "How long the last answer took."),
    "fedpact_waiting": ("gauge", "Whether an answer is being waited for."),
    "fedpact_bytes_down_total": ("counter", "Bytes sent to sites."),
    "fedpact_bytes_up_total": ("counter", "Bytes that sites sent."),
    "fedpact_accuracy": ("gauge", f"Accuracy of the last evaluated model. {_MARKED}"),
    "fedpact_loss": ("gauge", f"Mean loss of the last evaluated model. {_MARKED}"),
    "fedpact_ended": ("gauge", "Whether the run has ended."),
}


def text(of: Mapping[str, Any]) -> str:
    """Return a snapshot (see snapshot.take_snapshot) as a page for Prometheus."""
    samples = list(_of_site(of) if of["kind"] == "site" else _of_run(of))
    lines = list[str]()
    for name, (kind, told) in _HELP.items():
        found = [(labels, value) for n, labels, value in samples if n == name and value is not None]
        if found:
            lines += [f"# HELP {name} {told}", f"# TYPE {name} {kind}"]
            lines += [f"{name}{_labels(labels)} {_number(value)}" for labels, value in found]
    return "\n".join(lines) + "\n"


def _of_run(of: Mapping[str, Any]) -> Iterator[Sample]:
    run = {"run": of["name"]}
    yield "fedpact_round", run, of["round"]
    yield "fedpact_rounds_planned", run, of["rounds"]
    yield "fedpact_bytes_down_total", run, of["bytes_down"]
    yield "fedpact_bytes_up_total", run, of["bytes_up"]
    yield "fedpact_ended", run, of["status"] not in ("running", "not begun")
    marked = {**run, "simulator_only": "true"} if of["simulator_only"] else run
    for key in ("accuracy", "loss"):
        seen = [each[key] for each in of["history"] if each[key] is not None]
        yield f"fedpact_{key}", marked, seen[-1] if seen else None
    for site, each in of["sites"].items():
        labels = {**run, "site": site}
        yield "fedpact_epsilon_spent", labels, each["epsilon_spent"]
        yield "fedpact_epsilon_reserved", labels, each["epsilon_reserved"]
        yield "fedpact_delta", labels, each["delta"]
        yield "fedpact_answer_seconds", labels, each["seconds"]
        yield "fedpact_waiting", labels, each["waiting"]
        for code, count in each["refusals"].items():
            yield "fedpact_refusals_total", {**labels, "code": code}, count


def _of_site(of: Mapping[str, Any]) -> Iterator[Sample]:
    own = {"run": of["run"], "site": of["name"]}
    yield "fedpact_round", own, of["round"]
    yield "fedpact_rounds_planned", own, of["rounds"]
    yield "fedpact_answers_total", own, of["answers"]
    yield "fedpact_answer_seconds", own, of["seconds"]
    yield "fedpact_ledger_entries", {"site": of["name"]}, of["ledger_entries"]
    for code, count in of["refusals"].items():
        yield "fedpact_refusals_total", {**own, "code": code}, count
    for run, each in of["ledger"].items():
        labels = {"run": run, "site": of["name"]}
        yield "fedpact_epsilon_spent", labels, each["epsilon_spent"]
        yield "fedpact_epsilon_reserved", labels, each["epsilon_reserved"]
        yield "fedpact_delta", labels, each["delta"]


def _labels(labels: Mapping[str, str]) -> str:
    told = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return f"{{{told}}}" if told else ""


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    # To the last digit: rounded down it would be no bound.
    return repr(float(value))
