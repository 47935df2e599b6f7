"""Processes side by side: what fails is told, what goes on goes on. The processes are stand-ins."""

import io
import json
import math
import os
import sys
from pathlib import Path

import pytest

from fedpact.common.messages import RoundRecord
from fedpact.plan import Plan
from fedpact.studies import pool, worker
from fedpact.studies.pool import Job, RunProgress, run_jobs

# Acts on the name of the job's folder; two rounds where nothing else is asked.
WORKER = """
import json, os, signal, sys, time
asked = json.load(sys.stdin)
what = asked["folder"].split("/")[-2]
stopped = []
signal.signal(signal.SIGINT, lambda *_: stopped.append(1))
def say(**line): print(json.dumps(line), flush=True)
for r in range(asked["plan"]["rounds"]):
    say(round=r, accuracy=None if r else 0.25)
    if what == "slow":
        for _ in range(12000):
            if stopped: sys.exit(0)
            time.sleep(0.05)
        sys.exit(5)
    if what == "deaf":
        time.sleep(600)
if what.startswith("meets"):
    places = [os.path.join(os.path.dirname(os.path.dirname(asked["folder"])), x) for x in "12"]
    open(places[what == "meets2"], "w").close()
    until = time.monotonic() + 600
    while not all(map(os.path.exists, places)):
        if time.monotonic() > until: sys.exit(4)
        time.sleep(0.02)
if what == "refuses":
    say(error="the paragraph"); sys.exit(2)
if what == "crashes":
    print("noise", file=sys.stderr); raise RuntimeError("a bug")
if what == "dies":
    print('{"round"', end="", flush=True); os.kill(os.getpid(), signal.SIGKILL)
if what == "silent":
    sys.exit(3)
if what == "floods":
    sys.stderr.write("x" * 1_000_000)
"""


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_WORKER", [sys.executable, "-c", WORKER])


def jobs(folder: Path, *names: str) -> list[Job]:
    plan = Plan(rounds=2)
    return [Job(name, seed, plan, folder / name / f"s{seed}") for seed, name in enumerate(names)]


def never() -> bool:
    return False


def test_every_job_ends_once_and_its_rounds_come_in_order(tmp_path: Path) -> None:
    news: list[RunProgress] = []
    wanted = jobs(tmp_path, *"abcde")
    assert run_jobs(wanted, 2, news.append, never) == {}
    for job in wanted:
        mine = [n for n in news if n.job is job]
        assert [(n.round, n.accuracy, n.ended) for n in mine] == [
            (0, 0.25, False),
            (1, None, False),
            (0, None, True),
        ]
        assert all(n.failed is None for n in mine)


def test_no_more_jobs_at_a_time_than_asked_for(tmp_path: Path) -> None:
    under_way: set[Job] = set()
    most = 0

    def watch(news: RunProgress) -> None:
        nonlocal most
        (under_way.discard if news.ended else under_way.add)(news.job)
        most = max(most, len(under_way))

    run_jobs(jobs(tmp_path, *"abcdef"), 1, watch, never)
    # The news of an end may come together with the next one's first round, never after it.
    assert most == 1


def test_as_many_jobs_as_asked_for_are_under_way_at_once(tmp_path: Path) -> None:
    # Each waits for the other before it ends: one after the other, neither would.
    assert run_jobs(jobs(tmp_path, "meets1", "meets2"), 2, lambda _: None, never) == {}


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("refuses", "the paragraph"),
        ("crashes", "the process ended with code 1: RuntimeError: a bug; see "),
        ("dies", "the process was ended by signal 9, as it is where memory runs out; see "),
        ("silent", "the process ended with code 3: it printed nothing; see "),
    ],
)
def test_a_failure_is_explained_and_the_others_go_on(tmp_path: Path, name: str, told: str) -> None:
    news: list[RunProgress] = []
    failed = run_jobs(jobs(tmp_path, "a", name, "b"), 3, news.append, never)
    assert list(failed) == [(name, 1)]
    assert failed[name, 1].startswith(told)
    ends = {n.job.name: n.failed for n in news if n.ended}
    assert ends == {"a": None, "b": None, name: failed[name, 1]}
    kept = tmp_path / name / "s1.error.txt"
    assert kept.exists() == (name != "refuses")
    if name == "crashes":
        assert str(kept) in failed[name, 1]
        assert "noise" in kept.read_text()
        assert "Traceback" in kept.read_text()


def test_a_failure_that_is_mended_leaves_no_trace(tmp_path: Path) -> None:
    kept = tmp_path / "a" / "s0.error.txt"
    kept.parent.mkdir()
    kept.write_text("from last time")
    assert run_jobs(jobs(tmp_path, "a"), 1, lambda _: None, never) == {}
    assert not kept.exists()


def test_a_run_that_prints_much_is_not_held_up(tmp_path: Path) -> None:
    assert run_jobs(jobs(tmp_path, "floods"), 1, lambda _: None, never) == {}


def test_stop_finishes_running_rounds_and_starts_nothing(tmp_path: Path) -> None:
    news: list[RunProgress] = []
    failed = run_jobs(jobs(tmp_path, "slow", "slow", "a", "b"), 2, news.append, lambda: bool(news))
    # One that is not stopped fails in the end.
    assert failed == {}
    assert {n.job.name for n in news} == {"slow"}


def test_an_interrupt_here_ends_all_processes_at_once(tmp_path: Path) -> None:
    processes: list[int] = []

    def interrupt(news: RunProgress) -> None:
        processes.extend(children())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_jobs(jobs(tmp_path, "deaf", "deaf"), 2, interrupt, never)
    # They would have slept for ten minutes each.
    assert processes
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


def children() -> list[int]:
    """The processes that this one began and has not waited for."""
    task = Path(f"/proc/{os.getpid()}/task")
    found = [int(p) for t in task.iterdir() for p in (t / "children").read_text().split()]
    return [p for p in found if b"json.load(sys.stdin)" in Path(f"/proc/{p}/cmdline").read_bytes()]


def test_ctrl_c_on_the_terminal_does_not_reach_the_processes(tmp_path: Path) -> None:
    sessions: list[int] = []

    def look(_: RunProgress) -> None:
        sessions.extend(os.getsid(p) for p in children())

    run_jobs(jobs(tmp_path, "slow"), 1, look, lambda: bool(sessions))
    assert sessions
    assert os.getsid(0) not in sessions


def test_a_run_tells_its_rounds_in_strict_json(tmp_path, monkeypatch):
    """Of labels that are numbers there is no accuracy."""
    told = io.StringIO()
    monkeypatch.setattr(worker, "_Stop", lambda: never)
    monkeypatch.setattr(worker, "_channel", lambda: told)
    asked = {"plan": Plan(rounds=1).document(), "folder": str(tmp_path), "path": []}
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(asked)))

    def run(_plan, _out, on_round, stop):
        on_round(RoundRecord(round=1, accuracy=math.nan))

    monkeypatch.setattr("fedpact.api.run", run)
    assert worker.main() == 0
    assert told.getvalue() == '{"round": 1, "accuracy": null, "loss": null}\n'
