"""A run's folder: its files, and the accumulated costs of its rounds.

plan.json           every setting in effect; "defaults" lists those that were not given
partition.json      which records belong to which site
privacy.json        the privacy statement: each site's terms, and what they cover
environment.json    versions and machine
rounds.jsonl        one RoundRecord per line; round 0 is the initial model
state.safetensors   the server's last committed state, with its progress
model.safetensors   the final model's weights
adapters/           the final model's PEFT adapters, as PEFT stores them, if it has any
average.safetensors the server's average of models, if it keeps one
columns.json        the scales of released columns, applied after their declared range
records.json        the form of a record: shape, labels' names, a table's columns
summary.json        the outcome of a finished run
lock                held by the run's process (`exclusive`)
joining.json        what joining was worth to each site, if asked for; simulator only
audit.json          the results of attacks on the run's mechanism, if it was audited
report.html         the report
waits.json          how long each site took in the last round, or has been waited for
handed-over.json    which sites of a deployment have the final model
sites/NAME/         ledger.jsonl and memory.safetensors, private to the site
"""

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import chain, count
from pathlib import Path
from typing import Any

from torch import Tensor

from fedpact.common.errors import DataError, InputError
from fedpact.common.files import LOCK, only_one, parse_errors, safe_name, write_whole
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
        """Return (d_com, d_cmp): seconds of a round without its steps, and per local iteration.

        By least squares of seconds = d_com + d_cmp τ, both >= 0. While all rounds have had the same
        τ, everything counts as d_com; the controller then tries a larger τ, which separates them.
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
"""How long each site took in the last request, or has been waited for; shown by `watch`."""

ATTEMPTS = "attempts.json"
"""How often a deployment has tried its current round."""

COLUMNS = "columns.json"
"""The scales of released columns."""

RUN = "run"
"""The folder of the run in a party's directory."""


def folder_of_run(place: Path) -> Path:
    """Return a run's folder: `place` itself, or the one in a deployed party's directory."""
    return place / RUN if (place / "federation.toml").exists() else place


def explain_not_a_run(folder: Path) -> str:
    """Return which folder to give instead of one that holds no run."""
    if (folder / "comparison.json").exists():
        return (
            f"this is a comparison, whose page is {folder / 'comparison.html'}; its runs are in "
            "NAME/seed-S below it"
        )
    if (folder / "site.toml").exists():
        return (
            "this is a deployed site's directory, which has no report: `fedpact deploy status` "
            "shows its owner what it has spent, and the run's folder is the server's"
        )
    for party in (folder, folder / "server"):
        if (party / "federation.toml").exists():
            return f"the run of this deployment is in {party / RUN}, once its server has started"
    return "give the folder that `fedpact run` wrote with --out, or run the plan again"


def name_columns(names: Sequence[str], by: Tensor) -> dict[str, dict[str, float]]:
    """Return columns.json's content. by: means and deviations of the columns [2 m]."""
    mean, deviation = by.chunk(2)
    named = zip(names, mean.tolist(), deviation.tolist(), strict=True)
    return {name: {"mean": m, "deviation": d} for name, m, d in named}


