"""Simulate a federation on one machine, and compare joining it with training alone.

`simulate` with the folder of the same plan resumes the run, and returns at once if it is finished.
Nothing is written before plan, data and model have been checked.

`of_run` compares, for each site, the federation's model with one of its own (evaluation.personal).
Its figures are exact: in a deployment, only a site's owner sees those of that site.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from fedpact.algorithms.wrappers.released_scales import check_as_declared
from fedpact.client import read_memory
from fedpact.common.errors import InputError, LedgerError, PlanError
from fedpact.common.format import upper
from fedpact.common.messages import RoundRecord
from fedpact.common.params import FlatModel, one_thread
from fedpact.common.run_folder import Checkpoint, Folder, check_writable
from fedpact.data.dataset import Dataset
from fedpact.data.partition import Partition
from fedpact.data.splits import number_persons
from fedpact.evaluation.metrics import commonest
from fedpact.evaluation.personal import (
    METHOD,
    SiteFigures,
    SiteModel,
    on_held_out,
    personalise_model,
)
from fedpact.models.hugging_face import store_adapters
from fedpact.plan import Plan
from fedpact.privacy.accounting.accountant import History, add_budgets
from fedpact.privacy.ledger.ledger import Ledger
from fedpact.privacy.ledger.receipt import receipt
from fedpact.privacy.oracle import Records
from fedpact.privacy.policy import sum_reservations
from fedpact.privacy.terms import Terms, charge_size
from fedpact.rounds import Rounds
from fedpact.simulation.evaluation import Evaluator, own_models, select_judged_labels
from fedpact.simulation.machine import (
    allow_open_files,
    available_cores,
    keep_freed_memory,
    require_ray,
)
from fedpact.simulation.predict import RecordedForm
from fedpact.simulation.run import (
    check_complete,
    check_draws,
    check_there,
    finish,
    is_known,
    setting,
    start_or_resume,
)
from fedpact.simulation.secure_aggregation.setup import secure_simulation
from fedpact.simulation.setup import SimulationSetup
from fedpact.simulation.statement import of_simulation
from fedpact.simulation.threads import InProcess, VirtualSite
from fedpact.simulation.trackers import Log, check_log
from fedpact.simulation.workshop import TrainingSetup

SiteModels = dict[str, dict[str, SiteModel]]
"""Models that sites train alone, reused between runs: what determines them -> site -> model."""

_ALONE = ("data", "label", "site", "model", "logistic", "seed", "sites", "partition")
_RECORDS = ("features", "records", "person", "evaluation")


def of_run(
    path: Path,
    data: Dataset | None = None,
    known: SiteModels | None = None,
    on_site: Callable[[str, int], None] | None = None,
) -> dict[str, Any]:
    """Compute, write and return the content of joining.json of a finished simulated run.

    data: what the run was given instead of plan.data. known: models of earlier calls, extended
    here. on_site: called with each site's name and the number of sites before it is trained, which
    may take minutes. Raises InputError: no finished simulated run, or no held-out records.
    """
    folder = Folder(path)
    plan = Plan.parse(folder.read_json("plan.json"))
    _check(folder)
    check_writable(path)
    check_as_declared(plan.method)
    plan.task.check_plain("what joining was worth")
    partition = Partition.load(folder.partition)
    scene = SimulationSetup.of(plan, data, partition)
    if not any(len(site.y_held) for site in scene.sites):
        raise PlanError(
            f"{path}: no site has held-out records, on which models are compared; run it with "
            "partition.held_out, or evaluation.share"
        )
    at = Checkpoint.from_bytes((folder.path / "state.safetensors").read_bytes())
    owned = own_models(
        scene, at, lambda s, n: read_memory(folder.site(s) / "memory.safetensors", n)
    )
    model = FlatModel(scene.workshop.module())
    initial = model.vector.clone()
    # What determines a model that a site trains alone.
    followed = plan.model_dump(mode="json", include={*_ALONE, *_RECORDS})
    key = json.dumps({**followed, "person_records": plan.privacy.person_records}, sort_keys=True)
    alones = ({} if known is None else known).setdefault(key, {})
    found = dict[str, SiteFigures]()
    with one_thread():
        for site in scene.sites:
            if on_site is not None:
                on_site(site.name, len(scene.sites))
            if site.name not in alones:
                alones[site.name] = personalise_model(model, site.x, site.y, initial, site.persons)
            w = owned.get(site.name, at.state.vectors["w"])
            tuned = personalise_model(model, site.x, site.y, w, site.persons)
            whose = number_persons(scene.dataset.person, partition.held_out[site.name])
            held = site.x_held, site.y_held, whose
            found[site.name] = on_held_out(model, alones[site.name], tuned, w, *held)
    document = {
        "simulator_only": True,
        "method": METHOD,
        "own_models": plan.method.has_own_models,
        "sites": {name: asdict(figures) for name, figures in found.items()},
    }
    folder.write_json("joining.json", document)
    return document


def _check(folder: Folder) -> None:
    if not folder.partition.exists():
        raise PlanError(
            f"{folder.path} has no partition.json: expected the folder of a simulated run, or the "
            "directory of a deployed site, which has a site.toml"
        )
    summary = folder.path / "summary.json"
    status = folder.read_json("summary.json")["status"] if summary.exists() else "not ended"
    if status in ("stopped", "not ended"):
        raise PlanError(
            f"the run in {folder.path} is {status}: what joining was worth is known at its end; "
            "`fedpact resume` finishes it"
        )


OnRound = Callable[[RoundRecord], None]

ENGINES = ("local", "ray")

# Parameters times records of a step. Smaller steps are mostly Python, which runs one thread at a
# time: at half this size, a round of 100 sites took 54 ms with two workers and 39 ms with one.
_SHORT = 2**20


@dataclass(frozen=True)
class Simulated:
    """The result of a run. records: one per round, from round 0. model: with the final weights."""

    folder: Path
    records: list[RoundRecord]
    summary: dict[str, Any]
    model: nn.Module


def simulate(
    plan: Plan,
    out: Path,
    *,
    data: Dataset | None = None,
    engine: str = "local",
    on_round: OnRound = lambda _: None,
    stop: Callable[[], bool] = lambda: False,
) -> Simulated:
    """Carry out a plan and write the run's folder.

    out: a new folder, or one of this same plan, which is resumed. data: instead of plan.data.
    engine: sites train on threads of this process ("local") or on Ray actors ("ray"), with the same
    bits; a run may be resumed with the other one.
    on_round: called with every record, those of earlier sessions first. stop: see rounds.Rounds.
    Raises InputError for any unsuitable argument, before anything is written.
    """
    _check_engine(engine, plan)
    check_log(plan.run.log)
    keep_freed_memory()
    folder = Folder(out)
    known = is_known(folder, plan)
    scene = SimulationSetup.of(plan, data, Partition.load(folder.partition) if known else None)
    if not known and (told := scene.columns_used):
        print(told, file=sys.stderr)
    if not known and (told := _tell_total(folder, scene)):
        print(told, file=sys.stderr)
    environment = setting(folder, scene, known=known, given=data is not None)
    run = environment["run"]
    with ExitStack() as stack:
        sites = _sites(scene, folder, run)
        if known:
            check_there([site.ledger for site in sites if site.ledger])
        ledgers = _open_ledgers(sites, stack)
        _promise(sites, ledgers)
        if not known:
            # It contains the released sizes, so it is written after they have been charged.
            folder.write_json("privacy.json", of_simulation(scene))
        workshop = scene.workshop.on(plan.run.device)
        if engine == "ray":
            transport, charged = _on_ray(sites, workshop, ledgers, stack)
        else:
            transport, charged = _on_threads(sites, workshop, ledgers, stack)
        if plan.secure_aggregation.threshold:
            transport = secure_simulation(transport, plan, scene.sizes, scene.terms)
        memories = {site.name: site.memory for site in sites}
        evaluator = Evaluator(
            scene, charged, lambda s, included: read_memory(memories[s], included)
        )
        rounds = Rounds(plan, run, transport, evaluator, stop, in_process=True, form=scene.form)
        if not known:
            check_draws(folder, environment)
        at, records = start_or_resume(
            folder, plan, scene.workshop.module, evaluator, rounds.open_run
        )
        if known:
            # Only when resuming: ledgers of a new run may already be open in Ray actors.
            check_complete(at, run, ledgers)
        if at.round < plan.rounds:
            check_draws(folder, environment)
        rounds.see(records)
        log = stack.enter_context(Log(plan.run.log, out))
        on_round = log.and_tell(on_round)
        for record in records:
            on_round(record)
        for committed, record in _on_one_thread(rounds(at)):
            at = committed
            folder.commit(at, record)
            records.append(record)
            on_round(record)
        records[-1] = evaluator(at, rounds.finish(at, records[-1]), last=True)
        log(records[-1])
    return _finish(folder, scene, at, records, rounds.status)


def _on_one_thread(
    rounds: Iterator[tuple[Checkpoint, RoundRecord]],
) -> Iterator[tuple[Checkpoint, RoundRecord]]:
    """Run each round's arithmetic on one thread, but not what the caller does with its outcome."""
    while True:
        with one_thread():
            outcome = next(rounds, None)
        if outcome is None:
            return
        yield outcome


