"""The transport to worker threads: what whoever takes the replies can rely on."""

import time

import pytest
import torch

from fedpact.common.messages import Task
from fedpact.simulation.threads import InProcess

NAMES = [f"site-{number:02d}" for number in range(40)]


class Site:
    """Answers with its task's round, and notes every answer that is made."""

    def __init__(self, made=None):
        self.made = [] if made is None else made

    def handle(self, task, bench):
        self.made.append(task.round)
        return task.round, bench


class Broken:
    def handle(self, task, bench):
        raise ArithmeticError("this one fails")


def tasks():
    """A task for each site; its number, in place of the round, tells it from the others'."""
    w = torch.zeros(1)
    return {name: Task("run", place, "fedavg", {"w": w}, {}) for place, name in enumerate(NAMES)}


def transport(sites, workers=2):
    return InProcess(sites, workers, lambda: "bench")


def test_replies_come_in_order_and_few_wait():
    made, most = [], 0
    with transport({name: Site(made) for name in reversed(NAMES)}) as sites:
        for taken, (place, _) in enumerate(sites.exchange(tasks())):
            assert place == taken
            time.sleep(0.001)
            most = max(most, len(made) - taken)
    assert len(made) == len(NAMES)
    assert most <= 8


def test_failing_site_ends_the_round_after_earlier_replies():
    for broken in (0, 3, 7, 39):
        members = {name: Broken() if name == NAMES[broken] else Site() for name in NAMES}
        with transport(members) as sites:
            answers, taken = sites.exchange(tasks()), []
            with pytest.raises(ArithmeticError, match="this one fails"):
                taken.extend(place for place, _ in answers)
        assert taken == list(range(broken))
