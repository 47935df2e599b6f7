"""`fedpact predict` and `fedpact evaluate`."""

from pathlib import Path
from typing import Annotated

import typer

from fedpact.cli.console import AsJson

Run = Annotated[Path, typer.Argument(help="The folder of a run; of a deployment, server/run.")]
File = Annotated[Path, typer.Argument(help="Records: .csv, .parquet or .npz, as in training.")]
Average = Annotated[
    bool,
    typer.Option("--average", help="Ask the average of models that server.average kept."),
]


def predict(
    run: Run,
    records: File,
    out: Annotated[
        Path | None, typer.Option(help="The .csv or .npz file to write; none prints.")
    ] = None,
    average: Average = False,
    as_json: AsJson = False,
) -> None:
    """Say which class a run's model gives each record, with the probability of every class."""
    from fedpact.cli import report as command

    command.execute_predict(run, records, out, as_json, average)


def evaluate(run: Run, records: File, average: Average = False, as_json: AsJson = False) -> None:
    """Say how a run's model does on records with labels: exact figures, for whoever holds them."""
    from fedpact.cli import report as command

    command.execute_evaluate(run, records, as_json, average)
