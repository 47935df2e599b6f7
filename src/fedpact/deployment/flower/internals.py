"""All that is used of Flower's internal modules; no other module imports them.

PromptGrid fetches answers without waiting for those that are not complete. SuperLink starts a run
and takes on its task. FleetLink is a site's connection to its server.

Flower's own SuperNode would be a second process of 140 MB beside each site's, and would run the
code that came with the run. A FleetLink makes the same requests from the site's own process.
Flower's modules with a web server or a database in them are not imported: they take 50 MB.
"""

import hashlib
import json
import logging
import queue
import ssl
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import httpx
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message
from flwr.app.message import remove_content_from_message
from flwr.common.constant import (
    HEARTBEAT_DEFAULT_INTERVAL,
    SUPERLINK_NODE_ID,
    TIMESTAMP_HEADER,
    SubStatus,
)
from flwr.common.serde import message_to_proto
from flwr.proto import control_pb2 as control
from flwr.proto import fleet_pb2 as fleet
from flwr.proto import runtime_pb2 as runtime
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ObjectTree
from flwr.proto.node_pb2 import Node, NodeInfo
from flwr.supercore.auth import create_superexec_auth_metadata, derive_auth_secret
from flwr.supercore.constant import (
    FLEET_HTTP_PUBLIC_KEY_HEADER,
    FLEET_HTTP_SIGNATURE_HEADER,
    FLWR_COMPONENT_NAME_METADATA_KEY,
    FLWR_PACKAGE_NAME_METADATA_KEY,
    FLWR_PACKAGE_VERSION_METADATA_KEY,
    TASK_TOKEN_HEADER,
    TaskType,
)
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.date import now
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import (
    inflate_object_from_contents,
    pull_objects,
    push_objects,
)
from flwr.supercore.protobuf.client import ProtobufCall, ProtobufRequestContext
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.supercore.version import package_name, package_version
from flwr.supernode.fleet_http_client import FleetHttpClient

from fedpact.common.errors import FedpactError
from fedpact.deployment.flower.program import CLIENT, SOCKETS

_log = logging.getLogger("fedpact.server")
_HERE_SECONDS: Final = 0.05
_RETRY_SECONDS: Final = 2
_START_SECONDS: Final = 60.0
_POLL_SECONDS: Final = 0.1
_HEARTBEAT_SECONDS: Final = 10.0
_WHOLE_SECONDS: Final = 60.0
_ACTIVATION_FAILED: Final = 2004  # flwr.supercore.error.ApiErrorCode, which loads a web server
_MoreHeaders = Callable[[ProtobufRequestContext], Mapping[str, str]]


