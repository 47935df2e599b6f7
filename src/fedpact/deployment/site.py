"""A site's side of a deployment: it answers each question once, and takes up what it left behind.

site.toml           the owner's: where the records are (site_records.SiteSettings)
    policy.toml         the owner's: what is allowed at most (privacy.policy)
    approval.toml       who has signed for that, the plan and the federation (deployment.approval)
    federation.toml     the run it takes part in
    plan.json           what it trains
    ledger.jsonl        what it has promised and spent, unless site.toml says otherwise
    ledger.jsonl.seen   entries that it had: one that lacks any does not open
    (privacy.ledger.rollback_guard)
    site.db             its last replies, and what it remembers (deployment.store)
    held-out.key        by which records are held out for evaluations (deployment.site_evaluation)
    run/                the final model, once there is one (deployment.final_model)

Nothing a message says can name a file. A site charges at most what it reserved on its own terms,
which follow from its own copies of the plan and the federation. Before it charges, its ledger holds
what the server has seen of it, its owner's policy as it is then allows the run, and there is room
on the disk for what follows. Where that was charged and could not be written, the site stops.
"""

import logging
import re
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from torch import Tensor

from fedpact.algorithms.wrappers.compression import whole
from fedpact.algorithms.wrappers.released_scales import CONSTANTS, ColumnRecords
from fedpact.client import Client
from fedpact.common.errors import (
    DataError,
    FedpactError,
    InputError,
    LedgerError,
    PlanError,
    PolicyRefused,
)
from fedpact.common.files import remove_left
from fedpact.common.messages import (
    EVALUATION,
    FINAL,
    MOST_VECTORS,
    READY,
    Refusal,
    Reply,
    State,
    Step,
    Task,
    Vectors,
    from_bytes,
    to_bytes,
)
from fedpact.common.params import FlatModel, all_finite
from fedpact.common.randomness.secure import SecureDraws
from fedpact.common.randomness.seeded import SeededDraws
from fedpact.common.run_folder import RUN
from fedpact.deployment.approval import check_approved
from fedpact.deployment.final_model import FinalModel, describe_ending, read_ending
from fedpact.deployment.secure import masker_of
from fedpact.deployment.site_evaluation import Cost, Examiner, Progress
from fedpact.deployment.site_records import SiteFiles, own_records
from fedpact.deployment.store import STORE_FILE, LastReply, RunMemory, Store, room
from fedpact.per_sample.layout import PLACEMENTS
from fedpact.plan import Plan
from fedpact.privacy.ledger.hash_chain import read_entries
from fedpact.privacy.ledger.ledger import Ledger
from fedpact.privacy.ledger.rollback_guard import RollbackGuard, is_place
from fedpact.privacy.oracle import Charge, Oracle, PrivateOracle, Records
from fedpact.privacy.policy import Policy, sum_reservations
from fedpact.privacy.terms import check_grid
from fedpact.simulation.machine import device_of
from fedpact.simulation.workshop import Worker

_ANSWERED = re.compile(rb"round \d+: (replied|answered)")
# What the algorithm remembers is written in one transaction with a reply.
_LEFT_BEHIND = ("reply", "evaluation", "opened")


def check_left_behind(directory: Path, store: Store, ledger: Path, promised: bool) -> None:
    """Raise LedgerError where a site has taken part, and its ledger knows nothing of it.

    promised: whether the ledger has a reservation. Whoever takes part has reserved before, so of
    what a site leaves in its directory nothing can be older than its ledger.
    """
    if promised:
        return
    log = directory / "log.txt"
    found = [f"{name!r} in {STORE_FILE}" for name in _LEFT_BEHIND if store.read(name) is not None]
    if (directory / "flower" / "node").exists():
        found.append("flower/node")
    if log.exists() and _ANSWERED.search(log.read_bytes()):
        found.append(log.name)
    if found:
        raise LedgerError(
            f"ledger {ledger} is missing or holds no reservation, and {', '.join(found)} in "
            f"{directory} say that this site has released before: put the ledger back as it was "
            "after the last release; without it, treat the records' budget as spent"
        )


