"""docs/benchmarks.md, made from the results that are there."""

from collections.abc import Mapping
from pathlib import Path

from benchmarks.remarks import REMARKS
from benchmarks.results import RESULTS, Row, Table, shown
from benchmarks.tables import modules

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"

_HEAD = """# Benchmarks

`make bench` writes this page from `benchmarks/results`; do not edit it. `make bench TABLES="kernel
noise"` measures some tables again. The methods take turns in one process; ratios are computed
within a turn, and a row shows the median and the quartiles over the turns. Turns in which other
processes used more than a tenth of a core are discarded. A table with too few quiet turns says so:
it uses all turns, and compares single-threaded work by processor time. Work that takes less than
ten milliseconds runs several times in a turn, after one warm-up. For all methods the C library
keeps freed memory, as in a run of fedpact, except where memory is measured. Do not compare ratios
of different tables.

Each table states the date, commit, processor and threads of its figures; a + after a commit means
that the sources had uncommitted changes. A test fails if the kernel package has changed since its
tables were measured, except for the changes listed in `benchmarks/harmless.toml`.

`goal` and `stretch` are targets; an arrow shows the better direction.
"""


def write(folder: Path = RESULTS, page: Path = PAGE) -> None:
    """Write the page from the folder's tables."""
    page.write_text(text(folder), encoding="utf-8")


def text(folder: Path) -> str:
    """Return the page."""
    found = {path.stem: Table.load(path) for path in sorted(folder.glob("*.json"))}
    lines = [_HEAD, *_machines(found), *_without_card(found)]
    titles: set[str] = set()
    for name, module in modules().items():
        if module.TITLE not in titles:
            titles.add(module.TITLE)
            lines += ["", f"## {module.TITLE}", "", module.ABOUT]
        if name in found:
            lines += ["", *lines_of(found[name])]
        else:
            lines += ["", f"Not measured: `python -m benchmarks {name}`."]
    return "\n".join(lines).rstrip() + "\n"


def _without_card(found: Mapping[str, Table]) -> list[str]:
    """Say which tables need a GPU and have no figures."""
    of_card = [n for n, module in modules().items() if getattr(module, "DEVICE", "cpu") == "cuda"]
    missing = [n for n in of_card if n not in found or not found[n].measured]
    said = f"No GPU was available, so there are no figures for: {', '.join(missing)}."
    return ["", said] if missing else []


def lines_of(table: Table) -> list[str]:
    """Return a table as Markdown."""
    quality = ["quick: few repetitions, do not quote"] if table.quick else []
    quality += ["on a busy machine"] if table.busy else []
    command = f"`python -m benchmarks {table.name}`"
    code = f"commit {table.commit}" if table.commit else "commit unknown"
    head = [
        f"### {table.name}",
        "",
        "; ".join([f"{command}, {table.made}, {code}, {_on(table)}", *quality]),
        "",
    ]
    module = modules().get(table.name)
    if module is not None and hasattr(module, "lines"):
        return [*head, *module.lines(table)]
    return [
        *head,
        "| what | median | quartiles | goal | stretch | reached | command | note |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        *[_line(row, table.name) for row in table.rows],
        *_remarks(table),
    ]


def _on(table: Table) -> str:
    """The processor, or the card, and how torch used it."""
    of = table.machine
    device = "" if of.get("device", "cpu") == "cpu" else f"{of['device']} with "
    threads = of.get("torch's threads", "unknown")
    return f"{device}{of.get('processor')}, torch {of.get('torch')}, threads: {threads}"


def _line(row: Row, name: str) -> str:
    value = "–" if row.value is None else f"{shown(row.value)} {row.unit}"
    spread = ""
    if row.low is not None and row.high is not None and row.low < row.high:
        spread = f"{shown(row.low)}–{shown(row.high)}"
    arrow = "≥ " if row.larger_is_better else "≤ "
    marks = ["" if mark is None else arrow + f"{mark:g}" for mark in (row.goal, row.stretch)]
    cells = [row.name, value, spread, *marks, _reached(row), f"`{name}`", row.note]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _reached(row: Row) -> str:
    if row.reaches(row.stretch):
        return "stretch"
    if row.reaches(row.goal):
        return "goal"
    return "" if row.reaches(row.goal) is None else "no"


def _remarks(table: Table) -> list[str]:
    """The explanations of the rows that miss a target."""
    missed = [
        (table.name, row.name)
        for row in table.rows
        if False in (row.reaches(row.stretch), row.reaches(row.goal))
    ]
    said = [f"* {name}: {REMARKS[at, name]}" for at, name in missed if (at, name) in REMARKS]
    return ["", *said] if said else []


def _machines(found: Mapping[str, Table]) -> list[str]:
    """The machine of the measurements, or each machine with its tables."""
    groups: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for name, table in found.items():
        groups.setdefault(tuple(table.machine.items()), []).append(name)
    lines: list[str] = []
    for machine, names in groups.items():
        which = "" if len(groups) == 1 else f" ({', '.join(names)})"
        described = "; ".join(f"{key}: {value}" for key, value in machine)
        lines += [f"Measured on{which}: {described}.", ""]
    return lines[:-1]
