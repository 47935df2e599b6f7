"""Runs the server's side over a Flower Grid."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, cast

import httpx
from flwr.app import Message, RecordDict

from fedpact.common.errors import FedpactError, InputError, TransportLost
from fedpact.common.files import LOCK, only_one
from fedpact.common.messages import (
    Refusal,
    Reply,
    RoundRecord,
    State,
    Task,
    Transport,
    from_bytes,
)
from fedpact.common.run_folder import ATTEMPTS
from fedpact.deployment.admission import Admission, expect_form
from fedpact.deployment.federation import Federation
from fedpact.deployment.flower import flower_records
from fedpact.deployment.flower.internals import PromptGrid, SuperLink, public_pem, tls
from fedpact.deployment.flower.transport import FlowerTransport
from fedpact.deployment.server import TERMS, Coordinator, describe_round
from fedpact.plan import Plan
from fedpact.simulation.secure_aggregation import keys
from fedpact.simulation.secure_aggregation.encoding import Form
from fedpact.simulation.secure_aggregation.graph import MaskingGraph
from fedpact.simulation.secure_aggregation.transport import Attempts, Carrier, Secured, Server
from fedpact.simulation.trackers import Log, check_log

if TYPE_CHECKING:
    from flwr.serverapp import Grid


def find_site_keys(federation: Federation) -> dict[str, bytes]:
    """Return each site's public key in Flower's format."""
    return {n: public_pem(keys.public_key(m.key)) for n, m in federation.sites.items()}


OnRound = Callable[[RoundRecord], None]
_START_SECONDS = 60.0
_HELLO_SECONDS = 30.0
APP: Final = Path(__file__).with_name("app")
"""The Flower app. At a SuperLink of our own nothing in it is carried out."""


def most_request_bytes(coordinator: Coordinator) -> int:
    """Return the longest permitted body of a request in bytes, for the plan and federation.

    It has the numbers of the longest message, or those of one piece of a longer one.
    """
    longest = min(coordinator.longest_message, flower_records.PIECE // 8)
    return flower_records.most_bytes(longest, len(coordinator.federation.sites))


class AppGrid:
    """The Grid of an existing SuperLink, whose nodes have other keys than the sites.

    Each node is asked for its site, which signs the answer. A node that lies about it receives the
    site's tasks, but cannot sign its answers.
    """

    def __init__(self, grid: "Grid", federation: Federation) -> None:
        self.push_messages, self.pull_messages = grid.push_messages, grid.pull_messages
        self._grid, self._keys = grid, find_site_keys(federation)
        self._public = {n: keys.public_key(m.key) for n, m in federation.sites.items()}
        # Message -> (node, its start); (node, start) -> site, and when the node is asked again.
        self._asked = dict[str, tuple[int, str]]()
        self._names, self._next = dict[tuple[int, str], str](), dict[tuple[int, str], float]()

    def get_nodes(self) -> Iterator[SimpleNamespace]:
        """Yield the nodes whose sites are known, each with its site's key, PEM."""
        for answer in self.pull_messages([*self._asked]) if self._asked else ():
            which = self._asked.pop(answer.metadata.reply_to_message_id, None)
            if which is not None and answer.has_content():
                self._take(which, answer.content)
        for node in self._grid.get_nodes():
            # A restarted node may belong to another site.
            which, now = (node.node_id, node.last_activated_at), time.monotonic()
            if which in self._names:
                yield SimpleNamespace(
                    node_id=node.node_id,
                    public_key=self._keys[self._names[which]],
                    last_activated_at=node.last_activated_at,
                )
            elif now >= self._next.get(which, 0.0):
                self._next[which] = now + _HELLO_SECONDS
                empty = flower_records.to_record(b"", b"")
                hello = Message(empty, node.node_id, "train", ttl=_HELLO_SECONDS)
                self._asked |= dict.fromkeys(self.push_messages([hello]), which)

    def _take(self, which: tuple[int, str], record: RecordDict) -> None:
        with suppress(InputError):
            block, signature = flower_records.from_record(record)
            said = from_bytes(block)
            name = said.site if isinstance(said, Refusal) else ""
            if name in self._public and keys.is_signed(
                self._public[name], f"reply of {name}", block, signature
            ):
                self._names[which] = name


