"""Checks that Flower or Ray is installed, and turns off their usage reports. Imports neither."""

import os
from importlib.util import find_spec

from fedpact.common.errors import InputError

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""Environment variables that turn off the usage reports of Flower and Ray."""


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

    Raises InputError: Ray is not installed.
    """
    if find_spec("ray") is None:
        raise InputError(
            'engine "ray" needs Ray, which is not installed: run pip install '
            "'fedpact[ray]' on every machine of the cluster, or use engine \"local\""
        )
    os.environ.update(QUIET)


def ray_address() -> str:
    """Return the cluster's address: RAY_ADDRESS, or "local" for a Ray on this machine."""
    return os.environ.get("RAY_ADDRESS") or "local"