def has_reserved(ledger: Path, run: str) -> bool:
    """Whether a ledger's file has a reservation for a run. Raises LedgerError: it is damaged."""
    entries = read_entries(ledger) if ledger.exists() else []
    return any(entry["kind"] == "reserve" and entry["run"] == run for entry in entries)


_log = logging.getLogger("fedpact.site")

_MOST_ATTEMPTS = 1000


class Questions:
    """Checks tasks of a site. w: the model before the first round [d]. sites: the names of all.

    A server's mistake, or lie, ends here, before anything is charged, computed or remembered: a
    task of round 10^12 would make every later one stale, a τ of a million would spend the budget at
    once.
    """

    def __init__(self, plan: Plan, w: Tensor, site: str, sites: tuple[str, ...]) -> None:
        told = plan.method.task(plan.method.init(w))
        self._vectors = {name: (v.shape, v.dtype) for name, v in told.vectors.items()}
        self._numbers, self._rounds = plan.method.facts.task_numbers, plan.rounds
        self._site, self._participants = site, plan.participants(sites)
        self._always = frozenset(told.numbers)
        self._first = 0 if plan.method.facts.opens_run else 1
        model = {name: self._vectors[name] for name in ("w", CONSTANTS) if name in told.vectors}
        # Of questions that train nothing; None: the plan has no such question.
        self._others = {EVALUATION: model if plan.evaluation_terms else None, FINAL: model}
        self._told: dict[int, Vectors] = {0: told.vectors}

    def in_full(self, task: Task) -> tuple[Task | None, str, str]:
        """Return a task that may be carried out, in full; or None, a refusal's code, and why.

        A task may tell changes to what was told in the round before
        (algorithms.wrappers.compression), which is known
        as long as this object lives, and before the first one follows from the plan; the code is
        "model" where it is not known.
        """
        if task.algorithm in self._others:
            # Told in full, and nothing that a later task goes on from.
            wrong = self.fault(task)
            return (task, "", "") if wrong is None else (None, *wrong)
        base = self._told.get(task.round - 1)
        try:
            full = whole(task, base)
        except InputError as error:
            return None, "task", str(error)
        if full is None:
            text = f"it tells changes to a model of round {task.round - 1} that is not known here"
            return None, "model", text
        wrong = self.fault(full)
        if wrong is not None:
            return None, *wrong
        if full.round >= max(self._told, default=0):
            # The round before stays: the same question may come again.
            before = {} if base is None else {full.round - 1: base}
            self._told = {full.round: full.vectors, **before}
        return full, "", ""

    def fault(self, task: Task) -> tuple[str, str] | None:
        """Return a refusal's code, and what is wrong with a task in words; None if nothing is.

        Both follow from the task and the plan alone. The code is "budget" for a round beyond the
        plan's, for which nothing is reserved, and "task" for all else.
        """
        if task.round > self._rounds:
            return "budget", f"its round is {task.round}: the site reserved {self._rounds} rounds"
        wrong = self._wrong(task)
        return None if wrong is None else ("task", wrong)

    def _wrong(self, task: Task) -> str | None:
        other = task.algorithm in self._others
        vectors, numbers = self._vectors, self._numbers
        if other:
            vectors, numbers = self._others[task.algorithm], {}
        if vectors is None:
            return "it asks for an evaluation: expected none, as the plan has none"
        for name, value, least, most in (
            ("round", task.round, self._first, self._rounds),
            ("included", task.included, -1, task.round - (task.algorithm not in self._others)),
            ("attempt", task.attempt, 0, _MOST_ATTEMPTS),
        ):
            if not least <= value <= most:
                return f"its {name} is {value}: expected an integer from {least} to {most}"
        if not (other or self._site in (drawn := self._participants.of(task.round))):
            return f"round {task.round} is drawn to be of {_few(drawn)}: expected one of this site"
        found = {name: (v.shape, v.dtype) for name, v in task.vectors.items()}
        if found != vectors:
            return f"its vectors are {_few(found)}: expected {_few(vectors)}"
        for name, value in task.numbers.items():
            expected = numbers.get(name)
            if expected is None:
                return f"it has a number {name!r}: expected none but {_few(numbers)}"
            if not expected.holds(value):
                return f"its number {name!r} is {value!r}: expected {expected}"
        for name in sorted((frozenset() if other else self._always) - task.numbers.keys()):
            return f"it has no number {name!r}, which every task of this plan has"
        if not all(map(all_finite, task.vectors.values())):
            return "its vectors hold NaN or infinity: expected finite numbers"
        return None


