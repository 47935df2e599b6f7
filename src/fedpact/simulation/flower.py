"""Checks that Flower or Ray is installed, and turns off their usage reports. Imports neither."""

import os
import socket
from importlib.util import find_spec

from fedpact.common.errors import InputError

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""Environment variables that turn off the usage reports of Flower and Ray."""

_CONNECT_SECONDS = 10.0


def require_flower() -> None:
    """Turn off Flower's usage reports, which it reads when it is imported.

    Raises InputError: Flower is not installed.
    """
    if find_spec("flwr") is None:
        raise InputError(
            "a deployment needs Flower, which is not installed: run pip install 'fedpact[deploy]'"
        )
    os.environ.update(QUIET)


def require_ray() -> None:
    """Turn off Ray's usage reports, which it reads when it is imported.

    Raises InputError: Ray is not installed, or no cluster answers at RAY_ADDRESS.
    """
    if find_spec("ray") is None:
        raise InputError(
            'engine "ray" needs Ray, which is not installed: run pip install '
            "'fedpact[ray]' on every machine of the cluster, or use engine \"local\""
        )
    os.environ.update(QUIET)
    _check_address(ray_address())


def ray_address() -> str:
    """Return the cluster's address: RAY_ADDRESS, or "local" for a Ray on this machine."""
    return os.environ.get("RAY_ADDRESS") or "local"


def _check_address(address: str) -> None:
    """Raise InputError if nothing listens at the address; Ray itself would wait for minutes."""
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
