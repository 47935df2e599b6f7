"""Several sites in lockstep: each trains by itself until it asks, then all are answered together.

An algorithm's local part is a plain function, so each site that trains has a greenlet to be stopped
in: it hands over within the worker's thread, which costs a fiftieth of waking another thread. The
order of everything is fixed.
"""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar, cast

import torch
from greenlet import GreenletExit, getcurrent, greenlet

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
        self._own = _OfThread()

    @property
    def size(self) -> int:
        """The number of seats."""
        return len(self._seats)

    def serve(self, jobs: Sequence[Callable[[Seat], Result]]) -> list[Result]:
        """Carry out at most `size` jobs, and return their results in order.

        A job's exception is raised when all jobs have ended, that of the first one. What `answers`
        raises is raised in every job that asked.
        """
        # Where a turn is broken off, nobody knows where its greenlets stand: no further turn does.
        sitting, self._own.sitting = self._own.sitting, None
        sitting = sitting or [greenlet(partial(_sit, seat)) for seat in self._seats]
        # A list, which is emptied: who waits for a job does not hold the last one.
        said = [one.switch([job]) for one, job in zip(sitting, jobs, strict=False)]
        while asking := [i for i, what in enumerate(said) if not isinstance(what, _Outcome)]:
            told = self._told([said[i] for i in asking])
            for i, answer in zip(asking, told, strict=True):
                said[i] = sitting[i].switch(answer)
        self._own.sitting = sitting
        return _taken(said)

    def _told(self, questions: list[Question]) -> Sequence[Any]:
        try:
            return [_Outcome(answer) for answer in self._answers(questions)]
        except BaseException as error:
            return [_Outcome(None, error) for _ in questions]


class _OfThread(threading.local):
    """The thread's greenlets, one a seat, that wait for jobs; a new one costs as much as a switch
    does ten times.
    """

    sitting: list[greenlet] | None = None


class _Outcome:
    """What a function returned, or raised."""

    def __init__(self, value: Any, error: BaseException | None = None) -> None:
        self._value, self._error = value, error

    def emptied(self) -> tuple[Any, BaseException | None]:
        """Return both; a greenlet that waits has the outcome that it handed over on its stack."""
        found = self._value, self._error
        self._value = self._error = None
        return found


def _taken(outcomes: Sequence[_Outcome]) -> list[Any]:
    found = [outcome.emptied() for outcome in outcomes]
    for _, error in found:
        if error is not None:
            raise error
    return [value for value, _ in found]


def _sit(seat: Any, given: list[Callable[[Any], Any]]) -> None:
    """Carry out one job after another, each from a list of its own, until nobody has any more."""
    parent = cast(greenlet, getcurrent().parent)
    while True:
        given = parent.switch(_carried_out(given.pop(), seat))


def _carried_out(job: Callable[[Any], Any], seat: Any) -> _Outcome:
    try:
        return _Outcome(job(seat))
    except GreenletExit:
        raise
    except BaseException as error:
        return _Outcome(None, error)


def _ask(question: Any) -> Any:
    parent = cast(greenlet, getcurrent().parent)
    if torch.is_grad_enabled():
        return _taken([parent.switch(question)])[0]
    # Whether gradients are recorded is the thread's, and the others' while this one waits.
    with torch.enable_grad():
        outcome: _Outcome = parent.switch(question)
    return _taken([outcome])[0]
