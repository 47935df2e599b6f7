"""fedpact inside a Flower federation that is there already, by Flower's own programs alone."""

import ctypes
import importlib.util
import json
import os
import subprocess
import sys
import threading
from contextlib import ExitStack, suppress
from multiprocessing.connection import Client
from pathlib import Path
from types import SimpleNamespace

import pytest
from flwr.app import Context, Message, RecordDict
from tests.deployment.conftest import free_port
from tests.deployment.grid import Grid, events_in
from tests.waiting import wait_for
from typer.testing import CliRunner

from fedpact.cli.main import app
from fedpact.common.errors import FedpactError
from fedpact.common.messages import from_bytes
from fedpact.deployment.flower import flower_records
from fedpact.deployment.flower.program import find_outage
from fedpact.deployment.flower.server_process import APP, AppGrid, coordinate
from fedpact.deployment.flower.site_process import listen
from fedpact.deployment.processes import die_with_parent
from fedpact.deployment.server import Coordinator
from fedpact.deployment.site import Site
from fedpact.simulation.machine import QUIET
from fedpact.simulation.secure_aggregation import keys

BIN = Path(sys.executable).parent
NOBODY, ROOT = 65534, os.geteuid() == 0


def powerless():
    """Before it is started: root, too, is to read no more than what its account may."""
    for overrides in (1, 2):  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH
        ctypes.CDLL(None).prctl(24, overrides)  # PR_CAPBSET_DROP
    die_with_parent()


@pytest.fixture
def start(tmp_path):
    """start(name, *command, **options) -> a process with a log, which ends with the test."""
    with ExitStack() as stack:

        def new(name, *command, begin=die_with_parent, **options):
            with (tmp_path / f"{name}.log").open("ab") as out:
                process = subprocess.Popen(
                    command, stdout=out, stderr=out, preexec_fn=begin, **options
                )
            stack.callback(process.wait)
            stack.callback(process.terminate)
            return process

        yield new


