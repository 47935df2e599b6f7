"""A site of a simulation, wherever it is trained: by a thread of this process, or by an actor."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from fedpact.client import Client
from fedpact.engines.inprocess import Worker
from fedpact.evaluation.promise import charge_of
from fedpact.evaluation.totals import HeldOut, SumsForm
from fedpact.ledger.ledger import Ledger
from fedpact.messages import State, Task, Vectors
from fedpact.methods.released import ColumnRecords, find_examined
from fedpact.persample.kernel import PlainKernel
from fedpact.plan import Plan
from fedpact.privacy.oracle import Charge, Oracle, PlainOracle, PrivateOracle, Records
from fedpact.privacy.policy import Policy
from fedpact.privacy.terms import Terms


@dataclass(frozen=True, eq=False)
class VirtualSite:
    """What one site of a run is made of. It can be pickled.

    held: its held-out records, of which it releases `form`; None where it releases nothing of them.
    split: what its ledger knows by which they are.
    terms, ledger: None where the site keeps no ledger. ledger, memory: the paths of its files.
    """

    name: str
    plan: Plan
    run: str
    records: Records
    memory: Path
    terms: Terms | None = None
    ledger: Path | None = None
    policy: Policy | None = None
    held: HeldOut | None = None
    form: SumsForm | None = None
    split: str = ""

    @property
    def size(self) -> float:
        """N_i, as it is declared or released."""
        return self.terms.size if self.terms else float(self.records.count)

    @property
    def batch_size(self) -> float:
        """The expected size of its largest batches."""
        opening = self.plan.method.opening
        rate = self.plan.rate(self.name, self.size)
        return self.size * max(rate, opening.rate if opening else 0.0)

    def open_ledger(self) -> Ledger | None:
        """Open the site's ledger, None where it keeps none. Raises what Ledger raises."""
        return None if self.ledger is None else Ledger(self.ledger, self.name, hypothetical=True)

    def client(self, ledger: Ledger | None) -> Client[Worker]:
        """Return what answers the site's tasks. ledger: the site's own, open, with a promise."""
        plan, terms, device = self.plan, self.terms, torch.device(self.plan.run.device)
        scaled = ColumnRecords(self.records.to(device))
        size, seed, private = self.size, plan.seed, plan.private

        def oracle(task: Task, memory: State, bench: Worker) -> Oracle:
            draws, records = bench.draws(seed, self.name, task.round), scaled(task)
            if terms is None or ledger is None:
                opening = plan.method.opening
                rates = plan.rate(self.name, size), opening.rate if opening else 1.0
                return PlainOracle(records, bench.plain, rates[0], size, draws, rates[1])
            charge = Charge(ledger, self.run, task.round, task.digest + memory.digest)
            exact = None if private else PlainKernel(bench.private.model, bench.private.loss)
            left = partial(charge.steps_left, terms)
            own = terms.at(task.round)
            # A simulation protects nobody: its records are compact without a check.
            compact = "compact"
            return PrivateOracle(
                records, bench.private, own, draws, charge, left, exact, placement=compact
            )

        return Client(
            self.name,
            size,
            plan.method,
            oracle,
            ledger,
            self.memory,
            self.policy,
            device,
            self._examine(ledger),
        )

    def _examine(self, ledger: Ledger | None) -> Callable[[Task, State, Worker], Vectors] | None:
        """Return what answers questions about held-out records; None where there are none."""
        held, form, once = self.held, self.form, self.plan.evaluation_terms
        if ledger is None or held is None or form is None or once is None:
            return None

        device = torch.device(self.plan.run.device)
        held = replace(held, x=held.x.to(device), y=held.y.to(device))

        def examine(task: Task, memory: State, bench: Worker) -> Vectors:
            draws = bench.draws(self.plan.seed, self.name, task.round)
            w, by = find_examined(self.plan.method, task, memory)
            sums = partial(held.totals, form, bench.private, w, by)
            return once.release(charge_of(ledger, task), sums, draws)

        return examine
