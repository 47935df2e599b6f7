"""How parties end: a server whose SuperLink is lost at any moment exits, with its own code.

Nothing here waits for a time to pass: the server is waited for until it has exited.
"""

import logging
import subprocess
import sys
import threading
from contextlib import suppress
from types import SimpleNamespace

import pytest
import uvicorn
from flwr.proto.control_pb2 import ListRunsRequest, StopRunRequest
from tests.deployment.conftest import Forked
from tests.waiting import wait_for

from fedpact.common.errors import FedpactError, TransportLost
from fedpact.deployment import processes
from fedpact.deployment.federation import Federation
from fedpact.deployment.flower import program
from fedpact.deployment.flower.internals import SuperLink, tls


def serve(directory, work):
    """Return the exit code of a server at `work` whose SuperLink is killed, and its output."""

    def lose():
        processes._KNOCK_SECONDS, processes._LOST_SECONDS = 0.05, 1.0
        link = subprocess.Popen(["sleep", "600"])
        try:
            with (
                processes._end_by_signals(),
                processes._ends_with(lambda: link.poll() is None, directory),
            ):
                link.kill()
                work()
        except FedpactError as error:
            print(error)
            sys.exit(error.exit_code)

    ended = Forked(lose, directory / "out.txt")
    ended.wait()
    return ended.poll(), ended.log.read_text()


def wait_for_ever():
    threading.Event().wait()


def leave_a_thread():
    threading.Thread(target=wait_for_ever).start()
    wait_for_ever()


def take_no_notice():
    while True:
        with suppress(SystemExit):
            wait_for_ever()


def test_server_whose_superlink_is_killed_exits(tmp_path):
    code, told = serve(tmp_path, wait_for_ever)
    assert code == TransportLost.exit_code == 69, told
    assert "SuperLink has ended: see why in" in told


@pytest.mark.parametrize("work", [leave_a_thread, take_no_notice])
def test_a_blocked_server_exits_too(tmp_path, work):
    """As by a thread that nobody ends, or a main thread that takes no notice of signals."""
    code, told = serve(tmp_path, work)
    assert code == TransportLost.exit_code == 69, told


@pytest.fixture
def federation(make, tmp_path):
    """Real processes of two sites and a server; the server's is started by `start_server`."""
    patience = {"join_seconds": 3600, "round_seconds": 3600, "resend_seconds": 6}
    directory = make(tmp_path / "d", {"patience": patience}, rounds=3, sites=2)
    with processes.Parties(directory) as here:
        yield here
    for path in directory.rglob("log.txt"):
        print(path, path.read_text()[-3000:], sep="\n")


def is_connected(log):
    return log.exists() and "is connected" in log.read_text()


@pytest.mark.slow
def test_a_run_stopped_by_a_user_says_so(federation, tmp_path):
    """As anybody who reaches the control API can do."""
    server = tmp_path / "d" / "server"
    federation.start("server", "site-00")
    wait_for(lambda: is_connected(server / "log.txt"), server)
    link = SuperLink(Federation.read(server / "federation.toml").address, tls(server))
    for number in link._client.ListRuns(ListRunsRequest()).run_dict:
        link._client.StopRun(StopRunRequest(run_id=number))
    link.close()
    wait_for(lambda: not federation.runs("server"), server)
    assert "was stopped by Flower's control API" in processes.last_log_lines(server, "server")


@pytest.mark.parametrize("ends", ["raises", "exits", "returns"])
def test_a_superlink_that_ends_ends_its_thread(tmp_path, monkeypatch, ends):
    """Which the server watches, and so exits with code 69: see above."""

    def flower():
        if ends == "raises":
            raise OSError("no space left")
        if ends == "exits":
            sys.exit(3)

    script = SimpleNamespace(load=lambda: flower)
    monkeypatch.setattr(program, "entry_points", lambda **_: (script,))
    monkeypatch.setattr(uvicorn, "run", uvicorn.run)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    log = tmp_path / program.LOG
    log.parent.mkdir()
    flwr = logging.getLogger("flwr")
    monkeypatch.setattr(flwr, "propagate", flwr.propagate)
    for handler in flwr.handlers:
        monkeypatch.setattr(handler, "stream", handler.stream)
    with program.superlink(tmp_path, 1000, []) as thread:
        thread.join(20)
        assert not thread.is_alive()
    assert ("OSError: no space left" in log.read_text()) == (ends == "raises")