def read_scales(path: Path, names: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return the scales of these columns from a columns.json.

    Raises DataError: the file is missing, or lacks a finite mean and a finite deviation > 0 of a
    column.
    """
    try:
        found = json.loads(path.read_bytes())
        read = {n: {key: float(found[n][key]) for key in ("mean", "deviation")} for n in names}
        good = all(math.isfinite(sum(of.values())) and of["deviation"] > 0 for of in read.values())
        why = "" if good else "a mean or deviation out of range"
    except (OSError, ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
        read, why = {}, type(error).__name__
    if why:
        raise DataError(
            f"{path} lacks the scales of the columns {', '.join(names)} ({why}): expected a mean "
            "and a deviation above 0 of each, as the run wrote them; restore the file (a "
            "deployment's server has it as run/columns.json), or run the plan again"
        )
    return read


def find_unused_path(path: Path) -> Path:
    """Return a path, with the first free number appended if it exists."""
    numbered = (path.with_name(f"{path.name}-{n}") for n in count(2))
    return next(one for one in chain([path], numbered) if not one.exists())


def check_writable(run: Path) -> None:
    """Raise InputError if a run's folder is not writable, before results for it are computed."""
    if not os.access(run, os.W_OK | os.X_OK):
        raise InputError(
            f"{run} is not writable by this account, but this command stores its results there: "
            "use the account that owns the folder, or a copy of the folder"
        )


_LOST = "restore the run's folder from a backup, or start a new run in another one"


@dataclass(frozen=True)
class Checkpoint:
    """The server's progress between two rounds.

    round: rounds committed so far. included: site -> last round whose reply entered the state.
    costs: bytes and seconds of all rounds so far.
    """

    state: State
    round: int
    included: Mapping[str, int]
    costs: Costs = field(default_factory=Costs)

    def to_parts(self) -> list[bytes | memoryview]:
        """Encode for state.safetensors, in parts, without copying vectors. The progress is stored
        with the state's numbers."""
        costs = {f"/cost/{name}": value for name, value in asdict(self.costs).items()}
        progress = {"/round": self.round, **costs}
        included = {f"/included/{site}": last for site, last in self.included.items()}
        numbers = {**self.state.numbers, **progress, **included}
        return encode_parts(State(self.state.vectors, numbers))

    @staticmethod
    def from_bytes(block: bytes) -> "Checkpoint":
        """Decode the parts that `to_parts` returned, joined."""
        stored = from_bytes(block, math.inf)
        if not isinstance(stored, State):
            raise DataError(f"a {type(stored).__name__} was found where a run's state is expected")
        numbers = dict(stored.numbers)
        done = int(numbers.pop("/round"))
        costs: dict[str, Any] = {
            one.name: numbers.pop(f"/cost/{one.name}") for one in fields(Costs)
        }
        keys = [key for key in numbers if key.startswith("/included/")]
        included = {key.removeprefix("/included/"): int(numbers.pop(key)) for key in keys}
        return Checkpoint(State(stored.vectors, numbers), done, included, Costs(**costs))


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
        return self.path / "sites" / safe_name(name)

    def ledger(self, site: str, kept: str | None) -> Path:
        """Return the path of a site's ledger.

        kept: run.ledgers: None for this run's own ledgers, else the folder of an earlier run whose
        ledgers are used further, or a folder of ledgers.
        """
        if kept is None:
            return self.site(site) / "ledger.jsonl"
        run = Folder(Path(kept))
        if not run.partition.exists():
            return Path(kept) / f"{safe_name(site)}.ledger.jsonl"
        return run.ledger(site, run.read_json("plan.json")["run"]["ledgers"])

    def write_json(self, name: str, document: Any) -> None:
        """Write one of the JSON files; a number that is not finite becomes null."""
        text = json.dumps(strict(document), indent=2, allow_nan=False)
        write_whole(self.path / name, text.encode() + b"\n", private=False)

    def read_json(self, name: str) -> Any:
        """Read one of the JSON files. Raises DataError: missing, or not a table of JSON."""
        try:
            found = json.loads((self.path / name).read_bytes())
            if not isinstance(found, dict):
                raise TypeError(f"a {type(found).__name__}")
            return found
        except (OSError, ValueError, TypeError) as error:
            raise DataError(
                f"{self.path / name} cannot be read ({type(error).__name__}): expected a file of a "
                f"run's folder; {explain_not_a_run(self.path)}"
            ) from None

    def waits(self, number: int, sites: Mapping[str, Mapping[str, Any]]) -> None:
        """Write how long each site took in a round, or has been waited for."""
        self.write_json(WAITS, {"round": number, "sites": sites})

    def commit(self, checkpoint: Checkpoint, record: RoundRecord) -> None:
        """Make a round durable: first its record, then the state that counts it as done."""
        with (self.path / "rounds.jsonl").open("a", encoding="utf-8") as file:
            file.write(record.to_json() + "\n")
            file.flush()
            os.fsync(file.fileno())
        write_whole(self.path / "state.safetensors", *checkpoint.to_parts(), private=False)

    def rewrite(self, records: Sequence[RoundRecord]) -> None:
        """Overwrite the records of all rounds."""
        lines = "".join(record.to_json() + "\n" for record in records)
        write_whole(self.path / "rounds.jsonl", lines.encode(), private=False)

    def restore(self) -> tuple[Checkpoint, list[RoundRecord]]:
        """Return the last committed round and the records up to it; later lines are dropped."""
        state, rounds = self.path / "state.safetensors", self.path / "rounds.jsonl"
        try:
            with parse_errors(state, _LOST):
                checkpoint = Checkpoint.from_bytes(state.read_bytes())
            # One line per round from round 0; further lines were never committed.
            lines = rounds.read_bytes().splitlines()
        except OSError as error:
            raise DataError(
                f"run {self.path} cannot be resumed ({error.strerror}: {error.filename}): "
                "it ended before its first round was written; start it again"
            ) from None
        kept = lines[: checkpoint.round + 1]
        with parse_errors(rounds, _LOST):
            records = [RoundRecord.from_json(line.decode()) for line in kept]
            if [record.round for record in records] != list(range(checkpoint.round + 1)):
                raise ValueError(f"it has no line for each of the rounds 0 to {checkpoint.round}")
        if len(kept) < len(lines):
            write_whole(rounds, b"\n".join(kept) + b"\n", private=False)
        return checkpoint, records


@contextlib.contextmanager
def exclusive(place: Path) -> Iterator[None]:
    """Lock a run's folder, or a party's directory, for the block.

    A folder that is created for its lock is removed if the block leaves it empty. Raises
    InputError: it is locked.
    """
    new = [each for each in (place, *place.parents) if not each.exists()]
    kind = "has a server" if (place / "server.key").exists() else "is in use"
    with only_one(place / LOCK, f"{place} {kind} already"):
        try:
            yield
        finally:
            for folder in new:
                with contextlib.suppress(OSError):
                    if [path.name for path in folder.iterdir()] == [LOCK]:
                        (folder / LOCK).unlink()
                    folder.rmdir()
