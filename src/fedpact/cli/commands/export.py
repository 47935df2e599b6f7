"""`fedpact export`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from fedpact.cli.console import AsJson, plain_console, show
from fedpact.common.files import check_file, write_whole


def export(
    run: Annotated[Path, typer.Argument(help="The folder of a run; of a deployment, server/run.")],
    out: Annotated[
        Path | None, typer.Option(help="The file to write; left out, the card is printed.")
    ] = None,
    overrides: Annotated[
        list[str],
        typer.Option("--set", help="about.key=value: change a key of the table about; repeatable."),
    ] = [],  # noqa: B006 - typer reads the default, nobody changes it
    as_json: AsJson = False,
) -> None:
    """Write a model card of a run in Markdown, without site names."""
    from fedpact.report.model_card import about_of, find_warnings, render_model_card
    from fedpact.report.run_summary import read_run

    if out is not None:
        check_file("--out", out)
    found = read_run(run)
    text = render_model_card(found, about_of(found.plan, overrides))
    if out is not None:
        write_whole(out, text.encode(), private=False)
    for warning in find_warnings(found):
        plain_console(stderr=True, quiet=as_json).print(warning)
    wrote = {} if out is None else {"file": str(out)}

    def tell() -> None:
        sys.stdout.write(text if out is None else f"{out}\n")

    show({"markdown": text, **wrote}, as_json, tell)
