"""A site's process under Flower: its gate, its runtime, and its worker.

Flower's SuperNode tells a code, or ends without a word. The same question, asked by us, has an
answer that the site's owner can act on. It also gives up the connection that a killed process of
this site has left behind, which would turn away its successor for a minute.

Flower's own way starts a Python process for each message and runs in it the code that came with the
run. A process that stays is a hundred times quicker, and the only code it runs is what its owner
has installed. All that we use of Flower beside its public names is imported here, in `control`, in
`gate`, in `database` and in `inbox`.
"""

import datetime
import email.utils
import logging
import queue
import ssl
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Context, Message, RecordDict
from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL, SubStatus
from flwr.proto.fleet_pb2 import ActivateNodeRequest, DeactivateNodeRequest
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PushTaskOutputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.proto.task_pb2 import Task
from flwr.supercore.constant import TaskType
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.protobuf.client import ProtobufClientInterceptor
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message

from fedpact.common.errors import FedpactError, InputError
from fedpact.common.files import write_whole
from fedpact.common.messages import Refusal, Step, from_bytes, to_bytes
from fedpact.common.messages import Task as TrainingTask
from fedpact.deployment.site import Site, answer
from fedpact.simulation import flower_records
from fedpact.simulation.secure_aggregation import keys

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
    key, address = keys.read_private_key(directory / "site.key"), site.federation.address
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


_ACQUIRE = frozenset({"/flwr.proto.Runtime/AcquireTask"})
_HEARTBEAT_SECONDS = 10.0


class TaskQueue:
    """Where tasks of one kind are taken on: a SuperLink's or a SuperNode's Runtime API.

    secret: the file with the secret that both ends know. root: the certificate of a TLS address.
    """

    def __init__(self, address: str, kind: TaskType, secret: Path, root: Path | None) -> None:
        self.address, self._kind = address, kind
        self._seen = time.monotonic()
        self.root = None if root is None else root.read_bytes()
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

    def next(self) -> tuple[Task, str] | None:
        """Take on a waiting task; return it and its token, or None where there is none to have."""
        try:
            found = self._client.AcquireTask(AcquireTaskRequest(supported_task_types=[self._kind]))
        except httpx.HTTPError:
            return None
        self._seen = time.monotonic()
        return (found.task, found.token) if found.HasField("task") and found.token else None

    @contextmanager
    def work(self, token: str) -> Generator[RuntimeHttpClient]:
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
        return RuntimeHttpClient.from_server_address(
            self.address, self.root is None, self.root, [version, interceptor]
        )


def _beat(client: RuntimeHttpClient, done: threading.Event) -> None:
    while not done.is_set():
        with suppress(httpx.HTTPError):
            client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
        done.wait(_HEARTBEAT_SECONDS)


_log = logging.getLogger("fedpact.site")
_POLL_SECONDS = 0.1
# A SuperNode takes a few seconds to start.
_SILENT_SECONDS = 20.0


def respond(site: Site, key: ec.EllipticCurvePrivateKey, message: Message) -> Message:
    """Return a site's signed answer to a message; to one that its server did not sign, a refusal.

    key: the site's private key.
    """
    began = time.perf_counter()
    server = keys.public_key(site.federation.server_key)
    try:
        # A message may carry one of Flower's errors in place of a record.
        record = message.content if message.has_content() else RecordDict()
        block, signature = flower_records.from_record(record)
        seen, agreed = flower_records.read_seen(record), flower_records.read_agreed(record)
        signed = keys.is_signed(
            server, keys.signing_context(site.name, seen, agreed), block, signature
        )
    except InputError:
        block, seen, agreed, signed = b"", (0, ""), "", False
    if not signed:
        reply, told = to_bytes(Refusal("", 0, site.name, "unsigned")), "unsigned task refused"
    elif agreed != site.agreed:
        reply, told = _disagreed(site, block)
    else:
        reply, told = answer(site, block, seen)
    record = flower_records.to_record(reply, keys.sign(key, f"reply of {site.name}", reply))
    seconds = time.perf_counter() - began
    site.note(reply, seconds)
    _log.info("%s, in %.3f s", told, seconds)
    return Message(record, reply_to=message)


def _disagreed(site: Site, block: bytes) -> tuple[bytes, str]:
    """Return the refusal of a question under other terms, and what to write into the site's log."""
    try:
        question = from_bytes(block, site.most_vectors)
    except InputError:
        question = None
    about = (question.run, question.round) if isinstance(question, TrainingTask | Step) else ("", 0)
    told = (
        "refused: terms; the server has another plan.json or federation.toml than this site "
        "(columns, sizes, labels, any setting), or another version of fedpact: compare both files"
    )
    return to_bytes(Refusal(*about, site.name, "terms")), f"round {about[1]}: {told}"


def work(
    site: Site,
    directory: Path,
    alive: Callable[[], bool],
) -> None:
    """Answer tasks until `alive` says no, or nobody is at the SuperNode's end any more.

    It also ends after an answer that was not handed over: a SuperNode waits for it for ever, and
    for nothing else.
    directory: the site's, with its key and secret. Raises FedpactError: the site has stopped.
    """
    key = keys.read_private_key(directory / "site.key")
    address = f"127.0.0.1:{site.settings.port}"
    desk = TaskQueue(address, TaskType.CLIENT_APP, directory / "runtime.secret", None)
    try:
        while alive() and desk.silent_seconds < _SILENT_SECONDS:
            found = desk.next()
            if found is None:
                time.sleep(_POLL_SECONDS)
            else:
                handed_over = _serve(site, key, desk, found[1], alive)
                if site.stopped:
                    raise FedpactError(site.stopped)
                if not handed_over:
                    return
    finally:
        desk.close()


def _serve(
    site: Site,
    key: ec.EllipticCurvePrivateKey,
    desk: TaskQueue,
    token: str,
    alive: Callable[[], bool],
) -> bool:
    """Carry out one task; return whether its answer was handed over.

    What the network loses is asked for again, and then lies stored.
    """
    try:
        with desk.work(token) as client:
            message, context = _pulled(client, alive)
            push_message(client, respond(site, key, message), context)
    except Exception as error:  # whatever Flower's inside raises: `respond` raises nothing
        _log.warning("an answer was not handed over (%s): waiting to be asked again", error)
        return False
    return True


def _pulled(client: RuntimeHttpClient, alive: Callable[[], bool]) -> tuple[Message, Context]:
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
