"""Stored runs repeated: which are drawn, and their results (again.json)."""

import json
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from experiments.evidence.cells import table
from experiments.evidence.measure import carry_out
from experiments.evidence.order import ORDER
from experiments.evidence.runs import Run
from experiments.evidence.stored import HERE, Stored

from fedpact.common.randomness.seeded import DRAWS

FILE: Final = HERE / "again.json"
MINUTES: Final = 1.0
_SEED: Final = 57


def drawn(stored: Stored, count: int) -> list[tuple[Run, int]]:
    """Return `count` of the complete stored runs, with seeds, that take a minute at most."""
    cheap = {(run, seed) for run, seed in ORDER if run.minutes <= MINUTES}
    whole = sorted((run.title, seed, run) for run, seed in cheap if stored.whole(run, seed))
    return [(run, seed) for _, seed, run in random.Random(_SEED).sample(whole, count)]


def carry_out_again(stored: Stored, run: Run, seed: int) -> dict[str, Any]:
    """Repeat a stored run in an empty folder; return its last accuracy, stored and repeated."""
    before, look = stored.seeds(run)[str(seed)], str(run.looks[-1])
    with tempfile.TemporaryDirectory() as folder:
        *_, after = carry_out(run, seed, Path(folder) / "run")
    each = [outcome["looks"][look]["accuracy"] for outcome in stored.seeds(run).values()]
    return {
        "stored": before["looks"][look]["accuracy"],
        "again": after["looks"][look]["accuracy"],
        "seeds": [min(each), max(each)],
        "drawn": before.get("draws") == DRAWS,
        **{key: after[key] for key in ("commit", "torch", "python", "processor", "device")},
    }


def keep(title: str, found: dict[str, Any]) -> None:
    """Store the result of a repeated run."""
    kept = {**_kept(), title: found}
    FILE.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n", encoding="utf-8")


def _kept() -> dict[str, Any]:
    return json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}


def part() -> Iterator[str]:
    """Return this section of the page."""
    kept = _kept()
    ten = {f"{run.title} seed={seed}" for run, seed in drawn(Stored(), 10)}
    others = f", and {len(kept.keys() - ten)} others" if kept.keys() - ten else ""
    yield "## Ten cells repeated"
    yield (
        f"Ten of the stored runs that take at most {MINUTES:g} minute of a core were drawn by "
        f"`random.Random({_SEED})` and repeated by `python -m "
        'experiments.evidence --again "NAME"`, which does not change the results; `--draw 10` '
        "instead of NAME draws them. Where the draws are other ones, seeds gave other random "
        "numbers when the cell was stored: the repetition is a further seed's, and of few seeds "
        "it is often outside their range. "
        f"{len(kept.keys() & ten)} of the ten have been repeated{others}."
    )
    rows = [
        [
            f"`{title}`",
            *(f"{100 * one[key]:.2f}" for key in ("stored", "again")),
            f"{100 * (one['again'] - one['stored']):+.2f}",
            " to ".join(f"{100 * end:.2f}" for end in one["seeds"]),
            "the same" if one["drawn"] else "other",
        ]
        for title, one in kept.items()
    ]
    head = ["NAME", "stored", "repeated", "difference", "range of stored seeds", "draws"]
    yield table(head, rows)
