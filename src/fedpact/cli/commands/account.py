"""`fedpact account`."""

from pathlib import Path
from typing import Annotated

import typer

from fedpact.cli.console import AsJson


def account(
    q: Annotated[
        float | None, typer.Option(help="Sampling rate of the Poisson batches, in (0, 1].")
    ] = None,
    sigma: Annotated[
        float | None, typer.Option(help="Noise multiplier: noise over sensitivity, > 0.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Number of releases, >= 1.")] = None,
    epsilon: Annotated[
        float | None, typer.Option(help="The budget's ε, in place of --q, --sigma or --steps.")
    ] = None,
    delta: Annotated[float, typer.Option(help="The budget's δ, in (0, 1).")] = 1e-5,
    accountant: Annotated[
        str, typer.Option(help="best, the smallest bound of all; pld, rdp.")
    ] = "best",
    conversion: Annotated[
        str, typer.Option(help="RDP to (ε, δ): balle, or mironov as in the papers.")
    ] = "balle",
    every: Annotated[
        bool, typer.Option("--all", help="Every accountant and conversion side by side.")
    ] = False,
    ledger: Annotated[
        Path | None,
        typer.Option(
            help="A site's ledger: --epsilon and --delta are for all its runs and one more."
        ),
    ] = None,
    joint: Annotated[
        bool,
        typer.Option(
            "--joint",
            help="With --ledger: its runs' events and the new ones as one fixed sequence. Cheaper, "
            "and a proof only if nothing of the new run follows from what the others released.",
        ),
    ] = False,
    per_person: Annotated[
        int | None,
        typer.Option(
            help="k: also ε for a person, up to k records of theirs together, each sampled alone."
        ),
    ] = None,
    tuned: Annotated[
        int | None,
        typer.Option(
            help="m: also ε of trying m settings, for who sees every run, and the best alone."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compute ε, or with --epsilon the noise, the number of releases or the sampling rate."""
    from fedpact.cli import account as command

    setting = command.Setting(q, sigma, steps, epsilon, delta)
    way = None if every else (accountant, conversion)
    command.execute_account(setting, way, ledger, joint, per_person, tuned, as_json)
