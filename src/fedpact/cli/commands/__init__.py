"""What may be typed after `fedpact`: one file a command, found by its file name.

A file holds a function of its own name, or an `app` with sub-commands: their options and what
--help says of them. It is loaded to show help and to complete words, so at its top it imports
nothing but typer and `fedpact.cli.options`; what does the work is imported when it is called.
"""

import importlib
import pkgutil

import typer
from click import Command

from fedpact.errors import FedpactError

_BESIDE = {
    "algorithms": "settings",
    "evaluate": "predict",
    "init": "settings",
    "resume": "run",
    "watch": "report",
}
"""Commands that stand in another one's file."""


def names() -> list[str]:
    """Return the names of all commands, sorted."""
    found = (module.name for module in pkgutil.iter_modules(__path__))
    return sorted([*_BESIDE, *(name for name in found if not name.startswith("_"))])


def home(name: str) -> str:
    """Return the name of the file that has a command."""
    return _BESIDE.get(name, name)


def load(name: str) -> Command:
    """Return the command of that name. Raises FedpactError: its file is incomplete."""
    module = importlib.import_module(f"{__name__}.{home(name)}")
    app = getattr(module, "app", None)
    if app is None:
        function = getattr(module, name, None)
        if not callable(function) or not function.__doc__:
            raise FedpactError(
                f"{module.__file__} has neither an `app` nor a function {name!r} with a docstring: "
                f"expected one of them, as `fedpact {name}` and its help"
            )
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        app.command(name)(function)
    command = typer.main.get_command(app)
    command.name = name
    return command
