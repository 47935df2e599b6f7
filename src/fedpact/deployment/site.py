"""A site in a deployment: answers each task once, and resumes from its own files.

A site's directory contains

    site.toml           the owner's settings, such as the path of the records (site_records)
    policy.toml         the owner's limits (privacy.policy)
    approval.toml       signatures for policy, plan and federation (deployment.signatures)
    federation.toml     the run and its parties
    plan.json           the plan
    ledger.jsonl        reservations and charges, unless site.toml gives another path
    ledger.jsonl.seen   earlier entries: a ledger without them does not open (RollbackGuard)
    site.db             the last replies, and the algorithm's memory (deployment.store)
    held-out.key        the key that selects held-out records (deployment.site_evaluation)
    run/                the final model (deployment.final_model)

No message can name a file. A site charges at most what it reserved on its own terms, which follow
from its own copies of plan and federation. It charges only if its ledger contains the entry that
the server has seen, its owner's current policy allows the run, and the disk has space for the
reply. A site that cannot store the reply to a charged task stops.
"""

import logging
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Self, cast

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
from fedpact.deployment.final_model import describe_ending, keep, read_ending
from fedpact.deployment.signatures import check_approved
from fedpact.deployment.site_evaluation import Examiner, count_answer
from fedpact.deployment.site_records import SiteFiles, own_records
from fedpact.deployment.store import (
    STORE_FILE,
    LastReply,
    Store,
    StoreSlot,
    read_store,
    room,
)
from fedpact.per_sample.layout import PLACEMENTS
from fedpact.plan import Plan
from fedpact.privacy.ledger.hash_chain import read_entries
from fedpact.privacy.ledger.ledger import Ledger, RollbackGuard, is_place
from fedpact.privacy.oracle import Charge, Oracle, PrivateOracle, Records
from fedpact.privacy.policy import Policy, sum_reservations
from fedpact.privacy.terms import check_grid
from fedpact.simulation.machine import device_of
from fedpact.simulation.secure_aggregation import keys
from fedpact.simulation.secure_aggregation.client import Masker, UnmaskedSums
from fedpact.simulation.secure_aggregation.encoding import check_shares
from fedpact.simulation.secure_aggregation.graph import MaskingGraph
from fedpact.simulation.workshop import Worker

_log = logging.getLogger("fedpact.site")
_MOST_ATTEMPTS = 1000
# The algorithm's memory is written in one transaction with a reply.
_LEFT_BEHIND = ("reply", "evaluation", "opened")


def reserved_runs(ledger: Path) -> set[str]:
    """Return the runs with a reservation in a ledger file. Raises LedgerError: it is damaged."""
    entries = read_entries(ledger) if ledger.exists() else []
    return {entry["run"] for entry in entries if entry["kind"] == "reserve"}


def check_left_behind(directory: Path, ledger: Path) -> None:
    """Raise LedgerError if a site has taken part in a run that its ledger does not contain.

    A site reserves before it answers its first task, so no reply can be older than the ledger.
    """
    found = [name for name in _LEFT_BEHIND if read_store(directory, name) is not None]
    # The ledger last: a site that is open meanwhile reserves before it answers.
    if found and not reserved_runs(ledger):
        raise LedgerError(
            f"ledger {ledger} is missing or has no reservation, but {found} "
            f"in {directory / STORE_FILE} show that this site has released before: restore the "
            "ledger as it was after the last release; without it, treat the records' budget as "
            "spent"
        )


class Unfit(Exception):
    """A task that is refused. code: of the refusal. Its text is for the site's own log."""

    def __init__(self, code: str, why: str) -> None:
        super().__init__(why)
        self.code = code


