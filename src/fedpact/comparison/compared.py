"""What `fedpact.compare` returns, as a notebook shows it."""

from dataclasses import dataclass
from typing import Any

from fedpact.report.charts.overlay import on_the_way, sweeps
from fedpact.report.comparison import inequality, rows
from fedpact.report.outcomes import Comparison
from fedpact.shown.cards import frame, listing


@dataclass(frozen=True, eq=False, repr=False)
class Compared(Comparison):
    """A comparison that has been made; see report.outcomes.Comparison, whose fields these are."""

    def __repr__(self) -> str:
        named = ", ".join(f"{row.name} {row.fares[0]}" for row in rows(self)[:8])
        more = ", …" if len(self.entries) > 8 else ""
        told = "; NOT AN EQUAL COMPARISON" if self.inequalities else ""
        return f"Comparison({named}{more}; {len(self.outcomes)} runs{told}; {str(self.folder)!r})"

    def _repr_html_(self) -> str:
        headings = ("", "seeds", *self.headings, "worst site", "ε", "bytes")
        cells = [(r.name, r.seeds, *r.fares, r.worst, r.epsilon, r.bytes) for r in rows(self)]
        note = f"mean ± standard deviation over seeds; {self.folder / 'comparison.html'}"
        return listing(headings, cells, title=inequality(self) or "Comparison", note=note)

    def frame(self) -> Any:
        """Return a pandas DataFrame with one row a run: what is swept, and what came of it.

        Raises InputError: pandas is not installed.
        """
        found = [
            {
                "entry": entry.name,
                "seed": outcome.seed,
                **(self.points[entry.name].values if entry.name in self.points else {}),
                "accuracy": outcome.accuracy,
                "loss": outcome.loss,
                "average_accuracy": outcome.averaged("accuracy"),
                "average_loss": outcome.averaged("loss"),
                "worst_accuracy": outcome.worst,
                **{name: outcome.metric(name) for name in self.measured},
                "epsilon": outcome.epsilon,
                "delta": outcome.delta,
                "rounds": outcome.rounds,
                "bytes": outcome.bytes,
                "seconds": outcome.seconds,
                "status": outcome.run.status,
            }
            for entry, outcome in self.outcomes
        ]
        return frame(found, "comparison.entries")

    def figures(self) -> dict[str, Any]:
        """Return the page's figures as matplotlib Figures, by title; what there is to draw."""
        swept = [drawing for drawings in sweeps(self).values() for drawing in drawings]
        return {drawing.title: drawing.chart for drawing in [*swept, *on_the_way(self)]}
