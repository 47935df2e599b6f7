"""A run on this machine, from a plan to a folder: set up, train, write everything down.

Calling it again with the same plan and folder goes on where the run ended, and returns at once
where it was finished. Nothing is written before the whole plan, data and model have been checked.
"""

import platform
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as save_tensors
from torch import nn

from fedpact.client import Client
from fedpact.data.dataset import Dataset
from fedpact.data.partition import Partition, Site
from fedpact.engines.evaluation import Evaluator
from fedpact.engines.inprocess import Bench, InProcess
from fedpact.engines.process import allow_open_files, available_cores, keep_freed_memory
from fedpact.engines.scene import Scene
from fedpact.engines.statement import privacy_statement, summarise
from fedpact.errors import LedgerError, PlanError
from fedpact.folder import Checkpoint, Folder, write_whole
from fedpact.losses import cross_entropy
from fedpact.messages import RoundRecord, State, Task
from fedpact.params import FlatModel
from fedpact.plan import Plan
from fedpact.privacy.kernel import PlainKernel
from fedpact.privacy.ledger import Ledger
from fedpact.privacy.noise import SeededDraws
from fedpact.privacy.oracle import Charge, Oracle, PlainOracle, PrivateOracle, Records
from fedpact.privacy.sizes import charge_size
from fedpact.round import Rounds

OnRound = Callable[[RoundRecord], None]

_FIRST = "plan.json"


def _nobody(_: RoundRecord) -> None:
    pass


@dataclass(frozen=True)
class Result:
    """What a run left. records: one a round, round 0 included. model: with the final weights."""

    folder: Path
    records: list[RoundRecord]
    summary: dict[str, Any]
    model: nn.Module


def simulate(
    plan: Plan,
    out: Path,
    *,
    data: Dataset | None = None,
    on_round: OnRound = _nobody,
    stop: Callable[[], bool] = lambda: False,
) -> Result:
    """Carry out a plan in this process and write the run's folder.

    out: new, or the folder of this same plan, which is then continued. data: instead of plan.data.
    on_round: called with every record, those of earlier sessions first. stop: see round.Rounds.
    Raises InputError of some kind for whatever does not fit, before anything is written.
    """
    keep_freed_memory()
    folder = Folder(out)
    known = _is_known(folder, plan)
    scene = Scene.of(plan, data, Partition.load(folder.partition) if known else None)
    if not known:
        _write_setting(folder, scene)
    run = folder.read_json("environment.json")["run"]
    with ExitStack() as stack:
        ledgers = _open_ledgers(scene, folder, run, stack)
        if not known:
            # It states the released sizes, so it is written after they were charged.
            folder.write_json("privacy.json", privacy_statement(scene))
        clients = {site.name: _client(scene, site, folder, run, ledgers) for site in scene.sites}
        workers = plan.run.workers or available_cores()
        workshop = replace(scene.workshop, device=plan.run.device)
        transport = stack.enter_context(InProcess(clients, workers, workshop.table))
        evaluator = Evaluator(scene, run, ledgers)
        at, records = _start(folder, scene, evaluator)
        _check_complete(at, run, ledgers)
        for record in records:
            on_round(record)
        rounds = Rounds(plan, run, transport, evaluator, stop)
        for committed, record in rounds(at):
            at = committed
            folder.commit(at, record)
            records.append(record)
            on_round(record)
        records[-1] = evaluator(at, records[-1], last=True)
    return _finish(folder, scene, at, records, rounds.status)


def _is_known(folder: Folder, plan: Plan) -> bool:
    # A start that was cut off within its first file left a part of that, and no run.
    if not folder.path.exists() or {p.name for p in folder.path.iterdir()} <= {_FIRST + ".partial"}:
        return False
    found = folder.read_json(_FIRST)
    before = Plan.parse(found)
    # How it is carried out may change from session to session, what is trained may not: the noise
    # is another card's, and rounding that of other stacks, in a round that is carried out again.
    kept = {name: getattr(before.run, name) for name in ("device", "stacked")}
    if before.model_copy(update={"run": plan.run.model_copy(update=kept)}) != plan:
        raise PlanError(
            f"{folder.path} holds a run of another configuration: choose another folder with "
            "--out, or remove that one"
        )
    # Without a state it ended before round 0 was written: nothing was released, so begin again.
    return (folder.path / "state.safetensors").exists()


