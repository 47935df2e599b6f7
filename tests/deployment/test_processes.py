"""Whose process it is: `down` ends what `up` started, whoever has got its number since."""

import errno
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.waiting import wait_for
from typer.testing import CliRunner

from fedpact.cli.deploy import _follow
from fedpact.cli.main import app
from fedpact.common.errors import DataError, FedpactError, InputError
from fedpact.common.files import only_one
from fedpact.deployment import local, processes
from fedpact.deployment.flower import program
from fedpact.deployment.processes import Process


@pytest.fixture
def stranger(deployment):
    """A process whose command names fedpact, a party's module and its directory; its number."""
    where = deployment / "sites" / "site-00"
    code = "import sys; print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, "fedpact.deployment.party", "site", str(where.resolve())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        yield process
        process.kill()


def recorded(deployment, process):
    entry = {"number": process.number, "started": process.started}
    (deployment / "processes.json").write_text(json.dumps({"site-00": entry}))


def test_a_stranger_that_has_the_number_by_now_is_left_alone(deployment, stranger):
    found = Process.of(stranger.pid)
    recorded(deployment, replace(found, started=found.started + "0"))
    assert local.inspect_deployment(deployment)["running"]["site-00"] is False
    assert local.stop(deployment) == []
    assert stranger.poll() is None


def test_a_process_whose_command_is_not_known_yet_is_waited_for(deployment, stranger, monkeypatch):
    """As the system starts a process it is without a command for an instant, and runs."""
    known, asked = processes._command, list[int]()

    def late(number):
        asked.append(number)
        return known(number) if len(asked) > 3 else ""

    monkeypatch.setattr(processes, "_command", late)
    recorded(deployment, Process.of(stranger.pid))
    assert local.inspect_deployment(deployment)["running"]["site-00"] is True
    # One that has ended never gets a command, and is not waited for.
    monkeypatch.setattr(processes.time, "sleep", None)
    monkeypatch.setattr(processes, "_command", lambda number: "")
    with subprocess.Popen([sys.executable, "-c", ""], stdin=subprocess.DEVNULL) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        assert Process.of(ended.pid).number == ended.pid


def test_a_process_for_another_directory_is_left_alone(deployment, stranger, tmp_path):
    recorded(deployment, Process.of(stranger.pid))
    # The deployment was moved, or copied with its records of processes.
    elsewhere = deployment.rename(tmp_path / "elsewhere")
    assert local.stop(elsewhere) == []
    assert stranger.poll() is None


def test_what_was_started_then_and_there_is_ended(deployment, stranger):
    recorded(deployment, Process.of(stranger.pid))
    assert local.inspect_deployment(deployment)["running"]["site-00"] is True
    assert local.stop(deployment) == ["site-00"]
    # 0 is what is told of a process that somebody else has waited for.
    assert stranger.wait() in (0, -signal.SIGTERM)
    assert json.loads((deployment / "processes.json").read_bytes()) == {}


@pytest.mark.parametrize("by", [".", "sites/site-00"])
@pytest.mark.parametrize("asked", [".", "sites/site-00"])
def test_party_is_found_and_stopped_started_alone_or_together(deployment, stranger, by, asked):
    recorded(deployment / by, Process.of(stranger.pid))
    assert local.inspect_deployment(deployment / "sites" / "site-01")["running"] == {
        "site-01": False
    }
    assert local.stop(deployment / "server") == []
    assert local.inspect_deployment(deployment / asked)["running"]["site-00"] is True
    # A start finds it as well, and starts no second one.
    assert local.start_parties(deployment / asked, "site-00") == {"site-00": stranger.pid}
    assert local.stop(deployment / asked) == ["site-00"]
    assert stranger.wait() in (0, -signal.SIGTERM)
    assert not any(local.inspect_deployment(deployment / asked)["running"].values())


