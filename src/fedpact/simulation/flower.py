"""Flower, where it is installed, and messages as Flower's records.

`rounds.py`, `client.py` and every algorithm run here unchanged. Nothing outside this package and
`fedpact.deployment` imports Flower.
"""

import os
import socket
from importlib.util import find_spec

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedpact.common.errors import InputError

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""The environment in which neither Flower nor Ray reports to anybody."""

_CONNECT_SECONDS = 10.0


def require_flower() -> None:
    """Have this process report to nobody; Flower reads that when it is imported.

    Raises InputError, naming the extra, where Flower is not installed.
    """
    if find_spec("flwr") is None:
        raise InputError(
            "a deployment needs Flower, which is not installed: run pip install 'fedpact[deploy]'"
        )
    os.environ.update(QUIET)


def require_ray() -> None:
    """Have this process report to nobody; both packages read that when they are imported.

    Raises InputError, naming the extra, where Flower or Ray is not installed, and where nobody
    answers at RAY_ADDRESS.
    """
    for package, name in (("flwr", "Flower"), ("ray", "Ray")):
        if find_spec(package) is None:
            raise InputError(
                f'engine "ray" needs {name}, which is not installed: run pip install '
                "'fedpact[ray]' on every machine of the cluster, or use engine \"local\""
            )
    os.environ.update(QUIET)
    _check_address(ray_address())


def ray_address() -> str:
    """Return where Ray runs: RAY_ADDRESS, or "local" for one of this machine's own."""
    return os.environ.get("RAY_ADDRESS") or "local"


def _check_address(address: str) -> None:
    """Raise InputError unless somebody listens there: Ray itself would wait for minutes."""
    if address in ("local", "auto"):
        return
    host, _, port = address.rpartition(":")
    try:
        if "/" in host:
            raise ValueError("Ray's client protocol is not used")
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS):
            pass
    except (OSError, ValueError) as error:
        raise InputError(
            f"RAY_ADDRESS is {address!r}, where no cluster answers ({error}): expected the "
            "host:port that `ray start --head` prints, or no RAY_ADDRESS for this machine alone"
        ) from error


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
        f"a record with {', '.join(map(str, record)) or 'nothing in it'} is no fedpact message: "
        "expected what codec.pack made; check that both ends run the same version"
    )
