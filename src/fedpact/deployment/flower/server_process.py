"""Flower's server as a process of its own: control, database, and the app.

A SuperLink makes its tables in the file itself, one by one, and one that is killed meanwhile leaves
a file that none can open any more. What is in there can all be had again: the sites' nodes are
registered at every start, and every start begins a run of its own in Flower. So a file that is
half made, damaged, or another version's is replaced by a new one, which is made aside.
"""

import base64
import hashlib
import time
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from flwr.cli.build import build_fab_from_disk
from flwr.common.constant import SubStatus
from flwr.common.serde import fab_to_proto, run_from_proto
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    ListRunsRequest,
    RegisterNodeRequest,
    StartRunRequest,
    StopRunRequest,
)
from flwr.proto.runtime_pb2 import PullTaskInputRequest
from flwr.serverapp import Grid
from flwr.supercore.constant import TaskType
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.state.alembic.utils import build_alembic_config, run_migrations
from flwr.supercore.task_identity import TaskIdentity
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import NullPool

from fedpact.common.errors import FedpactError, TransportLost
from fedpact.common.files import replacing
from fedpact.common.messages import RoundRecord
from fedpact.deployment.admission import expect_form
from fedpact.deployment.federation import Federation
from fedpact.deployment.flower.requests import PromptGrid
from fedpact.deployment.flower.site_process import TaskQueue
from fedpact.deployment.flower.transport import FlowerTransport
from fedpact.deployment.secure import secure_deployment
from fedpact.deployment.server import Coordinator
from fedpact.simulation.secure_aggregation import keys

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
            key = public_key_to_bytes(keys.public_key(member.key))
            if key.strip() not in known:
                self._client.RegisterNode(RegisterNodeRequest(public_key=key, name=name))

    def was_stopped(self, run: int) -> bool:
        """Whether somebody has stopped a run by the Control API."""
        found = self._client.ListRuns(ListRunsRequest(run_id=run)).run_dict.get(run)
        return found is not None and found.status.sub_status == SubStatus.STOPPED

    def start_run(self, app: Path) -> int:
        """End earlier runs, start one with the Flower app in `app`, and return its number."""
        for number, run in self._client.ListRuns(ListRunsRequest()).run_dict.items():
            if run.status.status != "finished":
                self._client.StopRun(StopRunRequest(run_id=number))
        bundle = build_fab_from_disk(app)
        fab = fab_to_proto(Fab(hashlib.sha256(bundle).hexdigest(), bundle, {}))
        return self._client.StartRun(StartRunRequest(fab=fab)).run_id


def site_keys(federation: Federation) -> str:
    """Return what a server's program.SITE_KEYS has: a line for each site."""
    found = (public_key_to_bytes(keys.public_key(m.key)) for m in federation.sites.values())
    return "".join(f"{base64.b64encode(key).decode()}\n" for key in found)


_BESIDE = ("-wal", "-shm", "-journal")


def prepare_database(path: Path) -> bool:
    """Have a database at `path` that a SuperLink of this version opens; say whether it is new."""
    if path.exists() and _is_whole(path):
        return False
    # What SQLite keeps beside the old file must not be taken for a part of the new one.
    for suffix in _BESIDE:
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    with replacing(path, private=True) as partial:
        run_migrations(_engine(partial))
    return True


def _is_whole(path: Path) -> bool:
    engine = _engine(path)
    wanted = set(ScriptDirectory.from_config(build_alembic_config(engine)).get_heads())
    try:
        with engine.connect() as connection:
            found = set(MigrationContext.configure(connection).get_current_heads())
            return found == wanted and connection.scalar(text("PRAGMA quick_check")) == "ok"
    except SQLAlchemyError:
        return False


def _engine(path: Path) -> Engine:
    return create_engine(f"sqlite:///{path.resolve()}", poolclass=NullPool)


OnRound = Callable[[RoundRecord], None]
_START_SECONDS = 60.0


def coordinate(coordinator: Coordinator, grid: Grid, on_round: OnRound) -> dict[str, Any]:
    """Carry out a run over a Grid and return its summary."""
    key = keys.read_private_key(coordinator.directory / "server.key")
    admission, remember = coordinator.admission()
    form = partial(expect_form, coordinator.workshop(), sums=coordinator.sums)
    federation, plan = coordinator.federation, coordinator.plan
    agreed = federation.agreed(plan)
    transport = FlowerTransport(
        grid, federation, key, agreed, admission, form, remember, coordinator.folder.waits
    )
    begin = partial(transport.wait_until_ready, federation.run)
    if not plan.secure_aggregation.threshold:
        return coordinator.run(transport, on_round, begin)
    attempts = coordinator.attempts
    secure = secure_deployment(transport, federation, plan, attempts, admission, form)
    return coordinator.run(secure, on_round, begin, transport)


def serve(coordinator: Coordinator, address: str, on_round: OnRound) -> dict[str, Any]:
    """Carry out the run at the SuperLink of this machine, which listens at `address`.

    Raises FedpactError: it does not answer, or the run cannot go on.
    """
    root = coordinator.directory / "ca.crt"
    link = SuperLink(address, root)
    desk = TaskQueue(address, TaskType.SERVER_APP, coordinator.directory / "runtime.secret", root)
    number = None
    try:
        link.wait(_START_SECONDS)
        link.enrol(coordinator.federation)
        number = link.start_run(coordinator.directory / "app")
        token = _token_of(desk, number)
        with desk.work(token) as client:
            given = client.PullTaskInput(PullTaskInputRequest())
            TaskIdentity.task_id, TaskIdentity.run_id = given.task_id, given.run.run_id
            TaskIdentity.node_id = given.context.node_id
            with closing(PromptGrid(address, desk.root, token)) as grid:
                grid.set_run(run_from_proto(given.run))
                return coordinate(coordinator, grid, on_round)
    except httpx.HTTPError as error:
        if number is not None and isinstance(error, httpx.HTTPStatusError):
            _check_not_stopped(link, number)
        raise TransportLost(
            f"Flower's SuperLink at {address} failed ({error}): see flower/log.txt in the server's "
            "directory; started again, the server goes on from the last committed round"
        ) from error
    finally:
        desk.close()
        link.close()


def _check_not_stopped(link: SuperLink, run: int) -> None:
    """Raise FedpactError: somebody has stopped the run by the Control API."""
    with suppress(httpx.HTTPError):
        if not link.was_stopped(run):
            return
        raise FedpactError(
            f"the run was stopped by Flower's control API (StopRun of run {run}), and not by this "
            "server: somebody who reaches its port has asked for it, see flower/log.txt in the "
            "server's directory for from where. Started again, the server goes on from the last "
            "committed round"
        )


def _token_of(desk: TaskQueue, run: int) -> str:
    """Take on the task of this run; tasks of others, which somebody may have submitted, wait."""
    end = time.monotonic() + _START_SECONDS
    while time.monotonic() < end:
        found = desk.next()
        if found is not None and found[0].run_id == run:
            return found[1]
        time.sleep(0.1)
    raise FedpactError(f"the SuperLink did not hand out run {run}: see the log of the server")
