"""A comparison for other programs: its runs' curves as CSV, its table as LaTeX."""

import csv
import io
from typing import Final

from fedpact.common.format import upper
from fedpact.report.compared_runs import Comparison, Entry
from fedpact.report.comparison import Cell, figure_columns, guarantees, inequality, tabulate
from fedpact.report.run_summary import largest_epsilon

COLUMNS: Final = (
    *("run", "algorithm", "epsilon_allowed", "seed"),
    *("round", "accuracy", "loss", "epsilon", "bytes", "simulated_seconds"),
)
# Characters that LaTeX would interpret, and those that its fonts lack.
_TEX: Final = str.maketrans(
    {
        **{sign: f"\\{sign}" for sign in "&%$#_{}"},
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "±": r"$\pm$",
        "×": r"$\times$",
        "·": r"$\cdot$",
        "∞": r"$\infty$",
        "–": "--",
        **{
            sign: f"${name}$"
            for sign, name in zip(
                "εδτησλΨ",
                (r"\varepsilon", r"\delta", r"\tau", r"\eta", r"\sigma", r"\lambda", r"\Psi"),
                strict=True,
            )
        },
    }
)


def curves_as_csv(comparison: Comparison) -> str:
    """Return a line for each round of each run that has ended; missing figures are empty.

    epsilon_allowed: the largest budget of a site; empty without privacy. Other swept keys have
    their own columns.
    accuracy in [0, 1] and loss: of the global model. epsilon: the largest that a site's training
    has spent so far; empty without privacy. Where releases decide how many follow (Plan.adaptive),
    it is no bound: the table has the reserved ε. bytes: of all messages so far.
    simulated_seconds: by the plan's [clock], so far; empty without one.
    """
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    swept = [key for key in comparison.swept if key not in ("algorithm", "privacy.epsilon")]
    rows.writerow((*COLUMNS, *swept))
    for entry in comparison.entries:
        for run in entry.runs:
            named = (entry.name, run.plan.get("algorithm"), run.epsilon_allowed, run.seed)
            sent, clock = 0, 0.0
            for record in run.records:
                sent += record.bytes_down + record.bytes_up
                spent = largest_epsilon(record.epsilon.values()) if record.epsilon else None
                clock += record.simulated_seconds
                accuracy = record.accuracy if run.counted else None
                figures = (record.round, accuracy, record.loss, spent, sent, clock or None)
                rows.writerow((*named, *figures, *(entry.point.values.get(key) for key in swept)))
    return text.getvalue()


def table_as_latex(comparison: Comparison) -> str:
    r"""Return the comparison's table, means ± deviations, for \usepackage{booktabs}.

    Notes on ε, and on why the comparison may be unfair, follow.
    """
    plans: dict[str, Cell] = {
        "algorithm": lambda entry: str(entry.plan.get("algorithm", "–")),
        "allowed ε": _allowed,
    }
    table = tabulate(plans | figure_columns(comparison), comparison)
    lines = [
        f"\\begin{{tabular}}{{l{'r' * len(table.headings)}}}",
        r"\toprule",
        _row("", *table.headings),
        r"\midrule",
        *(_row(*cells) for cells in table.rows),
        r"\bottomrule",
        r"\end{tabular}",
    ]
    notes = [inequality(comparison), *guarantees(comparison)]
    lines += [f"\\par\\smallskip\n{note.translate(_TEX)}" for note in notes if note]
    return "\n".join(lines) + "\n"


def _allowed(entry: Entry) -> str:
    found = [allowed for run in entry.runs if (allowed := run.epsilon_allowed) is not None]
    return upper(max(found)) if found else "–"


def _row(*cells: str) -> str:
    return " & ".join(cell.translate(_TEX) for cell in cells) + r" \\"
