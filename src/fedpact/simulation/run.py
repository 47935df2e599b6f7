"""Starting, resuming, finishing and extending a run in its folder.

A simulation and a deployment's server write the same files. A simulation can only be resumed with
the records, ledgers and random numbers that it was started with.
"""

import hashlib
import math
import platform
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from safetensors.torch import save as save_tensors
from torch import nn

from fedpact.algorithms.wrappers.optimizers import read_average
from fedpact.algorithms.wrappers.released_scales import CONSTANTS
from fedpact.common.check import count
from fedpact.common.configuration import flatten
from fedpact.common.errors import DataError, LedgerError, PlanError
from fedpact.common.files import LOCK, PARTIAL, remove_left, write_whole
from fedpact.common.messages import RoundRecord
from fedpact.common.params import FlatModel, state_of
from fedpact.common.randomness.seeded import DRAWS
from fedpact.common.run_folder import COLUMNS, Checkpoint, Folder, name_columns
from fedpact.data.load import digest_of
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

_PACKAGES = ("torch", "numpy", "scipy", "safetensors", "fedpact")


def environment_of(run: str, *packages: str, **facts: Any) -> dict[str, Any]:
    """Return the content of environment.json. packages: in addition to those every run uses."""
    return {
        "run": run,
        "python": platform.python_version(),
        "platform": platform.platform(),
        **facts,
        **{name: version(name) for name in (*_PACKAGES, *packages)},
    }


def with_epsilon(
    record: RoundRecord, terms: Mapping[str, Terms], spent: Mapping[str, History]
) -> RoundRecord:
    """Return a round's record with each site's ε so far, from the events charged to it."""
    found = {name: terms[name].guarantee_after(events) for name, events in spent.items()}
    return replace(
        record,
        epsilon={name: each.epsilon for name, each in found.items()},
        epsilon_alone={name: each.alone for name, each in found.items() if each.condition},
    )


