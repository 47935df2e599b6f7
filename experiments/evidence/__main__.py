"""The command: see the package."""

import argparse
import sys
from pathlib import Path

from experiments import evidence
from experiments.evidence import again, page
from experiments.evidence.check import faults
from experiments.evidence.measure import carry_out, tradeoffs
from experiments.evidence.order import ORDER
from experiments.evidence.runs import Run
from experiments.evidence.stored import Stored

from fedpact.common.errors import FedpactError


def missing(stored: Stored, words: list[str]) -> list[tuple[Run, int]]:
    """Return the runs and seeds that have no result and whose names hold all words."""
    return [
        (run, seed)
        for run, seed in ORDER
        if not stored.whole(run, seed) and all(word in f"{run.title} seed={seed}" for word in words)
    ]


def main() -> None:
    """Make, or list, what is missing; or write the page."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.evidence", description=evidence.__doc__
    )
    parser.add_argument("words", nargs="*")
    parser.add_argument("--left", action="store_true", help="list what is missing, with its cost")
    parser.add_argument("--ldp", action="store_true", help="store LDP FedSGD's curves")
    parser.add_argument("--again", action="store_true", help="carry stored runs out once more")
    parser.add_argument(
        "--draw", type=int, default=0, help="of these so many, drawn from the cheap"
    )
    parser.add_argument("--page", action="store_true", help="write docs/evidence.md")
    parser.add_argument(
        "--papers", type=Path, help="hold the page against the papers' texts in this folder"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/evidence"), help="where runs on their way are kept"
    )
    asked, stored = parser.parse_args(), Stored()
    titles = [f"{run.title} seed={seed}" for run, seed in ORDER]
    if (asked.page or asked.ldp) and (asked.words or asked.left or asked.page == asked.ldp):
        parser.error("--page and --ldp stand alone: leave out words and --left")
    if not any(all(word in title for word in asked.words) for title in titles):
        parser.error(
            f"no run's name holds all of {', '.join(asked.words)}: names are as in {titles[-1]!r}; "
            "--left lists those that are missing"
        )
    if asked.papers:
        found = list(faults(page.PAGE.read_text(encoding="utf-8"), asked.papers))
        sys.exit("\n".join(found) or 0)
    if asked.ldp:
        tradeoffs(stored.folder)
        return
    if asked.again or asked.draw:
        every = (
            (one, title) for one, title in zip(ORDER, titles, strict=True) if stored.whole(*one)
        )
        named = [one for one, title in every if all(word in title for word in asked.words)]
        for run, seed in again.drawn(stored, asked.draw) if asked.draw else named:
            found = again.carry_out_again(stored, run, seed)
            again.keep(f"{run.title} seed={seed}", found)
            print(f"{run.title} seed={seed}: stored {found['stored']}, again {found['again']}")
        return
    if asked.page:
        page.write()
        return
    left = missing(stored, asked.words)
    if asked.left:
        for run, seed in left:
            print(f"{run.minutes:7.1f} min  {run.title} seed={seed}")
        print(f"{sum(run.minutes for run, _ in left) / 60:7.1f} h of one core in all")
        return
    for done, (run, seed) in enumerate(left):
        told = f"{run.title} seed={seed}: {done} of {len(left)} done, about {run.minutes:.0f} min"
        print(told, file=sys.stderr, flush=True)
        place = asked.out / f"{run.title} {seed}".replace(" ", "-")
        try:
            for outcome in carry_out(run, seed, place):
                stored.add(run, seed, outcome)
        except FedpactError as error:
            sys.exit(f"{run.title} seed={seed}: {error}")
        except KeyboardInterrupt:
            sys.exit(f"{run.title} seed={seed}: stopped; the same command goes on from here")
        *_, (rounds, last) = outcome["looks"].items()
        print(run.title, f"seed={seed}", rounds, last, outcome["cpu_seconds"], flush=True)


if __name__ == "__main__":
    main()
