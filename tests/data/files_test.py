import gzip
import hashlib
import http.server
import io
import json
import lzma
import os
import tarfile
import threading
import zipfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fedpact.cli.data import app
from fedpact.data import files, images
from fedpact.data.datasets import load
from fedpact.data.download import download
from fedpact.data.files import Source
from fedpact.errors import DataError

from .conftest import put


def pixels(contents: dict[str, bytes], part: str, n: int) -> np.ndarray:
    """The images of an IDX file, read from its end: 28 * 28 bytes each."""
    raw = gzip.decompress(contents[f"{part}-images.gz"])
    return np.frombuffer(raw[-n * 784 :], np.uint8).reshape(n, 1, 28, 28)


# Decoding and checksums


def test_idx_files_become_normalised_images(small_mnist, mnist_dir):
    data = load("mnist")
    assert data.x_test is not None
    for x, part, n in ((data.x, "train", 20), (data.x_test, "t10k", 10)):
        expected = (pixels(small_mnist, part, n) / 255 - 0.1307) / 0.3081
        np.testing.assert_allclose(x.numpy(), expected, rtol=0, atol=1e-6)
    assert data.y.tolist() == [*range(10)] * 2


def test_cifar_rows_are_label_then_red_green_blue():
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (5, 3, 32, 32), np.uint8), np.arange(5, dtype=np.uint8)
    content = b"".join(bytes([label]) + image.tobytes() for label, image in zip(y, x, strict=True))
    images_, labels = images.cifar_batch(content)
    assert np.array_equal(images_, x)
    assert np.array_equal(labels, y)


@pytest.mark.parametrize("damage", ["flip", "shorten", "empty"])
def test_a_damaged_file_is_never_decoded(mnist_dir, damage):
    path = mnist_dir / "train-images.gz"
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes({"flip": content, "shorten": content[:-1], "empty": b""}[damage])
    with pytest.raises(DataError) as error:
        load("mnist")
    published = files.SOURCES["mnist"].files["train-images.gz"]
    assert str(path) in str(error.value)
    assert published in str(error.value)
    assert "fedpact data download mnist" in str(error.value)


def test_a_file_may_lie_compressed(mnist_dir):
    plain = load("mnist")
    for path in list(mnist_dir.iterdir()):
        path.with_name(path.name + ".xz").write_bytes(lzma.compress(path.read_bytes()))
        path.unlink()
    next(files.cache_dir().glob("*.npz")).unlink()
    assert torch.equal(load("mnist").x, plain.x)
    next(files.cache_dir().glob("*.npz")).unlink()
    path = mnist_dir / "train-images.gz.xz"
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(DataError, match="cannot be read"):
        load("mnist")


def test_without_a_data_directory_the_message_says_how_to_get_one(small_mnist):
    with pytest.raises(DataError) as error:
        load("mnist")
    for part in ("FEDPACT_DATA is not set", "fedpact data download mnist", "train-images.gz"):
        assert part in str(error.value)


# The cache


def no_decoder(source):
    raise AssertionError("decoded again")


def test_the_second_load_does_not_decode(mnist_dir, monkeypatch):
    first = load("mnist")
    monkeypatch.setattr(images, "_decode_idx", no_decoder)
    assert torch.equal(load("mnist").x, first.x)
    monkeypatch.setenv("FEDPACT_CACHE", str(mnist_dir / "elsewhere"))
    with pytest.raises(AssertionError, match="decoded again"):  # the patch does reach the decoder
        load("mnist")


def test_other_checksums_have_another_cache_entry(mnist_dir, small_mnist, monkeypatch):
    load("mnist")
    labels = gzip.compress(gzip.decompress(small_mnist["train-labels.gz"])[:-1] + b"\5", mtime=0)
    put(mnist_dir, {"train-labels.gz": labels})
    old = files.SOURCES["mnist"]
    sums = {**old.files, "train-labels.gz": hashlib.md5(labels).hexdigest()}
    changed = Source("mnist", sums, old.home, old.licence)
    monkeypatch.setitem(files.SOURCES, "mnist", changed)
    assert load("mnist").y[-1] == 5