class PromptGrid:
    """A Grid whose `pull_messages` returns at once, with the answers that have arrived in full.

    Flower's own waits for the content of an answer: for three minutes after a site was killed while
    it sent. Here the others come with a later call, whatever that asks for. A SuperLink that cannot
    be reached is tried again until the grid is closed; one that refuses, as it does once the run
    was stopped, raises httpx.HTTPStatusError. url: the SuperLink's. context: see `tls`. run:
    Flower's number of it.
    """

    def __init__(self, url: str, context: ssl.SSLContext, token: str, run: int) -> None:
        self._closed = threading.Event()
        headers = Headers("flwr-serverapp", lambda _: {TASK_TOKEN_HEADER: token}, self._closed)
        self._url, self._context = url, context
        self.client = RuntimeHttpClient(url, interceptors=[headers], verify=context)
        self._run, self._node = run, Node(node_id=SUPERLINK_NODE_ID)
        self._awaited = set[str]()  # to which messages answers are on their way
        # The answers that are here: None, if one never came in full.
        self._here = queue.SimpleQueue[tuple[str, Message | None]]()

    def close(self) -> None:
        """Disconnect, and give up what is being tried again."""
        self._closed.set()
        self.client.close()

    def sockets(self) -> Sequence[int]:
        """Return what sites' connections have carried since the SuperLink began, () if unknown."""
        with suppress(httpx.HTTPError, ValueError):
            return httpx.get(self._url + SOCKETS, verify=self._context).json()
        return ()

    def get_nodes(self) -> Iterable[NodeInfo]:
        """Return the sites' nodes that are connected."""
        return self.client.GetNodes(runtime.GetNodesRequest()).nodes

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages; return their numbers, in their order, "" for one that was not taken."""
        request = runtime.PushAppMessagesRequest
        told = [_push(self.client, self._node, each, request()) for each in messages]
        return [number for one in told for number in one.message_ids]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return answers to these messages, or to earlier ones, that have arrived in full."""
        # Of an answer that has been fetched a SuperLink says that there never was any.
        if asked := [number for number in message_ids if number not in self._awaited]:
            self._fetch_all(asked)
        found = list[Message]()
        while not self._here.empty():
            number, message = self._here.get()
            self._awaited.discard(number)
            if message is not None:
                found.append(message)
        return found

    def _fetch_all(self, asked: list[str]) -> None:
        told = self.client.PullMessages(runtime.PullAppMessagesRequest(message_ids=asked))
        fetching = list[threading.Thread]()
        for each, tree in zip(told.messages_list, told.message_object_trees, strict=True):
            about = each.metadata.reply_to_message_id
            self._awaited.add(about)
            arguments = about, each.metadata.message_id, tree
            fetching.append(threading.Thread(target=self._fetch, args=arguments, daemon=True))
            fetching[-1].start()
        for thread in fetching:
            # Most are there in full; then they come with this call.
            thread.join(_HERE_SECONDS)

    def _fetch(self, about: str, number: str, tree: ObjectTree) -> None:
        """Wait for an answer's content, tell Flower that it is here, and put it with the others."""
        message = None
        try:
            found = _pull(self.client, self._node, self._run, number, tree)
            # What it says inside is no more than its sender's word. Under which question it was
            # filed at the SuperLink follows from that question's number, a hash with a signature
            # in it, which only the site that was asked has been told.
            if found.metadata.reply_to_message_id == about:
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
    """A new SuperLink at `address`: its Control API, and the task of a run. context: see `tls`."""

    def __init__(self, address: str, context: ssl.SSLContext) -> None:
        self._url, self._context = f"https://{address}", context
        self._client = ControlHttpClient(
            self._url, interceptors=[Headers("fedpact")], verify=context
        )

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def wait(self, seconds: float) -> None:
        """Wait until it answers. Raises FedpactError: it does not, or with another certificate."""
        end = time.monotonic() + seconds
        while True:
            try:
                self._client.ListNodes(control.ListNodesRequest())
                return
            except httpx.TransportError as error:
                if time.monotonic() > end:
                    raise FedpactError(
                        f"no SuperLink answers at {self._url} within {seconds:g} s ({error}): "
                        "see the log of the server's directory"
                    ) from None
            time.sleep(_POLL_SECONDS)

    def enrol(self, sites: Mapping[str, bytes]) -> None:
        """Let sites connect: each name with its own public key, PEM."""
        for name, key in sites.items():
            self._client.RegisterNode(control.RegisterNodeRequest(public_key=key, name=name))

    def was_stopped(self, run: int) -> bool:
        """Whether somebody has stopped a run by the Control API."""
        found = self._client.ListRuns(control.ListRunsRequest(run_id=run)).run_dict.get(run)
        return found is not None and found.status.sub_status == SubStatus.STOPPED

    def start_run(self, app: Path) -> int:
        """Start a run with the Flower app in `app`, and return its number."""
        from flwr.cli.build import build_fab_from_disk
        from flwr.common.serde import fab_to_proto
        from flwr.supercore.fab import Fab

        bundle = build_fab_from_disk(app)
        fab = fab_to_proto(Fab(hashlib.sha256(bundle).hexdigest(), bundle, {}))
        return self._client.StartRun(control.StartRunRequest(fab=fab)).run_id

    @contextmanager
    def grid(self, run: int, secret: Path) -> Generator[PromptGrid]:
        """Give a run's Grid, and keep its task alive.

        secret: the file with the secret that both ends know. Raises FedpactError: the SuperLink
        does not hand out the run.
        """
        token = self._token_of(run, secret)
        with closing(PromptGrid(self._url, self._context, token, run)) as grid:
            client, alive = grid.client, runtime.SendTaskHeartbeatRequest()
            with _beats(lambda: client.SendTaskHeartbeat(alive)):
                given = client.PullTaskInput(runtime.PullTaskInputRequest())
                TaskIdentity.task_id, TaskIdentity.run_id = given.task_id, given.run.run_id
                TaskIdentity.node_id = given.context.node_id
                yield grid

    def _token_of(self, run: int, secret: Path) -> str:
        """Take on a run's task; tasks of others, which somebody may have submitted, wait."""
        derived = derive_auth_secret(secret.read_bytes())

        def prove(of: ProtobufRequestContext) -> Mapping[str, str]:
            return create_superexec_auth_metadata(
                auth_secret=derived, method=of.rpc_method, request=of.message
            )

        end = time.monotonic() + _START_SECONDS
        request = runtime.AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP])
        headers = Headers("fedpact", prove)
        client = RuntimeHttpClient(self._url, interceptors=[headers], verify=self._context)
        with closing(client):
            while time.monotonic() < end:
                with suppress(httpx.HTTPError):
                    found = client.AcquireTask(request)
                    if found.HasField("task") and found.token and found.task.run_id == run:
                        return found.token
                time.sleep(_POLL_SECONDS)
        raise FedpactError(f"the SuperLink did not hand out run {run}: see the log of the server")


