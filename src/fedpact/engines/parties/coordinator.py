"""The server of a deployment: from its directory to a finished run, over whatever transport.

federation.toml, plan.json   what all parties agree on
test.npz                     a public test set with arrays x and y, if there is one
run/                         the run's folder; a server that is started again goes on from it
"""

import dataclasses
import platform
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from safetensors.torch import save as save_tensors
from torch import Tensor

from fedpact.data import datasets
from fedpact.engines.parties.admission import Admission
from fedpact.engines.parties.federation import Federation, read_plan
from fedpact.engines.parties.standing import Standing
from fedpact.engines.secure.exchange import Attempts
from fedpact.engines.secure.keys import check_secure
from fedpact.engines.statement import MECHANISMS, described, secure_lines, secure_terms
from fedpact.errors import PlanError
from fedpact.files import write_whole
from fedpact.folder import Checkpoint, Folder
from fedpact.ledger.reservations import FIXED, WHY
from fedpact.losses import cross_entropy
from fedpact.messages import RoundRecord
from fedpact.metrics import METRICS, evaluate
from fedpact.params import FlatModel
from fedpact.plan import Plan
from fedpact.privacy.terms import Terms
from fedpact.round import Rounds, Transport
from fedpact.theory.accounting import ADJACENCY

_COVERS = [
    "Everything a site sends during training: it passes the site's oracle, which clips and adds "
    "noise, and its ledger, which charges first.",
    "The final model and every model on the way, against the server, the other sites and anyone "
    "who sees them.",
]
_DOES_NOT_COVER = [
    "How long a site takes to answer, and when it is there.",
    "What a record's owner could be harmed by even if the record were left out.",
    "Several records of one person: the unit is one record.",
    "The sites' declared sizes, sampling rates and label names, which are public.",
]
_EPSILON = (
    "ε as the server knows it: every task that was sent counts as charged once, as does each new "
    "attempt at a round under secure aggregation. A site that died "
    "in mid-round may have charged a round twice; its own ledger says so, and stays within what "
    "was reserved."
)


