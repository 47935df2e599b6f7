"""A site's settings, and its records: read from its own file and prepared for training."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from fedpact.common.errors import DataError, LedgerError, PlanError
from fedpact.common.run_settings import OneLine
from fedpact.data.advice import advise
from fedpact.data.columns import FileColumn
from fedpact.data.dataset import RecordFilter
from fedpact.data.features.extract import beside
from fedpact.data.load import load_site
from fedpact.data.splits import limit_records_per_person, number_persons
from fedpact.deployment.federation import Federation, parse_toml, read_plan
from fedpact.plan import Plan
from fedpact.privacy.ledger.receipt import receipt
from fedpact.privacy.oracle import Records
from fedpact.privacy.terms import Terms
from fedpact.simulation.workshop import TrainingSetup, Worker

_REASONS: Final = 5
_NOT_TAKEN: Final = "is not taken by the model"
_NOT_FINITE: Final = "has no finite numbers as it is scaled"


class SiteSettings(BaseModel):
    """The owner's settings; paths are relative to the site's directory."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
    name: str
    """As in federation.toml."""
    records: str
    """The site's records: a .npz file with x and y, or a .csv or .parquet file."""
    label: str | None = None
    """The label's column in a table."""
    data_set: OneLine = Field(min_length=1)
    """The name of the ledger: always the same for one set of records."""
    data_version: OneLine = ""
    """A version stated in receipts; "" for none."""
    device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:\d+)?)$")
    """The device of computations, "cpu" or "cuda"."""
    ledger: str = "ledger.jsonl"
    """The path of the ledger, on a local disk, in a folder that exists; backed up, and never
    restored."""
    socket: str | None = None
    """The Unix socket for an existing SuperNode that runs fedpact's Flower app; the account of that
    SuperNode needs the socket's group, and must not be able to read this directory."""
    most_left_out: float = Field(default=0.05, ge=0, le=1)
    """The share of records that may be left out because they do not fit; with more the site does
    not open, and reserves nothing."""
    columns: dict[str, FileColumn] = Field(default_factory=dict[str, FileColumn])
    """Declared column -> column of the table, if it has another name, unit or spelling."""

    @staticmethod
    def read(directory: Path) -> "SiteSettings":
        """Read a site's site.toml. Raises PlanError, naming every mistake."""
        return parse_toml(SiteSettings, directory / "site.toml")


@dataclass(frozen=True)
class SiteFiles:
    """The files of a site's directory: its owner's settings, the federation and the plan."""

    directory: Path
    settings: SiteSettings
    federation: Federation
    plan: Plan

    @staticmethod
    def read(directory: Path) -> "SiteFiles":
        """Read the files. Raises PlanError, naming every mistake."""
        settings = SiteSettings.read(directory)
        federation = Federation.read(directory / "federation.toml")
        return SiteFiles(directory, settings, federation, read_plan(directory / "plan.json"))

    @property
    def name(self) -> str:
        """The site's name."""
        return self.settings.name

    @property
    def ledger(self) -> Path:
        """The path of the site's ledger."""
        return self.directory / self.settings.ledger

    def check_ledger(self) -> None:
        """Raise LedgerError: the ledger's folder is missing, so an empty ledger would be written.

        That would forget what other runs on the same records have spent.
        """
        if not self.ledger.parent.is_dir():
            raise LedgerError(
                f"ledger {self.ledger} is in a folder that does not exist: mount its disk, or "
                "correct the path in site.toml. Nothing was reserved or charged. Make the folder "
                "yourself only if no run on these records has had a ledger yet"
            )

    @property
    def terms(self) -> Terms:
        """The site's terms. Raises PlanError: the federation has no such site."""
        name, names = self.name, self.federation.names
        if name not in names:
            raise PlanError(f"site.toml names {name!r}: federation.toml has {', '.join(names)}")
        return self.federation.terms(self.plan)[name]

    def last_round(self, rounds: int) -> int:
        """Return the last of a run's first `rounds` rounds that the site takes part in."""
        return self.plan.participants(self.federation.names).last_of(self.name, rounds)

    @property
    def workshop(self) -> TrainingSetup:
        """The site's model, loss and preparation of records, on its own device."""
        found = self.federation.workshop(self.plan, self.directory)
        return replace(found, device=self.settings.device)