def start_or_resume(
    folder: Folder,
    plan: Plan,
    module: Callable[[], nn.Module],
    evaluate: Callable[[Checkpoint, RoundRecord], RoundRecord],
    opened: Callable[[Checkpoint, RoundRecord], tuple[Checkpoint, RoundRecord]],
) -> tuple[Checkpoint, list[RoundRecord]]:
    """Return the last committed round and the records up to it; for a new run, commit round 0.

    module: returns the model with its initial weights. opened: carries out round 0, in which sites
    may release column scales. Raises DataError: a damaged folder. Raises what `opened` raises.
    """
    state, rounds = folder.path / "state.safetensors", folder.path / "rounds.jsonl"
    remove_left(state, rounds)
    if state.exists():
        return folder.restore()
    # A start interrupted before its state was written may have left its record.
    if rounds.exists() and rounds.read_bytes().count(b"\n") > 1:
        raise DataError(
            f"{state} is missing, but {rounds} has records of rounds that it counted: restore the "
            "folder from a backup made after the last round; without one, move it away and begin "
            "a new run"
        )
    at = Checkpoint(plan.method.init(FlatModel(module()).vector), 0, {})
    at, record = opened(at, RoundRecord(round=0))
    record = evaluate(at, record)
    rounds.unlink(missing_ok=True)
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
    """Write the final model, the server's average of models if it keeps one, and the summary.

    module: gets the final weights. sizes: each site's N_i, as declared or released. form: which
    sums of held-out records sites computed. more: further entries of a simulation's summary.
    Returns the summary.
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
        # Records must be scaled in the same way when the model is used.
        found = name_columns(plan.records.released, at.state.vectors[CONSTANTS])
        folder.write_json(COLUMNS, found)
    found = _summary(plan, terms, sizes, records, status) | {
        "commonest": None,
        "model_parameters": model.size,
        # The weights that ε covers; a later run that starts from a file can recognise it by these.
        "weights": files,
        "evaluation": outcome(records, form, whole=_follows_releases(plan, status)),
        "held_out": exact_outcome(records, form.whole) if form.once is None else None,
        **(more or {}),
    }
    folder.write_json("summary.json", found)
    return found


def _follows_releases(plan: Plan, status: str) -> bool:
    """Whether the number of events may depend on releases, so that ε is what was reserved."""
    # Who stops a run may have seen what it showed.
    return plan.adaptive or status in ("accuracy", "patience", "diverged", "stopped")


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
    # A regression has no accuracy, and so no spread of it.
    counted = last.accuracy is None or not math.isnan(last.accuracy)
    spent, alone = dict(last.epsilon), dict(last.epsilon_alone)
    if plan.private and _follows_releases(plan, status):
        spent = {n: terms[n].budget.epsilon for n in spent}
        alone = {n: terms[n].guarantee.alone for n in alone}
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
        "condition": next(iter(terms.values())).guarantee.condition if plan.private else "",
        "delta": {n: t.budget.delta for n, t in terms.items() if plan.private},
        "adjacency": plan.privacy.adjacency if plan.private else None,
        "accountant": plan.privacy.accountant if plan.private else None,
    }


def _read(plan: Plan, sizes: Mapping[str, float], records: list[RoundRecord]) -> float:
    """Return the expected number of records in all batches, q_i N_i each, from public sizes.

    Only sites that replied count, also too late. If persons are sampled, persons are counted.
    """
    opening = plan.method.facts.opening.rate if plan.method.facts.opening else 0.0
    batch = {name: plan.rate(name, size) * size for name, size in sizes.items()}
    return sum(
        record.steps * batch[name] + opening * sizes[name]
        for record in records
        for name in sizes
        if record.replied(name)
    )


FIRST = "plan.json"
"""The first file to be written: it says which run the folder belongs to."""

_CHANGED: Final = {"records": "its data have", "features": "the code that computes them has"}


def is_known(folder: Folder, plan: Plan) -> bool:
    """Whether the folder holds a started run of this plan.

    Raises PlanError: a run of another plan. DataError: an unreadable plan, or a deployment.
    """
    # A start interrupted within its first file leaves a partial file, and no run.
    names = [path.name for path in folder.path.iterdir()] if folder.path.exists() else []
    if all(name == LOCK or name.endswith(PARTIAL) for name in names):
        return False
    if "federation.toml" in names:
        raise DataError(
            f"{folder.path} is the directory of a deployment's party, whose run continues when the "
            "parties are started, as by `fedpact deploy up`; a simulation of its plan needs "
            "another folder: `fedpact run` with --out"
        )
    if FIRST not in names:
        raise PlanError(
            f"{folder.path} holds {sorted({*names} - {LOCK})[0]} but no {FIRST}, so it is not a "
            "run: choose another folder with --out, which may be new"
        )
    found = folder.read_json(FIRST)
    before = Plan.parse(found)
    # Engine and threads may change between sessions. Device and precision may not: a repeated round
    # would have other noise.
    kept = {name: getattr(before.run, name) for name in ("device", "precision")}
    before = before.model_copy(update={"run": plan.run.model_copy(update=kept)})
    if before != (now := with_counted_sites(plan, before)):
        raise PlanError(
            f"{folder.path} holds a run of another configuration ({changed_keys(before, now)}): "
            "choose another folder with --out, or remove that one; `fedpact extend` trains a run "
            "that has ended for more rounds"
        )
    # Without a state, the run ended before round 0: nothing was released, so start again.
    begun = (folder.path / "state.safetensors").exists()
    if begun and not folder.partition.exists():
        raise DataError(
            f"{folder.path} has no partition.json, so its records are not on this machine: a "
            "deployment's run continues when its parties are started, as by `fedpact deploy up`; a "
            "simulation's files must be restored from a backup"
        )
    return begun


def with_counted_sites(plan: Plan, before: Plan) -> Plan:
    """Return a plan with the sites that the start of its run, `before`, counted in the records.

    A plan that gives their number, or spreads records itself, is returned as it is.
    """
    return plan.model_copy(update={"sites": before.sites}) if plan.counts_sites else plan


def changed_keys(before: Plan, now: Plan) -> str:
    """Return the first keys in which two plans differ, with both values."""
    a, b = (flatten(plan.model_dump(mode="json")) for plan in (before, now))
    differ = [key for key in {**a, **b} if a.get(key) != b.get(key)]
    found = [f"{key} is {a.get(key)!r} there and {b.get(key)!r} now" for key in differ[:3]]
    return "; ".join(found) + "; ..." * (len(differ) > 3)


def setting(folder: Folder, scene: SimulationSetup, *, known: bool, given: bool) -> dict[str, Any]:
    """Write plan, partition and environment of a new run, and return the environment.

    given: whether the data set was passed in, so that the plan does not name it. A named data set
    must hold the same records, and yield the same features, as when the run was started: with other
    records, a repeated round would be a new release under the first one's charge, and the ledger
    would be about records that took part only at times. A model must answer as it did then. Raises
    PlanError: they have changed.
    """
    digests = {} if given else {"records": digest_of(scene.raw)}
    if scene.plan.features.used:
        digests["features"] = digest_of(scene.dataset)
    # The run may have ended before round 0 was written. Its releases are then repeated with the
    # same random numbers under the same name, so they are not charged twice.
    if not known and not (folder.path / "environment.json").exists():
        facts = {"data": "given", **digests} if given else digests
        name = f"{scene.plan.algorithm}-{uuid.uuid4().hex[:12]}"
        facts = {**facts, "answers": scene.workshop.answers()}
        environment = environment_of(name, cores=available_cores(), draws=DRAWS, **facts)
        folder.path.mkdir(parents=True, exist_ok=True)
        # The plan comes first: it says which run this is, even if nothing else gets written.
        folder.write_json(FIRST, scene.plan.document())
        scene.partition.save(folder.partition)
        folder.write_json("environment.json", environment)
    environment = folder.read_json("environment.json")
    for name, digest in digests.items():
        if environment.get(name) != digest:
            raise PlanError(
                f"{folder.path} holds a run that was started on other {name}: {_CHANGED[name]} "
                "changed since. Restore them, or start a new run in another folder with --out"
            )
    if not scene.workshop.answers_as(environment.get("answers")):
        raise PlanError(
            f"{folder.path} holds a run that was started with another model: the code of "
            f"{scene.plan.model}, or the weights that it begins with, have changed since. Restore "
            "them, or start a new run in another folder with --out"
        )
    return environment


def check_there(ledgers: Iterable[Path]) -> None:
    """Raise LedgerError if a started run's ledger is missing: opening it would create a new one."""
    for path in ledgers:
        if not path.is_file() or not path.stat().st_size:
            raise LedgerError(
                f"ledger {path} is {'empty' if path.is_file() else 'missing'}, and the run has "
                "started: restore it from a backup, or, if run.ledgers is a relative path, give "
                "the command where the run was started. Without it, what its site has spent is "
                "unknown; nothing was changed"
            )


