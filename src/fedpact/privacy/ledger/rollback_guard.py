"""What a site knows of its ledger outside of it, so that one that was put back is found out.

    LEDGER.seen         beside the ledger: the latest entry, by number and hash, that it once had,
                        and who says so: this site, or a server that had a reply with it
    site.db             the stored reply names the entries it was paid with (deployment.store)
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
    """LEDGER.seen, of a ledger's path: the latest entry that anybody has named, and who.

    Whoever names an earlier one, mistaken or speaking of old times, takes nothing back.
    Raises LedgerError: unreadable.
    """

    def __init__(self, ledger: Path) -> None:
        self._ledger, self.path = ledger, ledger.with_name(ledger.name + ".seen")
        self._place, self._who = self._read() if self.path.exists() else ((0, ""), "")

    def check(self, ledger: Chained | Ledger, reply: tuple[int, str] = (0, "")) -> None:
        """Raise LedgerError for a ledger that lacks the entry seen, or the one of a stored reply.

        word: number and hash of that other entry. whose: who names it.
        """
        for place, told, wrong in (
            (
                self._place,
                f"which it had by the word of {self._who} ({self.path})",
                f"; if that word is known to be wrong, remove {self.path}",
            ),
            (reply, "which paid for a stored reply", ""),
        ):
            if not ledger.holds(*place):
                raise LedgerError(
                    f"ledger {self._ledger} {_lacks(ledger, *place)}, {told}: it was put back to "
                    "an older state, or this is a copy of a site that runs elsewhere. Put back the "
                    "ledger as it was after the last release; if there is none left, treat the "
                    f"records' budget as spent{wrong}"
                )

    def keep(self, length: int, head: str, who: str) -> None:
        """Remember that the ledger had this entry, by the word of `who`, unless it had a later."""
        if length > self._place[0]:
            found = {"entry": [length, head], "who": who}
            write_whole(self.path, json.dumps(found).encode() + b"\n")
            self._place, self._who = (length, head), who

    def hear(self, ledger: Ledger, length: int, head: str, who: str) -> None:
        """Remember an entry that the ledger lacks, by the word of somebody else; `check` says so.

        Where it lacks another one already, the later stays.
        """
        if not ledger.holds(length, head):
            if ledger.holds(*self._place):
                self._place = 0, ""
            self.keep(length, head, who)

    def _read(self) -> tuple[tuple[int, str], str]:
        try:
            found: Any = json.loads(self.path.read_bytes().decode("ascii"))
            (length, head), who = found["entry"], str(found["who"])
            good = type(length) is int and is_place(length, head)
        except OSError as error:
            raise LedgerError(
                f"{self.path} cannot be read ({error.strerror}): give the account of this process "
                "the right to, and do not remove it, as it shows whether the ledger was put back"
            ) from None
        except (ValueError, TypeError, AttributeError, LookupError):
            length, head, who, good = 0, "", "", False
        if not good:
            raise LedgerError(
                f"{self.path} is unreadable: expected the number and hash of an entry that "
                f"{self._ledger} had; put it back from a backup, or remove it if you are sure that "
                "the ledger is as it was after its last release"
            )
        return (length, head), who


def _lacks(ledger: Chained | Ledger, length: int, head: str) -> str:
    if ledger.length < length:
        return f"has {ledger.length} entries and lacks number {length}, {head[:16]}..."
    return f"has another entry in place of number {length}, {head[:16]}..."
