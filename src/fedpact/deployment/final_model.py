"""The run's final model at a site, as the server handed it over or its owner brought it.

    run/model.safetensors   the model, with the site's own head where local.head gives it one
    run/plan.json           what it was trained by
    run/records.json        what a record is
    run/columns.json        what released columns are scaled by, where there are any
    run/summary.json        of which round it is, and what this site's ledger has spent

It is what `fedpact predict SITE FILE` reads. It was released already, to the server: writing it
down at the site asks no record and charges nothing.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from fedpact.algorithms.wrappers.released_scales import CONSTANTS
from fedpact.client import read_memory
from fedpact.common.errors import DataError, PlanError
from fedpact.common.files import write_whole
from fedpact.common.messages import Task
from fedpact.common.params import FlatModel, state_of
from fedpact.common.run_folder import COLUMNS, RUN, Folder, name_columns, read_scales
from fedpact.deployment.site_records import SiteFiles
from fedpact.deployment.store import RunMemory, Store
from fedpact.plan import Plan
from fedpact.privacy.ledger.receipt import receipt
from fedpact.privacy.ledger.reservations import spend_of
from fedpact.simulation.predict import RecordedForm

HANDED_OVER: Final = "handed over"
BROUGHT: Final = "brought by the owner"


@dataclass(frozen=True)
class FinalModel:
    """Where a site keeps it. store: what the site remembers."""

    files: SiteFiles
    store: Store

    @staticmethod
    def of(directory: Path) -> "FinalModel":
        """Return it of a site's directory, whose files are read. Raises PlanError."""
        return FinalModel(SiteFiles.read(directory), Store(directory))

    def keep(self, task: Task, epsilon: float, delta: float) -> None:
        """Write down what the server hands over. epsilon: spent by the run here, at delta."""
        module = self._module()
        flat = FlatModel(module)
        memory = read_memory(self._memory, task.included)
        own = self.files.plan.method.own_model(task.vectors["w"], memory)
        flat.load(task.vectors["w"] if own is None else own)
        by = task.vectors.get(CONSTANTS)
        columns = None if by is None else name_columns(self.files.plan.records.released, by)
        spent = {
            "epsilon": {self.files.name: epsilon},
            "delta": {self.files.name: delta},
        }
        self._write(module, columns, {"status": HANDED_OVER, "rounds": task.round, **spent})

    def bring(self, source: Path | None) -> Path:
        """Write down the model of a file, for a site that was away; return where it then is.

        source: the server's run/model.safetensors, with columns.json beside it where columns are
        scaled by what was released; None: of a server whose directory lies beside the sites'.
        Raises InputError of some kind: no such file, or not the plan's model.
        """
        path, module = (
            find_published_model(self.files.directory, self.files.federation.run, source),
            self._module(),
        )
        flat = FlatModel(module)
        w = read_model(path, module, flat)
        rounds = _rounds_beside(path)
        part = self.files.plan.participants(self.files.federation.names)
        last = part.last_of(self.files.name, rounds or self.files.plan.rounds)
        memory = read_memory(self._memory, last)
        own = self.files.plan.method.own_model(w, memory)
        flat.load(w if own is None else own)
        said = {"status": BROUGHT, "rounds": rounds, **self._spent(rounds)}
        self._write(module, self._columns_beside(path), said)
        return self.files.directory / RUN

    @property
    def _memory(self) -> RunMemory:
        return RunMemory(self.store, self.files.federation.run)

    def _spent(self, rounds: int | None) -> dict[str, dict[str, float]]:
        """Return what this site's ledger says that the run has cost; nothing of a run it lacks."""
        runs = receipt(self.files.ledger)["runs"] if self.files.ledger.exists() else {}
        found = spend_of(self.files.federation.run, runs)
        if found is None:
            return {"epsilon": {}, "delta": {}}
        # As Site does: of a run that may have been ended by what it released.
        early = self.files.plan.budget.early and rounds != self.files.plan.rounds
        cost = found["epsilon_reserved" if early else "epsilon_spent"]
        return {
            "epsilon": {self.files.name: cost},
            "delta": {self.files.name: found["delta"]},
        }

    def _columns_beside(self, model: Path) -> Any:
        names = self.files.plan.records.released
        return read_scales(model.with_name(COLUMNS), names) if names else None

    def _write(self, module: nn.Module, columns: Any, said: Mapping[str, Any]) -> None:
        folder, of = Folder(self.files.directory / RUN), self.files.federation
        folder.path.mkdir(exist_ok=True)
        # The model comes last: whoever finds it finds the rest.
        folder.write_json("plan.json", self.files.plan.document())
        given = RecordedForm(of.shape, of.values, of.classes, of.columns(self.files.plan))
        given.by(of.stage(self.files.plan, self.files.directory)).write(folder)
        if columns is not None:
            folder.write_json(COLUMNS, columns)
        folder.write_json("summary.json", {"run": of.run, "site": self.files.name, **said})
        write_whole(folder.path / "model.safetensors", save_tensors(state_of(module)))

    def _module(self) -> nn.Module:
        return self.files.workshop.module()


