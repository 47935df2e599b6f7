"""A site's process and its SuperNode: who waits for whom."""

import threading
from contextlib import contextmanager

import pytest
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError

from fedpact.common.errors import FedpactError
from fedpact.deployment.flower import internals, site_process
from fedpact.deployment.site import Site


@pytest.fixture
def desks(monkeypatch):
    """A SuperNode's end, with one task after the other; it counts those that were taken on."""
    found = []

    class Desk(internals.TaskQueue):
        silent_seconds, taken = 0.0, 0

        def __init__(self, *_):
            found.append(self)

        def next(self):
            self.taken += 1
            return 1, "token"

        @contextmanager
        def _work(self, token):
            yield self

        def close(self):
            pass

    monkeypatch.setattr(site_process, "TaskQueue", Desk)
    return found


@pytest.mark.parametrize(
    "error", [RuntimeError("No messages received"), ObjectPullError("a", "gone"), OSError("reset")]
)
def test_connection_is_renewed_after_an_undelivered_answer(
    site_dir, monkeypatch, caplog, desks, error
):
    """A SuperNode waits for the answer that it does not get for ever, while it counts as there."""

    def pull(client):
        raise error

    monkeypatch.setattr(internals, "pull_task_input", pull)
    with Site(site_dir) as site:
        site_process.work(site, site_dir, lambda: desks[-1].taken < 5)
    assert desks[0].taken == 1
    assert "was not handed over" in caplog.text


def test_partial_question_is_dropped_when_the_server_is_lost(site_dir, monkeypatch, caplog, desks):
    """Flower waits two hours for its parts, while the server has long been there again."""
    never = threading.Event()
    monkeypatch.setattr(internals, "pull_task_input", lambda client: never.wait())
    there = [True, True, True]
    with Site(site_dir) as site:
        site_process.work(site, site_dir, lambda: bool(there) and there.pop())
    never.set()
    assert desks[0].taken == 1
    assert "not whole when the server was lost" in caplog.text


def test_the_process_ends_once_its_site_has_stopped(site_dir, monkeypatch, desks):
    with Site(site_dir) as site:

        def pull(client):
            site.stopped = "no room" if desks[0].taken == 3 else ""
            return None, None

        monkeypatch.setattr(internals, "pull_task_input", lambda client: (*pull(client), None))
        monkeypatch.setattr(site_process, "respond", lambda *_: None)
        monkeypatch.setattr(internals, "push_message", lambda *_: None)
        with pytest.raises(FedpactError, match="no room"):
            site_process.work(site, site_dir, lambda: True)
    assert desks[0].taken == 3


def test_a_supernode_that_starts_slowly_is_waited_for(tmp_path):
    """Started anew each time before it is up, on a busy machine it would never be."""
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(32))
    desk = internals.TaskQueue("127.0.0.1:1", secret)
    assert desk.next() is None
    assert site_process._SILENT_SECONDS - desk.silent_seconds > 60
    desk.close()
