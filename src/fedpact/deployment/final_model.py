"""The run's final model at a site, received from the server or imported by its owner.

    run/model.safetensors   the model, with the site's own head if local.head gives it one
    run/plan.json           the plan
    run/records.json        the format of a record
    run/columns.json        the released scales of columns, if there are any
    run/summary.json        the round of the model, and what this site's ledger has spent

`fedpact predict SITE FILE` reads it. The model was released before: storing it at the site uses no
record and charges nothing.
"""

import logging
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from fedpact.algorithms.wrappers.released_scales import CONSTANTS
from fedpact.client import read_memory
from fedpact.common.errors import DataError, FedpactError, LedgerError, PlanError
from fedpact.common.files import read_json_table, write_whole
from fedpact.common.messages import Task
from fedpact.common.params import FlatModel, state_of
from fedpact.common.run_folder import COLUMNS, RUN, Folder, name_columns, read_scales
from fedpact.deployment.site_records import SiteFiles, read_receipt
from fedpact.deployment.store import Store, StoreSlot
from fedpact.plan import Plan
from fedpact.privacy.guarantee import Guarantee
from fedpact.privacy.ledger.reservations import spend_of
from fedpact.simulation.predict import RecordedForm

_log = logging.getLogger("fedpact.site")


def keep(files: SiteFiles, store: Store, task: Task) -> None:
    """Store the model that a site received from the server."""
    by = task.vectors.get(CONSTANTS)
    columns = None if by is None else name_columns(files.plan.records.released, by)
    _write(files, store, task.vectors["w"], task.included, columns, "handed over", task.round)


def bring(directory: Path, source: Path | None) -> Path:
    """Import the model from a file, for a site that was away; return its new folder.

    directory: the site's. source: the server's run/model.safetensors, next to columns.json if
    scales were released; None: the file of a server on this machine. Raises InputError: no such
    file, or not the plan's model.
    """
    of = SiteFiles.read(directory)
    module = of.workshop.module()
    path = find_published_model(directory, of.federation.run, source)
    rounds = read_json_table(path.with_name("summary.json")).get("rounds")
    w = read_model(path, module, FlatModel(module))
    names = of.plan.records.released
    columns = read_scales(path.with_name(COLUMNS), names) if names else None
    last = of.last_round(rounds or of.plan.rounds)
    with closing(Store(directory)) as store:
        _write(of, store, w, last, columns, "brought by the owner", rounds)
    return directory / RUN


def own_model(files: SiteFiles, store: Store, w: Tensor, included: int) -> Tensor:
    """Return the site's own model made of the final one w [d]; w itself if it has none.

    included: the last round whose reply from this site entered the server's state.
    """
    memory = read_memory(StoreSlot.of_memory(store, files.federation.run), included)
    own = files.plan.method.own_model(w, memory)
    return w if own is None else own


def _cost(files: SiteFiles, rounds: int | None) -> dict[str, dict[str, float]]:
    """Return the run's cost from the site's ledger; empty if that has no such run."""
    try:
        runs = (read_receipt(files.ledger) or {"runs": {}})["runs"]
    except (LedgerError, OSError) as error:
        # The model is this site's even so.
        _log.warning("the final model's summary does not say what the run cost: %s", error)
        runs = {}
    found = spend_of(files.federation.run, runs)
    state = "reserved" if may_end_early(files.plan, rounds) else "spent"
    named = {"epsilon": f"epsilon_{state}", "epsilon_alone": f"epsilon_alone_{state}"}
    return {
        name: {files.name: found[key]} if found else {}
        for name, key in {**named, "delta": "delta"}.items()
    }


def _write(
    files: SiteFiles,
    store: Store,
    w: Tensor,
    included: int,
    columns: Any,
    status: str,
    rounds: int | None,
) -> None:
    folder, of = Folder(files.directory / RUN), files.federation
    module = files.workshop.module()
    FlatModel(module).load(own_model(files, store, w, included))
    try:
        folder.path.mkdir(exist_ok=True)
        # The model is written last: once it exists, the other files do. That of an earlier run goes
        # first, or a site that is killed in between would take it for this run's.
        if read_json_table(folder.path / "summary.json").get("run") != of.run:
            (folder.path / "model.safetensors").unlink(missing_ok=True)
        folder.write_json("plan.json", files.plan.document())
        given = RecordedForm(of.shape, of.values, of.classes, of.columns(files.plan))
        stage, w = of.stage(files.plan, files.directory), FlatModel(module).vector
        given.by(stage, files.workshop, w).write(folder)
        if columns is not None:
            folder.write_json(COLUMNS, columns)
        said = {"run": of.run, "site": files.name, "status": status, "rounds": rounds}
        folder.write_json("summary.json", said | _cost(files, rounds))
        write_whole(folder.path / "model.safetensors", save_tensors(state_of(module)))
    except OSError as error:
        raise FedpactError(
            f"the final model cannot be written to {folder.path} ({error.strerror}): nothing is "
            "charged; mend this or free space, then start the server again, or run `fedpact deploy "
            "model` here"
        ) from error


