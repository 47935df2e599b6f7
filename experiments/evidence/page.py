"""Write docs/evidence.md from the stored results alone."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from experiments.evidence import again, drawing, page_ali, page_fedfdp, page_others
from experiments.evidence.cells import Book, table
from experiments.evidence.order import ORDER
from experiments.evidence.runs import Run
from experiments.evidence.stored import HERE, Stored
from experiments.made import tally

PAGE: Final = HERE.parents[1] / "docs" / "evidence.md"

HEAD: Final = """# The papers' tables, measured

`make evidence` writes this page from what is stored in `experiments/evidence/results` and beside \
it; nothing here is written by hand. Printed numbers are the papers'. *Faithful*: what they \
print, σ, q, C and η. *Explained*: the step size that comes nearest to their numbers. *Best*: \
what is known here at the same (ε, δ), in at most as many rounds. Mean ± standard deviation over \
three seeds, or the number of seeds: sweeps are of one. Every ε called proven is an upper bound: \
per record and site, add/remove one record, the smaller of PLD and RDP. A cell that was not run \
says so, and the number in brackets is its command's in the list at the end. In the sentences \
that judge, seeds are few: differences below a point mean nothing."""

_SEEN: Final = (
    "![Accuracy over ε on Fashion-MNIST and CIFAR-10: printed, measured with networks and pixels, "
    "and with fixed features](images/evidence.svg)\n\n"
    "ALI-DPFL's tables in one picture: of each ε the largest entry, as printed and as measured; ε "
    "is the paper's, of which the proof has less, and of features what is proven."
)


def whole(stored: Stored | None = None) -> str:
    """Return the page."""
    book = Book(stored or Stored())
    parts = (
        *page_ali.part(book),
        *page_fedfdp.part(book),
        *page_others.proxvr(book),
        *page_others.ldp(book),
        *page_others.others(book),
        *again.part(),
    )
    left = [f"{number}. {how}" for number, how in enumerate(book.missing.values(), start=1)]
    end = (
        "## Not run",
        "With FEDPACT_DATA set, times for one core; `python -m experiments.evidence --left` lists "
        "what is missing seed by seed.",
        "\n".join(left),
    )
    begin = (HEAD, _SEEN, *_coverage(book.stored), *_provenance())
    return "\n\n".join((*begin, *parts, *(end if left else ()))) + "\n"


def _coverage(stored: Stored) -> tuple[str, str]:
    """How much of what the tables have places for is measured, by group of runs and model."""
    lines = ["| runs of | model | whole | with fewer seeds | not run | hours of a core left |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    groups: dict[tuple[str, str], dict[Run, list[int]]] = {}
    for run, seed in ORDER:
        groups.setdefault((run.group, run.kind), {}).setdefault(run, []).append(seed)
    for (group, kind), runs in sorted(groups.items()):
        done = [sum(stored.whole(run, seed) for seed in seeds) for run, seeds in runs.items()]
        asked = [len(seeds) for seeds in runs.values()]
        whole = sum(d == a for d, a in zip(done, asked, strict=True))
        none = done.count(0)
        left = sum((a - d) * r.minutes for r, a, d in zip(runs, asked, done, strict=True)) / 60
        counts = f"{whole} | {len(runs) - whole - none} | {none} | {left:.1f}"
        lines.append(f"| {group} | {kind} | {counts} |")
    return "## How much of it is measured", "\n".join(lines)


def _provenance() -> Iterator[str]:
    """By what the results were made, as far as they say."""
    yield "## By what it was made"
    yield (
        "What is made now carries commit, versions, processor and device; of what was made before, "
        "what is missing was not recorded. Each result's own are in its file. Of a run that "
        "diverged, another processor's rounding gives other figures."
    )
    rows = list[list[str]]()
    for path in sorted(HERE.glob("results/*.json")):
        kept = json.loads(path.read_text(encoding="utf-8"))
        curves = "points" in kept
        found = [kept] if curves else [o for r in kept.values() for o in r["seeds"].values()]
        rows += [[path.stem, *row] for row in tally(found)]
    for name, found in page_others.stored_elsewhere():
        rows += [[name, *row] for row in tally(found)]
    yield table(["stored", "results", "commits", "torch", "Python", "processor", "device"], rows)


def write(place: Path = PAGE) -> None:
    """Write the page, and its figures beside it where it is the project's own."""
    place.write_text(whole(), encoding="utf-8")
    if place == PAGE:
        for name, panels in drawing.pictures(Book(Stored())).items():
            drawing.write(panels, drawing.IMAGES / f"{name}.svg")
