"""Everything that a simulation needs, loaded and checked before anything is written."""

import logging
import re
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch

from fedpact.common.errors import PlanError
from fedpact.common.files import safe_name
from fedpact.common.format import list_some
from fedpact.common.randomness.seeded import Participants, SeededDraws
from fedpact.common.user_code import is_handed
from fedpact.data import download, load
from fedpact.data.advice import advise
from fedpact.data.cells import SUFFIXES
from fedpact.data.dataset import Dataset, left_out_error
from fedpact.data.features.extract import beside
from fedpact.data.load import refit
from fedpact.data.partition import Partition, SiteRecords, make_partition
from fedpact.data.splits import limit_records_per_person, number_persons
from fedpact.evaluation.held_out import Grouping, HeldOut, SumsForm, hold_out, key_of_seed
from fedpact.evaluation.intervals import check_public
from fedpact.plan import Plan
from fedpact.privacy.column_scales import advise_of_loud
from fedpact.privacy.policy import Policy
from fedpact.privacy.terms import Terms, check_grid, delta_too_large, noisy_size
from fedpact.simulation.machine import device_of
from fedpact.simulation.secure_aggregation.encoding import check_shares
from fedpact.simulation.secure_aggregation.keys import check_secure
from fedpact.simulation.workshop import TrainingSetup


