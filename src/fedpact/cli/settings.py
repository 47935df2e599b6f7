"""fedpact settings, fedpact algorithms, fedpact init: what there is to be set."""

import os
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from fedpact.cli.console import show
from fedpact.common import reference
from fedpact.common.errors import InputError
from fedpact.common.files import check_file
from fedpact.common.format import toml
from fedpact.common.notebook import print_table
from fedpact.studies import starting_plan


def execute_settings(name: str | None, as_json: bool) -> None:
    """Show the tables of a configuration with their keys, or what one of them means."""
    found = reference.everything() if name is None else reference.find(name)

    def text() -> None:
        if name is None:
            _overview(found)
        for table in found if name else ():
            _print(table)

    show({"tables": [asdict(table) for table in found]}, as_json, text)


def execute_algorithms(name: str | None, as_json: bool) -> None:
    """List the algorithms, or show one: what it does, and its settings."""
    found = [reference.algorithm(one) for one in ([name] if name else reference.algorithm_names())]

    def text() -> None:
        if name:
            print(found[0].text, end="\n\n")
            _print(found[0].settings)
            return
        grid = _grid("algorithm", "what", "settings")
        for one in found:
            keys = ", ".join(key.last for key in one.settings.keys)
            grid.add_row(*map(Text, (one.name, one.title, keys)))
        print_table(Console(), grid)

    show({"algorithms": [asdict(one) for one in found]}, as_json, text)


def execute_init(file: Path, overrides: list[str], as_json: bool) -> None:
    """Write a plan to begin with. Raises InputError: the file is there, or cannot be written."""
    check_file("the file", file, ".toml")
    if os.path.lexists(file):
        raise InputError(f"{file} is there: name a file that is not, as in `fedpact init new.toml`")
    text = starting_plan.starting_plan(overrides)
    if overrides:
        # The embedded default is a plan; what else was asked for is tried before it is written.
        from fedpact.plan import Plan

        Plan.read(None, overrides)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("x", encoding="utf-8") as written:
            written.write(text)
    except OSError as error:
        raise InputError(
            f"{file} cannot be written ({error.strerror}): name a file in a folder that this "
            "account may write to, as in `fedpact init plan.toml`"
        ) from None
    told = f"{file} written; see what it will spend with `fedpact plan {file}`, and run it with "
    show({"file": str(file)}, as_json, lambda: print(f"{told}`fedpact run {file}`"))


def _overview(found: list[reference.KeyTable]) -> None:
    grid = _grid("table", "what", "keys")
    for table in found:
        name = f"[{table.name}]" if _is_table(table.name) else table.name or "(top level)"
        keys = ", ".join(key.last for key in table.keys)
        grid.add_row(*map(Text, (name, table.about, keys)))
    print_table(Console(), grid)
    print("`fedpact settings NAME` shows a table or a key; `fedpact algorithms` has [settings].")


def _is_table(name: str) -> bool:
    return bool(name) and name not in reference.FILES


def _print(table: reference.KeyTable) -> None:
    name = f"[{table.name}]" if _is_table(table.name) else table.name
    console = Console(highlight=False)
    console.print(f"{name}  {table.about}".strip(), markup=False, style="bold")
    grid = _grid("key", "type", "default", "meaning")
    for key in table.keys:
        told = f"{key.symbol}: {key.meaning}" if key.symbol else key.meaning
        cells = (key.last, f"{key.type} {key.range}".strip(), format_default(key), told)
        grid.add_row(*map(Text, cells))
    print_table(console, grid)


def format_default(key: reference.Key) -> str:
    """Return a key's default for a reader."""
    if key.required:
        return "to be given"
    return "left out" if key.default is None else toml(key.default)


def _grid(*columns: str) -> Grid:
    grid = Grid(show_lines=True)
    for column in columns:
        grid.add_column(column, overflow="fold")
    return grid