def _check_engine(engine: str, plan: Plan) -> None:
    """Raise InputError unless the engine is known, installed, and able to carry out the plan."""
    if engine not in ENGINES:
        raise InputError(
            f"engine is {engine!r}: expected local, which trains on threads of this machine, or "
            "ray, which trains on a cluster"
        )
    if engine == "local":
        return
    if plan.handed:
        raise InputError(
            f'engine = "ray" with {", ".join(plan.handed)}, passed in from Python: Ray actors '
            "build model and loss themselves; define them in a module that they can import"
        )
    require_ray()
    if plan.run.device != "cpu":
        raise PlanError(
            f'run.device is {plan.run.device!r}: engine "ray" trains on cores; expected "cpu", or '
            'engine "local"'
        )


def _on_threads(
    sites: list[VirtualSite], workshop: TrainingSetup, ledgers: dict[str, Ledger], stack: ExitStack
) -> tuple[InProcess, Callable[[str], History]]:
    """Return the transport to threads of this process, and a function with a site's charges."""
    clients = {site.name: site.client(ledgers.get(site.name)) for site in sites}
    # One worker per core, but one in all if they would wait for Python or for the GPU.
    short = workshop.size * max(site.batch_size for site in sites) < _SHORT
    sensible = 1 if short or workshop.device != "cpu" else available_cores()
    workers = workshop.plan.run.workers or sensible
    transport = stack.enter_context(InProcess(clients, workers, workshop.bench))
    return transport, lambda site: ledgers[site].spent(sites[0].run)


