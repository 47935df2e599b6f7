"""The Python interface: a plan in, a run out, with its report written."""

import re
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from fedpact.data.dataset import Dataset
from fedpact.engines.simulation import OnRound, Result, simulate
from fedpact.folder import check_out
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


def default_folder(plan: Plan) -> Path:
    """Return a new folder's name under runs/, with algorithm, data set and time."""
    now = datetime.now().strftime("%Y%m%d-%H%M%S")
    # A path's last part, or a name such as synthetic(0.5,0.5), as a folder may be called.
    data = re.sub(r"\.(csv|parquet|npz)$", "", Path(plan.data).name)
    data = re.sub(r"[^A-Za-z0-9._+-]+", "-", data).strip("-")
    return Path("runs") / f"{plan.algorithm}-{data}-{now}"
