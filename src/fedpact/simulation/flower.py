"""Whether Flower and Ray are installed, and that they report to nobody. Imports neither."""

import os
import socket
from importlib.util import find_spec

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
