"""Which sums a site has helped to open last: one list of a round and attempt, and none of an
earlier one.
"""

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from fedpact.errors import DataError, FedpactError
from fedpact.files import make_room, parse_errors, write_whole
from fedpact.messages import Task

_LOST = (
    "it says which sums this site has helped to open, and without it a server could have a second "
    "one of the same round opened. No older copy will do, as it lacks the last sums: "
    "take part in a new run only, for which you move it away"
)
_Opened = tuple[str, int, int, tuple[str, ...]]


class UnmaskedSums:
    """Over which sites this one has agreed to a sum last, of which round and attempt; durable.

    path: None in a simulation, which keeps it in memory.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._last: _Opened | None = None
        if path is not None:
            with suppress(FileNotFoundError), parse_errors(path, _LOST):
                run, number, attempt, names = json.loads(path.read_bytes())
                self._last = str(run), int(number), int(attempt), tuple(map(str, names))

    def begin(self, run: str, charged: bool) -> None:
        """Take part in a run. charged: it was charged for before.

        From its first charge on there is a file that names the run. Raises DataError: there is
        none, so that nobody knows which of its sums were opened.
        """
        found = None if self._last is None else self._last[0]
        if found == run:
            return
        if charged:
            there = "is missing" if found is None else f"is of run {found!r}"
            raise DataError(f"{self._path} {there}, and this site has released in {run!r}: {_LOST}")
        # Before every round that there may be: a run may open with round 0.
        self._keep((run, -1, 0, ()))

    def make_room(self, task: Task, sites: Iterable[str]) -> None:
        """Take room on the disk for a sum of a task over any of these sites, kept until `allows`.

        Raises FedpactError: there is none.
        """
        if self._path is None:
            return
        asked = task.run, task.round, task.attempt, sorted(sites)
        try:
            make_room(len(json.dumps(asked).encode()), self._path)
        except OSError as error:
            raise FedpactError(
                f"round {task.round} needs room on the disk for {self._path} ({error.strerror}): "
                "nothing is charged; make room, and the site takes part again"
            ) from error

    def allows(self, task: Task, survivors: tuple[str, ...]) -> bool:
        """Whether a sum over these sites may be opened, and remember that this one agreed to it.

        Of a round and attempt that is one list only; and none of an earlier one.
        """
        asked = task.run, task.round, task.attempt, survivors
        last = self._last
        again = last is not None and last[0] == task.run and asked[1:3] <= last[1:3]
        if again and last != asked:
            return False
        if last != asked:
            self._keep(asked)
        return True

    def _keep(self, last: _Opened) -> None:
        if self._path is not None:
            write_whole(self._path, json.dumps(last).encode())
        self._last = last
