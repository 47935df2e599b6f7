"""SIGKILL at random instants of a run: ledgers re-open, nothing released is uncharged, and the run
goes on to the same end within every budget."""

import os
import random
import signal
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
    "rounds": 5,
    "sites": 3,
    "algorithm": "fedavg",
    "settings": {"local_steps": 2},
    "privacy": {"accountant": "rdp"},
    "run": {"evaluate_every": 5, "workers": 2},
}


def run(folder, kill_after=None):
    """Run the plan in a fork, which need not load torch again; return how long it lived."""
    started, child = time.monotonic(), os.fork()
    if child == 0:
        try:
            simulate(Plan.parse(PLAN), folder)
        finally:
            os._exit(0)
    if kill_after is not None:
        time.sleep(kill_after)
        # One that has ended is there until it is waited for.
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return time.monotonic() - started


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
        spent = [e["spent"] for r in receipt(path)["runs"].values() for e in r["events"]]
        assert sum(spent) >= 2 * committed


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


@pytest.mark.filterwarnings("ignore:.*fork")  # what a process with threads is told
@pytest.mark.parametrize("times", [3, pytest.param(200, marks=pytest.mark.slow)])
def test_kills_at_random_instants(tmp_path, times):
    whole = tmp_path / "whole"
    lives = [run(tmp_path / "warm"), run(whole)]
    expected = load_file(whole / "model.safetensors")
    choose = random.Random(int.from_bytes(os.urandom(4)))
    unfinished = 0
    for number in range(times):
        folder = tmp_path / f"run-{number}"
        run(folder, kill_after=choose.uniform(0, min(lives)))
        unfinished += not (folder / "summary.json").exists()
        check_after_kill(folder)
        result = simulate(Plan.parse(PLAN), Path(folder))
        assert result.summary["status"] in ("finished", "budget")
        for path in folder.rglob("ledger.jsonl"):
            for promised in receipt(path)["runs"].values():
                assert promised["epsilon_spent"] <= promised["epsilon_reserved"] <= 2.0
        if result.summary["status"] == "finished" and not any(r.refused for r in result.records):
            for name, value in load_file(folder / "model.safetensors").items():
                assert torch.equal(value, expected[name])
    # The instants have to fall into the run, else nothing was tried.
    assert unfinished >= times // 3
