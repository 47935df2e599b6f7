"""What `fedpact.run` and `fedpact.load` return: a run's outcome, as a notebook shows it."""

import json
from dataclasses import dataclass
from html import escape
from typing import Any, Final

from fedpact.engines.simulation import Simulated
from fedpact.report.charts import budgets, figures
from fedpact.report.page import headline
from fedpact.report.reading import RunFolder, read_run
from fedpact.shown.cards import Figure, card, frame
from fedpact.text import percent, upper

_INSTEAD: Final = "result.records and result.summary"
_DRAWN: Final = {
    "accuracy": figures.accuracy,
    "sites": figures.site_accuracy,
    "epsilon": budgets.epsilon,
    "bytes": budgets.traffic,
    "labels": figures.labels,
}


@dataclass(frozen=True, repr=False)
class Result(Simulated):
    """What a run left; see engines.simulation.Simulated, whose fields these are."""

    def __repr__(self) -> str:
        summary = self.summary
        rounds = summary.get("rounds", "no")
        parts = [f"{rounds} rounds", str(summary.get("status", "not ended"))]
        if summary.get("accuracy") is not None:
            parts.append(f"accuracy {percent(summary['accuracy'])}")
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
            f"{run.plan.get('algorithm')} on {run.plan.get('data')}",
            [Figure(c.label, c.value, c.note, c.bad) for c in headline(run)],
            warning=seeded if run.private else "NOT PRIVATE",
            bad=not run.private,
            below=str(self.folder / "report.html"),
        )

    def frame(self) -> Any:
        """Return the rounds as a pandas DataFrame, one row each; see `frames` for the sites, too.

        Raises InputError: pandas is not installed.
        """
        return frame([json.loads(record.to_json()) for record in self.records], _INSTEAD)

    def figures(self) -> dict[str, Any]:
        """Return the report's figures as matplotlib Figures, by name; what there is to draw.

        Names: accuracy, psi and other metrics, sites, epsilon, bytes, labels. A notebook shows each
        by itself; `figure.savefig(path)` writes it with its legend.
        """
        run = self._run
        drawn = {name: draw(run) for name, draw in _DRAWN.items()}
        drawn |= {name: figures.metric(run, name) for name in run.last.metrics}
        return {name: drawing.chart for name, drawing in drawn.items() if drawing is not None}

    @property
    def _run(self) -> RunFolder:
        return read_run(self.folder)
