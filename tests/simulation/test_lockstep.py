"""Jobs in lockstep: what is asked together, who runs when, and what happens when one fails."""

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from fedpact.simulation.stacked import Lockstep


def table(seats, answers):
    return Lockstep(seats, lambda ask: ask, answers)


def test_a_turns_questions_are_answered_together_and_in_order():
    turns = []

    def answers(questions):
        turns.append(list(questions))
        return [10 * q for q in questions]

    def job(first, count):
        return lambda ask: [ask(first + k) for k in range(count)]

    at = table(3, answers)
    # Of different lengths: who has ended is no longer waited for.
    found = at.serve([job(0, 1), job(100, 3), job(200, 2)])
    assert found == [[0], [1000, 1010, 1020], [2000, 2010]]
    assert turns == [[0, 100, 200], [101, 201], [102]]
    # Once more, and with fewer jobs than seats; one that asks nothing.
    turns.clear()
    assert at.serve([lambda ask: "silent", job(7, 1)]) == ["silent", [70]]
    assert turns == [[7]]
    assert at.serve([]) == []


def test_jobs_share_the_worker_thread_and_keep_grad_mode():
    found = []

    def silent(ask):
        with torch.no_grad():
            found.append((ask(threading.get_ident()), torch.is_grad_enabled()))
        found.append(torch.is_grad_enabled())

    def loud(ask):
        found.append((ask(threading.get_ident()), torch.is_grad_enabled()))

    own = threading.get_ident()
    at = table(3, lambda questions: [(q, torch.is_grad_enabled()) for q in questions])
    at.serve([silent, loud, silent])
    assert found == [((own, True), mode) if each else True for each, mode in MODES]
    assert torch.is_grad_enabled()


# What is found: of each job's question, and after a silent one has ended.
MODES = [(1, False), (0, None), (1, True), (1, False), (0, None)]


def test_a_failing_job_lets_the_others_end():
    ended = []

    def good(ask):
        ended.append(ask(1) + ask(2))

    def bad(ask):
        ask(1)
        raise ValueError("of its own")

    at = table(3, lambda questions: questions)
    with pytest.raises(ValueError, match="of its own"):
        at.serve([good, bad, good])
    assert ended == [3, 3]
    assert at.serve([lambda ask: ask(5)]) == [5]


def test_what_fails_in_answering_fails_in_every_job_that_asked():
    def answers(questions):
        raise ZeroDivisionError("nobody knows")

    told = []

    def job(ask):
        try:
            ask(1)
        except ZeroDivisionError as error:
            told.append(str(error))
            raise

    at = table(2, answers)
    with pytest.raises(ZeroDivisionError):
        at.serve([job, job])
    assert told == ["nobody knows"] * 2


def test_threads_may_take_turns_at_a_table():
    at = table(2, lambda questions: [10 * q for q in questions])
    jobs = [lambda ask: ask(1) + ask(2), lambda ask: ask(threading.get_ident())]
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        for thread in (one, other, one, other):
            total, own = thread.submit(at.serve, jobs).result()
            assert (total, own) == (30, 10 * thread.submit(threading.get_ident).result())


def test_a_seat_holds_nothing_of_the_last_job():
    """Neither the job nor what came of it, be it an error and what that one's frames held."""

    class Large:
        pass

    held = []

    def job(ask):
        large = Large()
        held.append(weakref.ref(large))
        ask(1)
        return large

    def failing(ask):
        large = Large()
        held.append(weakref.ref(large))
        ask(1)
        raise ZeroDivisionError

    at = table(2, lambda questions: questions)
    assert len(at.serve([job, job])) == 2
    with pytest.raises(ZeroDivisionError):
        at.serve([failing, failing])
    held += [weakref.ref(job), weakref.ref(failing)]
    del job, failing
    gc.collect()
    assert [ref() for ref in held] == [None] * 6
    assert at.serve([lambda ask: ask(2)]) == [2]


def test_a_turn_that_breaks_off_spoils_none_after_it():
    """Too few answers leave jobs that wait for theirs: they end, and others sit down."""
    ended = []

    def job(ask):
        try:
            return ask(1)
        finally:
            ended.append(True)

    answered = [[1], [1, 2]]
    at = table(2, lambda questions: answered.pop(0))
    with pytest.raises(ValueError, match="zip"):
        at.serve([job, job])
    assert at.serve([job, job]) == [1, 2]
    gc.collect()
    assert len(ended) == 4
