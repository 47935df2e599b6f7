"""`fedpact personalise`."""

from pathlib import Path
from typing import Annotated

import typer

from fedpact.cli.console import AsJson


def personalise(
    directory: Annotated[
        Path, typer.Argument(help="A deployed site's directory, or a simulated run's folder.")
    ],
    model: Annotated[
        Path | None,
        typer.Option(help="The final model, as the server published it: model.safetensors."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Tune the final model inside a site, for its owner alone, or say that it is not worth it."""
    from fedpact.cli import personalise as command

    command.execute_personalise(directory, model, as_json)