class FleetLink:
    """A site's connection to the Fleet API of its server, as a SuperNode's.

    key: the site's private key. context: see `tls`. most: the longest question in bytes, which
    limits what the server may send in one call. Methods raise httpx.HTTPError where the server is
    away, refuses or exceeds the limit; `next` and `answer` also whatever Flower's modules raise.
    """

    def __init__(
        self, address: str, context: ssl.SSLContext, key: ec.EllipticCurvePrivateKey, most: int
    ) -> None:
        self._public, self._node = public_pem(key.public_key()), Node()
        self._most = self._left = most

        def sign(_: ProtobufRequestContext) -> dict[str, str]:
            stamp = now().isoformat()
            signature = key.sign(stamp.encode("ascii"), ec.ECDSA(hashes.SHA256()))
            return {
                FLEET_HTTP_PUBLIC_KEY_HEADER: b64encode(self._public).decode("ascii"),
                TIMESTAMP_HEADER: stamp,
                FLEET_HTTP_SIGNATURE_HEADER: b64encode(signature).decode("ascii"),
            }

        headers = Headers("SuperNode", sign)
        self._client = FleetHttpClient(f"https://{address}", interceptors=[headers], verify=context)
        connection = self._client._client  # pyright: ignore[reportPrivateUsage]
        # Or a dishonest server could have a site send requests to other machines of its network.
        connection.follow_redirects = False
        connection.event_hooks = {"response": [self._check_body]}

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    @contextmanager
    def enter(self, known: int | None, on_beat: Callable[[], None]) -> Generator[int]:
        """Give the number under which the server knows this site's node, once it lets it in.

        The connection that a killed process of this site has left behind, under the number `known`,
        is given up: it would turn away its successor for a minute. on_beat: called now and then, in
        another thread, while the server says that the node is alive. Raises ssl.SSLError, too.
        """
        if known is not None:
            self._leave(known)
        interval = HEARTBEAT_DEFAULT_INTERVAL
        request = fleet.ActivateNodeRequest(public_key=self._public, heartbeat_interval=interval)
        number = self._client.ActivateNode(request).node_id
        self._node = Node(node_id=number)
        beat = SendNodeHeartbeatRequest(node=self._node, heartbeat_interval=interval)
        try:
            with _beats(lambda: self._client.SendNodeHeartbeat(beat).success and on_beat()):
                yield number
        finally:
            with suppress(httpx.TransportError):
                self._leave(number)

    def next(self) -> Message | None:
        """Return a question that waits for this site, in full; None if there is none."""
        self._left = self._most
        found = self._client.PullMessages(fleet.PullMessagesRequest(node=self._node))
        if not found.messages_list:
            return None
        about, tree = found.messages_list[0].metadata, found.message_object_trees[0]
        # Of a server that was killed while it sent a question, the rest never comes.
        message = _pull(
            self._client, self._node, about.run_id, about.message_id, tree, _WHOLE_SECONDS
        )
        TaskIdentity.task_id, TaskIdentity.run_id = 0, about.run_id
        TaskIdentity.node_id = self._node.node_id
        return message

    def answer(self, message: Message, seconds: float) -> None:
        """Send an answer, which took so long to make."""
        request = fleet.PushMessagesRequest(node=self._node, clientapp_runtime_list=[seconds])
        self._left = self._most
        _push(self._client, self._node, message, request)

    def _leave(self, node: int) -> None:
        # Refused where it is not connected, or a new database knows it under another number.
        with suppress(httpx.HTTPStatusError):
            self._client.DeactivateNode(fleet.DeactivateNodeRequest(node_id=node))

    def _check_body(self, response: httpx.Response) -> None:
        """Raise httpx.RemoteProtocolError for a body that may fill the memory.

        One megabyte of a compressed body may expand to a gigabyte. Flower's servers compress
        nothing, and declare the length of each body.
        """
        length = response.headers.get("content-length", "")
        self._left -= int(length) if length.isdecimal() else self._most + 1
        if self._left < 0 or "content-encoding" in response.headers:
            raise httpx.RemoteProtocolError(
                "it sends a compressed body, one of undeclared length, or more than the plan's "
                f"longest message, {self._most} bytes"
            )