def test_site_removed_from_the_federation_is_stopped_too(deployment, stranger):
    path = deployment / "server" / "federation.toml"
    before, _, after = path.read_text().partition('[sites."site-00"]')
    path.write_text(before + after[after.index("[sites.") :])
    assert "site-00" not in local.parties(deployment)
    recorded(deployment, Process.of(stranger.pid))
    assert local.inspect_deployment(deployment)["running"]["site-00"] is True
    # What is started or ended beside it does not forget it.
    assert local.stop(deployment, "site-01") == []
    assert "site-00" in json.loads((deployment / "processes.json").read_text())
    assert local.stop(deployment) == ["site-00"]
    assert stranger.wait() in (0, -signal.SIGTERM)
    assert (
        local.inspect_deployment(deployment)["running"].keys() == local.parties(deployment).keys()
    )


@pytest.mark.parametrize("elsewhere", [False, True])
def test_who_waits_is_told_when_no_site_is_left(monkeypatch, capsys, elsewhere):
    """The server waits for answers for minutes; of sites on other machines nobody here knows."""
    looked = []

    def look(directory):
        looked.append(directory)
        sites = {} if elsewhere else {"site-00": len(looked) < 2, "site-01": False}
        running = {"server": len(looked) < 4, **sites}
        ended = {name: "refused" for name, there in running.items() if not there}
        found = {"running": running, "ended": ended, "ledgers": dict.fromkeys(sites)}
        return {**found, "round": None, "status": "not ended"}

    monkeypatch.setattr(local, "inspect_deployment", look)
    monkeypatch.setattr("fedpact.cli.deploy._POLL_SECONDS", 0)
    why = "server ended before" if elsewhere else "every site has ended by itself, as said above"
    with pytest.raises(FedpactError, match=why):
        _follow(Path("fed"))
    assert len(looked) == (4 if elsewhere else 2)
    assert ("site-00 has ended: refused" in capsys.readouterr().out) != elsewhere


def test_a_signal_goes_to_what_was_looked_at(stranger):
    found, words = Process.of(stranger.pid), ["fedpact.deployment.party", "site"]
    found.send(signal.SIGKILL, words)  # not the last words of its command
    replace(found, started="another boot").send(signal.SIGKILL, ["site-00"])
    assert stranger.poll() is None
    stranger.kill()
    stranger.wait()
    found.send(signal.SIGKILL, [])  # nobody has the number: no error


@pytest.mark.parametrize("act", [local.start_parties, local.stop, local.inspect_deployment])
def test_a_mistyped_directory_is_told_and_nothing_is_made_there(tmp_path, act):
    (tmp_path / "empty").mkdir()
    for name in ("nowhere", "empty"):
        with pytest.raises(DataError, match="holds no deployment"):
            act(tmp_path / name)
    assert [*tmp_path.rglob("*")] == [tmp_path / "empty"]


def test_a_damaged_record_of_processes_is_told(deployment):
    (deployment / "processes.json").write_bytes(b"\xff{")
    with pytest.raises(DataError, match=r"processes\.json cannot be understood"):
        local.inspect_deployment(deployment)


def test_second_server_in_a_directory_is_refused(deployment, monkeypatch):
    """Before it touches anything of the first one's: its run, its database, its port."""
    server = deployment / "server"
    monkeypatch.setattr(processes, "_flower", None)
    before = sorted(server.rglob("*"))
    with (
        only_one(server / "lock", "the first"),
        pytest.raises(InputError, match="server has a server already"),
    ):
        processes.run_server(server, lambda record: None)
    assert sorted(server.rglob("*")) == sorted([*before, server / "lock"])


def test_a_port_that_somebody_has_is_told_with_where_it_stands(monkeypatch):
    monkeypatch.setattr(processes, "_PORT_SECONDS", 0.0)
    with processes.socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=rf"port {port} .* change port in site\.toml"):
            processes._wait_for_port("127.0.0.1", port, "port in site.toml")
    processes._wait_for_port("127.0.0.1", port, "port in site.toml")


def test_a_party_tells_a_missing_server_once(deployment, monkeypatch, caplog):
    """Its address does not resolve, or nobody listens there: it goes on trying, and says so."""
    tries = []

    def sleep(seconds):
        tries.append(seconds)
        if len(tries) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(processes.time, "sleep", sleep)
    for address in ("nowhere.invalid:1", "127.0.0.1:1"):
        caplog.clear()
        tries.clear()
        with pytest.raises(KeyboardInterrupt):
            processes._wait_for(address, processes._Teller(), None)
        (told,) = caplog.messages
        assert f"nobody answers at {address}, the server's address in federation.toml (" in told


