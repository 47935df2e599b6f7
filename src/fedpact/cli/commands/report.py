"""`fedpact report`, `watch`, `predict`, `evaluate` and `export`."""

from __future__ import annotations

import csv
import io
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedpact.cli.console import AsJson, plain_console, print_run, show
from fedpact.common.errors import InputError
from fedpact.common.files import check_file, write_whole
from fedpact.common.format import count_noun

if TYPE_CHECKING:
    from fedpact.api import Result
    from fedpact.report.run_summary import RunSummary
    from fedpact.simulation.predict import Predictions

Run = Annotated[Path, typer.Argument(help="The folder of a run; for a deployment, server/run.")]

File = Annotated[Path, typer.Argument(help="Records: .csv, .parquet or .npz, as in training.")]

Average = Annotated[
    bool,
    typer.Option("--average", help="Use the averaged model that server.average kept."),
]

Model = Annotated[
    str | None,
    typer.Option("--model", help="The class that a script handed in, as train.py:Net."),
]


def report(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")], as_json: AsJson = False
) -> None:
    """Show a run's key figures and rewrite its report.html."""
    from fedpact.report.page import write_page
    from fedpact.report.run_summary import read_run

    found = read_run(run)
    try:
        path = write_page(found)
    except OSError:
        # The folder is read-only: its figures can be shown all the same.
        show(_document(found, None), as_json, lambda: print_run(found, None))
        raise
    show(_document(found, path), as_json, lambda: print_run(found, path))


def watch(
    directory: Annotated[
        Path, typer.Argument(help="A run's folder, or a deployment's server's or site's directory.")
    ],
    port: Annotated[int, typer.Option(help="Port of 127.0.0.1; 0 for a free one.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Show a run live in the browser: rounds, ε by site, bytes, slow sites."""
    from fedpact.deployment import snapshot

    out = plain_console()
    if as_json:
        out.print(snapshot.encode_json(snapshot.take_snapshot(directory)))
        return
    with snapshot.create_server(directory, port) as server:
        where = snapshot.address(server)
        out.print(f"{where} shows {directory}, {where}metrics is for Prometheus; Ctrl-C ends it")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            out.print("ended")


def predict(
    run: Run,
    records: File,
    out: Annotated[
        Path | None, typer.Option(help="The .csv or .npz file to write; left out, print.")
    ] = None,
    average: Average = False,
    model: Model = None,
    as_json: AsJson = False,
) -> None:
    """Predict the class of each record with a run's model, with all probabilities."""
    import numpy as np

    if out is not None:
        check_file("--out", out, ".csv", ".npz")
        if out.exists() and records.exists() and out.samefile(records):
            raise InputError(
                f"--out is {str(out)!r}, which holds the records: the predictions would replace "
                "them; name another file"
            )
    found = _read_asked(run, average, model).predict(records)
    arrays = out is not None and out.suffix.lower() == ".npz"
    if found.labels.ndim > 1 and not (arrays or (as_json and out is None)):
        raise InputError(
            f"{run} predicts a class for every pixel, which does not fit a line of a CSV: name "
            "an .npz file, --out answers.npz, or use --json"
        )
    text = "" if found.labels.ndim > 1 else _as_csv(records, found)
    if out is not None and arrays:
        stored = io.BytesIO()
        classes = np.array(found.classes, str)
        np.savez_compressed(stored, **{**vars(found), "classes": classes})
        write_whole(out, stored.getvalue(), private=True)
    elif out is not None:
        # Predictions of single records belong to their owner.
        write_whole(out, text.encode(), private=True)
    document = {
        "classes": list(found.classes),
        "labels": found.labels.tolist(),
        "probabilities": found.probabilities.tolist(),
    }

    def tell() -> None:
        sys.stdout.write(text if out is None else f"{out}\n")

    show(document, as_json, tell)


def evaluate(
    run: Run,
    records: File,
    average: Average = False,
    model: Model = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate a run's model on labelled records: exact figures, for their owner."""
    score = _read_asked(run, average, model).evaluate(records)

    def tell() -> None:
        plain_console().print(
            f"{score}, on {count_noun(score.records, 'record')} that fit the declaration: exact "
            "figures, not private"
        )

    show(asdict(score), as_json, tell)


def _document(run: RunSummary, path: Path | None) -> dict[str, Any]:
    statement = ("private", "unit", "adjacency", "mechanism", "accountant", "randomness")
    return {
        "summary": run.summary or {"status": run.status, "rounds": run.last.round},
        "privacy": {key: run.privacy.get(key) for key in statement},
        "sites": {name: asdict(site) for name, site in run.site_privacy.items()},
        "audit": asdict(run.audit) if run.audit else None,
        "report": str(path) if path else None,
    }


def _read_asked(run: Path, average: bool, model: str | None) -> Result:
    """Return a run's result; tell on stderr if it has an averaged model that is not used."""
    from fedpact.api import load
    from fedpact.common.user_code import own_factory

    own = model and own_factory(
        model.replace(".py:", ":"), "--model", (), "the model's class or factory"
    )
    found = load(run, own or None, average=average)
    if not average and (found.folder / "average.safetensors").exists():
        print(
            f"{run}: using the last model; --average uses the average that the server kept",
            file=sys.stderr,
        )
    return found


def _as_csv(records: Path, found: Predictions) -> str:
    """Return a line for each record: its row, counted as warnings do, and the answer."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["row", "label", *found.classes])
    first = 0 if records.suffix.lower() == ".npz" else 1
    rows = zip(found.labels.tolist(), found.probabilities.tolist(), strict=True)
    for row, (label, each) in enumerate(rows, first):
        shares = ("" if math.isnan(p) else f"{p:.6g}" for p in each)
        unknown = isinstance(label, float) and math.isnan(label)
        writer.writerow([row, "" if unknown else label, *shares])
    return text.getvalue()


def export(
    run: Annotated[Path, typer.Argument(help="The folder of a run; of a deployment, server/run.")],
    out: Annotated[
        Path | None, typer.Option(help="The file to write; left out, the card is printed.")
    ] = None,
    overrides: Annotated[
        list[str],
        typer.Option("--set", help="about.key=value: change a key of the table about; repeatable."),
    ] = [],  # noqa: B006 - typer reads the default, nobody changes it
    as_json: AsJson = False,
) -> None:
    """Write a model card of a run in Markdown, without site names."""
    from fedpact.report.exports import about_of, find_warnings, render_model_card
    from fedpact.report.run_summary import read_run

    if out is not None:
        check_file("--out", out)
    found = read_run(run)
    text = render_model_card(found, about_of(found.plan, overrides))
    if out is not None:
        write_whole(out, text.encode(), private=False)
    for warning in find_warnings(found):
        plain_console(stderr=True, quiet=as_json).print(warning)
    wrote = {} if out is None else {"file": str(out)}

    def tell() -> None:
        sys.stdout.write(text if out is None else f"{out}\n")

    show({"markdown": text, **wrote}, as_json, tell)
