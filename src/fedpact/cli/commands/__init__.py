"""The sub-commands of `fedpact`, each in the file of its name or in another's (_COMMAND_FILE).

A file has a function of its own name, or an `app` with sub-commands. It is loaded to show help and
for completion, so it imports only light modules at its top; other imports are in the functions.
"""

import importlib
import pkgutil
from typing import cast

import typer
from click import Command
from typer.core import TyperArgument
from typer.models import ArgumentInfo
from typer.utils import get_params_from_function

from fedpact.common.errors import FedpactError

_COMMAND_FILE = {
    "algorithms": "settings",
    "evaluate": "report",
    "export": "report",
    "extend": "run",
    "init": "settings",
    "predict": "report",
    "resume": "run",
    "tradeoffs": "account",
    "watch": "report",
}
"""Commands that are defined in another command's file."""

_EXAMPLES = {
    "account": (
        "fedpact account --q 0.015 --sigma 1.1 --steps 317",
        "fedpact account --epsilon 2 --q 0.05 --steps 200",
        "fedpact account --q 0.05 --sigma 2.8 --steps 200 --tuned 10",
    ),
    "algorithms": ("fedpact algorithms", "fedpact algorithms fedprox"),
    "audit": ("fedpact audit", "fedpact audit study.toml --canaries 500"),
    "compare": (
        "fedpact compare study.toml --algorithms fedavg,fedprox --set settings.local_steps=3",
        "fedpact compare a.toml b.toml --seeds 5 --out runs/both",
        "fedpact compare study.toml --sweep privacy.epsilon=0.5,1,2,4",
    ),
    "data list": ("fedpact data list",),
    "data verify": ("fedpact data verify", "fedpact data verify mnist"),
    "data download": ("FEDPACT_DATA=data fedpact data download mnist fashion_mnist",),
    "deploy init": ("fedpact deploy init fed study.toml --host fed.example.org",),
    "deploy extend": ("fedpact deploy extend fed/server --rounds 20 --out more",),
    "deploy check": ("fedpact deploy check fed/sites/site-00",),
    "deploy approve": ("fedpact deploy approve fed/sites/site-00 --by 'Dr Ada Ng'",),
    "deploy health": ("fedpact deploy health fed/sites/site-00",),
    "deploy up": ("fedpact deploy up fed",),
    "deploy status": ("fedpact deploy status fed",),
    "deploy renew": ("fedpact deploy renew fed/authority fed/server",),
    "deploy server": ("fedpact deploy server fed/server",),
    "deploy site": ("fedpact deploy site fed/sites/site-00",),
    "deploy model": ("fedpact deploy model fed/sites/site-00 --model model.safetensors",),
    "evaluate": ("fedpact evaluate runs/patients labelled.csv",),
    "export": ("fedpact export runs/first --set about.name=Digits --out CARD.md",),
    "extend": ("fedpact extend runs/first --rounds 40",),
    "init": ("fedpact init study.toml", "fedpact init --set algorithm=scaffold"),
    "inspect": ("fedpact inspect patients.csv --label ill",),
    "ledger show": ("fedpact ledger show runs/first",),
    "ledger verify": ("fedpact ledger verify runs/first",),
    "ledger export": ("fedpact ledger export fed/sites/site-00 --out receipt.json",),
    "personalise": ("fedpact personalise fed/sites/site-00 --model model.safetensors",),
    "plan": ("fedpact plan study.toml", "fedpact plan study.toml --optimise --passes 20"),
    "predict": ("fedpact predict runs/patients new.csv --out answers.csv",),
    "recommend": (
        "fedpact recommend fashion_mnist --epsilon 2",
        "fedpact recommend patients.csv --label ill --epsilon 1 --sites 4 --out study.toml",
    ),
    "report": ("fedpact report runs/first",),
    "resume": ("fedpact resume runs/first",),
    "run": (
        "fedpact run",
        "fedpact run study.toml --set privacy.epsilon=1 --out runs/one",
        "fedpact run --set algorithm=scaffold --set rounds=20",
    ),
    "settings": ("fedpact settings privacy", "fedpact settings privacy.epsilon"),
    "tradeoffs": ("fedpact tradeoffs --preset paper --out curves.svg",),
    "tune fedfdp": ("fedpact tune fedfdp --Q0 -1.5",),
    "tune fedproxvr": ("fedpact tune fedproxvr --gamma 0.01 --L 1 --lam 0.5 --sigma2 0.1",),
    "watch": ("fedpact watch runs/first", "fedpact watch fed/sites/site-00"),
}
"""Examples at the end of --help, by command."""


def names() -> list[str]:
    """Return the names of all commands, sorted."""
    found = (module.name for module in pkgutil.iter_modules(__path__))
    return sorted([*_COMMAND_FILE, *(name for name in found if not name.startswith("_"))])


def home(name: str) -> str:
    """Return the name of the file that has a command."""
    return _COMMAND_FILE.get(name, name)


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
    _explain(command, name)
    return command


def examples(name: str) -> tuple[str, ...]:
    """Return examples of a command, such as "data list"; may be empty."""
    return _EXAMPLES.get(name, ())


def _explain(command: Command, name: str) -> None:
    """Add examples to a command, and the arguments' help, which click 8.5 drops."""
    inner = dict[str, Command](getattr(command, "commands", {}))
    for last, one in inner.items():
        _explain(one, f"{name} {last}")
    if inner or command.callback is None:
        return
    if shown := examples(name):
        command.epilog = "\n\n".join(("Examples:", *shown))
    told = get_params_from_function(command.callback)
    for given in command.params:
        if (about := told.get(given.name or "")) and isinstance(about.default, ArgumentInfo):
            cast(TyperArgument, given).help = about.default.help