class Headers:
    """Adds Flower's version to each request, and `more` headers.

    Flower's own interceptors, which do the same, load its web server and end the process where
    versions differ. closed: given, a server that cannot be reached is tried again until it is set.
    """

    def __init__(
        self,
        component: str,
        more: _MoreHeaders = lambda _: {},
        closed: threading.Event | None = None,
    ) -> None:
        self._flower = {
            FLWR_PACKAGE_NAME_METADATA_KEY: package_name,
            FLWR_PACKAGE_VERSION_METADATA_KEY: package_version,
            FLWR_COMPONENT_NAME_METADATA_KEY: component,
        }
        self._more, self._closed = more, closed

    def intercept(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> httpx.Response:
        """Send a request as Flower's clients want it."""
        context.request.headers.update({**self._flower, **self._more(context)})
        while True:
            try:
                return call_next(context)
            except httpx.TransportError:
                if self._closed is None or self._closed.wait(_RETRY_SECONDS):
                    raise


def _push(client: Any, node: Node, message: Message, request: Any) -> Any:
    """Send a message's head by a `request`, then its parts; return the answer to the head."""
    message.metadata.__dict__["_message_id"] = message.object_id
    with no_object_id_recompute():
        request.messages_list.append(message_to_proto(remove_content_from_message(message)))
        request.message_object_trees.append(get_object_tree(message))
        told = client.PushMessages(request)
        push = make_push_object_fn_protobuf(
            client.PushObject, node, message.metadata.run_id, told.session_id
        )
        parts = get_all_nested_objects(message)
        push_objects(parts, push, object_ids_to_push=set(told.objects_to_push))
    return told


def _pull(
    client: Any, node: Node, run: int, number: str, tree: ObjectTree, seconds: float | None = None
) -> Message:
    """Return a message whose parts are in `tree`, and tell Flower that it is here.

    Parts that are still on their way are waited for, so many `seconds`; None: Flower's two hours.
    """
    more: dict[str, Any] = {} if seconds is None else {"max_time": seconds}
    numbers = [each.object_id for each in iterate_object_tree(tree)]
    pull = make_pull_object_fn_protobuf(client.PullObject, node, run)
    contents = pull_objects(numbers, pull, **more)
    client.ConfirmMessageReceived(
        ConfirmMessageReceivedRequest(node=node, run_id=run, message_object_id=number)
    )
    message = inflate_object_from_contents(number, contents)
    if not isinstance(message, Message):
        raise TypeError(f"a {type(message).__name__} came where a message is expected")
    # A message does not contain its own number.
    message.metadata.__dict__["_message_id"] = number
    return message


@contextmanager
def _beats(beat: Callable[[], object]) -> Generator[None]:
    done = threading.Event()

    def run() -> None:
        while not done.is_set():
            with suppress(httpx.HTTPError, OSError, RuntimeError):  # or the client is closed
                beat()
            done.wait(_HEARTBEAT_SECONDS)

    threading.Thread(target=run, daemon=True).start()
    try:
        yield
    finally:
        done.set()


def read_refusal(response: httpx.Response) -> tuple[bool, str]:
    """Return whether a node's key was not let in, and what a server said, in words."""
    try:
        told = json.loads(response.text)
        code, detail = int(told["code"]), str(told["detail"])
    except (ValueError, KeyError, TypeError):
        return False, f"status {response.status_code}"
    return code == _ACTIVATION_FAILED, f"code {code}: {detail}"


def public_pem(key: ec.EllipticCurvePublicKey) -> bytes:
    """Return a public key as Flower has it."""
    form = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    return key.public_bytes(*form)
