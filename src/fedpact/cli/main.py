"""The command `fedpact`: its sub-commands, and how errors end it.

Exit codes: 0 done, 1 a bug of ours (with a traceback), 2 bad input or a refusal (one paragraph).
"""

import sys

import typer
from rich.console import Console

from fedpact.cli import data, deploy, ledger, tune
from fedpact.cli.account import account
from fedpact.cli.audit import audit
from fedpact.cli.compare import compare
from fedpact.cli.plan import plan
from fedpact.cli.report import report
from fedpact.cli.run import resume, run
from fedpact.cli.tradeoffs import tradeoffs
from fedpact.errors import FedpactError

app = typer.Typer(
    name="fedpact",
    help="Train one model across data owners who keep their records, each under its own (ε, δ).",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
for command in (run, resume, plan, report, compare, account, tradeoffs, audit):
    app.command()(command)
app.add_typer(data.app, name="data")
app.add_typer(ledger.app, name="ledger")
app.add_typer(tune.app, name="tune")
app.add_typer(deploy.app, name="deploy")


def main() -> None:
    """Run the command line."""
    try:
        app()
    except FedpactError as error:
        Console(stderr=True, soft_wrap=True, highlight=False).print(
            f"fedpact: {error}", style="red", markup=False
        )
        sys.exit(2)