def test_a_site_whose_run_has_ended_does_not_go_on_trying(monkeypatch, caplog):
    monkeypatch.setattr(processes.time, "sleep", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        processes._wait_for("127.0.0.1:1", processes._Teller(), "run r has ended")
    (told,) = caplog.messages
    assert told.startswith("run r has ended. ")
    assert "goes on trying" not in told


def test_logs_and_flowers_files_are_their_owners(deployment):
    """A party that ends at once has a log all the same: its policy is missing."""
    site = deployment / "sites" / "site-00"
    (site / "policy.toml").unlink()
    local.start_parties(deployment, "site-00")
    wait_for(lambda: not local.inspect_deployment(deployment)["running"]["site-00"], deployment)
    assert "policy.toml" in local.last_log_lines(deployment, "site-00")
    # Who has only been told "started" learns of it, and nobody else has run.
    told = CliRunner().invoke(app, ["deploy", "status", str(deployment)])
    words = local.last_log_lines(deployment, "site-00")
    assert f"site-00 has ended: {words}" in told.stdout
    assert told.stdout.count("has ended") == 1
    assert "Traceback" not in (site / "log.txt").read_text()
    home = processes._home(site)
    assert (site / "log.txt").stat().st_mode & 0o777 == 0o600
    assert home.stat().st_mode & 0o777 == 0o700


def test_a_supernode_whose_server_has_gone_is_started_anew(monkeypatch):
    """Left to itself it may never come back, and counts as there."""
    node = SimpleNamespace(poll=lambda: None)
    with processes.socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        alive = processes._Alive(node, f"127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr(processes, "_KNOCK_SECONDS", 60.0)
        assert alive()
        alive._next = 0.0
        assert alive()
    # Between two knocks nobody asks.
    assert alive()
    alive._next = 0.0
    assert not alive()
    node.poll = lambda: 1
    assert not processes._Alive(node, "nowhere.invalid:1")()


def test_a_network_that_fails_for_a_moment_ends_no_supernode():
    alive = processes._Alive(SimpleNamespace(poll=lambda: None), "nowhere.invalid:1")
    assert alive()


PROGRAM = """
import sys, threading
def other():
    thread = threading.Thread(target=threading.Event().wait)
    thread.start()
    {ends}
"""


@pytest.mark.parametrize(
    ("ends", "status"),
    [
        ("return", 0),
        ("raise SystemExit", 0),
        ("sys.exit(3)", 3),
        ("sys.exit('in words')", 1),
        ("raise KeyboardInterrupt", 1),
        ("raise OSError('TLS')", 1),
    ],
)
def test_a_program_of_flowers_ends_with_its_main_thread(tmp_path, ends, status):
    """As a SuperNode does at an error of TLS; by itself it stays, for its other thread's sake."""
    (tmp_path / "flowers.py").write_text(PROGRAM.format(ends=ends))
    metadata = tmp_path / "flowers-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: flowers\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[console_scripts]\nflower-x = flowers:other\n")
    command = [sys.executable, "-P", program.__file__, "flower-x", "--option"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    assert subprocess.run(command, env=environment, cwd="/", timeout=120).returncode == status


def test_a_site_that_waits_to_be_let_in_outlasts_a_full_disk(site_dir, monkeypatch, capsys):
    from fedpact.deployment.flower import site_process

    class Enough(Exception):
        pass

    came = iter([OSError(errno.ENOSPC, "No space left on device"), Enough()])

    def enter(site, directory):
        raise next(came)

    monkeypatch.setattr(site_process, "enter", enter)
    monkeypatch.setattr(processes, "_wait_for", lambda *_: None)
    monkeypatch.setattr(processes._Waits, "__call__", lambda _: None)
    monkeypatch.setattr(processes, "_prepare", lambda _: None)
    told = list[str]()
    monkeypatch.setattr(processes._Teller, "__call__", lambda _, words: told.append(words))
    with pytest.raises(Enough):
        processes.run_site(site_dir)
    assert told == [f"{site_dir} has no room (No space left on device): goes on when it has"]
