"""Checks a site before it opens: columns against their declaration, rows left out, cost.

It reads the site's own files and reserves, charges and sends nothing. Its figures are exact and
unprotected, for the owner alone.
"""

import time
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from fedpact.common.errors import DataError, FedpactError, PolicyRefused
from fedpact.common.format import toml, toml_key
from fedpact.data.cells import NOT_UTF_8, Cells, find_named, read_columns, read_npz
from fedpact.data.columns import ColumnDifference, FileColumn, declared_columns
from fedpact.data.schema import Column
from fedpact.data.summary import ColumnCells, ColumnSummary, count_classes, summarise_array
from fedpact.deployment.keys import check_site_keys
from fedpact.deployment.signatures import read_approvals
from fedpact.deployment.site import check_left_behind, reserved_runs
from fedpact.deployment.site_evaluation import find_examiner_key
from fedpact.deployment.site_records import (
    Own,
    SiteFiles,
    own_records,
    read_receipt,
)
from fedpact.deployment.store import LastReply, existing_store
from fedpact.per_sample.kernel import PerSampleKernel
from fedpact.privacy.guarantee import Guarantee
from fedpact.privacy.ledger.hash_chain import Chained, read_entries
from fedpact.privacy.ledger.ledger import RollbackGuard, check_opening
from fedpact.privacy.ledger.reservations import over_runs
from fedpact.privacy.policy import Policy
from fedpact.privacy.terms import Terms
from fedpact.simulation.machine import device_of

_FEW: Final = 2  # a number of records that differs by this factor from the declared one is reported
_WORDS: Final = 10  # with more words that are not declared, a column is no list of categories


@dataclass
class SiteCheck:
    """The findings for a site's owner. problems: reasons why the site does not open; [] if it does.

    remarks: points to look at. mends: lines for [columns] of site.toml that may mend it. reserved:
    whether the run is already reserved, so that records cannot stop it any more. missing,
    unexpected: columns; renamed: missing column -> the file's column that is probably meant.
    records: number in the file; used: number of valid ones. left_out: (column or "", reason,
    count). size: the declared N_i, in `unit`s. epsilon, delta: of the run; epsilon_before,
    epsilon_ever: of other runs, and the policy's limit for all. approvals: number of signatures
    still required. evaluation: (ε, δ) for held-out records. rounds: of the plan; steps: per round.
    seconds: per round on this machine, without the network.
    """

    site: str
    directory: str
    run: str
    file: str
    size: float
    unit: str
    reserved: bool
    approvals: int = 0
    problems: list[str] = field(default_factory=list[str])
    remarks: list[str] = field(default_factory=list[str])
    mends: list[str] = field(default_factory=list[str])
    missing: Sequence[str] = ()
    unexpected: Sequence[str] = ()
    renamed: dict[str, str] = field(default_factory=dict[str, str])
    columns: list[ColumnSummary] = field(default_factory=list[ColumnSummary])
    records: int = 0
    used: int = 0
    persons: int | None = None
    left_out: list[tuple[str, str, int]] = field(default_factory=list[tuple[str, str, int]])
    classes: dict[str, int] = field(default_factory=dict[str, int])
    epsilon: float | None = None
    delta: float | None = None
    evaluation: tuple[float, float] | None = None
    epsilon_before: float = 0.0
    delta_before: float = 0.0
    epsilon_ever: float | None = None
    delta_ever: float | None = None
    rounds: int = 0
    steps: int = 0
    seconds: float | None = None


def check_site(directory: Path) -> SiteCheck:
    """Check the site in `directory`.

    Raises InputError: its settings, federation.toml or plan.json cannot be read.
    """
    files = SiteFiles.read(directory)
    settings, federation, plan = files.settings, files.federation, files.plan
    path, member = directory / settings.records, federation.sites.get(settings.name)
    found = SiteCheck(
        site=settings.name,
        directory=str(directory),
        run=federation.run,
        file=str(path),
        size=0.0 if member is None else member.size,
        unit=plan.privacy.unit,
        reserved=federation.run in reserved_runs(files.ledger),
        rounds=plan.rounds,
        steps=plan.method.steps(),
    )
    with _note(found):
        terms = files.terms
        with _note(found):
            check_site_keys(directory, federation, settings.name)
        with _note(found):
            _check_past(files)
        found.approvals = read_approvals(directory).missing
        with _note(found):
            _count_cost(found, files, terms)
        readable = _look_at_columns(found, path, files)
        if readable is not None:
            own = own_records(readable)
            _look_at_records(found, own, files)
            found.seconds = _time_round(files, terms, own)
    return found


