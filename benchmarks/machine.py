"""What the numbers were measured on."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from fedpact.simulation.machine import available_cores

_PACKAGES = ("fedpact", "torch", "numpy", "cryptography", "opacus", "flwr", "ray")


def describe(threads: str, device: str = "cpu") -> dict[str, str]:
    """Return processor, memory, system and versions, torch's threads and the device."""
    card = device == "cuda" and torch.cuda.is_available()
    return {
        "processor": f"{_processor()}, {available_cores()} of {os.cpu_count()} cores",
        "vector instructions": torch.backends.cpu.get_cpu_capability(),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "device": torch.cuda.get_device_name() if card else "cpu",
        "torch's threads": threads,
        "system": platform.platform(terse=True),
        "Python": platform.python_version(),
        **{name: found for name in _PACKAGES if (found := installed(name))},
    }


def installed(package: str) -> str:
    """Return a package's version, or nothing."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
