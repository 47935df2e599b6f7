"""A deployed site's last reply, for when it is asked again; and room on the disk for the next one.

`reply.bin` is one line of JSON, [run, round, attempt, digest of the task], then the reply as it was
encoded. The reply names the ledger it was made with (Reply.ledger_length, ledger_head): a ledger
that does not go on from there is not the one that paid for it.
"""

import json
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from fedpact.errors import FedpactError
from fedpact.files import free_room, make_room, parse_errors, write_whole
from fedpact.messages import Reply, Task, from_bytes

_Question = tuple[str, int, int, str]
_ADVICE = (
    "put it back from a backup, or move it away; a round that was answered and is asked again is "
    "then charged again, and never beyond the budget"
)

# A reply, or what a method remembers, is at most three times as long as its task in every method.
_TIMES: Final = 4
_SPARE: Final = 1 << 16


class LastReply:
    """The last reply and the question that it answers, in one file, written before it is sent.

    ledger: length and head of the ledger it was made with; (0, "") where there is no reply.
    Raises DataError: a file that this site did not write.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._key: _Question = "", 0, 0, ""
        self._block = b""
        self.ledger = 0, ""
        if path.exists():
            self._key, self._block, self.ledger = _read(path)

    def answer_to(self, task: Task) -> bytes | None:
        """Return the stored reply, if it answers this task."""
        return self._block if self._key == _key(task) else None

    def is_newer_than(self, task: Task) -> bool:
        """Whether it answers a later round or attempt of the task's run, or this one."""
        run, number, attempt, _ = self._key
        return run == task.run and (number, attempt) >= (task.round, task.attempt)

    def keep(self, task: Task, block: bytes) -> None:
        """Store the encoded reply to a task."""
        key = _key(task)
        write_whole(self.path, json.dumps(key).encode() + b"\n" + block)
        self._key, self._block = key, block


@contextmanager
def room(task: Task, *paths: Path) -> Generator[None]:
    """Hold room on the disk for what a task's answer will write to these files.

    The last path is the ledger's: its next lines cannot be written ahead, but there is to be room
    for them. Raises FedpactError: there is none.
    """
    *replaced, ledger = paths
    probe = ledger.with_name(ledger.name + ".room")
    length = _TIMES * task.wire_bytes + _SPARE
    try:
        make_room(length, *replaced)
        try:
            make_room(_SPARE, probe)
        finally:
            free_room(probe)
    except OSError as error:
        free_room(*replaced)
        raise FedpactError(
            f"round {task.round} needs {length} bytes on the disk for each of "
            f"{', '.join(map(str, replaced))}, and {_SPARE} beside {ledger} ({error.strerror}): "
            "nothing is charged; make room, and the site takes part again"
        ) from error
    try:
        yield
    finally:
        free_room(*replaced)


def _read(path: Path) -> tuple[_Question, bytes, tuple[int, str]]:
    with parse_errors(path, _ADVICE):
        head, _, block = path.read_bytes().partition(b"\n")
        run, number, attempt, digest = json.loads(head.decode("ascii"))
        reply = from_bytes(block)
        key = str(run), int(number), int(attempt), str(digest)
        if [run, number, attempt, digest] != [*key] or not isinstance(reply, Reply):
            raise ValueError(f"a {type(reply).__name__} to {key}")
    return key, block, (reply.ledger_length, reply.ledger_head)


def _key(task: Task) -> _Question:
    return task.run, task.round, task.attempt, task.digest
