"""`fedpact resume`."""

from pathlib import Path
from typing import Annotated

import typer

from fedpact.cli.options import AsJson, Engine


def resume(
    folder: Annotated[Path, typer.Argument(help="The folder of a run that was stopped.")],
    engine: Engine = "local",
    as_json: AsJson = False,
) -> None:
    """Go on with a run from its last committed round."""
    from fedpact.cli import run as command

    command.resume(folder, engine, as_json)
