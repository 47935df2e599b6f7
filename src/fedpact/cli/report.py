"""fedpact report: the key figures of a run, and its page made anew."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedpact.cli.console import show
from fedpact.report.page import headline, write_page
from fedpact.report.reading import RunFolder, read_run


def report(run: Path, as_json: bool) -> None:
    """Carry out `fedpact report` on a run's folder."""
    found = read_run(run)
    path = write_page(found)
    show(_document(found, path), as_json, lambda: _print(found, path))


def _document(run: RunFolder, path: Path) -> dict[str, Any]:
    statement = ("private", "unit", "adjacency", "mechanism", "accountant", "randomness")
    return {
        "summary": run.summary or {"status": run.status, "rounds": run.last.round},
        "privacy": {key: run.privacy.get(key) for key in statement},
        "sites": {name: asdict(site) for name, site in run.site_privacy.items()},
        "audit": asdict(run.audit) if run.audit else None,
        "report": str(path),
    }


def _print(run: RunFolder, path: Path) -> None:
    table = Table(title=Text(f"run {run.path}"), show_header=False)
    for card in headline(run):
        note = card.note + (" (simulator only)" if card.simulator_only else "")
        # Text, because a site's name may look like markup.
        value = Text(card.value, style="bold red" if card.bad else "bold")
        table.add_row(card.label, value, Text(note))
    console = Console()
    console.print(table)
    if run.private and run.seeded:
        console.print("A simulation: seeded noise protects nobody; ε is a deployment's.")
    # Not wrapped: a path must stay whole to be opened.
    console.print(Text(str(path)), soft_wrap=True)
