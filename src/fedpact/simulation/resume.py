"""What a folder's run is of, and whether it can go on: its records, its ledgers and its draws."""

import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from fedpact.common.check import count
from fedpact.common.errors import DataError, LedgerError, PlanError
from fedpact.common.files import PARTIAL
from fedpact.common.randomness.seeded import DRAWS
from fedpact.common.run_folder import LOCK, Checkpoint, Folder
from fedpact.data.from_python import digest_of
from fedpact.data.partition import Partition
from fedpact.plan import Plan
from fedpact.privacy.ledger.ledger import Ledger
from fedpact.simulation.machine import available_cores
from fedpact.simulation.run import environment_of
from fedpact.simulation.setup import SimulationSetup

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
    # is another GPU's, and rounding that of other stacks, in a round that is carried out again.
    kept = {name: getattr(before.run, name) for name in ("device", "stacked", "precision")}
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
