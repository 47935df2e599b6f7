"""Sites on a Ray cluster: the actor that carries out tasks, and the cluster's side.

An actor keeps a model and a kernel, and nothing of a site: records come out of Ray's store, ledger
and memory from the run's folder. So any actor can take any site, in any round.

RAY_ADDRESS names a cluster that is there; without it this machine gets a Ray of its own, which ends
with the run. A thread for each actor hands it one site's task after another. Replies are yielded in
the order of site names, and a draw follows from (seed, site, round, step), so results depend
neither on the number of actors nor on which of them takes a site.
"""

import logging
import os
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import ray
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.server.superlink.fleet.vce.backend.raybackend import RayBackend
from flwr.simulation.ray_transport.ray_actor import BasicActorPool, ClientAppActor
from flwr.supercore.task_identity import TaskIdentity
from ray.exceptions import RayError

from fedpact.common import errors
from fedpact.common.errors import DataError, FedpactError
from fedpact.common.messages import Refusal, Reply, Task, from_bytes, to_bytes
from fedpact.privacy.accounting.accountant import History, SampledGaussian
from fedpact.simulation import flower_records
from fedpact.simulation.flower import ray_address
from fedpact.simulation.machine import available_cores
from fedpact.simulation.threads import VirtualSite
from fedpact.simulation.workshop import TrainingSetup, Worker

_PLACE = "partition-id"  # Flower's name for which of the virtual nodes it is
_opened: dict[Any, tuple["ActorState", Worker]] = {}


@dataclass(frozen=True)
class ActorState:
    """What all actors share. sites: references to VirtualSites in Ray's store, by their place."""

    workshop: TrainingSetup
    sites: Sequence[Any]


def open_app(reference: Any) -> ClientApp:
    """Return the app of the ActorState that a reference leads to; an actor keeps the last one's
    bench."""
    if reference not in _opened:
        torch.set_num_threads(1)
        kit: ActorState = ray.get(reference)
        _opened.clear()
        _opened[reference] = kit, kit.workshop.bench()
    kit, bench = _opened[reference]
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        try:
            site: VirtualSite = ray.get(kit.sites[int(context.node_config[_PLACE])])
            answer = _answer(site, bench, message)
        except Exception as error:
            answer = _failure(error)
        return Message(answer, reply_to=message)

    return app


def encode_task(place: int, block: bytes, run: int) -> tuple[Message, Context]:
    """Return what Flower hands to an actor: an encoded Task for the site at this place."""
    message = Message(
        flower_records.to_record(block, b""), dst_node_id=place + 1, message_type="train"
    )
    return message, Context(run, place + 1, {_PLACE: place}, RecordDict(), {})


def decode_answer(answer: RecordDict) -> tuple[bytes, History]:
    """Return the encoded answer of a site, and all that its run has been charged so far.

    Raises FedpactError, of the kind that was raised at the actor: the site failed there.
    """
    failure = answer.get("failure")
    if isinstance(failure, ConfigRecord):
        kind = getattr(errors, str(failure["kind"]), None)
        if isinstance(kind, type) and issubclass(kind, FedpactError):
            raise kind(str(failure["text"]))
        error = FedpactError(f"a site failed at its actor: {failure['kind']}: {failure['text']}")
        error.add_note(str(failure["trace"]))
        raise error
    spent: Any = answer["spent"]
    events = zip(spent["q"], spent["sigma"], spent["count"], strict=True)
    return flower_records.from_record(answer)[0], {
        SampledGaussian(q, sigma): count for q, sigma, count in events
    }


def _answer(site: VirtualSite, bench: Worker, message: Message) -> RecordDict:
    task = _decoded(flower_records.from_record(message.content)[0])
    with site.open_ledger() or nullcontext() as ledger:
        block = to_bytes(site.client(ledger).handle(task, bench))
        spent = ledger.spent(site.run) if ledger else {}
    record = flower_records.to_record(block, b"")
    record["spent"] = ConfigRecord(
        {
            "q": [event.q for event in spent],
            "sigma": [event.sigma for event in spent],
            "count": list(spent.values()),
        }
    )
    return record


def _failure(error: Exception) -> RecordDict:
    kind, trace = type(error).__name__, traceback.format_exc()
    return RecordDict({"failure": ConfigRecord({"kind": kind, "text": str(error), "trace": trace})})


def _decoded(block: bytes) -> Task:
    """Decode a task. Raises InputError: another kind of message, or none."""
    message = from_bytes(block)
    if not isinstance(message, Task):
        raise DataError(f"a {type(message).__name__} came where a task is expected")
    return message


_EACH = {"num_cpus": 1, "num_gpus": 0.0}
_RUN = 1  # Flower wants a number for the run; nothing depends on it


