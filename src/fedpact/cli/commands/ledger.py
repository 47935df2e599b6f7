"""`fedpact ledger`: what sites have promised and spent, and whether the proof is intact."""

from pathlib import Path
from typing import Annotated

import typer

from fedpact.cli.console import AsJson, group

app = group("What sites have promised and spent.")

Where = Annotated[
    Path, typer.Argument(help="A ledger.jsonl, or a folder with the ledgers of several sites.")
]


@app.command()
def show(where: Where, as_json: AsJson = False) -> None:
    """Show what each run reserved and spent."""
    from fedpact.cli import ledger as command

    command.show_spend(where, as_json)


@app.command()
def verify(
    where: Annotated[
        Path,
        typer.Argument(help="A ledger.jsonl, a folder of ledgers, or a receipt that was exported."),
    ],
    federation: Annotated[
        Path | None,
        typer.Option(help="With a receipt: the federation.toml that says whose key is whose."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check every link of each ledger's chain, or a receipt's signature; altered is an error."""
    from fedpact.cli import ledger as command

    command.execute_verify(where, federation, as_json)


@app.command()
def export(
    where: Where,
    out: Annotated[Path, typer.Option(help="The file to write the receipt to.")],
    as_json: AsJson = False,
) -> None:
    """Write a receipt, signed at a deployed site: budgets and purpose, nothing about records."""
    from fedpact.cli import ledger as command

    command.execute_export(where, out, as_json)
