"""`fedpact inspect`: what a file holds, and a draft of what to declare of it."""

from pathlib import Path
from typing import Annotated

import typer

from fedpact.cli.console import AsJson


def inspect(
    file: Annotated[Path, typer.Argument(help="Records: .csv, .parquet or .npz.")],
    label: Annotated[str | None, typer.Option(help="The column of the labels.")] = None,
    site: Annotated[str | None, typer.Option(help="The column of the sites' names.")] = None,
    person: Annotated[str | None, typer.Option(help="The column of whose a record is.")] = None,
    as_json: AsJson = False,
) -> None:
    """Draft the [records] of a configuration from a file, for a person to confirm."""
    from fedpact.cli import check as command

    command.execute_inspect(file, {"label": label, "site": site, "person": person}, as_json)
