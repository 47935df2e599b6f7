"""A task that may be sent in short: as changes to what its site was told in the round before.

Wherever it is handled, digested and answered it is whole, and its short form is a Task like any
other, whose vectors "grid/NAME" are blocks of `integers`. So nobody but who sends it and who takes
it in knows of changes.

Before the first round that is what the plan's own start tells, which every site makes for itself:
the short form is its digest, and whoever makes another one is told in full.
"""

import hashlib
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

import torch
from torch import Tensor

from fedpact.errors import InputError
from fedpact.messages import State, Task, Vectors, encoded_length, split_state
from fedpact.methods import integers

DELTA_PREFIX: Final = "grid/"
"""Of the names of vectors that are changes: in a short task, and in the server's state."""

START: Final = DELTA_PREFIX + "start"
"""Of the vector that stands for all of a plan's start: its SHA-256, uint8 [32]."""


def start_told(vectors: Vectors) -> Vectors:
    """Return the short form of what the plan's start tells."""
    digest = hashlib.sha256()
    for name, vector in sorted(vectors.items()):
        digest.update(f"{name} {vector.dtype} {list(vector.shape)}\n".encode())
        digest.update(vector.detach().cpu().contiguous().numpy().tobytes())
    return {START: torch.tensor(list(digest.digest()), dtype=torch.uint8)}


def is_initial(task: Task) -> bool:
    """Whether a task's short form needs no earlier one."""
    return isinstance(task, DeltaTask) and START in task.changes


@dataclass(frozen=True)
class DeltaTask(Task):
    """A whole task that has a short form. changes: what that tells in place of the vectors."""

    changes: Vectors = field(default_factory=dict[str, Tensor])

    @cached_property
    def wire_bytes(self) -> int:
        """The length of the encoded short form, which is what is sent."""
        return encoded_length(shortest(self))


def expand_task(task: Task) -> Task:
    """Return the task without a short form."""
    told = (task.run, task.round, task.algorithm, task.vectors, task.numbers)
    return Task(*told, task.included, task.attempt)


def shortest(task: Task) -> Task:
    """Return a task as it is sent."""
    if not isinstance(task, DeltaTask):
        return task
    return replace(expand_task(task), vectors=task.changes)


def whole(task: Task, base: Vectors | None) -> Task | None:
    """Return a task that came, in full.

    base: what its site was told in the round before, or of the first round the plan's start; None:
    it does not know. Returns None where the task tells changes to that, or is of another start.
    Raises InputError: changes that do not fit it.
    """
    if START in task.vectors:
        block = task.vectors[START]
        if len(task.vectors) > 1 or (block.dtype, block.shape) != (torch.uint8, (32,)):
            raise InputError(
                f"a task tells the start and {sorted(task.vectors)}: expected 32 bytes alone"
            )
        same = base is not None and torch.equal(start_told(base)[START], block)
        return replace(task, vectors=dict(base)) if base is not None and same else None
    codes, rest = split_state(State(task.vectors, {}), DELTA_PREFIX)
    if not codes.vectors:
        return task
    if base is None:
        return None
    vectors = dict(rest.vectors)
    for name, block in codes.vectors.items():
        if name not in base or name in vectors:
            raise InputError(f"a task changes {name!r}: the last one had {sorted(base)}")
        vectors[name] = integers.apply_codes(
            base[name], *integers.unpack_codes(block, base[name].numel())
        )
    return replace(task, vectors=vectors)
