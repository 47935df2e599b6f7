"""The server in a deployment, and the delivery of its final model.

A server's directory contains

    federation.toml, plan.json   the same at all parties
    test.npz                     a public test set with arrays x and y, optional
    ledgers.json                 the last entries of sites' ledgers, in all its runs (admission)
    run/                         the run's folder, from which a restarted server continues
    run/handed-over.json         which sites have received the final model of which round

The run does not wait for absent sites: they receive the model when the server is restarted, or as
a file (`fedpact deploy model`).
"""

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Final

from torch import Tensor, nn

from fedpact.algorithms.wrappers.optimizers import read_average
from fedpact.algorithms.wrappers.released_scales import CONSTANTS
from fedpact.common.errors import FedpactError, PlanError
from fedpact.common.files import read_json_table
from fedpact.common.format import exact_percent, headline_metric
from fedpact.common.messages import FINAL, Refusal, RoundRecord, SiteScore, Task, Transport
from fedpact.common.params import FlatModel
from fedpact.common.run_folder import ATTEMPTS, Checkpoint, Folder
from fedpact.data import load
from fedpact.data.features.extract import beside
from fedpact.deployment.admission import Admission, LedgerRegistry, expect_form
from fedpact.deployment.federation import Federation, read_plan
from fedpact.deployment.final_model import describe_ending, may_end_early
from fedpact.evaluation.held_out import SumsForm
from fedpact.evaluation.intervals import check_public
from fedpact.evaluation.metrics import evaluate
from fedpact.plan import Plan
from fedpact.privacy.accounting.accountant import History
from fedpact.privacy.column_scales import advise_of_loud, scale_columns
from fedpact.privacy.reply_bounds import longest_sums
from fedpact.privacy.terms import Terms, check_grid
from fedpact.rounds import Rounds
from fedpact.simulation.predict import RecordedForm
from fedpact.simulation.run import environment_of, finish, start_or_resume, with_epsilon
from fedpact.simulation.secure_aggregation.encoding import check_shares
from fedpact.simulation.secure_aggregation.keys import check_secure
from fedpact.simulation.secure_aggregation.transport import Attempts
from fedpact.simulation.statement import site_terms, statement
from fedpact.simulation.workshop import TrainingSetup

_log = logging.getLogger("fedpact.server")
FILE: Final = "handed-over.json"
TERMS: Final = (
    "ε of a round: the largest of all sites, each at its δ, adjacency and accountant as in "
    "plan.json"
)
"""Goes before the lines of describe_round."""


def hand_over(folder: Folder, run: str, at: Checkpoint, transport: Transport) -> None:
    """Send the final model to every site that lacks it, and name the sites it did not reach.

    Failures to send do not affect the run, which has ended.
    """
    # If the file is damaged, every site receives the model again.
    has = dict(read_json_table(folder.path / FILE))
    vectors = {n: at.state.vectors[n] for n in ("w", CONSTANTS) if n in at.state.vectors}
    tasks = {
        site: Task(run, at.round, FINAL, vectors, {}, at.included.get(site, -1))
        for site in transport.sites
        if has.get(site) != [run, at.round]
    }
    if not tasks or not at.round:
        return
    lacking = dict.fromkeys(tasks, "absent")
    try:
        for answer in transport.exchange(tasks):
            if isinstance(answer, Refusal):
                lacking[answer.site] = answer.code
            else:
                lacking.pop(answer.site, None)
                has[answer.site] = [run, at.round]
    except FedpactError as error:
        _log.warning("sending the final model: %s", error)
    folder.write_json(FILE, has)
    for site, code in lacking.items():
        _log.warning(
            "site %s did not receive the final model (%s): restart the server when the site is "
            "connected, or give its owner %s and have them run `fedpact deploy model`",
            site,
            code,
            folder.path / "model.safetensors",
        )


_EPSILON = (
    "ε as far as the server knows: every round in which a site was asked counts as charged once, "
    "even if it was absent, and so does each new attempt at a round under secure aggregation. A "
    "site that died during a round may have charged it twice; its own ledger shows this, and "
    "stays within the reservation."
)


