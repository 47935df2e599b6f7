"""What this process may use of the machine: cores, open files, and memory that it keeps."""

import contextlib
import ctypes
import math
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from fedpact.common.errors import PlanError
from fedpact.common.params import Precision

_GROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_USUAL_FILES = 512
_AMPERE = 8  # the compute capability of GPUs that have TF32 and bfloat16

# malloc.h: sizes in bytes from which a block has a mapping of its own, from which free memory is
# given back, and by which the heap grows beyond what was asked for. 2^25 is the largest allowed.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3


def available_cores() -> int:
    """Return it, at least 1. A share of one and a half cores counts as two."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return max(1, min([cores, *(math.ceil(quota) for quota in _quotas(_OWN, _GROUPS))]))


def device_of(name: str, precision: Precision = "float32") -> torch.device:
    """Return the device "cpu", "cuda" or "cuda:1".

    Raises PlanError: this machine has none such, or none that computes in this precision.
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
            'run.precision is "tf32" with device = "cpu", which multiplies float32 as it is: leave '
            'it out, or take "bf16"'
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
    """Let this process hold `count` files open besides its usual ones, if the system lets it.

    The customary limit of 1,024 ends short of a thousand sites, each of which has its ledger open.
    """
    try:
        import resource
    except ImportError:  # no such limit
        return
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + _USUAL_FILES
    if most != resource.RLIM_INFINITY:
        wanted = min(wanted, most)
    if now != resource.RLIM_INFINITY and now < wanted:
        # Some systems have a further limit, which nobody tells; opening a file will.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def keep_freed_memory() -> None:
    """Have the C library keep the memory that large vectors leave, for the next ones.

    glibc gives it back to the system and then takes it anew, page by page, each of them zeroed: to
    encode a vector of 1.7 million numbers took seven times as long as copying it. Other libraries
    are left as they are. It holds for the whole process; its peak memory stays what it was.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    for option, value in ((_MMAP_THRESHOLD, 2**25), (_TRIM_THRESHOLD, 2**30), (_TOP_PAD, 2**26)):
        mallopt(option, value)


def _quotas(own: Path, groups: Path) -> Iterator[float]:
    """Yield the limits, in cores, of the process's control group and of all groups around it.

    own: what /proc says of the process's groups; groups: where they are mounted. cpu.max counts
    ("200000 100000", or "max"), as control groups of version 2 have it.
    """
    for line in _text(own).splitlines():
        if line.startswith("0::"):
            for folder in _upwards(groups, line.removeprefix("0::")):
                limit, period = (*_text(folder / "cpu.max").split(), "", "")[:2]
                if limit.isdigit() and period.isdigit() and int(period):
                    yield int(limit) / int(period)


def _upwards(root: Path, path: str) -> Iterator[Path]:
    """Yield root/path and each folder above it, root last: in a container only root may exist."""
    folder = root / path.strip("/")
    while folder != root and root in folder.parents:
        yield folder
        folder = folder.parent
    yield root


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