@dataclass(frozen=True)
class SimulationSetup:
    """Everything that a run needs, checked.

    raw: the records as read. dataset: the same, or their features if the plan has any. workshop:
    builds the plan's models and kernels for these records, on the CPU.
    """

    plan: Plan
    raw: Dataset
    dataset: Dataset
    partition: Partition
    sites: list[SiteRecords]
    terms: dict[str, Terms]
    workshop: TrainingSetup
    policy: Policy | None = None

    @staticmethod
    def of(
        plan: Plan, data: Dataset | None = None, partition: Partition | None = None
    ) -> "SimulationSetup":
        """Load and check everything. Raises InputError if anything does not fit."""
        raw = load_data(plan) if data is None else refit(data, plan.records, plan.form)
        most, key = plan.records.most_left_out, "records.most_left_out"
        by_site = plan.partition.kind == "natural"
        if raw.sieve and (told := raw.sieve.too_many(most, key, by_site=by_site)):
            raise left_out_error(raw.sieve, told)
        plan.task.check_data(raw)
        if plan.counts_sites and raw.site:
            # The number of sites follows from the records.
            plan = plan.model_copy(update={"sites": len(set(raw.site))})
            plan.check_sites(plan.sites)
        own = data is not None or is_table(plan.data)
        # Feature extractors for images handle the scale themselves.
        made = plan.features.used and raw.x.ndim > 2
        if own and raw.x.is_floating_point() and not made:
            advise(raw.name, plan.records, raw.x.shape[1:], raw.features, raw.x)
        cache = find_feature_cache(plan, raw) if data is None else None
        plan.initial.check_form(raw.classes, raw.features)
        raw, dataset, workshop = _try(plan, raw, cache)
        if plan.privacy.unit == "person" and dataset.person is None:
            raise PlanError(
                f'privacy.unit = "person" with data set {dataset.name}, which does not say whose '
                "each record is: name the column as person = ... (for a .csv or .parquet file), or "
                "add an array called person to an .npz file"
            )
        if partition is None:
            held = partial(_held_out_mask, plan, raw) if plan.evaluation.used else None
            partition = make_partition(dataset, plan.partition, plan.sites, plan.seed, held)
        if plan.partition.validation:
            dataset = replace(dataset, x_test=None, y_test=None)
        sites = [_used_records(plan, site) for site in partition.sites(dataset)]
        check_secure(plan, len(sites))
        terms = plan.terms({site.name: _size(plan, site) for site in sites})
        policy = Policy.read(Path(plan.policy)) if plan.policy else None
        if policy:
            for site in sites:
                own = terms.get(site.name) if plan.private else None
                policy.check_run(plan.algorithm, own, (0.0, 0.0), evaluation=plan.evaluation_terms)
        scene = SimulationSetup(plan, raw, dataset, partition, sites, terms, workshop, policy)
        _ = scene.form, scene.participants
        public = dataset.x_test is not None and not plan.head
        held_out = any(len(site.y_held) for site in sites)
        check_public(plan.budget.early, plan.private, scene.form, test=public, held=held_out)
        device_of(plan.run.device, plan.run.precision)
        # A model may fail on a GPU only, as where its code makes a tensor on the CPU.
        scene.workshop.on(plan.run.device).bench(check=plan.run.device != "cpu")
        check_shares(plan, terms, workshop.size)
        check_grid(terms.values())
        sizes = [] if plan.noisy_sizes else [(t.budget.delta, t.size) for t in terms.values()]
        if told := delta_too_large(sizes):
            logging.getLogger("fedpact").warning("%s: %s", raw.name, told)
        advise_of_loud(raw.name, ((one.columns, one.size) for one in terms.values()))
        return scene

    @cached_property
    def groups(self) -> Grouping | None:
        """The groups of held-out records. Raises PlanError: no column, or without categories."""
        name, raw = self.plan.evaluation.groups, self.raw
        if name is None:
            return None
        width = raw.x.shape[1] if raw.x.dim() == 2 else 0
        return Grouping.declared(name, self.plan.records, raw.features, width)

    @cached_property
    def form(self) -> SumsForm:
        """The sums of held-out records. Raises PlanError: they do not fit the classes."""
        return self.plan.sums_form(self.dataset.classes, self.groups)

    @property
    def columns_used(self) -> str:
        """One line on the columns of the user's own table; empty for other data."""
        names, classes = self.raw.features, self.raw.classes
        if not names or not (_is_file(self.plan.data) or is_handed(self.plan.data)):
            return ""
        task = self.plan.task
        of = (
            f"from {task.range[0]:g} to {task.range[1]:g}" if task.range else list_some(classes, 30)
        )
        kind = "" if task.range else "of classes "
        return (
            f"columns used: {list_some(names, 30)}; label {self.plan.label or 'y'}, {kind}{of}; "
            f"{len(self.raw.y):,} records"
        )

    def held_out(self, site: SiteRecords) -> HeldOut:
        """Return a site's held-out records for evaluation."""
        places, plan, groups = self.partition.held_out[site.name], self.plan, self.groups
        persons, used = number_persons(self.dataset.person, places), torch.ones(len(places)).bool()
        most = plan.privacy.person_records
        if persons is not None and most is not None:
            used = limit_records_per_person(persons, most, plan.seed)
            persons = persons[used]
        x, y = site.x_held[used], site.y_held[used]
        raw = self.raw.x[torch.from_numpy(places)][used]
        group = torch.zeros_like(y) if groups is None else groups.of(raw)
        whose = persons if plan.privacy.unit == "person" else None
        return HeldOut(x, y, group, whose, self.released)

    def split(self, site: str) -> str:
        """Return the digest of a site's split for its ledger."""
        key = key_of_seed(self.plan.seed, site)
        return self.form.split(key, persons=self.dataset.person is not None)

    @property
    def released(self) -> tuple[int, ...]:
        """The positions in a record that are scaled by released means."""
        return self.plan.stage().released(self.raw.x[0], self.raw.features)

    @cached_property
    def participants(self) -> Participants:
        """Which sites take part in which round. Raises PlanError: too few sites."""
        return self.plan.participants(site.name for site in self.sites)

    @property
    def sizes(self) -> dict[str, float]:
        """Each site's N_i, as declared or released."""
        return {site.name: _size(self.plan, site) for site in self.sites}


def _is_file(data: str) -> bool:
    return Path(data).suffix.lower() in SUFFIXES


def is_table(data: str) -> bool:
    """Whether the form of the records is declared only by the plan."""
    return _is_file(data) or data in load.TABLES


