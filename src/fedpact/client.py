"""A site's side of the wire, in simulation and deployment: it answers a Task using an oracle.

The client gives the algorithm its memory and an oracle, stores what the algorithm wants to
remember, and turns a refusal into a code. New memory is pending until a later Task says that the
reply of that round was included; otherwise it is dropped.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final, Generic, Protocol, TypeVar

import torch

from fedpact.algorithms.wrappers.base import Method
from fedpact.common.errors import BudgetExhausted, PolicyRefused, PrivacyError
from fedpact.common.files import parse_errors, write_whole
from fedpact.common.messages import (
    EVALUATION,
    Local,
    Refusal,
    Reply,
    State,
    Task,
    Vectors,
    encode_parts,
    from_bytes,
)
from fedpact.privacy.ledger.ledger import Ledger
from fedpact.privacy.oracle import Oracle
from fedpact.privacy.policy import Policy

Context = TypeVar("Context")
Payload = TypeVar("Payload", Task, State, Local)

_CPU: Final = torch.device("cpu")
_COMMITTED, _PENDING = "committed", "pending"
_NOTHING: Final = State()
"""The memory of an algorithm that stores nothing: one object, so that it is hashed once."""


_LOST = (
    "restore it from a backup; or move it away, and the algorithm starts without its memory of "
    "this site"
)


class MemoryStore(Protocol):
    """Where a site stores its memory: contents by name."""

    @property
    def path(self) -> Path:
        """The file, for messages."""
        ...

    def read(self, name: str) -> bytes | None:
        """Return what is stored under a name, None if nothing is."""
        ...

    def write(self, name: str, *content: bytes | memoryview) -> None:
        """Store these parts, joined, under a name."""
        ...


class MemoryFiles:
    """Memory in two files: memory.safetensors and pending-memory.safetensors.

    path: of the first.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def _file(self, name: str) -> Path:
        return self.path if name == _COMMITTED else self.path.with_name("pending-" + self.path.name)

    def read(self, name: str) -> bytes | None:
        """Return what is stored under a name, None if nothing is."""
        return self._file(name).read_bytes() if self._file(name).exists() else None

    def write(self, name: str, *content: bytes | memoryview) -> None:
        """Store these parts, joined, under a name."""
        write_whole(self._file(name), *content)


class Client(Generic[Context]):
    """One site. `Context` is what the engine computes with: a worker's model and kernel.

    size: the site's declared size, the weight of its replies.
    oracle: creates the oracle for one task, memory and context.
    ledger: None in a plain run.
    memory: a store, or the path of the first of two files. It is read once, at the start, and
    written after every task.
    policy: what the site's owner allows; None only in a simulation without one.
    examine: answers an EVALUATION task with sums over held-out records; None if there are none.
    device: where the oracle computes. Messages and memory always stay on the CPU.
    """

    def __init__(
        self,
        name: str,
        size: float,
        method: Method,
        oracle: Callable[[Task, State, Context], Oracle],
        ledger: Ledger | None,
        memory: Path | MemoryStore,
        policy: Policy | None = None,
        device: torch.device = _CPU,
        examine: Callable[[Task, State, Context], Vectors] | None = None,
    ) -> None:
        self.name, self._size = name, size
        self._method = method
        self._oracle, self.ledger = oracle, ledger
        self._memory, self._policy, self._device = _Memory(memory), policy, device
        self._examine = examine

    def _check(self, task: Task) -> None:
        if task.algorithm != self._method.name:
            raise PolicyRefused(
                f"a task of {task.algorithm!r} came to a site that takes part in "
                f"{self._method.name!r}"
            )
        if self._policy:
            self._policy.check_task(task.algorithm)

    def handle(self, task: Task, bench: Context) -> Reply | Refusal:
        """Answer a task. A refusal's code depends on public quantities only."""
        try:
            if task.algorithm == EVALUATION and self._examine is not None:
                # Held-out records: training memory is read here, and must not be written.
                memory = self.read_memory(task)
                return self._reply(task, Local(self._examine(task, memory, bench)))
            self._check(task)
            memory = self._memory.for_task(task)
            oracle = self._oracle(task, memory, bench)
            local = self._method.local(
                _moved(self._device, task), oracle, _moved(self._device, memory)
            )
            if oracle.shares:
                local = self._shared(local, oracle)
        except BudgetExhausted:
            return Refusal(task.run, task.round, self.name, "budget")
        except PrivacyError:
            return Refusal(task.run, task.round, self.name, "policy")
        self._memory.keep(task.round, _moved(_CPU, local.memory))
        return self._reply(task, local)

    def settle(self, task: Task) -> None:
        """Store as committed the memory of the round that the task says was included last.

        `handle` does so as well; done before, it writes nothing until it has computed.
        """
        self._memory.for_task(task)

    def read_memory(self, task: Task) -> State:
        """Return the memory as of the round that the task says was included last."""
        return self._memory.after(task.included)

    def reload_memory(self) -> None:
        """Read the memory again, after what was written has been rolled back."""
        self._memory.reload()

    def _reply(self, task: Task, local: Local) -> Reply:
        return Reply(
            run=task.run,
            round=task.round,
            site=self.name,
            weight=self._size,
            vectors=_moved(_CPU, local).vectors,
            numbers=local.numbers,
            ledger_head=self.ledger.head if self.ledger else "",
            ledger_length=self.ledger.length if self.ledger else 0,
        )

    def _shared(self, local: Local, oracle: Oracle) -> Local:
        """Return what secure aggregation may sum: the noisy shares on their grid, public numbers.

        The vectors in `local` were computed from the shares in floating point; their sum would not
        be the sum of the shares, which is what the guarantee covers.
        """
        if local.memory.vectors or local.memory.numbers:
            raise PolicyRefused(
                f"algorithm {self._method.name!r} remembers {[*local.memory.vectors]}, "
                f"{[*local.memory.numbers]}: nothing may follow from a share of noise alone"
            )
        public = {n: v for n, v in local.numbers.items() if n in self._method.facts.summed.public}
        known = {oracle.batch_size, oracle.noise_variance}
        if not known.issuperset(public.values()):
            raise PolicyRefused(
                f"algorithm {self._method.name!r} sends {public} beside its share of noise: "
                "expected the batch's expected size and its noise's variance, and nothing else"
            )
        return Local(dict(oracle.shares), public)


