"""A run's folder: its files, the costs of its rounds, and changes to several files at once.

A controller of τ asks how many rounds of τ local iterations the communication budget still allows.

plan.json           every setting in effect; "defaults" names those that nobody gave
partition.json      which records belong to which site
privacy.json        each site's terms, and what they cover
environment.json    versions and machine
rounds.jsonl        one RoundRecord a line; round 0 is the initial model
state.safetensors   the server's last committed state, with its progress
model.safetensors   the final model's weights
average.safetensors the average of models that the server kept beside it, where it kept one
columns.json        what released columns are scaled by, after their range
records.json        what a record is: shape, labels' names, a table's columns
summary.json        the outcome, once there is one
earlier.json        what the run had reserved and spent before it was extended, if it was
first-plan.json     of such a run, the plan that it began with
model-N.safetensors of such a run, the model that it had after N rounds
lock                whoever runs, resumes or extends it holds it (common.run_folder), and beside it,
                    until an extension has changed all files, .fedpact-before.json: what they held
joining.json        what joining was worth to each site, where that was asked; simulator only
audit.json          what attacks on the run's mechanism found, where it was audited
report.html         the page
waits.json          how long each site took in the last round, or is being waited for
handed-over.json    of a deployment, which sites have the final model
sites/NAME/         ledger.jsonl, memory.safetensors: the site's own, and private

Before the first is changed, each folder gets a private note of what its own files hold. While the
first folder's note is there nothing was changed, as far as anybody is told: `rollback` undoes it
all. A note is of files of its own folder alone, which have fixed names, and is obeyed only if the
account that reads it wrote it: no policy, ledger or key, and no other folder, follows from one.
"""

import contextlib
import json
import math
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import chain, count
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from fedpact.common.errors import DataError, InputError
from fedpact.common.files import only_one, parse_errors, sync, write_whole
from fedpact.common.messages import RoundRecord, State, encode_parts, from_bytes
from fedpact.common.records import strict


@dataclass(frozen=True)
class Costs:
    """Sums over the rounds so far. steps: Σ τ. squares: Σ τ². products: Σ τ times seconds."""

    rounds: int = 0
    sent: int = 0
    seconds: float = 0.0
    steps: int = 0
    squares: int = 0
    products: float = 0.0

    def after(self, sent: int, steps: int, seconds: float) -> "Costs":
        """Return the costs with one more round of `steps` local iterations."""
        return replace(
            self,
            rounds=self.rounds + 1,
            sent=self.sent + sent,
            seconds=self.seconds + seconds,
            steps=self.steps + steps,
            squares=self.squares + steps**2,
            products=self.products + steps * seconds,
        )

    def split_seconds(self) -> tuple[float, float]:
        """Return (d_com, d_cmp): seconds of a round beside its steps, and of one local iteration.

        Least squares of seconds = d_com + d_cmp τ, both kept >= 0. As long as all rounds had one τ
        they cannot be told apart, and everything counts as d_com: a larger τ is tried, and tells.
        """
        if not self.rounds:
            return 0.0, 0.0
        mean_seconds, mean_steps = self.seconds / self.rounds, self.steps / self.rounds
        # Whole numbers, so that equal τ give exactly 0.
        spread = self.rounds * self.squares - self.steps**2
        if spread == 0:
            return mean_seconds, 0.0
        slope = (self.rounds * self.products - self.steps * self.seconds) / spread
        per_step = min(max(slope, 0.0), mean_seconds / mean_steps)
        return mean_seconds - per_step * mean_steps, per_step


WAITS = "waits.json"
"""Of the last question, how long each site took or is waited for: for whoever watches."""

EARLIER = "earlier.json"
"""What a run had before its last reservation."""

ATTEMPTS = "attempts.json"
"""Of a deployment, how often its round was tried."""

LOCK = "lock"
"""Held by whoever works on a run's folder, or a party's directory."""

COLUMNS = "columns.json"
"""What released columns are scaled by."""

FIRST_PLAN = "first-plan.json"
"""What a run that was extended began with."""

RUN = "run"
"""A party's folder of its run, in its directory."""


def folder_of_run(place: Path) -> Path:
    """Return the folder of a run: of a deployment's server or site, the one in its directory."""
    return place / RUN if (place / "federation.toml").exists() else place