def describe_undeclared_classes(plan: Plan, data: Dataset) -> str:
    """Return a note on classes that were taken from a file's labels; "" for declared ones."""
    if not _is_file(plan.data) or plan.records.classes is not None or data.kind != "class":
        return ""
    found = data.classes
    few = ", ".join(map(repr, found[:10])) + (", ..." if len(found) > 10 else "")
    return (
        f"classes are taken from the labels: {few}; they count as public, including any "
        f"mistyped label: declare records.classes"
    )


def _held_out_mask(plan: Plan, raw: Dataset, site: str, part: np.ndarray) -> np.ndarray:
    """Return which of a site's records are held out, bool [n]."""
    chosen, key = torch.from_numpy(part), key_of_seed(plan.seed, site)
    whose = raw.person and [raw.person[i] for i in part.tolist()]
    return hold_out(raw.x[chosen], raw.y[chosen], plan.evaluation.share, key, whose).numpy()


def load_data(plan: Plan) -> Dataset:
    """Return the data set that a plan names, read as the plan declares its records."""
    if not is_table(plan.data):
        named = load.load_dataset(plan.data, plan.label, plan.site, person=plan.person)
        return refit(named, plan.records, plan.form)
    return load.load_dataset(
        plan.data,
        plan.label,
        plan.site,
        person=plan.person,
        classes=plan.records.classes,
        form=plan.form,
    )


def _try(plan: Plan, raw: Dataset, cache: Path | None) -> tuple[Dataset, Dataset, TrainingSetup]:
    """Return the data set, what is trained on, and the training setup.

    Records that the plan or its model does not accept are left out. The two data sets are the same
    if the plan has no features. cache: the folder of features, or None.
    """
    name, test = f"{raw.name} (test)", raw.x_test
    stage = plan.stage()
    example, features = raw.x[0], raw.features
    train = stage(raw.x, example, raw.name, cache, features)
    beside_train = cache and cache.with_name(f"test-{cache.name}")
    of_test = None if test is None else stage(test, example, name, beside_train, features)
    data = raw
    if stage.used:
        x_test, names = None if of_test is None else of_test.x, stage.names(example, features)
        data = replace(raw, x=train.x, x_test=x_test, features=names)
    workshop = TrainingSetup.of(plan, data.x[0], len(data.classes))
    worker = workshop.bench(check=True)
    workshop.check_labels(data.y)
    good = train.good & worker.find_accepted(data.x, data.y, data.name, data.numbers)
    good_test = None
    if data.x_test is not None and data.y_test is not None and of_test is not None:
        numbers = torch.arange(len(data.y_test))
        good_test = of_test.good & worker.find_accepted(data.x_test, data.y_test, name, numbers)
    used = data.only(good, good_test)
    return (used if raw is data else raw.only(good, good_test)), used, workshop


def find_feature_cache(plan: Plan, raw: Dataset) -> Path | None:
    """Return where features of plan.data are cached: beside the file, or with decoded data sets."""
    if not plan.features.used:
        return None
    if _is_file(plan.data):
        return beside(Path(plan.data))
    name = re.sub(r"[^A-Za-z0-9._+-]+", "-", plan.data)
    return beside(download.cache_dir() / f"{name}-{plan.stage().key(raw.x[0])[:16]}")


def _used_records(plan: Plan, site: SiteRecords) -> SiteRecords:
    """Return the site with at most person_records training records of each person."""
    most = plan.privacy.person_records
    if most is None or site.persons is None:
        return site
    good = limit_records_per_person(site.persons, most, plan.seed)
    return replace(site, x=site.x[good], y=site.y[good], persons=site.persons[good])


def units(plan: Plan, site: SiteRecords) -> int:
    """Return the number of protected and sampled units at a site: persons, or records."""
    if plan.privacy.unit == "record" or site.persons is None:
        return len(site.y)
    return int(site.persons.max()) + 1


def _size(plan: Plan, site: SiteRecords) -> float:
    """Return N_i: the count, or its noisy release, which is the same at every call."""
    count = units(plan, site)
    if not plan.noisy_sizes:
        return float(count)
    draws = SeededDraws(plan.seed, safe_name(site.name), 0)
    return noisy_size(count, plan.privacy.size_noise, draws)
