"""Our messages as Flower's records: one array of bytes, and the signature over it."""

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedpact.errors import InputError


def pack(block: bytes, signature: bytes) -> RecordDict:
    """Return the record that carries a block: the bytes of messages.to_bytes, unchanged."""
    array = Array(dtype="uint8", shape=(len(block),), stype="bytes", data=block)
    return RecordDict(
        {
            "fedpact": ArrayRecord({"message": array}),
            "seal": ConfigRecord({"signature": signature}),
        }
    )


def unpack(record: RecordDict) -> tuple[bytes, bytes]:
    """Return block and signature of what `pack` made. Raises InputError: of anything else."""
    try:
        array, seal = record["fedpact"], record["seal"]
        if isinstance(array, ArrayRecord) and isinstance(seal, ConfigRecord):
            block, signature = array["message"].data, seal["signature"]
            if isinstance(block, bytes) and isinstance(signature, bytes):
                return block, signature
    except KeyError:
        pass
    raise InputError(
        f"a record with {', '.join(map(str, record)) or 'nothing in it'} is no fedpact message: "
        "expected what codec.pack made; check that both ends run the same version"
    )
