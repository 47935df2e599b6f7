"""Sites on a Ray cluster.

An actor has a model and a kernel, and no state of a site: records come from Ray's object store,
ledger and memory from the run's folder. So any actor can serve any site in any round. Random draws
depend on (seed, site, round, step) only, so results depend neither on the number of actors nor on
which of them serves a site.

RAY_ADDRESS names a running cluster; without it, Ray is started on this machine for the run.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import ray
import torch
from ray.exceptions import RayError, RayTaskError

from fedpact.common.errors import FedpactError
from fedpact.common.messages import Refusal, Reply, Task, from_bytes, to_bytes
from fedpact.privacy.accounting.accountant import History
from fedpact.simulation.machine import available_cores, ray_address
from fedpact.simulation.threads import InProcess, VirtualSite
from fedpact.simulation.workshop import TrainingSetup


class Actor:
    """What a process of the cluster runs: a model and a kernel, which train one site at a time."""

    def __init__(self, setup: TrainingSetup) -> None:
        torch.set_num_threads(1)
        self._worker = setup.bench()

    def handle(self, site: VirtualSite, task: bytes) -> tuple[bytes, History]:
        """Return the encoded answer to an encoded task, and all charges to the site's run so far.

        Raises what the site's client raises.
        """
        question: Any = from_bytes(task)
        with site.open_ledger() or nullcontext() as ledger:
            answer = to_bytes(site.client(ledger).handle(question, self._worker))
            return answer, ledger.spent(site.run) if ledger else {}


@dataclass(frozen=True)
class _RemoteClient:
    """A site as the transport sees it. site: a reference to its VirtualSite in Ray's store."""

    name: str
    site: Any
    spent: dict[str, History]

    def handle(self, task: Task, actor: Any) -> Reply | Refusal:
        """Have an actor answer the task. Raises FedpactError: the site failed, or its actor."""
        try:
            block, charged = ray.get(actor.handle.remote(self.site, to_bytes(task)))
        except RayTaskError as error:
            if isinstance(error.cause, FedpactError):
                raise error.cause from error
            raise FedpactError(
                f"site {self.name!r} failed at its actor: {error.cause!r}"
            ) from error
        except RayError as error:
            raise FedpactError(
                f"the actor that trained site {self.name!r} in round {task.round} ended "
                f"({type(error).__name__}): its machine is gone or out of memory, or it cannot "
                "import what the run needs. Nothing committed is lost: resolve this, and resume "
                "the run"
            ) from error
        self.spent[self.name] = charged
        answer: Any = from_bytes(block)
        return answer


class RayTransport(InProcess):
    """A transport whose workers are Ray actors: one for each site or each core of the cluster.

    workers: the largest number of actors, None for no limit. spent: the charges to each site's run
    so far; its ledger must be closed in this process.
    Raises FedpactError: Ray does not start, or the cluster has no free core.
    """

    def __init__(
        self,
        sites: Sequence[VirtualSite],
        setup: TrainingSetup,
        workers: int | None,
        spent: Mapping[str, History],
    ) -> None:
        self._spent, self._actors = dict(spent), list[Any]()
        most = min(workers or len(sites), len(sites))
        self._owned = _start_ray(most)
        try:
            cores = int(ray.cluster_resources().get("CPU", 0))
            if not cores:
                raise FedpactError(
                    f"Ray at {ray_address()!r} has no core: start it with --num-cpus"
                )
            remote, shared = ray.remote(num_cpus=1)(Actor), ray.put(setup)

            def actor() -> Any:
                self._actors.append(remote.remote(shared))
                return self._actors[-1]

            clients: Any = {
                site.name: _RemoteClient(site.name, ray.put(_compact(site)), self._spent)
                for site in sites
            }
            super().__init__(clients, min(most, cores), actor)
        except BaseException:
            self._end()
            raise

    def __exit__(self, *exception: object) -> None:
        # Wait for running tasks first: if they were killed, a ledger's last line might be torn.
        try:
            super().__exit__(*exception)
        finally:
            self._end()

    def spent(self, site: str) -> History:
        """Return what a site had been charged for this run when it last answered."""
        return self._spent[site]

    def _end(self) -> None:
        for actor in self._actors:
            ray.kill(actor)
        if self._owned:
            ray.shutdown()


def _compact(site: VirtualSite) -> VirtualSite:
    """Return the site with copies of its records: a view would be stored with its whole tensor."""
    x, y = site.records.x.clone(), site.records.y.clone()
    return replace(site, records=replace(site.records, x=x, y=y))


def _start_ray(actors: int) -> bool:
    """Start Ray here or join the cluster; return whether this process has to end it."""
    if ray.is_initialized():
        return False
    # Silences a warning about future GPU defaults; the actors use no GPU.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    address = ray_address()
    here: dict[str, Any] = {}
    if address == "local":
        here = {"num_cpus": min(actors, available_cores()), "num_gpus": 0}
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        ray.init(address, include_dashboard=False, **quiet, **here)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise FedpactError(f"Ray does not start at {address!r}: {error}") from error
    return True
