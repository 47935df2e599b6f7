"""`fedpact export`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from fedpact.cli.console import AsJson


class ExportForm(StrEnum):
    """What a run's statement can be written as."""

    registry = "registry"
    model_card = "model-card"
    summary = "summary"


def export(
    run: Annotated[Path, typer.Argument(help="The folder of a run; of a deployment, server/run.")],
    form: Annotated[
        ExportForm,
        typer.Option(
            "--as",
            help="registry: an entry of the DP deployments registry; model-card: Markdown; "
            "summary: budgets by class.",
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="The file to write; none prints the text.")
    ] = None,
    overrides: Annotated[
        list[str], typer.Option("--set", help="about.key=value, over the plan's; repeatable.")
    ] = [],  # noqa: B006 - typer reads the default, nobody changes it
    as_json: AsJson = False,
) -> None:
    """Write what a run guarantees in the forms of others; no site is named in any of them."""
    from fedpact.cli import export as command

    command.execute_export(run, form.value, out, overrides, as_json)
