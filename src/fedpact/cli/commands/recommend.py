"""`fedpact recommend`."""

from pathlib import Path
from typing import Annotated

import typer

from fedpact.cli.console import AsJson


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
    from fedpact.cli.recommend import execute_recommend as carry_out
    from fedpact.studies.circumstances import Circumstances, budgets, describe_columns

    typed = {key: each for key, each in {"label": label, "site": site}.items() if each is not None}
    asked = Circumstances(
        *(data, budgets(epsilon, delta), rounds, sites or 0),
        *(trust, honest, mirror),
        **{**describe_columns(columns, data, records), **typed},
        features=features,
        size=records,
    )
    carry_out(asked, out, as_json=as_json)
