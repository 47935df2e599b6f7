import gzip
import hashlib
import lzma
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from fedpact.common.errors import DataError
from fedpact.data import download, public
from fedpact.data.download import Source
from fedpact.data.load import load_dataset

from .conftest import put


def pixels(contents, part, n):
    """The images of an IDX file, read from its end: 28 * 28 bytes each."""
    raw = gzip.decompress(contents[f"{part}-images.gz"])
    return np.frombuffer(raw[-n * 784 :], np.uint8).reshape(n, 1, 28, 28)


# Decoding and checksums


def test_idx_files_become_normalised_images(small_mnist, mnist_dir):
    data = load_dataset("mnist")
    assert data.x_test is not None
    for x, part, n in ((data.x, "train", 20), (data.x_test, "t10k", 10)):
        expected = (pixels(small_mnist, part, n) / 255 - 0.1307) / 0.3081
        np.testing.assert_allclose(x.numpy(), expected, rtol=0, atol=1e-6)
    assert data.y.tolist() == [*range(10)] * 2


def test_cifar_rows_are_label_then_red_green_blue():
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (5, 3, 32, 32), np.uint8), np.arange(5, dtype=np.uint8)
    content = b"".join(bytes([label]) + image.tobytes() for label, image in zip(y, x, strict=True))
    images_, labels = public.cifar_batch(content)
    assert np.array_equal(images_, x)
    assert np.array_equal(labels, y)


@pytest.mark.parametrize("damage", ["flip", "shorten", "empty"])
def test_a_damaged_file_is_never_decoded(mnist_dir, damage):
    path = mnist_dir / "train-images.gz"
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes({"flip": content, "shorten": content[:-1], "empty": b""}[damage])
    with pytest.raises(DataError) as error:
        load_dataset("mnist")
    published = download.SOURCES["mnist"].files["train-images.gz"]
    assert str(path) in str(error.value)
    assert published in str(error.value)
    assert "fedpact data download mnist" in str(error.value)


def test_a_file_may_be_compressed(mnist_dir):
    plain = load_dataset("mnist")
    for path in list(mnist_dir.iterdir()):
        path.with_name(path.name + ".xz").write_bytes(lzma.compress(path.read_bytes()))
        path.unlink()
    next(download.cache_dir().glob("*.npz")).unlink()
    assert torch.equal(load_dataset("mnist").x, plain.x)
    next(download.cache_dir().glob("*.npz")).unlink()
    path = mnist_dir / "train-images.gz.xz"
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(DataError, match="cannot be read"):
        load_dataset("mnist")


def test_missing_data_directory_error_says_how_to_get_one(small_mnist):
    with pytest.raises(DataError) as error:
        load_dataset("mnist")
    for part in ("FEDPACT_DATA is not set", "fedpact data download mnist", "train-images.gz"):
        assert part in str(error.value)


# The cache


def no_decoder(source):
    raise AssertionError("decoded again")


def test_the_second_load_does_not_decode(mnist_dir, monkeypatch):
    first = load_dataset("mnist")
    monkeypatch.setattr(public, "_decode_idx", no_decoder)
    assert torch.equal(load_dataset("mnist").x, first.x)
    monkeypatch.setenv("FEDPACT_CACHE", str(mnist_dir / "elsewhere"))
    with pytest.raises(AssertionError, match="decoded again"):  # the patch does reach the decoder
        load_dataset("mnist")


def test_other_checksums_have_another_cache_entry(mnist_dir, small_mnist, monkeypatch):
    load_dataset("mnist")
    labels = gzip.compress(gzip.decompress(small_mnist["train-labels.gz"])[:-1] + b"\5", mtime=0)
    put(mnist_dir, {"train-labels.gz": labels})
    old = download.SOURCES["mnist"]
    sums = {**old.files, "train-labels.gz": hashlib.sha256(labels).hexdigest()}
    changed = Source("mnist", sums, old.home, old.licence)
    monkeypatch.setitem(download.SOURCES, "mnist", changed)
    assert load_dataset("mnist").y[-1] == 5


@pytest.mark.parametrize("damage", [b"", b"PK", b"\x80\x04pickle", 0.0, 0.1, 0.5, 0.999])
def test_an_invalid_cache_is_rebuilt(mnist_dir, cache, damage):
    """Of other content, or with one byte changed at some place."""
    first = load_dataset("mnist")
    (entry,) = cache.iterdir()
    bad = bytearray(entry.read_bytes() if isinstance(damage, float) else damage)
    if isinstance(damage, float):
        bad[int(damage * len(bad))] ^= 0xFF
    entry.write_bytes(bad)
    with pytest.warns(UserWarning, match="is damaged"):
        again = load_dataset("mnist")
    assert torch.equal(again.x, first.x)
    assert torch.equal(again.y, first.y)
    assert torch.equal(load_dataset("mnist").x, first.x)  # and without a warning
    with zipfile.ZipFile(entry) as made:
        assert made.testzip() is None


def test_a_cache_that_cannot_be_written_is_a_warning(mnist_dir, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FEDPACT_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.warns(UserWarning, match="set FEDPACT_CACHE"):
        assert len(load_dataset("mnist").x) == 20


def test_the_cache_holds_no_half_written_file(mnist_dir, cache, monkeypatch):
    def fails(stream, **_):
        stream.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(download.np, "savez", fails)
    with pytest.warns(UserWarning, match="disk full"):
        load_dataset("mnist")
    assert list(cache.iterdir()) == []


def test_the_cache_directory_has_a_default(monkeypatch):
    monkeypatch.delenv("FEDPACT_CACHE")
    monkeypatch.setenv("HOME", "/somebody")
    assert download.cache_dir() == Path("/somebody/.cache/fedpact")
