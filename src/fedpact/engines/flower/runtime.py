"""The inside of Flower's process isolation: a process of ours takes on tasks and answers them.

Flower's own way starts a Python process for each message and runs in it the code that came with the
run. A process that stays is a hundred times quicker, and the only code it runs is what its owner
has installed. All that we use of Flower beside its public names is imported here, in `control`, in
`gate`, in `database` and in `inbox`.
"""

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
from flwr.common.constant import SubStatus
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PushTaskOutputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.proto.task_pb2 import Task
from flwr.supercore.constant import TaskType
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.protobuf.client import ProtobufClientInterceptor
from flwr.supercore.runtime import RuntimeHttpClient

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
