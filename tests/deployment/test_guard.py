"""What other machines may send to a SuperLink: nothing long, and only to Flower's Fleet API.

Strangers cannot send anything: TLS lets nobody in without a party's key (test_gate).

The requests go through the guard to an application that counts what it is let read.
"""

import asyncio
import os

import pytest
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from fedpact.deployment.flower import flower_records, program, server_process
from fedpact.deployment.server import Coordinator

FLEET, CONTROL = "/v1/fleet/push-object", "/v1/control/stop-run"
HERE, ELSEWHERE = "127.0.0.1", "192.0.2.7"
MIB = 2**20


@pytest.fixture
def status_of():
    """status_of(path, client, **headers) -> 200 if the request got through, else its refusal."""

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})

    guard = program.Guard(app, program.Sockets(), 6 * MIB)

    def request(path, client, **headers):
        encoded = [(n.replace("_", "-").encode(), str(v).encode()) for n, v in headers.items()]
        scope = {"type": "http", "path": path, "client": (client, 1), "headers": encoded}
        sent = []

        async def send(event):
            sent.append(event)

        # Nothing of the body is read: there is nothing to receive it from.
        asyncio.run(guard(scope, None, send))
        return sent[0]["status"]

    return request


@pytest.mark.parametrize("client", [HERE, ELSEWHERE])
def test_no_request_is_longer_than_the_plan_allows(status_of, client):
    assert status_of(FLEET, client, content_length=6 * MIB) == 200
    assert status_of(FLEET, client, content_length=6 * MIB + 1) == 413
    assert status_of(FLEET, client, transfer_encoding="chunked") == 411


@pytest.mark.parametrize("numbers", [7850, 3_000_000])
def test_every_message_of_a_plan_passes(monkeypatch, deployment, numbers):
    """Whole, or in pieces: at 8 bytes a number; and nothing that is much longer."""
    coordinator = Coordinator(deployment / "server")
    assert coordinator.longest_message == 650
    coordinator.__dict__["longest_message"] = numbers
    most = server_process.most_request_bytes(coordinator)
    record = flower_records.to_record(os.urandom(8 * numbers), bytes(72), (7, "f" * 64), "a" * 64)
    pieces = [each.deflate() for each in get_all_nested_objects(record).values()]
    assert sum(map(len, pieces)) > 8 * numbers
    # Beside a piece, a request has a few numbers and names.
    assert max(map(len, pieces)) < most - 2**14
    assert most < max(map(len, pieces)) + 2**17
    # So has a question to a site, with all its pieces.
    assert sum(map(len, pieces)) < flower_records.most_bytes(numbers, 3) - 2**14
    assert flower_records.from_record(record)[0] == b"".join(
        part["block"] for part in record.values()
    )


def test_other_machines_have_the_fleet_api_alone(status_of):
    for path in (CONTROL, "/v1/runtime/push-object", "/docs", "/openapi.json", "/"):
        assert status_of(path, ELSEWHERE, content_length=0) == 404
    assert status_of("/health", ELSEWHERE) == 200
    assert status_of(program.SOCKETS, ELSEWHERE) == 404
    # The server itself stops and starts runs from there; nobody there has Flower's pages.
    assert status_of(CONTROL, HERE, content_length=0) == 200
    assert status_of("/docs", HERE) == status_of("/openapi.json", HERE) == 404
