"""A site's process at its server's Fleet API: when it gives up a connection, and when it stops."""

import gzip
import ssl
from contextlib import contextmanager

import httpx
import pytest
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError

from fedpact.common.errors import FedpactError
from fedpact.deployment.flower import site_process
from fedpact.deployment.site import Site


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (
            httpx.Response(307, headers={"location": "http://elsewhere/", "content-length": "0"}),
            "status 307",
        ),
        (httpx.Response(200, content=b"not Flower's"), "cannot read"),
        (
            httpx.Response(
                200,
                headers={"content-encoding": "gzip"},
                stream=httpx.ByteStream(gzip.compress(bytes(10**6))),
            ),
            "compressed body",
        ),
        (httpx.Response(200, content=iter([b"a", b"b"])), "undeclared length"),
        (
            httpx.Response(
                200, headers={"content-length": str(2**40)}, stream=httpx.ByteStream(b"")
            ),
            "longest message",
        ),
    ],
)
def test_a_strange_answer_is_reported_and_not_followed(site_dir, monkeypatch, answer, said):
    asked = []

    def handle(request):
        asked.append(request.url.host)
        return answer

    class Link(site_process.FleetLink):
        def __init__(self, *given):
            super().__init__(*given)
            self._client._client._transport = httpx.MockTransport(handle)

    monkeypatch.setattr(site_process, "FleetLink", Link)
    monkeypatch.setattr(site_process, "tls", lambda _: ssl.create_default_context())
    with Site(site_dir) as site:
        host = site.federation.address.partition(":")[0]
        with pytest.raises(site_process.NotLetIn, match=said):
            site_process.work(site, site_dir, lambda _: None)
    assert set(asked) == {host}


@pytest.fixture
def links(monkeypatch):
    """Connections that let the site in; each counts the questions that were fetched from it."""
    found = []

    class Link:
        fetched = 0

        def __init__(self, *_):
            found.append(self)

        @contextmanager
        def enter(self, known, on_beat):
            on_beat()
            yield 7

        def next(self):
            self.fetched += 1
            return "question"

        def close(self):
            pass

    monkeypatch.setattr(site_process, "FleetLink", Link)
    monkeypatch.setattr(site_process, "tls", lambda _: None)
    monkeypatch.setattr(site_process, "respond", lambda *_: "answer")
    return found


@pytest.mark.parametrize("error", [ObjectPullError("a", "gone"), OSError("reset")])
def test_an_answer_that_is_not_taken_ends_the_connection(site_dir, monkeypatch, links, error):
    """It is asked for again over the next one, and then lies stored."""

    def refuse(*_):
        raise error

    monkeypatch.setattr(site_process.FleetLink, "answer", refuse, raising=False)
    (site_dir / "flower").mkdir()
    told = []
    with Site(site_dir) as site:
        site_process.work(site, site_dir, told.append)
    assert links[0].fetched == 1
    assert told == ["let in by the server", f"the connection to the server has ended: {error}"]
    assert (site_dir / "flower" / "node").read_text() == "7"


def test_the_process_ends_once_its_site_has_stopped(site_dir, monkeypatch, links):
    (site_dir / "flower").mkdir()
    with Site(site_dir) as site:

        def answer(link, message, seconds):
            site.stopped = "no room" if link.fetched == 3 else ""

        monkeypatch.setattr(site_process.FleetLink, "answer", answer, raising=False)
        with pytest.raises(FedpactError, match="no room"):
            site_process.work(site, site_dir, lambda _: None)
    assert links[0].fetched == 3