class Coordinator:
    """The server's side of one run, by the files of its directory.

    Raises InputError if they do not match.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.federation = federation = Federation.read(directory / "federation.toml")
        self.plan = plan = read_plan(directory / "plan.json")
        plan.check_sites(len(federation.sites))
        check_secure(plan, len(federation.sites))
        self.terms = federation.terms(plan)
        if plan.privacy.shares_noise:
            check_shares(plan, self.terms, FlatModel(self.module()).size)
        check_grid(self.terms.values())
        each = ((one.columns, one.size) for one in self.terms.values())
        advise_of_loud(f"run {federation.run}", each)
        test = (directory / "test.npz").exists() and not plan.head
        check_public(plan.budget.early, plan.private, self.form, test=test, held=False)

    @property
    def folder(self) -> Folder:
        """The run's folder."""
        return Folder(self.directory / "run")

    def admission(self) -> Admission:
        """Return the check of replies, with the ledgers that the server has seen."""
        standing = LedgerRegistry(self.directory)
        return Admission(self.plan.method, self.terms, standing, self._longest_sums)

    @cached_property
    def form(self) -> SumsForm:
        """The sums over held-out records that sites release."""
        return self.federation.form(self.plan)

    @cached_property
    def longest_message(self) -> int:
        """The largest number of values in a task of the plan or an answer to it."""
        workshop, method = self.workshop(), self.plan.method
        first = method.task(method.init(FlatModel(workshop.module()).vector))
        task = Task(self.federation.run, 1, self.plan.algorithm, first.vectors, first.numbers)
        reply = expect_form(workshop, task).vectors.values()
        return max(
            sum(vector.numel() for vector in first.vectors.values()),
            sum(shape.numel() for shape, _ in reply),
            sum(self.form.lengths.values()),
        )

    def _longest_sums(self, terms: Terms) -> dict[str, float]:
        form = self.form
        if form.once is None:
            return {}
        # At most all of a site's records are held out.
        return longest_sums(form.once, form.lengths, terms.size / (1 - form.share))

    def run(
        self,
        transport: Transport,
        plain: Transport,
        on_round: Callable[[RoundRecord], None],
        begin: Callable[[], None],
        sockets: Callable[[], Sequence[int]] = tuple,
    ) -> dict[str, Any]:
        """Start or resume the run, and return its summary. on_round: called with every record.

        plain: carries the final model to the sites, as `transport` may sum replies. begin: called
        before the first round is charged. sockets: returns the bytes (to, from) sites carried by
        connections so far, () if unknown. Raises FedpactError if the transport gives up;
        committed rounds are kept.
        """
        self._begin()
        begin = cache(begin)
        plan = self.plan
        evaluator = _Evaluator(self)
        rounds = Rounds(plan, self.federation.run, transport, evaluator, form=self.form)

        def open_run(at: Checkpoint, record: RoundRecord) -> tuple[Checkpoint, RoundRecord]:
            begin()
            return rounds.open_run(at, record)

        at, records = start_or_resume(self.folder, plan, self.module, evaluator, open_run)
        if not at.round:
            # An earlier start was interrupted.
            begin()
        evaluator.go_on(records)
        rounds.see(records)
        for record in records:
            on_round(record)
        before = sockets()
        for committed, record in rounds(at):
            at, now = committed, sockets()
            # Nothing, if one of the two is unknown.
            each = [after - until for until, after in zip(before, now, strict=False)]
            record, before = dataclasses.replace(record, sockets=each), now
            self.folder.commit(at, record)
            records.append(record)
            on_round(record)
        # A round whose model was not finite has no record, and was charged.
        records[-1] = evaluator.count_epsilon(rounds.finish(at, records[-1]))
        self.folder.rewrite(records)
        ended = at, records, rounds.status
        of = self.federation
        given = RecordedForm(of.shape, of.values, of.classes, of.columns(plan))
        ready, w = of.stage(plan, self.directory), at.state.vectors["w"]
        given.by(ready, self.workshop(), w).write(self.folder)
        sizes = {name: terms.size for name, terms in self.terms.items()}
        done = finish(self.folder, self.plan, self.terms, sizes, self.module(), self.form, *ended)
        hand_over(self.folder, of.run, at, plain)
        # After an early end what counts is the summary's ε, the reserved one if releases ended it.
        early = may_end_early(self.plan, done["rounds"])
        shown = done if early else {**done, "epsilon": evaluator.price()}
        _log.info("%s", describe_ending(of.run, self.plan, shown, self.folder.path))
        return done

    def module(self) -> nn.Module:
        """Return the model with its initial weights, the same at every call."""
        return self.workshop().module()

    def workshop(self) -> TrainingSetup:
        """Return the server's model, loss and evaluation."""
        return self.federation.workshop(self.plan, self.directory)

    def _begin(self) -> None:
        folder = self.folder
        if (folder.path / "plan.json").exists():
            run = folder.read_json("environment.json")["run"]
            kept = Plan.parse(folder.read_json("plan.json"))
            if (kept, run) != (self.plan, self.federation.run):
                raise PlanError(
                    f"{folder.path} has another plan or run ({run!r}) than this one "
                    f"({self.federation.run!r}): name a new run in federation.toml at every party "
                    "and move that folder away, or restore plan.json and federation.toml"
                )
            return
        folder.write_json("environment.json", environment_of(self.federation.run, "flwr"))
        folder.write_json("privacy.json", self.statement())
        folder.write_json("plan.json", self.plan.document())

    def statement(self) -> dict[str, Any]:
        """Return the content of privacy.json."""
        test = self.federation.seeds == "test"
        said = statement(
            self.plan,
            self.terms,
            len(self.terms),
            self.form,
            randomness="seeded test: protects no one" if test else "secure, at each site",
            separation=self.workshop().separation(),
            persons=self.federation.person is not None,
        )
        return said | {"epsilon_by_round": _EPSILON}

    def price(self) -> None:
        """Compute every ε of the run, which takes memory that is needed later: see `in_a_child`."""
        site_terms(self.plan, self.terms)
        with_epsilon(RoundRecord(round=0), self.terms, {name: {} for name in self.terms})