class TaskChecks:
    """Checks a site's tasks. w: the model before the first round [d]. sites: the names of all.

    longest: the largest number of values in a task.

    It stops a faulty or dishonest server before anything is charged, computed or stored: a task of
    round 10^12 would make all later ones stale, a τ of a million would spend the budget at once.
    """

    def __init__(self, plan: Plan, w: Tensor, site: str, sites: tuple[str, ...]) -> None:
        first = plan.method.task(plan.method.init(w))
        self._vectors = {name: (v.shape, v.dtype) for name, v in first.vectors.items()}
        self._numbers, self._rounds = plan.method.facts.task_numbers, plan.rounds
        self._site, self._participants = site, plan.participants(sites)
        self._always = frozenset(first.numbers)
        self._first = 0 if plan.method.facts.opens_run else 1
        model = {name: self._vectors[name] for name in ("w", CONSTANTS) if name in first.vectors}
        # The vectors of tasks that do not train; None: the plan has no such task.
        self._others = {EVALUATION: model if plan.evaluation_terms else None, FINAL: model}
        self._received: dict[int, Vectors] = {0: first.vectors}
        self.longest = sum(vector.numel() for vector in first.vectors.values())

    def in_full(self, task: Task) -> Task:
        """Return the complete task. Raises Unfit: it may not be carried out.

        A task may contain differences to the previous round's vectors
        (algorithms.wrappers.compression). These are known while this object lives, and before the
        first task they follow from the plan. If they are unknown, the code is "model".
        """
        if task.algorithm in self._others:
            # Always complete, and never the base of a later task.
            self.check(task)
            return task
        base = self._received.get(task.round - 1)
        try:
            full = whole(task, base)
        except InputError as error:
            raise Unfit("task", str(error)) from None
        if full is None:
            raise Unfit("model", f"the model of round {task.round - 1} is unknown here")
        self.check(full)
        if full.round >= max(self._received, default=0):
            # Keep the previous round: the same task may come again.
            before = {} if base is None else {full.round - 1: base}
            self._received = {full.round: full.vectors, **before}
        return full

    def check(self, task: Task) -> None:
        """Raise Unfit for a task's fault, which follows from the task and the plan alone.

        The code is "budget" for a round beyond the plan's, for which nothing is reserved, and
        "task" otherwise.
        """
        if task.round > self._rounds:
            raise Unfit("budget", f"its round is {task.round}: {self._rounds} are reserved")
        if wrong := self._find_fault(task):
            raise Unfit("task", wrong)

    def _find_fault(self, task: Task) -> str | None:
        trains = task.algorithm not in self._others
        vectors = self._vectors if trains else self._others[task.algorithm]
        numbers = self._numbers if trains else {}
        if vectors is None:
            return "it requests an evaluation: expected none, as the plan has none"
        for name, value, least, most in (
            ("round", task.round, self._first, self._rounds),
            ("included", task.included, -1, task.round - trains),
            ("attempt", task.attempt, 0, _MOST_ATTEMPTS),
        ):
            if not least <= value <= most:
                return f"its {name} is {value}: expected an integer from {least} to {most}"
        if trains and self._site not in (drawn := self._participants.of(task.round)):
            return f"round {task.round} is for {_few(drawn)}: expected a round with this site"
        found = {name: (v.shape, v.dtype) for name, v in task.vectors.items()}
        if found != vectors:
            return f"its vectors are {_few(found)}: expected {_few(vectors)}"
        for name, value in task.numbers.items():
            expected = numbers.get(name)
            if expected is None:
                return f"it has a number {name!r}: expected none but {_few(numbers)}"
            if not expected.holds(value):
                return f"its number {name!r} is {value!r}: expected {expected}"
        for name in sorted(self._always - task.numbers.keys()) if trains else ():
            return f"its number {name!r} is missing: expected it in every task of this plan"
        if not all(map(all_finite, task.vectors.values())):
            return "its vectors hold NaN or infinity: expected finite numbers"
        return None


def _few(names: object) -> str:
    text = str(names)
    return text if len(text) <= 200 else text[:200] + " ..."


