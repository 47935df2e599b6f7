"""Checks a site before it opens: columns against their declaration, rows left out, cost.

It reads the site's own files and reserves, charges and sends nothing. Its figures are exact and
unprotected, for the owner alone.
"""

import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from fedpact.common.errors import FedpactError, PolicyRefused
from fedpact.common.format import counted
from fedpact.data.cells import read_columns, read_npz
from fedpact.data.columns import ColumnDifference
from fedpact.data.schema import RecordForm
from fedpact.data.summary import (
    ColumnSummary,
    count_classes,
    summarise_array,
    summarise_column,
    summarise_table,
)
from fedpact.deployment.approval import read_approvals
from fedpact.deployment.federation import Federation
from fedpact.deployment.site import has_reserved
from fedpact.deployment.site_records import Own, SiteFiles, SiteSettings, own_records
from fedpact.per_sample.kernel import PerSampleKernel
from fedpact.privacy.guarantee import Guarantee
from fedpact.privacy.ledger.receipt import receipt
from fedpact.privacy.ledger.reservations import over_runs
from fedpact.privacy.policy import Policy
from fedpact.privacy.terms import Terms
from fedpact.simulation.machine import device_of

_FEW: Final = 2  # a number of records that differs by this factor from the declared one is reported


@dataclass
class SiteCheck:
    """The findings for a site's owner. problems: reasons why the site does not open; [] if it does.

    remarks: points to look at. reserved: whether the run is already reserved, so that records
    cannot stop it any more. missing, unexpected: columns; renamed: missing column -> the file's
    column that is probably meant. records: number in the file; used: number of valid ones.
    left_out: (column or "", reason, count). size: the declared N_i, in `unit`s. epsilon, delta: of
    the run; epsilon_before, epsilon_ever: of other runs, and the policy's limit for all. approvals:
    number of signatures still required. evaluation: (ε, δ) for held-out records. rounds: of the
    plan; steps: per round. seconds: per round on this machine, without the network.
    """

    site: str
    run: str
    file: str
    size: float
    unit: str
    reserved: bool
    approvals: int = 0
    problems: list[str] = field(default_factory=list[str])
    remarks: list[str] = field(default_factory=list[str])
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
        run=federation.run,
        file=str(path),
        size=0.0 if member is None else member.size,
        unit=plan.privacy.unit,
        reserved=has_reserved(files.ledger, federation.run),
        rounds=plan.rounds,
        steps=plan.method.steps(),
    )
    with _noted(found):
        terms = files.terms
        found.approvals = read_approvals(directory).missing
        if found.approvals:
            people = counted(found.approvals, "more approval")
            found.remarks.append(
                f"policy.toml requires {people} before the site opens: "
                f"`fedpact deploy approve {directory} --by NAME`"
            )
        with _noted(found):
            _count_cost(found, files, terms)
        _look_at_columns(found, path, files)
        own = own_records(files)
        _look_at_records(found, own, files)
        found.seconds = _time_round(files, terms, own)
    return found


@contextmanager
def _noted(found: SiteCheck) -> Generator[None]:
    """Record an error as a problem instead of raising it."""
    try:
        yield
    except FedpactError as error:
        found.problems.append(str(error))


def _count_cost(found: SiteCheck, files: SiteFiles, terms: Terms) -> None:
    """Add the cost of the run and of other runs on the same records."""
    policy, plan, ledger = Policy.read(files.directory / "policy.toml"), files.plan, files.ledger
    found.epsilon, found.delta = terms.budget.epsilon, terms.budget.delta
    once = plan.evaluation_terms
    if once is not None:
        found.evaluation = once.budget.epsilon, once.budget.delta
    # Another process of the site may be writing its first entry.
    written = ledger.exists() and b"\n" in ledger.read_bytes()
    runs: dict[str, dict[str, Any]] = receipt(ledger)["runs"] if written else {}
    others = [
        (run["beside"] or name, Guarantee.read(run, "epsilon_reserved", "epsilon_alone_reserved"))
        for name, run in runs.items()
        if found.run not in (name, run["beside"])
    ]
    before, (alone, _) = (
        over_runs((name, of.counted(trusted), of.delta) for name, of in others)
        for trusted in (policy.honest, 0)
    )
    found.epsilon_before, found.delta_before = before
    found.epsilon_ever, found.delta_ever = policy.epsilon_ever, policy.delta_ever
    try:
        policy.check_run(plan.algorithm, terms, before, alone, evaluation=once)
    except PolicyRefused as error:
        found.problems.append(f"policy.toml does not allow the run: {error}")


def _look_at_columns(found: SiteCheck, path: Path, files: SiteFiles) -> None:
    """Add a summary of the file's columns with their declaration."""
    of = files.federation
    form = of.describe_labels(files.plan)
    if path.suffix.lower() in (".csv", ".parquet"):
        _look_at_table(found, path, files.settings, of, form)
    else:
        features = of.columns(files.plan)
        x = read_npz(path)["x"]
        found.columns = summarise_array(x, form.by_place(of.features) if of.features else form)
        if len(features) == len(found.columns):
            found.columns = [
                replace(one, name=name) for name, one in zip(features, found.columns, strict=True)
            ]
    found.remarks += [f"column {one.name}: {one.remark}" for one in found.columns if one.remark]


def _look_at_table(
    found: SiteCheck, path: Path, settings: SiteSettings, of: Federation, form: RecordForm
) -> None:
    columns, _ = read_columns(path)
    sources = settings.columns
    roles = [name for name in (settings.label, of.person) if name is not None]
    wanted = [*of.features, *roles]
    mapped = {source.column for source in sources.values()}
    difference = ColumnDifference.of(
        [name for name in wanted if name not in sources],
        [name for name in columns if name not in mapped],
    )
    found.missing, found.renamed = difference.missing, dict(difference.renamed)
    found.unexpected = difference.unexpected if of.features else ()
    here = {
        name: sources[name].convert(columns[sources[name].column])
        if name in sources
        else columns[name]
        for name in wanted
        if name in columns or (name in sources and sources[name].column in columns)
    }
    found.columns = summarise_table(here, form, of.features)
    # A renamed column may also be in another unit: report both at once.
    found.columns += [
        summarise_column(f"{name} ({other!r})", columns[other], form.of(name))
        for name, other in found.renamed.items()
        if name in of.features
    ]


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
    if found.reserved:
        return
    with _noted(found):
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
