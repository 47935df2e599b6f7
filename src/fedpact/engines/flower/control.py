"""What the server asks of its own SuperLink: which nodes may connect, and a run to send under."""

import hashlib
import time
from pathlib import Path

import httpx
from flwr.cli.build import build_fab_from_disk
from flwr.common.serde import fab_to_proto
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    ListRunsRequest,
    RegisterNodeRequest,
    StartRunRequest,
    StopRunRequest,
)
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

from fedpact.engines.flower import seal
from fedpact.engines.parties.federation import Federation
from fedpact.errors import FedpactError

_POLL_SECONDS = 0.1


class SuperLink:
    """The Control API of a SuperLink at `address`, whose certificate `root` vouches for."""

    def __init__(self, address: str, root: Path) -> None:
        self._client = ControlHttpClient.from_server_address(
            address,
            insecure=False,
            root_certificates=root.read_bytes(),
            interceptors=[RuntimeVersionHttpInterceptor(component_name="fedpact")],
        )
        self._address = address

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def wait(self, seconds: float) -> None:
        """Wait until it answers. Raises FedpactError: it does not, or with another certificate."""
        end = time.monotonic() + seconds
        while True:
            try:
                self._client.ListNodes(ListNodesRequest())
                return
            except httpx.TransportError as error:
                if time.monotonic() > end:
                    raise FedpactError(
                        f"no SuperLink answers at {self._address} within {seconds:g} s ({error}): "
                        "see the log of the server's directory"
                    ) from None
            time.sleep(_POLL_SECONDS)

    def enrol(self, federation: Federation) -> None:
        """Let the federation's sites connect, each with its own key and under its own name."""
        known = {
            n.public_key.strip() for n in self._client.ListNodes(ListNodesRequest()).nodes_info
        }
        for name, member in federation.sites.items():
            key = public_key_to_bytes(seal.public_key(member.key))
            if key.strip() not in known:
                self._client.RegisterNode(RegisterNodeRequest(public_key=key, name=name))

    def start_run(self, app: Path) -> int:
        """End earlier runs, start one with the Flower app in `app`, and return its number."""
        for number, run in self._client.ListRuns(ListRunsRequest()).run_dict.items():
            if run.status.status != "finished":
                self._client.StopRun(StopRunRequest(run_id=number))
        bundle = build_fab_from_disk(app)
        fab = fab_to_proto(Fab(hashlib.sha256(bundle).hexdigest(), bundle, {}))
        return self._client.StartRun(StartRunRequest(fab=fab)).run_id