def describe_round(record: RoundRecord) -> str:
    """Return a round's number, accuracy, largest ε, seconds and refusals in a line."""
    found = headline_metric(record.accuracy, record.loss, exact_percent)
    accuracy = "" if record.accuracy is None else f"  {' '.join(found)}"
    refused = "".join(f"  {site}: {code}" for site, code in record.refused.items())
    spent = record.most_spent()
    return f"round {record.round}{accuracy}  ε {spent}  {record.seconds:.1f} s{refused}"


class _Evaluator:
    """Evaluates on the public test set, and adds ε by the rounds in which each site was asked.

    Absent sites count too, as only they know what reached them.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self._terms = coordinator.terms
        self._steps, self._rounds = Counter[str](), Counter[str]()
        self._model = FlatModel(coordinator.module())
        self._loss = coordinator.plan.task.per_record(len(coordinator.federation.classes))
        self._each = coordinator.plan.method.steps()
        self._attempts = coordinator.folder.path / ATTEMPTS
        # With local heads the shared part alone cannot predict.
        self._test = None if coordinator.plan.head else _test_set(coordinator)
        federation, plan = coordinator.federation, coordinator.plan
        stage = federation.stage(plan, coordinator.directory)
        columns = federation.features
        self._released = stage.released(federation.example(), columns) if self._test else ()

    def go_on(self, records: list[RoundRecord]) -> None:
        """Start counting from the committed rounds."""
        self._steps.clear()
        self._rounds.clear()
        for record in records:
            self._count(record)

    def _count(self, record: RoundRecord) -> None:
        for site in self._terms:
            self._steps[site] += record.steps * record.was_asked(site)
            self._rounds[site] += record.was_asked(site)

    def __call__(self, at: Checkpoint, record: RoundRecord) -> RoundRecord:
        self._count(record)
        record = self.count_epsilon(record)
        if self._test is None:
            return record
        x, y = self._test
        if CONSTANTS in at.state.vectors:
            x = scale_columns(x, self._released, at.state.vectors[CONSTANTS])
        score, average = self._score(at.state.vectors["w"], x, y), read_average(at.state)
        record = dataclasses.replace(record, accuracy=score.accuracy, loss=score.loss)
        if average is None:
            return record
        beside = self._score(average, x, y)
        numbers = {"accuracy": beside.accuracy, "loss": beside.loss}
        return dataclasses.replace(record, average=numbers)

    def count_epsilon(self, record: RoundRecord) -> RoundRecord:
        """Return a record with the ε of all that was counted."""
        return with_epsilon(record, self._terms, self._histories())

    def _histories(self) -> dict[str, History]:
        # Each new attempt is charged like a round; τ is fixed if attempts are possible.
        extra, found = Attempts(self._attempts).extra, dict[str, History]()
        for name, terms in self._terms.items():
            steps = min(terms.steps, self._steps[name] + extra * self._each)
            # A round has at most one opening.
            openings = min(terms.openings, self._rounds[name] + extra)
            found[name] = terms.history(steps, openings, 1 + extra)
        return found

    def price(self) -> dict[str, float]:
        """Return each site's ε as ledgers price it; that of a round is a quicker, higher bound."""
        spent = self._histories()
        return {name: of.guarantee.after(spent[name]).epsilon for name, of in self._terms.items()}

    def _score(self, w: Tensor, x: Tensor, y: Tensor) -> SiteScore:
        self._model.load(w)
        return evaluate(self._model.module, self._loss, x, y)


def _test_set(coordinator: Coordinator) -> tuple[Tensor, Tensor] | None:
    path = coordinator.directory / "test.npz"
    if not path.exists():
        return None
    federation = coordinator.federation
    form, names = federation.describe_labels(coordinator.plan), federation.features
    # It has arrays, whose columns are named by their positions.
    data = load.load_dataset(str(path), classes=federation.classes, form=form.by_place(names))
    stage = federation.stage(coordinator.plan, coordinator.directory)
    staged = stage(data.x, federation.example(), str(path), beside(path), names)
    return staged.x[staged.good], data.y[staged.good]
