"""The command `fedpact`: its sub-commands, loaded when called, and how errors end it.

Exit codes: 0 done, 1 a bug of ours (with a traceback), 2 bad input or a refusal (one paragraph).
"""

import errno
import gc
import io
import logging
import sys
from importlib.metadata import version
from typing import Annotated, Any, NoReturn

import click
import typer

from fedpact.cli import commands
from fedpact.cli.console import Group
from fedpact.common.errors import FedpactError

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NOT_ALLOWED = (
    *(errno.EACCES, errno.EPERM, errno.EROFS),
    *(errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP),
)


class Commands(Group):
    """The sub-commands by name; a file is loaded when its command is asked for."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        # By these names a mistyped one is answered.
        self.commands = {name: click.Command(name) for name in commands.names()}

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command, None where there is no file of that name."""
        if cmd_name in self.commands:
            self.commands[cmd_name] = commands.load(cmd_name)
        return super().get_command(ctx, cmd_name)


app = typer.Typer(
    name="fedpact", cls=Commands, no_args_is_help=True, pretty_exceptions_enable=False
)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"fedpact {version('fedpact')}")
        raise typer.Exit


@app.callback()
def _top(
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Train one model across data owners who keep their records, each under its own (ε, δ)."""


def _end(why: str, code: int = 2) -> NoReturn:
    from rich.console import Console

    Console(stderr=True, soft_wrap=True, highlight=False).print(
        f"fedpact: {why}", style="red", markup=False
    )
    sys.exit(code)


def main() -> None:
    """Run the command line."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Letters that a terminal's encoding lacks are no reason to say nothing, after hours.
        sys.stdout.reconfigure(errors="backslashreplace")
    # It advises whoever has no home to set one of its variables; here it may do without.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    try:
        app()
    except FedpactError as error:
        _end(str(error), error.exit_code)
    except OSError as error:
        if error.errno in _NO_ROOM:
            _end(f"{error}: make room; a run that had begun goes on with `fedpact resume FOLDER`")
        if error.errno in _NOT_ALLOWED:
            _end(f"{error}: name a place that this account may read and write")
        raise
    finally:
        # The interpreter ends: to look through all that was loaded once more finds nothing.
        gc.freeze()
