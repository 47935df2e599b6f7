"""`fedpact settings`, `fedpact algorithms` and `fedpact init`."""

from pathlib import Path
from typing import Annotated

import typer

from fedpact.cli.console import AsJson, Overrides
from fedpact.common.reference import check_keys


def settings(
    name: Annotated[
        str | None,
        typer.Argument(help="A table, a key, or federation.toml, site.toml, policy.toml."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what a plan may hold: every table and key with type, default, range and meaning."""
    from fedpact.cli import settings as command

    command.execute_settings(name, as_json)


def algorithms(
    name: Annotated[str | None, typer.Argument(help="One of them, to be shown whole.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the algorithms, or show one: its paper, what it does and releases, its settings."""
    from fedpact.cli import settings as command

    command.execute_algorithms(name, as_json)


def init(
    file: Annotated[Path, typer.Argument(help="The file to write.")] = Path("plan.toml"),
    overrides: Overrides = [],  # noqa: B006 - typer reads the default, nobody changes it
    as_json: AsJson = False,
) -> None:
    """Write a plan to begin with: a TOML file with every key, its default and what it means."""
    check_keys(None, overrides)
    from fedpact.cli import settings as command

    command.execute_init(file, overrides, as_json)
