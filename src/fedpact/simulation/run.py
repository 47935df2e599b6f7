"""How a run begins, goes on, ends and is extended in its folder.

A simulation and a deployment's server differ in where the sites are; what they leave is one form.
Of a simulation that goes on, records, ledgers and draws have to be those that it began with.
"""

import hashlib
import math
import platform
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from safetensors.torch import save as save_tensors
from torch import nn

from fedpact.algorithms.wrappers.released_scales import CONSTANTS
from fedpact.algorithms.wrappers.server_optimizer import read_average
from fedpact.common.check import count
from fedpact.common.errors import DataError, LedgerError, PlanError
from fedpact.common.files import LOCK, PARTIAL, remove_left, write_whole
from fedpact.common.messages import RoundRecord
from fedpact.common.params import FlatModel, state_of
from fedpact.common.randomness.seeded import DRAWS
from fedpact.common.run_folder import COLUMNS, Checkpoint, Folder, name_columns
from fedpact.data.from_python import digest_of
from fedpact.data.partition import Partition
from fedpact.evaluation.held_out import SumsForm
from fedpact.evaluation.intervals import exact_outcome, outcome
from fedpact.evaluation.metrics import METRICS, fairness, ranking
from fedpact.plan import Plan
from fedpact.privacy.accounting.accountant import History
from fedpact.privacy.ledger.ledger import Ledger
from fedpact.privacy.terms import Terms
from fedpact.simulation.machine import available_cores
from fedpact.simulation.setup import SimulationSetup

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
            if terms[name].shares_noise
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
            block = save_tensors(state_of(module))
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
        "evaluation": outcome(records, form),
        "held_out": exact_outcome(records, form.whole) if form.once is None else None,
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


FIRST = "plan.json"
"""What is written first: it says whose folder it is."""

_CHANGED: Final = {"records": "its data have", "features": "what makes them of its records has"}


def is_known(folder: Folder, plan: Plan) -> bool:
    """Whether the folder holds a run of this plan that was begun.

    Raises PlanError: a run of another plan. DataError: its plan cannot be read, or a deployment's.
    """
    # A start that was cut off within its first file left a part of that, and no run.
    names = [path.name for path in folder.path.iterdir()] if folder.path.exists() else []
    if all(name == LOCK or name.endswith(PARTIAL) for name in names):
        return False
    if "federation.toml" in names:
        raise DataError(
            f"{folder.path} is the directory of a deployment's party, whose run goes on when the "
            "parties are started, as by `fedpact deploy up`; a simulation of its plan needs a "
            "folder of its own: `fedpact run` with --out"
        )
    if FIRST not in names:
        raise PlanError(
            f"{folder.path} holds {sorted({*names} - {LOCK})[0]} and no {FIRST}, so no run: choose "
            "another folder with --out, which may be new"
        )
    found = folder.read_json(FIRST)
    before = Plan.parse(found)
    # How it is carried out may change from session to session, what is trained may not: the noise
    # is another GPU's, in a round that is carried out again.
    kept = {name: getattr(before.run, name) for name in ("device", "precision")}
    if before.model_copy(update={"run": plan.run.model_copy(update=kept)}) != plan:
        raise PlanError(
            f"{folder.path} holds a run of another configuration: choose another folder with "
            "--out, or remove that one"
        )
    # Without a state it ended before round 0 was written: nothing was released, so begin again.
    begun = (folder.path / "state.safetensors").exists()
    if begun and not folder.partition.exists():
        raise DataError(
            f"{folder.path} has no partition.json, so its records are not on this machine: a "
            "deployment's run goes on when its parties are started, as by `fedpact deploy up`; a "
            "simulation's needs its files back from a backup"
        )
    return begun


