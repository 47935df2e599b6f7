"""`fedpact data`: list, verify and download the public data sets."""

from collections.abc import Sequence
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Column
from rich.text import Text

from fedpact.cli.console import AsJson, group, plain_console, show
from fedpact.common.errors import DataError
from fedpact.common.format import count_noun
from fedpact.common.notebook import print_table

_MADE: Final = "made, not read"

_ABOUT: Final = {
    "digits": ("CC BY 4.0, from UCI, with the package", "1,797 handwritten digits, 8 x 8"),
    "mnist": ("mnist", "70,000 handwritten digits, 28 x 28"),
    "fashion_mnist": ("fashion_mnist", "70,000 clothes in 10 classes, 28 x 28"),
    "cifar10": ("cifar10", "60,000 photographs in 10 classes, 32 x 32, colour"),
    "heart_disease": ("heart_disease", "920 patients of 4 hospitals"),
    "heart_disease_flamby": ("heart_disease", "740 of them, preprocessed as in FLamby"),
    "adult": ("adult", "48,842 census records: is the income above 50,000?"),
    "shakespeare": ("shakespeare", "next-character prediction; a site is a speaking role"),
    "synthetic(ALPHA,BETA)": (
        _MADE,
        "100 devices that differ by ALPHA and BETA; 60 features, 10 classes",
    ),
    "synthetic_iid": (_MADE, "100 devices with the same distribution"),
}
"""Name -> the public data set with its files, or a licence; a description."""

app = group("List, verify and download the public data sets.")


@app.command("list")
def list_(as_json: AsJson = False) -> None:
    """List the public data sets and which of them the data directory has."""
    from fedpact.data import download
    from fedpact.data.load import NAMES
    from fedpact.data.public import FORMS

    rows: list[dict[str, Any]] = []
    for name in (*NAMES, *FORMS):
        of, what = _ABOUT[name]
        source = download.SOURCES.get(of)
        present = source is None or all(download.locate(source, file) for file in source.files)
        licence = of if source is None else source.licence
        rows.append({"name": name, "what": what, "present": present, "licence": licence})

    def tell() -> None:
        columns = (Column("data =", no_wrap=True), "what", "present", "licence")
        cells = [
            (f'"{row["name"]}"', row["what"], "yes" if row["present"] else "no", row["licence"])
            for row in rows
        ]
        _print_table(columns, cells)
        if missing := [row["name"] for row in rows if not row["present"]]:
            print(f"to fetch what is missing: `fedpact data download {_ABOUT[missing[0]][0]}`")

    show({"directory": str(download.data_dir()), "data_sets": rows}, as_json, tell)


@app.command()
def verify(
    names: Annotated[
        list[str] | None, typer.Argument(help="Data sets; default: all that have files.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check every file against its SHA-256; fail if one is missing or damaged."""
    from fedpact.data import download

    names = names or []
    if names:
        chosen = [download.find_source(name) for name in names]
    else:
        chosen = [
            s for s in download.SOURCES.values() if any(download.locate(s, f) for f in s.files)
        ]
    if not chosen:
        raise DataError(
            f"the data directory {download.data_dir()} has no file of a public data set: set "
            "FEDPACT_DATA to the one that has, or download them with `fedpact data download`"
        )
    found = {s.name: {file: download.state(s, file) for file in s.files} for s in chosen}
    rows = [(name, *file) for name, states in found.items() for file in states.items()]
    show(
        {"directory": str(download.data_dir()), "data_sets": found},
        as_json,
        lambda: _print_table(("data set", "file", "state"), rows),
    )
    bad = [f"{name}/{file}" for name in found for file, s in found[name].items() if s != "ok"]
    if bad:
        raise DataError(
            f"{count_noun(len(bad), 'file')} in {download.data_dir()} missing, or different from "
            f"the published ones: {', '.join(bad)}; fetch them with `fedpact data download`"
        )


@app.command()
def download(
    names: Annotated[list[str], typer.Argument(help="Data sets to fetch.")],
    home: Annotated[
        str | None,
        typer.Option("--from", help="A mirror (http, https, file) of the same files."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Download missing or damaged files to the data directory and check their SHA-256."""
    from fedpact.data import download
    from fedpact.data.download import download as fetch

    for name in names:
        download.find_source(name)
    fetched: dict[str, list[str]] = {}
    progress = Console(stderr=True)
    for name in names:
        with progress.status(f"fetching {name}"):
            fetched[name] = fetch(name, home)

    def tell() -> None:
        for name, new in fetched.items():
            plain_console().print(
                f"{name}: {count_noun(len(new), 'file')} fetched into {download.data_dir() / name}"
            )

    show({"directory": str(download.data_dir()), "fetched": fetched}, as_json, tell)


def _print_table(columns: Sequence[str | Column], rows: Sequence[Sequence[str]]) -> None:
    from fedpact.data import download

    print_table(Console(), columns, rows, title=Text(f"data directory {download.data_dir()}"))
