"""The Python interface: a plan in, a run out, with its report written."""

import re
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from fedpact.data.dataset import Dataset
from fedpact.engines.served import Served
from fedpact.engines.simulation import OnRound, Result, simulate
from fedpact.folder import Folder, check_out
from fedpact.messages import RoundRecord
from fedpact.plan import Plan
from fedpact.report.page import write_report


def run(
    plan: Plan,
    out: Path | str | None = None,
    *,
    data: Dataset | None = None,
    engine: str = "local",
    on_round: OnRound = lambda _: None,
    stop: Callable[[], bool] = lambda: False,
) -> Result:
    """Carry out a plan by simulation; write its folder, report.html included.

    out: the run's folder, by default runs/ALGORITHM-DATA-TIME. The folder of the same plan is
    continued where it ended. data: a data set of your own, instead of plan.data.
    engine: "local", threads of this machine, or "ray", a cluster (docs/deployment.md).
    on_round: called with every RoundRecord. stop: asked between rounds; true ends the run there.
    Raises InputError (a ValueError) for whatever does not fit, before anything is written.
    """
    folder = check_out(default_folder(plan) if out is None else Path(out))
    result = simulate(plan, folder, data=data, engine=engine, on_round=on_round, stop=stop)
    write_report(folder)
    return result


def load(folder: Path | str) -> Result:
    """Return the result of a run that has ended, from its folder or a deployment's server/run.

    Raises DataError: it holds none.
    """
    place = Path(folder)
    served, found = Served.of(place), Folder(place)
    lines = (place / "rounds.jsonl").read_text(encoding="utf-8").splitlines()
    records = [RoundRecord.from_json(line) for line in lines]
    return Result(place, records, found.read_json("summary.json"), served.model)


def default_folder(plan: Plan) -> Path:
    """Return a new folder's name under runs/, with algorithm, data set and time."""
    now = datetime.now().strftime("%Y%m%d-%H%M%S")
    # A path's last part, or a name such as synthetic(0.5,0.5), as a folder may be called.
    data = re.sub(r"\.(csv|parquet|npz)$", "", Path(plan.data).name)
    data = re.sub(r"[^A-Za-z0-9._+-]+", "-", data).strip("-")
    return Path("runs") / f"{plan.algorithm}-{data}-{now}"
