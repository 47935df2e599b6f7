"""`fedpact export`."""

from pathlib import Path
from typing import Annotated

import typer

from fedpact.cli.console import AsJson


def export(
    run: Annotated[Path, typer.Argument(help="The folder of a run; of a deployment, server/run.")],
    out: Annotated[
        Path | None, typer.Option(help="The file to write; none prints the card.")
    ] = None,
    overrides: Annotated[
        list[str], typer.Option("--set", help="about.key=value, over the plan's; repeatable.")
    ] = [],  # noqa: B006 - typer reads the default, nobody changes it
    as_json: AsJson = False,
) -> None:
    """Write a model card of a run, in Markdown; no site is named in it."""
    from fedpact.cli import export as command

    command.execute_export(run, out, overrides, as_json)
