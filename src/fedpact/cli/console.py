"""What the commands share: output, common options, and Ctrl-C."""

import json
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from typer.core import TyperGroup

from fedpact.common.records import strict

INTERRUPTED: Final = 130
"""The exit code of a command that Ctrl-C stopped, as in shells; a script must not go on after it as
if the command had finished."""


def show(document: Mapping[str, Any], as_json: bool, text: Callable[[], None]) -> None:
    """Print the document as strict JSON and nothing else, or call `text` to print for a reader.

    JSON has no NaN and no infinity: such numbers become null.
    """
    if as_json:
        print(json.dumps(strict(document), indent=2, allow_nan=False, default=str))
    else:
        text()


def plain_console() -> Console:
    """Return a console that prints lines whole and colours no numbers."""
    return Console(highlight=False, soft_wrap=True)


class StopOnInterrupt:
    """True once Ctrl-C was pressed, to end after the round under way; a second one ends at once.

    So does the first before anybody has asked, as then no round is under way: while records are
    read and features made, which takes minutes.
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
        # Typer would say the same once more.
        self.suggest_commands = False


def group(about: str) -> typer.Typer:
    """Return a command that has sub-commands. about: its text in --help."""
    return typer.Typer(cls=Group, help=about, no_args_is_help=True, add_completion=False)
