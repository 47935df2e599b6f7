"""All that is used of Flower beside its public names; no other module imports the rest.

The Grid waits for nobody, the Control API starts and ends runs, a Fleet connection knocks for a
site, and a queue takes on tasks of a SuperLink's or a SuperNode's Runtime API.

A SuperLink knows of an answer before it has its content. Flower's own Grid, once it has been told
of one, waits for the content, and with it whoever asked: for three minutes after a site was killed
in the midst of sending, while the other sites' answers lie there.

Flower's own way starts a Python process for each message and runs in it the code that came with the
run. A process that stays is a hundred times quicker, and the only code it runs is what its owner
has installed.
"""

import hashlib
import logging
import queue
import ssl
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import httpx
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Context, Message
from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL, SubStatus
from flwr.common.serde import fab_to_proto, run_from_proto
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    ListRunsRequest,
    RegisterNodeRequest,
    StartRunRequest,
    StopRunRequest,
)
from flwr.proto.fleet_pb2 import ActivateNodeRequest, DeactivateNodeRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ObjectTree
from flwr.proto.node_pb2 import NodeInfo
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullAppMessagesRequest,
    PullTaskInputRequest,
    PushTaskOutputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.supercore.constant import TaskType
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents, pull_objects
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.protobuf.client import ProtobufClientInterceptor
from flwr.supercore.retry import RetryInvoker, exponential
from flwr.supercore.run import Run
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message

from fedpact.common.errors import FedpactError
from fedpact.deployment.flower.program import CLIENT, SOCKETS

_log = logging.getLogger("fedpact.server")
_HERE_SECONDS = 0.05
_RETRY_SECONDS = 2
_START_SECONDS = 60.0
_POLL_SECONDS = 0.1
_HEARTBEAT_SECONDS = 10.0
_ACQUIRE = frozenset({"/flwr.proto.Runtime/AcquireTask"})


class PromptGrid:
    """A Grid whose `pull_messages` returns at once, with the answers that are there in full.

    The others come with a later call, whatever that asks for. A SuperLink that cannot be reached is
    tried again until the grid is closed; one that refuses, as it does once the run was stopped,
    raises httpx.HTTPStatusError. Flower's own Grid retries without end, in threads that a process
    waits for when it exits, and interrupts the process when it is refused.
    url: the SuperLink's. context: see `tls`. run: Flower's number of it.
    """

    def __init__(self, url: str, context: ssl.SSLContext, token: str, run: Run) -> None:
        # A site has none, and need not load the databases that come with it.
        from flwr.superlink.grid import HttpGrid

        self._closed = threading.Event()
        again = RetryInvoker(
            lambda: exponential(max_delay=_RETRY_SECONDS),
            httpx.TransportError,
            max_tries=None,
            max_time=None,
            should_giveup=lambda _: self._closed.is_set(),
            wait_function=self._pause,
        )
        # Flower's own has no place for a certificate to show.
        self._url, self._context = url, context
        self._client = RuntimeHttpClient(
            url,
            interceptors=[
                RuntimeVersionHttpInterceptor(component_name="flwr-serverapp"),
                RuntimeTokenHttpInterceptor(token=token),
            ],
            verify=context,
            retry_invoker=again,
        )
        self._grid = HttpGrid(url, token=token)
        self._grid._client = self._client
        self._grid.set_run(run)
        self._run, self._node = run.run_id, self._grid.node
        # To which messages answers are on their way, and the answers that are here: None, if one
        # never came in full.
        self._awaited = set[str]()
        self._here = queue.SimpleQueue[tuple[str, Message | None]]()

    def close(self) -> None:
        """Disconnect, and give up what is being tried again."""
        self._closed.set()
        self._client.close()

    def sockets(self) -> Sequence[int]:
        """Return what sites' connections have carried since the SuperLink began, () if unknown."""
        with suppress(httpx.HTTPError, ValueError):
            return httpx.get(self._url + SOCKETS, verify=self._context).json()
        return ()

    def get_nodes(self) -> Iterable[NodeInfo]:
        """Return the sites' nodes that are connected."""
        return self._grid.get_nodes()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages; return their numbers, in their order."""
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return answers to these messages, or to earlier ones, that have arrived in full."""
        # Of an answer that has been fetched a SuperLink says that there never was any.
        asked = [number for number in message_ids if number not in self._awaited]
        fetching = self._fetch_all(asked) if asked else []
        for thread in fetching:
            # Most are there in full; then they come with this call.
            thread.join(_HERE_SECONDS)
        found = list[Message]()
        while not self._here.empty():
            number, message = self._here.get()
            self._awaited.discard(number)
            if message is not None:
                found.append(message)
        return found

    def _pause(self, seconds: float) -> None:
        self._closed.wait(seconds)

    def _fetch_all(self, asked: list[str]) -> list[threading.Thread]:
        told = self._client.PullMessages(PullAppMessagesRequest(message_ids=asked))
        fetching = list[threading.Thread]()
        for each, tree in zip(told.messages_list, told.message_object_trees, strict=True):
            about = each.metadata.reply_to_message_id
            self._awaited.add(about)
            arguments = about, each.metadata.message_id, tree
            fetching.append(threading.Thread(target=self._fetch, args=arguments, daemon=True))
            fetching[-1].start()
        return fetching

    def _fetch(self, about: str, number: str, tree: ObjectTree) -> None:
        """Wait for an answer's content, tell Flower that it is here, and put it with the others."""
        client, run, message = self._client, self._run, None
        try:
            contents = pull_objects(
                [each.object_id for each in iterate_object_tree(tree)],
                make_pull_object_fn_protobuf(client.PullObject, self._node, run),
            )
            client.ConfirmMessageReceived(
                ConfirmMessageReceivedRequest(node=self._node, run_id=run, message_object_id=number)
            )
            found = inflate_object_from_contents(number, contents)
            # What it says inside is no more than its sender's word. Under which question it was
            # filed at the SuperLink follows from that question's number, a hash with a signature
            # in it, which only the site that was asked has been told.
            if isinstance(found, Message) and found.metadata.reply_to_message_id == about:
                message = found
            else:
                _log.warning("an answer says that it answers another question: left out")
        except Exception as error:  # what a stranger sent may be unreadable in any way
            # Who was asked does not answer, which is how it is treated.
            _log.warning("an answer never arrived in full: %s", error)
        finally:
            self._here.put((about, message))


