"""A site's process and its SuperNode: who waits for whom."""

import threading
from contextlib import contextmanager

import pytest
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError

from fedpact.deployment.flower import site_process
from fedpact.deployment.site import Site


class Desk:
    """A SuperNode's end with one task after the other; it counts those that were taken on."""

    silent_seconds = 0.0

    def __init__(self, *_):
        self.taken = 0

    def next(self):
        self.taken += 1
        return object(), "token"

    @contextmanager
    def work(self, token):
        yield self

    def close(self):
        pass


@pytest.mark.parametrize(
    "error", [RuntimeError("No messages received"), ObjectPullError("a", "gone"), OSError("reset")]
)
def test_connection_is_renewed_after_an_undelivered_answer(site_dir, monkeypatch, caplog, error):
    """A SuperNode waits for the answer that it does not get for ever, while it counts as there."""
    desks = []

    def pull(client):
        raise error

    monkeypatch.setattr(site_process, "TaskQueue", lambda *a: desks.append(Desk(*a)) or desks[-1])
    monkeypatch.setattr(site_process, "pull_task_input", pull)
    with Site(site_dir) as site:
        site_process.work(site, site_dir, lambda: desks[-1].taken < 5)
    assert desks[0].taken == 1
    assert "was not handed over" in caplog.text


def test_partial_question_is_dropped_when_the_server_is_lost(site_dir, monkeypatch, caplog):
    """Flower waits two hours for its parts, while the server has long been there again."""
    desks, never = [], threading.Event()
    monkeypatch.setattr(site_process, "TaskQueue", lambda *a: desks.append(Desk(*a)) or desks[-1])
    monkeypatch.setattr(site_process, "pull_task_input", lambda client: never.wait())
    there = [True, True, True]
    with Site(site_dir) as site:
        site_process.work(site, site_dir, lambda: bool(there) and there.pop())
    never.set()
    assert desks[0].taken == 1
    assert "not whole when the server was lost" in caplog.text
