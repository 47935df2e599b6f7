"""`fedpact report`, `predict` and `evaluate`: a run's figures and page, and its model tried."""

import csv
import io
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedpact.api import Result, load
from fedpact.cli.console import show
from fedpact.common.errors import InputError
from fedpact.common.files import check_file, write_whole
from fedpact.common.notebook import print_table
from fedpact.report.page import build_headline, write_page
from fedpact.report.run_summary import RunSummary, read_run
from fedpact.simulation.predict import Predictions


def execute_report(run: Path, as_json: bool) -> None:
    """Carry out `fedpact report` on a run's folder."""
    found = read_run(run)
    try:
        path = write_page(found)
    except OSError:
        # Read in a folder that is another's: the figures are there all the same.
        show(_document(found, None), as_json, lambda: _print(found, None))
        raise
    show(_document(found, path), as_json, lambda: _print(found, path))


def _document(run: RunSummary, path: Path | None) -> dict[str, Any]:
    statement = ("private", "unit", "adjacency", "mechanism", "accountant", "randomness")
    return {
        "summary": run.summary or {"status": run.status, "rounds": run.last.round},
        "privacy": {key: run.privacy.get(key) for key in statement},
        "sites": {name: asdict(site) for name, site in run.site_privacy.items()},
        "audit": asdict(run.audit) if run.audit else None,
        "report": str(path) if path else None,
    }


def _print(run: RunSummary, path: Path | None) -> None:
    table = Table(title=Text(f"run {run.path}"), show_header=False)
    for card in build_headline(run):
        note = card.note + (" (simulator only)" if card.simulator_only else "")
        # Text, because a site's name may look like markup.
        value = Text(card.value, style="bold red" if card.bad else "bold")
        table.add_row(card.label, value, Text(note))
    console = Console()
    print_table(console, table)
    if run.private and run.seeded:
        console.print("A simulation: seeded noise protects nobody; ε is a deployment's.")
    # Not wrapped: a path must stay whole to be opened.
    if path is not None:
        console.print(Text(str(path)), soft_wrap=True)


def _asked(run: Path, average: bool) -> Result:
    """Return a run's result; say so where it has a model beside the one that is asked."""
    found = load(run, average=average)
    if not average and (found.folder / "average.safetensors").exists():
        print(
            f"{run}: the last model answers; --average asks the average that the server kept",
            file=sys.stderr,
        )
    return found


def execute_predict(
    run: Path, records: Path, out: Path | None, as_json: bool, average: bool
) -> None:
    """Carry out `fedpact predict`. out: the file to write, or None for standard output.

    average: see `fedpact.load`.

    A .csv file, or of any model an .npz with arrays labels, probabilities, used and classes. Raises
    InputError: answers of many pixels that no line of a CSV holds.
    """
    if out is not None:
        check_file("--out", out, ".csv", ".npz")
    found = _asked(run, average).predict(records)
    arrays = out is not None and out.suffix.lower() == ".npz"
    if found.labels.ndim > 1 and not (arrays or (as_json and out is None)):
        raise InputError(
            f"{run} answers each record with a class for every pixel, which no line of a CSV "
            "holds: name an .npz file, --out answers.npz, or use --json"
        )
    text = "" if found.labels.ndim > 1 else _as_csv(found)
    if out is not None and arrays:
        stored = io.BytesIO()
        np.savez_compressed(stored, **{**vars(found), "classes": np.array(found.classes, str)})
        write_whole(out, stored.getvalue(), private=True)
    elif out is not None:
        # What is said of single records is their holder's.
        write_whole(out, text.encode(), private=True)
    document = {
        "classes": list(found.classes),
        "labels": found.labels.tolist(),
        "probabilities": found.probabilities.tolist(),
    }

    def tell() -> None:
        sys.stdout.write(text if out is None else f"{out}\n")

    show(document, as_json, tell)


def execute_evaluate(run: Path, records: Path, as_json: bool, average: bool) -> None:
    """Carry out `fedpact evaluate`. average: see `fedpact.load`."""
    score = _asked(run, average).evaluate(records)

    def tell() -> None:
        Console(highlight=False, soft_wrap=True).print(
            f"{score}, on {score.records:,} records that are used: exact figures, released to "
            "nobody"
        )

    show(asdict(score), as_json, tell)


def _as_csv(found: Predictions) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["label", *found.classes])
    rows = zip(found.labels.tolist(), found.probabilities.tolist(), strict=True)
    for label, row in rows:
        writer.writerow([label, *("" if math.isnan(p) else f"{p:.6g}" for p in row)])
    return text.getvalue()