class Site:
    """An open site, held by one process at a time through its ledger's lock.

    Opening checks that policy and ledger allow the run. Its events are reserved when the first
    task arrives that may release something: a federation that never begins costs no budget.
    stopped: why the site no longer answers, "" if it does. agreed: see Federation.agreed. Raises
    FedpactError if anything does not match; then nothing is reserved.
    """

    def __init__(self, directory: Path) -> None:
        self.files, self.stopped = SiteFiles.read(directory), ""
        self.settings, self.federation = self.files.settings, self.files.federation
        self.plan, self._terms = self.files.plan, self.files.terms
        self.name, self.run = self.settings.name, self.federation.run
        self.agreed = self.federation.agreed(self.plan)
        with ExitStack() as opened:
            self._store = opened.enter_context(closing(Store(directory)))
            self._masker = _masker_of(self.files, self._store)
            check_approved(directory)
            self.files.check_ledger()
            check_grid([self._terms])
            self._device = device_of(self.settings.device, self.plan.run.precision)
            workshop = self.files.workshop
            self._bench = workshop.bench(check=True)
            sizes = self._terms.batch_size, self._terms.opening.batch_size
            self.placement = workshop.placement(self._bench.private, *sizes)
            _log.info("%s: %s", self.name, PLACEMENTS[self.placement])
            whose = self.name, self.federation.names
            self._checks = TaskChecks(self.plan, FlatModel(workshop.module()).vector, *whose)
            path = self.files.ledger
            self._examiner = Examiner(self.files, self._store)
            self._records = ColumnRecords(self._load())
            self._test = self.federation.seeds == "test"
            self._secure = SecureDraws()
            replies = [LastReply(self._store, name) for name in ("reply", "evaluation")]
            check_left_behind(directory, path)
            self._witness = RollbackGuard(path)
            ledger = Ledger(path, self.settings.data_set, hypothetical=self._test)
            self.ledger = opened.enter_context(closing(ledger))
            for reply in replies:
                self._witness.check(self.ledger, reply.ledger)
            # Space reserved by a process that died: this one has the ledger's lock.
            remove_left(self._store.path)
            # This reads the algorithm's memory, and fails on an unreadable one before reserving.
            self._client = Client[Worker](
                self.name,
                self._terms.size,
                self.plan.method,
                self._oracle,
                self.ledger,
                StoreSlot.of_memory(self._store, self.run),
                device=self._device,
                examine=partial(self._examiner.examine, self.ledger),
            )
            self._check_policy()
            self._takes_part = False
            if self.run in self.ledger.runs:
                self.take_part()
            else:
                self._reserve(only_ask=True)
            self._opened = opened.pop_all()

    def close(self) -> None:
        """Close the ledger, so that another process may open it, and the store."""
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def handle(self, question: Task | Step, seen: tuple[int, str] = (0, "")) -> bytes:
        """Return the encoded answer to a question; a repeated task gets the stored reply.

        seen: length and head of this site's ledger as the server saw it last. The code of a
        refusal depends on public quantities only: "run", "ledger", "policy", "task" (not of the
        plan's form), "model" (differences to a model that this site does not have; the server
        sends it in full), "stale", "budget". Under secure aggregation a training task outside a
        step is refused with "policy", and so is an evaluation inside one, as its noise is the
        site's own, and any step without it. Raises FedpactError: the site has stopped, or its disk
        is full.
        """
        objection = self._objection(question, seen)
        final = isinstance(question, Task) and question.algorithm == FINAL
        # The final model releases nothing, so no fault of the ledger keeps it from the site.
        if objection and not (final and objection == "ledger"):
            return self._refusal(question, objection)
        if isinstance(question, Step):
            if self._masker is None:
                return self._refusal(question, "policy")
            self.take_part()
            return to_bytes(self._masker.answer(question, self._to_be_masked))
        if question.algorithm == FINAL:
            return self._take_over(question)
        if question.algorithm == READY:
            return self._without_release(question)
        if self._masker is not None and question.algorithm != EVALUATION:
            return self._refusal(question, "policy")
        return self._train(question)

    def _to_be_masked(self, task: Task) -> Reply | Refusal:
        if task.algorithm == EVALUATION:
            return Refusal(task.run, task.round, self.name, "policy")
        return cast(Reply | Refusal, from_bytes(self._train(task)))

    def _objection(self, question: Task | Step, seen: tuple[int, str]) -> str:
        """Return the code with which any such request is refused; "" if it is not."""
        if self.stopped:
            raise FedpactError(self.stopped)
        if question.run != self.run:
            return "run"
        if not is_place(*seen):
            raise DataError(f"a task says that this site's ledger had {seen[0]} entries")
        self._witness.hear(self.ledger, *seen, f"the server of run {self.run}")
        try:
            self._witness.check(self.ledger)
            # Read again for each task: the owner's changes count from the next one.
            self._check_policy()
        except (LedgerError, PlanError, PolicyRefused) as error:
            _log.warning("round %d is refused: %s", question.round, error)
            return "ledger" if isinstance(error, LedgerError) else "policy"
        return ""

    def _without_release(self, task: Task) -> bytes:
        about = task.run, task.round, self.name, self._terms.size
        return to_bytes(Reply(*about, {}, {}, self.ledger.head, self.ledger.length))

    def _take_over(self, task: Task) -> bytes:
        """Store the run's final model and its exact evaluation for the owner; charge nothing."""
        try:
            self._checks.check(task)
        except Unfit as unfit:
            _log.warning("the final model is refused: %s", unfit)
            return self._refusal(task, unfit.code)
        keep(self.files, self._store, task)
        self._examiner.note(task, self._client.read_memory(task), self._bench)
        _log.info("%s", self.ending)
        return self._without_release(task)

    def _train(self, task: Task) -> bytes:
        if task.run != self.run:
            return self._refusal(task, "run")
        try:
            task = self._checks.in_full(task)
        except Unfit as unfit:
            _log.warning("round %d: the server's task is refused: %s", task.round, unfit)
            return self._refusal(task, unfit.code)
        name = "evaluation" if task.algorithm == EVALUATION else "reply"
        last = LastReply(self._store, name)
        stored = last.answer_to(task)
        if stored is not None:
            return stored
        if last.is_newer_than(task):
            return self._refusal(task, "stale")
        shared = self._terms.shares_noise and task.algorithm != EVALUATION
        if shared and self.ledger.is_charged(self.run, task.round, task.attempt):
            # Two sums of one attempt would differ only by this site's shares.
            return self._refusal(task, "attempt")
        self.take_part()
        before, files = self.ledger.length, (self._store.path, self._witness.path, self.ledger.path)
        try:
            with room(task, *files):
                return self._charge(task, last)
        except Exception as error:  # any error: the charge has no reply
            if self.ledger.length > before:
                self.stopped = (
                    f"round {task.round} was charged but its reply could not be stored ({error}): "
                    "the site stops, as each round would be charged in vain; free space on the "
                    "disk, or repair it, and restart the site"
                )
            self._client.reload_memory()
            raise

    def _charge(self, task: Task, last: LastReply) -> bytes:
        """Return the answer after storing it together with the algorithm's memory."""
        with self._store.transaction():
            answer = self._client.handle(task, self._bench)
            block = to_bytes(answer)
            if isinstance(answer, Reply):
                last.keep(task, block)
                self._examiner.note(task, self._client.read_memory(task), self._bench)
        if isinstance(answer, Reply):
            self._witness.keep(answer.ledger_length, answer.ledger_head, "this site")
        return block

    @property
    def ending(self) -> str | None:
        """A description of the run's end, once the final model is stored; None before."""
        found, folder = read_ending(self.files.directory, self.run), self.files.directory / RUN
        return None if found is None else describe_ending(self.run, self.plan, found, folder)

    @property
    def longest_question(self) -> int:
        """The largest number of values in a task of the plan."""
        return self._checks.longest

    @property
    def most_vectors(self) -> int:
        """The most vectors of a message: with secure aggregation a few per site."""
        return MOST_VECTORS + 4 * len(self.federation.sites)

    def describe_spending(self) -> str:
        """Return how many of the run's reserved events are charged; the ledger has their ε."""
        charged = sum(self.ledger.spent(self.run).values())
        reserved = sum(self._terms.history(self._terms.steps).values())
        return f"{charged} of {reserved} reserved events are charged"

    def note(self, block: bytes, seconds: float) -> None:
        """Count an answer and its seconds in the owner's statistics."""
        said = cast(Reply | Refusal | Step, from_bytes(block, self.most_vectors))
        count_answer(self._store, self.run, said, seconds)

    def _refusal(self, question: Task | Step, code: str) -> bytes:
        return to_bytes(Refusal(question.run, question.round, self.name, code))

    def take_part(self) -> None:
        """Reserve the run, once, before the first answer that may release something."""
        if self._takes_part:
            return
        self._reserve(only_ask=False)
        self.ledger.note_placement(self.run, self.placement, self.plan.run.precision)
        if self._masker is not None:
            self._masker.begin(self.run, charged=bool(self.ledger.spent(self.run)))
        self._witness.keep(self.ledger.length, self.ledger.head, "this site")
        self._takes_part = True

    def _reserve(self, *, only_ask: bool) -> None:
        terms = self._terms
        events, unit = terms.history(terms.steps), terms.protects
        ledger, run = self.ledger, self.run
        ledger.reserve(run, terms.guarantee, events, unit=unit, only_ask=only_ask)
        self._examiner.reserve(ledger, run, only_ask=only_ask)

    def _check_policy(self) -> None:
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
        begun = self.run in reserved_runs(self.files.ledger)
        if not begun:
            # Once the run has begun, no invalid record may stop the site, as that reveals it.
            own.check(self.settings)
        self._examiner.watch(own, begun=begun)
        held = self._examiner.split(own)
        self._examiner.take(own.raw[held], own.part(held).to(self._device))
        return own.part(~held).to(self._device)


