"""Secure aggregation in a deployment: the site's side and the server's.

A site reads the others' long-term keys, the sizes and the threshold from its own federation.toml
and plan.json; no message can change them.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from fedpact.common.messages import Reply, State, Task
from fedpact.common.params import FlatModel
from fedpact.deployment.admission import Admission
from fedpact.deployment.federation import Federation
from fedpact.deployment.site_records import SiteFiles
from fedpact.deployment.store import Store, StoreSlot
from fedpact.plan import Plan
from fedpact.simulation.secure_aggregation import keys
from fedpact.simulation.secure_aggregation.client import Masker, UnmaskedSums
from fedpact.simulation.secure_aggregation.encoding import (
    Coding,
    Form,
    check_shares,
    coding_of,
)
from fedpact.simulation.secure_aggregation.graph import MaskingGraph
from fedpact.simulation.secure_aggregation.keys import check_secure
from fedpact.simulation.secure_aggregation.transport import Attempts, Carrier, Secured, Server


def masker_of(files: SiteFiles, store: Store) -> Masker | None:
    """Return a site's side of secure aggregation; None if the plan has none.

    store: the site's. Raises InputError: settings that do not match.
    """
    federation, plan = files.federation, files.plan
    check_secure(plan, len(federation.sites))
    if not plan.secure_aggregation.threshold:
        return None
    if plan.privacy.shares_noise:
        dimension = FlatModel(files.workshop.module()).size
        check_shares(plan, federation.terms(plan), dimension)
    return Masker(
        files.name,
        keys.read_private_key(files.directory / "site.key"),
        {site: keys.public_key(member.key) for site, member in federation.sites.items()},
        MaskingGraph.of(plan, federation.sites),
        _coding(federation, plan),
        UnmaskedSums(StoreSlot(store, "opened")),
    )


def secure_deployment(
    carrier: Carrier,
    federation: Federation,
    plan: Plan,
    attempts: Path,
    admission: Admission,
    form: Callable[[Task], Form],
) -> Secured:
    """Return the server's side: a transport that delivers sums instead of single replies.

    attempts: the file of transport.Attempts. form: returns that of a plain reply to a task.
    """
    coding = _coding(federation, plan)
    layouts = dict[int, Form]()

    def layout(task: Task) -> Form:
        # Finding the form takes a training step on synthetic records: do it once per round.
        if task.round not in layouts:
            layouts.clear()
            found = form(task)
            layouts[task.round] = coding.layout(found)
        return layouts[task.round]

    def fault(site: str, task: Task, reply: Reply) -> str | None:
        return admission.fault(site, task, reply, coding.form(layout(task)))

    def mean_fault(task: Task, sites: list[str], mean: State, error: float) -> str | None:
        # Where replies were clamped on the way, their mean is near what was told clamped.
        vectors = {n: v.clamp(-coding.limit, coding.limit) for n, v in task.vectors.items()}
        return admission.mean_fault(replace(task, vectors=vectors), sites, mean, error)

    circle, patience = MaskingGraph.of(plan, federation.sites), federation.patience
    server = Server(
        {site: keys.public_key(member.key) for site, member in federation.sites.items()},
        circle,
        coding,
        plan.rounds,
        max(circle.threshold, patience.least_replies),
        patience.retries,
        layout,
        fault,
        mean_fault,
    )
    return Secured(carrier, server, Attempts(attempts))


def _coding(federation: Federation, plan: Plan) -> Coding:
    sizes = {name: float(member.size) for name, member in federation.sites.items()}
    return coding_of(plan, sizes, federation.terms(plan))
