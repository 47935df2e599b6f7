"""What a site has answered in a run, for its owner alone: progress.json, in its directory.

Rounds, counts and codes of refusals follow from public quantities; none of it leaves the machine.
"""

import json
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from fedpact.files import write_whole
from fedpact.messages import Refusal, Reply, Step

_log = logging.getLogger("fedpact.site")
_FILE: Final = "progress.json"


@dataclass(frozen=True)
class Progress:
    """round: of the last question. seconds: that its answer took. refusals: code -> how many."""

    run: str = ""
    round: int = 0
    answers: int = 0
    seconds: float = 0.0
    refusals: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def state(self) -> str:
        """In a word, how far it is."""
        return "running" if self.answers else "nothing answered yet"

    @staticmethod
    def read(directory: Path) -> "Progress":
        """Return what a site's directory says; nothing where the file is missing or damaged."""
        try:
            return Progress(**json.loads((directory / _FILE).read_bytes()))
        except (OSError, ValueError, TypeError):
            return Progress()

    @staticmethod
    def count(directory: Path, run: str, answer: object, seconds: float) -> None:
        """Note a message that a site has answered with; what is none counts for nothing."""
        if isinstance(answer, Reply | Refusal | Step):
            code = answer.code if isinstance(answer, Refusal) else ""
            Progress.read(directory).after(run, answer.round, seconds, code).keep(directory)

    def after(self, run: str, number: int, seconds: float, code: str) -> "Progress":
        """Return it with one more answer. code: of a refusal, "" for none."""
        before = self if self.run == run else Progress(run)
        refusals = Counter(before.refusals) + Counter([code] if code else [])
        last = max(before.round, number)
        return Progress(run, last, before.answers + 1, seconds, dict(refusals))

    def keep(self, directory: Path) -> None:
        """Write it down; a disk that is full stops nothing, as nothing follows from it."""
        try:
            write_whole(directory / _FILE, json.dumps(asdict(self)).encode() + b"\n")
        except OSError as error:
            _log.warning("%s is not written: %s", _FILE, error)
