"""`fedpact plan`."""

from typing import Annotated

import typer

from fedpact.cli.console import AsJson, Config, Overrides
from fedpact.cli.reference import check_keys


def plan(
    config: Config = None,
    overrides: Overrides = [],  # noqa: B006 - typer reads the default, nobody changes it
    optimise: Annotated[
        bool, typer.Option(help="Choose q, σ, T and τ from the budget, the rounds and the passes.")
    ] = False,
    passes: Annotated[
        float | None,
        typer.Option(help="With --optimise: most reads of a site's data; default: as configured."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what a configuration will spend: q, σ, iterations, ε per round and at the end, bytes."""
    check_keys(config, overrides)
    from fedpact.cli import plan as command

    command.execute_plan(config, overrides, optimise=optimise, passes=passes, as_json=as_json)
