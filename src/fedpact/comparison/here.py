"""Runs of what was handed in from Python, which no other process has: in this one, one by one."""

import traceback
from collections.abc import Callable, Sequence

from fedpact.api import run
from fedpact.comparison.pool import Job, OnNews, RunProgress
from fedpact.errors import FedpactError
from fedpact.messages import RoundRecord


def carry_out_here(
    jobs: Sequence[Job], on_news: OnNews, stop: Callable[[], bool]
) -> dict[tuple[str, int], str]:
    """Carry out all jobs; return why those that failed did. See pool.run_jobs."""
    failed = dict[tuple[str, int], str]()
    for job in jobs:
        if stop():
            break
        why = _carried_out(job, on_news, stop)
        if why is not None:
            failed[job.name, job.seed] = why
        on_news(RunProgress(job, ended=True, failed=why))
    return failed


def _carried_out(job: Job, on_news: OnNews, stop: Callable[[], bool]) -> str | None:
    def on_round(record: RoundRecord) -> None:
        on_news(RunProgress(job, record.round, record.accuracy, record.loss))

    try:
        run(job.plan, job.folder, data=job.data, on_round=on_round, stop=stop)
    except FedpactError as error:
        return str(error)
    except Exception as error:  # one run's fault is not the others'
        traceback.print_exc()
        return f"it ended with {type(error).__name__}: {error}"
    return None