def tls(directory: Path) -> ssl.SSLContext:
    """Return how a party's connections to a SuperLink show who it is, and see who that is.

    directory: the party's, with the authority's certificate and program.CLIENT.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(directory / "ca.crt")
    context.load_cert_chain(directory / CLIENT)
    return context


class SuperLink:
    """The Control API of a SuperLink at `address`. context: see `tls`."""

    def __init__(self, address: str, context: ssl.SSLContext) -> None:
        self._client = ControlHttpClient(
            f"https://{address}",
            interceptors=[RuntimeVersionHttpInterceptor(component_name="fedpact")],
            verify=context,
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

    def enrol(self, sites: Mapping[str, bytes]) -> None:
        """Let sites connect: each name with its own public key, PEM."""
        known = {
            n.public_key.strip() for n in self._client.ListNodes(ListNodesRequest()).nodes_info
        }
        for name, key in sites.items():
            if key.strip() not in known:
                self._client.RegisterNode(RegisterNodeRequest(public_key=key, name=name))

    def was_stopped(self, run: int) -> bool:
        """Whether somebody has stopped a run by the Control API."""
        found = self._client.ListRuns(ListRunsRequest(run_id=run)).run_dict.get(run)
        return found is not None and found.status.sub_status == SubStatus.STOPPED

    def start_run(self, app: Path) -> int:
        """End earlier runs, start one with the Flower app in `app`, and return its number."""
        from flwr.cli.build import build_fab_from_disk

        for number, run in self._client.ListRuns(ListRunsRequest()).run_dict.items():
            if run.status.status != "finished":
                self._client.StopRun(StopRunRequest(run_id=number))
        bundle = build_fab_from_disk(app)
        fab = fab_to_proto(Fab(hashlib.sha256(bundle).hexdigest(), bundle, {}))
        return self._client.StartRun(StartRunRequest(fab=fab)).run_id


class TaskQueue:
    """Where tasks are taken on: the Runtime API of a SuperLink, with TLS, or of a SuperNode.

    secret: the file with the secret that both ends know. context: a SuperLink's (`tls`); None at a
    SuperNode.
    """

    def __init__(self, address: str, secret: Path, context: ssl.SSLContext | None = None) -> None:
        self._context = context
        self._url = f"{'http' if context is None else 'https'}://{address}"
        self._kind = TaskType.CLIENT_APP if context is None else TaskType.SERVER_APP
        # A busy machine takes long to start a SuperNode; given up too early, it never would.
        self._seen = time.monotonic() + _START_SECONDS
        self._client = self._connect(
            SuperExecAuthHttpInterceptor(
                master_secret=secret.read_bytes(), protected_methods=_ACQUIRE
            )
        )

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    @property
    def silent_seconds(self) -> float:
        """For how long nobody has answered there."""
        return time.monotonic() - self._seen

    def next(self) -> tuple[int, str] | None:
        """Take on a waiting task; return its run and token, or None where there is none to have."""
        try:
            found = self._client.AcquireTask(AcquireTaskRequest(supported_task_types=[self._kind]))
        except httpx.HTTPError:
            return None
        self._seen = time.monotonic()
        return (found.task.run_id, found.token) if found.HasField("task") and found.token else None

    def answer(
        self, token: str, respond: Callable[[Message], Message], alive: Callable[[], bool]
    ) -> None:
        """Carry out a site's task: `respond` to its message. Raises what Flower's inside does.

        alive: whether the message may still come, where its server was lost before it was whole.
        """
        with self._work(token) as client:
            message, context = _pull(client, alive)
            push_message(client, respond(message), context)

    @contextmanager
    def grid(self, run: int) -> Generator[PromptGrid]:
        """Give the Grid of a run, as a server's task. Raises FedpactError: it is not handed out."""
        if self._context is None:
            raise FedpactError("a site's tasks have no Grid")
        token = self._token_of(run)
        with self._work(token) as client:
            given = client.PullTaskInput(PullTaskInputRequest())
            TaskIdentity.task_id, TaskIdentity.run_id = given.task_id, given.run.run_id
            TaskIdentity.node_id = given.context.node_id
            grid = PromptGrid(self._url, self._context, token, run_from_proto(given.run))
            with closing(grid):
                yield grid

    def _token_of(self, run: int) -> str:
        """Take on a run's task; tasks of others, which somebody may have submitted, wait."""
        end = time.monotonic() + _START_SECONDS
        while time.monotonic() < end:
            found = self.next()
            if found is not None and found[0] == run:
                return found[1]
            time.sleep(_POLL_SECONDS)
        raise FedpactError(f"the SuperLink did not hand out run {run}: see the log of the server")

    @contextmanager
    def _work(self, token: str) -> Generator[RuntimeHttpClient]:
        """Give a client for one task, keep the task alive, and report how it ended."""
        client = self._connect(RuntimeTokenHttpInterceptor(token))
        done = threading.Event()
        beats = threading.Thread(target=_beat, args=(client, done), daemon=True)
        beats.start()
        status, details = SubStatus.FAILED, "ended early"
        try:
            yield client
            status, details = SubStatus.COMPLETED, ""
        finally:
            done.set()
            with suppress(httpx.HTTPError):
                client.PushTaskOutput(PushTaskOutputRequest(sub_status=status, details=details))
            beats.join()
            client.close()

    def _connect(self, interceptor: ProtobufClientInterceptor) -> RuntimeHttpClient:
        version = RuntimeVersionHttpInterceptor(component_name="fedpact")
        return RuntimeHttpClient(
            self._url, interceptors=[version, interceptor], verify=self._context or False
        )


