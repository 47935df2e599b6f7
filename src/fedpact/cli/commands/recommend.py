"""`fedpact recommend`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from fedpact.cli.console import AsJson, show
from fedpact.common.errors import DataError, InputError
from fedpact.common.files import write_whole
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
            help="ε per record and site, > 0: one number, or one for each site, as 1,2,8, in the "
            "order of their names."
        ),
    ],
    delta: Annotated[
        str, typer.Option(help="δ per record and site, in (0, 1): one number, or one for each.")
    ] = "1e-5",
    rounds: Annotated[int, typer.Option(help="Most rounds, >= 1.")] = 100,
    sites: Annotated[
        int | None,
        typer.Option(min=1, help="How many sites; default: those that the data have, or 10."),
    ] = None,
    trust: Annotated[
        str, typer.Option(help="own: each site's noise protects; sum: the honest sites' together.")
    ] = "own",
    honest: Annotated[
        int, typer.Option(help="With --trust sum: of how many sites; default: all but one.")
    ] = 0,
    mirror: Annotated[
        bool | None,
        typer.Option(help="Images mean the same mirrored; default: those in colour do."),
    ] = None,
    features: Annotated[
        bool, typer.Option(help="Images are seen by fixed features, or as they are.")
    ] = True,
    label: Annotated[str | None, typer.Option(help="A table's column of labels.")] = None,
    site: Annotated[str | None, typer.Option(help="A table's column of site names.")] = None,
    columns: Annotated[
        Path | None,
        typer.Option(
            help="A configuration whose \\[records] says what columns may hold; its label, site, "
            "person, \\[task] and \\[evaluation] count, too. Default: what is known of adult's "
            "and the hospitals' columns."
        ),
    ] = None,
    records: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="How many records train, at all sites together, where that is declared; default: "
            "those of DATA that do, counted. Then DATA may be one site's own, or made up alike.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the configuration here (.toml).")] = None,
    as_json: AsJson = False,
) -> None:
    """Recommend a whole configuration for a budget, from public numbers alone, with reasons.

    Of the data only shape, number of classes, records and own sites are read: they are public.
    With --records their number is not.
    """
    from fedpact.studies.circumstances import Circumstances, budgets, describe_columns

    typed = {key: each for key, each in {"label": label, "site": site}.items() if each is not None}
    asked = Circumstances(
        *(data, budgets(epsilon, delta), rounds, sites or 0),
        *(trust, honest, mirror),
        **{**describe_columns(columns, data, records), **typed},
        features=features,
        size=records,
    )
    _recommend(asked, out, as_json)


def _recommend(asked: Circumstances, out: Path | None, as_json: bool) -> None:
    from fedpact.studies.recommend import FITTED_ON, Recommendation

    if out is not None and (out.exists() or out.suffix != ".toml"):
        raise InputError(
            f"--out is {out}, {'which is there' if out.exists() else 'which is no TOML'}: name a "
            "file that is not there yet, as study.toml"
        )
    try:
        found = Recommendation.of(asked)
    except DataError as error:
        if "records" in asked.document or "[records]" not in str(error):
            raise
        raise DataError(f"{error}. [records] stands in a TOML: --columns FILE") from None
    if out is not None:
        try:
            write_whole(out, found.toml().encode(), private=False)
        except (OSError, UnicodeEncodeError) as error:
            raise InputError(f"--out is {out}, which cannot be written: {error}") from None
    document = {
        "configuration": found.raw,
        "reasons": found.reasons,
        "alternatives": [asdict(row) for row in found.rows],
        "fitted_on": FITTED_ON,
    }
    show(document, as_json, lambda: _print(asked, found, out))


def _print(asked: Circumstances, found: Recommendation, out: Path | None) -> None:
    from fedpact.studies.recommend import FITTED_ON

    console = Console(highlight=False, soft_wrap=True)
    if out is None:
        console.print(found.toml(), markup=False)
    else:
        run = "" if asked.size else f"; run it with `fedpact run {quote(str(out))}`"
        console.print(f"Written: {out}{run}.")
    counted = "classes" if asked.size else "classes, number of records that fit what is declared"
    table = Table("", "weights", "q", "T", "σ", "signal to noise")
    for row in found.rows:
        weights, sigma, snr = f"{row.weights:,}", f"{row.sigma:.4g}", f"{row.snr:.3g}"
        table.add_row(row.what, weights, f"{row.rate:g}", f"{row.rounds}", sigma, snr)
    print_table(console, table)
    console.print(
        "Signal to noise: how far clipped gradients can move the model at most, over how far noise "
        "does, in the whole run: sqrt(T) q N / (σ sqrt(K/h) sqrt(d)). At q = 1 it is the same for "
        "every T; rounds and features are for what the model learns. Of the data only shape, "
        f"{counted} and own sites are used. The rule was fitted on {FITTED_ON}."
    )
