"""What a site knows of its ledger outside of it, so that one that was put back is found out.

    LEDGER.seen         beside the ledger: entries, by number and hash, that it once had, and who
                        says so: this site, when it opened, or a server that had a reply with it
    reply.bin           the reply names the entries it was paid with (deployment.site_evaluation)
    the server's word   every question says what the server has seen last of this site's ledger

A ledger that lacks any of them has lost entries, or is a copy that others have been written to: its
site charges nothing, and no receipt is made of it. What the server says and the ledger lacks is
kept in LEDGER.seen, so that it counts until a person acts, in later runs, too.
"""

import json
import re
from pathlib import Path
from typing import Any

from fedpact.common.errors import LedgerError
from fedpact.common.files import write_whole
from fedpact.privacy.ledger.hash_chain import Chained
from fedpact.privacy.ledger.ledger import Ledger

# More entries than any ledger has, and no more than Flower carries.
_MOST = 2**53
_HASH = re.compile(r"[0-9a-f]{64}")


def is_place(length: int, head: str) -> bool:
    """Whether a ledger can have had `length` entries, of which the last one's hash is `head`."""
    return head == "" if length == 0 else 0 < length < _MOST and bool(_HASH.fullmatch(head))


class RollbackGuard:
    """LEDGER.seen, of a ledger's path. Raises LedgerError: unreadable.

    Each has its own word in it, the latest entry that it has named: what one says, whether it is
    mistaken or speaks of old times, takes nothing back of what another has said.
    """

    def __init__(self, ledger: Path) -> None:
        self._ledger, self.path = ledger, ledger.with_name(ledger.name + ".seen")
        self._words = self._read() if self.path.exists() else dict[str, tuple[int, str]]()

    def check(self, ledger: Chained | Ledger, reply: tuple[int, str] = (0, "")) -> None:
        """Raise LedgerError for a ledger that lacks an entry seen, or the one of a stored reply.

        reply: length and head of the ledger that it was made with.
        """
        for who, (length, head) in sorted(self._words.items()):
            if not ledger.holds(length, head):
                raise LedgerError(
                    f"ledger {self._ledger} {_lacks(ledger, length, head)}, which it had by the "
                    f"word of {who} ({self.path}): it was put back to an older state, or this is a "
                    "copy of a site that runs elsewhere. Put back the ledger as it was after the "
                    "last release. If there is none left, treat the records' budget as spent; if "
                    f"that word is known to be wrong, remove it, and no other, from {self.path}"
                )
        if not ledger.holds(*reply):
            raise LedgerError(
                f"ledger {self._ledger} {_lacks(ledger, *reply)}, which paid for the stored "
                "reply.bin: it was put back to an older state, or is another one. Put back the "
                "ledger as it was after the last release; if there is none left, treat the "
                "records' budget as spent"
            )

    def keep(self, length: int, head: str, who: str) -> None:
        """Remember that the ledger had this entry, by the word of `who`, who named none later."""
        if length > self._words.get(who, (0, ""))[0]:
            self._write({**self._words, who: (length, head)})

    def _write(self, words: dict[str, tuple[int, str]]) -> None:
        write_whole(self.path, json.dumps(words, indent=2).encode() + b"\n")
        self._words = words

    def _read(self) -> dict[str, tuple[int, str]]:
        try:
            found: Any = json.loads(self.path.read_bytes().decode("ascii"))
            words = {str(who): (length, str(head)) for who, (length, head) in found.items()}
            good = all(type(n) is int and is_place(n, head) for n, head in words.values())
        except (OSError, ValueError, TypeError, AttributeError, LookupError):
            words, good = dict[str, tuple[int, str]](), False
        if not good:
            raise LedgerError(
                f"{self.path} is unreadable: expected who -> [number, hash] of entries that "
                f"{self._ledger} had; put it back from a backup, or remove it if you are sure that "
                "the ledger is as it was after its last release"
            )
        return words


def _lacks(ledger: Chained | Ledger, length: int, head: str) -> str:
    if ledger.length < length:
        return f"has {ledger.length} entries and lacks number {length}, {head[:16]}..."
    return f"has another entry in place of number {length}, {head[:16]}..."
