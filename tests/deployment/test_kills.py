"""A site is killed at each write of a round: it goes on, and no release is made twice."""

import os
import shutil
import sqlite3
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.deployment.grid import stored
from tests.deployment.test_site import charged, task_of

from fedpact.common.messages import Reply, from_bytes, to_bytes
from fedpact.deployment.site import Site, answer

# Before each of these a process may die: what the disk has then is what a restart finds.
WRITES = [(os, "fsync"), (Path, "replace"), (Path, "unlink")]


def ask(site, number):
    said = site.plan.method.task(site.plan.method.init(torch.zeros(650)))
    changes = {"vectors": said.vectors, "numbers": said.numbers}
    return answer(site, to_bytes(task_of(site, number, number - 1, **changes)))[0]


def die_at(k):
    """End this process at the k-th write from now on."""
    left = [k]

    def counted(real):
        def operation(*arguments, **options):
            left[0] -= 1
            if left[0] < 0:
                os._exit(9)
            return real(*arguments, **options)

        return operation

    for owner, name in WRITES:
        setattr(owner, name, counted(getattr(owner, name)))
    # Within a statement, a commit too, SQLite's own tests kill it.
    execute = counted(sqlite3.Connection.execute)
    factory = type("Counted", (sqlite3.Connection,), {"execute": lambda *args: execute(*args)})
    sqlite3.connect = partial(sqlite3.connect, factory=factory)


def killed(directory, k):
    """Have a process open the site and answer round 2, and die at its k-th write.

    Returns what it has released, b"" for nothing, and whether it came to its end.
    """
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            die_at(k)
            with Site(directory) as site:
                os.write(into, ask(site, 2))
        finally:
            os._exit(0)
    os.close(into)
    with open(out, "rb") as file:
        released = file.read()
    _, status = os.waitpid(child, 0)
    return released, os.waitstatus_to_exitcode(status) == 0


@pytest.mark.filterwarnings("ignore:.*fork")  # what a process with threads is told
def test_a_site_killed_at_any_write_resumes(make, tmp_path):
    """It charges twice in a round, and remembers what was not sent."""
    plan = {
        "algorithm": "fedproxvr",
        "settings": {"local_steps": 1},
        "compression": {"kind": "topk"},
    }
    home = make(tmp_path / "d", **plan) / "sites" / "site-00"
    with Site(home) as site:
        assert isinstance(from_bytes(ask(site, 1)), Reply)
    assert stored(home, f"{site.run}/memory")
    each = charged(home)
    for k in range(80):
        directory = Path(shutil.copytree(home, tmp_path / str(k)))
        released, ended = killed(directory, k)
        with Site(directory) as site:
            again = ask(site, 2)
            assert isinstance(from_bytes(again), Reply)
            # The same question has the same answer, whoever gave it.
            assert ask(site, 2) == again
            assert released in ([again] if ended else [b"", again])
            assert isinstance(from_bytes(ask(site, 3)), Reply)
        assert 3 * each <= charged(directory) <= 4 * each
        shutil.rmtree(directory)
        if ended:
            break
    assert 10 <= k < 79