def _on_ray(
    sites: list[VirtualSite], workshop: TrainingSetup, ledgers: dict[str, Ledger], stack: ExitStack
) -> tuple[InProcess, Callable[[str], History]]:
    """Return the transport over Ray, and a function with a site's charges. Closes the ledgers."""
    from fedpact.simulation.ray import RayTransport

    spent = {site.name: ledgers[site.name].spent(site.run) for site in sites if site.terms}
    most = workshop.plan.run.workers or None
    transport = stack.enter_context(RayTransport(sites, workshop, most, spent))
    # From here on, each ledger is opened by the actor that has its site.
    for ledger in ledgers.values():
        ledger.close()
    return transport, transport.spent


def _open_ledgers(sites: list[VirtualSite], stack: ExitStack) -> dict[str, Ledger]:
    """Open each site's ledger, and check that it can reserve the run, without reserving it."""
    ledgers = dict[str, Ledger]()
    allow_open_files(len(sites))
    for site in sites:
        ledger, terms = site.open_ledger(), site.terms
        if ledger is None or terms is None:
            continue
        stack.enter_context(ledger)
        if site.policy:
            others = sum_reservations(ledger, site.run, site.policy)
            of_held = site.form and site.form.once
            site.policy.check_run(site.plan.algorithm, terms, *others, evaluation=of_held)
        _reserve(site, ledger, terms, only_ask=True)
        ledgers[site.name] = ledger
    return ledgers


