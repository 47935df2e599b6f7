"""What a run on this machine needs, loaded and checked as a whole before anything is written."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from fedpact.data import datasets
from fedpact.data.dataset import Dataset
from fedpact.data.partition import Partition, SiteRecords, make_partition
from fedpact.data.tables import SUFFIXES
from fedpact.draws.seeded import SeededDraws
from fedpact.engines.inprocess import Bench
from fedpact.engines.parties.entrance import taken
from fedpact.engines.process import device_of
from fedpact.engines.secure.keys import check_secure
from fedpact.engines.secure.shared import check_shares
from fedpact.engines.workshop import Workshop
from fedpact.params import FlatModel
from fedpact.plan import Plan
from fedpact.privacy.policy import Policy
from fedpact.privacy.sizes import noisy_size
from fedpact.privacy.terms import Terms


@dataclass(frozen=True)
class Scene:
    """Everything a run needs, checked, before anything is written."""

    plan: Plan
    dataset: Dataset
    partition: Partition
    sites: list[SiteRecords]
    terms: dict[str, Terms]
    policy: Policy | None = None

    @staticmethod
    def of(plan: Plan, data: Dataset | None = None, partition: Partition | None = None) -> "Scene":
        """Load and check. Raises InputError of some kind for whatever does not fit."""
        dataset = _loaded(plan) if data is None else datasets.refitted(data, plan.records)
        dataset = _tried(plan, dataset)
        if partition is None:
            partition = make_partition(dataset, plan.partition, plan.sites, plan.seed)
        sites = partition.sites(dataset)
        check_secure(plan, len(sites))
        terms = plan.terms({site.name: _size(plan, site) for site in sites})
        policy = Policy.read(Path(plan.policy)) if plan.policy else None
        if policy:
            for site in sites:
                own = terms.get(site.name) if plan.private else None
                policy.check_run(plan.algorithm, own, (0.0, 0.0))
        scene = Scene(plan, dataset, partition, sites, terms, policy)
        device_of(plan.run.device)
        scene.workshop.table()
        check_shares(plan, terms, FlatModel(scene.module()).size)
        return scene

    @property
    def sizes(self) -> dict[str, float]:
        """Each site's N_i, as it is declared or released."""
        return {site.name: _size(self.plan, site) for site in self.sites}

    @property
    def workshop(self) -> Workshop:
        """What builds the plan's models and kernels for this data set's records, on the CPU."""
        return Workshop(self.plan, self.dataset.x[0], len(self.dataset.classes))

    def module(self) -> nn.Module:
        """Return the model with its initial weights, the same at every call."""
        return self.workshop.module()

    def bench(self, *, check: bool = False) -> Bench:
        """Return a worker's kernel; `check` tries the model on made-up records first."""
        return self.workshop.bench(check=check)


def _loaded(plan: Plan) -> Dataset:
    if Path(plan.data).suffix.lower() not in SUFFIXES:
        return datasets.refitted(datasets.load(plan.data, plan.label, plan.site), plan.records)
    return datasets.load(
        plan.data,
        plan.label,
        plan.site,
        classes=plan.records.classes,
        form=plan.records.shared(),
    )


def _tried(plan: Plan, data: Dataset) -> Dataset:
    """The data set without the records that the plan's model does not take."""
    kernel = Workshop(plan, data.x[0], len(data.classes)).bench(check=True).kernel
    good = taken(data.x, data.y, kernel, data.name, data.numbers)
    if data.x_test is None or data.y_test is None:
        return data.only(good)
    numbers = torch.arange(len(data.y_test))
    of_test = taken(data.x_test, data.y_test, kernel, f"{data.name} (test)", numbers)
    return data.only(good, of_test)


def _size(plan: Plan, site: SiteRecords) -> float:
    """Return N_i: the count, or what the site releases of it, the same whenever it is asked."""
    count = len(site.y)
    if not plan.noisy_sizes:
        return float(count)
    return noisy_size(count, plan.privacy.size_noise, SeededDraws(plan.seed, site.name, 0))
