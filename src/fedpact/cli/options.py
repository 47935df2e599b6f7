"""Options that several commands share."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

Config = Annotated[
    Path | None,
    typer.Argument(help="A .toml or .json configuration; none for the embedded default."),
]
Overrides = Annotated[
    list[str], typer.Option("--set", help="key=value, over the configuration; may be repeated.")
]
Engine = Annotated[
    str,
    typer.Option(help="local: threads of this machine; ray: a cluster, or cores of this machine."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]


class Group(TyperGroup):
    """A command with sub-commands, whose names click suggests for a mistyped one."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        # Typer would say the same once more.
        self.suggest_commands = False


def group(about: str) -> typer.Typer:
    """Return a command that has sub-commands. about: what --help says of it."""
    return typer.Typer(cls=Group, help=about, no_args_is_help=True, add_completion=False)
