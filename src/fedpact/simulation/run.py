"""How a run begins, starts and ends in its folder, whoever carries it out.

A simulation and a deployment's server differ in where the sites are; what they leave is one form.
"""

import hashlib
import math
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import cache
from importlib.metadata import version
from typing import Any

from safetensors.torch import save as save_tensors
from torch import nn

from fedpact.algorithms.wrappers.released_scales import CONSTANTS
from fedpact.algorithms.wrappers.server_optimizer import read_average
from fedpact.common.files import remove_left, write_whole
from fedpact.common.messages import RoundRecord
from fedpact.common.params import FlatModel
from fedpact.common.run_folder import COLUMNS, Checkpoint, Folder, name_columns
from fedpact.evaluation.held_out import SumsForm
from fedpact.evaluation.intervals import exact_outcome, outcome
from fedpact.evaluation.metrics import METRICS, fairness, ranking
from fedpact.plan import Plan
from fedpact.privacy.accounting.accountant import History
from fedpact.privacy.terms import Terms

_version = cache(version)
"""Reads a package's files at every call otherwise: 2 ms each."""

_TELL_SECONDS = 1.0
"""How seldom whoever watches is told: a small round takes less than a file does."""

_PACKAGES = ("torch", "numpy", "scipy", "dp-accounting", "safetensors", "fedpact")


def environment_of(run: str, *packages: str, **facts: Any) -> dict[str, Any]:
    """Return the content of environment.json. packages: besides those that every run uses."""
    return {
        "run": run,
        "python": platform.python_version(),
        "platform": platform.platform(),
        **facts,
        **{name: _version(name) for name in (*_PACKAGES, *packages)},
    }


def log_stragglers(folder: Folder, number: int, took: Mapping[str, float], told: float) -> float:
    """Write how long sites took, if the last time is long ago; return when it was written last."""
    if not took or time.monotonic() - told < _TELL_SECONDS:
        return told
    folder.waits(number, {name: {"seconds": s} for name, s in sorted(took.items())})
    return time.monotonic()


def with_epsilon(
    record: RoundRecord, terms: Mapping[str, Terms], spent: Mapping[str, History]
) -> RoundRecord:
    """Return a round's record with each site's ε so far, from the events that it was charged."""
    return replace(
        record,
        epsilon={name: terms[name].epsilon_after(events) for name, events in spent.items()},
        epsilon_alone={
            name: terms[name].epsilon_alone_after(events)
            for name, events in spent.items()
            if terms[name].honest
        },
    )


def start_or_resume(
    folder: Folder,
    plan: Plan,
    module: Callable[[], nn.Module],
    evaluate: Callable[[Checkpoint, RoundRecord], RoundRecord],
    opened: Callable[[Checkpoint, RoundRecord], tuple[Checkpoint, RoundRecord]],
) -> tuple[Checkpoint, list[RoundRecord]]:
    """Return the last committed round and the records up to it; of a new run, commit round 0.

    module: makes the model with its initial weights. opened: has the sites release what a run
    begins with. Raises DataError: a damaged folder. Raises what `opened` raises.
    """
    state = folder.path / "state.safetensors"
    remove_left(state, folder.path / "rounds.jsonl")
    if state.exists():
        return folder.restore()
    at = Checkpoint(plan.method.init(FlatModel(module()).vector), 0, {})
    at, record = opened(at, RoundRecord(round=0))
    record = evaluate(at, record)
    # A start that was cut off before its state was written may have left its record.
    (folder.path / "rounds.jsonl").unlink(missing_ok=True)
    folder.commit(at, record)
    return at, [record]


def finish(
    folder: Folder,
    plan: Plan,
    terms: Mapping[str, Terms],
    sizes: Mapping[str, float],
    module: nn.Module,
    form: SumsForm,
    at: Checkpoint,
    records: list[RoundRecord],
    status: str,
    more: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Write the final model, which `module` then has, and the summary; return the summary.

    sizes: each site's N_i, as declared or released.
    Where the server keeps an average beside the model, it is written as well. form: what sites were
    asked to sum of held-out records. more: what else the summary has, of a simulation.
    """
    model, files = FlatModel(module), dict[str, str]()
    for name, w in (("average", read_average(at.state)), ("model", at.state.vectors["w"])):
        if w is not None:
            model.load(w)
            tensors = {key: value.clone() for key, value in module.state_dict().items()}
            block = save_tensors(tensors)
            path = folder.path / f"{name}.safetensors"
            write_whole(path, block, private=False)
            files[path.name] = hashlib.sha256(block).hexdigest()
    if CONSTANTS in at.state.vectors:
        # Whoever uses the model scales records by the same.
        found = name_columns(plan.records.released, at.state.vectors[CONSTANTS])
        folder.write_json(COLUMNS, found)
    found = _summary(plan, terms, sizes, records, status) | {
        "commonest": None,
        "model_parameters": model.size,
        # Which weights ε is of: whoever begins with a file can tell whether it is one of these.
        "weights": files,
        "evaluation": outcome(records, form, plan.evaluation_terms),
        "held_out": None if plan.evaluation_terms else exact_outcome(records, form.whole),
        **(more or {}),
    }
    folder.write_json("summary.json", found)
    return found


def _summary(
    plan: Plan,
    terms: Mapping[str, Terms],
    sizes: Mapping[str, float],
    records: list[RoundRecord],
    status: str,
) -> dict[str, Any]:
    """The last round, and totals over all of them."""
    last = records[-1]
    worst = ranking(last.scores)[0] if last.scores else None
    # Of numbers there is no accuracy, and how evenly it is spread.
    counted = last.accuracy is None or not math.isnan(last.accuracy)
    spent, alone = dict(last.epsilon), dict(last.epsilon_alone)
    if plan.private and status in ("accuracy", "patience"):
        # How long it went depended on what it released: what holds is what was reserved.
        spent = {n: terms[n].budget.epsilon for n in spent}
        alone = {n: terms[n].epsilon_alone for n in alone}
    return {
        "status": status,
        "private": plan.private,
        "rounds": last.round,
        "accuracy": last.accuracy if counted else None,
        "loss": last.loss,
        "average": dict(last.average) or None,
        **{name: last.metrics.get(name) for name in [*METRICS, *last.metrics]},
        "worst_site": worst and {"site": worst, **asdict(last.scores[worst])},
        "fairness": fairness(last.scores) if last.scores and counted else None,
        "iterations": sum(record.steps for record in records),
        "records_read": _read(plan, sizes, records),
        "seconds": sum(record.seconds for record in records),
        "bytes_down": sum(record.bytes_down for record in records),
        "bytes_up": sum(record.bytes_up for record in records),
        "epsilon": spent,
        "epsilon_alone": alone,
        "honest": plan.privacy.honest if plan.private else 0,
        "delta": {n: t.budget.delta for n, t in terms.items() if plan.private},
        "adjacency": plan.privacy.adjacency if plan.private else None,
        "accountant": plan.privacy.accountant if plan.private else None,
    }


def _read(plan: Plan, sizes: Mapping[str, float], records: list[RoundRecord]) -> float:
    """Return the number of records that batches had, as expected: q_i N_i each, of public sizes.

    Counted are sites whose replies were. Where persons are what is sampled, they are what is read.
    """
    opening = plan.method.facts.opening.rate if plan.method.facts.opening else 0.0
    batch = {name: plan.rate(name, size) * size for name, size in sizes.items()}
    return sum(
        record.steps * batch[name] + opening * sizes[name]
        for record in records
        for name in sizes
        if record.took_part(name)
    )
