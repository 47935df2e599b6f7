"""What strangers may send to a SuperLink: nothing long, and nothing but to Flower's Fleet API.

The requests go through the guard to an application that counts what it is let read.
"""

import asyncio
import base64
import os

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Array, ArrayRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message

from fedpact.deployment.flower import program

FLEET, CONTROL = "/v1/fleet/push-object", "/v1/control/stop-run"
HERE, ELSEWHERE = "127.0.0.1", "192.0.2.7"
MIB = 2**20


def headers_of(key, signer=None, time="2026-01-01T00:00:00+00:00"):
    """As a SuperNode with `key` sends them; signer: who signs them in its place."""
    signature = sign_message(signer or key, time.encode())
    return {
        "flwr-public-key": base64.b64encode(public_key_to_bytes(key.public_key())).decode(),
        "flwr-signature": base64.b64encode(signature).decode(),
        "flwr-timestamp": time,
    }


@pytest.fixture(scope="module")
def site():
    return ec.generate_private_key(ec.SECP256R1())


@pytest.fixture
def status_of(site):
    """status_of(path, client, **headers) -> 200 if the request got through, else its refusal."""

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})

    guard = program.Guard(app, {headers_of(site)["flwr-public-key"]})

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


def test_only_a_sites_requests_may_be_long(status_of, site):
    stranger = ec.generate_private_key(ec.SECP256R1())
    own, forged = headers_of(site), headers_of(site, signer=stranger)
    for long in (MIB, 600 * MIB):
        for headers in ({}, headers_of(stranger), forged, {**own, "flwr-signature": "?"}):
            assert status_of(FLEET, ELSEWHERE, content_length=long, **headers) == 413
    assert status_of(FLEET, ELSEWHERE, content_length=6 * MIB, **own) == 200
    # What a site sends to be let in, which Flower then answers.
    assert status_of(FLEET, ELSEWHERE, content_length=1000) == 200


@pytest.mark.parametrize("client", [HERE, ELSEWHERE])
def test_no_request_is_longer_than_flowers_pieces(status_of, site, client):
    own = headers_of(site)
    assert status_of(FLEET, client, content_length=6 * MIB + 1, **own) == 413
    assert status_of(FLEET, client, transfer_encoding="chunked", **own) == 411


def test_flower_cuts_a_long_message_into_pieces_that_pass():
    """Of any plan: what a site sends of a model of 20 MiB."""
    array = Array(dtype="uint8", shape=(20 * MIB,), stype="bytes", data=os.urandom(20 * MIB))
    record = RecordDict({"fedpact": ArrayRecord({"message": array})})
    pieces = [each.deflate() for each in get_all_nested_objects(record).values()]
    assert sum(map(len, pieces)) > 20 * MIB
    # Beside a piece, a request has a few numbers and names.
    assert max(map(len, pieces)) < program._MOST_BYTES - MIB // 2


def test_other_machines_have_the_fleet_api_alone(status_of, site):
    own = headers_of(site)
    for path in (CONTROL, "/v1/runtime/push-object", "/docs", "/openapi.json", "/"):
        assert status_of(path, ELSEWHERE, content_length=0, **own) == 404
    assert status_of("/health", ELSEWHERE) == 200
    # The server itself stops and starts runs from there; nobody there has Flower's pages.
    assert status_of(CONTROL, HERE, content_length=0) == 200
    assert status_of("/docs", HERE) == status_of("/openapi.json", HERE) == 404