def check_complete(at: Checkpoint, run: str, ledgers: dict[str, Ledger]) -> None:
    """Raise LedgerError if a ledger ends before the last round its site was included in."""
    for name, ledger in ledgers.items():
        included, charged = at.included.get(name, -1), ledger.last_round(run)
        if charged < included:
            last = f"no charge after round {charged}" if charged >= 0 else "no charge of a round"
            raise LedgerError(
                f"ledger {ledger.path} has {last}, but its site took part in round {included}: "
                "the machine went down before the last entries reached the disk. What the "
                "simulation has spent is unknown: start it again in another folder"
            )


def check_draws(folder: Folder, environment: Mapping[str, Any]) -> None:
    """Raise PlanError if the run was started where a seed gave other random numbers than here.

    A repeated round would then be a new release under the first one's charge.
    """
    begun = environment.get("draws")
    if begun != DRAWS:
        raise PlanError(
            f"{folder.path} holds a run that was started by a version of fedpact whose seeds give "
            f"other random numbers (scheme {begun}, here {DRAWS}): finish it with that version, or "
            "start it again in another folder with --out"
        )


def extend_plan(folder: Folder, rounds: int, budget: float | None) -> Plan:
    """Return the plan of a new run that continues from the model of a finished one.

    Its sites keep that run's ledgers, in which the new rounds are reserved in addition: the
    decision to extend may depend on what was released, so both ε and both δ add up.
    budget: the new run's ε at every site; None: that of the run's plan.
    Raises PlanError: the run has not ended, or its sites differ in ε. LedgerError: a ledger is
    missing. InputError: rounds is not an integer >= 1.
    """
    count(rounds=rounds)
    plan = Plan.parse(folder.read_json(FIRST))
    ended = (folder.path / "summary.json").exists()
    status = folder.read_json("summary.json")["status"] if ended else "not ended"
    if status in ("not ended", "stopped", "diverged"):
        raise PlanError(
            f"run {folder.path} is {status}: expected a finished run; `fedpact resume` finishes "
            "one, and a run that diverged has to be started again"
        )
    if not folder.partition.exists():
        raise PlanError(
            f"{folder.path} has no partition.json, so its records are not on this machine: a "
            f"deployment's run goes on by `fedpact deploy extend SERVER --rounds {rounds} --out "
            "NEW`; a simulation's files must be restored from a backup"
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
