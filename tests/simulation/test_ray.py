"""Engine "ray": the bits, ledgers and memories of the local engine, and an orderly end.

Starting Ray takes nearly all of the time, so one run does it.
"""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.recounted import timeless

from fedpact.common.errors import FedpactError, InputError, LedgerError, PlanError
from fedpact.common.messages import Reply, Task, to_bytes
from fedpact.common.run_folder import Folder
from fedpact.plan import Plan
from fedpact.privacy.oracle import Records
from fedpact.simulation import machine
from fedpact.simulation.simulate import simulate
from fedpact.simulation.threads import VirtualSite
from fedpact.simulation.workshop import TrainingSetup

WITHOUT = "the extra fedpact[ray] is not installed"
# SCAFFOLD keeps a control variate at the site, topk what it left out: both are memory on disk.
PLAN = {
    "algorithm": "scaffold",
    "rounds": 8,
    "sites": 3,
    "settings": {"local_steps": 2, "learning_rate": 0.5},
    "privacy": {"accountant": "rdp"},
    "compression": {"kind": "topk"},
    "run": {"workers": 2, "evaluate_every": 1},
}
SITES = ("site-00", "site-01", "site-02")
# A command; it raises SystemExit.
COMMANDS = """
import json, sys
from fedpact.cli.main import main
sys.argv = ["fedpact", *json.loads(sys.argv[1])]
try:
    main()
except SystemExit as end:
    # 130: Ctrl-C cut it short.
    if end.code not in (None, 0, 130):
        raise
    print("ended with", end.code)
"""
MARK = "FEDPACT_RAY_TEST"
SECONDS = 200  # far beyond what it takes: machines are shared


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One run, ended locally, and a copy of it from before its first round."""
    home = tmp_path_factory.mktemp("ray")
    simulate(Plan.parse(PLAN), home / "local", stop=lambda: True)
    shutil.copytree(home / "local", home / "ray")
    simulate(Plan.parse(PLAN), home / "local")
    return home


@pytest.fixture(scope="module")
def marked(tmp_path_factory):
    """The environment of a process whose offspring can be told; none of them is left behind."""
    mark = str(tmp_path_factory.mktemp("mark"))
    variables = {**os.environ, MARK: mark, "OMP_NUM_THREADS": "1"}
    variables.pop("RAY_ADDRESS", None)
    yield variables
    end = time.monotonic() + 120  # they have been told to end: far beyond what that takes
    while (left := marked_processes(f"{MARK}={mark}")) and time.monotonic() < end:
        time.sleep(0.1)
    for number in left:
        os.kill(number, signal.SIGKILL)
    assert not left, "processes were left behind"


def marked_processes(mark):
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            variables = (path / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if mark.encode() in variables:
            found.append(int(path.name))
    return found


def check_that_it_is_the_same_run(one, other):
    for name in ("model.safetensors", "state.safetensors"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    records = [Folder(path).restore()[1] for path in (one, other)]
    for a, b in zip(*records, strict=True):
        assert {**vars(a), "seconds": 0} == {**vars(b), "seconds": 0}
    # A model that never moved would be equal, too.
    assert records[0][-1].accuracy > records[0][0].accuracy
    for site in SITES:
        ledgers = [timeless(path / "sites" / site / "ledger.jsonl") for path in (one, other)]
        assert ledgers[0] == ledgers[1]
        kinds = [entry["kind"] for entry in ledgers[0]]
        assert kinds == ["open", "reserve"] + ["charge"] * PLAN["rounds"]
        files = [path / "sites" / site / "memory.safetensors" for path in (one, other)]
        assert files[0].read_bytes() == files[1].read_bytes(), site


@pytest.fixture(scope="module")
def on_ray(runs, marked):
    """What was printed of the run, on Ray until Ctrl-C."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip(WITHOUT)
    words = ["resume", str(runs / "ray"), "--engine", "ray"]
    with subprocess.Popen(
        [sys.executable, "-c", COMMANDS, json.dumps(words)],
        env=marked,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        told, pressed = [], False
        for line in process.stdout:
            told.append(line)
            # As a terminal does: to the whole group, actors included. Twice would end it at once.
            if line.startswith("round 2/") and not pressed:
                pressed = True
                os.killpg(process.pid, signal.SIGINT)
        assert process.wait(SECONDS) == 0, "".join(told)
    assert next(line for line in told if line.startswith("ended with")).split()[-1] == "130"
    return "".join(told)


@pytest.mark.slow
def test_run_begun_on_ray_and_resumed_on_threads_is_one_run(runs, on_ray):
    stopped = json.loads((runs / "ray" / "summary.json").read_text())
    assert stopped["status"] == "stopped", on_ray
    rounds = stopped["rounds"]
    assert rounds >= 2
    for site in SITES:
        here = timeless(runs / "ray" / "sites" / site / "ledger.jsonl")
        assert here == timeless(runs / "local" / "sites" / site / "ledger.jsonl")[: 2 + rounds]
    simulate(Plan.parse(PLAN), runs / "ray")
    check_that_it_is_the_same_run(runs / "local", runs / "ray")


# ---------------------------------------------------------------- inside an actor, without Ray


@pytest.fixture
def site(tmp_path):
    """A site of a plain run with two records."""
    pytest.importorskip("ray", reason=WITHOUT)
    plan = Plan.parse({"privacy": {"mode": "none"}, "sites": 1, "model": "logistic"})
    records = Records(torch.eye(2), torch.tensor([0, 1]))
    return VirtualSite("site-00", plan, "a-run", records, tmp_path / "memory")


TASK = Task("a-run", 1, "fedavg", {"w": torch.zeros(6)}, {})


class Handle:
    """An actor of this process, as a handle of Ray's."""

    def __init__(self, site):
        from fedpact.simulation.ray import Actor

        self.handle, self.site = self, site
        self.actor = Actor(TrainingSetup(site.plan, torch.zeros(2), 2))

    def remote(self, site, task):
        return lambda: self.actor.handle(site, task)


def asked(site, monkeypatch):
    """What the transport returns of a site's answer, and its charges."""
    from ray.exceptions import RayTaskError

    from fedpact.simulation import ray

    def get(call):
        try:
            return call()
        except Exception as error:
            raise RayTaskError("handle", "Traceback", error) from error

    monkeypatch.setattr(ray.ray, "get", get)
    spent = {}
    return ray._RemoteClient(site.name, site, spent).handle(TASK, Handle(site)), spent


def test_an_actor_answers_as_the_client_does(site, monkeypatch):
    answer, spent = asked(site, monkeypatch)
    assert isinstance(answer, Reply)
    here = site.client(None).handle(TASK, TrainingSetup(site.plan, torch.zeros(2), 2).bench())
    assert to_bytes(here) == to_bytes(answer)
    assert spent == {site.name: {}}


def test_an_error_of_ours_keeps_its_kind_on_the_way(site, tmp_path, monkeypatch):
    (tmp_path / "ledger").write_text("this is no ledger\nat all\n")
    with pytest.raises(LedgerError, match="unreadable or was altered"):
        asked(replace(site, ledger=tmp_path / "ledger"), monkeypatch)


def test_any_other_error_says_what_it_was_and_where(site, monkeypatch):
    with pytest.raises(FedpactError, match="'site-00' failed at its actor: AttributeError"):
        asked(replace(site, records=None), monkeypatch)


# ---------------------------------------------------------------- refused, and nothing written


def refuse(tmp_path, engine, **settings):
    try:
        simulate(Plan.parse({**PLAN, "run": settings}), tmp_path / "run", engine=engine)
    finally:
        assert not (tmp_path / "run").exists()


def test_an_unknown_engine_is_refused(tmp_path):
    with pytest.raises(InputError, match="engine is 'spark': expected local"):
        refuse(tmp_path, "spark")


def test_without_the_extra_its_name_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'fedpact\[ray\]'"):
        refuse(tmp_path, "ray")


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(machine, "find_spec", lambda name: object())
    for name in (*machine.QUIET, "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)


def test_actions_that_an_actor_cannot_do_are_refused(tmp_path, installed):
    with pytest.raises(PlanError, match='engine "ray" trains on cores'):
        refuse(tmp_path, "ray", device="cuda")
    assert {name: os.environ[name] for name in machine.QUIET} == machine.QUIET


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:10001", "nonsense"])
def test_an_address_without_a_cluster_is_refused_at_once(tmp_path, installed, monkeypatch, address):
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(InputError, match="no cluster answers"):
        refuse(tmp_path, "ray")
