"""The Python interface: carry out a plan, load a run, extend a run."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from html import escape
from os import PathLike
from pathlib import Path
from typing import Any, cast

import torch

from fedpact.common.errors import DataError, InputError, PlanError
from fedpact.common.files import check_out
from fedpact.common.format import count_noun, headline_metric, upper
from fedpact.common.messages import RoundRecord
from fedpact.common.notebook import Bar, card, frame, in_notebook
from fedpact.common.run_folder import (
    Folder,
    exclusive,
    explain_not_a_run,
    find_unused_path,
    folder_of_run,
)
from fedpact.common.user_code import (
    check_same,
    is_handed,
    name_handed_in,
    with_user_objects,
)
from fedpact.data.dataset import Dataset
from fedpact.data.load import digest_of, from_python
from fedpact.data.tables import describe_value
from fedpact.plan import Plan
from fedpact.report import charts
from fedpact.report.page import build_headline, write_report
from fedpact.report.run_summary import RunSummary, read_run
from fedpact.simulation.predict import Evaluated, Predictions, Predictor
from fedpact.simulation.run import extend_plan
from fedpact.simulation.simulate import OnRound, Simulated, simulate


@dataclass(frozen=True, repr=False)
class Result(Simulated):
    """The result of a run. records: one per round, from round 0. model: with the final weights.

    own: the model that was passed in from Python, if another process carried out the run.
    average: whether the model is the server's average of models instead of the last one.
    """

    own: Any = None
    average: bool = False

    def __repr__(self) -> str:
        summary = self.summary
        rounds = summary.get("rounds", "no")
        parts = [count_noun(rounds, "round"), str(summary.get("status", "not ended"))]
        of = summary.get("average") or {} if self.average else summary
        found = of.get("accuracy"), of.get("loss")
        if found != (None, None):
            parts.append(
                " ".join(headline_metric(*found)) + (" of the average" if self.average else "")
            )
        parts.append(self._privacy)
        return f"Result({', '.join(parts)}; {str(self.folder)!r})"

    @property
    def _privacy(self) -> str:
        spent, delta = (self.summary.get(key) or {} for key in ("epsilon", "delta"))
        if not spent:
            return "NOT PRIVATE"
        known = [float("nan") if e is None else e for e in spent.values()]
        most = float("nan") if any(e != e for e in known) else max(known)
        return f"ε ≤ {upper(most)}" + (f" at δ = {upper(max(delta.values()))}" if delta else "")

    def _repr_html_(self) -> str:
        if not (self.folder / "rounds.jsonl").exists():
            return f"<code>{escape(repr(self))}</code>"
        run = self._run
        seeded = "SIMULATION: protects nobody" if run.seeded else ""
        return card(
            run.title,
            build_headline(run),
            warning=seeded if run.private else "NOT PRIVATE",
            bad=not run.private,
            below=str(self.folder / "report.html"),
        )

    def frame(self) -> Any:
        """Return the rounds as a pandas DataFrame, one row each (`frames`: also the sites)."""
        return frame([json.loads(record.to_json()) for record in self.records])

    def frames(self) -> dict[str, Any]:
        """Return "rounds" and "sites" as pandas DataFrames, one row each."""
        scores = next((r.scores for r in reversed(self.records) if r.scores), {})
        spent = self.summary["epsilon"]
        score = {name: vars(scores[name]) if name in scores else {} for name in {*scores, *spent}}
        sites = [{"site": n, **score[n], "epsilon": spent.get(n)} for n in sorted(score)]
        return {"rounds": self.frame(), "sites": frame(sites)}

    def predict(self, records: Any) -> Predictions:
        """Return predictions for records; see predict.Predictor.predict."""
        return self._served.predict(records)

    def evaluate(self, records: Any, labels: Any = None) -> Evaluated:
        """Return accuracy, loss and measures on records; see predict.Predictor.evaluate."""
        return self._served.evaluate(records, labels)

    def export(self, path: Path | str) -> None:
        """Write the model alone, as TorchScript (.pt) or ONNX; see predict.Predictor.export."""
        self._served.export(Path(path))

    @cached_property
    def _served(self) -> Predictor:
        return Predictor.of(self.folder, self.own, average=self.average)

    def figures(self) -> dict[str, Any]:
        """Return the report's figures as matplotlib Figures, by name.

        Names: accuracy (or loss), psi and other metrics, sites, epsilon, bytes, labels, as far as
        the run has them. A notebook displays a figure; `figure.savefig(path)` saves it.
        """
        return dict[str, Any](charts.draw_run(self._run))

    @property
    def _run(self) -> RunSummary:
        return read_run(self.folder)


@torch.inference_mode(False)  # a caller's inference mode would prevent training
def run(
    first: Any,
    second: Any = None,
    /,
    *,
    out: Path | str | None = None,
    data: Any = None,
    model: Any = None,
    test: Any = None,
    loss: Any = None,
    metrics: Any = None,
    engine: str = "local",
    on_round: OnRound | None = None,
    stop: Callable[[], bool] = lambda: False,
    **settings: Any,
) -> Result:
    """Simulate a federation as a plan says, or train a model on data; write the run's folder.

    run(plan, out): out is the run's folder, by default runs/ALGORITHM-DATA-TIME. If it holds an
    unfinished run of the same plan, that run is resumed. data, model: override the plan's.
    run(model, data, **settings): the settings are those of a plan; `features` (a list), `drop` and
    `classes` are those of its [records].
    model: a name, an nn.Module, or a class or factory, called with (shape of a record, number of
    classes) or without arguments. data: a name, a path, or records as data.inputs takes them.
    test: a public test set in the same form, or a file's path.
    loss, metrics: override those of the plan's [task]; names as there, or functions.
    engine: "local", threads on this machine, or "ray", a cluster
    (docs/how-to/operate-a-deployment.md).
    on_round: called with every RoundRecord; by default a notebook shows a progress bar. stop:
    called between rounds; true ends the run.
    Raises InputError (a ValueError) for any unsuitable argument, before anything is written.
    """
    if isinstance(first, Plan):
        plan, out = first, second if out is None else out
        if not isinstance(out, str | PathLike | None):
            raise PlanError(
                f"out is {describe_value(out)}: expected the path of a run's folder as the "
                "second argument after a plan; give records as data=..."
            )
        if settings:
            raise PlanError(
                f"{', '.join(settings)}: these are settings of the plan: set them there, or give "
                "a model in place of the plan"
            )
    else:
        data = data if second is None else second
        plan = plan_of(first, settings)
    plan, records = with_own(plan, model=model, data=data, test=test, loss=loss, metrics=metrics)
    folder = default_folder(plan) if out is None else Path(out)
    return _carry_out(plan, folder, records, engine, on_round, stop)


def _carry_out(
    plan: Plan,
    out: Path,
    records: Dataset | None,
    engine: str,
    on_round: OnRound | None,
    stop: Callable[[], bool],
) -> Result:
    folder = check_out(out)
    if on_round is None:
        on_round = _bar(plan) if in_notebook() else lambda _: None
    with exclusive(folder):
        result = simulate(plan, folder, data=records, engine=engine, on_round=on_round, stop=stop)
        write_report(folder)
    return Result(**vars(result))


def _bar(plan: Plan) -> OnRound:
    """A notebook's progress bar: the round, how good the last model is, the largest ε so far."""
    bar, seen = Bar(plan.rounds), {"fares": ""}

    def show(record: RoundRecord) -> None:
        if record.accuracy is not None:
            seen["fares"] = f"{' '.join(headline_metric(record.accuracy, record.loss))}, "
        most = max(record.epsilon.values(), default=0.0)
        spent = f"ε {upper(most)}" if plan.private else "NOT PRIVATE"
        bar(record.round, seen["fares"] + spent)

    return show


