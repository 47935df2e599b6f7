"""Carry out what the tables' figures are of once more, and keep partitions and receipts.

    FEDPACT_DATA=DIR python -m experiments.beyond.publish NAME [SITES ...]      published/NAME.zip

In the archive: partitions/KEY.json, which record is at which site, and receipts/KEY.json, of each
site what its ledger says that it reserved and spent, and how its hash chain ends; KEY tells sites,
seed and, of receipts, entrant, ε, rounds and η. A seed says all else. What is there already is not
made again. A partition that is not the stored one, or an ε by more than a two-thousandth, is an
error; a figure that is not is told.
"""

import hashlib
import io
import json
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Final

from experiments.beyond.table import HERE, STUDIES, Cell, Stored, tallied

import fedpact
from fedpact.common.files import write_whole
from fedpact.privacy.ledger.receipt import receipt

# An archive does not tell when it was made.
_WHEN: Final = (2026, 1, 1, 0, 0, 0)


class Archive:
    """A zip archive of texts, which is written whole or not at all."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._held = path.read_bytes() if path.exists() else b""

    def names(self) -> set[str]:
        """Return the names of the texts."""
        if not self._held:
            return set()
        with zipfile.ZipFile(io.BytesIO(self._held)) as held:
            return set(held.namelist())

    def add(self, texts: dict[str, str]) -> None:
        """Add texts by name, those that are there aside."""
        stream, there = io.BytesIO(self._held), self.names()
        with zipfile.ZipFile(stream, "a") as held:
            for name, text in texts.items():
                if name not in there:
                    held.writestr(zipfile.ZipInfo(name, _WHEN), text, zipfile.ZIP_DEFLATED, 9)
        self._held = stream.getvalue()
        write_whole(self._path, self._held, private=False)


def publish(name: str, sites: list[str]) -> None:
    """Make what is missing of a study, with these numbers of sites alone where any are given."""
    results, archive = Stored(name), Archive(HERE / "published" / f"{name}.zip")
    (HERE / "published").mkdir(exist_ok=True)
    for cell in results.cells():
        if sites and str(cell.sites) not in sites:
            continue
        way = results.chosen(cell)
        for seed in results.study.seeds:
            key = f"{cell} T={way[0]} η={way[1]:g} seed={seed}"
            if f"receipts/{key}.json" not in archive.names():
                archive.add(_carried_out(results, cell, way, seed, key))
                print(key, flush=True)


def alike(found: dict[str, int], stored: dict[str, int]) -> bool:
    """Whether as many sites spent the same ε, but for a two-thousandth.

    How near below a budget the noise is calibrated follows from the version.
    """
    each = [sorted(float(x) for x, n in of.items() for _ in range(n)) for of in (found, stored)]
    return len(each[0]) == len(each[1]) and all(
        abs(a - b) <= 5e-4 * b for a, b in zip(*each, strict=True)
    )


def _carried_out(
    results: Stored, cell: Cell, way: tuple[int, float], seed: int, key: str
) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        last = fedpact.run(cell.plan(results.study, way, seed), run).records[-1]
        partition = (run / "partition.json").read_bytes()
        receipts = [receipt(path) for path in sorted((run / "sites").glob("*/ledger.jsonl"))]
    stored, found = results.of(cell, way, seed), [x.accuracy for x in last.scores.values()]
    if hashlib.sha256(partition).hexdigest() != stored["partition"]:
        sys.exit(f"{key}: the partition is not the one that is stored")
    if not alike(tallied(receipts), stored["spent"]):
        sys.exit(f"{key}: {tallied(receipts)} was spent, and {stored['spent']} is stored")
    if abs(sum(found) / len(found) - stored["mean"]) > 1e-4:
        print(f"{key}: {sum(found) / len(found):.5f}, and {stored['mean']} is stored")
    of_sites = {each["site"]: each for each in receipts}
    return {
        f"partitions/sites={cell.sites} seed={seed}.json": partition.decode(),
        f"receipts/{key}.json": json.dumps(of_sites, sort_keys=True, separators=(",", ":")),
    }


if __name__ == "__main__":
    if sys.argv[1:2] == [] or sys.argv[1] not in STUDIES:
        sys.exit(f"expected one of {', '.join(STUDIES)}, and numbers of sites")
    publish(sys.argv[1], sys.argv[2:])
