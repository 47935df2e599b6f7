"""A process that carries out one job after another. It imports what its jobs need, and no more."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from typing import Any

Work = Callable[[Connection, Event, dict[str, Any], str], str | None]


def carry_out_jobs(work: Work, asked: Connection, stopping: Event) -> None:
    """Carry out the jobs that are asked for, in this new process, until the connection ends.

    asked: receives (file, plan, folder) of each job and is sent ("ended", what `work` returns). The
    file gets what the job prints.
    """
    # Ctrl-C reaches all processes of a terminal; the first one handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(EOFError):
        while True:
            file, plan, folder = asked.recv()
            printed = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(printed, 1)
            os.dup2(printed, 2)
            os.close(printed)
            ended = work(asked, stopping, plan, folder)
            sys.stdout.flush()  # before the next job's file takes its place
            asked.send(("ended", ended))