def coordinate(coordinator: Coordinator, grid: PromptGrid, on_round: OnRound) -> dict[str, Any]:
    """Run a federation over a Grid and return the run's summary."""
    key = keys.read_private_key(coordinator.directory / "server.key")
    federation, plan, folder = coordinator.federation, coordinator.plan, coordinator.folder
    admission, agreed = coordinator.admission(), federation.agreed(plan)
    form = partial(expect_form, coordinator.workshop(), sums=coordinator.form.lengths)
    plain = FlowerTransport(grid, federation, key, agreed, admission, form, folder.waits)
    transport: Transport = plain
    if plan.secure_aggregation.threshold:
        attempts = folder.path / ATTEMPTS
        transport = _secure(plain, federation, plan, attempts, admission, form)
    begin = partial(plain.wait_until_ready, federation.run)
    sockets = getattr(grid, "sockets", tuple)  # somebody else's SuperLink counts none
    check_log(plan.run.log)
    with Log(plan.run.log, folder.path) as log:
        return coordinator.run(transport, plain, log.and_tell(on_round), begin, sockets)


def _secure(
    carrier: Carrier,
    federation: Federation,
    plan: Plan,
    attempts: Path,
    admission: Admission,
    form: Callable[[Task], Form],
) -> Secured:
    """Return the server's side: a transport that delivers sums instead of single replies.

    attempts: the file of transport.Attempts. form: returns that of a plain reply to a task.
    """
    coding = federation.coding(plan)
    layouts = dict[int, Form]()

    def layout(task: Task) -> Form:
        # Finding the form takes a training step on synthetic records: do it once per round.
        if task.round not in layouts:
            layouts.clear()
            found = form(task)
            layouts[task.round] = coding.layout(found)
        return layouts[task.round]

    def fault(site: str, task: Task, reply: Reply) -> str | None:
        return admission.fault(site, task, reply, coding.form(layout(task)))

    def mean_fault(task: Task, sites: list[str], mean: State, error: float) -> str | None:
        # Where replies were clamped on the way, their mean is near what was told clamped.
        vectors = {n: v.clamp(-coding.limit, coding.limit) for n, v in task.vectors.items()}
        return admission.mean_fault(replace(task, vectors=vectors), sites, mean, error)

    circle, patience = MaskingGraph.of(plan, federation.sites), federation.patience
    server = Server(
        {site: keys.public_key(member.key) for site, member in federation.sites.items()},
        circle,
        coding,
        plan.rounds,
        max(circle.threshold, patience.least_replies),
        patience.retries,
        layout,
        fault,
        mean_fault,
    )
    return Secured(carrier, server, Attempts(attempts))


def serve_app(grid: "Grid", directory: Path) -> None:
    """Start or resume the run of a server's directory as a Flower app.

    Raises FedpactError: another process has the directory, or the run cannot continue.
    """
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    logging.getLogger("fedpact").setLevel(logging.INFO)
    with only_one(directory / LOCK, f"{directory} is in use already"):
        coordinator = Coordinator(directory)
        over = cast(PromptGrid, AppGrid(grid, coordinator.federation))
        tell = partial(print, flush=True)
        tell(TERMS)
        summary = coordinate(coordinator, over, lambda record: tell(describe_round(record)))
        tell(f"ended: {summary['status']}")


def serve(coordinator: Coordinator, address: str, on_round: OnRound) -> dict[str, Any]:
    """Run a federation at this machine's SuperLink, which listens at `address`.

    Raises FedpactError: it does not answer, or the run cannot continue.
    """
    link, number = SuperLink(address, tls(coordinator.directory)), None
    try:
        link.wait(_START_SECONDS)
        link.enrol(find_site_keys(coordinator.federation))
        number = link.start_run(APP)
        with link.grid(number, coordinator.directory / "runtime.secret") as grid:
            return coordinate(coordinator, grid, on_round)
    except httpx.HTTPError as error:
        stopped = False
        with suppress(httpx.HTTPError):
            stopped = number is not None and link.was_stopped(number)
        if stopped:
            raise FedpactError(
                f"the run was stopped by Flower's control API (StopRun of run {number}), and not "
                "by this server: somebody with a party's key has asked for it on this machine. "
                "Started again, the server goes on from the last committed round"
            ) from None
        raise TransportLost(
            f"Flower's SuperLink at {address} failed ({error}): see flower/log.txt in the server's "
            "directory; started again, the server goes on from the last committed round"
        ) from error
    finally:
        link.close()
