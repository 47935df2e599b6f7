"""`fedpact deploy`: a federation on real machines, or all of it on this one for trying."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from getpass import getuser
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from fedpact.cli.console import AsJson, Config, Overrides, group, plain_console, show
from fedpact.common.errors import DataError, FedpactError
from fedpact.common.format import count_noun, upper
from fedpact.common.notebook import print_table

if TYPE_CHECKING:
    from fedpact.deployment import processes
    from fedpact.deployment.federation import Federation
    from fedpact.plan import Plan

Form = Literal["compose", "helm", "systemd", "flower"]

_POLL_SECONDS = 0.5

app = group("Run a federation on real machines, over Flower.")

Where = Annotated[
    Path,
    typer.Argument(
        help="The directory that `fedpact deploy init` wrote, or one party's directory in it."
    ),
]


@app.command()
def init(
    directory: Annotated[Path, typer.Argument(help="A new directory.")],
    config: Config = None,
    overrides: Overrides = [],  # noqa: B006 - typer reads the default, nobody changes it
    package: Annotated[
        Form | None,
        typer.Option("--as", help="Write what runs each party as a service or container, too."),
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="The server's name or address, for sites.")
    ] = None,
    port: Annotated[int, typer.Option(help="The server's port.")] = 8443,
    records: Annotated[
        bool, typer.Option(help="Give each site its part of the plan's data, for a trial.")
    ] = True,
    names: Annotated[
        list[str], typer.Option("--name", help="A site's name; repeat it for each site.")
    ] = [],  # noqa: B006
    test_seeds: Annotated[
        bool, typer.Option(help="Draw noise from the plan's seed: for tests on this machine only.")
    ] = False,
) -> None:
    """Write a deployment of a plan: certificates, keys, settings and policies."""
    from fedpact.deployment.files import write_deployment
    from fedpact.deployment.packaging import SERVER_HOSTS, write_package
    from fedpact.plan import Plan
    from fedpact.simulation.machine import require_flower

    require_flower()
    host = host or SERVER_HOSTS.get(package or "", "127.0.0.1")
    plan = Plan.read(config, [*overrides, *[f"sites={len(names)}"] * bool(names)])
    seeds = "test" if test_seeds else "secure"
    chosen = {"host": host, "port": port, "names": names, "records": records, "seeds": seeds}
    federation = write_deployment(directory, plan, **chosen)
    if package is not None:
        write_package(directory, package, port)
    _tell_next(directory, plan, federation, tries=records and host == "127.0.0.1", records=records)


def _tell_next(
    directory: Path, plan: Plan, federation: Federation, *, tries: bool, records: bool
) -> None:
    """Print what was written, and what is left to do. tries: whether `up` can try it here."""
    plain_console().print(
        f"{directory}: run {federation.run}, {count_noun(len(federation.sites), 'site')}, server "
        f"at {federation.address}. Read {directory / 'README.md'} next"
        + (
            f"; `fedpact deploy up {quote(str(directory))}` tries it on this machine."
            if tries
            else "."
            if records
            else ", and give every site its records (site.toml). Each size in federation.toml is "
            "public: correct it to a round number near what that site trains on."
        )
    )
    if not plan.about.purpose:
        plain_console().print(
            "No purpose is stated, which owners read before they approve: write the files again "
            "with --set 'about.purpose=...'."
        )
    if plan.evaluation_terms is None:
        public = (directory / "server" / "test.npz").exists()
        instead = "only the public server/test.npz" if public else "no records"
        more = plan.evaluation.why_unreleased
        told = f"The server will evaluate the model on {instead}. {more}."
        plain_console().print(told)


@app.command()
def extend(
    server: Annotated[Path, typer.Argument(help="The server's directory; its run has ended.")],
    rounds: Annotated[int, typer.Option(min=1, help="How many more.")],
    out: Annotated[Path, typer.Option(help="A new directory, for what every party is given.")],
    epsilon: Annotated[
        float | None, typer.Option(help="The new run's ε; left out, the plan's.")
    ] = None,
) -> None:
    """Write the files of a run that goes on from the final model, with each site's ledger."""
    from fedpact.deployment.files import write_extension

    found = write_extension(server, rounds, epsilon, out)
    plain_console().print(
        f"{out}: run {found.run}, which begins with the final model. Copy all its files into every "
        f"party's directory, move {quote(str(server / 'run'))} away, and start all parties again. "
        "Each site's ledger, which stays where it is, counts both runs, so its owner raises "
        "epsilon_ever and delta_ever in policy.toml first, and lowers smallest_sigma if this run "
        "has less noise (`fedpact deploy check` says so), or the site does not open."
    )


@app.command()
def check(directory: Where, as_json: AsJson = False) -> None:
    """Check a site before it starts: its columns, skipped records and privacy cost."""
    from fedpact.cli.commands.inspect import check_sites

    check_sites(directory, as_json)