def _promise(sites: list[VirtualSite], ledgers: Mapping[str, Ledger]) -> None:
    """Reserve the run at every site. None refuses, as all have been checked beforehand."""
    for site in sites:
        if site.terms is not None and site.name in ledgers:
            _reserve(site, ledgers[site.name], site.terms)
            if site.form is not None:
                site.form.reserve(ledgers[site.name], site.run, site.split)
            charge_size(ledgers[site.name], site.run, site.terms)


def _reserve(site: VirtualSite, ledger: Ledger, terms: Terms, *, only_ask: bool = False) -> None:
    events, unit = terms.history(terms.steps), terms.protects
    ledger.reserve(site.run, terms.guarantee, events, unit=unit, only_ask=only_ask)


def _sites(scene: SimulationSetup, folder: Folder, run: str) -> list[VirtualSite]:
    kept, of_persons = scene.plan.run.ledgers, scene.plan.privacy.unit == "person"
    return [
        VirtualSite(
            name=site.name,
            plan=scene.plan,
            run=run,
            records=Records(site.x, site.y, scene.released, site.persons if of_persons else None),
            memory=folder.site(site.name).absolute() / "memory.safetensors",
            terms=scene.terms.get(site.name),
            ledger=folder.ledger(site.name, kept).absolute() if site.name in scene.terms else None,
            policy=scene.policy,
            held=scene.held_out(site) if scene.form.lengths else None,
            form=scene.form,
            split=scene.split(site.name),
        )
        for site in scene.sites
    ]


def _finish(
    folder: Folder, scene: SimulationSetup, at: Checkpoint, records: list[RoundRecord], status: str
) -> Simulated:
    folder.rewrite(records)
    raw = scene.raw
    values = str(raw.x.dtype).removeprefix("torch.")
    given = RecordedForm(tuple(raw.x.shape[1:]), values, raw.classes, raw.features)
    given.by(scene.plan.stage(), scene.workshop, at.state.vectors["w"]).write(folder)
    module = scene.workshop.module()
    labels = select_judged_labels(scene)
    judged = commonest(labels, raw.classes)
    more: dict[str, Any] = {"ledgers": _sum_ledgers(folder, scene), "commonest": judged}
    # Pixels of an image, labels of a record and records of a person are not independent.
    independent = judged and labels.ndim == 1 and scene.plan.person is None
    more["judged_records"] = len(labels) if independent else None
    more["left_out"] = raw.sieve.document() if raw.sieve else None
    ended = scene.form, at, records, status, more
    summary = finish(folder, scene.plan, scene.terms, scene.sizes, module, *ended)
    dummy, _ = scene.workshop.make_dummy_records()
    store_adapters(module, scene.workshop.module(), dummy, folder.path)
    return Simulated(folder.path, records, summary, module)


def _tell_total(folder: Folder, scene: SimulationSetup) -> str:
    """Return what a run costs together with earlier ones in its sites' ledgers; "" without any."""
    found, held = list[tuple[float, float]](), scene.form.once
    for name, terms in scene.terms.items():
        if (path := folder.ledger(name, scene.plan.run.ledgers)).is_file():
            try:
                old = receipt(path)
            except LedgerError:
                # Of a run that was killed while it began it; what opens it decides.
                return ""
            own = [terms.budget, *([held.budget] if held else [])]
            # Held-out records are others: the larger of both counts.
            epsilon = add_budgets([old["epsilon_reserved"], max(one.epsilon for one in own)])
            delta = add_budgets([old["delta_reserved"], max(one.delta for one in own)])
            found.append((epsilon, delta))
    told = "privacy: with earlier runs in the same ledgers, this one costs (ε, δ) = ({}, {}) a site"
    return told.format(*(upper(max(each)) for each in zip(*found, strict=True))) if found else ""


def _sum_ledgers(folder: Folder, scene: SimulationSetup) -> dict[str, Any] | None:
    """Return what all runs of shared ledgers have reserved: of each figure, the largest of a site.

    None if the run has its own ledgers.
    """
    kept = scene.plan.run.ledgers
    if kept is None or not scene.terms:
        return None
    found = [receipt(folder.ledger(name, kept)) for name in scene.terms]
    runs = max(sum(run["beside"] is None for run in one["runs"].values()) for one in found)
    most = {k: max(one[k] for one in found) for k in ("epsilon_reserved", "delta_reserved")}
    return {"runs": runs, **most}
