"""What the process may use: cores, by affinity and control groups; open files; memory."""

import ctypes
import os
import platform
import resource
import subprocess
import sys

import pytest
import torch

from fedpact.common.errors import PlanError
from fedpact.simulation import machine as process
from fedpact.simulation.machine import (
    allow_open_files,
    available_cores,
    device_of,
    keep_freed_memory,
)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Eight cores, and the path of the control group's quota."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(process, "_QUOTA", tmp_path / "cpu.max")
    return tmp_path / "cpu.max"


def test_without_control_groups_the_affinity_counts(machine):
    assert available_cores() == 8


def test_without_affinity_the_machine_counts(machine, monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    assert available_cores() == 5
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert available_cores() == 1


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ("max 100000\n", 8),
        ("200000 100000\n", 2),
        ("150000 100000\n", 2),
        ("50000 100000\n", 1),
        ("0 100000\n", 1),
        ("1600000 100000\n", 8),
        ("garbage", 8),
        ("", 8),
    ],
)
def test_a_quota_of_the_control_group_counts(machine, limit, expected):
    machine.write_text(limit)
    assert available_cores() == expected


@pytest.fixture
def files():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, before[1]))
    yield lambda: resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_more_files_may_be_opened_up_to_the_hard_limit(files, tmp_path):
    hard = files()[1]
    allow_open_files(100)
    assert files() == (612, hard)
    allow_open_files(10)
    assert files() == (612, hard)
    opened = [(tmp_path / str(i)).open("w") for i in range(400)]
    for file in opened:
        file.close()
    allow_open_files(10**12)
    assert files()[0] == hard or hard == resource.RLIM_INFINITY


PAGES = """
import resource
from threading import Thread
from fedpact.simulation.machine import keep_freed_memory

found = []

def faults():
    for turn in range(4):
        if turn == 1:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        blocks = [bytearray(size) for size in (10_000_000, 100_000_000)]
        del blocks
    found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

faults()
keep_freed_memory()
faults()
thread = Thread(target=faults)
thread.start()
thread.join()
print(*found)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is glibc's")
@pytest.mark.slow
def test_freed_memory_is_reused():
    """Blocks of 110 MB, three times: 80,566 pages of 4 KiB, where they are given back."""
    command = [sys.executable, "-c", PAGES]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    given_back, kept, by_a_thread = map(int, done.stdout.split())
    assert kept < 20_000 < given_back
    assert by_a_thread < 20_000


def test_other_libraries_are_left_as_they_are(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    keep_freed_memory()


def test_precisions_that_a_machine_does_not_have_are_refused(monkeypatch):
    for precision in ("float32", "bf16"):
        assert device_of("cpu", precision).type == "cpu"
    with pytest.raises(PlanError, match=r'"tf32" with device = "cpu".*or use "bf16"'):
        device_of("cpu", "tf32")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for capability, good in (((7, 5), False), ((8, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, has=capability: has)
        assert device_of("cuda", "float32").type == "cuda"
        for precision in ("tf32", "bf16"):
            if good:
                assert device_of("cuda", precision).type == "cuda"
                continue
            with pytest.raises(PlanError, match=r"has compute capability 7\.5: expected 8\.0"):
                device_of("cuda", precision)
