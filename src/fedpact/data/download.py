"""Public data sets as files: where they lie, their digests, and how they are downloaded.

FEDPACT_DATA   the data directory, one folder a data set; it may be read-only.
               Default: `data` in the cache directory.
FEDPACT_CACHE  the cache directory for decoded arrays. Default: ~/.cache/fedpact.

A file is read whole and compared with its SHA-256 before anything is decoded.
"""

import hashlib
import http.client
import io
import json
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


SOURCES: Mapping[str, Source] = {
    name: Source(name, **raw)
    for name, raw in json.loads(
        Path(__file__).with_name("sources.json").read_text(encoding="utf-8")
    ).items()
}


def find_source(name: str) -> Source:
    """Return the files of a data set by its name. Raises DataError for a name without files."""
    if name in SOURCES:
        return SOURCES[name]
    raise DataError(
        f"data set {name!r} has no files to fetch or verify: expected one of {', '.join(SOURCES)}"
    )


def cache_dir() -> Path:
    """Return the cache directory; it need not exist. Raises DataError: none is known."""
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

    The cached .npz is named by the files' checksums. A damaged one is made again.
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
    Raises DataError: unknown name, no answer, another file than the published one, or a data
    directory that cannot be written; no file is left half written.
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
