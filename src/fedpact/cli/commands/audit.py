"""`fedpact audit`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from fedpact.cli.console import AsJson, Overrides
from fedpact.cli.reference import check_keys


class AuditMethod(StrEnum):
    """Which attack."""

    one_run = "one-run"
    many_runs = "many-runs"
    membership = "membership"
    all = "all"


def audit(
    config: Annotated[
        Path | None,
        typer.Argument(
            help="A .toml or .json configuration, none for the embedded default; or the folder of "
            "a run, which then keeps the outcome and shows it in its report."
        ),
    ] = None,
    overrides: Overrides = [],  # noqa: B006 - typer reads the default, nobody changes it
    method: Annotated[
        AuditMethod,
        typer.Option(help="The attack; all leaves out many-runs where it would take too long."),
    ] = AuditMethod.all,
    canaries: Annotated[int, typer.Option(help="Records to insert in the one run, >= 1.")] = 1000,
    as_json: AsJson = False,
) -> None:
    """Attack a configuration on made-up canaries: a lower bound on ε beside the claimed one.

    It cannot prove a claim right, only wrong: then it ends with exit code 2.
    """
    run = config if config is not None and config.is_dir() else None
    if run is None:
        check_keys(config, overrides)
    from fedpact.cli import audit as command

    command.execute_audit(config, run, overrides, method.value, canaries, as_json)
