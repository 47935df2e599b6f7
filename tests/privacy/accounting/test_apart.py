"""Accounting in a child process: the same answers, whatever happens to the child."""

import errno
import os
import signal
import subprocess
import time

import pytest

from fedpact.privacy.accounting import apart

# Any module's functions can be separable.
square = apart.separable(pow)
process = apart.separable(os.getpid)


def runs(number):
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture(autouse=True)
def within():
    with apart.in_a_child():
        yield


def test_one_child_answers_many_questions():
    number = process()
    assert number != os.getpid()
    assert square(3, 2) == 9
    assert process() == number


@pytest.mark.parametrize("reason", [errno.ENOMEM, errno.EAGAIN, errno.EPERM])
def test_without_a_child_it_is_computed_here(monkeypatch, reason):
    def fail(*_, **__):
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr(subprocess, "Popen", fail)
    assert process() == os.getpid()


def test_a_killed_child_is_replaced():
    number = process()
    os.kill(number, signal.SIGKILL)
    # It may be dead before the question, or with it.
    assert square(3, 2) == 9
    assert process() not in (number, os.getpid())


def test_an_interrupted_question_answers_no_other(monkeypatch):
    process()

    def interrupt(_):
        raise SystemExit(143)

    with monkeypatch.context() as patch:
        patch.setattr(apart.Connection, "recv", interrupt)
        with pytest.raises(SystemExit):
            square(3, 2)
    assert square(5, 2) == 25


def test_files_of_the_working_directory_are_not_run(tmp_path, monkeypatch):
    for name in ("pickle", "importlib", "random", "threading"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'run')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    assert process() != os.getpid()
    assert not (tmp_path / "run").exists()


def test_a_child_has_the_modules_of_its_party(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "fedpact").mkdir()
    (tmp_path / "fedpact" / "__init__.py").write_text("raise SystemExit")
    assert process() != os.getpid()


def test_no_child_outlives_the_block():
    number = process()
    with apart.in_a_child():
        pass
    end = time.monotonic() + 30
    while runs(number) and time.monotonic() < end:
        time.sleep(0.01)
    assert not runs(number)