@app.command()
def approve(
    directory: Annotated[Path, typer.Argument(help="The site's directory.")],
    by: Annotated[str | None, typer.Option(help="Sign for it, by this name.")] = None,
) -> None:
    """Show in plain words what a site will release, and at what cost; with --by, sign."""
    from fedpact.cli.commands.inspect import print_check
    from fedpact.deployment import signatures
    from fedpact.deployment.check import check_site

    out = plain_console()
    out.print(signatures.describe(directory) + "\n")
    found = check_site(directory)
    print_check(found if by is None else replace(found, approvals=0))  # as it is being signed
    if by is not None and found.problems:
        told = "; ".join(found.problems)
        raise FedpactError(f"Site {found.site}: {told}. Nothing was reserved or charged")
    state = (
        signatures.read_approvals(directory) if by is None else signatures.approve(directory, by)
    )
    names = ", ".join(state.names) or "nobody"
    more = f"; {state.missing} more to go, with --by NAME" if state.missing else ""
    out.print(f"\nApproved by {names}, of {state.needed} that policy.toml asks for{more}.")


@app.command()
def health(
    directory: Annotated[Path, typer.Argument(help="The server's or a site's directory.")],
) -> None:
    """Exit with 0 if this party's process runs and is at work on this machine, else 1."""
    from fedpact.deployment.flower.program import find_outage

    if fault := find_outage(directory):
        plain_console().print(fault)
        raise typer.Exit(1)


@app.command()
def up(
    directory: Where,
    yes: Annotated[bool, typer.Option("--yes", help="Approve for every site unasked.")] = False,
) -> None:
    """Try the whole federation on this machine: start, watch and stop it."""
    from fedpact.cli.commands.inspect import check_before_start
    from fedpact.deployment import processes
    from fedpact.deployment.site_records import SiteSettings
    from fedpact.simulation.machine import require_flower

    require_flower()
    if processes.SERVER not in (places := processes.parties(directory)) or len(places) < 2:
        raise DataError(
            f"{directory} belongs to one party: start it with `fedpact deploy server` or `site`, "
            "or name the whole deployment's directory"
        )
    sites = [where for name, where in places.items() if name != processes.SERVER]
    if any(SiteSettings.read(where).socket is not None for where in sites):
        raise DataError(
            f"{directory} is for a Flower federation that somebody else runs (`socket` in "
            "site.toml), and `up` starts one of its own: start each site with `fedpact deploy "
            f"site`, then `flwr run {directory / 'app'}`; or leave --as flower out to try the run "
            "here"
        )
    check_before_start(directory)
    _approve_all(sites, yes)
    with processes.Parties(directory) as here:
        plain_console().print(
            f"started: {', '.join(here.start())}; Ctrl-C stops them, `up` resumes them"
        )
        _follow(directory, here)


@app.command()
def status(directory: Where, as_json: AsJson = False) -> None:
    """Show which parties run, the round, and what each site has spent."""
    from fedpact.deployment.snapshot import inspect_deployment

    found = inspect_deployment(directory)
    show(found, as_json, lambda: _print(directory, found))


@app.command()
def renew(
    authority: Annotated[Path, typer.Argument(help="The directory with the authority's key.")],
    directory: Annotated[Path, typer.Argument(help="The server's directory.")],
) -> None:
    """Renew the server's TLS certificate."""
    from fedpact.deployment import keys
    from fedpact.deployment.federation import Federation

    federation = Federation.read(directory / "federation.toml")
    keys.renew(authority, directory, federation.host)
    plain_console().print(
        f"new: {directory / 'tls.crt'}, with its key; the sites' files need no change. Start the "
        "server again."
    )


@app.command()
def server(
    directory: Annotated[Path, typer.Argument(help="The server's directory.")],
    as_json: AsJson = False,
) -> None:
    """Run the server until the run ends; started again, it resumes."""
    from fedpact.deployment import processes
    from fedpact.deployment.server import TERMS, describe_round

    out = plain_console()
    out.quiet = as_json
    out.print(TERMS)
    summary = processes.run_server(directory, lambda record: out.print(describe_round(record)))
    show(summary, as_json, lambda: out.print(f"ended: {summary['status']}"))


@app.command()
def site(directory: Annotated[Path, typer.Argument(help="The site's directory.")]) -> None:
    """Take part as a site until stopped; started again, it resumes."""
    from fedpact.deployment import processes

    processes.run_site(directory)


@app.command()
def model(
    directory: Annotated[Path, typer.Argument(help="The site's directory.")],
    source: Annotated[
        Path | None,
        typer.Option(
            "--model",
            help="The server's run/model.safetensors; default: the server next to the site.",
        ),
    ] = None,
) -> None:
    """Give the final model to a site that was offline when the server sent it."""
    from fedpact.deployment.final_model import bring

    place = bring(directory, source)
    plain_console().print(f"{place}: use it with `fedpact predict {directory} FILE`")


def _approve_all(sites: Sequence[Path], yes: bool) -> None:
    from fedpact.deployment import signatures

    waiting = [where for where in sites if signatures.read_approvals(where).missing]
    for where in waiting:
        plain_console().print(signatures.describe(where))
    if waiting and not yes:
        typer.confirm(
            f"Approve this for {count_noun(len(waiting), 'site')} as {getuser()}?", abort=True
        )
    for where in waiting:
        signatures.approve(where, getuser())
        signatures.check_approved(where)