@pytest.mark.slow  # a minute: Flower starts a process for each message
def test_run_in_a_federation_of_others(tmp_path, start):
    """The SuperNodes run under an account that can read none of the sites' directories."""
    where, link = tmp_path / "d", f"127.0.0.1:{free_port()}"
    sets = ["--set=rounds=2", "--set=sites=2"]
    done = CliRunner().invoke(app, ["deploy", "init", str(where), "--as", "flower", *sets])
    assert done.exit_code == 0, done.output
    path = f"{BIN}:{os.environ['PATH']}"
    env = {**os.environ, **QUIET, "FLWR_HOME": str(tmp_path / "flwr"), "PATH": path}
    insecure = ["--insecure", "--disable-runtime-dependency-installation"]
    start("link", BIN / "flower-superlink", *insecure, "--port", link.split(":")[1], env=env)
    sites = {name: where / "sites" / name for name in ("site-00", "site-01")}
    for name, site in sites.items():
        place = tmp_path / f"{name}.sock"
        text = (site / "site.toml").read_text().replace(f"/run/fedpact/{name}.sock", str(place))
        (site / "site.toml").write_text(text)
        site.chmod(0o700)
        if ROOT:
            os.chown(site, NOBODY, NOBODY)
            look = ["head", "-c1", site / "records.npz"]
            assert subprocess.run(look, preexec_fn=powerless, capture_output=True).returncode
        start(name, sys.executable, "-m", "fedpact", "deploy", "site", site)
        wait_for(lambda site=site: not find_outage(site), tmp_path)
        # Of the site it knows the socket, and of fedpact nothing.
        home = {**QUIET, "FLWR_HOME": str(tmp_path / f"node-{name}"), "PATH": path}
        port, told = str(free_port()), f'fedpact-socket="{place}"'
        start(
            f"node-{name}", BIN / "flower-supernode", "--superlink", link, *insecure[:1],
            "--port", port, "--node-config", told, env=home, cwd=tmp_path, begin=powerless,
        )  # fmt: skip
    (tmp_path / "flwr").mkdir(exist_ok=True)
    config = f'[superlink]\ndefault = "theirs"\n[superlink.theirs]\naddress = "{link}"\n'
    (tmp_path / "flwr" / "config.toml").write_text(config + "insecure = true\n")
    run = [BIN / "flwr", "run", where / "app", "theirs"]
    done = subprocess.run(run, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    wait_for((where / "server" / "run" / "handed-over.json").exists, tmp_path)
    assert json.loads((where / "server" / "run" / "summary.json").read_text())["rounds"] == 2
    trained = (where / "server" / "run" / "model.safetensors").read_bytes()
    for site in sites.values():
        assert (site / "run" / "model.safetensors").read_bytes() == trained
        assert events_in(site / "ledger.jsonl") > 0


class Node:
    """A SuperNode with the app, in memory; `number` and what its configuration says."""

    here, since = True, "first"

    def __init__(self, number, place):
        spec = importlib.util.spec_from_file_location("app", APP / "app.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        self.number, self._app = number, module.client
        self._context = Context(1, number, {"fedpact-socket": str(place)}, RecordDict(), {})

    def is_stuck_at(self, message):
        return False

    def hear(self, message):
        return self._app(message, self._context)


class Strangers(Grid):
    """A network whose nodes have no keys."""

    def get_nodes(self):
        return [
            SimpleNamespace(node_id=n, last_activated_at=each.since)
            for n, each in self.nodes.items()
        ]


def is_answered(place):
    """Whether somebody listens at a socket, which is later than it exists."""
    with suppress(OSError):
        Client(str(place), "AF_UNIX").close()
        return True
    return False


@pytest.fixture
def listening(tmp_path):
    """listening(directory) -> the socket of a site, which listens in a thread."""
    with ExitStack() as stack:

        def new(directory):
            place, opened = tmp_path / f"{directory.name}.sock", []

            def answer():
                with Site(directory) as site, suppress(FedpactError):
                    opened.append(site)
                    listen(site, directory, place)

            def end():
                opened[0].stopped = "the test is over"
                is_answered(place)  # wakes it, unless it has just ended by itself
                thread.join()

            thread = threading.Thread(target=answer, daemon=True)
            thread.start()
            wait_for(lambda: is_answered(place), tmp_path, 0.01)
            stack.callback(end)
            return place

        yield new


@pytest.mark.usefixtures("clock", "in_memory")
def test_app_passes_on_what_sites_sign(make, tmp_path, listening):
    where = make(tmp_path / "d", None, rounds=2, sites=2)
    homes = sorted((where / "sites").iterdir())
    nodes = [Node(10 + i, listening(home)) for i, home in enumerate(homes)]
    coordinator, records = Coordinator(where / "server"), []
    coordinate(coordinator, AppGrid(Strangers(nodes), coordinator.federation), records.append)
    assert [(r.round, r.refused) for r in records] == [(0, {}), (1, {}), (2, {})]
    assert all(events_in(home / "ledger.jsonl") > 0 for home in homes)


def test_a_node_is_identified_by_its_sites_signature(site_dir, deployment, listening, tmp_path):
    """One that sends the same under another key is nobody, and no words of a failure get out."""
    honest, away = Node(10, listening(site_dir)), Node(12, tmp_path / "secret" / "none.sock")

    class Liar(Node):
        def hear(self, message):
            answer = honest.hear(message)
            block, _ = flower_records.from_record(answer.content)
            key = keys.read_private_key(deployment / "sites" / "site-01" / "site.key")
            forged = keys.sign(key, "reply of site-00", block)
            return Message(flower_records.to_record(block, forged), reply_to=message)

    grid = AppGrid(
        Strangers([honest, Liar(11, tmp_path)]), Coordinator(deployment / "server").federation
    )
    assert list(grid.get_nodes()) == []
    (found,) = grid.get_nodes()
    assert found.node_id == 10
    message = Message(flower_records.to_record(b"", b""), 12, "train")
    with pytest.raises(RuntimeError) as raised:
        away.hear(message)
    assert str(raised.value) == "no site answers here: FileNotFoundError"


def test_unsigned_tasks_are_refused_uncharged(site_dir, listening):
    before = (site_dir / "ledger.jsonl").exists()
    assert not before
    place = listening(site_dir)
    charged = (site_dir / "ledger.jsonl").read_bytes()
    whole = json.dumps({"signature": "00", "length": 0, "head": "", "agreed": ""}).encode()
    for seal, block, refused in (
        (whole, b"a task", True),
        (b"no JSON", b"a task", False),
        (b"{}", b"", False),
        (b"[" * 4000, b"", False),
        (bytes(2**13), b"", False),
    ):
        with Client(str(place), "AF_UNIX") as link:
            with suppress(OSError):
                link.send_bytes(seal)
                link.send_bytes(block)
            if refused:
                link.recv_bytes()
                assert from_bytes(link.recv_bytes()).code == "unsigned"
            else:
                with pytest.raises((EOFError, OSError)):
                    link.recv_bytes()
    assert (site_dir / "ledger.jsonl").read_bytes() == charged
