"""By what a result was made: what each stored one carries, and how pages say it."""

import json
import platform
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from benchmarks.machine import describe

NOT_RECORDED: Final = "not recorded"
_PARTS: Final = ("torch", "python", "processor", "device")


def made() -> dict[str, str]:
    """Return commit, versions, processor and device."""
    asked = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(asked, cwd=Path(__file__).parent, capture_output=True, text=True)
    machine = describe("1")
    return {
        "commit": done.stdout.strip(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": f"{machine['processor']}, {machine['vector instructions']}",
        "device": machine["device"],
    }


def stored_in(folder: Path) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    """Yield each result file under a folder by its path there, with its results."""
    for path in sorted(folder.rglob("*.json")):
        kept = json.loads(path.read_text(encoding="utf-8"))
        yield path.relative_to(folder).as_posix(), list(_results(kept))


def _results(kept: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the results in what a file holds: what says how it was made, or holds a number."""
    parts = kept.values() if isinstance(kept, dict) else kept if isinstance(kept, list) else ()
    numbers = any(isinstance(part, int | float) for part in parts)
    if isinstance(kept, dict) and (numbers or {"made", "commit"} & kept.keys()):
        yield kept
    else:
        for part in parts:
            yield from _results(part)


def tally(results: Iterable[Mapping[str, Any]]) -> list[list[str]]:
    """Return rows of a table: how many results, of how many commits, were made by what.

    A result carries the keys of `made` itself or under "made", where earlier ones have a line; what
    it lacks is said to be not recorded.
    """
    counts, commits = Counter[tuple[str, ...]](), dict[tuple[str, ...], set[str]]()
    for one in results:
        own = one.get("made", {})
        kept = {**one, **(_of_line(own) if isinstance(own, str) else own)}
        parts = tuple(str(kept.get(part) or NOT_RECORDED) for part in _PARTS)
        counts[parts] += 1
        commits.setdefault(parts, set()).add(str(kept.get("commit") or ""))
    return [
        [str(n), str(len(of)) if "" not in (of := commits[parts]) else NOT_RECORDED, *parts]
        for parts, n in sorted(counts.items())
    ]


def _of_line(line: str) -> dict[str, str]:
    """Return the parts of "COMMIT, torch X, python X, PROCESSOR, DEVICE", as far as it goes."""
    commit, *rest = line.split(", ")
    versions = dict(part.split(" ", 1) for part in rest if part.startswith(("torch ", "python ")))
    machine = rest[len(versions) :]
    on = {"processor": ", ".join(machine[:-1]), "device": machine[-1]} if machine else {}
    return {"commit": commit, **versions, **on}
