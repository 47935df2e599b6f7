"""A site's side of the wire, in simulation and deployment: it answers a Task using an oracle.

The client gives the algorithm its memory and an oracle, stores what the algorithm wants to
remember, and turns a refusal into a code. New memory is pending until a later Task says that the
reply of that round was included; otherwise it is dropped. Both are in one file.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Generic, Protocol, TypeVar

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
    join,
    split_state,
)
from fedpact.privacy.ledger.ledger import Ledger
from fedpact.privacy.oracle import Oracle
from fedpact.privacy.policy import Policy

Context = TypeVar("Context")
Payload = TypeVar("Payload", Task, State, Local)

_CPU: Final = torch.device("cpu")
_OLD, _NEW = "old/", "new/"
_NOTHING: Final = State()
"""The memory of an algorithm that stores nothing: one object, so that it is hashed once."""


_LOST = (
    "restore it from a backup; or move it away, and the algorithm starts without its memory of "
    "this site"
)


class MemoryStore(Protocol):
    """Where a site stores its memory."""

    @property
    def path(self) -> Path:
        """The file, for messages."""
        ...

    def read(self) -> bytes | None:
        """Return what is stored, None if nothing is."""
        ...

    def write(self, *content: bytes | memoryview) -> None:
        """Store these parts, joined."""
        ...


class MemoryFile:
    """Memory in a file of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> bytes | None:
        """Return what is stored, None if nothing is."""
        return self.path.read_bytes() if self.path.exists() else None

    def write(self, *content: bytes | memoryview) -> None:
        """Store these parts, joined."""
        write_whole(self.path, *content)


class Client(Generic[Context]):
    """One site. `Context` is what the engine computes with: a worker's model and kernel.

    size: the site's declared size, the weight of its replies.
    oracle: creates the oracle for one task, memory and context.
    ledger: None in a plain run.
    memory: a store, or a file's path. It is read once, at the start, and written after every task.
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
            memory = self.read_memory(task)
            oracle = self._oracle(task, memory, bench)
            local = self._method.local(
                _move(self._device, task), oracle, _move(self._device, memory)
            )
            if oracle.shares:
                local = self._shareable(local, oracle)
        except BudgetExhausted:
            return Refusal(task.run, task.round, self.name, "budget")
        except PrivacyError:
            return Refusal(task.run, task.round, self.name, "policy")
        self._memory.keep(task, _move(_CPU, local.memory))
        return self._reply(task, local)

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
            vectors=_move(_CPU, local).vectors,
            numbers=local.numbers,
            ledger_head=self.ledger.head if self.ledger else "",
            ledger_length=self.ledger.length if self.ledger else 0,
        )

    def _shareable(self, local: Local, oracle: Oracle) -> Local:
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


def _move(device: torch.device, held: Payload) -> Payload:
    """Return the payload on a device; the same object if it is there already."""
    if all(vector.device == device for vector in held.vectors.values()):
        return held
    vectors = {name: vector.to(device) for name, vector in held.vectors.items()}
    return replace(held, vectors=vectors)


class _Memory:
    """Two versions, each with its round: what the server last included, and the last task's."""

    def __init__(self, at: Path | MemoryStore) -> None:
        self._store = MemoryFile(at) if isinstance(at, Path) else at
        self.reload()

    def reload(self) -> None:
        self._old, self._new = (_NOTHING, -1), (_NOTHING, -1)
        block = self._store.read()
        if block is not None:
            with parse_errors(self._store.path, _LOST):
                whole: Any = from_bytes(block, math.inf)
                self._old, self._new = _unpack(whole, _OLD), _unpack(whole, _NEW)

    def after(self, included: int) -> State:
        """Return the memory as of the last included round, -1 for none."""
        return self._select(included)[0]

    def keep(self, task: Task, memory: State) -> None:
        old = self._select(task.included)
        new = memory if memory.vectors or memory.numbers else _NOTHING, task.round
        # Most algorithms have no memory; then nothing is written.
        if any(state is not _NOTHING for state, _ in (old, new, self._old, self._new)):
            rounds = State({}, {_OLD: old[1], _NEW: new[1]})
            whole = join(old[0], _OLD, join(new[0], _NEW, rounds))
            self._store.write(*encode_parts(whole))
        # If writing fails, memory is unchanged and the next task tries again.
        self._old, self._new = old, new

    def _select(self, included: int) -> tuple[State, int]:
        return self._new if self._new[1] == included > self._old[1] else self._old


def _unpack(whole: State, prefix: str) -> tuple[State, int]:
    own, _ = split_state(whole, prefix)
    numbers = dict(own.numbers)
    number = int(numbers.pop(""))
    return State(own.vectors, numbers) if own.vectors or numbers else _NOTHING, number
