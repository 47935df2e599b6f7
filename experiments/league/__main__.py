"""The command: see the package."""

import argparse
import sys

from experiments import league
from experiments.league import page
from experiments.league.runs import DATA, SEEDS, Results, cells

from fedpact.common.errors import FedpactError


def main() -> None:
    """Carry out, or list, what is missing; or write the page."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.league",
        description=league.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("data", nargs="*")
    parser.add_argument("--left", action="store_true", help="list what is missing")
    parser.add_argument("--page", action="store_true", help="write README.md")
    asked = parser.parse_args()
    if unknown := set(asked.data) - set(DATA):
        parser.error(f"no data set {', '.join(unknown)}: expected some of {', '.join(DATA)}")
    if asked.page:
        page.write()
        return
    results = {name: Results(name) for name in DATA}
    left = [cell for cell in cells(asked.data) if not results[cell.data].whole(cell)]
    if asked.left:
        for cell in left:
            print(cell.data, cell.entrant, f"ε={cell.epsilon:g}")
        print(f"{len(left)} cells of {len(cell.ways()) + len(SEEDS) if left else 0} runs or fewer")
        return
    for done, cell in enumerate(left):
        of = results[cell.data]
        try:
            way = of.chosen(cell)
            means = [of.of(cell, seed, way)["mean"] for seed in SEEDS]
            print(f"{done + 1} of {len(left)}", cell, way, means, flush=True)
        except FedpactError as error:
            of.refused(cell, error)
            print(cell, "refused:", error, flush=True)
        except KeyboardInterrupt:
            sys.exit("stopped; the same command goes on from here")


if __name__ == "__main__":
    main()
