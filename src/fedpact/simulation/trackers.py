"""Writing a run's rounds to TensorBoard and MLflow, from its records only.

    [run]
    log = ["tensorboard"]     or "mlflow", or both: extras, as in pip install 'fedpact[mlflow]'

TensorBoard's files are in the run's folder, under tensorboard/, and are rewritten when the run is
resumed. MLflow's are under mlflow/, or at MLFLOW_TRACKING_URI; mlflow.json names the run there,
which a resumed run continues. The numbers are those of rounds.jsonl: in a deployment, released
numbers only. Numbers that only a simulator knows are named simulator_only.
"""

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Self

from fedpact.common.errors import InputError
from fedpact.common.records import RoundRecord

Write = Callable[[str, float, int], None]
"""Takes a number's name, its value, and the round."""

_MODULES: Final = {"tensorboard": "torch.utils.tensorboard", "mlflow": "mlflow"}


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

    folder: the run's. Raises InputError: an extra is not installed.
    """

    def __init__(self, kinds: Sequence[str], folder: Path) -> None:
        self._stack = ExitStack()
        self._writes = [_KINDS[kind](folder, self._stack) for kind in kinds]
        self._written = set[tuple[str, int]]()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def and_tell(self, on_round: Callable[[RoundRecord], None]) -> Callable[[RoundRecord], None]:
        """Return a function that writes a record, then calls `on_round`."""

        def tell(record: RoundRecord) -> None:
            self(record)
            on_round(record)

        return tell

    def __call__(self, record: RoundRecord) -> None:
        """Write the record's numbers that were not written before."""
        for name, value in numbers(record):
            if (name, record.round) not in self._written and math.isfinite(value):
                self._written.add((name, record.round))
                for write in self._writes:
                    write(name, value, record.round)


def _tensorboard(folder: Path, stack: ExitStack) -> Write:
    place = folder / "tensorboard"
    writer: Any = _module("tensorboard").SummaryWriter
    shutil.rmtree(place, ignore_errors=True)
    opened = writer(str(place))
    stack.callback(opened.close)

    def write(name: str, value: float, step: int) -> None:
        opened.add_scalar(name, value, step)

    return write


def _mlflow(folder: Path, stack: ExitStack) -> Write:
    mlflow: Any = _module("mlflow")
    at = os.environ.get("MLFLOW_TRACKING_URI")
    if at is None:
        place = folder / "mlflow"
        place.mkdir(parents=True, exist_ok=True)
        at = f"sqlite:///{place.absolute()}/mlflow.db"
    known = _known(folder / "mlflow.json")
    try:
        client = mlflow.MlflowClient(tracking_uri=at)
        if known is None:
            found = client.get_experiment_by_name("fedpact")
            number = client.create_experiment("fedpact") if found is None else found.experiment_id
            run = client.create_run(number, run_name=folder.name).info.run_id
            known = {"run_id": run, "tracking_uri": at, "round": -1}
    except Exception as error:  # of a database or a server
        raise InputError(
            f"MLflow at {at} cannot start a run ({type(error).__name__}: {error}): set "
            "MLFLOW_TRACKING_URI to one that can, or leave mlflow out of run.log"
        ) from error
    run, last = known["run_id"], int(known["round"])

    def write(name: str, value: float, step: int) -> None:
        # Skip rounds that were logged before the run was resumed.
        if step > last:
            known["round"] = max(int(known["round"]), step)
            client.log_metric(run, re.sub(r"[^\w\-. /:]", "_", name), value, step=step)

    def close() -> None:
        client.set_terminated(run)
        (folder / "mlflow.json").write_text(json.dumps(known) + "\n", encoding="utf-8")

    stack.callback(close)
    return write


_KINDS: Final[Mapping[str, Callable[[Path, ExitStack], Write]]] = {
    "tensorboard": _tensorboard,
    "mlflow": _mlflow,
}


def _known(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and {"run_id", "round"} <= found.keys() else None


def _module(kind: str) -> Any:
    try:
        return import_module(_MODULES[kind])
    except ImportError as error:
        raise InputError(
            f"run.log has {kind!r}, which is not installed ({error}): run "
            f"pip install 'fedpact[{kind}]', or leave it out of run.log"
        ) from error
