"""The client shell: whose memory an algorithm sees, and how a refusal leaves the site."""

from types import SimpleNamespace

import pytest
import torch

from fedpact import algorithms
from fedpact.algorithms import BaseSettings
from fedpact.algorithms.wrappers.base import Method
from fedpact.client import Client
from fedpact.common.errors import BudgetExhausted, PolicyRefused
from fedpact.common.messages import Local, Refusal, Reply, State, Task


class Counting:
    """An algorithm that remembers how many rounds it has seen included, and sends that number."""

    @staticmethod
    def local(task, oracle, memory, settings):
        seen = memory.numbers.get("seen", 0.0) + 1
        return Local({}, {"seen": seen}, State({"v": torch.full((2,), seen)}, {"seen": seen}))


def refusing(error):
    class Refusing:
        @staticmethod
        def local(task, oracle, memory, settings):
            raise error("a text that quotes a record: 4711")

    return Refusing


@pytest.fixture
def client(tmp_path, monkeypatch):
    def make(algorithm=Counting):
        monkeypatch.setattr(algorithms, "load", lambda name: algorithm)
        memory = tmp_path / "site" / "memory.safetensors"
        method = Method("counting", BaseSettings())
        return Client("a", 10.0, method, lambda t, m, b: SimpleNamespace(shares={}), None, memory)

    return make


def ask(client, round_number, included):
    answer = client.handle(Task("run", round_number, "counting", {}, {}, included), None)
    assert isinstance(answer, Reply)
    return answer.numbers["seen"]


def test_included_replies_are_remembered(client):
    site = client()
    assert [ask(site, 1, -1), ask(site, 2, 1), ask(site, 3, 2)] == [1, 2, 3]


def test_a_reply_that_was_not_included_is_forgotten(client):
    site = client()
    assert [ask(site, 1, -1), ask(site, 2, 1), ask(site, 3, 1)] == [1, 2, 2]


def test_repeated_task_sees_the_same_memory_after_restart(client):
    site = client()
    assert [ask(site, 1, -1), ask(site, 2, 1), ask(site, 2, 1)] == [1, 2, 2]
    again = client()
    assert [ask(again, 2, 1), ask(again, 3, 2)] == [2, 3]


def test_unwritten_memory_is_written_by_the_next_task(client, monkeypatch):
    """The disk is full for a moment; a restart must not find what was before."""
    site = client()
    ask(site, 1, -1)

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("fedpact.client.write_whole", full)
        with pytest.raises(OSError, match="No space"):
            ask(site, 2, 1)
    assert ask(site, 2, 1) == 2
    assert ask(client(), 3, -1) == 2


@pytest.mark.parametrize(
    ("error", "code"), [(BudgetExhausted, "budget"), (PolicyRefused, "policy")]
)
def test_a_refusal_is_a_code_and_quotes_nothing(client, error, code):
    answer = client(refusing(error)).handle(Task("run", 3, "counting", {}, {}), None)
    assert answer == Refusal("run", 3, "a", code)


def test_other_algorithms_task_is_refused_before_computing(client):
    site = client(refusing(AssertionError))
    assert site.handle(Task("run", 1, "other", {}, {}), None) == Refusal("run", 1, "a", "policy")
