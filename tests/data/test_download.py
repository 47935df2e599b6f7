import hashlib
import http.server
import io
import json
import os
import tarfile
import threading
from functools import partial

import numpy as np
import pytest
from typer.testing import CliRunner

from fedpact.cli.commands.data import app
from fedpact.common.errors import DataError
from fedpact.data import download as files
from fedpact.data.download import Source, download
from fedpact.data.load import NAMES, load_dataset

from .conftest import put


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format, *args):
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


def test_download_fetches_only_missing_or_damaged_files(server, small_mnist, cache):
    url, folder = server
    put(folder, small_mnist)
    assert download("mnist", url) == list(small_mnist)
    assert len(load_dataset("mnist").x) == 20
    assert download("mnist", url) == []
    here = cache / "data" / "mnist"
    (here / "t10k-labels.gz").write_bytes(b"damaged")
    (here / "train-labels.gz").unlink()
    assert download("mnist", url + "/") == ["train-labels.gz", "t10k-labels.gz"]
    assert {p.name: p.read_bytes() for p in here.iterdir()} == small_mnist


def test_a_download_that_is_not_the_published_file_is_not_kept(server, small_mnist, cache):
    url, folder = server
    put(folder, {**small_mnist, "train-images.gz": b"<html>moved</html>"})
    with pytest.raises(DataError, match=r"train-images\.gz \(18 bytes\) has SHA-256"):
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


def tar(members):
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
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in batches.items()}
    source = Source("cifar10", sums, "http://127.0.0.1:1", "none", archive="c.tar.gz")
    monkeypatch.setitem(files.SOURCES, "cifar10", source)
    home = tmp_path / "home"
    put(home, {"c.tar.gz": tar({**batches, "../outside": b"x", "readme.html": b"x"})})
    assert download("cifar10", home.as_uri()) == list(batches)
    written = {str(p.relative_to(cache / "data" / "cifar10")) for p in cache.rglob("*.*")} - {"."}
    assert {name for name in written if name.endswith(".bin")} == set(batches)
    assert not list(tmp_path.rglob("outside"))
    data = load_dataset("cifar10")
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


def run(*arguments):
    return CliRunner().invoke(app, arguments)


def test_list_prints_one_document(mnist_dir):
    result = run("list", "--json")
    document = json.loads(result.stdout)
    present = {row["name"]: row["present"] for row in document["data_sets"]}
    assert document["directory"] == str(mnist_dir.parent)
    assert all(row["what"] for row in document["data_sets"])
    assert set(NAMES) <= set(present)
    here = {"digits", "synthetic(ALPHA,BETA)", "synthetic_iid", "mnist"}
    assert {name for name, there in present.items() if there} == here
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
