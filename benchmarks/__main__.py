"""The command: see the package."""

import argparse
import sys
import time
import warnings
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType

import torch

from benchmarks import page, provenance
from benchmarks.machine import describe
from benchmarks.results import RESULTS, Row, Table, shown
from benchmarks.scale import FULL, QUICK, Scale
from benchmarks.tables import modules
from fedpact.simulation.machine import keep_freed_memory


def measure(name: str, scale: Scale, folder: Path | None = None) -> Table:
    """Run one table. folder: where what is done of a long one lies, and is stored as it comes."""
    module = modules()[name]
    if not hasattr(module, "cells"):
        return _made(name, scale, *module.run(name, scale))
    table = _made(name, scale, [], False)
    path = folder / f"{name}.json" if folder else None
    if path and path.exists() and table.can_resume(stored := Table.load(path)):
        table = stored
    cells = module.cells(name, scale)
    for place, (label, cell) in enumerate(cells.items(), 1):
        if any(row.name.endswith(label) for row in table.rows):
            continue
        started = time.perf_counter()
        rows, busy = cell()
        table = _made(name, scale, [*table.rows, *rows], table.busy or busy)
        if folder:
            table.save(folder)
        found = ", ".join(f"{r.name.removesuffix(', ' + label)} {_value(r)}" for r in rows)
        took = f"{time.perf_counter() - started:.0f} s"
        print(f"  {place}/{len(cells)} {label}: {found} ({took})", file=sys.stderr, flush=True)
    return table


def _value(row: Row) -> str:
    return "–" if row.value is None else shown(row.value)


def _made(name: str, scale: Scale, rows: list[Row], busy: bool) -> Table:
    module = modules()[name]
    threads = getattr(module, "THREADS", str(torch.get_num_threads()))
    machine = describe(threads, getattr(module, "DEVICE", "cpu"))
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    code = provenance.commit(), provenance.digest()
    return Table(name, tuple(rows), machine, made, scale.quick, busy, *code)


def _expanded(asked: list[str], known: dict[str, ModuleType]) -> list[str]:
    """The tables named, where the name of a module stands for all of its tables."""
    kinds = {module.__name__.rpartition(".")[2]: module.NAMES for module in known.values()}
    return [name for one in asked for name in ([one] if one in known else kinds.get(one, [one]))]


def main(arguments: list[str] | None = None) -> None:
    """Measure the tables named, all by default, and write the page."""
    # Opacus warns of what is asked of it here: no secure random numbers, inputs without gradient.
    warnings.simplefilter("ignore")
    # As in a run of fedpact; all methods here have it alike.
    keep_freed_memory()
    known = modules()
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("tables", nargs="*", help=", ".join(["kernel", *known]))
    parser.add_argument("--quick", action="store_true", help="fewer repetitions: printed, not kept")
    parser.add_argument("--page", action="store_true", help="only the page, from what is there")
    asked = parser.parse_args(arguments)
    tables = _expanded(asked.tables, known)
    unknown = sorted(set(tables) - set(known))
    if unknown:
        parser.error(f"no such table: {', '.join(unknown)}; expected some of {', '.join(known)}")
    for name in [] if asked.page else tables or known:
        print(f"{name} ...", file=sys.stderr, flush=True)
        try:
            table = measure(name, QUICK) if asked.quick else measure(name, FULL, RESULTS)
        except ModuleNotFoundError as error:
            parser.error(f"{name} needs {error.name}: pip install -e '.[bench,deploy]'")
        if not asked.quick:
            table.save()
        print("\n".join(page.lines_of(table)), flush=True)
    if not asked.quick:
        page.write()


if __name__ == "__main__":
    main()
