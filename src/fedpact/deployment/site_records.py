"""Where a site's records are, and how they are read: from its own file to what is trained on."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from fedpact.common.about import OneLine
from fedpact.common.errors import DataError, PlanError
from fedpact.common.format import percent
from fedpact.data.advice import advise
from fedpact.data.columns import FileColumn
from fedpact.data.features.extract import beside
from fedpact.data.sieve import RecordFilter
from fedpact.data.site_records import load_site
from fedpact.data.splits import limit_records_per_person, number_persons
from fedpact.deployment.federation import Federation, parse_toml, read_plan
from fedpact.plan import Plan
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
    """A .npz, .csv or .parquet file."""
    label: str | None = None
    """Its column, of a table."""
    data_set: str
    """What the ledger is called, one for each set of records and for its whole life."""
    data_version: OneLine = ""
    """What receipts say of it beside its name, "" where nobody says."""
    device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:\d+)?)$")
    """Where it computes, "cpu" or "cuda"."""
    ledger: str = "ledger.jsonl"
    """Where it lies, on a local disk."""
    socket: str | None = None
    """The Unix socket at which a SuperNode that is there already asks, by fedpact's Flower app;
    the account of that SuperNode needs the socket's group, and must not read this directory."""
    most_left_out: float = Field(default=0.05, ge=0, le=1)
    """The share of records that may be left out as not fitting; with more the site does not
    open, and promises nothing."""
    columns: dict[str, FileColumn] = Field(default_factory=dict[str, FileColumn])
    """Which columns of a table the declared ones are, where they have other names, units or
    words there."""

    @staticmethod
    def read(directory: Path) -> "SiteSettings":
        """Read a site's site.toml. Raises PlanError, naming every mistake."""
        return parse_toml(SiteSettings, directory / "site.toml")


@dataclass(frozen=True)
class SiteFiles:
    """What a site's directory says: its owner's settings, and the federation and the plan."""

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
        """The site's."""
        return self.settings.name

    @property
    def ledger(self) -> Path:
        """Where the site's ledger is, or will be."""
        return self.directory / self.settings.ledger

    @property
    def terms(self) -> Terms:
        """The site's own. Raises PlanError: the federation has no such site."""
        name, names = self.name, self.federation.names
        if name not in names:
            raise PlanError(f"site.toml names {name!r}: federation.toml has {', '.join(names)}")
        return self.federation.terms(self.plan)[name]

    @property
    def workshop(self) -> TrainingSetup:
        """What the site computes with, on its own device."""
        found = self.federation.workshop(self.plan, self.directory)
        return replace(found, device=self.settings.device)


@dataclass(frozen=True, eq=False)
class Own:
    """A site's records. raw: as they stand in its file, x [n, ...]; records: as they are used.

    whose: each record's person [n]; None where nobody asks. sieve: of the file's records, which are
    left out, and why.
    """

    raw: Tensor
    records: Records
    whose: Sequence[str] | None
    sieve: RecordFilter

    @property
    def left_out(self) -> float:
        """The share of the file's records that are left out; 1 where it has none."""
        return float((~self.sieve.good).mean()) if self.sieve.count else 1.0

    def check(self, settings: SiteSettings) -> None:
        """Raise DataError where more records are left out than the owner allows."""
        if self.left_out <= settings.most_left_out:
            return
        sieve = self.sieve
        why = "; ".join(
            f"{'column ' * bool(column)}{column or 'the record'} {reason} ({count:,})"
            for column, reason, count in sieve.reasons()[:_REASONS]
        )
        raise DataError(
            f"{int((~sieve.good).sum()):,} of {sieve.count:,} records of {sieve.origin} are left "
            f"out, {percent(self.left_out)}, and most_left_out of site.toml allows "
            f"{percent(settings.most_left_out)}: {why or 'it is empty'}. So the site does not "
            "open, and promises nothing. `fedpact deploy check` of its directory shows each column "
            "beside its declaration: correct the records, say under [columns] of site.toml which "
            "units and words they have, or set most_left_out higher"
        )

    def part(self, chosen: Tensor) -> Records:
        """Return some of the records, bool [n], as they are used."""
        of, persons = self.records, None
        if of.persons is not None:
            persons = number_persons(self.whose, chosen.nonzero()[:, 0].numpy())
        return replace(of, x=of.x[chosen], y=of.y[chosen], persons=persons)


def own_records(files: SiteFiles, bench: Worker | None = None) -> Own:
    """Return a site's records in the CPU's memory.

    bench: to try them with; it has to be in the CPU's memory, too: a word that a card's table does
    not have ends its process. Raises InputError: they do not fit.
    """
    directory, settings, of, plan = files.directory, files.settings, files.federation, files.plan
    path = directory / settings.records
    form = of.classes, of.shape, of.values, of.describe_labels(plan), of.person, of.features
    found, sieve = load_site(path, settings.label, *form, settings.columns)
    if found.x.is_floating_point() and not (plan.features.used and len(of.shape) > 1):
        # Into the owner's own log, as what is left out, and without values like it.
        advise(str(path), of.records, of.shape, found.features, found.x, values=False)
    stage = of.stage(plan, directory)
    staged = stage(found.x, of.example(), str(path), beside(path), found.features)
    worker = bench or of.workshop(plan, directory).bench()
    accepted = worker.find_accepted(staged.x, found.y, str(path), found.numbers)
    good = accepted & staged.good
    for whole, why in ((accepted, _NOT_TAKEN), (staged.good, _NOT_FINITE)):
        for row in (found.numbers[~whole] - sieve.first).tolist():
            sieve.leave_out(row, "", why)
    used, persons = limit_per_person(found.person or (), good, plan)
    released = stage.released(of.example(), found.features)
    records = Records(staged.x[used], found.y[used], released, persons)
    whose = found.person and [found.person[i] for i in used.tolist()]
    return Own(found.x[used], records, whose, sieve)


def limit_per_person(
    persons: Sequence[str], good: Tensor, plan: Plan
) -> tuple[Tensor, Tensor | None]:
    """Return which records are used, as indices [m], and whose each is; None if that is all one.

    persons: whose each record is [n], or empty where nobody asked. good: which are taken, bool [n].
    Beyond `privacy.person_records` of a person the plan drops some; see
    splits.limit_records_per_person.
    """
    places = good.nonzero()[:, 0]
    if not persons:
        return places, None
    numbers = number_persons(persons, places.numpy())
    most = plan.privacy.person_records
    if numbers is not None and most is not None:
        kept = torch.from_numpy(limit_records_per_person(numbers.tolist(), most, plan.seed))
        places, numbers = places[kept], numbers[kept]
    return places, numbers if plan.privacy.unit == "person" else None
