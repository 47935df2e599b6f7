"""`fedpact report`."""

from pathlib import Path
from typing import Annotated

import typer

from fedpact.cli.console import AsJson


def report(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")], as_json: AsJson = False
) -> None:
    """Show a run's key figures and write its report.html anew."""
    from fedpact.cli import report as command

    command.execute_report(run, as_json)


def watch(
    directory: Annotated[
        Path, typer.Argument(help="A run's folder, or a deployment's server's or site's directory.")
    ],
    port: Annotated[int, typer.Option(help="Of 127.0.0.1; 0 takes a free one.")] = 0,
    once: Annotated[bool, typer.Option("--once", help="Print how it stands, and end.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show a run live on a page of this machine: rounds, ε by site, bytes, who is slow."""
    from fedpact.deployment import live

    live.watch(directory, port, once, as_json)
