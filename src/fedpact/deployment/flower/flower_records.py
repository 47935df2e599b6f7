"""Messages as Flower's records.

Flower sends each record of a message by a request of its own, so a block lies beside its seal in
one ConfigRecord, and what is longer than PIECE in further ones: no request's body is long.
"""

from typing import Any, Final, TypeVar

from flwr.app import ConfigRecord, RecordDict

from fedpact.common.errors import InputError

_T = TypeVar("_T")
PIECE: Final = 4 * 2**20
"""How many bytes of a block a record holds at most."""
_MARGIN_BYTES, _MARGIN_EACH_BYTES = 2**16, 2**12


def most_bytes(numbers: int, sites: int) -> int:
    """Return the longest message with so many numbers: 8 bytes each, plus 64 KiB and 4 KiB per site
    for headers, signatures and masking keys."""
    return 8 * numbers + _MARGIN_BYTES + _MARGIN_EACH_BYTES * sites


def to_record(
    block: bytes, signature: bytes, seen: tuple[int, str] = (0, ""), agreed: str = ""
) -> RecordDict:
    """Return the record that carries a block: the bytes of common.messages.to_bytes, unchanged.

    Of a question, seen: length and head of the site's ledger as the server has seen it last;
    agreed: on what, by the server's files (Federation.agreed).
    """
    told = {"signature": signature, "length": seen[0], "head": seen[1], "agreed": agreed}
    found: dict[str, Any] = {"seal": ConfigRecord({**told, "block": block[:PIECE]})}
    for number, start in enumerate(range(PIECE, len(block), PIECE), 1):
        found[str(number)] = ConfigRecord({"block": block[start : start + PIECE]})
    return RecordDict(found)


def from_record(record: RecordDict) -> tuple[bytes, bytes]:
    """Return block and signature of what `to_record` made. Raises InputError: of anything else."""
    places = ["seal", *sorted((place for place in record if place.isdecimal()), key=int)]
    found = [_value(record, place, "block", bytes) for place in places]
    return b"".join(found), _value(record, "seal", "signature", bytes)


def read_seal(record: RecordDict) -> tuple[tuple[int, str], str]:
    """Return `seen` and `agreed` of a question. Raises InputError: as `from_record`."""
    seen = _value(record, "seal", "length", int), _value(record, "seal", "head", str)
    return seen, _value(record, "seal", "agreed", str)


def _value(record: RecordDict, place: str, name: str, kind: type[_T]) -> _T:
    part = record.get(place)
    found = part.get(name) if isinstance(part, ConfigRecord) else None
    if isinstance(found, kind):
        return found
    raise InputError(
        f"a record with {', '.join(map(str, record)) or 'nothing in it'} is not a fedpact message: "
        "expected what to_record made; check that both ends run the same version"
    )