def _follow(directory: Path, here: processes.Parties) -> None:
    """Wait for the server, which prints its rounds, and say how each party has ended."""
    from fedpact.deployment import processes
    from fedpact.deployment.snapshot import inspect_deployment

    out, told = plain_console(), {processes.SERVER}
    places = processes.parties(directory)
    while True:
        ended = {name for name in places if not here.runs(name)}
        for name in sorted(ended - told):
            out.print(f"{name} {processes.describe_end(here.exit_code(name))}")
            out.print(f"  its last line: {processes.last_log_lines(directory, name)}")
        told |= ended
        if processes.SERVER in ended:
            break
        # A site's process runs until it is stopped, so missing ones have failed.
        if len(ended) == len(places) - 1:
            raise FedpactError(
                "every site has stopped, for the reasons above, so the server was stopped, too: "
                "fix them, then start again"
            )
        time.sleep(_POLL_SECONDS)
    found = inspect_deployment(directory)
    if not found["ended"]:
        raise FedpactError(
            f"the server {processes.describe_end(here.exit_code(processes.SERVER))}; its last "
            f"line: {processes.last_log_lines(directory, processes.SERVER)}; see "
            f"{directory / 'server' / 'log.txt'}"
        )
    _print(directory, found)


def _print(directory: Path, found: dict[str, Any]) -> None:
    out = plain_console()
    curves = [c for c in found.get("curves", ()) if c["points"]]
    last = [f", {c['name']} {c['points'][-1][1]:.4g} {c['of']}" for c in curves]
    seconds = [f", {found['seconds_spent']:.3g} s"] if found.get("seconds_spent") else []
    what = f"run {found['run']}: {found['state']}, round {found['round']} of {found['rounds']}"
    out.print("".join((what, *last, *seconds)))
    for told in (*found.get("compared", ()), *found.get("to_do", ())):
        out.print(told)
    rows = [
        (name, "runs" if runs else "-", *_spend(found["ledgers"].get(name), found["run"]))
        for name, runs in found["running"].items()
    ]
    for name, site in found.get("sites", {}).items():
        if name not in found["running"] and site["epsilon_spent"] is not None:
            # Its ledger is on another machine: show the server's count.
            spent, alone = site["epsilon_spent"], site["epsilon_alone_spent"]
            alone = upper(spent if alone is None else alone)
            rows.append((name, "elsewhere", upper(spent), "", alone, "", "", ""))
    columns = ("party", "here", "ε spent", "of ε", "alone", "of", "δ", "ledger entries")
    print_table(out, columns, rows)
    if not found["ended"]:
        for name, words in found["stopped"].items():
            out.print(f"{name} has ended: {words}")
    if found["own_figures"]:
        _print_own(out, directory, found["own_figures"]["rounds"])
    out.print(f"(ε, δ), adjacency: {found['adjacency']}; accountant best of PLD and RDP.")
    if found["evaluations"]:
        cost, delta = map(upper, found["evaluations"])
        out.print(
            "A ledger's line shows the maximum of training and evaluation, which use disjoint "
            "records. A round's ε and the lines of remote sites show training only; evaluation "
            f"costs a held-out record at most ({cost}, {delta})."
        )
    out.print("Alone: ε even if all others collude; it differs only with distributed noise.")


def _spend(ledger: Mapping[str, Any] | None, run: str) -> tuple[str, ...]:
    """Return a run's spending by a ledger, including the run that it extends."""
    from fedpact.privacy.ledger.reservations import spend_of

    found = spend_of(run, ledger["runs"]) if ledger else None
    if not ledger or found is None:
        return ("",) * 6
    figures = ("epsilon_spent", "epsilon_reserved", "epsilon_alone_spent", "epsilon_alone_reserved")
    return (*(upper(found[figure]) for figure in (*figures, "delta")), str(ledger["entries"]))


def _print_own(out: Console, site: Path, rounds: Mapping[str, Any]) -> None:
    from fedpact.deployment.site_records import SiteFiles
    from fedpact.evaluation.intervals import exact_figures

    files = SiteFiles.read(site)
    form = files.federation.form(files.plan).whole
    figures = {n: exact_figures(rounds[n], form) for n in sorted(rounds, key=int)}
    last = [*figures.values()][-1]
    of_all = [f.name for f in last if not f.of_part]
    rows = [
        (name, *(f"{f.value:.4g}" for f in each if not f.of_part)) for name, each in figures.items()
    ]
    print_table(out, ("after round", *of_all), rows)
    rows = [(f"{f.name}, {f.about}", f"{f.value:.4g}") for f in last if f.of_part]
    print_table(out, ("", f"round {[*figures][-1]}"), rows)
    out.print(
        "Exact figures of this site's held-out records, for its owner only: no message contains "
        "them, and passing them on is a release that no budget covers."
    )
