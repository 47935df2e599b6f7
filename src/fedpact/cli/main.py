"""The command `fedpact`: its sub-commands, loaded on demand, and its exit codes.

Exit codes: 0 success, 1 a bug (with a traceback), 2 bad input or a refusal (one paragraph).
"""

import errno
import gc
import io
import logging
import os
import sys
from importlib.metadata import version
from typing import Annotated, Any, NoReturn

import click
import typer

from fedpact.cli import commands
from fedpact.cli.console import Group, plain_console
from fedpact.common.errors import FedpactError

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NOT_ALLOWED = (
    *(errno.EACCES, errno.EPERM, errno.EROFS),
    *(errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP),
)


class Commands(Group):
    """The sub-commands by name; a file is loaded when its command is needed."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        # Suggestions for a mistyped command come from these names.
        self.commands = {name: click.Command(name) for name in commands.names()}

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command, None if there is no file of that name."""
        if cmd_name in self.commands:
            self.commands[cmd_name] = commands.load(cmd_name)
        return super().get_command(ctx, cmd_name)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; for an unknown option, say how a key of the plan is set."""
        try:
            return super().invoke(ctx)
        except click.NoSuchOption as error:
            command = error.ctx.command if error.ctx else ctx.command
            if any(given.name == "overrides" for given in command.params):
                key = error.option_name.lstrip("-").replace("-", "_")
                told = f"{error.format_message()} A plan's keys are set as --set KEY=VALUE; "
                told += f"`fedpact settings {key}` shows which are called so."
                raise click.UsageError(told, error.ctx) from None
            raise


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
    plain_console(stderr=True).print(f"fedpact: {why}", style="red")
    sys.exit(code)


def _open_standard_streams() -> None:
    """Open those that the caller closed: a ledger that got their number would be written to as one.

    They are /dev/null, for children too.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def main() -> None:
    """Run the command line."""
    _open_standard_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A letter that the terminal's encoding lacks must not end a command.
        sys.stdout.reconfigure(errors="backslashreplace")
    # matplotlib warns if there is no home directory, which is not needed here.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    try:
        app()
    except FedpactError as error:
        _end(str(error), error.exit_code)
    except OSError as error:
        if error.errno in _NO_ROOM:
            _end(f"{error}: free some disk space, then continue a run with `fedpact resume FOLDER`")
        if error.errno in _NOT_ALLOWED:
            _end(f"{error}: choose a path that this account can read and write")
        raise
    finally:
        # A last garbage collection of all loaded modules would only delay the exit.
        gc.freeze()
