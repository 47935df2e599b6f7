"""The contents of a session's steps: blocks of bytes by name."""

from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor

from fedpact.common.errors import InputError
from fedpact.common.messages import Reply, Step, Task, from_bytes
from fedpact.simulation.secure_aggregation.keys import KeyContext

T = TypeVar("T", Task, Reply)

SETUP_STEPS = ("keys", "shares", "roster")
"""The questions that begin a session, in order."""

BEFORE: Mapping[str, tuple[str, ...]] = {
    **{step: SETUP_STEPS[:place] for place, step in enumerate(SETUP_STEPS)},
    "masked": (),
    "open": ("masked",),
    "consistency": ("masked",),
    "unmask": ("masked", "consistency"),
}
"""Question -> the questions to be answered before it, in the session or in its slot."""


def step(place: KeyContext, site: str, name: str, blocks: Mapping[str, bytes]) -> Step:
    """Return the step to or from a site with these blocks."""
    vectors = {key: _pack(block) for key, block in blocks.items()}
    return Step(place.run, place.round, site, place.session, name, vectors)


def blocks(message: Step, prefix: str = "") -> dict[str, bytes]:
    """Return a step's blocks under a prefix, without the prefix. Raises InputError: not bytes."""
    for name, vector in message.vectors.items():
        if vector.dtype != torch.uint8 or vector.dim() != 1:
            raise InputError(f"vector {name!r} of a step is not a row of bytes")
    return {
        name.removeprefix(prefix): vector.numpy().tobytes()
        for name, vector in message.vectors.items()
        if name.startswith(prefix)
    }


def block(message: Step, name: str) -> bytes:
    """Return one block of a step. Raises InputError: it is missing."""
    found = blocks(message)
    if name not in found:
        raise InputError(f"a step {message.step!r} has no block {name!r}")
    return found[name]


def place_of(message: Step) -> KeyContext:
    """Return run, round and session of a step."""
    return KeyContext(message.run, message.round, message.session)


def slot_of(session: str) -> tuple[str, int]:
    """Return a session's name and slot from a name by `KeyContext.of_slot`; -1 without a slot.

    >>> slot_of("00ff/12"), slot_of("00ff"), slot_of("00ff/-1")
    (('00ff', 12), ('00ff', -1), ('00ff/-1', -1))
    """
    name, _, digits = session.partition("/")
    known = digits.isdecimal() and len(digits) <= 3
    return (name, int(digits)) if known else (session, -1)


def under(prefix: str, given: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return blocks with a prefix added to their names."""
    return {prefix + name: value for name, value in given.items()}


def task_in(question: Step) -> Task:
    """Return the task in a question "masked". Raises InputError: it has none."""
    return _carry(question, "task", Task)


def reply_in(answer: Step) -> Reply:
    """Return the masked reply in an answer. Raises InputError: it has none."""
    return _carry(answer, "reply", Reply)


def _carry(message: Step, name: str, kind: type[T]) -> T:
    found = from_bytes(block(message, name))
    if not isinstance(found, kind):
        raise InputError(f"a step {message.step!r} has a {type(found).__name__}, not a {name}")
    return found


def _pack(given: bytes) -> Tensor:
    # frombuffer refuses an empty buffer.
    return torch.frombuffer(bytearray(given), dtype=torch.uint8) if given else torch.zeros(0).byte()