def _write_setting(folder: Folder, scene: Scene) -> None:
    packages = ("torch", "numpy", "scipy", "dp-accounting", "safetensors", "fedpact")
    environment = {
        "run": f"{scene.plan.algorithm}-{uuid.uuid4().hex[:12]}",
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": available_cores(),
        **{name: version(name) for name in packages},
    }
    folder.path.mkdir(parents=True, exist_ok=True)
    # The plan comes first: it says whose folder this is, should nothing else be written.
    folder.write_json(_FIRST, scene.plan.model_dump(mode="json"))
    scene.partition.save(folder.partition)
    folder.write_json("environment.json", environment)


def _open_ledgers(scene: Scene, folder: Folder, run: str, stack: ExitStack) -> dict[str, Ledger]:
    ledgers = dict[str, Ledger]()
    allow_open_files(len(scene.terms))
    kept = scene.plan.run.ledgers
    for name, terms in scene.terms.items():
        path = Path(kept) / f"{name}.ledger.jsonl" if kept else folder.site(name) / "ledger.jsonl"
        ledger = stack.enter_context(Ledger(path, name, hypothetical=True))
        if scene.policy and not ledger.has_reserved(run):
            scene.policy.check_run(scene.plan.algorithm, terms, ledger.total())
        ledger.reserve(run, terms.budget, terms.history(terms.steps))
        charge_size(ledger, run, terms)
        ledgers[name] = ledger
    return ledgers


def _check_complete(at: Checkpoint, run: str, ledgers: dict[str, Ledger]) -> None:
    """Raise LedgerError: a ledger ends before the round that its site was last included in."""
    for name, ledger in ledgers.items():
        included, charged = at.included.get(name, -1), ledger.last_round(run)
        if charged < included:
            raise LedgerError(
                f"ledger {ledger.path} has no charge after round {charged}, and its site took part "
                f"in round {included}: the machine went down before the disk had the last entries. "
                "The simulation can no longer tell what it spent: start it anew in another folder"
            )


def _client(
    scene: Scene, site: Site, folder: Folder, run: str, ledgers: dict[str, Ledger]
) -> Client[Bench]:
    plan, device = scene.plan, torch.device(scene.plan.run.device)
    records = Records(site.x.to(device), site.y.to(device))
    terms, ledger = scene.terms.get(site.name), ledgers.get(site.name)
    size = terms.size if terms else float(len(site.y))

    def oracle(task: Task, memory: State, bench: Bench) -> Oracle:
        draws = SeededDraws(plan.seed, site.name, task.round)
        if terms is None or ledger is None:
            anchor = plan.method.anchor
            rates = plan.rate(site.name, size), anchor.rate if anchor else 1.0
            return PlainOracle(records, bench.plain, rates[0], size, draws, rates[1])
        charge = Charge(ledger, run, task.round, task.digest + memory.digest)
        exact = None if plan.private else PlainKernel(bench.private.model, cross_entropy)

        left = partial(charge.steps_left, terms)
        return PrivateOracle(records, bench.private, terms, draws, charge, left, exact)

    memory = folder.site(site.name) / "memory.safetensors"
    return Client(
        site.name,
        size,
        plan.method,
        oracle,
        ledger,
        memory,
        scene.policy,
        device,
    )


def _start(
    folder: Folder, scene: Scene, evaluator: Evaluator
) -> tuple[Checkpoint, list[RoundRecord]]:
    if (folder.path / "state.safetensors").exists():
        return folder.restore()
    w = FlatModel(scene.module()).vector
    at = Checkpoint(scene.plan.method.init(w), 0, {})
    record = evaluator(at, RoundRecord(round=0))
    # A start that was cut off before its state was written may have left its record.
    (folder.path / "rounds.jsonl").unlink(missing_ok=True)
    folder.commit(at, record)
    return at, [record]


def _finish(
    folder: Folder, scene: Scene, at: Checkpoint, records: list[RoundRecord], status: str
) -> Result:
    lines = "".join(record.to_json() + "\n" for record in records)
    write_whole(folder.path / "rounds.jsonl", lines.encode())
    module = scene.module()
    FlatModel(module).load(at.state.vectors["w"])
    tensors = {name: value.clone() for name, value in module.state_dict().items()}
    write_whole(folder.path / "model.safetensors", save_tensors(tensors))
    summary = summarise(scene, records, status)
    folder.write_json("summary.json", summary)
    return Result(folder.path, records, summary, module)
