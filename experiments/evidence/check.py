"""Whether docs/evidence.md has every accuracy of the papers' tables, by the papers' own texts."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

# A paper's text, the lines between which its tables stand, and their headings on the page.
TABLES: Final = (
    ("ali-dpfl.txt", r"TABLE II:", r"TABLE IV:", ("### Fashion-MNIST", "### CIFAR-10")),
    ("ali-dpfl.txt", r"TABLE IV:", r"$", ("### Fashion-MNIST", "### CIFAR-10")),
    ("fedfdp.txt", r"Table 2\. ", r"Table 3\. ", ("### Table 2",)),
    ("fedfdp.txt", r"Table 3\. ", r"Table 4\. ", ("### Table 3",)),
    ("fedfdp.txt", r"Table 4\. ", r"Table 5\. ", ("### Table 4",)),
    ("fedfdp.txt", r"Table 5\. ", r"Table 6\. ", ("### Table 5",)),
    ("fedfdp.txt", r"Table 6\. ", r"$", ("### Table 6",)),
    ("fedproxvr-zh.txt", r"Algorithm\t", r"图", ("## FedProxVR",)),
)
# "98.67±plus-or-minus\pm±0.09" is an accuracy and a deviation, which the page leaves out.
_ACCURACY: Final = re.compile(r"(?<![±\d.])(\d\d\.\d\d)(?![\d.]|e)")
_NOT_RUN: Final = re.compile(r"not run \[(\d+)\]")


def printed(text: str, begin: str, end: str) -> Counter[str]:
    """Return the accuracies of a table and how often each stands in it."""
    lines = iter(text.splitlines())
    found = Counter[str]()
    for line in lines:
        if re.match(begin, line):
            break
    for line in lines:
        if re.match(end, line):
            break
        found.update(_ACCURACY.findall(line))
    return found


def section(page: str, heading: str) -> str:
    """Return what stands on the page under a heading that begins so."""
    _, found, rest = f"\n{page}".partition(f"\n{heading}")
    return re.split(r"\n#{2,3} ", rest)[0] if found else ""


def faults(page: str, papers: Path) -> Iterator[str]:
    """Yield what a table of the papers has and the page has not, or where a cell says nothing."""
    listed = set(re.findall(r"^(\d+)\. `", section(page, "## Not run"), re.M))
    for name, begin, end, headings in TABLES:
        here = "".join(section(page, heading) for heading in headings)
        wanted = printed((papers / name).read_text(encoding="utf-8"), begin, end)
        if not wanted:
            yield f"{name}: no table begins with {begin!r}"
        on_page = Counter(_ACCURACY.findall(here))
        for value, times in sorted((wanted - on_page).items()):
            yield f"{name}, {begin}: {value} stands {times} times more than under {headings}"
        for line in here.splitlines():
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if "printed" in line and "" in cells[1:]:
                yield f"{headings}: a cell is empty in {line}"
            if unknown := set(_NOT_RUN.findall(line)) - listed:
                yield f"{headings}: no command for {', '.join(sorted(unknown))} in {line}"
