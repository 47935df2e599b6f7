"""Accounting in a child process: a party lives long, and needs it as a run starts and ends."""

import importlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import wraps
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, Final, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
_IDLE_SECONDS: Final = 10.0
_apart: Final = ContextVar("_apart", default=False)
_idle: Final = list["_Child"]()
"""Children without a question. A busy or failed one is not among them."""


@contextmanager
def in_a_child() -> Generator[None]:
    """Within the block functions that are `separable` run in a child process.

    scipy takes 20 MB, and a search more, which end with the child: it ends when it has not been
    asked for some seconds. The answers are the same.
    """
    token = _apart.set(True)
    try:
        yield
    finally:
        _apart.reset(token)
        _idle.clear()  # a child ends with its connection


def separable(function: Callable[P, R]) -> Callable[P, R]:
    """Have a module's function run in a child process within `in_a_child`."""

    @wraps(function)
    def call(*arguments: P.args, **named: P.kwargs) -> R:
        if _apart.get():
            # A child may fail to start, raise an error, which is raised here, or be killed.
            with suppress(Exception):
                return _ask((function.__module__, function.__name__, arguments, named))
        return function(*arguments, **named)

    return call


class _Child:
    def __init__(self) -> None:
        self.connection, theirs = Pipe()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(theirs.fileno())],
                # Its modules are those of this process, whatever this one was started with.
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        threading.Thread(target=self.process.wait, daemon=True).start()


def _ask(question: object) -> Any:
    """Return a child's answer. Raises Exception: it gives none."""
    child = _idle.pop() if _idle else _Child()
    if child.process.poll() is not None:
        child = _Child()
    child.connection.send(question)
    answer = child.connection.recv()
    # Only now: if this was interrupted, the next question would get its answer.
    _idle.append(child)
    return answer


if __name__ == "__main__":
    with Connection(int(sys.argv[1])) as connection, suppress(EOFError):
        while connection.poll(_IDLE_SECONDS):
            module, name, given, by_name = connection.recv()
            connection.send(getattr(importlib.import_module(module), name)(*given, **by_name))
