"""`fedpact data`: list, verify and download the public data sets."""

from typing import Annotated

import typer

from fedpact.cli.console import AsJson, group

app = group("List, verify and download the public data sets.")


@app.command("list")
def list_(as_json: AsJson = False) -> None:
    """Show the public data sets, and which of them the data directory holds."""
    from fedpact.cli import data as command

    command.execute_list(as_json)


@app.command()
def verify(
    names: Annotated[
        list[str] | None, typer.Argument(help="Data sets; default: all that are present.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare every file with its published MD5. Fails where one is missing or damaged."""
    from fedpact.cli import data as command

    command.execute_verify(names or [], as_json)


@app.command()
def download(
    names: Annotated[list[str], typer.Argument(help="Data sets to fetch.")],
    home: Annotated[
        str | None,
        typer.Option("--from", help="Another address (http, https, file) with the same files."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Fetch what is missing or damaged into the data directory, checked by the published MD5."""
    from fedpact.cli import data as command

    command.execute_download(names, home, as_json)