def read_memory(memory: Path | MemoryStore, included: int) -> State:
    """Return a site's memory as its next task would see it, without changing anything.

    memory: see Client. included: the last round whose reply the server included, -1 for none.
    Raises DataError: damaged.
    """
    return _Memory(memory).after(included)


def _moved(device: torch.device, held: Payload) -> Payload:
    """Return the payload on a device; the same object if it is there already."""
    if all(vector.device == device for vector in held.vectors.values()):
        return held
    vectors = {name: vector.to(device) for name, vector in held.vectors.items()}
    return replace(held, vectors=vectors)


class _Memory:
    """Two versions: the one whose reply the server has included, and the pending one."""

    def __init__(self, at: Path | MemoryStore) -> None:
        self._store, self._there = MemoryFiles(at) if isinstance(at, Path) else at, set[str]()
        self.reload()

    def reload(self) -> None:
        self._committed, self._committed_round = self._read(_COMMITTED)
        self._pending, self._pending_round = self._read(_PENDING)

    def after(self, included: int) -> State:
        """Return the memory as of the last included round, -1 for none; changes nothing."""
        newer = self._pending_round == included > self._committed_round
        return self._pending if newer else self._committed

    def for_task(self, task: Task) -> State:
        if self._pending_round == task.included > self._committed_round:
            # Write first: if that fails, memory is unchanged and the next task tries again.
            self._write(_COMMITTED, self._pending, self._pending_round)
            self._committed, self._committed_round = self._pending, self._pending_round
        return self._committed

    def keep(self, round_number: int, memory: State) -> None:
        if not (memory.vectors or memory.numbers):
            memory = _NOTHING
        self._pending, self._pending_round = memory, round_number
        self._write(_PENDING, memory, round_number)

    def _write(self, name: str, memory: State, round_number: int) -> None:
        # Most algorithms have no memory; then nothing is written.
        if memory is not _NOTHING or name in self._there:
            numbers = {**memory.numbers, "/round": round_number}
            self._store.write(name, *encode_parts(State(memory.vectors, numbers)))
            self._there.add(name)

    def _read(self, name: str) -> tuple[State, int]:
        block = self._store.read(name)
        if block is None:
            return _NOTHING, -1
        self._there.add(name)
        with parse_errors(self._store.path, _LOST):
            stored = from_bytes(block)
            numbers = dict(stored.numbers) if isinstance(stored, State) else {}
            vectors = stored.vectors if isinstance(stored, State) else {}
            number = int(numbers.pop("/round"))
        return State(vectors, numbers) if vectors or numbers else _NOTHING, number
