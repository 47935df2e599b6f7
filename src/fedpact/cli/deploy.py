"""`fedpact deploy`: a federation on real machines, or all of it on this one for trying."""

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from fedpact.cli.console import show
from fedpact.cli.run import AsJson, Config, Overrides
from fedpact.deploy import local, processes
from fedpact.deploy.write import Choices
from fedpact.deploy.write import write as write_deployment
from fedpact.engines.federation import Patience
from fedpact.engines.flower import require_flower
from fedpact.errors import FedpactError
from fedpact.messages import RoundRecord
from fedpact.plan import Plan
from fedpact.report.text import upper

app = typer.Typer(help="A federation on real machines, over Flower.", no_args_is_help=True)

Where = Annotated[
    Path, typer.Argument(help="What `fedpact deploy init` wrote, or one party's directory in it.")
]
_POLL_SECONDS = 0.5


@app.command()
def init(
    directory: Annotated[Path, typer.Argument(help="A new directory.")],
    config: Config = None,
    overrides: Overrides = [],  # noqa: B006 - typer reads the default, nobody changes it
    host: Annotated[str, typer.Option(help="The server's name or address, for sites.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="The server's port.")] = 8443,
    records: Annotated[
        bool, typer.Option(help="Give each site its part of the plan's data, for trying.")
    ] = True,
    test_seeds: Annotated[
        bool, typer.Option(help="Draw noise from the plan's seed: a test, on this machine only.")
    ] = False,
    round_seconds: Annotated[float, typer.Option(help="How long a round waits.")] = 600.0,
    resend_seconds: Annotated[float, typer.Option(help="Then a site is asked again.")] = 60.0,
    join_seconds: Annotated[float, typer.Option(help="How long the start waits.")] = 60.0,
    least_replies: Annotated[int, typer.Option(help="With fewer, a round is tried again.")] = 1,
    retries: Annotated[int, typer.Option(help="How often, before the run stops.")] = 2,
) -> None:
    """Write a deployment of a configuration: certificates, keys, settings, policies, scripts."""
    require_flower()
    patience = Patience(
        round_seconds=round_seconds,
        resend_seconds=resend_seconds,
        join_seconds=join_seconds,
        least_replies=least_replies,
        retries=retries,
    )
    seeds = "test" if test_seeds else "secure"
    choices = Choices(host=host, port=port, records=records, seeds=seeds, patience=patience)
    federation = write_deployment(directory, Plan.read(config, overrides), choices)
    _out().print(
        f"{directory}: run {federation.run}, {len(federation.sites)} sites, server at "
        f"{federation.address}. Read {directory / 'README.md'} next; `fedpact deploy up "
        f"{directory} --wait` tries it on this machine."
    )


@app.command()
def up(
    directory: Where,
    wait: Annotated[bool, typer.Option(help="Show progress, and end all when it is done.")] = False,
) -> None:
    """Run the whole federation on this machine, or one party, in the background."""
    require_flower()
    started = local.start(directory)
    _out().print(f"started: {', '.join(f'{name} ({pid})' for name, pid in started.items())}")
    if wait:
        try:
            _follow(directory)
        finally:
            local.stop(directory)


@app.command()
def status(directory: Where, as_json: AsJson = False) -> None:
    """Show who runs, how far the run is, and what each site has spent."""
    found = local.look(directory)
    show(found, as_json, lambda: _print(found))


@app.command()
def down(directory: Where) -> None:
    """End what `up` started; `up` goes on with the run."""
    _out().print(f"ended: {', '.join(local.stop(directory)) or 'nothing ran'}")


@app.command()
def readmit(
    directory: Where,
    site: Annotated[str, typer.Argument(help="The site's name.")],
) -> None:
    """Let a site in again whose ledger the server has refused; it needs the ledger last seen."""
    _out().print(
        f"{site} is let in again; it was barred because it {local.readmit(directory, site)}"
    )


@app.command()
def server(
    directory: Annotated[Path, typer.Argument(help="The server's directory.")],
    as_json: AsJson = False,
) -> None:
    """Run the server until the run has ended; started again, it goes on."""
    out = _out()
    summary = processes.run_server(directory, lambda record: out.print(_line(record)))
    show(summary, as_json, lambda: out.print(f"ended: {summary['status']}"))


@app.command()
def site(
    directory: Annotated[Path, typer.Argument(help="The site's directory.")],
) -> None:
    """Take part as a site until stopped; started again, it goes on."""
    processes.run_site(directory)


def _follow(directory: Path) -> None:
    """Print each committed round until the server's process has ended."""
    seen, out, told = -1, _out(), set[str]()
    while True:
        found = local.look(directory)
        for name, runs in found["running"].items():
            if not runs and name not in told | {"server"}:
                told.add(name)
                out.print(f"{name} has ended: {local.last_words(directory, name)}")
        last = found["round"]
        if last is not None and last["round"] != seen:
            seen = last["round"]
            out.print(_line(RoundRecord(**last)))
        if not found["running"]["server"]:
            break
        time.sleep(_POLL_SECONDS)
    if found["status"] == "not ended":
        raise FedpactError(
            f"the server ended before the run did: see {directory / 'server' / 'log.txt'}"
        )
    _print(found)


def _line(record: RoundRecord) -> str:
    accuracy = "" if record.accuracy is None else f"  accuracy {record.accuracy:.2%}"
    refused = "".join(f"  {site}: {code}" for site, code in record.refused.items())
    spent = upper(max(record.epsilon.values()))
    return f"round {record.round}{accuracy}  ε {spent}  {record.seconds:.1f} s{refused}"


def _print(found: dict[str, Any]) -> None:
    out = _out()
    last = found["round"]
    at = "" if last is None else "; " + _line(RoundRecord(**last))
    out.print(f"run {found['run']}: {found['status']}{at}")
    table = Table("party", "started by up", "ε spent", "of ε", "δ", "ledger entries")
    for name, runs in found["running"].items():
        ledger = found["ledgers"].get(name)
        spend = ledger and ledger["runs"].get(found["run"])
        row = (
            (
                upper(spend["epsilon_spent"]),
                f"{spend['epsilon_reserved']:g}",
                f"{spend['delta']:g}",
                str(ledger["entries"]),
            )
            if spend
            else ("", "", "", "")
        )
        table.add_row(name, "runs" if runs else "-", *row)
    for name, epsilon in last["epsilon"].items() if last else ():
        if name not in found["running"]:
            # Its ledger is on a machine of its own: what the server counts.
            table.add_row(name, "elsewhere", upper(epsilon), "", "", "")
    out.print(table)
    out.print("(ε, δ) for one record, add/remove one record, accountant best of PLD and RDP.")


def _out() -> Console:
    return Console(highlight=False, soft_wrap=True)