def explain_not_a_run(folder: Path) -> str:
    """Return which folder to give in place of one that is no run's."""
    if (folder / "comparison.json").exists():
        return (
            f"this is a comparison, whose page is {folder / 'comparison.html'}; its runs are in "
            "NAME/seed-S below it"
        )
    if (folder / "site.toml").exists():
        return (
            "this is a deployed site's directory, which has no page: `fedpact deploy status` tells "
            "its owner of it, and the run's folder is the server's"
        )
    for party in (folder, folder / "server"):
        if (party / "federation.toml").exists():
            return f"the run of this deployment is in {party / RUN}, once its server has begun it"
    return "give the folder that `fedpact run` wrote with --out, or run the plan again"


def name_columns(names: Sequence[str], by: Tensor) -> dict[str, dict[str, float]]:
    """Return columns.json's content. by: means and deviations of the columns [2 m]."""
    mean, deviation = by.chunk(2)
    named = zip(names, mean.tolist(), deviation.tolist(), strict=True)
    return {name: {"mean": m, "deviation": d} for name, m, d in named}


def read_scales(path: Path, names: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return the content of a columns.json, which says what these columns are scaled by.

    Raises DataError: it is missing, or does not say so of each of them, as a finite mean and a
    finite deviation > 0.
    """
    try:
        found = json.loads(path.read_bytes())
        read = {n: {key: float(found[n][key]) for key in ("mean", "deviation")} for n in names}
        good = all(math.isfinite(sum(of.values())) and of["deviation"] > 0 for of in read.values())
        why = "" if good else "a mean or deviation that is none"
    except (OSError, ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
        read, why = {}, type(error).__name__
    if why:
        raise DataError(
            f"{path} does not say what the columns {', '.join(names)} are scaled by ({why}): "
            "expected a mean and a deviation above 0 of each, as the run wrote them there; restore "
            "it (a deployment's server has it as run/columns.json), or run the plan again"
        )
    return read


def find_unused_path(path: Path) -> Path:
    """Return a path, or with the first number behind it that nothing has: names go by seconds."""
    numbered = (path.with_name(f"{path.name}-{n}") for n in count(2))
    return next(one for one in chain([path], numbered) if not one.exists())


def check_writable(run: Path) -> None:
    """Find out that a run's folder cannot be written to before what is for it is computed.

    Raises InputError.
    """
    if not os.access(run, os.W_OK | os.X_OK):
        raise InputError(
            f"{run} may not be written to by this account, and what this command finds is kept "
            "there: use the account whose folder it is, or a copy of the folder"
        )


_LOST = "put the run's folder back from a backup, or begin a new run in another one"


@dataclass(frozen=True)
class Checkpoint:
    """The server between two rounds.

    round: rounds committed so far. included: site -> last round whose reply entered the state.
    costs: bytes and seconds of all rounds so far.
    """

    state: State
    round: int
    included: Mapping[str, int]
    costs: Costs = field(default_factory=Costs)

    def to_parts(self) -> list[bytes | memoryview]:
        """Encode for state.safetensors, in parts; the progress stands beside the state's numbers.

        The vectors are not copied.
        """
        costs = {f"/cost/{name}": value for name, value in asdict(self.costs).items()}
        progress = {"/round": self.round, **costs}
        included = {f"/included/{site}": last for site, last in self.included.items()}
        numbers = {**self.state.numbers, **progress, **included}
        return encode_parts(State(self.state.vectors, numbers))

    @staticmethod
    def from_bytes(block: bytes) -> "Checkpoint":
        """Decode the parts that `to_parts` returned, joined."""
        stored = from_bytes(block)
        if not isinstance(stored, State):
            raise DataError(f"a {type(stored).__name__} was found where a run's state is expected")
        numbers = dict(stored.numbers)
        done = int(numbers.pop("/round"))
        # Runs of before costs were split have only the bytes.
        found: dict[str, Any] = {"rounds": done, "sent": int(numbers.pop("/sent", 0))}
        for field_ in fields(Costs):
            if f"/cost/{field_.name}" in numbers:
                found[field_.name] = numbers.pop(f"/cost/{field_.name}")
        keys = [key for key in numbers if key.startswith("/included/")]
        included = {key.removeprefix("/included/"): int(numbers.pop(key)) for key in keys}
        return Checkpoint(State(stored.vectors, numbers), done, included, Costs(**found))


@dataclass(frozen=True)
class Folder:
    """The folder of one run."""

    path: Path

    @property
    def partition(self) -> Path:
        """Where the partition is."""
        return self.path / "partition.json"

    def site(self, name: str) -> Path:
        """Return a site's own directory."""
        return self.path / "sites" / name

    def write_json(self, name: str, document: Any) -> None:
        """Write one of the JSON files; a number that is not finite becomes null."""
        text = json.dumps(strict(document), indent=2, allow_nan=False)
        write_whole(self.path / name, text.encode() + b"\n", private=False)

    def read_json(self, name: str) -> Any:
        """Read one of the JSON files. Raises DataError: missing or no JSON."""
        try:
            return json.loads((self.path / name).read_bytes())
        except (OSError, ValueError) as error:
            raise DataError(
                f"{self.path / name} cannot be read ({type(error).__name__}): "
                f"expected the folder of a run, as `fedpact run` writes it, at {self.path}"
            ) from None

    def waits(self, number: int, sites: Mapping[str, Mapping[str, Any]]) -> None:
        """Write how long each site took in a round, or is being waited for."""
        self.write_json(WAITS, {"round": number, "sites": sites})

    def commit(self, checkpoint: Checkpoint, record: RoundRecord) -> None:
        """Make a round durable: first its record, then the state that counts it as done."""
        with (self.path / "rounds.jsonl").open("a", encoding="utf-8") as file:
            file.write(record.to_json() + "\n")
            file.flush()
            os.fsync(file.fileno())
        write_whole(self.path / "state.safetensors", *checkpoint.to_parts(), private=False)

    def rewrite(self, records: Sequence[RoundRecord]) -> None:
        """Write the records of all rounds anew."""
        lines = "".join(record.to_json() + "\n" for record in records)
        write_whole(self.path / "rounds.jsonl", lines.encode(), private=False)

    def restore(self) -> tuple[Checkpoint, list[RoundRecord]]:
        """Return the last committed round and the records up to it; later lines are dropped."""
        state, rounds = self.path / "state.safetensors", self.path / "rounds.jsonl"
        try:
            with parse_errors(state, _LOST):
                checkpoint = Checkpoint.from_bytes(state.read_bytes())
            # One line a round, round 0 included; whatever follows was never committed.
            lines = rounds.read_bytes().splitlines()
        except OSError as error:
            raise DataError(
                f"run {self.path} cannot be resumed ({error.strerror}: {error.filename}): "
                "it ended before its first round was written; start it anew"
            ) from None
        kept = lines[: checkpoint.round + 1]
        with parse_errors(rounds, _LOST):
            records = [RoundRecord.from_json(line.decode()) for line in kept]
            if [record.round for record in records] != list(range(checkpoint.round + 1)):
                raise ValueError(f"it has no line for each of the rounds 0 to {checkpoint.round}")
        if len(kept) < len(lines):
            write_whole(rounds, b"\n".join(kept) + b"\n", private=False)
        return checkpoint, records


def read_earlier(folder: Folder) -> dict[str, Any]:
    """Return what earlier.json holds, nothing if the run was never extended.

    Raises DataError: damaged, or lost.
    """
    if not (folder.path / EARLIER).exists():
        plan = folder.path / "plan.json"
        if plan.exists() and folder.read_json(plan.name).get("after"):
            raise DataError(
                f"{folder.path / EARLIER} is not there, and the run was extended: put it back "
                "from a backup; without it nobody knows what the run had spent before"
            )
        return {}
    raw = folder.read_json(EARLIER)
    try:
        lists = {key: tuple(raw[key]) for key in ("runs", "told", "more")}
        return {**lists, "sites": raw["sites"], "spent": raw["spent"]}
    except (KeyError, TypeError) as error:
        raise DataError(
            f"{folder.path / EARLIER} has no {error}: put it back from a backup; without it "
            "nobody knows what the run had spent before it was extended"
        ) from None


BACKUP_FILE: Final = ".fedpact-before.json"
"""What the files of a folder held that are being changed together."""

_NAMES: Final = (
    *("plan.json", "federation.toml", EARLIER, FIRST_PLAN),
    *("environment.json", "privacy.json", "summary.json", ATTEMPTS),
)
_KIND: Final = "what these files held before they are changed together"


@contextlib.contextmanager
def exclusive(*places: Path, wait: bool = False) -> Iterator[None]:
    """Hold run folders or parties' directories for the block, after `rollback`.

    Whoever runs, resumes or extends one holds it. wait: until nobody else does. A folder that is
    made for its lock goes again if the block leaves nothing in it. Raises InputError: it is held.
    """
    roots = _roots(places)
    new = [each for root in roots for each in (root, *root.parents) if not each.exists()]
    with _locked(roots, wait):
        rollback(*places)
        try:
            yield
        finally:
            for each in new:
                _remove_empty(each)


def recover(*places: Path) -> None:
    """Undo a change that was cut off, for whoever is to read the files.

    Raises InputError: it is going on. DataError: see `rollback`.
    """
    # No lock, and no write, where there is nothing to undo: a reader may read only.
    noted = [root for root in _roots(places) if _has_note(root)]
    if noted:
        with _locked(noted, wait=False):
            rollback(*places)


def keep_before(*places: Path) -> None:
    """Write down what the files hold, in each folder, as they are to be changed together.

    Until `commit` they are not: `rollback` makes them what they were, also after a crash.
    """
    roots = _roots(places)
    for root in roots:
        files = {name: _text(root / name) for name in _NAMES}
        note = {"fedpact": _KIND, "folders": len(roots), "files": files}
        write_whole(root / BACKUP_FILE, json.dumps(note).encode())


def rollback(*places: Path) -> None:
    """Undo a change of several files that was not settled; nothing where there is none.

    Raises DataError: a note is none that this account wrote, or is of other folders, too.
    """
    roots = _roots(places)
    notes = {root: note for root in roots if (note := _note(root)) is not None}
    for root, note in notes.items():
        if note["folders"] > len(roots):
            raise DataError(
                f"{root} was being extended together with other folders when that was cut off "
                f"(its {BACKUP_FILE}): `fedpact deploy up DIRECTORY` or `fedpact extend`, with the "
                "directory that was extended, makes all of them what they were, or what they were "
                "to be; then this one can be used"
            )
    undone = notes.get(roots[0], {"folders": 1})["folders"] > 1
    # The first one last: without its note all have been changed.
    for root in reversed(notes):
        if undone or notes[root]["folders"] == 1:
            _write_back(root, notes[root]["files"])
        _drop(root)


def commit(*places: Path) -> None:
    """Say that all files were changed together."""
    for root in _roots(places):
        _drop(root)


def _roots(places: Iterable[Path]) -> list[Path]:
    """Return the folders of which files are changed: of a server's directory its run's, too."""
    with_run = ((p, p / RUN) if (p / "server.key").exists() else (p,) for p in places)
    return [root for roots in with_run for root in roots]


@contextlib.contextmanager
def _locked(roots: Iterable[Path], wait: bool) -> Iterator[None]:
    with ExitStack() as stack:
        for root in roots:
            server = (root / "server.key").exists()
            told = "has a server already, or is being extended" if server else "is in use already"
            stack.enter_context(only_one(root / LOCK, f"{root} {told}", wait=wait))
        yield


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        if [path.name for path in folder.iterdir()] == [LOCK]:
            (folder / LOCK).unlink()
        folder.rmdir()


def _has_note(root: Path) -> bool:
    return os.path.lexists(root / BACKUP_FILE)


def _text(path: Path) -> str | None:
    return path.read_text("utf-8") if path.exists() else None


def _note(root: Path) -> dict[str, Any] | None:
    """Return a folder's note, None without one. Raises DataError: see `rollback`."""
    path = root / BACKUP_FILE
    advice = "see who put it there and compare the folder with a backup, then remove it"
    with contextlib.suppress(FileNotFoundError), parse_errors(path, advice):
        with open(path, "rb", opener=_unfollowed) as file:
            found = os.fstat(file.fileno())
            private = stat.S_ISREG(found.st_mode) and not found.st_mode & 0o077
            if not private or found.st_uid != os.geteuid():
                raise ValueError("it is no private file of the account that this runs under")
            note = json.load(file)
        if note["fedpact"] != _KIND or not isinstance(note["folders"], int):
            raise ValueError("it is of another kind")
        for name, text in note["files"].items():
            if name not in _NAMES or not (text is None or isinstance(text, str)):
                raise ValueError(f"{name!r} is no text file that is changed so")
        return note
    return None


def _unfollowed(path: str, flags: int) -> int:
    # Not blocking: of a pipe nobody writes into.
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _write_back(root: Path, files: Mapping[str, str | None]) -> None:
    for name, text in files.items():
        path = root / name
        if text is None:
            path.unlink(missing_ok=True)
        elif not path.exists() or path.read_bytes() != text.encode():
            private = path.exists() and not path.stat().st_mode & 0o077
            write_whole(path, text.encode(), private=private)


def _drop(root: Path) -> None:
    (root / BACKUP_FILE).unlink(missing_ok=True)
    sync(root)
