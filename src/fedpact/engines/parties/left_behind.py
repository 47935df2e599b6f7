"""What a site leaves in its directory when it takes part, beside its ledger."""

import re
from pathlib import Path

from fedpact.errors import LedgerError

_ANSWERED = re.compile(rb"round \d+: (replied|answered)")
_LEFT_BEHIND = (
    "reply.bin",
    "evaluation.bin",
    "memory.safetensors",
    "pending-memory.safetensors",
    "opened.json",
    "flower/node",
)


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
