"""Writing a run's rounds to TensorBoard and MLflow, from its records only.

    [run]
    log = ["tensorboard"]     or "mlflow", or both: extras, as in pip install 'fedpact[mlflow]'

TensorBoard's files are in the run's folder, under tensorboard/, and are rewritten when the run is
resumed. MLflow's are under mlflow/, or at MLFLOW_TRACKING_URI; mlflow.json names the run there,
which a resumed run continues. If a tracker fails, the run goes on without it. The numbers are those
of rounds.jsonl: in a deployment, released numbers only. Numbers that only a simulator knows are
named simulator_only.
"""

import json
import logging
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Self

from fedpact.common.errors import InputError
from fedpact.common.files import parse_errors, write_whole
from fedpact.common.records import RoundRecord

Write = Callable[[Mapping[str, float], int], None]
"""Takes a round's numbers by name, and the round."""
Tracker = tuple[Write, Callable[[], None]]
"""Writes a round, and ends the tracker's run."""

_MODULES: Final = {"tensorboard": "torch.utils.tensorboard", "mlflow": "mlflow"}
_logger = logging.getLogger("fedpact")


def check_log(kinds: Sequence[str]) -> None:
    """Raise InputError if a tracker is not installed."""
    for kind in kinds:
        _module(kind)


def numbers(record: RoundRecord) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a round by name."""
    for name in ("accuracy", "loss"):
        value = getattr(record, name)
        # A regression has no accuracy.
        if value is not None and not (name == "accuracy" and math.isnan(value)):
            yield name, value
    if record.epsilon:
        yield "epsilon/largest", max(record.epsilon.values())
    for site, value in record.epsilon.items():
        yield f"epsilon/{site}", value
    for site, value in record.epsilon_alone.items():
        yield f"epsilon_alone/{site}", value
    if record.round:
        yield "bytes_down", float(record.bytes_down)
        yield "bytes_up", float(record.bytes_up)
        yield "seconds", record.seconds
        yield "refused", float(len(record.refused))
    for name, value in record.metrics.items():
        yield f"simulator_only/{name}", value


class Log:
    """A context manager that writes each record once to each tracker in `kinds`.

    A tracker that fails is left out from then on, with a warning. folder: the run's.
    Raises InputError: an extra is not installed.
    """

    def __init__(self, kinds: Sequence[str], folder: Path) -> None:
        self._trackers = {kind: _KINDS[kind](folder) for kind in kinds}
        self._written = set[tuple[str, int]]()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for kind, (_, close) in [*self._trackers.items()]:
            self._try(kind, close)

    def and_tell(self, on_round: Callable[[RoundRecord], None]) -> Callable[[RoundRecord], None]:
        """Return a function that writes a record, then calls `on_round`."""

        def tell(record: RoundRecord) -> None:
            self(record)
            on_round(record)

        return tell

    def __call__(self, record: RoundRecord) -> None:
        """Write the record's numbers that were not written before."""
        new = {
            name: value
            for name, value in numbers(record)
            if (name, record.round) not in self._written and math.isfinite(value)
        }
        self._written |= {(name, record.round) for name in new}
        for kind, (write, _) in [*self._trackers.items()] if new else ():
            self._try(kind, partial(write, new, record.round))

    def _try(self, kind: str, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # of a database, a server or a disk
            _logger.warning(
                "%s of run.log fails (%s: %s): the run goes on without it",
                kind,
                type(error).__name__,
                error,
            )
            del self._trackers[kind]


def _tensorboard(folder: Path) -> Tracker:
    place = folder / "tensorboard"
    writer: Any = _module("tensorboard").SummaryWriter
    shutil.rmtree(place, ignore_errors=True)
    opened = writer(str(place))

    def write(found: Mapping[str, float], step: int) -> None:
        for name, value in found.items():
            opened.add_scalar(name, value, step)

    return write, opened.close


def _mlflow(folder: Path) -> Tracker:
    mlflow: Any = _module("mlflow")
    at = os.environ.get("MLFLOW_TRACKING_URI")
    if at is None:
        place = folder / "mlflow"
        place.mkdir(parents=True, exist_ok=True)
        at = f"sqlite:///{place.absolute()}/mlflow.db"
    file = folder / "mlflow.json"
    known: dict[str, Any] | None = None
    if file.exists():
        with parse_errors(file, "remove it, and the rounds are logged as another run of MLflow's"):
            stored = json.loads(file.read_bytes())
            known = {**stored, "run_id": str(stored["run_id"]), "round": int(stored["round"])}

    def keep(known: Mapping[str, Any]) -> None:
        write_whole(file, json.dumps(known).encode() + b"\n", private=False)

    try:
        client = mlflow.MlflowClient(tracking_uri=at)
        if known is None:
            found = client.get_experiment_by_name("fedpact")
            number = client.create_experiment("fedpact") if found is None else found.experiment_id
            run = client.create_run(number, run_name=folder.name).info.run_id
            known = {"run_id": run, "tracking_uri": at, "round": -1}
            keep(known)
    except Exception as error:  # of a database or a server
        raise InputError(
            f"MLflow at {at} cannot start a run ({type(error).__name__}: {error}): set "
            "MLFLOW_TRACKING_URI to one that can, or leave mlflow out of run.log"
        ) from error
    run, last = known["run_id"], known["round"]

    def write(found: Mapping[str, float], step: int) -> None:
        # Skip rounds that were logged before the run was resumed.
        if step > last:
            now = int(1000 * time.time())
            named = {re.sub(r"[^\w\-. /:]", "_", name): value for name, value in found.items()}
            metric = mlflow.entities.Metric
            client.log_batch(run, [metric(name, v, now, step) for name, v in named.items()])
            known["round"] = max(int(known["round"]), step)
            keep(known)

    return write, lambda: client.set_terminated(run)


_KINDS: Final[Mapping[str, Callable[[Path], Tracker]]] = {
    "tensorboard": _tensorboard,
    "mlflow": _mlflow,
}


def _module(kind: str) -> Any:
    try:
        return import_module(_MODULES[kind])
    except ImportError as error:
        raise InputError(
            f"run.log has {kind!r}, which is not installed ({error}): run "
            f"pip install 'fedpact[{kind}]', or leave it out of run.log"
        ) from error
