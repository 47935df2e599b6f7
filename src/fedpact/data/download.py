"""Download: a data set's files from its public home into the data directory, checked by MD5."""

import http.client
import io
import tarfile
import urllib.request
import zlib
from collections.abc import Iterator

from fedpact.data.files import Source, check_md5, data_dir, find_source, state
from fedpact.errors import DataError
from fedpact.files import replacing

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
        check_md5(source, file, content, url)
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