class RayTransport:
    """See messages.Transport. An actor for each site or for each core that Ray offers; fewer if
    `workers` says so.

    spent: what each site's ledger says before the first round; no ledger may be open here then.
    Raises FedpactError: Ray does not start, or the cluster has no core to offer.
    """

    traffic = None

    def __init__(
        self,
        sites: Sequence[VirtualSite],
        workshop: TrainingSetup,
        workers: int | None,
        spent: Mapping[str, History],
    ) -> None:
        self._places = {site.name: place for place, site in enumerate(sites)}
        self._spent = dict(spent)
        actors = min(workers or len(sites), len(sites))
        self._owned = _start_ray(actors)
        # Flower logs what it raises; it is told where it is caught.
        logging.getLogger("flwr").setLevel(logging.CRITICAL)
        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = _RUN
        self._backend = _Backend(actors)
        try:
            # References keep what is in the store: as long as this transport lives.
            self._kit = ray.put(ActorState(workshop, [ray.put(_alone(site)) for site in sites]))
            self._backend.build(partial(open_app, self._kit))
        except BaseException as error:
            self._backend.end(self._owned)
            if isinstance(error, ValueError):
                raise FedpactError(f"Ray at {ray_address()!r} offers no core: {error}") from error
            raise
        self._pool = ThreadPoolExecutor(self._backend.num_workers, "actor")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        # A task under way is waited for, as by threads: cut off, it might tear a ledger's line.
        try:
            self._pool.shutdown(cancel_futures=True)
        finally:
            self._backend.end(self._owned)

    @property
    def sites(self) -> tuple[str, ...]:
        return tuple(sorted(self._places))

    def spent(self, site: str) -> History:
        """Return what a site had been charged for this run when it last answered."""
        return self._spent[site]

    def exchange(self, tasks: dict[str, Task]) -> Iterator[Reply | Refusal]:
        """Send each of these sites its task; yield the answers in the order of their names. Raises
        FedpactError: a site failed, or its actor ended."""
        waiting = deque[Future[Reply | Refusal]]()
        for site in sorted(tasks):
            if len(waiting) >= 2 * self._backend.num_workers:
                yield waiting.popleft().result()
            waiting.append(self._pool.submit(self._ask, site, tasks[site]))
        while waiting:
            yield waiting.popleft().result()

    def _ask(self, site: str, task: Task) -> Reply | Refusal:
        message, context = encode_task(self._places[site], to_bytes(task), _RUN)
        try:
            reply, _ = self._backend.process_message(message, context)
        except RayError as error:
            raise FedpactError(
                f"the actor that trained site {site!r} in round {task.round} ended "
                f"({type(error).__name__}): its machine is gone or out of memory, or it cannot "
                "import what the run needs. Nothing committed is lost: see to that, and resume "
                "the run"
            ) from error
        block, self._spent[site] = decode_answer(reply.content)
        answer = from_bytes(block)
        if not isinstance(answer, Reply | Refusal):
            raise FedpactError(f"site {site!r} answered with a {type(answer).__name__}")
        return answer


class _Backend(RayBackend):
    """Flower's backend, with no more actors than there is use for."""

    def __init__(self, actors: int) -> None:
        super().__init__({"client_resources": _EACH})
        self._actors = actors

    def build(self, app_fn: Callable[[], ClientApp]) -> None:
        """Keep the function that makes the client app."""
        self.app_fn = app_fn
        actor: Any = ClientAppActor
        self.pool = BasicActorPool(actor, dict(_EACH), self.actor_kwargs)
        self.pool.add_actors_to_pool(min(self._actors, self.pool.actors_capacity))

    def end(self, owned: bool) -> None:
        """End the actors, and Ray with them where it is ours."""
        if owned:
            self.terminate()
        elif self.pool:
            self.pool.terminate_all_actors()


def _alone(site: VirtualSite) -> VirtualSite:
    """The site with records of its own: a view would take its whole tensor along."""
    x, y = site.records.x.clone(), site.records.y.clone()
    return replace(site, records=replace(site.records, x=x, y=y))


def _start_ray(actors: int) -> bool:
    """Start Ray here or join the cluster; return whether this process has to end it."""
    if ray.is_initialized():
        return False
    # Ray warns of how it will treat graphics cards one day; the actors use none.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    address = ray_address()
    here: dict[str, Any] = {}
    if address == "local":
        here = {"num_cpus": min(actors, available_cores()), "num_gpus": 0}
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        ray.init(address, include_dashboard=False, **quiet, **here)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise FedpactError(f"Ray does not start at {address!r}: {error}") from error
    return True
