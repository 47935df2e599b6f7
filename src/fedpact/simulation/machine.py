"""The machine: cores, devices, open files, memory kept, and whether Flower and Ray are there.

Neither is imported, and their usage reports are turned off.
"""

import contextlib
import ctypes
import math
import os
import resource
import socket
from importlib.util import find_spec
from pathlib import Path

import torch

from fedpact.common.errors import InputError, PlanError
from fedpact.common.params import Precision

_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_USUAL_FILES = 512
_AMPERE = 8  # the compute capability of GPUs that have TF32 and bfloat16

# malloc.h: from how many bytes free memory is returned to the system (-1: never), by how many the
# heap grows in excess, how many blocks may be mapped separately, and how many heaps threads have.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8


def available_cores() -> int:
    """Return the number of usable cores, at least 1; a container's quota of 1.5 counts as 2."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    # Control group, version 2: "150000 100000", or "max 100000"; the file may be missing.
    with contextlib.suppress(OSError, ValueError):
        limit, period = map(int, _QUOTA.read_text().split())
        cores = min(cores, math.ceil(limit / period))
    return max(1, cores)


def device_of(name: str, precision: Precision = "float32") -> torch.device:
    """Return the device "cpu", "cuda" or "cuda:1".

    Raises PlanError: this machine does not have it, or it does not support the precision.
    """
    device = torch.device(name)
    gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    if device.type == "cuda" and not (device.index or 0) < gpus:
        raise PlanError(
            f"device is {name!r}: torch {torch.__version__} finds {gpus} CUDA devices on this "
            'machine; use device = "cpu", or install a torch and a driver that see the GPU'
        )
    if precision == "tf32" and device.type == "cpu":
        raise PlanError(
            'run.precision is "tf32" with device = "cpu", which has no TF32: leave it out, or use '
            '"bf16"'
        )
    if precision != "float32" and device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if major < _AMPERE:
            raise PlanError(
                f"run.precision is {precision!r}, and {name} has compute capability "
                f"{major}.{minor}: expected {_AMPERE}.0 or more; leave it out"
            )
    return device


def allow_open_files(count: int) -> None:
    """Raise this process's limit of open files for `count` more, if the system allows it.

    Each site's ledger is open, and the usual limit of 1,024 is too low for a thousand sites.
    """
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + _USUAL_FILES
    if most != resource.RLIM_INFINITY:
        wanted = min(wanted, most)
    if now != resource.RLIM_INFINITY and now < wanted:
        # Some systems have a lower limit; then opening a file fails later.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def keep_freed_memory() -> None:
    """Let the C library reuse the memory of large vectors, in the whole process.

    By default glibc returns it to the system and gets zeroed pages again, which made encoding a
    vector of 1.7 million numbers take seven times as long as copying it. The process does not
    shrink again.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    # A thread's own heap cannot hold blocks of more than 64 MB.
    options = (_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1), (_TOP_PAD, 2**26), (_ARENA_MAX, 1)
    for option, value in options:
        mallopt(option, value)


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
    if (address := ray_address()) in ("local", "auto"):
        return
    host, _, port = address.rpartition(":")
    # Ray itself would wait for minutes.
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


def ray_address() -> str:
    """Return the cluster's address: RAY_ADDRESS, or "local" for a Ray on this machine."""
    return os.environ.get("RAY_ADDRESS") or "local"