def _masker_of(files: SiteFiles, store: Store) -> Masker | None:
    """Return a site's side of secure aggregation; None if the plan has none.

    store: the site's. Raises InputError: settings that do not match.
    """
    federation, plan = files.federation, files.plan
    keys.check_secure(plan, len(federation.sites))
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
        federation.coding(plan),
        UnmaskedSums(StoreSlot(store, "opened")),
    )


def answer(site: Site, block: bytes, seen: tuple[int, str] = (0, "")) -> tuple[bytes, str]:
    """Return a site's answer to an encoded task or step, and a line for the site's own log.

    seen: see Site.handle; signed by the server with the task. Any error leaves the site as a
    refusal with the code "error" and no further details.
    """
    run, number = "", 0
    try:
        question = from_bytes(block, site.most_vectors)
        if not isinstance(question, Task | Step):
            raise DataError(f"a {type(question).__name__} was received: expected a task or step")
        run, number = question.run, question.round
        encoded = site.handle(question, seen)
        message = from_bytes(encoded, site.most_vectors)
        if isinstance(message, Refusal):
            done = f"refused: {message.code}"
        elif isinstance(question, Step):
            done = f"answered {question.step!r}"
        else:
            other = {READY: "is ready", FINAL: "has the final model"}
            other[EVALUATION] = "replied on held-out records"
            done = other.get(question.algorithm, "replied")
        return encoded, f"round {number}: {done}; {site.describe_spending()}"
    except Exception as error:  # its text may depend on records, so it stays here
        told = f"round {number}: {type(error).__name__}: {error}"
        return to_bytes(Refusal(run, number, site.name, "error")), told