def _beat(client: RuntimeHttpClient, done: threading.Event) -> None:
    while not done.is_set():
        with suppress(httpx.HTTPError):
            client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
        done.wait(_HEARTBEAT_SECONDS)


def _pull(client: RuntimeHttpClient, alive: Callable[[], bool]) -> tuple[Message, Context]:
    """Return a task's message and context. Raises what Flower's inside does.

    A message whose server was lost before it was whole stays so, and Flower waits two hours for the
    rest: here no longer than there is somebody. Raises TimeoutError.
    """
    found: queue.SimpleQueue[tuple[Message, Context] | Exception] = queue.SimpleQueue()

    def pull() -> None:
        try:
            found.put(pull_task_input(client)[:2])
        except Exception as error:
            found.put(error)

    threading.Thread(target=pull, daemon=True).start()
    while True:
        try:
            pulled = found.get(timeout=_POLL_SECONDS)
        except queue.Empty:
            if not alive():
                raise TimeoutError("its question was not whole when the server was lost") from None
            continue
        if isinstance(pulled, Exception):
            raise pulled
        return pulled


@contextmanager
def knock(
    address: str, context: ssl.SSLContext, key: ec.EllipticCurvePrivateKey, known: int | None
) -> Generator[int]:
    """Give the number under which a server knows a site's node, once it lets it in.

    The connection that a killed process of this site has left behind, under the number `known`, is
    given up: it would turn away its successor for a minute. context: see `tls`.
    Raises httpx.HTTPError, ssl.SSLError.
    """
    link = FleetHttpClient(
        f"https://{address}",
        interceptors=[
            RuntimeVersionHttpInterceptor(component_name="SuperNode"),
            NodeAuthHttpInterceptor(key, key.public_key()),
        ],
        verify=context,
    )
    with link as client:
        if known is not None:
            _leave(client, known)
        request = ActivateNodeRequest(
            public_key=public_pem(key.public_key()),
            heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL,
        )
        node = client.ActivateNode(request).node_id
        yield node
        _leave(client, node)


def _leave(client: FleetHttpClient, node: int) -> None:
    # Refused where it is not connected, or a new database knows it under another number.
    with suppress(httpx.HTTPStatusError):
        client.DeactivateNode(DeactivateNodeRequest(node_id=node))


def read_refusal(response: httpx.Response) -> tuple[bool, str]:
    """Return whether a node's key was not let in, and what a server said, in words."""
    error = FlowerError.from_json(response.text)
    if error is None:
        return False, f"status {response.status_code}"
    turned_away = error.code == ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED
    return turned_away, f"code {error.code}: {error.message}"


def public_pem(key: ec.EllipticCurvePublicKey) -> bytes:
    """Return a public key as Flower has it."""
    form = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    return key.public_bytes(*form)
