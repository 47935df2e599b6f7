"""What the commands share: output, common options, and Ctrl-C."""

import json
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from fedpact.common.records import strict

if TYPE_CHECKING:
    from fedpact.report.run_summary import RunSummary

INTERRUPTED: Final = 130
"""The exit code of a command that was stopped with Ctrl-C, as in shells."""


def show(document: Mapping[str, Any], as_json: bool, text: Callable[[], None]) -> None:
    """Print the document as strict JSON and nothing else, or call `text` to print for a reader.

    JSON has no NaN and no infinity: such numbers become null.
    """
    if as_json:
        print(json.dumps(strict(document), indent=2, allow_nan=False, default=str))
    else:
        text()


def print_run(run: "RunSummary", page: Path | None) -> None:
    """Print a run's headline figures, which are also those of its page, and the page's path."""
    from fedpact.common.notebook import print_table
    from fedpact.report.page import build_headline

    rows = [
        (
            card.label,
            Text(card.value, style="bold red" if card.bad else "bold"),
            card.note + (" (simulator only)" if card.simulator_only else ""),
        )
        for card in build_headline(run)
    ]
    console, form = wide_console(), {"title_justify": "left", "show_header": False, "box": None}
    title = Text(f"{run.title}: {run.ended}")
    print_table(console, ("",) * 3, rows, title=title, **form)
    if run.private and run.seeded:
        console.print(
            "A simulation: its seeded noise protects nobody; ε is what a deployment would "
            "guarantee."
        )
    # Not wrapped: a path must stay whole to be opened.
    if page is not None:
        console.print(str(page), soft_wrap=True)


def wide_console() -> Console:
    """Return a console for tables: a pipe, which has no width, gets each row on one line."""
    console = Console(highlight=False, markup=False, emoji=False)
    console.width = console.width if console.is_terminal else 200
    return console


def plain_console(**options: Any) -> Console:
    """Return a console that prints lines whole and as they are. options: of rich's Console."""
    return Console(highlight=False, soft_wrap=True, markup=False, emoji=False, **options)


class StopOnInterrupt:
    """True once Ctrl-C was pressed, so that a run ends after its current round.

    A second Ctrl-C interrupts at once, as does the first before the first call: no round has begun
    while records are read and features are computed.
    """

    def __init__(self, console: Console) -> None:
        self._asked, self._begun, self._console = False, False, console

    def __call__(self) -> bool:
        """Whether it was pressed."""
        if not self._begun:
            self._begun = True
            signal.signal(signal.SIGINT, self._interrupt)
        return self._asked

    def _interrupt(self, *_: object) -> None:
        self._asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._console.print("Stopping after this round; press Ctrl-C again to stop at once.")


Config = Annotated[
    Path | None,
    typer.Argument(help="A .toml or .json plan; left out, the built-in example."),
]
Overrides = Annotated[
    list[str], typer.Option("--set", help="key=value: change a key of the plan; may be repeated.")
]
Engine = Annotated[
    str,
    typer.Option(help="local: threads on this machine; ray: a cluster, or this machine's cores."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print only a JSON document.")]


class Group(TyperGroup):
    """A command with sub-commands, whose names click suggests for a mistyped one."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        # Otherwise Typer repeats the suggestion.
        self.suggest_commands = False


def group(about: str) -> typer.Typer:
    """Return a command that has sub-commands. about: its text in --help."""
    return typer.Typer(cls=Group, help=about, no_args_is_help=True, add_completion=False)
