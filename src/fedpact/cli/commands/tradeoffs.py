"""`fedpact tradeoffs`."""

from pathlib import Path
from typing import Annotated

import typer

from fedpact.cli.options import AsJson


def tradeoffs(
    preset: Annotated[
        str | None, typer.Option(help="'paper': the conventions behind its printed numbers.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Draw the curves into this file, .png or .svg.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare noise, utility and rate by older composition bounds and by exact accounting."""
    from fedpact.papers import tradeoffs_table as command

    command.tradeoffs(preset, out, as_json)
