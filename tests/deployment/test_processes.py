"""The parties' processes, and Flower's beside them: started, watched and ended."""

import errno
import json
import ssl
import subprocess
import sys
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from fedpact.cli.commands.deploy import _follow
from fedpact.cli.main import app
from fedpact.common.errors import DataError, FedpactError, InputError
from fedpact.common.files import only_one
from fedpact.deployment import processes
from fedpact.deployment.federation import Federation
from fedpact.deployment.flower import program
from fedpact.deployment.flower.internals import SuperLink
from fedpact.deployment.flower.program import is_held
from fedpact.deployment.site import Site
from fedpact.deployment.snapshot import inspect_deployment

PARTY = """
import fcntl, signal, sys
IGNORES
file = open(sys.argv[1], "a")
fcntl.flock(file, fcntl.LOCK_EX)
signal.pause()
"""


def spawner(ignores=""):
    """Starts what is a party's process as far as who looks can tell."""

    def spawn(name, where):
        code = [sys.executable, "-c", PARTY.replace("IGNORES", ignores), str(where / "lock")]
        process = subprocess.Popen(code, start_new_session=True)
        while not is_held(where):
            assert process.poll() is None
        return process

    return spawn


def test_parties_end_with_the_block_that_started_them(deployment, monkeypatch):
    monkeypatch.setattr(processes, "_spawn", spawner())
    with processes.Parties(deployment) as here:
        numbers = here.start("site-00")
        assert here.start() == {**numbers, **here.start()}
        # Whoever looks sees it, whoever has started it; of the whole, and of one party.
        assert all(inspect_deployment(deployment)["running"].values())
        site = deployment / "sites" / "site-00"
        assert inspect_deployment(site)["running"] == {"site-00": True}
        here.stop("site-00")
        assert inspect_deployment(deployment)["running"]["site-00"] is False
        assert here.runs("site-01")
    assert not any(inspect_deployment(deployment)["running"].values())


def test_a_party_that_stays_is_killed(deployment, monkeypatch):
    monkeypatch.setattr(processes, "_spawn", spawner("signal.signal(15, signal.SIG_IGN)"))
    monkeypatch.setattr(processes, "_GRACE_SECONDS", 0.1)
    with processes.Parties(deployment) as here:
        here.start("site-00")
    assert inspect_deployment(deployment)["running"]["site-00"] is False


def test_waiting_ends_when_no_site_is_left(deployment, monkeypatch, capsys):
    """The server waits for answers for minutes."""
    looked = []

    def runs(name):
        looked.append(name)
        return name == "server" or (name == "site-00" and len(looked) < 5)

    monkeypatch.setattr("fedpact.cli.commands.deploy._POLL_SECONDS", 0)
    (deployment / "sites" / "site-00" / "log.txt").write_text("refused\n")
    with pytest.raises(FedpactError, match="every site has stopped, for the reasons above"):
        _follow(deployment, SimpleNamespace(runs=runs, exit_code=lambda name: 2))
    told = capsys.readouterr().out
    assert "site-00 has ended with code 2" in told
    assert "its last line: refused" in told
    killed = SimpleNamespace(runs=lambda name: name != "server", exit_code=lambda name: -9)
    with pytest.raises(FedpactError, match="the server was killed by SIGKILL"):
        _follow(deployment, killed)


@pytest.mark.parametrize(
    ("code", "words"),
    [(-9, "memory"), (-15, "SIGTERM"), (143, "SIGTERM"), (2, "mend"), (69, "Flower"), (1, "log")],
)
def test_the_end_of_a_process_is_told_by_its_code(code, words):
    assert words in processes.describe_end(code)


@pytest.mark.parametrize("act", [processes.Parties, inspect_deployment])
def test_a_mistyped_directory_is_reported_and_not_created(tmp_path, act):
    (tmp_path / "empty").mkdir()
    for name in ("nowhere", "empty"):
        with pytest.raises(DataError, match="has no deployment"):
            act(tmp_path / name)
    assert [*tmp_path.rglob("*")] == [tmp_path / "empty"]


def test_second_server_in_a_directory_is_refused(deployment, monkeypatch):
    """Before it touches anything of the first one's: its run, its database, its port."""
    server = deployment / "server"
    monkeypatch.setattr(program, "superlink", None)
    monkeypatch.setattr(processes, "_LOCK_SECONDS", 0.01)
    before = sorted(server.rglob("*"))
    with (
        only_one(server / "lock", "the first"),
        pytest.raises(InputError, match="server is in use already"),
    ):
        processes.run_server(server, lambda record: None)
    assert sorted(server.rglob("*")) == sorted([*before, server / "lock"])