def setting(folder: Folder, scene: SimulationSetup, *, known: bool, given: bool) -> dict[str, Any]:
    """Return environment.json, which is written, with what else the run is of, unless it is known.

    given: whether the data set is none that the plan names; what it names has to hold the same
    records as when the run began, and features of them be the same. A round that is carried out
    again would be another release under the first one's charge, and what a record has spent would
    be told of a run that it was in for a part. Raises PlanError: others.
    """
    digests = {} if given else {"records": digest_of(scene.raw)}
    if scene.plan.features.used:
        digests["features"] = digest_of(scene.dataset)
    # It may have ended before round 0 was written. What was released till then is released again,
    # as the same draws of the same run, so that it is not charged twice.
    if not known and not (folder.path / "environment.json").exists():
        facts = {"data": "given", **digests} if given else digests
        name = f"{scene.plan.algorithm}-{uuid.uuid4().hex[:12]}"
        environment = environment_of(name, cores=available_cores(), draws=DRAWS, **facts)
        folder.path.mkdir(parents=True, exist_ok=True)
        # The plan comes first: it says whose folder this is, should nothing else be written.
        folder.write_json(FIRST, scene.plan.document())
        scene.partition.save(folder.partition)
        folder.write_json("environment.json", environment)
    environment = folder.read_json("environment.json")
    for name, digest in digests.items():
        if environment.get(name) != digest:
            raise PlanError(
                f"{folder.path} holds a run that was begun on other {name}: {_CHANGED[name]} "
                "changed since. Put that back as it was, or start anew in another folder with --out"
            )
    return environment


def check_there(ledgers: Iterable[Path]) -> None:
    """Raise LedgerError: of a run that has begun a ledger is gone; opened, it would begin anew."""
    for path in ledgers:
        if not path.is_file() or not path.stat().st_size:
            raise LedgerError(
                f"ledger {path} is {'empty' if path.is_file() else 'missing'}, and the run has "
                "begun: put it back from a backup. Without it nobody can say what was spent at "
                "its site; nothing was changed"
            )


def check_complete(at: Checkpoint, run: str, ledgers: dict[str, Ledger]) -> None:
    """Raise LedgerError: a ledger ends before the round that its site was last included in."""
    for name, ledger in ledgers.items():
        included, charged = at.included.get(name, -1), ledger.last_round(run)
        if charged < included:
            last = f"no charge after round {charged}" if charged >= 0 else "no charge of a round"
            raise LedgerError(
                f"ledger {ledger.path} has {last}, and its site took part in round {included}: "
                "the machine went down before the disk had the last entries. "
                "The simulation can no longer tell what it spent: start it anew in another folder"
            )


def check_draws(folder: Folder, environment: Mapping[str, Any]) -> None:
    """Raise PlanError: the run was begun where equal seeds gave other draws than here.

    A round that is carried out again would be another release under the first one's charge.
    """
    begun = environment.get("draws")
    if begun != DRAWS:
        raise PlanError(
            f"{folder.path} holds a run that was begun by a version of fedpact whose seeds give "
            f"other draws (number {begun}, here {DRAWS}): finish it with that version, or start it "
            "anew in another folder with --out"
        )


def extend_plan(folder: Folder, rounds: int, budget: float | None) -> Plan:
    """Return the plan of a new run that goes on from the model of one that has ended.

    Its sites keep that run's ledgers, in which the new rounds are reserved beside what is there:
    whoever extends a run has seen what it released, so both ε and both δ add up.
    budget: the new run's ε at every site; None: as in the run's plan.
    Raises PlanError: it has not ended, or has no one ε. LedgerError: a ledger is gone. InputError:
    rounds is no integer >= 1.
    """
    count(rounds=rounds)
    plan = Plan.parse(folder.read_json(FIRST))
    ended = (folder.path / "summary.json").exists()
    status = folder.read_json("summary.json")["status"] if ended else "not ended"
    if status in ("not ended", "stopped", "diverged"):
        raise PlanError(
            f"run {folder.path} is {status}: expected one that has ended, as `fedpact resume` ends "
            "it; a run that diverged is begun anew"
        )
    whole = plan.document()
    changed = {**whole, "rounds": rounds, "initial": {"weights": str(folder.path)}}
    if plan.privacy.mode != "none":
        kept = plan.run.ledgers or str(folder.path)
        names = Partition.load(folder.partition).train
        check_there(folder.ledger(name, plan.run.ledgers) for name in names)
        changed["run"] = {**whole["run"], "ledgers": kept}
    if budget is not None:
        if plan.privacy.per_site or not plan.private:
            raise PlanError(
                f"epsilon is {budget!r} with privacy.per_site or a plain run: the new run has the "
                "budgets of the plan; leave epsilon out"
            )
        changed["privacy"] = {**whole["privacy"], "epsilon": budget, "sigma": None}
    return Plan.parse(changed)
