"""`fedpact recommend`."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from fedpact.cli.console import AsJson, plain_console, show
from fedpact.common import check
from fedpact.common.errors import DataError, InputError
from fedpact.common.files import check_file, write_whole
from fedpact.common.notebook import print_table

if TYPE_CHECKING:
    from fedpact.studies.circumstances import Circumstances
    from fedpact.studies.recommend import Recommendation


def recommend(
    data: Annotated[
        str, typer.Argument(help="A data set's name, or a .csv, .parquet or .npz file.")
    ],
    epsilon: Annotated[
        str,
        typer.Option(
            help="ε per record and site, > 0: one number, or one for each site in the order of "
            "their names, as in 1,2,8."
        ),
    ],
    delta: Annotated[
        str,
        typer.Option(help="δ per record and site, in (0, 1): one number, or one for each site."),
    ] = "1e-5",
    rounds: Annotated[int, typer.Option(help="At most this many rounds, >= 1.")] = 100,
    sites: Annotated[
        int | None,
        typer.Option(min=1, help="Number of sites; default: those in the data, or 10."),
    ] = None,
    trust: Annotated[
        str,
        typer.Option(
            help="own: each site's noise protects it; sum: the honest sites' noise together."
        ),
    ] = "own",
    honest: Annotated[
        int, typer.Option(help="With --trust sum: number of honest sites; default: all but one.")
    ] = 0,
    mirror: Annotated[
        bool | None,
        typer.Option(help="Mirrored images have the same label; default: if they are in colour."),
    ] = None,
    features: Annotated[
        bool, typer.Option(help="Train on fixed features of images, or on the images themselves.")
    ] = True,
    label: Annotated[str | None, typer.Option(help="The column with the labels.")] = None,
    site: Annotated[str | None, typer.Option(help="The column with the site names.")] = None,
    columns: Annotated[
        Path | None,
        typer.Option(
            help="A plan with the columns' declarations (records); its label, site, person, task "
            "and evaluation are used, too. Default: the built-in declarations of adult and "
            "heart_disease."
        ),
    ] = None,
    records: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Declared number of training records at all sites together; DATA may then be "
            "one site's, or synthetic. Default: counted in DATA.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the plan to this .toml file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Recommend a plan for a privacy budget, from public numbers only, with reasons.

    Only the shape, the number of classes and records, and the sites are read from the data, which
    are public.
    With --records, records are not counted.
    """
    from fedpact.studies.circumstances import Circumstances, budgets, describe_columns

    typed = {key: each for key, each in {"label": label, "site": site}.items() if each is not None}
    asked = Circumstances(
        *(data, budgets(epsilon, delta), check.count(rounds=rounds), sites or 0),
        *(trust, honest, mirror),
        **{**describe_columns(columns, data, records), **typed},
        features=features,
        size=records,
    )
    _recommend(asked, out, as_json)


def _recommend(asked: Circumstances, out: Path | None, as_json: bool) -> None:
    from fedpact.studies.recommend import FITTED_ON, Recommendation

    if out is not None:
        check_file("--out", out, ".toml")
        if out.exists():
            raise InputError(f"--out is {out}, which exists: name a new file, as in study.toml")
    try:
        found = Recommendation.of(asked)
    except DataError as error:
        if "records" in asked.document or "[records]" not in str(error):
            raise
        raise DataError(
            f"{error}. Put [records] into a TOML file and name it with --columns FILE"
        ) from None
    if out is not None:
        try:
            write_whole(out, found.toml().encode(), private=False)
        except (OSError, UnicodeEncodeError) as error:
            raise InputError(f"--out is {out}, which cannot be written: {error}") from None
    document = {
        "configuration": found.raw,
        "reasons": found.reasons,
        "alternatives": found.rows,
        "fitted_on": FITTED_ON,
    }
    show(document, as_json, lambda: _print(asked, found, out))


def _print(asked: Circumstances, found: Recommendation, out: Path | None) -> None:
    from fedpact.studies.recommend import FITTED_ON

    console = plain_console()
    if out is None:
        console.print(found.toml())
    else:
        run = "" if asked.size else f"; run it with `fedpact run {quote(str(out))}`"
        console.print(f"Wrote {out}{run}.")
    counted = "classes" if asked.size else "classes, number of records that fit the declaration"
    form = "{what}|{weights:,}|{rate:g}|{rounds}|{sigma:.4g}|{snr:.3g}"
    rows = [form.format(**row).split("|") for row in found.rows]
    print_table(console, ("", "weights", "q", "T", "σ", "signal to noise"), rows)
    console.print(
        "Signal to noise: the largest distance that clipped gradients can move the model, over "
        "the distance that noise moves it, in the whole run: sqrt(T) q N / (σ sqrt(K/h) "
        "sqrt(d)). At q = 1 it is the same for "
        f"every T; more rounds and features help the model to learn. Only the shape, {counted} "
        f"and sites of the data are used. The rule was fitted on {FITTED_ON}."
    )
