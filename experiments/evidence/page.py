"""Write docs/evidence.md from the stored results alone."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from experiments.evidence import again, drawing, page_ali, page_fedfdp, page_others
from experiments.evidence.cells import LARGE_LOSS, Book, table
from experiments.evidence.order import ORDER
from experiments.evidence.runs import Run
from experiments.evidence.stored import HERE, Stored
from experiments.made import stored_in, tally

PAGE: Final = HERE.parents[1] / "docs" / "evidence.md"

HEAD: Final = f"""# The papers' tables, measured

`make evidence` writes this page from the stored results in `experiments`; nothing here is written \
by hand. "Printed" numbers are the papers'. *Faithful*: the printed σ, q, C and η. *Tuned*: η of \
ALI-DPFL's CNN chosen on held-out training records. *Best*: the best method known here at the same \
(ε, δ), with at most as many rounds. Figures are mean ± standard deviation over three \
seeds unless a cell gives another number of seeds; sweeps use one. Every proven ε is an upper \
bound: per record and site, add/remove one record, the smaller of PLD and RDP. A cell that was not \
run says so; the number in brackets refers to its command in the list at the end. Figures marked \
as diverged or unstable (a loss above {LARGE_LOSS:g}, where a guess has 2.3) may differ on another \
processor. With so few seeds, differences below a point are not meaningful."""

_SEEN: Final = (
    "![Accuracy over ε on Fashion-MNIST and CIFAR-10: printed, measured with networks and pixels, "
    "and with fixed features](images/evidence.svg)\n\n"
    "ALI-DPFL's tables in one picture: the largest entry at each ε, as printed and as measured. "
    "ε is the paper's, which is slightly above the proven one; for features it is the proven one."
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
        "Run these from the repository's root, with FEDPACT_DATA set. An interrupted command goes "
        "on where it stopped; results are stored as they come, and `make evidence` writes them "
        "into this page. Times are for one core; `python -m experiments.evidence --left` lists the "
        "missing runs seed by seed.",
        "\n".join(left),
    )
    begin = (HEAD, _SEEN, *_coverage(book.stored), *_provenance())
    return "\n\n".join((*begin, *parts, *(end if left else ()))) + "\n"


def _coverage(stored: Stored) -> tuple[str, str]:
    """How many of the tables' runs are measured, by group of runs and model."""
    lines = ["| group | model | complete | fewer seeds | not run | core hours left |"]
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
    return "## Coverage", "\n".join(lines)


def _provenance() -> Iterator[str]:
    """Commit, versions and machine of all stored results, as far as they were recorded."""
    yield "## Provenance"
    yield (
        "Which commits, versions and machines made the results stored in `experiments`, those of "
        "other pages included. New results carry all of this; for older ones some of it was not "
        "recorded. A run that diverged gives other figures on another processor, because of "
        "rounding."
    )
    rows = [[name, *row] for name, found in stored_in(HERE.parent) for row in tally(found)]
    yield table(["stored", "results", "commits", "torch", "Python", "processor", "device"], rows)


def write(place: Path = PAGE) -> None:
    """Write the page and, if it is the project's own, its figures."""
    place.write_text(whole(), encoding="utf-8")
    if place == PAGE:
        for name, panels in drawing.pictures(Book(Stored())).items():
            drawing.write(panels, drawing.IMAGES / f"{name}.svg")