@pytest.mark.parametrize("place", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_a_cache_with_a_flipped_byte_is_made_again(mnist_dir, cache, place):
    first = load("mnist")
    (entry,) = cache.iterdir()
    good = entry.read_bytes()
    bad = bytearray(good)
    bad[int(place * len(bad))] ^= 0xFF
    entry.write_bytes(bad)
    with pytest.warns(UserWarning, match="is damaged"):
        again = load("mnist")
    assert torch.equal(again.x, first.x)
    assert torch.equal(again.y, first.y)
    with zipfile.ZipFile(entry) as made:
        assert made.testzip() is None


@pytest.mark.parametrize("content", [b"", b"PK", b"\x80\x04pickle", b"\x93NUMPY"])
def test_a_cache_that_is_something_else_is_made_again(mnist_dir, cache, content):
    first = load("mnist")
    (entry,) = cache.iterdir()
    entry.write_bytes(content)
    with pytest.warns(UserWarning, match="is damaged"):
        assert torch.equal(load("mnist").x, first.x)
    assert torch.equal(load("mnist").x, first.x)  # and without a warning


def test_a_cache_that_cannot_be_written_is_a_warning(mnist_dir, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FEDPACT_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.warns(UserWarning, match="set FEDPACT_CACHE"):
        assert len(load("mnist").x) == 20


def test_the_cache_holds_no_half_written_file(mnist_dir, cache, monkeypatch):
    def fails(stream, **_):
        stream.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(files.np, "savez", fails)
    with pytest.warns(UserWarning, match="disk full"):
        load("mnist")
    assert list(cache.iterdir()) == []


# Downloads


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(tmp_path):
    """A web server on the loopback interface; gives its address and its folder."""
    folder = tmp_path / "home"
    folder.mkdir()
    handler = partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}", folder
        running.shutdown()
        thread.join()


def test_download_gets_what_is_missing_or_damaged_and_nothing_else(server, small_mnist, cache):
    url, folder = server
    put(folder, small_mnist)
    assert download("mnist", url) == list(small_mnist)
    assert len(load("mnist").x) == 20
    assert download("mnist", url) == []
    here = cache / "data" / "mnist"
    (here / "t10k-labels.gz").write_bytes(b"damaged")
    (here / "train-labels.gz").unlink()
    assert download("mnist", url + "/") == ["train-labels.gz", "t10k-labels.gz"]
    assert {p.name: p.read_bytes() for p in here.iterdir()} == small_mnist


def test_download_from_a_folder(tmp_path, small_mnist, cache):
    put(tmp_path / "home", small_mnist)
    download("mnist", (tmp_path / "home").as_uri())
    assert {p.name: p.read_bytes() for p in (cache / "data" / "mnist").iterdir()} == small_mnist


def test_a_download_that_is_not_the_published_file_is_not_kept(server, small_mnist, cache):
    url, folder = server
    put(folder, {**small_mnist, "train-images.gz": b"<html>moved</html>"})
    with pytest.raises(DataError, match=r"train-images\.gz \(18 bytes\) has MD5"):
        download("mnist", url)
    assert not list((cache / "data").rglob("*.gz"))


def test_no_answer_and_no_such_file_are_explained(server, small_mnist):
    url, _ = server
    with pytest.raises(DataError, match=r"train-images\.gz cannot be fetched .*404"):
        download("mnist", url)
    for home in ("http://127.0.0.1:1", "file:///nowhere", "no address"):
        with pytest.raises(DataError, match=r"cannot be fetched .*check the connection"):
            download("mnist", home)


def test_a_data_directory_that_cannot_be_written(tmp_path, small_mnist, monkeypatch):
    put(tmp_path / "home", small_mnist)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FEDPACT_DATA", str(tmp_path / "file"))
    with pytest.raises(DataError, match=r"cannot be written .*FEDPACT_DATA"):
        download("mnist", (tmp_path / "home").as_uri())


def tar(members: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return stream.getvalue()


def test_an_archive_gives_its_named_members_only(tmp_path, cache, monkeypatch):
    rng = np.random.default_rng(0)
    batches = {
        name: rng.integers(0, 10, 3073 * 4, np.uint8).tobytes()
        for name in files.SOURCES["cifar10"].files
    }
    sums = {name: hashlib.md5(content).hexdigest() for name, content in batches.items()}
    source = Source("cifar10", sums, "http://127.0.0.1:1", "none", archive="c.tar.gz")
    monkeypatch.setitem(files.SOURCES, "cifar10", source)
    home = tmp_path / "home"
    put(home, {"c.tar.gz": tar({**batches, "../outside": b"x", "readme.html": b"x"})})
    assert download("cifar10", home.as_uri()) == list(batches)
    written = {str(p.relative_to(cache / "data" / "cifar10")) for p in cache.rglob("*.*")} - {"."}
    assert {name for name in written if name.endswith(".bin")} == set(batches)
    assert not list(tmp_path.rglob("outside"))
    data = load("cifar10")
    assert data.x.shape == (20, 3, 32, 32)
    first = np.frombuffer(batches["cifar-10-batches-bin/data_batch_1.bin"], np.uint8)
    assert data.y[0] == first[0]
    # One value of each channel by its published constants.
    for channel, (mean, std) in enumerate([(0.4914, 0.247), (0.4822, 0.2435), (0.4465, 0.2616)]):
        value = first[1 + 1024 * channel + 32 * 3 + 7]
        assert data.x[0, channel, 3, 7].item() == pytest.approx(
            (value / 255 - mean) / std, abs=1e-5
        )


@pytest.mark.parametrize("damage", ["short", "other", "member"])
def test_a_damaged_archive_is_explained(tmp_path, monkeypatch, damage):
    home = tmp_path / "home"
    block = tar({"cifar-10-batches-bin/data_batch_1.bin": os.urandom(50_000)})
    content = {"short": block[:20_000], "other": b"<html>", "member": tar({"x": b"x"})}[damage]
    put(home, {"cifar-10-binary.tar.gz": content})
    with pytest.raises(DataError, match="not the archive it should be"):
        download("cifar10", home.as_uri())


def test_a_data_set_without_files_cannot_be_downloaded():
    with pytest.raises(DataError, match="'digits' has no files"):
        download("digits")


# The commands


def run(*arguments: str):
    return CliRunner().invoke(app, arguments)


def test_list_prints_one_document(mnist_dir):
    result = run("list", "--json")
    document = json.loads(result.stdout)
    present = {row["name"]: row["present"] for row in document["data_sets"]}
    assert document["directory"] == str(mnist_dir.parent)
    assert present == {
        "digits": True,
        "mnist": True,
        "fashion_mnist": False,
        "cifar10": False,
        "heart_disease": False,
    }
    assert "fashion_mnist" in run("list").stdout


def test_verify_finds_the_damaged_file(mnist_dir):
    assert run("verify").exit_code == 0
    assert run("verify", "mnist").stdout.count(" ok ") == 4
    (mnist_dir / "t10k-labels.gz").write_bytes(b"x")
    (mnist_dir / "t10k-images.gz").unlink()
    result = run("verify", "--json")
    assert json.loads(result.stdout)["data_sets"]["mnist"] == {
        "train-images.gz": "ok",
        "train-labels.gz": "ok",
        "t10k-images.gz": "missing",
        "t10k-labels.gz": "damaged",
    }
    assert isinstance(result.exception, DataError)
    assert "mnist/t10k-images.gz, mnist/t10k-labels.gz" in str(result.exception)


def test_verify_of_nothing_is_an_error(small_mnist):
    for arguments in (("verify",), ("verify", "mnist"), ("verify", "digits")):
        assert isinstance(run(*arguments).exception, DataError)


def test_download_prints_one_document(tmp_path, small_mnist, cache):
    put(tmp_path / "home", small_mnist)
    home = (tmp_path / "home").as_uri()
    document = json.loads(run("download", "mnist", "--from", home, "--json").stdout)
    assert document == {"directory": str(cache / "data"), "fetched": {"mnist": list(small_mnist)}}
    assert "0 files" in run("download", "mnist", "--from", home).stdout
    assert isinstance(run("download", "mnits").exception, DataError)


def test_the_cache_directory_has_a_default(monkeypatch):
    monkeypatch.delenv("FEDPACT_CACHE")
    monkeypatch.setenv("HOME", "/somebody")
    assert files.cache_dir() == Path("/somebody/.cache/fedpact")
