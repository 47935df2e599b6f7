"""`fedpact personalise`."""

from __future__ import annotations

from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedpact.cli.console import AsJson, plain_console, show
from fedpact.common.errors import PlanError

if TYPE_CHECKING:
    from fedpact.evaluation.personal import SiteFigures
    from fedpact.report.run_summary import RunSummary


def personalise(
    directory: Annotated[
        Path, typer.Argument(help="A deployed site's directory, or a simulated run's folder.")
    ],
    model: Annotated[
        Path | None,
        typer.Option(help="The final model, as the server published it: model.safetensors."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Fine-tune the final model at a site, for its owner only, or advise against it."""
    from fedpact.report.evaluations import summarise_joining
    from fedpact.report.page import write_page
    from fedpact.report.run_summary import read_run

    if (directory / "site.toml").exists():
        _at_site(directory, model, as_json)
        return
    if model is not None:
        raise PlanError(
            f"--model {model} with {directory}: a simulated run has its own final model; leave "
            "--model out, or give a deployed site's directory"
        )
    from fedpact.simulation.simulate import of_run

    console, seen = plain_console(stderr=True), count(1)
    with console.status("training each site on its own") as status:

        def tell(site: str, of: int) -> None:
            line = f"{site}: site {next(seen)} of {of}"
            status.update(line)
            if not console.is_terminal:
                console.print(line)

        document = of_run(directory, on_site=tell)
    run = read_run(directory)
    write_page(run)
    show({**document, "sentence": summarise_joining([run])}, as_json, lambda: _print_run(run))


def _at_site(directory: Path, model: Path | None, as_json: bool) -> None:
    from fedpact.deployment.site_evaluation import personalise_site
    from fedpact.deployment.site_records import SiteSettings

    figures, file = personalise_site(directory, model)
    document = {**asdict(figures), "joining": figures.gain.verdict, "file": file}
    name = SiteSettings.read(directory).name
    show(document, as_json, lambda: _print_site(name, figures, file))


def _print_run(run: RunSummary) -> None:
    from fedpact.report.evaluations import (
        JOINING_NOTE,
        joining_rows,
        joining_table,
        summarise_joining,
    )

    out = plain_console()
    joining_table(joining_rows([run])).print(out)
    out.print(f"{JOINING_NOTE}. Simulator only.")
    out.print(summarise_joining([run]) or "")


def _print_site(site: str, figures: SiteFigures, file: str | None) -> None:
    from fedpact.evaluation.personal import describe_joining
    from fedpact.report.evaluations import joining_row, joining_table

    out = plain_console()
    out.print("EXACT FIGURES, for this site's owner only: NOT PRIVATE, do not release")
    joining_table([joining_row(site, [asdict(figures)])]).print(out)
    out.print(
        "Each record is evaluated by models that were not trained on it, except the federated "
        "one, which was, under its ε."
    )
    out.print(figures.advice)
    out.print(describe_joining({site: figures.gain}, "for this run"))
    out.print(f"{file}: NOT PRIVATE, keep it here" if file else "no model was written")
