"""Which records are held out: each decides that for itself, by a keyed hash under a site's secret.

A split by shuffled places would move other records when one is added, and what that one costs would
then be what training and evaluation cost together. Here one record more is one record more on one
side; nothing else changes, and it bears the (ε, δ) of that side.

Where the site knows whose its records are, a person decides, by the name, with all records. So a
person too is on one side, and bears the (ε, δ) of that one, for however many records it holds.
"""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor


def hold_out(
    x: Tensor, y: Tensor, share: float, key: bytes, whose: Sequence[str] | None = None
) -> Tensor:
    """Return which records x [n, ...], y [n] are held out, bool [n]: about `share` of them.

    key: 1 to 64 bytes, the site's own, for as long as it has these records. whose: each record's
    person; None where nobody knows. Equal records, and records of one person, fall to one side.
    share: in [0, 1].
    """
    limit = int(share * 2.0**64)
    if whose is None:
        rows = x.detach().cpu().contiguous().numpy()
        labels = y.detach().cpu().contiguous().to(torch.int64).numpy()
        told = (row.tobytes() + label.tobytes() for row, label in zip(rows, labels, strict=True))
    else:
        told = (name.encode("utf-8", "surrogatepass") for name in whose)
    found = [
        int.from_bytes(hashlib.blake2b(each, digest_size=8, key=key).digest(), "big") < limit
        for each in told
    ]
    return torch.tensor(found, dtype=torch.bool)


def key_of_seed(seed: int, site: str) -> bytes:
    """Return the secret that a simulated site has."""
    return hashlib.blake2b(f"held out/{seed}/{site}".encode(), digest_size=32).digest()


def split_of(key: bytes, share: float, *, persons: bool) -> str:
    """Return what a ledger knows a split by: it tells nothing of the key.

    persons: whether persons decide, with all their records, or each record.
    """
    by = "person" if persons else "record"
    return hashlib.sha256(f"{share!r}/{by}/".encode() + key).hexdigest()[:32]
