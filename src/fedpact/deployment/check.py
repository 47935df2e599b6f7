"""A site before it opens: its columns beside their declaration, what is left out, what it costs.

Nothing is promised, charged or sent: it reads the site's own files, and whatever it finds is for
the owner's eyes, exact, and protected by nothing.
"""

import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from fedpact.common.errors import FedpactError, PolicyRefused
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

_FEW: Final = 2  # times as many records as are declared, or half as many, are worth a word


@dataclass
class SiteCheck:
    """What a site's owner should know before it opens. problems: why it does not; [] if it does.

    remarks: what to look at. reserved: whether the run has been promised already, so that nothing
    of the records stops it any more. missing, unexpected: columns; renamed: of the missing, which
    of the file is probably meant. records: of the file; used: those that fit. left_out: (column or
    "", why, how many). size: N_i as declared, of `unit`s. epsilon, delta: what the run reserves;
    epsilon_before, epsilon_ever: what other runs have, and what the policy allows in all.
    approvals: how many people have yet to sign. evaluation: (ε, δ) for held-out records.
    rounds, steps: of the plan, and of one round. seconds: of one round on this machine, without
    the network's.
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
    """Return what is to be known of a site before it opens. directory: the site's.

    Raises InputError of some kind: its settings, federation.toml or plan.json cannot be read.
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
            has = "has" if found.approvals == 1 else "have"
            found.remarks.append(
                f"{found.approvals} more {has} to approve, as policy.toml says, before it opens: "
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
    """Take down as a problem what is raised, in place of raising it."""
    try:
        yield
    except FedpactError as error:
        found.problems.append(str(error))


def _count_cost(found: SiteCheck, files: SiteFiles, terms: Terms) -> None:
    """Fill in what the run costs, and what of the owner's budget other runs leave."""
    policy, plan, ledger = Policy.read(files.directory / "policy.toml"), files.plan, files.ledger
    found.epsilon, found.delta = terms.budget.epsilon, terms.budget.delta
    once = plan.evaluation_terms
    if once is not None:
        found.evaluation = once.budget.epsilon, once.budget.delta
    # The site may be about to write its first entry.
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
    """Fill in the file's columns beside the declared ones, as far as they are there."""
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
    # A renamed one may be in another unit, too: both are said at once.
    found.columns += [
        summarise_column(f"{name} ({other!r})", columns[other], form.of(name))
        for name, other in found.renamed.items()
        if name in of.features
    ]


def _look_at_records(found: SiteCheck, own: Own, files: SiteFiles) -> None:
    """Fill in which records are used; a problem where too many are left out."""
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
            f"{count:,} {found.unit}s are used, and federation.toml declares {found.size:g}: what "
            "each adds is weighed by the declared number"
        )
    if found.reserved:
        return
    with _noted(found):
        own.check(files.settings)


def _time_round(files: SiteFiles, terms: Terms, own: Own) -> float | None:
    """Return how long one round's steps take here, by one step on as many records as it expects."""
    x, y = own.records.x, own.records.y
    if not len(y):
        return None
    device = device_of(files.settings.device, files.plan.run.precision)
    kernel = files.workshop.bench().private
    size = max(1, min(len(y), round(terms.batch_size)))
    x, y = x[:size].to(device), y[:size].to(device)
    seconds = list[float]()
    for _ in range(2):  # the first also finds out how to go about it
        began = time.perf_counter()
        if isinstance(kernel, PerSampleKernel):
            kernel.clipped_sum(x, y, terms.clip)
        else:
            kernel.clipped_mean(x, y, terms.clip)
        seconds.append(time.perf_counter() - began)
    return min(seconds) * files.plan.method.steps()
