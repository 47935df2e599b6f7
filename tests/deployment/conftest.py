"""A deployment's files, made once; each test that changes something works on a copy."""

import functools
import json
import logging
import os
import re
import shutil
import socket
import sys
import warnings
from multiprocessing import get_context
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="the extra fedpact[deploy] is not installed")

from flwr.supercore.task_identity import TaskIdentity
from tests.deployment.grid import Clock, Run, allow, read_from

from fedpact.cli.main import main
from fedpact.deployment import federation, files, processes, server, site_records
from fedpact.deployment.files import write_deployment
from fedpact.deployment.flower import requests, transport
from fedpact.plan import Plan

# Of all records in each step ε has a closed form, and no search is needed for it.
PLAN = {"rounds": 5, "sites": 3, "sampling_rate": 1.0, "settings": {"local_steps": 2}}
PLAN["privacy"] = {"accountant": "rdp"}


_READ, _read = federation.read_plan, {}


def _once(path):
    """In place of read_plan, a twentieth of these tests: a plan of the same bytes is the same.

    One that names code of a test's own is read every time, as is one that was refused.
    """
    given = path.read_bytes() if path.is_file() else b""
    if not given or re.search(rb'"[\w.]+:\w+"', given):
        return _READ(path)
    if given not in _read:
        _read[given] = _READ(path)
    return _read[given]


for module in (files, server, site_records):
    module.read_plan = _once

federation.version = functools.cache(federation.version)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Forked(get_context("fork").Process):
    """A command as a process of its own that need not load torch again; its output is a log's."""

    def __init__(self, work, log, *arguments, **environment):
        super().__init__()
        self.work, self.log, self.arguments, self.environment = work, log, arguments, environment
        log.touch()
        with warnings.catch_warnings(action="ignore"):  # of a process that has threads
            self.start()

    def run(self):
        os.setsid()
        processes.die_with_parent()
        with self.log.open("ab") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1, closefd=False)
        # These are the tests'.
        logging.getLogger().handlers.clear()
        warnings.simplefilter("ignore")
        os.environ.update(self.environment)
        sys.argv = ["fedpact", *self.arguments]
        self.work()

    def poll(self):
        return self.exitcode

    wait = get_context("fork").Process.join


@pytest.fixture
def forked(monkeypatch):
    """The parties that `processes.Parties` starts are forked, all but a second site."""
    started = processes._spawn

    def spawn(name, where):
        if name == "site-01":
            # As owners start it: nothing is loaded, no thread was set, no library was in use.
            return started(name, where)
        kind = "server" if name == processes.SERVER else "site"
        return Forked(main, where / "log.txt", "deploy", kind, str(where), NO_COLOR="1")

    monkeypatch.setattr(processes, "_spawn", spawn)


@pytest.fixture
def clock(monkeypatch):
    """Time passes where the server waits, and nowhere else."""
    found = Clock()
    for module in (transport, requests):
        monkeypatch.setattr(module, "time", found)
    return found


@pytest.fixture(scope="session")
def make(tmp_path_factory):
    """make(directory, choices, **plan) writes a deployment whose server has a port of its own.

    For a plan that was asked for before it is a copy, keys and port too, as one runs at a time.
    """
    found = {}

    def new_deployment(directory, choices=None, **plan):
        key = json.dumps([choices, plan], sort_keys=True, default=repr)
        if key not in found:
            found[key] = tmp_path_factory.mktemp("made") / "d"
            chosen = {"port": free_port(), **(choices or {})}
            write_deployment(found[key], Plan.parse({**PLAN, **plan}), **chosen)
            for path in found[key].glob("sites/*/policy.toml"):
                # Tests change plans and federations; test_approval.py is of approvals.
                path.write_text(path.read_text().replace("approvals = 1", "approvals = 0"))
        return Path(shutil.copytree(found[key], directory))

    return new_deployment


@pytest.fixture(scope="session")
def written(make, tmp_path_factory):
    """Secure draws, as a deployment's default is."""
    return make(tmp_path_factory.mktemp("deploy") / "secure")


@pytest.fixture
def deployment(written, tmp_path):
    return Path(shutil.copytree(written, tmp_path / "deployment"))


@pytest.fixture
def site_dir(deployment):
    return deployment / "sites" / "site-00"


@pytest.fixture
def in_memory(monkeypatch):
    """Rounds in memory are over before the next look at who is there would be due."""
    monkeypatch.setattr(transport, "_NODES_SECONDS", 0.0)


@pytest.fixture(autouse=True)
def identity():
    """Flower's messages ask for one, whichever test comes first."""
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1


@pytest.fixture(scope="module")
def ended(make, tmp_path_factory):
    """ended(choices, **plan) -> grid.Run that is over, one for all who ask alike and only look."""
    found = {}

    def new(choices=None, **plan):
        key = repr((choices, plan))
        if key not in found:
            run = found[key] = Run(make(tmp_path_factory.mktemp("ended") / "d", choices, **plan))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(transport, "_NODES_SECONDS", 0.0)
                for module in (transport, requests):
                    patch.setattr(module, "time", Clock())
                run()
        return found[key]

    yield new
    for run in found.values():
        for node in run.nodes:
            node.site.close()


@pytest.fixture
def federate(make, tmp_path, in_memory):
    """federate(choices, name, table, **plan) -> grid.Run, whose ledgers are closed in the end.

    table: what its sites read their records from, if nothing was made up for them.
    """
    made = []

    def new(choices, name="d", table=None, **plan):
        directory = make(tmp_path / name, choices, **plan)
        if table is not None:
            read_from(table, *(directory / "sites").iterdir())
        if plan.get("privacy", {}).get("honest"):
            allow(directory)
        made.append(Run(directory))
        return made[-1]

    yield new
    for run in made:
        for node in run.nodes:
            node.site.close()
