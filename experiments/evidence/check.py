"""Whether docs/evidence.md has every cell of the papers' tables, by the papers' own texts.

A table is read as rows: a name, and the accuracies and Ψ printed after it, in order. The page has
them in another arrangement, from which the same rows are put together.
"""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

# "98.67±plus-or-minus\pm±0.09" is an accuracy and a deviation, which the page leaves out.
_CELL: Final = re.compile(r"(?<![±\d.e])(\d\d\.\d\d|\d\.\d(?:e-?\d+|-\d))(?![\d.])")
# What a cell has after those of its line's name: a number, "not finite" or "not run".
_FIGURE: Final = re.compile(r"\d|not (finite|run)")
_NOT_RUN: Final = re.compile(r"not run \[(\d+)\]")
_IMAGES: Final = ("### Fashion-MNIST", "### CIFAR-10")
Rows = dict[str, list[str]]

# Of ALI-DPFL's tables, where each begins and ends in the text, and its blocks of three columns.
ALI: Final = (
    (r"TABLE II:", r"TABLE III:", ("R_s = R_c", "R_s = 2 R_c")),
    (r"TABLE III:", r"TABLE IV:", ("R_s = R_c/2",)),
    (r"TABLE IV:", r"$", ("R_s = R_c/5",)),
)
# A paper's text, where a table begins and ends, and its heading on the page.
TABLES: Final = (
    ("fedfdp.txt", r"Table 2\. ", r"Table 3\. ", "### Table 2: "),
    ("fedfdp.txt", r"Table 3\. ", r"Table 4\. ", "### Table 3: "),
    ("fedfdp.txt", r"Table 4\. ", r"Table 5\. ", "### Table 4: "),
    ("fedfdp.txt", r"Table 5\. ", r"Table 6\. ", "### Table 5: "),
    ("fedfdp.txt", r"Table 6\. ", r"$", "### Table 6: "),
    ("fedproxvr-zh.txt", r"Algorithm\t", r"图", "## FedProxVR"),
)


def printed(text: str, begin: str, end: str) -> Rows:
    """Return a table of a paper; a name that has several rows has all their cells."""
    lines = iter(text.splitlines())
    found: Rows = {}
    for line in lines:
        if re.match(begin, line):
            break
    for line in lines:
        if re.match(end, line):
            break
        if cells := _CELL.findall(line):
            name = re.split(r"𝜏|\t| (?=\d)", line)[0]
            name = f"τ = {tau[1]}" if (tau := re.match(r"τ=(\d)", line)) else name
            found.setdefault(name.replace("SCAFFLOD", "SCAFFOLD"), []).extend(cells)
    return found


def section(page: str, heading: str) -> str:
    """Return what stands on the page under a heading that begins so."""
    _, found, rest = f"\n{page}".partition(f"\n{heading}")
    return re.split(r"\n#{2,3} ", rest)[0] if found else ""


def on_page(here: str) -> Rows:
    """Return the printed cells of a section by method, in the order of its lines.

    They stand in columns whose heads say so, or as "(printed ...)".
    """
    found: Rows = {}
    for line, cells, head in _lines(here):
        own = [cells[at] for at, name in enumerate(head) if "printed" in name]
        own = own or re.findall(r"\(printed ([^)]*)\)", line)
        found.setdefault(cells[_name_at(head)], []).extend(
            c for one in own for c in _CELL.findall(one)
        )
    return found


def of_ali(page: str, blocks: tuple[str, ...]) -> Rows:
    """Return the printed cells of one of ALI-DPFL's tables, as the paper arranges them."""
    found: Rows = {}
    for block in blocks:
        for heading in _IMAGES:
            names = list[str]()
            for _, cells, _ in _lines(section(page, heading)):
                if cells[0].startswith("**"):
                    names = [c.strip("*") for c in cells] if cells[0] == f"**{block}**" else []
                elif names and cells[1] == "printed":
                    for name, cell in zip(names[2:], cells[2:], strict=True):
                        row = found.setdefault("ALI-DPFL" if name == "ALI" else name, [])
                        row.extend(_CELL.findall(cell))
    return found


def _name_at(head: list[str]) -> int:
    return next((at for at, name in enumerate(head) if name in ("method", "setting", "")), 0)


def _lines(here: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield the lines of a section's tables: as they are, their cells, the cells of the head."""
    head, before = list[str](), list[str]()
    for line in here.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            head = []
        elif set(cells) == {"---"}:
            head = before
        elif head:
            yield line, cells, head
        before = cells


def faults(page: str, papers: Path) -> Iterator[str]:
    """Yield what a table of the papers has and the page has not, or where a cell says nothing."""
    listed = set(re.findall(r"^(\d+)\. `", section(page, "## Not run"), re.M))
    asked = [("ali-dpfl.txt", begin, end, of_ali(page, blocks)) for begin, end, blocks in ALI]
    asked += [(name, *ends, on_page(section(page, head))) for name, *ends, head in TABLES]
    for name, begin, end, shown in asked:
        wanted = printed((papers / name).read_text(encoding="utf-8"), begin, end)
        if not wanted:
            yield f"{name}: no table begins with {begin!r}"
        for method, cells in wanted.items():
            # With several settings the page has lines for each, or for some of the data sets.
            same = [row for told, row in shown.items() if told.split(", ")[0] == method]
            parts = [cells[at : at + len(row)] == row for row in same for at in range(len(cells))]
            if cells not in same or sum(parts) < len(same):
                yield f"{name}, {begin}: {method} has {cells}, on the page {same}"
    for heading in (*_IMAGES, *(head for *_, head in TABLES)):
        rows = [row for row in _lines(section(page, heading)) if not row[0].startswith("| **")]
        for line, cells, head in rows:
            figures = cells[_name_at(head) + 1 :]
            if "best, " not in line and not all(map(_FIGURE.match, figures)):
                yield f"{heading}: a cell has no figure in {line}"
        if heading in _IMAGES:  # each printed row is measured in each of the settings
            counts = Counter(cells[1] for _, cells, _ in rows)
            if len(counts) == 1 or len({*counts.values()}) > 1:
                yield f"{heading}: a row is missing of {dict(counts)}"
    for line in page.splitlines():
        if unknown := set(_NOT_RUN.findall(line)) - listed:
            yield f"no command for {', '.join(sorted(unknown))} in {line}"
