"""`fedpact tradeoffs`."""

from pathlib import Path
from typing import Annotated

import typer

from fedpact.cli.console import AsJson


def tradeoffs(
    preset: Annotated[
        str | None, typer.Option(help="'paper': the conventions behind its printed numbers.")
    ] = None,
    q: Annotated[
        float | None, typer.Option(help="Sampling rate of the Poisson batches, in (0, 1).")
    ] = None,
    delta: Annotated[float | None, typer.Option(help="The budget's δ, in (0, 1).")] = None,
    steps: Annotated[
        list[int] | None,
        typer.Option(help="T, the number of releases; once for each table."),
    ] = None,
    epsilon: Annotated[
        list[float] | None, typer.Option(help="The budget's ε; once for each part of a table.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Draw the curves into this file, .png or .svg.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare noise, utility and rate by older composition bounds and by exact accounting."""
    from fedpact.report import tradeoffs as command

    question = command.build_question(preset, q, delta, steps or (), epsilon or ())
    command.tradeoffs(question, out, as_json)