def read_ending(directory: Path, run: str) -> Mapping[str, Any] | None:
    """Return what a site's directory says of how `run` ended; None where its model is not there."""
    folder = Folder(directory / RUN)
    if not (folder.path / "model.safetensors").exists():
        return None
    found = folder.read_json("summary.json")
    return found if found.get("run") == run else None


def describe_ending(run: str, plan: Plan, summary: Mapping[str, Any], folder: Path) -> str:
    """Return in words that a run has ended, where its model is, and what it has cost.

    summary: with rounds, epsilon and delta by site. folder: where the model lies.
    """
    # To the last digit: rounded down it would be no bound.
    spent = [
        f"{site} ε <= {e!r} at δ = {summary['delta'][site]!r}"
        for site, e in summary["epsilon"].items()
    ]
    by = f", {plan.privacy.adjacency}, accountant {plan.privacy.accountant}"
    cost = (
        f"spent: {'; '.join(spent)}{by}"
        if spent and plan.private
        else "what it spent is in the ledger"
    )
    return (
        f"run {run} has ended after round {summary['rounds']}; its model is "
        f"{folder / 'model.safetensors'}; {cost}"
    )


def find_published_model(directory: Path, run: str, model: Path | None) -> Path:
    """Return the file of the final model: `model`, or that of a server beside the sites.

    Raises PlanError: it is not there, or is another run's.
    """
    path = directory.absolute().parents[1] / "server" / RUN / "model.safetensors"
    path = path if model is None else model
    if not path.is_file():
        raise PlanError(
            f"{path} is not there: expected the final model of run {run}, which the server writes "
            "when the run has ended; until then there is nothing to tune. Ask for the server's "
            "run/model.safetensors and give it with --model"
        )
    # At the server environment.json says whose it is, at a site summary.json.
    for name in ("environment.json", "summary.json"):
        found = _beside(path, name).get("run", run)
        if found != run:
            raise PlanError(
                f"{path} is the model of run {found!r}, and federation.toml is of run {run!r}: "
                "expected the final model of that run, which is there when it has ended"
            )
    return path


def _rounds_beside(model: Path) -> int | None:
    """Return after how many rounds a model is, as a run's summary beside it says; None without."""
    try:
        return int(_beside(model, "summary.json")["rounds"])
    except (ValueError, LookupError, TypeError):
        return None


def _beside(model: Path, name: str) -> Mapping[str, Any]:
    """Return what a JSON file beside a model says; nothing where there is none."""
    try:
        found = json.loads(model.with_name(name).read_bytes())
    except (OSError, ValueError):
        return {}
    return cast(Mapping[str, Any], found) if isinstance(found, dict) else {}


def read_model(path: Path, module: nn.Module, flat: FlatModel) -> Tensor:
    """Return a file's w [d], which `module` then has. Raises DataError: not the module's form."""
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
            f"{path} holds {_shown(found)}: the plan's model has {_shown(expected)}; give the "
            "final model of this run"
        )
    module.load_state_dict(tensors)
    return flat.vector.clone()


def _shown(shapes: Mapping[str, Sequence[int]]) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items()) or "nothing"
