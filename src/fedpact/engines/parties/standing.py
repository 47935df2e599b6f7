"""What a server knows of its sites' ledgers, and which sites it does not let in any more.

    ledgers.json    site -> [length, head, shown]: of its ledger, by the last reply that it signed;
                    shown: of what kind -> [length, head] by the last reply of that kind
    barred.json     site -> why; until a person lifts it (`fedpact deploy readmit`)

Every question to a site says what stands in the first file, and the site refuses it, before it
charges, where its own ledger does not go on from there (witness). So of a ledger that was
put back, and of two copies of one, no more than one goes on. A reply that shows a shorter ledger,
or another one, comes from a site that did not look: it is barred. But for the very reply of its
kind that was seen last: a server that died after an evaluation asks for the round's training again,
and the site sends what it has kept.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedpact.errors import InputError
from fedpact.files import parse_errors, write_whole
from fedpact.ledger.witness import is_place

_LOST = "it holds what the server knows of its sites' ledgers: put it back from a backup"


class LedgerRegistry:
    """What is known of each site's ledger. folder: a run's. Raises DataError: unreadable."""

    def __init__(self, folder: Path) -> None:
        self._ledgers, self._barred = folder / "ledgers.json", folder / "barred.json"
        with parse_errors(self._ledgers, _LOST):
            self._seen = {
                site: _Seen((int(length), str(head)), _shown(shown))
                for site, (length, head, shown) in _document(self._ledgers).items()
            }
        self._saved = dict(self._seen)

    def last_seen(self, site: str) -> tuple[int, str]:
        """Return length and head of a site's ledger, (0, "") where none was seen."""
        return self._of(site).place

    def _of(self, site: str) -> "_Seen":
        return self._seen.get(site, _Seen((0, ""), {}))

    def is_barred(self, site: str) -> bool:
        """Whether the site is not let in. Read anew, as a person may lift it at any time."""
        return site in _document(self._barred)

    def look(
        self, site: str, length: int, head: str, kind: str = "", *, late: bool = False
    ) -> bool:
        """Take notice of the ledger that a site's reply shows; bar it if that one is not longer.

        kind: of reply, as a site keeps the last one of each kind and sends it again if asked.
        late: it answers an earlier question. Whoever relays messages can keep such a reply, and
        repeat it, so a shorter ledger in it tells nothing; another one of the same length does.
        Returns whether nothing is wrong with it: it is longer, or is the one that was seen, last or
        in the last reply of its kind. Whether it goes on only the site can tell, and does.
        """
        place, shown = self.last_seen(site), self._of(site).shown
        longer = is_place(length, head) and length > place[0]
        if longer or (length, head) == place:
            self._seen[site] = _Seen((length, head), {**shown, kind: (length, head)})
            return True
        if (length, head) == shown.get(kind):
            return True
        if late and is_place(length, head) and length < place[0]:
            return True
        why = f"showed a ledger of {length} entries after one of {place[0]} up to {place[1]}"
        _write(self._barred, {**_document(self._barred), site: why})
        return False

    def save(self) -> None:
        """Make durable what `look` has seen."""
        if self._seen != self._saved:
            each = {site: [*one.place, one.shown] for site, one in self._seen.items()}
            _write(self._ledgers, each)
            self._saved = dict(self._seen)

    def readmit(self, site: str) -> str:
        """Let a site in again, with the ledger that was seen of it; return why it was barred.

        Raises InputError: it was not.
        """
        barred = _document(self._barred)
        if site not in barred:
            raise InputError(
                f"site {site!r} is not barred: {self._barred} has "
                f"{', '.join(sorted(barred)) or 'none'}"
            )
        why = barred.pop(site)
        _write(self._barred, barred)
        return str(why)


_Place = tuple[int, str]


@dataclass(frozen=True)
class _Seen:
    """Of one site: the longest ledger, and that of the last reply of each kind."""

    place: _Place
    shown: dict[str, _Place]


def _shown(found: dict[str, Any]) -> dict[str, _Place]:
    return {kind: (int(length), str(head)) for kind, (length, head) in found.items()}


def _document(path: Path) -> dict[str, Any]:
    try:
        with parse_errors(path, _LOST):
            return dict(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return {}


def _write(path: Path, document: Any) -> None:
    write_whole(path, json.dumps(document, indent=2).encode() + b"\n")
