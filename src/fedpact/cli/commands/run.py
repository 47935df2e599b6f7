"""`fedpact run`, `fedpact resume` and `fedpact extend`."""

from pathlib import Path
from typing import Annotated

import typer

from fedpact.cli.console import AsJson, Config, Engine, Overrides
from fedpact.cli.reference import check_keys


def run(
    config: Config = None,
    overrides: Overrides = [],  # noqa: B006 - typer reads the default, nobody changes it
    out: Annotated[
        Path | None, typer.Option(help="The run's folder; the same plan's folder is continued.")
    ] = None,
    engine: Engine = "local",
    as_json: AsJson = False,
) -> None:
    """Train as a configuration says, and write the run's folder with its report."""
    check_keys(config, overrides)
    from fedpact.cli import run as command

    command.execute_run(config, overrides, out, engine, as_json)


def resume(
    folder: Annotated[Path, typer.Argument(help="The folder of a run that was stopped.")],
    engine: Engine = "local",
    as_json: AsJson = False,
) -> None:
    """Go on with a run from its last committed round."""
    from fedpact.cli import run as command

    command.execute_resume(folder, engine, as_json)


def extend(
    run: Annotated[Path, typer.Argument(help="The folder of a simulated run that has ended.")],
    rounds: Annotated[int, typer.Option(min=1, help="How many more.")],
    epsilon: Annotated[
        float | None, typer.Option(help="The new run's ε; left out, the plan's.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The new run's folder; left out, RUN-more.")
    ] = None,
    engine: Engine = "local",
    as_json: AsJson = False,
) -> None:
    """Go on from the model of a run that has ended, with its ledgers: both ε count together."""
    from fedpact.cli import run as command

    command.execute_extend(run, rounds, epsilon, out, engine, as_json)
