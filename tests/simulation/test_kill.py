"""SIGKILL at random instants of a run: ledgers re-open, nothing released is uncharged, and the run
goes on to the same end within every budget."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fedpact.common import run_folder as folders
from fedpact.common.errors import PlanError
from fedpact.common.run_folder import Folder
from fedpact.plan import Plan
from fedpact.privacy.ledger.ledger import Ledger
from fedpact.privacy.ledger.receipt import receipt
from fedpact.simulation.simulate import simulate

PLAN = {
    "rounds": 12,
    "sites": 3,
    "algorithm": "fedavg",
    "settings": {"local_steps": 2},
    "run": {"evaluate_every": 12, "workers": 2},
}

# It loads everything once and forks for each run, so that a run takes a fraction of a second.
SERVER = """
import gc, json, os, sys
from pathlib import Path
import dp_accounting.pld
from fedpact.simulation.simulate import simulate
from fedpact.plan import Plan
gc.freeze()
for line in sys.stdin:
    plan, folder = json.loads(line)
    child = os.fork()
    if child == 0:
        simulate(Plan.parse(plan), Path(folder))
        os._exit(0)
    print(child, flush=True)
    os.waitpid(child, 0)
    print("ended", flush=True)
"""


class Runner:
    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def __call__(self, folder, kill_after=None):
        """Run the plan in a process of its own; return how long it lived."""
        self.process.stdin.write(json.dumps([PLAN, str(folder)]) + "\n")
        self.process.stdin.flush()
        child = int(self.process.stdout.readline())
        started = time.monotonic()
        if kill_after is not None:
            time.sleep(kill_after)
            # A run may be quicker than those that the delay was drawn from.
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        assert self.process.stdout.readline() == "ended\n"
        return time.monotonic() - started


@pytest.fixture(scope="module")
def runner():
    running = Runner()
    yield running
    running.process.stdin.close()
    running.process.stdout.close()
    running.process.wait()


def check_after_kill(folder):
    """What holds at every instant: each ledger opens and covers every round that was committed."""
    committed = 0
    if (folder / "state.safetensors").exists():
        committed = Folder(folder).restore()[0].round
    for path in folder.rglob("ledger.jsonl"):
        # Killed before the first line was whole, nothing was promised, let alone released.
        if b"\n" not in path.read_bytes():
            assert committed == 0
            continue
        with Ledger(path, path.parent.name, hypothetical=True):
            pass
        spent = [e["spent"] for run in receipt(path)["runs"].values() for e in run["events"]]
        assert sum(spent) >= 2 * committed


def kill_often(runner, tmp_path, times, seed):
    whole = tmp_path / "whole"
    lives = [runner(tmp_path / "warm"), runner(whole)]
    expected = load_file(whole / "model.safetensors")
    choose = random.Random(seed)
    unfinished = 0
    for number in range(times):
        folder = tmp_path / f"run-{number}"
        runner(folder, kill_after=choose.uniform(0, min(lives)))
        unfinished += not (folder / "summary.json").exists()
        check_after_kill(folder)
        result = simulate(Plan.parse(PLAN), Path(folder))
        assert result.summary["status"] in ("finished", "budget")
        for path in folder.rglob("ledger.jsonl"):
            for run in receipt(path)["runs"].values():
                assert run["epsilon_spent"] <= run["epsilon_reserved"] == 2.0
        if result.summary["status"] == "finished" and not any(r.refused for r in result.records):
            for name, value in load_file(folder / "model.safetensors").items():
                assert torch.equal(value, expected[name])
    # The instants have to fall into the run, else nothing was tried.
    assert unfinished >= times // 3


@pytest.mark.parametrize("write", range(4))
def test_an_interrupted_start_begins_again(tmp_path, monkeypatch, write):
    calls, whole = [], folders.write_whole

    def cut_off(path, *parts, private):
        content = b"".join(parts)
        calls.append(path.name)
        if len(calls) > write:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_name(path.name + ".partial").write_bytes(content[: len(content) // 2])
            raise KeyboardInterrupt
        whole(path, content, private=private)

    with monkeypatch.context() as patched:
        patched.setattr(folders, "write_whole", cut_off)
        with pytest.raises(KeyboardInterrupt):
            simulate(Plan.parse(PLAN), tmp_path / "run")
    # The plan, the environment, the statement, then the state.
    expected = ["plan.json", "environment.json", "privacy.json", "state.safetensors"]
    assert calls == expected[: write + 1]
    result = simulate(Plan.parse(PLAN), tmp_path / "run")
    assert result.summary["status"] in ("finished", "budget")


def test_another_programs_folder_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(
        PlanError, match=r"holds notes\.txt but no plan\.json, so it is not a run: choose"
    ):
        simulate(Plan.parse(PLAN), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def test_three_kills(runner, tmp_path):
    kill_often(runner, tmp_path, 3, seed=int.from_bytes(os.urandom(4)))


@pytest.mark.slow
def test_two_hundred_kills(runner, tmp_path):
    kill_often(runner, tmp_path, 200, seed=int.from_bytes(os.urandom(4)))
