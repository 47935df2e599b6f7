"""`fedpact deploy`: a federation on real machines, or all of it on this one for trying."""

from pathlib import Path
from typing import Annotated

import typer

from fedpact.cli.console import AsJson, Config, Overrides, group
from fedpact.cli.reference import check_keys

app = group("A federation on real machines, over Flower.")

Where = Annotated[
    Path, typer.Argument(help="What `fedpact deploy init` wrote, or one party's directory in it.")
]


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
    start_sites: Annotated[
        int | None, typer.Option(help="How many the first round waits for; default: all.")
    ] = None,
    least_replies: Annotated[int, typer.Option(help="With fewer, a round is tried again.")] = 1,
    retries: Annotated[int, typer.Option(help="How often, before the run stops.")] = 2,
) -> None:
    """Write a deployment of a configuration: certificates, keys, settings, policies, scripts."""
    check_keys(config, overrides)
    from fedpact.cli import deploy as command
    from fedpact.deployment.files import Choices
    from fedpact.simulation.flower import require_flower

    require_flower()
    patience = {
        "round_seconds": round_seconds,
        "resend_seconds": resend_seconds,
        "join_seconds": join_seconds,
        "start_sites": start_sites,
        "least_replies": least_replies,
        "retries": retries,
    }
    seeds = "test" if test_seeds else "secure"
    choices = Choices(host=host, port=port, records=records, seeds=seeds, patience=patience)
    command.execute_init(directory, config, overrides, choices)


@app.command()
def check(directory: Where, as_json: AsJson = False) -> None:
    """Show a site's owner its columns, what is left out, and the cost, before it opens."""
    from fedpact.cli import check as command

    command.execute_check(directory, as_json)


@app.command()
def up(directory: Where) -> None:
    """Try the whole federation on this machine: run it, show it, end it."""
    from fedpact.cli import deploy as command

    command.execute_up(directory)


@app.command()
def status(directory: Where, as_json: AsJson = False) -> None:
    """Show who runs, how far the run is, and what each site has spent."""
    from fedpact.cli import deploy as command

    command.execute_status(directory, as_json)


@app.command()
def renew(
    authority: Annotated[Path, typer.Argument(help="The directory with the authority's key.")],
    directory: Annotated[Path, typer.Argument(help="The server's directory.")],
) -> None:
    """Write the server's TLS certificate anew, and the authority's where that ends before it."""
    from fedpact.cli import deploy as command

    command.execute_renew(authority, directory)


@app.command()
def server(
    directory: Annotated[Path, typer.Argument(help="The server's directory.")],
    as_json: AsJson = False,
) -> None:
    """Run the server until the run has ended; started again, it goes on."""
    from fedpact.cli import deploy as command

    command.execute_server(directory, as_json)


@app.command()
def site(directory: Annotated[Path, typer.Argument(help="The site's directory.")]) -> None:
    """Take part as a site until stopped; started again, it goes on."""
    from fedpact.cli import deploy as command

    command.execute_site(directory)


@app.command()
def model(
    directory: Annotated[Path, typer.Argument(help="The site's directory.")],
    source: Annotated[
        Path | None,
        typer.Option(
            "--model",
            help="The server's run/model.safetensors; by default that of a server beside the site.",
        ),
    ] = None,
) -> None:
    """Put the final model into a site's directory, where it was away when the server sent it."""
    from fedpact.cli import deploy as command

    command.execute_model(directory, source)
