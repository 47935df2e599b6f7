"""What a site knows of its ledger outside of it, so that one that was put back is found out.

    LEDGER.seen         beside the ledger: number and hash of the latest entry that it is known to
                        have had, by the site itself or by a server that had a reply with it
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
    """LEDGER.seen, of a ledger's path. Raises LedgerError: unreadable."""

    def __init__(self, ledger: Path) -> None:
        self._ledger, self.path = ledger, ledger.with_name(ledger.name + ".seen")
        self._word = self._read() if self.path.exists() else (0, "")

    def check(
        self, ledger: Chained | Ledger, word: tuple[int, str] = (0, ""), whose: str = ""
    ) -> None:
        """Raise LedgerError for a ledger that lacks the entry in LEDGER.seen, or another one.

        word: number and hash of that other entry. whose: who names it.
        """
        for (length, head), by in ((self._word, str(self.path)), (word, whose)):
            if not ledger.holds(length, head):
                raise LedgerError(
                    f"ledger {self._ledger} {_lacks(ledger, length, head)}, which {by} names: it "
                    "was put back to an older state, or this is a copy of a site that runs "
                    "elsewhere. Put back the ledger as it was after the last release. If there is "
                    "none left, treat the records' budget as spent; if you know that this word is "
                    f"wrong, as a server's that is mistaken, remove {self.path}"
                )

    def keep(self, length: int, head: str) -> None:
        """Remember that the ledger had this entry, unless a later one is known."""
        if length > self._word[0]:
            write_whole(self.path, json.dumps([length, head]).encode() + b"\n")
            self._word = length, head

    def _read(self) -> tuple[int, str]:
        try:
            found: Any = json.loads(self.path.read_bytes().decode("ascii"))
            length, head = found
            good = type(length) is int and isinstance(head, str) and is_place(length, head)
        except (OSError, ValueError, TypeError):
            good = False
        if not good:
            raise LedgerError(
                f"{self.path} is unreadable: expected [number, hash] of an entry that "
                f"{self._ledger} had; put it back from a backup, or remove it if you are sure that "
                "the ledger is as it was after its last release"
            )
        return length, head


def _lacks(ledger: Chained | Ledger, length: int, head: str) -> str:
    if ledger.length < length:
        return f"has {ledger.length} entries and lacks number {length}, {head[:16]}..."
    return f"has another entry in place of number {length}, {head[:16]}..."