def read_ending(directory: Path, run: str) -> Mapping[str, Any] | None:
    """Return the summary of an ended run in a site's directory; None without its model."""
    folder = Folder(directory / RUN)
    if not (folder.path / "model.safetensors").exists():
        return None
    found = read_json_table(folder.path / "summary.json")
    return found if found.get("run") == run else None


def may_end_early(plan: Plan, rounds: int | None) -> bool:
    """Whether a run's length, of so many rounds, may follow from releases: ε is then reserved."""
    # A site is not told why a run ends early: its model may have diverged.
    return plan.adaptive or rounds != plan.rounds


def describe_ending(run: str, plan: Plan, summary: Mapping[str, Any], folder: Path) -> str:
    """Describe the end of a run: its last round, the model's path, and its cost.

    summary: with rounds, epsilon and delta by site, epsilon_alone if noise is shared. folder: that
    of the model.
    """
    spent = list[str]()
    for site, cost in summary["epsilon"].items():
        delta, alone = summary["delta"][site], summary.get("epsilon_alone", {}).get(site)
        # JSON has no infinity: an ε without a finite bound is null.
        told_of = {"epsilon": cost, "epsilon_alone": alone, "delta": delta}
        cases = Guarantee.read(told_of | {"honest": plan.privacy.honest}).cases
        # All digits: rounded down it would not be a bound.
        told = "; ".join(f"ε <= {epsilon!r}{condition}" for condition, epsilon in cases)
        spent.append(f"{site} {told} at δ = {delta!r}")
    early = may_end_early(plan, summary["rounds"])
    accountant = plan.privacy.accountant if early else "best of PLD and RDP"
    by = f", {plan.privacy.adjacency}, accountant {accountant}"
    if (once := plan.evaluation_terms) is not None:
        most = once.budget
        by += f"; held-out records: ε <= {most.epsilon!r} at δ = {most.delta!r}"
    cost = (
        f"spent: {'; '.join(spent)}{by}" if spent and plan.private else "its cost is in the ledger"
    )
    return (
        f"run {run} has ended after round {summary['rounds']}; its model is "
        f"{folder / 'model.safetensors'}; {cost}"
    )


def find_published_model(directory: Path, run: str, model: Path | None) -> Path:
    """Return the file of the final model: `model`, or that of a server on this machine.

    Raises PlanError: it is missing, or belongs to another run.
    """
    path = model or directory.absolute().parent.parent / "server" / RUN / "model.safetensors"
    if not path.is_file():
        raise PlanError(
            f"{path} does not exist: expected the final model of run {run}, which the server "
            "writes at the end of the run. Ask for the server's run/model.safetensors and give it "
            "with --model"
        )
    # The run's name is in environment.json at the server, in summary.json at a site.
    for name in ("environment.json", "summary.json"):
        found = read_json_table(path.with_name(name)).get("run", run)
        if found != run:
            raise PlanError(
                f"{path} is the model of run {found!r}, but federation.toml is for run {run!r}: "
                "expected the final model of that run"
            )
    return path


def read_model(path: Path, module: nn.Module, flat: FlatModel) -> Tensor:
    """Load a file into `module`, and return w [d]. Raises DataError: other names or shapes."""
    expected = {name: value.shape for name, value in module.state_dict().items()}
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"{path} cannot be read ({error}): expected the run's model.safetensors"
        ) from None
    found = {name: value.shape for name, value in tensors.items()}
    if found != expected:
        raise DataError(
            f"{path} has {_format_shapes(found)}, but the plan's model has "
            f"{_format_shapes(expected)}: give the final model of this run"
        )
    module.load_state_dict(tensors)
    return flat.vector.clone()


def _format_shapes(shapes: Mapping[str, Sequence[int]]) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items()) or "nothing"