@dataclass(frozen=True)
class Coordinator:
    """The server's side of one run, checked as a whole when it is made.

    Raises InputError of some kind for whatever does not fit.
    """

    directory: Path
    federation: Federation
    plan: Plan
    terms: dict[str, Terms]

    @staticmethod
    def of(directory: Path) -> "Coordinator":
        """Read a server's directory."""
        federation = Federation.read(directory / "federation.toml")
        plan = read_plan(directory / "plan.json")
        check_secure(plan, len(federation.sites))
        return Coordinator(directory, federation, plan, federation.terms(plan))

    @property
    def folder(self) -> Folder:
        """The run's folder."""
        return Folder(self.directory / "run")

    @property
    def attempts(self) -> Path:
        """Where the attempts at rounds under secure aggregation are kept."""
        return self.folder.path / "attempts.json"

    def admission(self) -> tuple[Admission, Callable[[], None]]:
        """Return the check of replies, and what makes durable which ledgers it has seen."""
        standing = Standing(self.folder.path)
        longest = self.federation.checks.longest
        return Admission(self.plan.method, self.terms, longest, standing), standing.save

    def run(self, transport: Transport, on_round: Callable[[RoundRecord], None]) -> dict[str, Any]:
        """Carry the run out, or on, and return its summary. on_round: called with every record.

        Raises FedpactError where the transport gives up; what was committed stays.
        """
        self._begin()
        evaluator = _Evaluator(self)
        at, records = self._restore(evaluator)
        evaluator.go_on(records)
        for record in records:
            on_round(record)
        rounds = Rounds(self.plan, self.federation.run, transport, evaluator)
        for committed, record in rounds(at):
            at = committed
            self.folder.commit(at, record)
            records.append(record)
            on_round(record)
        return self._finish(at, records, rounds.status)

    def _begin(self) -> None:
        folder, plan = self.folder, self.plan.model_dump(mode="json")
        if (folder.path / "plan.json").exists():
            run = folder.read_json("environment.json")["run"]
            if (folder.read_json("plan.json"), run) != (plan, self.federation.run):
                raise PlanError(
                    f"{folder.path} holds run {run!r} of its own plan, and this is run "
                    f"{self.federation.run!r}: name a new run in federation.toml at every party "
                    "and move that folder away, or put plan.json and federation.toml back"
                )
            return
        packages = ("torch", "numpy", "scipy", "dp-accounting", "safetensors", "flwr", "fedpact")
        environment = {
            "run": self.federation.run,
            "python": platform.python_version(),
            "platform": platform.platform(),
            **{name: version(name) for name in packages},
        }
        folder.write_json("environment.json", environment)
        folder.write_json("privacy.json", self._statement())
        folder.write_json("plan.json", plan)

    def _restore(self, evaluator: "_Evaluator") -> tuple[Checkpoint, list[RoundRecord]]:
        folder = self.folder
        if (folder.path / "state.safetensors").exists():
            return folder.restore()
        w = FlatModel(self.federation.workshop(self.plan).module()).vector
        at = Checkpoint(self.plan.method.init(w), 0, {})
        record = evaluator(at, RoundRecord(round=0))
        (folder.path / "rounds.jsonl").unlink(missing_ok=True)
        folder.commit(at, record)
        return at, [record]

    def _finish(self, at: Checkpoint, records: list[RoundRecord], status: str) -> dict[str, Any]:
        module = self.federation.workshop(self.plan).module()
        FlatModel(module).load(at.state.vectors["w"])
        tensors = {name: value.clone() for name, value in module.state_dict().items()}
        write_whole(self.folder.path / "model.safetensors", save_tensors(tensors), private=False)
        last = records[-1]
        summary: dict[str, Any] = {
            "status": status,
            "private": True,
            "rounds": last.round,
            "accuracy": last.accuracy,
            "loss": last.loss,
            **dict.fromkeys(METRICS),
            "worst_site": None,
            "seconds": sum(record.seconds for record in records),
            "bytes_down": sum(record.bytes_down for record in records),
            "bytes_up": sum(record.bytes_up for record in records),
            "epsilon": dict(last.epsilon),
            "delta": {name: terms.budget.delta for name, terms in self.terms.items()},
            "adjacency": ADJACENCY,
            "accountant": self.plan.privacy.accountant,
            "model_parameters": FlatModel(module).size,
        }
        self.folder.write_json("summary.json", summary)
        return summary

    def _statement(self) -> dict[str, Any]:
        test = self.federation.seeds == "test"
        return {
            "private": True,
            "unit": "record",
            "why_unprotected": "",
            "adjacency": ADJACENCY,
            "mechanism": self.plan.privacy.mode,
            "mechanism_meaning": MECHANISMS[self.plan.privacy.mode],
            "separation": self.federation.workshop(self.plan).separation(),
            "accountant": self.plan.privacy.accountant,
            "accounting": FIXED,
            "accounting_reason": WHY,
            "randomness": "seeded test: protects nobody" if test else "secure, at each site",
            "sizes": "public",
            "accuracy_pooled": False,
            "simulator_only": [],
            "covers": [*_COVERS, *secure_lines(self.plan, len(self.terms))],
            "does_not_cover": _DOES_NOT_COVER,
            "secure_aggregation": secure_terms(self.plan, len(self.terms)),
            "epsilon_by_round": _EPSILON,
            "sites": {name: described(terms) for name, terms in self.terms.items()},
        }


class _Evaluator:
    """See round.Evaluate: the public test set, and ε by the number of tasks sent."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._terms, self._steps = coordinator.terms, 0
        self._model = FlatModel(coordinator.federation.workshop(coordinator.plan).module())
        self._each, self._attempts = coordinator.plan.method.steps(), coordinator.attempts
        self._test = _test_set(coordinator)

    def go_on(self, records: list[RoundRecord]) -> None:
        """Count on from the rounds that are committed."""
        self._steps = sum(record.steps for record in records)

    def __call__(self, at: Checkpoint, record: RoundRecord) -> RoundRecord:
        self._steps += record.steps
        # Each new attempt is charged as a round is; τ is fixed where there are any.
        extra = Attempts(self._attempts).extra
        steps, rounds = self._steps + extra * self._each, record.round + extra
        spent = {name: _spent(terms, steps, rounds) for name, terms in self._terms.items()}
        record = dataclasses.replace(record, epsilon=spent)
        if self._test is None:
            return record
        self._model.load(at.state.vectors["w"])
        score = evaluate(self._model.module, cross_entropy, *self._test)
        return dataclasses.replace(record, accuracy=score.accuracy, loss=score.loss)


def _spent(terms: Terms, steps: int, rounds: int) -> float:
    # A round has at most one opening.
    history = terms.history(min(terms.steps, steps), min(terms.openings, rounds))
    return terms.epsilon_after(history)


def _test_set(coordinator: Coordinator) -> tuple[Tensor, Tensor] | None:
    path = coordinator.directory / "test.npz"
    if not path.exists():
        return None
    federation = coordinator.federation
    data = datasets.load(str(path), classes=federation.classes, form=federation.records)
    return data.x, data.y
