"""Flower's server as a process of its own: the run over its Grid."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import httpx

from fedpact.common.errors import FedpactError, TransportLost
from fedpact.common.messages import RoundRecord
from fedpact.deployment.admission import expect_form
from fedpact.deployment.federation import Federation
from fedpact.deployment.flower.internals import PromptGrid, SuperLink, TaskQueue, public_pem, tls
from fedpact.deployment.flower.transport import FlowerTransport
from fedpact.deployment.secure import secure_deployment
from fedpact.deployment.server import Coordinator
from fedpact.simulation.secure_aggregation import keys


def find_site_keys(federation: Federation) -> dict[str, bytes]:
    """Return each site's public key, as Flower has it."""
    return {n: public_pem(keys.public_key(m.key)) for n, m in federation.sites.items()}


OnRound = Callable[[RoundRecord], None]
_START_SECONDS = 60.0


def coordinate(coordinator: Coordinator, grid: PromptGrid, on_round: OnRound) -> dict[str, Any]:
    """Carry out a run over a Grid and return its summary."""
    key = keys.read_private_key(coordinator.directory / "server.key")
    admission, remember = coordinator.admission()
    form = partial(expect_form, coordinator.workshop(), sums=coordinator.form.lengths)
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
    context = tls(coordinator.directory)
    link = SuperLink(address, context)
    desk = TaskQueue(address, coordinator.directory / "runtime.secret", context)
    number = None
    try:
        link.wait(_START_SECONDS)
        link.enrol(find_site_keys(coordinator.federation))
        number = link.start_run(coordinator.directory / "app")
        with desk.grid(number) as grid:
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
            "server: somebody with a party's key has asked for it on this machine. Started again, "
            "the server goes on from the last committed round"
        )