def plan_of(model: Any, settings: Mapping[str, Any]) -> Plan:
    """Return the plan of a model and settings; some may be keys of [records]."""
    raw = dict(settings)
    columns = [key for key in ("drop", "classes") if key in raw]
    columns += ["features"] if isinstance(raw.get("features"), str | list | tuple) else []
    if columns:
        given = raw.get("records", {})
        own = given if isinstance(given, Mapping) else given.model_dump(exclude_unset=True)
        given = {key: raw.pop(key) for key in columns}
        # A string is one name, not a list of letters.
        lists = {k: [v] if isinstance(v, str) else list(v) for k, v in given.items()}
        raw["records"] = {**own, **lists}
    return Plan(model=model, **raw)


def with_own(
    plan: Plan,
    *,
    model: Any = None,
    data: Any = None,
    test: Any = None,
    loss: Any = None,
    metrics: Any = None,
) -> tuple[Plan, Dataset | None]:
    """Return the plan with objects passed in from Python, and the records if they have no path.

    The plan then identifies the records by the SHA-256 of their content. Raises PlanError: the
    plan names other records. DataError: unsuitable records.
    """
    given = plan.model_dump(mode="json", exclude_unset=True)
    own, records = with_user_objects(given, model=model, loss=loss, metrics=metrics), None
    if data is None and test is not None:
        data = plan.data
    if isinstance(data, str | Path) and test is None:
        own["data"] = str(data)
    elif data is not None:
        columns = plan.label, plan.site, plan.person
        records = from_python(data, plan.records, *columns, test, plan.task.target)
        name = name_handed_in(records.name, digest_of(records))
        known = is_handed(plan.data)
        if known and plan.data.rpartition("@")[2] != name.rpartition("@")[2]:
            raise PlanError(
                f"data is {name}, but the plan's is {plan.data}: give the records that the plan "
                "was made for, with the same test=... if it had a test set, or name others with "
                'data = "..."'
            )
        own["data"] = plan.data if known else name
    return (plan if own == given else Plan.parse(own, typed=())), records


