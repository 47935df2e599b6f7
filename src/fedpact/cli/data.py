"""fedpact data: list, verify and download the public data sets."""

import json
from typing import Any

from rich.console import Console
from rich.table import Table

from fedpact.data import files
from fedpact.data.download import download as fetch
from fedpact.data.synthetic import FORMS
from fedpact.errors import DataError


def list_(as_json: bool) -> None:
    """Show the public data sets, and which of them the data directory holds."""
    rows: list[dict[str, Any]] = [
        {"name": "digits", "present": True, "licence": "CC BY 4.0, from UCI, with the package"},
        *({"name": form, "present": True, "licence": "made, not read"} for form in FORMS),
    ]
    for source in files.SOURCES.values():
        present = all(files.locate(source, file) for file in source.files)
        rows.append({"name": source.name, "present": present, "licence": source.licence})
    if as_json:
        _print_json({"directory": str(files.data_dir()), "data_sets": rows})
        return
    table = Table(title=f"data directory {files.data_dir()}")
    for column in ("data set", "present", "licence"):
        table.add_column(column)
    for row in rows:
        table.add_row(row["name"], "yes" if row["present"] else "no", row["licence"])
    Console().print(table)


def verify(names: list[str], as_json: bool) -> None:
    """Compare every file with its published MD5. Fails where one is missing or damaged."""
    if names:
        chosen = [files.find_source(name) for name in names]
    else:
        chosen = [s for s in files.SOURCES.values() if any(files.locate(s, f) for f in s.files)]
    if not chosen:
        raise DataError(
            f"the data directory {files.data_dir()} holds no file of a public data set: set "
            "FEDPACT_DATA to the one that does, or fetch them with `fedpact data download`"
        )
    found = {s.name: {file: files.state(s, file) for file in s.files} for s in chosen}
    if as_json:
        _print_json({"directory": str(files.data_dir()), "data_sets": found})
    else:
        table = Table(title=f"data directory {files.data_dir()}")
        for column in ("data set", "file", "state"):
            table.add_column(column)
        for name, states in found.items():
            for file, state in states.items():
                table.add_row(name, file, state)
        Console().print(table)
    bad = [f"{name}/{file}" for name in found for file, s in found[name].items() if s != "ok"]
    if bad:
        raise DataError(
            f"{len(bad)} files in {files.data_dir()} are missing or differ from the published "
            f"ones: {', '.join(bad)}; fetch them with `fedpact data download`"
        )


def download(names: list[str], home: str | None, as_json: bool) -> None:
    """Fetch what is missing or damaged into the data directory, checked by the published MD5."""
    for name in names:
        files.find_source(name)
    fetched: dict[str, list[str]] = {}
    progress = Console(stderr=True)
    for name in names:
        with progress.status(f"fetching {name}"):
            fetched[name] = fetch(name, home)
    if as_json:
        _print_json({"directory": str(files.data_dir()), "fetched": fetched})
        return
    for name, new in fetched.items():
        Console().print(f"{name}: {len(new)} files fetched into {files.data_dir() / name}")


def _print_json(document: dict[str, Any]) -> None:
    print(json.dumps(document, indent=2))
