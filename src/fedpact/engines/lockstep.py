"""Several sites in lockstep: each trains by itself until it asks, then all are answered together.

An algorithm's local part is a plain function, so each site that trains has a greenlet to be stopped
in: it hands over within the worker's thread, which costs a fiftieth of waking another thread. The
order of everything is fixed.
"""

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, cast

import torch
from greenlet import getcurrent, greenlet

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
        self._seats = [seat(_ask) for _ in range(seats)]

    @property
    def size(self) -> int:
        """The number of seats."""
        return len(self._seats)

    def serve(self, jobs: Sequence[Callable[[Seat], Result]]) -> list[Result]:
        """Carry out at most `size` jobs, and return their results in order.

        A job's exception is raised when all jobs have ended, that of the first one. What `answers`
        raises is raised in every job that asked.
        """
        sitting = [greenlet(_carried_out) for _ in jobs]
        seats = self._seats[: len(jobs)]
        said = [one.switch(job, seat) for one, job, seat in zip(sitting, jobs, seats, strict=True)]
        while asking := [i for i, one in enumerate(sitting) if not one.dead]:
            told = self._told([said[i] for i in asking])
            for i, answer in zip(asking, told, strict=True):
                said[i] = sitting[i].switch(answer)
        return [result.taken() for result in said]

    def _told(self, questions: list[Question]) -> Sequence[Any]:
        try:
            return [_Outcome(answer) for answer in self._answers(questions)]
        except BaseException as error:
            return [_Outcome(None, error)] * len(questions)


class _Outcome:
    """What a function returned, or raised."""

    def __init__(self, value: Any, error: BaseException | None = None) -> None:
        self._value, self._error = value, error

    def taken(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._value


def _carried_out(job: Callable[[Any], Any], seat: Any) -> _Outcome:
    try:
        return _Outcome(job(seat))
    except BaseException as error:
        return _Outcome(None, error)


def _ask(question: Any) -> Any:
    # Whether gradients are recorded is the thread's, and the others' while this one waits.
    with torch.enable_grad():
        outcome: _Outcome = cast(greenlet, getcurrent().parent).switch(question)
    return outcome.taken()
