"""Several sites in lockstep: each trains by itself until it asks, then all are answered together.

An algorithm's local part is a plain function, so each site that trains has a thread to be stopped
in. One of a worker's threads runs at a time: a site that asks hands over to the next one, the last
one to the worker, which computes all answers at once and begins the next turn. So a worker uses one
core, however many sites it seats, and the order of everything is fixed.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Generic, TypeVar

import torch

Question = TypeVar("Question")
Answer = TypeVar("Answer")
Seat = TypeVar("Seat")
Result = TypeVar("Result")


class Lockstep(Generic[Question, Answer, Seat]):
    """Seats for so many sites. Used by one thread at a time.

    seat: makes what a site trains with, from its way to ask. answers: see the module.
    """

    def __init__(
        self,
        seats: int,
        seat: Callable[[Callable[[Question], Answer]], Seat],
        answers: Callable[[Sequence[Question]], Sequence[Answer]],
    ) -> None:
        self._answers = answers
        self._turns = [_closed() for _ in range(seats)]
        self._worker = _closed()
        self._at_work: list[int] = []
        self._asked: dict[int, Question] = {}
        self._told: dict[int, Answer] = {}
        self._failed: BaseException | None = None
        self._seats = [seat(self._asker(i)) for i in range(seats)]
        # torch counts intra-op threads per thread.
        self._pool = ThreadPoolExecutor(seats, "seat", lambda: torch.set_num_threads(1))

    @property
    def size(self) -> int:
        """The number of seats."""
        return len(self._seats)

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def serve(self, jobs: Sequence[Callable[[Seat], Result]]) -> list[Result]:
        """Carry out at most `size` jobs, and return their results in order.

        A job's exception is raised when all jobs have ended, that of the first one. What `answers`
        raises is raised in every job that asked.
        """
        self._at_work = list(range(len(jobs)))
        futures = [self._pool.submit(self._sit, i, job) for i, job in enumerate(jobs)]
        while self._at_work:
            self._turns[self._at_work[0]].release()
            self._worker.acquire()
            self._answer()
        return [future.result() for future in futures]

    def _answer(self) -> None:
        asked, self._asked = self._asked, {}
        self._told, self._failed = {}, None
        if asked:
            try:
                answers = self._answers(list(asked.values()))
                self._told = dict(zip(asked, answers, strict=True))
            except BaseException as error:
                self._failed = error

    def _sit(self, i: int, job: Callable[[Seat], Result]) -> Result:
        self._turns[i].acquire()
        try:
            return job(self._seats[i])
        finally:
            next_turn = self._next(i)
            self._at_work.remove(i)
            next_turn.release()

    def _asker(self, i: int) -> Callable[[Question], Answer]:
        def ask(question: Question) -> Answer:
            self._asked[i] = question
            self._next(i).release()
            self._turns[i].acquire()
            if self._failed is not None:
                raise self._failed
            return self._told.pop(i)

        return ask

    def _next(self, i: int) -> Lock:
        after = self._at_work.index(i) + 1
        return self._turns[self._at_work[after]] if after < len(self._at_work) else self._worker


def _closed() -> Lock:
    """Return a gate that one thread waits at and another opens, by releasing it, for one to pass.

    A lock does that in a tenth of a semaphore's time, and is all of a hand-over's cost.
    """
    gate = Lock()
    gate.acquire()
    return gate
