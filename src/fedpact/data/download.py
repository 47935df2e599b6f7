"""Public data sets as files: where they lie, their digests, and how they are downloaded.

FEDPACT_DATA   the data directory, one folder a data set; it may be read-only.
               Default: `data` in the cache directory.
FEDPACT_CACHE  the cache directory for decoded arrays. Default: ~/.cache/fedpact.

A file is read whole and compared with its SHA-256 before anything is decoded. The digests are of
files that had the MD5 which the data sets' own sites publish.
"""

import hashlib
import http.client
import io
import lzma
import os
import tarfile
import urllib.request
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedpact.common.errors import DataError
from fedpact.common.files import replacing

Arrays = Mapping[str, np.ndarray]

_IDX = ("train-images", "train-labels", "t10k-images", "t10k-labels")


@dataclass(frozen=True)
class Source:
    """A public data set: its folder is `name`, its files stand below it.

    files: path in the folder -> SHA-256. A file may lie there compressed, with `.xz` added;
    the digest is then that of its content. home: the address its files are fetched from.
    archive: the tar file below `home` that holds them, if they are not there one by one.
    """

    name: str
    files: Mapping[str, str]
    home: str
    licence: str
    archive: str | None = None


def _idx(images: str, labels: str, test_images: str, test_labels: str) -> dict[str, str]:
    sums = (images, labels, test_images, test_labels)
    return {
        f"{part}-idx{3 if 'images' in part else 1}-ubyte.gz": digest
        for part, digest in zip(_IDX, sums, strict=True)
    }


SOURCES: Mapping[str, Source] = {
    source.name: source
    for source in (
        Source(
            "mnist",
            _idx(
                "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
                "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
                "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
                "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
            ),
            home="https://ossci-datasets.s3.amazonaws.com/mnist",
            licence="CC BY-SA 3.0 as commonly stated (Y. LeCun, C. Cortes)",
        ),
        Source(
            "fashion_mnist",
            _idx(
                "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
                "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
                "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
                "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
            ),
            home="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
            licence="MIT, Zalando SE",
        ),
        Source(
            "cifar10",
            {
                f"cifar-10-batches-bin/{batch}.bin": digest
                for batch, digest in {
                    "data_batch_1": (
                        "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5"
                    ),
                    "data_batch_2": (
                        "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed"
                    ),
                    "data_batch_3": (
                        "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67"
                    ),
                    "data_batch_4": (
                        "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48"
                    ),
                    "data_batch_5": (
                        "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add"
                    ),
                    "test_batch": (
                        "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b"
                    ),
                }.items()
            },
            home="https://www.cs.toronto.edu/~kriz",
            licence="none stated; given out for research, citation asked (A. Krizhevsky, 2009)",
            archive="cifar-10-binary.tar.gz",
        ),
        Source(
            "heart_disease",
            {
                "processed.cleveland.data": (
                    "a74b7efa387bc9d108d7d0115d831fe9b414b29ae7124f331b622b4efa0427c8"
                ),
                "processed.hungarian.data": (
                    "d1ad108f785768cd3d7e82dc522e6f5a61eea93cccfb3a46ee8076f73fc3d796"
                ),
                "processed.switzerland.data": (
                    "834a405ccf5b66ab4056bb77794adc8df0b7125186454c0a1d002d33c6c3b314"
                ),
                "processed.va.data": (
                    "e7c93d8d0d2acdadfa4c5e8de768e2191e7f618b952e29623f1f0d5949ff6b8f"
                ),
            },
            home="https://archive.ics.uci.edu/ml/machine-learning-databases/heart-disease",
            licence="CC BY 4.0 (UCI; A. Janosi, W. Steinbrunn, M. Pfisterer, R. Detrano)",
        ),
        Source(
            "shakespeare",
            {"input.txt": "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"},
            home="https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare",
            licence="text in the public domain; MIT (A. Karpathy's char-rnn)",
        ),
        Source(
            "adult",
            {
                "adult.data": "5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d",
                "adult.test": "a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05",
            },
            home="https://archive.ics.uci.edu/ml/machine-learning-databases/adult",
            licence="CC BY 4.0 (UCI; B. Becker, R. Kohavi)",
        ),
    )
}


def find_source(name: str) -> Source:
    """Return the files of a data set by its name. Raises DataError for a name without files."""
    if name not in SOURCES:
        raise DataError(
            f"data set {name!r} has no files to fetch or verify: expected one of "
            f"{', '.join(SOURCES)}"
        )
    return SOURCES[name]


def cache_dir() -> Path:
    """Return the cache directory; it need not exist. Raises DataError: nobody says where it is."""
    if named := os.environ.get("FEDPACT_CACHE"):
        return Path(named)
    try:
        return Path.home() / ".cache" / "fedpact"
    except RuntimeError:
        raise DataError(
            "there is no home directory to cache in: set FEDPACT_CACHE to a directory"
        ) from None


def data_dir() -> Path:
    """Return the data directory; it need not exist."""
    return Path(os.environ.get("FEDPACT_DATA") or cache_dir() / "data")


def locate(source: Source, file: str) -> Path | None:
    """Return where a file of the data set lies, as it is or with `.xz`; None if it is missing."""
    plain = data_dir() / source.name / file
    return next((p for p in (plain, plain.with_name(plain.name + ".xz")) if p.is_file()), None)