@contextmanager
def _note(found: SiteCheck) -> Generator[None]:
    try:
        yield
    except FedpactError as error:
        if str(error) not in found.problems:
            found.problems.append(str(error))


def _check_past(files: SiteFiles) -> None:
    """Raise FedpactError: what the site keeps of its releases is damaged, or does not match.

    As the site finds when it opens; it may be open meanwhile, and writes to the ledger first.
    """
    directory, ledger, test = files.directory, files.ledger, files.federation.seeds == "test"
    check_left_behind(directory, ledger)
    replies = [(0, "")]
    with existing_store(directory) as store:
        if store is not None:
            replies += [LastReply(store, name).ledger for name in ("reply", "evaluation")]
    guard = RollbackGuard(ledger)
    entries = read_entries(ledger) if ledger.exists() else []
    for reply in replies:
        guard.check(Chained(entries), reply)
    if entries:
        check_opening(ledger, entries[0], files.settings.data_set, hypothetical=test)
    if files.federation.form(files.plan).share and not test:
        find_examiner_key(directory, ledger, files.federation.run)


def _count_cost(found: SiteCheck, files: SiteFiles, terms: Terms) -> None:
    policy, plan = Policy.read(files.directory / "policy.toml"), files.plan
    found.epsilon, found.delta = terms.budget.epsilon, terms.budget.delta
    files.check_ledger()
    once = plan.evaluation_terms
    if once is not None:
        found.evaluation = once.budget.epsilon, once.budget.delta
    runs: dict[str, dict[str, Any]] = (read_receipt(files.ledger) or {"runs": {}})["runs"]
    others = [
        (run["beside"] or name, Guarantee.read(run, "epsilon_reserved", "epsilon_alone_reserved"))
        for name, run in runs.items()
        if found.run not in (name, run["beside"])
    ]
    before = over_runs((name, policy.counted(of), of.delta) for name, of in others)
    alone, _ = over_runs((name, of.alone, of.delta) for name, of in others)
    found.epsilon_before, found.delta_before = before
    found.epsilon_ever, found.delta_ever = policy.epsilon_ever, policy.delta_ever
    try:
        policy.check_run(plan.algorithm, terms, before, alone, evaluation=once)
    except PolicyRefused as error:
        found.problems.append(f"policy.toml does not allow the run: {error}")


def _look_at_columns(found: SiteCheck, path: Path, files: SiteFiles) -> SiteFiles | None:
    """Add a summary of the columns, and return the files by which records can be read.

    These name the columns that are probably meant. So one check shows the records' faults, too.
    None: a column is missing.
    """
    of = files.federation
    form = of.describe_labels(files.plan)
    if path.suffix.lower() == ".npz":
        features = of.columns(files.plan)
        x = read_npz(path)["x"]
        found.columns = summarise_array(x, form.by_place(of.features) if of.features else form)
        if len(features) == len(found.columns):
            found.columns = [
                replace(one, name=name) for name, one in zip(features, found.columns, strict=True)
            ]
    else:
        table = read_columns(path)
        columns = table.cells
        coded = [*table.broken.values()].count(NOT_UTF_8)
        if coded > files.settings.most_left_out * max(map(len, columns.values()), default=0):
            raise DataError(
                f"data file {path}: {coded:,} lines not in UTF-8: save it as "
                "UTF-8, or have pandas do so: read_csv(..., encoding='cp1252').to_csv(...)"
            )
        if len(columns) == 1 < len(of.features):
            raise DataError(
                f"data file {path}: its first line is {next(iter(columns))!r}: expected a "
                "header line that names each column; remove what is above it"
            )
        files = _look_at_table(found, columns, files)
    found.remarks += [f"column {one.name}: {one.remark}" for one in found.columns if one.remark]
    return None if set(found.missing) - {*found.renamed} else files


