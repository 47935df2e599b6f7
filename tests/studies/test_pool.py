"""Processes side by side: what fails is told, what goes on goes on. The processes are stand-ins."""

import multiprocessing
import os
import signal
import sys
from dataclasses import replace
from types import ModuleType

import pytest
from tests.studies import stand_in

from fedpact.plan import Plan
from fedpact.studies import pool
from fedpact.studies.pool import Job, run_jobs


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch):
    monkeypatch.setattr(pool, "_work", stand_in.work)


def jobs(folder, *names):
    plan = Plan(rounds=2)
    return [Job(name, seed, plan, folder / name / f"s{seed}") for seed, name in enumerate(names)]


def never():
    return False


def test_every_job_ends_once_with_rounds_in_order(tmp_path):
    news = []
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


def test_no_more_jobs_at_a_time_than_asked_for(tmp_path):
    under_way = set()
    most = 0

    def watch(news):
        nonlocal most
        (under_way.discard if news.ended else under_way.add)(news.job)
        most = max(most, len(under_way))

    run_jobs(jobs(tmp_path, *"abcdef"), 1, watch, never)
    assert most == 1


def test_a_process_is_kept_for_the_next_job_unless_it_dies(tmp_path):
    wanted = jobs(tmp_path, "a", "refuses", "b", "crashes", "c", "d")
    run_jobs(wanted, 1, lambda _: None, never)
    a, refuses, b, crashes, c, d = (job.folder.with_suffix(".pid").read_text() for job in wanted)
    assert a == refuses == b == crashes != c == d
    assert multiprocessing.active_children() == []


def test_a_process_with_a_plans_own_code_is_not_kept(tmp_path):
    a, b, c = jobs(tmp_path, "a", "b", "c")
    b = replace(b, plan=b.plan.model_copy(update={"model": "package.module:Net"}))
    run_jobs([a, b, c], 1, lambda _: None, never)
    ids = [job.folder.with_suffix(".pid").read_text() for job in (a, b, c)]
    assert ids[0] == ids[1] != ids[2]
    assert multiprocessing.active_children() == []


def test_a_run_s_output_is_not_the_next_ones(tmp_path):
    run_jobs(jobs(tmp_path, "prints", "crashes"), 1, lambda _: None, never)
    assert "of this run" not in (tmp_path / "crashes" / "s1.error.txt").read_text()


def test_as_many_jobs_as_asked_for_are_under_way_at_once(tmp_path):
    assert run_jobs(jobs(tmp_path, "meets1", "meets2"), 2, lambda _: None, never) == {}


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("refuses", "the paragraph"),
        ("crashes", "the process ended with code 1: RuntimeError: a bug; see "),
        ("dies", "the process was ended by signal 9, perhaps because memory ran out; see "),
        ("silent", "the process ended with code 3: it printed nothing; see "),
    ],
)
def test_a_failure_is_explained_and_other_runs_continue(tmp_path, name, told):
    news = []
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


def test_a_corrected_failure_leaves_no_trace(tmp_path):
    kept = tmp_path / "a" / "s0.error.txt"
    kept.parent.mkdir()
    kept.write_text("from last time")
    assert run_jobs(jobs(tmp_path, "a"), 1, lambda _: None, never) == {}
    assert not kept.exists()


def test_a_run_that_prints_much_is_not_held_up(tmp_path):
    assert run_jobs(jobs(tmp_path, "floods"), 1, lambda _: None, never) == {}


def test_stop_finishes_running_rounds_and_starts_nothing(tmp_path):
    news = []
    failed = run_jobs(jobs(tmp_path, "slow", "slow", "a", "b"), 2, news.append, lambda: bool(news))
    # One that is not stopped fails in the end.
    assert failed == {}
    assert {n.job.name for n in news} == {"slow"}


def test_an_interrupt_here_ends_all_processes_at_once(tmp_path):
    def interrupt(news):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_jobs(jobs(tmp_path, "deaf", "deaf"), 2, interrupt, never)
    # They would have slept for ten minutes each.
    assert multiprocessing.active_children() == []


def test_ctrl_c_on_the_terminal_does_not_end_the_processes(tmp_path):
    news = []

    def interrupt(told):
        news.append(told)
        for process in multiprocessing.active_children():
            os.kill(process.pid or 0, signal.SIGINT)

    assert run_jobs(jobs(tmp_path, "slow"), 1, interrupt, lambda: bool(news)) == {}
    assert [n.ended for n in news] == [False, True]


def test_a_process_that_ctrl_c_ended_is_no_failure(tmp_path, monkeypatch):
    """It imported the package still, so it did not ignore the signal yet."""
    monkeypatch.setattr(pool, "_POLL", 600)
    asked = iter([False])
    assert run_jobs(jobs(tmp_path, "interrupted"), 1, print, lambda: next(asked, True)) == {}


def test_a_process_does_not_import_the_callers_script(tmp_path, monkeypatch):
    """A new process imports the file of `__main__`, where there is one."""
    script, marker = tmp_path / "script.py", tmp_path / "imported"
    script.write_text(f"open({str(marker)!r}, 'w')")
    main = ModuleType("__main__")
    main.__file__ = str(script)
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert run_jobs(jobs(tmp_path, "a"), 1, lambda _: None, never) == {}
    assert not marker.exists()