def read_verified(source: Source, file: str) -> bytes:
    """Return a file's content, which has the right SHA-256. Raises DataError otherwise."""
    path = locate(source, file)
    if path is None:
        unset = "" if os.environ.get("FEDPACT_DATA") else " (FEDPACT_DATA is not set)"
        raise DataError(
            f"data set {source.name}: {file} is not in {data_dir() / source.name}{unset}: set "
            f"FEDPACT_DATA to the directory that holds the folder {source.name}, or fetch it "
            f"with `fedpact data download {source.name}`"
        )
    try:
        content = path.read_bytes()
        content = lzma.decompress(content) if path.suffix == ".xz" else content
    except (OSError, lzma.LZMAError) as error:
        raise DataError(
            f"data set {source.name}: {path} cannot be read ({error}): fetch it again with "
            f"`fedpact data download {source.name}`"
        ) from error
    check_digest(source, file, content, str(path))
    return content


def check_digest(source: Source, file: str, content: bytes, origin: str) -> None:
    """Raise DataError unless the content is the published one."""
    found, expected = hashlib.sha256(content).hexdigest(), source.files[file]
    if found != expected:
        raise DataError(
            f"data set {source.name}: {origin} ({len(content)} bytes) has SHA-256 {found}: "
            f"expected {expected}; the file is damaged or another version; fetch it again "
            f"with `fedpact data download {source.name}`"
        )


def state(source: Source, file: str) -> str:
    """Return "ok", "missing" or "damaged": whether the file is there with the right digest."""
    if locate(source, file) is None:
        return "missing"
    try:
        read_verified(source, file)
    except DataError:
        return "damaged"
    return "ok"


def load_cached(source: Source, decode: Callable[[Source], Arrays]) -> Arrays:
    """Return the data set's decoded arrays: from the cache, else decoded and then cached.

    The cached file is an uncompressed .npz, named by the files' checksums; each array in it carries
    a CRC-32, and a file that fails it in any way is made again.
    """
    sums = "".join(f"{file}{digest}" for file, digest in sorted(source.files.items()))
    key = hashlib.blake2b(sums.encode(), digest_size=8).hexdigest()
    path = cache_dir() / f"{source.name}-{key}.npz"
    if path.is_file():
        try:
            with np.load(path, allow_pickle=False) as stored:
                return dict(stored)
        except Exception as error:  # a damaged zip fails in a dozen ways; the originals are at hand
            warnings.warn(f"{path} is damaged ({error}): it is made again", stacklevel=2)
    arrays = decode(source)
    try:
        with replacing(path, private=False) as target, target.open("wb") as stream:
            np.savez(stream, allow_pickle=False, **arrays)
    except OSError as error:
        warnings.warn(
            f"the decoded {source.name} cannot be cached ({error}), so every run decodes it again: "
            "set FEDPACT_CACHE to a directory that can be written",
            stacklevel=2,
        )
    return arrays


_TIMEOUT = 60  # seconds without an answer


def download(name: str, home: str | None = None) -> list[str]:
    """Fetch those files of a data set that are missing or damaged; return their names.

    home: another address (http, https or file) that holds the same files, or the same archive.
    Raises DataError: unknown name, no answer, a file that is not the published one, or a data
    directory that cannot be written; then no file is left half written.
    """
    source = find_source(name)
    wanted = [file for file in source.files if state(source, file) != "ok"]
    if not wanted:
        return []
    home = (home or source.home).rstrip("/")
    for file, content, url in _contents(source, wanted, home):
        check_digest(source, file, content, url)
        target = data_dir() / source.name / file
        try:
            with replacing(target, private=False) as temporary:
                temporary.write_bytes(content)
        except OSError as error:
            raise DataError(
                f"data set {name}: {target} cannot be written ({error}): set FEDPACT_DATA to a "
                "directory that can be"
            ) from error
    return wanted


def _contents(source: Source, wanted: list[str], home: str) -> Iterator[tuple[str, bytes, str]]:
    """Yield name, content and address of each wanted file."""
    if source.archive is None:
        for file in wanted:
            yield file, _fetch(source, f"{home}/{file}"), f"{home}/{file}"
        return
    url = f"{home}/{source.archive}"
    block = _fetch(source, url)
    try:
        with tarfile.open(fileobj=io.BytesIO(block)) as archive:
            # Read member by member: nothing is unpacked under a name that the archive chooses.
            members = {member.name: member for member in archive.getmembers() if member.isfile()}
            for file in wanted:
                stream = archive.extractfile(members[file])
                yield file, stream.read() if stream else b"", url
    except (tarfile.TarError, KeyError, EOFError, OSError, zlib.error) as error:
        raise DataError(
            f"data set {source.name}: {url} ({len(block)} bytes) is not the archive it should be "
            f"({type(error).__name__}: {error}): try again, or give another address"
        ) from error


def _fetch(source: Source, url: str) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT) as answer:
            return answer.read()
    except (OSError, ValueError, http.client.HTTPException) as error:
        # urllib's URLError and HTTPError are OSErrors.
        raise DataError(
            f"data set {source.name}: {url} cannot be fetched ({error}): check the connection, "
            "give another address that holds the same files, or put them into "
            f"{data_dir() / source.name} by hand"
        ) from error