def load(
    folder: Path | str,
    model: Any = None,
    *,
    loss: Any = None,
    metrics: Any = None,
    average: bool = False,
) -> Result:
    """Return the result of a finished run, from its folder or a deployed party's directory.

    A deployed site stores the final model but no rounds: its result has no records.
    model: the module, class or factory of the run, if it was passed in from Python; its weights are
    taken from the run. loss, metrics: likewise; `evaluate` needs them. average: take the average
    of models that the server kept (`server.average`) instead of the last model.
    Raises DataError: there is no finished run. ModelError: the model is missing, or model, loss or
    a metric differs from the run's.
    """
    if not isinstance(cast(Any, folder), str | PathLike):
        raise InputError(f"folder is {describe_value(folder)}: expected the path of a run's folder")
    place = folder_of_run(Path(folder))
    if not (place / "plan.json").exists():
        raise DataError(
            f"{folder} has no plan.json, so it is not a run: {explain_not_a_run(Path(folder))}"
        )
    check_same(Folder(place).read_json("plan.json"), loss=loss, metrics=metrics)
    served, found = Predictor.of(place, model, average=average), Folder(place)
    rounds = place / "rounds.jsonl"
    lines = rounds.read_text(encoding="utf-8").splitlines() if rounds.exists() else []
    records = [RoundRecord.from_json(line) for line in lines]
    summary = found.read_json("summary.json")
    return Result(place, records, summary, served.model, model, average=average)


def extend(
    folder: Path | str,
    rounds: int,
    *,
    epsilon: float | None = None,
    out: Path | str | None = None,
    data: Any = None,
    model: Any = None,
    test: Any = None,
    loss: Any = None,
    metrics: Any = None,
    engine: str = "local",
    on_round: OnRound | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Result:
    """Continue a finished simulated run for more rounds: a new run that starts from its model.

    The new run keeps the ledgers: each site reserves the new rounds in addition, and the total of
    both ε and both δ is in summary["ledgers"]. State beside the model (momentum, control variates,
    memory at the sites) starts anew.
    epsilon: of the new run, None for the plan's. out: its folder; by default FOLDER-more. data,
    model, test, loss, metrics: what was passed in from Python, if it was. engine, on_round, stop:
    as in `run`.
    Raises InputError: the run cannot be extended, or other records, another model, loss or metrics
    are given. PrivacyError: a site's policy does not allow it.
    """
    place = Path(folder)
    plan = extend_plan(Folder(place), rounds, epsilon)
    own, records = with_own(plan, model=model, data=data, test=test, loss=loss, metrics=metrics)
    if own != plan:
        raise PlanError(
            f"{place} is a run of {plan.model} on {plan.data}{_by(plan)}, but you gave "
            f"{own.model} on {own.data}{_by(own)}: give the same, or start a new run"
        )
    return _carry_out(own, extended_folder(place, out), records, engine, on_round, stop)


def extended_folder(folder: Path, out: Path | str | None) -> Path:
    """Return the folder of a run that continues the one in `folder`. out: a given name."""
    more = folder.resolve().with_name(f"{folder.resolve().name}-more")
    return find_unused_path(more) if out is None else Path(out)


def _by(plan: Plan) -> str:
    """Return " with NAMES" of a plan's own loss and metrics, or ""."""
    return f" with {', '.join(plan.task.own_code)}" if plan.task.own_code else ""


def default_folder(plan: Plan) -> Path:
    """Return an unused folder under runs/ named by algorithm, data set and time."""
    now = datetime.now().strftime("%Y%m%d-%H%M%S")
    # A path's last part, or a name such as synthetic(0.5,0.5), made fit for a folder's name.
    data = re.sub(r"\.(csv|parquet|npz)$", "", Path(plan.data).name)
    data = re.sub(r"[^A-Za-z0-9._+-]+", "-", data).strip("-")
    return find_unused_path(Path("runs") / f"{plan.algorithm}-{data}-{now}")