def read_receipt(ledger: Path) -> dict[str, Any] | None:
    """Return the receipt of a site's ledger, None before its first entry. Raises LedgerError."""
    # The site may be writing that entry.
    return receipt(ledger) if ledger.exists() and b"\n" in ledger.read_bytes() else None


@dataclass(frozen=True, eq=False)
class Own:
    """A site's records. raw: as in its file, x [n, ...]; records: as used by the model.

    whose: each record's person [n]; None without a person column. sieve: which of the file's
    records are left out, and why.
    """

    raw: Tensor
    records: Records
    whose: Sequence[str] | None
    sieve: RecordFilter

    def check(self, settings: SiteSettings) -> None:
        """Raise DataError if more records are left out, or clamped, than the owner allows."""
        most = settings.most_left_out
        if clamped := self.sieve.mostly_clamped(most):
            raise DataError(
                f"{clamped}. The site does not open, and nothing is reserved: give the file's unit "
                "as `factor` under [columns] in site.toml, have the federation declare another "
                "range, or set most_left_out to 1"
            )
        told = self.sieve.too_many(most, "most_left_out in site.toml")
        if not told:
            return
        why = "; ".join(
            f"{'column ' * bool(column)}{column or 'the record'} {reason} ({count:,})"
            for column, reason, count in self.sieve.reasons()[:_REASONS]
        )
        raise DataError(
            f"{told}: {why or 'the file has no records'}. The site does not open, and nothing is "
            "reserved. `fedpact deploy check` compares each column with its declaration; correct "
            "the records, give their units and categories under [columns] in site.toml, have the "
            "federation declare `fill` for columns with missing cells, or increase most_left_out"
        )

    def part(self, chosen: Tensor) -> Records:
        """Return the `chosen` records, bool [n], as used by the model."""
        of, persons = self.records, None
        if of.persons is not None:
            persons = number_persons(self.whose, chosen.nonzero()[:, 0].numpy())
        return replace(of, x=of.x[chosen], y=of.y[chosen], persons=persons)


def own_records(files: SiteFiles, bench: Worker | None = None) -> Own:
    """Return a site's records in CPU memory.

    bench: tries them, also in CPU memory: on a GPU a word that is not in an embedding's table ends
    the process. Raises InputError: the file does not match the declaration.
    """
    directory, settings, of, plan = files.directory, files.settings, files.federation, files.plan
    path = directory / settings.records
    form = of.classes, of.shape, of.values, of.describe_labels(plan), of.person, of.features
    found, sieve = load_site(path, settings.label, *form, settings.columns)
    if found.x.is_floating_point() and not (plan.features.used and len(of.shape) > 1):
        # To the owner's own log, like left-out records, and without values.
        advise(str(path), of.records, of.shape, found.features, found.x, values=False)
    stage = of.stage(plan, directory)
    staged = stage(found.x, of.example(), str(path), beside(path), found.features)
    worker = bench or of.workshop(plan, directory).bench()
    accepted = worker.find_accepted(staged.x, found.y, str(path), found.numbers)
    good = accepted & staged.good
    for whole, why in ((accepted, _NOT_TAKEN), (staged.good, _NOT_FINITE)):
        sieve.leave_out((found.numbers[~whole] - sieve.first).tolist(), "", why)
    used = good.nonzero()[:, 0]
    persons, most = number_persons(found.person, used.numpy()), plan.privacy.person_records
    if persons is not None and most is not None:
        kept = limit_records_per_person(persons, most, plan.seed)
        used, persons = used[kept], persons[kept]
    if plan.privacy.unit != "person":
        persons = None
    released = stage.released(of.example(), found.features)
    records = Records(staged.x[used], found.y[used], released, persons)
    whose = found.person and [found.person[i] for i in used.tolist()]
    return Own(found.x[used], records, whose, sieve)
