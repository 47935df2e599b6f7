"""What the process may use: cores, by affinity; open files; memory."""

import ctypes
import os
import platform
import resource
import subprocess
import sys

import pytest

from fedpact.engines.process import (
    allow_open_files,
    available_cores,
    keep_freed_memory,
)


def test_the_affinity_counts_and_without_it_the_machine(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert available_cores() == 8
    monkeypatch.delattr(os, "sched_getaffinity")
    for cores, expected in ((5, 5), (None, 1)):
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
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
from fedpact.engines.process import keep_freed_memory

def faults():
    for turn in range(11):
        if turn == 1:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        blocks = [bytearray(10_000_000) for _ in range(5)]
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

given_back = faults()
keep_freed_memory()
print(given_back, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is glibc's")
def test_freed_memory_is_not_asked_for_again():
    """Five blocks of 10 MB, ten times: 122,070 pages of 4 KiB, where they are given back."""
    command = [sys.executable, "-c", PAGES]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    given_back, kept = map(int, done.stdout.split())
    assert kept < 12_207 < given_back


def test_other_libraries_are_left_as_they_are(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    keep_freed_memory()
