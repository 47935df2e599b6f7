"""What a site asks its server before its SuperNode does: whether it would be let in, and why not.

Flower's SuperNode tells a code, or ends without a word. The same question, asked by us, has an
answer that the site's owner can act on. It also gives up the connection that a killed process of
this site has left behind, which would turn away its successor for a minute.
"""

import datetime
import email.utils
import ssl
from contextlib import suppress
from pathlib import Path

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL
from flwr.proto.fleet_pb2 import ActivateNodeRequest, DeactivateNodeRequest
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fedpact.engines.flower import seal
from fedpact.engines.parties.site import Site
from fedpact.errors import FedpactError
from fedpact.files import write_whole

_NODE = "flower/node"
# What Flower allows a message's time to differ from the server's: ahead, and behind.
_AHEAD_SECONDS, _BEHIND_SECONDS = 5.0, 305.0


class NotLetIn(FedpactError):
    """The server does not let the site in now, and why; it may later."""


def enter(site: Site, directory: Path) -> None:
    """Return if the server lets a SuperNode of this site in now. Raises NotLetIn.

    directory: the site's, with its key, the authority's certificate, and the number under which
    the server knows its node, once that was told.
    """
    key, address = seal.read_private_key(directory / "site.key"), site.federation.address
    link = FleetHttpClient.from_server_address(
        address,
        insecure=False,
        root_certificates=(directory / "ca.crt").read_bytes(),
        interceptors=[
            RuntimeVersionHttpInterceptor(component_name="SuperNode"),
            NodeAuthHttpInterceptor(key, key.public_key()),
        ],
    )
    try:
        with link as client:
            known = _known(directory)
            if known is not None:
                _leave(client, known)
            node = _number(client, key)
            if node != known:
                write_whole(directory / _NODE, str(node).encode())
            _leave(client, node)
    except httpx.HTTPStatusError as error:
        raise NotLetIn(_refused(site, error.response)) from None
    except (httpx.HTTPError, ssl.SSLError) as error:
        raise NotLetIn(_unreached(address, directory, str(error))) from None


def _number(client: FleetHttpClient, key: ec.EllipticCurvePrivateKey) -> int:
    request = ActivateNodeRequest(
        public_key=public_key_to_bytes(key.public_key()),
        heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL,
    )
    return client.ActivateNode(request).node_id


def _leave(client: FleetHttpClient, node: int) -> None:
    # Refused where it is not connected, or a new database knows it under another number.
    with suppress(httpx.HTTPStatusError):
        client.DeactivateNode(DeactivateNodeRequest(node_id=node))


def _known(directory: Path) -> int | None:
    # A number that cannot be read is one that is not known.
    with suppress(OSError, ValueError):
        return int((directory / _NODE).read_bytes())
    return None


def _refused(site: Site, response: httpx.Response) -> str:
    address = site.federation.address
    ahead = _seconds_ahead(response)
    if ahead is not None and not -_BEHIND_SECONDS < ahead < _AHEAD_SECONDS:
        where = "ahead of" if ahead > 0 else "behind"
        return (
            f"the clock of this machine is {abs(ahead):.0f} s {where} that of the server at "
            f"{address}, and a site is let in only with {_AHEAD_SECONDS:.0f} s ahead to "
            f"{_BEHIND_SECONDS:.0f} s behind: set both by a time server"
        )
    error = FlowerError.from_json(response.text)
    if error is not None and error.code == ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED:
        return (
            f"the server at {address} does not let {site.name!r} in. Either its federation.toml "
            "has another key for this site, or it has not started with this one yet: compare "
            "`sha256sum federation.toml` with the server's. Or another process is connected with "
            "this site's key: one that was killed counts for a minute; a copy of this directory "
            "that runs elsewhere has to be ended, as both would spend the same budget"
        )
    told = f"code {error.code}: {error.message}" if error else f"status {response.status_code}"
    return (
        f"the server at {address} does not let {site.name!r} in ({told}): see the server's "
        "flower/log.txt, and whether both ends run the same version of fedpact and Flower"
    )


def _seconds_ahead(response: httpx.Response) -> float | None:
    """Return by how many seconds this machine's clock is ahead of the server's, if it told."""
    try:
        there = email.utils.parsedate_to_datetime(response.headers["date"])
    except (KeyError, ValueError):
        return None
    return (datetime.datetime.now(datetime.UTC) - there).total_seconds()


def _unreached(address: str, directory: Path, why: str) -> str:
    if "CERTIFICATE" not in why and "SSL" not in why:
        return f"the server at {address} does not answer ({why})"
    now = datetime.datetime.now(datetime.UTC)
    return (
        f"who answers at {address} is not taken for the server ({why}): expected a certificate "
        f"for that address under {directory / 'ca.crt'} that holds today, and this machine's clock "
        f"says {now:%Y-%m-%d %H:%M} UTC. Compare ca.crt and the address in federation.toml with "
        "the server's, and set the clock by a time server"
    )