def test_a_party_starts_while_somebody_tests_its_lock(deployment, monkeypatch):
    """And while a server that was just killed has its port: else it would be left stopped."""
    server = deployment / "server"
    address = Federation.read(server / "federation.toml").address
    port, held = processes.socket.socket(), ExitStack()
    held.enter_context(only_one(server / "lock", "a health check"))
    port.bind(("127.0.0.1", int(address.rpartition(":")[2])))
    port.listen()
    ends = [held.close, lambda: None, port.close]
    monkeypatch.setattr(processes.time, "sleep", lambda _: ends.pop(0)() if ends else None)
    monkeypatch.setattr(program, "superlink", lambda *_: pytest.skip("it starts"))
    with pytest.raises(pytest.skip.Exception, match="it starts"):
        processes.run_server(server, lambda record: None)
    assert not ends


def test_a_full_disk_is_named_by_the_party_that_is_on_it(tmp_path):
    with (
        pytest.raises(FedpactError, match=f"^a file in {tmp_path} .*No space left on device"),
        processes._file_errors(tmp_path),
        open("/dev/full", "wb", buffering=0) as full,
    ):
        full.write(b"a round")


def test_a_used_port_error_names_the_setting():
    with processes.socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=rf"port {port} .* change address in federation\.toml"):
            processes._check_port("127.0.0.1", port)


def test_parties_use_no_proxy_of_the_environment(monkeypatch, caplog):
    """A server would not reach itself by one, and SOCKS needs a package that nobody has."""
    caplog.set_level("INFO", "fedpact")
    monkeypatch.setenv("no_proxy", "")
    with processes.socket.create_server(("127.0.0.1", 0)) as proxy:
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{proxy.getsockname()[1]}")
        monkeypatch.setenv("all_proxy", "socks5://127.0.0.1:9")
        processes._prepare(reproducible=False)
        with pytest.raises(FedpactError, match="no SuperLink answers"):
            SuperLink("127.0.0.1:9", ssl.create_default_context()).wait(0.0)
        proxy.setblocking(False)
        with pytest.raises(BlockingIOError):
            proxy.accept()


def test_a_party_prints_epsilon_in_every_locale(monkeypatch):
    for name, value in {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}.items():
        monkeypatch.setenv(name, value)
    code = "from fedpact.cli import main; main.app = lambda: print(chr(0x3B5)); main.main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert (done.stdout, done.stderr) == (b"\\u03b5\n", b"")


@pytest.mark.parametrize("ending", [None, "run r has ended"])
def test_a_site_reports_a_missing_server_once(site_dir, monkeypatch, caplog, ending):
    """It goes on trying, and says so; after the end of the run this is as expected."""
    tries = []

    def sleep(seconds):
        tries.append(seconds)
        if len(tries) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(processes.time, "sleep", sleep)
    monkeypatch.setattr(processes, "_prepare", lambda _: None)
    monkeypatch.setattr(Site, "ending", ending)
    address = Federation.read(site_dir / "federation.toml").address
    with pytest.raises(KeyboardInterrupt):
        processes.run_site(site_dir)
    (told,) = [one.getMessage() for one in caplog.records if one.name == "fedpact.party"]
    missing = f"no answer at {address}, the server's address in federation.toml ("
    assert told.startswith(f"{ending}. The server has gone, as expected" if ending else missing)


@pytest.mark.usefixtures("forked")
def test_a_party_that_ends_at_once_has_a_log(deployment):
    """Its policy is missing."""
    site = deployment / "sites" / "site-00"
    (site / "policy.toml").unlink()
    with processes.Parties(deployment) as here:
        here.start("site-00")
        here._children["site-00"].wait()
    assert processes.last_log_lines(deployment, "site-00").startswith("fedpact: policy ")
    # Who has only been told "started" learns of it, and nobody else has run.
    told = CliRunner().invoke(app, ["deploy", "status", str(deployment)])
    words = processes.last_log_lines(deployment, "site-00")
    assert f"site-00 has ended: {words}" in told.stdout
    assert told.stdout.count("has ended") == 1
    assert "Traceback" not in (site / "log.txt").read_text()


def test_status_shows_the_last_rounds_figures(federate):
    run = federate({}, rounds=1)
    run()
    told = CliRunner().invoke(app, ["deploy", "status", str(run.directory)])
    last = json.loads((run.directory / "server/run/rounds.jsonl").read_text().splitlines()[-1])
    assert f"round 1 of 1, accuracy {last['accuracy']:.4g} on public test data" in told.stdout


def test_a_site_that_waits_to_be_let_in_outlasts_a_full_disk(site_dir, monkeypatch, caplog):
    from fedpact.deployment.flower import site_process

    class Enough(Exception):
        pass

    came = iter([OSError(errno.ENOSPC, "No space left on device"), Enough()])

    def work(*_):
        raise next(came)

    monkeypatch.setattr(site_process, "work", work)
    monkeypatch.setattr(processes, "_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(processes, "_prepare", lambda _: None)
    with pytest.raises(Enough):
        processes.run_site(site_dir)
    (told,) = [one.getMessage() for one in caplog.records if one.name == "fedpact.party"]
    assert told == (f"no space for {site_dir} (No space left on device): waiting for space")
