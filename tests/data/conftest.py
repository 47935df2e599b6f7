import gzip
import hashlib
import os
import struct
from pathlib import Path

import numpy as np
import pytest

from fedpact.data import download
from fedpact.data.download import Source
from fedpact.data.load import from_arrays

REAL = os.environ.get("FEDPACT_REAL_DATA")  # as FEDPACT_DATA was given: see tests/conftest.py


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache and no data directory, so that no test sees another's files."""
    monkeypatch.setenv("FEDPACT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDPACT_DATA", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def real_data(monkeypatch):
    """The directory of the real data sets."""
    if not REAL:
        pytest.skip("FEDPACT_DATA is not set: the real data sets are not here")
    monkeypatch.setenv("FEDPACT_DATA", REAL)
    return Path(REAL)


def idx(array):
    """An IDX file, gzip, as http://yann.lecun.com/exdb/mnist describes it."""
    head = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    return gzip.compress(head + array.astype(np.uint8).tobytes(), mtime=0)


@pytest.fixture
def small_mnist(monkeypatch):
    """A data set of 20 + 10 images in MNIST's place; returns its files, not yet on disk."""
    rng = np.random.default_rng(0)
    contents = {}
    for part, n in (("train", 20), ("t10k", 10)):
        contents[f"{part}-images.gz"] = idx(rng.integers(0, 256, (n, 28, 28)))
        contents[f"{part}-labels.gz"] = idx(np.arange(n) % 10)
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    source = Source("mnist", sums, home="http://localhost:9", licence="none")
    monkeypatch.setitem(download.SOURCES, "mnist", source)  # type: ignore[arg-type]
    return contents


def put(folder, contents):
    for name, content in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


@pytest.fixture
def mnist_dir(small_mnist, tmp_path, monkeypatch):
    """The small data set on disk; returns its folder."""
    put(tmp_path / "files" / "mnist", small_mnist)
    monkeypatch.setenv("FEDPACT_DATA", str(tmp_path / "files"))
    return tmp_path / "files" / "mnist"


def records(per_label, site=None):
    """A data set whose feature is the record's number, labels in shuffled order."""
    y = np.random.default_rng(0).permutation(np.repeat(np.arange(len(per_label)), per_label))
    # One class alone is refused, as of that there is nothing to learn.
    classes = [f"c{k}" for k in range(max(2, len(per_label)))]
    x = np.arange(len(y), dtype=np.float32)[:, None]
    return from_arrays(x, y, name="records", classes=classes, site=site)


EVEN = records([200] * 10)