def _few(names: object) -> str:
    """A text of at most a line, whatever a stranger has sent."""
    text = str(names)
    return text if len(text) <= 200 else text[:200] + " ..."


class Site:
    """An open site; one process at a time holds it, by its ledger's lock.

    Opening reserves the run's events in the ledger, if the policy allows them. stopped: why it
    answers nothing more, "" where it does. agreed: see Federation.agreed.
    Raises FedpactError of some kind for whatever does not fit; then nothing is promised.
    """

    def __init__(self, directory: Path) -> None:
        self.files, self.stopped = SiteFiles.read(directory), ""
        self.settings, self.federation = self.files.settings, self.files.federation
        self.plan, self._terms = self.files.plan, self.files.terms
        self.name, self.run = self.settings.name, self.federation.run
        self.agreed = self.federation.agreed(self.plan)
        self._store = Store(directory)
        self._masker = masker_of(self.files, self._store)
        check_approved(directory)
        check_grid([self._terms])
        self._device = device_of(self.settings.device, self.plan.run.precision)
        workshop = self.files.workshop
        self._bench = workshop.bench(check=True)
        self.placement = workshop.placement(self._bench.private, self._terms.batch_size)
        _log.info("%s: %s", self.name, PLACEMENTS[self.placement])
        whose = self.name, self.federation.names
        self._questions = Questions(self.plan, FlatModel(workshop.module()).vector, *whose)
        path = self.files.ledger
        self._examiner = Examiner(self.files, self._store)
        self._records = ColumnRecords(self._load())
        self._test = self.federation.seeds == "test"
        self._secure = SecureDraws()
        self._last = LastReply(self._store, "reply")
        if not (path.exists() and path.stat().st_size):
            check_left_behind(directory, self._store, path, promised=False)
        self._witness = RollbackGuard(path)
        self.ledger = Ledger(path, self.settings.data_set, hypothetical=self._test)
        try:
            self._witness.check(self.ledger, self._last.ledger)
            self._witness.check(self.ledger, self._examiner.last.ledger)
            check_left_behind(directory, self._store, path, promised=bool(self.ledger.runs))
            # Room that no process holds any more: the ledger's lock is this one's.
            remove_left(self._store.path)
            # It reads what it remembers: what cannot be read ends it before it promises.
            self._client = Client[Worker](
                self.name,
                self._terms.size,
                self.plan.method,
                self._oracle,
                self.ledger,
                RunMemory(self._store, self.run),
                device=self._device,
                examine=partial(self._examiner.examine, self.ledger),
            )
            self._take_part()
            self.cost = Cost(self.run, self._terms, self.ledger)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let go of the ledger, for another process, and of the store."""
        self.ledger.close()
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def handle(self, task: Task, seen: tuple[int, str] = (0, "")) -> bytes:
        """Return the encoded answer to a task; a repeated question gets the stored reply.

        seen: length and head of this site's ledger as the server has seen it last.
        A refusal's code depends on public quantities only: "run", "ledger", "policy", "task" (one
        that is not of the plan's form), "model" (one that tells changes to a model that this site
        does not have, and is to be told in full), "stale", "budget".
        Under secure aggregation every task that comes by itself is against the policy, but for an
        evaluation, whose noise is the site's own; and an evaluation inside of a step is.
        Raises FedpactError: the site has stopped, or there is no room on its disk.
        """
        objection = self._objection(task, seen)
        if not objection and task.algorithm == FINAL:
            return self._taken_over(task)
        if not objection and task.algorithm == READY:
            return self._without_release(task)
        if objection or (self._masker is not None and task.algorithm != EVALUATION):
            return self._refusal(task, objection or "policy")
        return self._trained(task)

    def handle_step(self, step: Step, seen: tuple[int, str] = (0, "")) -> bytes:
        """Return the encoded answer to a step of secure aggregation; see
        simulation.secure_aggregation.client.Masker.

        A site whose plan has none refuses with "policy". seen, raises: as `handle`.
        """
        objection = self._objection(step, seen)
        if objection or self._masker is None:
            return self._refusal(step, objection or "policy")
        return to_bytes(self._masker.answer(step, self._to_be_masked))

    def _to_be_masked(self, task: Task) -> Reply | Refusal:
        if task.algorithm == EVALUATION:
            return Refusal(task.run, task.round, self.name, "policy")
        return _answer(self._trained(task))

    def _objection(self, question: Task | Step, seen: tuple[int, str]) -> str:
        """Return the code with which any such question is refused, "" for none."""
        if self.stopped:
            raise FedpactError(self.stopped)
        if question.run != self.run:
            return "run"
        if not is_place(*seen):
            raise DataError(f"a question says that this site's ledger had {seen[0]} entries")
        self._witness.hear(self.ledger, *seen, f"the server of run {self.run}")
        try:
            self._witness.check(self.ledger)
            # Read anew: what its owner takes back counts from the next question.
            self._check_policy()
        except (LedgerError, PlanError, PolicyRefused) as error:
            _log.warning("round %d is refused: %s", question.round, error)
            return "ledger" if isinstance(error, LedgerError) else "policy"
        return ""

    def _without_release(self, task: Task) -> bytes:
        about = task.run, task.round, self.name, self._terms.size
        return to_bytes(Reply(*about, {}, {}, self.ledger.head, self.ledger.length))

    def _taken_over(self, task: Task) -> bytes:
        """Keep the run's final model; nothing is charged, and nothing told of a record.

        What it does on the records that are held out is kept for the owner.
        """
        wrong = self._questions.fault(task)
        if wrong is not None:
            _log.warning("the final model is refused: %s", wrong[1])
            return self._refusal(task, wrong[0])
        # How long it went may have depended on what it released: what holds is what was reserved.
        early = self.plan.budget.early and task.round < self.plan.rounds
        spent = self.cost.most if early else self.cost.epsilon
        FinalModel(self.files, self._store).keep(task, spent, self.cost.delta)
        self._examiner.note(task, self._client.read_memory(task), self._bench)
        _log.info("%s", self.ending)
        return self._without_release(task)

    def _trained(self, task: Task) -> bytes:
        if task.run != self.run:
            return self._refusal(task, "run")
        full, code, text = self._questions.in_full(task)
        if full is None:
            _log.warning("round %d: the server's task is refused: %s", task.round, text)
            return self._refusal(task, code)
        task = full
        last = self._last_of(task)
        stored = last.answer_to(task)
        if stored is not None:
            return stored
        if last.is_newer_than(task):
            return self._refusal(task, "stale")
        shared = self._terms.shares_noise and task.algorithm != EVALUATION
        if shared and self.ledger.is_charged(self.run, task.round, task.attempt):
            # Two sums of one attempt would differ by this site's shares alone.
            return self._refusal(task, "attempt")
        before = self.ledger.length
        try:
            with room(task, self._store, self._witness.path, self.ledger.path):
                return self._charged(task)
        except Exception as error:  # whatever it is: what was charged has no reply
            if self.ledger.length > before:
                self.stopped = (
                    f"round {task.round} was charged and its reply could not be kept ({error}): "
                    "the site answers nothing more, as each round would be charged in vain; make "
                    "room on the disk, or mend it, and start the site again"
                )
            self._client.reload_memory()
            raise

    def _charged(self, task: Task) -> bytes:
        """Return the answer, once it is kept together with what the algorithm remembers."""
        with self._store.transaction():
            answer = self._client.handle(task, self._bench)
            block = to_bytes(answer)
            if isinstance(answer, Reply):
                self._last_of(task).keep(task, block)
                self._examiner.note(task, self._client.read_memory(task), self._bench)
        if isinstance(answer, Reply):
            self._last_of(task).note_kept(task, block)
            self._witness.keep(answer.ledger_length, answer.ledger_head, "this site")
        return block

    def _last_of(self, task: Task) -> LastReply:
        return self._examiner.last if task.algorithm == EVALUATION else self._last

    @property
    def ending(self) -> str | None:
        """What to tell of the run's end, once its final model is here; None before."""
        found = read_ending(self.files.directory, self.run)
        if found is None:
            return None
        return describe_ending(self.run, self.plan, found, self.files.directory / RUN)

    @property
    def most_vectors(self) -> int:
        """How many vectors a message may have: of secure aggregation, a few for each site."""
        return MOST_VECTORS + 4 * len(self.federation.sites)

    def note(self, block: bytes, seconds: float) -> None:
        """Count an answer that took so long, for the site's owner."""
        Progress.count(self._store, self.run, from_bytes(block, self.most_vectors), seconds)

    def _refusal(self, question: Task | Step, code: str) -> bytes:
        return to_bytes(Refusal(question.run, question.round, self.name, code))

    def _take_part(self) -> None:
        """Reserve the run, if the policy allows it."""
        self._check_policy()
        terms = self._terms
        promised = terms.history(terms.steps)
        self.ledger.reserve(self.run, terms.budget, promised, terms.shared, unit=terms.protects)
        self.ledger.note_placement(self.run, self.placement, self.plan.run.precision)
        self._examiner.reserve(self.ledger, self.run)
        if self._masker is not None:
            self._masker.begin(self.run, charged=bool(self.ledger.spent(self.run)))
        self._witness.keep(self.ledger.length, self.ledger.head, "this site")

    def _check_policy(self) -> None:
        """Raise PlanError or PolicyRefused unless policy.toml, as it is now, allows this run."""
        policy = Policy.read(self.files.directory / "policy.toml")
        others = sum_reservations(self.ledger, self.run, policy)
        once = self._examiner.form.once
        policy.check_run(self.plan.algorithm, self._terms, *others, evaluation=once)

    def _oracle(self, task: Task, memory: State, bench: Worker) -> Oracle:
        test = SeededDraws(*self.plan.seeds(self.name, task.round)) if self._test else None
        asked = task.digest + memory.digest
        charge = Charge(self.ledger, self.run, task.round, asked, task.attempt)
        left = partial(charge.steps_left, self._terms)
        draws, terms = test or self._secure, self._terms.at(task.round)
        return PrivateOracle(
            self._records(task), bench.private, terms, draws, charge, left, placement=self.placement
        )

    def _load(self) -> Records:
        bench = self._bench if self._device.type == "cpu" else None
        own = own_records(self.files, bench)
        if not has_reserved(self.files.ledger, self.run):
            # From the first promise on no wrong record stops it, as that would tell of it.
            own.check(self.settings)
        held = self._examiner.split(own)
        self._examiner.take(own.raw[held], own.part(held).to(self._device))
        return own.part(~held).to(self._device)


