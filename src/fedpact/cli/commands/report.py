"""`fedpact report`."""

from pathlib import Path
from typing import Annotated

import typer

from fedpact.cli.options import AsJson


def report(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")], as_json: AsJson = False
) -> None:
    """Show a run's key figures and write its report.html anew."""
    from fedpact.cli import report as command

    command.report(run, as_json)
