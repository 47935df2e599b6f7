"""What a site knows of its ledger outside of it, so that one that was put back is found out.

    LEDGER.seen         beside the ledger: an entry, by its number and hash, that it once had, and
                        who says so: this site, when it opened, or a server that had a reply with it
    reply.bin           the reply names the entries it was paid with (engines.parties.stored)
    the server's word   every question says what the server has seen last of this site's ledger

A ledger that lacks any of them has lost entries, or is a copy that others have been written to: its
site charges nothing. What the server says and the ledger lacks is kept in LEDGER.seen, so that it
counts until a person acts, in later runs, too.
"""

import json
import re
from pathlib import Path

from fedpact.errors import LedgerError
from fedpact.files import write_whole
from fedpact.ledger.ledger import Ledger

# More entries than any ledger has, and no more than Flower carries.
_MOST = 2**53
_HASH = re.compile(r"[0-9a-f]{64}")
_ANSWERED = re.compile(rb"round \d+: (replied|answered)")
_LEFT_BEHIND = (
    "reply.bin",
    "memory.safetensors",
    "pending-memory.safetensors",
    "opened.json",
    "flower/node",
)


def is_place(length: int, head: str) -> bool:
    """Whether a ledger can have had `length` entries, of which the last one's hash is `head`."""
    return head == "" if length == 0 else 0 < length < _MOST and bool(_HASH.fullmatch(head))


def check_left_behind(directory: Path, ledger: Path, promised: bool) -> None:
    """Raise LedgerError where a site has taken part, and its ledger knows nothing of it.

    promised: whether the ledger has a reservation. Whoever takes part has reserved before, so of
    what a site leaves in its directory nothing can be older than its ledger.
    """
    if promised:
        return
    log = directory / "log.txt"
    found = [name for name in _LEFT_BEHIND if (directory / name).exists()]
    if log.exists() and _ANSWERED.search(log.read_bytes()):
        found.append(log.name)
    if found:
        raise LedgerError(
            f"ledger {ledger} is missing or holds no reservation, and {', '.join(found)} in "
            f"{directory} say that this site has released before: put the ledger back as it was "
            "after the last release; without it, treat the records' budget as spent"
        )


class Witness:
    """LEDGER.seen, of a ledger's path. Raises LedgerError: unreadable."""

    def __init__(self, ledger: Path) -> None:
        self._ledger, self.path = ledger, ledger.with_name(ledger.name + ".seen")
        self._length, self._head, self._who = 0, "", ""
        if self.path.exists():
            self._read()

    def check(self, ledger: Ledger, reply: tuple[int, str] = (0, "")) -> None:
        """Raise LedgerError for a ledger that lacks the entry seen, or the one of a stored reply.

        reply: length and head of the ledger that it was made with.
        """
        if not ledger.holds(self._length, self._head):
            raise LedgerError(
                f"ledger {self._ledger} has {ledger.length} entries and lacks number "
                f"{self._length}, {self._head[:16]}..., which it had by the word of {self._who} "
                f"({self.path}): it was put back to an older state, or this is a copy of a site "
                "that runs elsewhere. Put back the ledger as it was after the last release. If "
                "there is none left, treat the records' budget as spent; if that word is known to "
                f"be wrong, remove {self.path}"
            )
        if not ledger.holds(*reply):
            raise LedgerError(
                f"ledger {self._ledger} has {ledger.length} entries and lacks number {reply[0]}, "
                f"{reply[1][:16]}..., which paid for the stored reply.bin: it was put back to an "
                "older state, or is another one. Put back the ledger as it was after the last "
                "release; if there is none left, treat the records' budget as spent"
            )

    def keep(self, length: int, head: str, who: str) -> None:
        """Remember that the ledger had this entry, by the word of `who`."""
        if (length, head) != (self._length, self._head):
            write_whole(self.path, json.dumps([length, head, who]).encode() + b"\n")
            self._length, self._head, self._who = length, head, who

    def _read(self) -> None:
        try:
            length, head, who = json.loads(self.path.read_bytes().decode("ascii"))
            good = type(length) is int and is_place(length, head) and isinstance(who, str)
        except (OSError, ValueError, TypeError):
            length, head, who, good = 0, "", "", False
        if not good:
            raise LedgerError(
                f"{self.path} is unreadable: expected [number, hash, who] of an entry that "
                f"{self._ledger} had; put it back from a backup, or remove it if you are sure that "
                "the ledger is as it was after its last release"
            )
        self._length, self._head, self._who = length, head, who
