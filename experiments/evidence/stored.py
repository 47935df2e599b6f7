"""What runs left: results/GROUP.json, name -> settings, and by seed what each look showed."""

import hashlib
import json
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from experiments.evidence.runs import Run

from fedpact.common.files import only_one

HERE = Path(__file__).parent


class Stored:
    """Outcomes by run and seed, on the disk as they come."""

    def __init__(self, folder: Path = HERE / "results") -> None:
        self.folder = folder
        self._groups: dict[str, tuple[int, dict[str, Any]]] = {}

    def group(self, name: str) -> dict[str, Any]:
        """Return a group's runs by name. A file is read again once it has changed."""
        path = self.folder / f"{name}.json"
        if not path.exists():
            return {}
        changed = path.stat().st_mtime_ns
        if self._groups.get(name, (None,))[0] != changed:
            self._groups[name] = changed, json.loads(path.read_text(encoding="utf-8"))
        return self._groups[name][1]

    def seeds(self, run: Run) -> dict[str, Any]:
        """Return what is stored of a run with these settings: seed -> outcome."""
        kept = self.group(run.group).get(run.name, {})
        same = [kept.get("settings"), kept.get("base_sha256")] == [list(run.settings), _of(run)]
        return kept["seeds"] if same else {}

    def whole(self, run: Run, seed: int) -> bool:
        """Whether a run has been looked at for the last time."""
        return str(run.looks[-1]) in self.seeds(run).get(str(seed), {"looks": ()})["looks"]

    def add(self, run: Run, seed: int, outcome: dict[str, Any]) -> None:
        """Store an outcome; those of other settings under the same name go."""
        self.folder.mkdir(exist_ok=True)
        with only_one(self.folder / ".lock", "another process stores a result", wait=True):
            self._add(run, seed, outcome)

    def _add(self, run: Run, seed: int, outcome: dict[str, Any]) -> None:
        seeds = dict(sorted({**self.seeds(run), str(seed): outcome}.items()))
        kept = {"base": run.base, "base_sha256": _of(run), "settings": list(run.settings)}
        kept |= {"seeds": seeds}
        whole = dict(sorted({**self.group(run.group), run.name: kept}.items()))
        path = self.folder / f"{run.group}.json"
        part = path.with_suffix(".part")
        part.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
        part.replace(path)


def _of(run: Run) -> str:
    return _digest(HERE.parent / run.base)


@cache
def _digest(base: Path) -> str:
    """Return the digest of what a plan's file says, whatever its comments."""
    raw = tomllib.loads(base.read_text(encoding="utf-8"))
    return hashlib.sha256(json.dumps(raw, sort_keys=True).encode()).hexdigest()