def answer(site: Site, block: bytes, seen: tuple[int, str] = (0, "")) -> tuple[bytes, str]:
    """Return a site's answer to an encoded question, and what to write into the site's own log.

    seen: see Site.handle; as the server signed it with the question.
    Whatever goes wrong inside leaves the site as a refusal with the code "error" and no word more.
    """
    run, number = "", 0
    try:
        question = from_bytes(block, site.most_vectors)
        if not isinstance(question, Task | Step):
            raise DataError(f"a {type(question).__name__} came where a question is expected")
        run, number = question.run, question.round
        if isinstance(question, Task):
            # Whoever has "replied" has released (check_left_behind).
            done = "is ready" if question.algorithm == READY else "replied"
            encoded = site.handle(question, seen)
        else:
            encoded, done = site.handle_step(question, seen), f"answered {question.step!r}"
        message = from_bytes(encoded, site.most_vectors)
        what = f"refused: {message.code}" if isinstance(message, Refusal) else done
        return encoded, f"round {number}: {what}; {site.cost.describe()}"
    except Exception as error:  # the text may speak of records: it stays here
        told = f"round {number}: {type(error).__name__}: {error}"
        return to_bytes(Refusal(run, number, site.name, "error")), told


def _answer(block: bytes) -> Reply | Refusal:
    """Decode what the site itself has encoded."""
    message = from_bytes(block)
    if not isinstance(message, Reply | Refusal):
        raise DataError(f"a {type(message).__name__} was found where the site's answer should be")
    return message
