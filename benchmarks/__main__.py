"""The command: see the package."""

import argparse
import sys
import warnings
from datetime import UTC, datetime

from benchmarks import page
from benchmarks.machine import describe
from benchmarks.results import Table
from benchmarks.scale import FULL, QUICK, Scale
from benchmarks.tables import modules
from fedpact.engines.process import keep_freed_memory


def measure(name: str, scale: Scale) -> Table:
    """Run one table."""
    rows, busy = modules()[name].run(name, scale)
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return Table(name, tuple(rows), describe(), made, scale.quick, busy)


def main(arguments: list[str] | None = None) -> None:
    """Measure the tables named, all by default, and write the page."""
    # Opacus warns of what is asked of it here: no secure random numbers, inputs without gradient.
    warnings.simplefilter("ignore")
    # As in a run of fedpact; all methods here have it alike.
    keep_freed_memory()
    known = modules()
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("tables", nargs="*", help=", ".join(known))
    parser.add_argument("--quick", action="store_true", help="fewer repetitions: printed, not kept")
    parser.add_argument("--page", action="store_true", help="only the page, from what is there")
    asked = parser.parse_args(arguments)
    unknown = sorted(set(asked.tables) - set(known))
    if unknown:
        parser.error(f"no such table: {', '.join(unknown)}; expected some of {', '.join(known)}")
    for name in [] if asked.page else asked.tables or known:
        print(f"{name} ...", file=sys.stderr, flush=True)
        try:
            table = measure(name, QUICK if asked.quick else FULL)
        except ModuleNotFoundError as error:
            parser.error(f"{name} needs {error.name}: pip install -e '.[bench,deploy]'")
        if not asked.quick:
            table.save()
        print("\n".join(page.lines_of(table)), flush=True)
    if not asked.quick:
        page.write()


if __name__ == "__main__":
    main()
