"""The server's process: starts a run at its SuperLink, takes it on, and carries it out."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import httpx
from flwr.common.serde import run_from_proto
from flwr.proto.runtime_pb2 import PullTaskInputRequest
from flwr.serverapp import Grid
from flwr.supercore.constant import TaskType
from flwr.supercore.task_identity import TaskIdentity

from fedpact.engines.flower import seal
from fedpact.engines.flower.control import SuperLink
from fedpact.engines.flower.inbox import PromptGrid
from fedpact.engines.flower.runtime import TaskQueue
from fedpact.engines.flower.transport import FlowerTransport
from fedpact.engines.parties.admission import expect_form
from fedpact.engines.parties.coordinator import Coordinator
from fedpact.engines.secure.deployed import secure_deployment
from fedpact.errors import FedpactError
from fedpact.messages import RoundRecord

OnRound = Callable[[RoundRecord], None]
_START_SECONDS = 60.0


def coordinate(coordinator: Coordinator, grid: Grid, on_round: OnRound) -> dict[str, Any]:
    """Carry out a run over a Grid and return its summary."""
    key = seal.read_private_key(coordinator.directory / "server.key")
    admission, remember = coordinator.admission()
    form = partial(expect_form, coordinator.workshop(), sums=coordinator.sums)
    federation, plan = coordinator.federation, coordinator.plan
    agreed = federation.agreed(plan)
    transport = FlowerTransport(
        grid, federation, key, agreed, admission, form, remember, coordinator.folder.waits
    )
    if not plan.secure_aggregation.threshold:
        return coordinator.run(transport, on_round)
    attempts = coordinator.attempts
    secure = secure_deployment(transport, federation, plan, attempts, admission, form)
    return coordinator.run(secure, on_round, transport)


def serve(coordinator: Coordinator, address: str, on_round: OnRound) -> dict[str, Any]:
    """Carry out the run at the SuperLink of this machine, which listens at `address`.

    Raises FedpactError: it does not answer, or the run cannot go on.
    """
    root = coordinator.directory / "ca.crt"
    link = SuperLink(address, root)
    desk = TaskQueue(address, TaskType.SERVER_APP, coordinator.directory / "runtime.secret", root)
    try:
        link.wait(_START_SECONDS)
        link.enrol(coordinator.federation)
        number = link.start_run(coordinator.directory / "app")
        token = _token_of(desk, number)
        with desk.work(token) as client:
            given = client.PullTaskInput(PullTaskInputRequest())
            TaskIdentity.task_id, TaskIdentity.run_id = given.task_id, given.run.run_id
            TaskIdentity.node_id = given.context.node_id
            grid = PromptGrid(address, desk.root, token)
            grid.set_run(run_from_proto(given.run))
            return coordinate(coordinator, grid, on_round)
    except httpx.HTTPError as error:
        raise FedpactError(
            f"Flower's SuperLink at {address} failed ({error}): see flower/log.txt in the server's "
            "directory; started again, the server goes on from the last committed round"
        ) from error
    finally:
        desk.close()
        link.close()


def _token_of(desk: TaskQueue, run: int) -> str:
    """Take on the task of this run; tasks of others, which somebody may have submitted, wait."""
    end = time.monotonic() + _START_SECONDS
    while time.monotonic() < end:
        found = desk.next()
        if found is not None and found[0].run_id == run:
            return found[1]
        time.sleep(0.1)
    raise FedpactError(f"the SuperLink did not hand out run {run}: see the log of the server")
