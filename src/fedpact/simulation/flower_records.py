"""Messages as Flower's records."""

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedpact.common.errors import InputError


def to_record(
    block: bytes, signature: bytes, seen: tuple[int, str] = (0, ""), agreed: str = ""
) -> RecordDict:
    """Return the record that carries a block: the bytes of common.messages.to_bytes, unchanged.

    Of a question, seen: length and head of the site's ledger as the server has seen it last;
    agreed: on what, by the server's files (Federation.agreed).
    """
    array = Array(dtype="uint8", shape=(len(block),), stype="bytes", data=block)
    told = {"signature": signature, "length": seen[0], "head": seen[1], "agreed": agreed}
    seal = ConfigRecord(told)
    return RecordDict({"fedpact": ArrayRecord({"message": array}), "seal": seal})


def from_record(record: RecordDict) -> tuple[bytes, bytes]:
    """Return block and signature of what `to_record` made. Raises InputError: of anything else."""
    try:
        array, seal = record["fedpact"], record["seal"]
        if isinstance(array, ArrayRecord) and isinstance(seal, ConfigRecord):
            block, signature = array["message"].data, seal["signature"]
            if isinstance(block, bytes) and isinstance(signature, bytes):
                return block, signature
    except KeyError:
        pass
    raise _unreadable(record)


def read_seen(record: RecordDict) -> tuple[int, str]:
    """Return what a question says of the site's ledger. Raises InputError: as `from_record`."""
    seal = record.get("seal")
    if isinstance(seal, ConfigRecord):
        length, head = seal.get("length"), seal.get("head")
        if isinstance(length, int) and isinstance(head, str):
            return length, head
    raise _unreadable(record)


def read_agreed(record: RecordDict) -> str:
    """Return on what a question says that the parties agree. Raises InputError: as
    `from_record`."""
    seal = record.get("seal")
    found = seal.get("agreed") if isinstance(seal, ConfigRecord) else None
    if isinstance(found, str):
        return found
    raise _unreadable(record)


def _unreadable(record: RecordDict) -> InputError:
    return InputError(
        f"a record with {', '.join(map(str, record)) or 'nothing in it'} is not a fedpact message: "
        "expected what to_record made; check that both ends run the same version"
    )