def _look_at_table(found: SiteCheck, columns: Mapping[str, Cells], files: SiteFiles) -> SiteFiles:
    settings, of = files.settings, files.federation
    wanted = [*of.features, *(name for name in (settings.label, of.person) if name is not None)]
    sources = {name: own for name, own in settings.columns.items() if own.column in columns}
    mapped = {source.column for source in sources.values()}
    difference = ColumnDifference.of(
        [name for name in wanted if name not in sources],
        [name for name in columns if name not in mapped],
    )
    found.missing, found.renamed = difference.missing, dict(difference.renamed)
    if of.features:
        found.unexpected = difference.unexpected
        with _note(found):
            declared_columns(f"data file {found.file}", columns, wanted, settings.columns)
    sources |= {name: FileColumn(column=other) for name, other in difference.renamed.items()}
    declared = {name: of.records.of(name) for name in of.features}
    if settings.label is not None and files.plan.task.target.kind == "class":
        declared[settings.label] = Column(categories=[*of.classes])
    for name, own in declared.items():
        if name not in sources and name not in columns:
            continue
        source = sources.get(name, FileColumn(column=name))
        cells = source.convert(columns[source.column])
        guessed = name in found.renamed
        looked = ColumnCells.of(f"{name} ({source.column!r})" if guessed else name, cells)
        found.columns.append(one := looked.summary(own))
        found.mends += _mend(name, source, looked.texts, own, one.remark, guessed=guessed)
    # Only entries that can be used: the others are problems already.
    return replace(files, settings=settings.model_copy(update={"columns": sources}))


def _mend(
    name: str,
    source: FileColumn,
    seen: Collection[str],
    own: Column,
    remark: str,
    *,
    guessed: bool,
) -> Sequence[str]:
    """Return the line for [columns] of site.toml that may mend a column, if any."""
    told, why = dict[str, Any](), ""
    names = own.names if own.other is None else None
    if names is not None:
        place = dict.fromkeys(names, True)
        foreign = [word for word in seen if not find_named(word, place, False)]
        unseen = [name for name in names if name not in seen]
        if 0 < len(foreign) <= _WORDS:
            words = {word: _word_for(word, unseen, alone=len(foreign) == 1) for word in foreign}
            told["values"] = {**source.values, **words}
            why = f"   # each is one of {', '.join(names)}: correct this"
    elif "unit?" in remark and not source.scaled:
        told["factor"] = 1.0
        why = "   # from the file's unit to the declared one: correct this"
    if not (told or guessed):
        return []
    value = {"column": source.column, **told} if told else source.column
    return [f"{toml_key(name)} = {toml(value)}{why}"]


def _word_for(word: str, names: Sequence[str], *, alone: bool) -> str:
    """Return which of the names a word probably means, "..." if none."""
    small = word.casefold()
    alike = [n for n in names if n.casefold().startswith(small) or small.startswith(n.casefold())]
    alike = alike or (list(names) if alone else [])
    return alike[0] if len(alike) == 1 else "..."


def _look_at_records(found: SiteCheck, own: Own, files: SiteFiles) -> None:
    """Add which records are used, and a problem if too many are left out."""
    sieve, y = own.sieve, own.records.y
    found.records, found.used = sieve.count, int(sieve.good.sum())
    found.left_out = sieve.reasons()
    found.persons = None if own.whose is None else len(set(own.whose))
    if files.plan.task.target.kind == "class":
        found.classes = count_classes(y, files.federation.classes)
        if few := [name for name, count in found.classes.items() if not count]:
            found.remarks.append(f"no record of class {', '.join(few)}")
    count = found.persons if found.unit == "person" and found.persons is not None else len(y)
    if not found.size / _FEW <= count <= found.size * _FEW:
        found.remarks.append(
            f"{count:,} {found.unit}s are used, but federation.toml declares {found.size:g}: sums "
            "are divided by the declared number"
        )
    # Once the run is reserved, no invalid record may stop the site.
    if not found.reserved:
        with _note(found):
            own.check(files.settings)


def _time_round(files: SiteFiles, terms: Terms, own: Own) -> float | None:
    """Estimate the seconds of one round's steps, from one step on an expected batch."""
    x, y = own.records.x, own.records.y
    if not len(y):
        return None
    device = device_of(files.settings.device, files.plan.run.precision)
    kernel = files.workshop.bench().private
    size = max(1, min(len(y), round(terms.batch_size)))
    x, y = x[:size].to(device), y[:size].to(device)
    seconds = list[float]()
    for _ in range(2):  # the first includes one-time preparation
        began = time.perf_counter()
        if isinstance(kernel, PerSampleKernel):
            kernel.clipped_sum(x, y, terms.clip)
        else:
            kernel.clipped_mean(x, y, terms.clip)
        seconds.append(time.perf_counter() - began)
    return min(seconds) * files.plan.method.steps()
