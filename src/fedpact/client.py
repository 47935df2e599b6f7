"""The client shell, the same for every engine: it stands between a Task and a site's oracle.

It chooses which memory the algorithm sees, gives it an oracle, keeps what it wants to remember, and
turns a refusal into a code. What an algorithm remembers is pending until a later Task says that the
reply of that round was included; if it was not, it is dropped.
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
"""The memory of an algorithm that has none: one object, so that it is hashed once."""


_LOST = (
    "put it back from a backup; or move what the algorithm remembers at this site away, and it "
    "begins anew"
)


class MemoryStore(Protocol):
    """Where a site keeps its memory: contents by name, in a file."""

    @property
    def path(self) -> Path:
        """The file, for messages."""
        ...

    def read(self, name: str) -> bytes | None:
        """Return what is kept under a name, None if nothing is."""
        ...

    def write(self, name: str, *content: bytes | memoryview) -> None:
        """Keep these parts under a name."""
        ...


class MemoryFiles:
    """A memory in files of its own: memory.safetensors, and pending-memory.safetensors beside it.

    path: the first one's.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def _file(self, name: str) -> Path:
        return self.path if name == _COMMITTED else self.path.with_name("pending-" + self.path.name)

    def read(self, name: str) -> bytes | None:
        """Return what is kept under a name, None if nothing is."""
        return self._file(name).read_bytes() if self._file(name).exists() else None

    def write(self, name: str, *content: bytes | memoryview) -> None:
        """Keep these parts under a name."""
        write_whole(self._file(name), *content)


class Client(Generic[Context]):
    """One site. `Context` is whatever the engine computes with: a worker's model and kernel.

    oracle: makes the site's oracle for one task and memory, on one bench.
    ledger: None in a plain run.
    memory: where the site keeps its memory, or the first of its files; it is read once and written
    after every task.
    policy: what the site's owner allows; None only in a simulation that has none.
    examine: answers a task of EVALUATION with the sums that it releases; None where there are none.
    device: where the oracle's numbers are; messages and memory are always in the CPU's memory.
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
                # Its records are others than those that `memory` follows from.
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

    def read_memory(self, task: Task) -> State:
        """Return what the site remembers of the round that a task says was included last."""
        return self._memory.after(task.included)

    def reload_memory(self) -> None:
        """Read the memory again: what was written since was taken back."""
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
        """Return what may be summed: the shares as they were rounded, and public numbers.

        What `local` made of them is rounded again, and a sum of that would be none of the shares'.
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
    """Return what a site remembers, as its next task would find it; only reads.

    memory: see Client. included: the round whose reply the server included last, -1 for none.
    Raises DataError: damaged.
    """
    return _Memory(memory).after(included)


def _moved(device: torch.device, held: Payload) -> Payload:
    """The same on a device; itself where it is there already."""
    if all(vector.device == device for vector in held.vectors.values()):
        return held
    vectors = {name: vector.to(device) for name, vector in held.vectors.items()}
    return replace(held, vectors=vectors)


class _Memory:
    """Two generations: what the server is known to have included, and what is pending."""

    def __init__(self, at: Path | MemoryStore) -> None:
        self._store, self._there = MemoryFiles(at) if isinstance(at, Path) else at, set[str]()
        self.reload()

    def reload(self) -> None:
        self._committed, self._committed_round = self._read(_COMMITTED)
        self._pending, self._pending_round = self._read(_PENDING)

    def after(self, included: int) -> State:
        """What is remembered of the round that was included last, -1 for none; nothing changes."""
        newer = self._pending_round == included > self._committed_round
        return self._pending if newer else self._committed

    def for_task(self, task: Task) -> State:
        if self._pending_round == task.included > self._committed_round:
            # Written first: where that fails, the next task finds it as it was, and tries again.
            self._write(_COMMITTED, self._pending, self._pending_round)
            self._committed, self._committed_round = self._pending, self._pending_round
        return self._committed

    def keep(self, round_number: int, memory: State) -> None:
        if not (memory.vectors or memory.numbers):
            memory = _NOTHING
        self._pending, self._pending_round = memory, round_number
        self._write(_PENDING, memory, round_number)

    def _write(self, name: str, memory: State, round_number: int) -> None:
        # Most algorithms remember nothing; then nothing is written.
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
