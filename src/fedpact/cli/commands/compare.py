"""`fedpact compare`."""

from pathlib import Path
from typing import Annotated

import typer

from fedpact.cli.console import AsJson
from fedpact.cli.reference import check_keys


def compare(
    configs: Annotated[
        list[Path] | None,
        typer.Argument(help=".toml or .json configurations; none for the embedded default."),
    ] = None,
    algorithms: Annotated[
        str,
        typer.Option(help="Run each with these, as in fedavg,fedfdp; local: each site alone."),
    ] = "",
    overrides: Annotated[
        list[str], typer.Option("--set", help="key=value, over all configurations; repeatable.")
    ] = [],  # noqa: B006 - typer reads the default, nobody changes it
    sweeps: Annotated[
        list[str],
        typer.Option("--sweep", help="KEY=V1,V2,...: each with each value; repeatable."),
    ] = [],  # noqa: B006 - as above
    seeds: Annotated[int, typer.Option(help="Runs each, with seeds counted from the first's.")] = 3,
    out: Annotated[
        Path | None, typer.Option(help="The folder; what has ended there is not run again.")
    ] = None,
    jobs: Annotated[int, typer.Option(help="Runs side by side; 0 for one a core.")] = 0,
    joining: Annotated[
        bool, typer.Option(help="Say what joining was worth to each site, against going alone.")
    ] = False,
    counted: Annotated[
        bool,
        typer.Option(help="Say what ε trying them all costs, against whom it is, by the ledgers."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run configurations or algorithms on the same partition, seeds and budgets, side by side."""
    chosen = [name.strip() for name in algorithms.split(",")] if algorithms else []
    # An override of settings goes to those of the chosen algorithms that know it.
    whole = [text for text in overrides if not (chosen and text.lstrip().startswith("settings."))]
    firsts = [text.partition(",")[0] for text in sweeps if not text.startswith("settings.")]
    for config in configs or [None]:
        check_keys(config, [*whole, *firsts])
    from fedpact.cli import compare as command

    command.execute_compare(
        configs or [], chosen, overrides, sweeps, seeds, out, jobs, joining, counted, as_json
    )
