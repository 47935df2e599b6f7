"""A site on its own machine: from its directory to an answer. Charge, compute, commit, reply.

    site.toml           the owner's: where the records are (SiteSettings)
    policy.toml         the owner's: what is allowed at most (privacy.policy)
    federation.toml     the run it takes part in
    plan.json           what it trains
    ledger.jsonl        what it has promised and spent, unless site.toml says otherwise
    memory.safetensors  what its algorithm remembers, beside pending-memory.safetensors
    reply.bin           its last reply, for when it is asked again
    opened.json         of which sites it has helped to open a sum last, under secure aggregation

Nothing a message says can name a file. A site charges at most what it reserved on its own terms,
which follow from its own copies of the plan and the federation.
"""

import json
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from pydantic import BaseModel, ConfigDict, Field

from fedpact.client import Client
from fedpact.data import datasets
from fedpact.engines.entrance import usable
from fedpact.engines.federation import Federation, parse_toml, read_plan
from fedpact.engines.inprocess import Bench
from fedpact.engines.process import device_of
from fedpact.engines.secure.deployed import masker_of
from fedpact.errors import DataError, PlanError
from fedpact.files import understood, write_whole
from fedpact.messages import Refusal, Reply, State, Step, Task, from_bytes, to_bytes
from fedpact.privacy.ledger import Ledger
from fedpact.privacy.noise import SeededDraws
from fedpact.privacy.oracle import Charge, Oracle, PrivateOracle, Records
from fedpact.privacy.policy import Policy
from fedpact.privacy.secure import SecureDraws
from fedpact.privacy.terms import ADJACENCY


class SiteSettings(BaseModel):
    """The owner's settings; paths are relative to the site's directory.

    name: as in federation.toml. records: a .npz, .csv or .parquet file. label: its column, of a
    table. data_set: what the ledger is called, one for each set of records and for its whole life.
    device: where it computes, "cpu" or "cuda". ledger: where it lies, on a local disk. port: a free
    one of this machine, for the site's own processes to talk to each other.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str
    records: str
    label: str | None = None
    data_set: str
    device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:\d+)?)$")
    ledger: str = "ledger.jsonl"
    port: int = Field(gt=0, lt=65536)


class Site:
    """An open site; one process at a time holds it, by its ledger's lock.

    Opening reserves the run's events in the ledger, if the policy allows them.
    Raises FedpactError of some kind for whatever does not fit; then nothing is promised.
    """

    def __init__(self, directory: Path) -> None:
        self.settings = parse_toml(SiteSettings, directory / "site.toml")
        self.federation = Federation.read(directory / "federation.toml")
        self.plan = read_plan(directory / "plan.json")
        self.name, self.run = self.settings.name, self.federation.run
        if self.name not in self.federation.sites:
            raise PlanError(
                f"site.toml names {self.name!r}: federation.toml has {self.federation.names}"
            )
        self._masker = masker_of(directory, self.name, self.federation, self.plan)
        self._policy = Policy.read(directory / "policy.toml")
        self._terms = self.federation.terms(self.plan)[self.name]
        self._device = device_of(self.settings.device)
        workshop = replace(self.federation.workshop(self.plan), device=self.settings.device)
        self._bench = workshop.bench(check=True)
        self._records = self._load(directory / self.settings.records)
        self._test = self.federation.seeds == "test"
        self._secure = SecureDraws()
        self.ledger = Ledger(
            directory / self.settings.ledger, self.settings.data_set, hypothetical=self._test
        )
        try:
            # What cannot be read ends it before anything is promised.
            self._last = _LastReply(directory / "reply.bin")
            self._client = Client[Bench](
                self.name,
                self._terms.size,
                self.plan.method,
                self._oracle,
                self.ledger,
                directory / "memory.safetensors",
                self._policy,
                self._device,
            )
            self._take_part()
        except BaseException:
            self.ledger.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.ledger.close()

    def handle(self, task: Task) -> bytes:
        """Return the encoded answer to a task; a repeated question gets the stored reply.

        A refusal's code depends on public quantities only: "run", "stale", "budget", "policy".
        Under secure aggregation every task that comes by itself is against the policy.
        """
        if self._masker is not None:
            return self._refusal(task, "policy")
        return self._trained(task)

    def handle_step(self, step: Step) -> bytes:
        """Return the encoded answer to a step of secure aggregation; see secure.site.Masker.

        A site whose plan has none refuses with "policy".
        """
        if step.run != self.run:
            return self._refusal(step, "run")
        if self._masker is None:
            return self._refusal(step, "policy")
        return to_bytes(self._masker.answer(step, lambda task: _answer(self._trained(task))))

    def _trained(self, task: Task) -> bytes:
        if task.run != self.run:
            return self._refusal(task, "run")
        stored = self._last.answer_to(task)
        if stored is not None:
            return stored
        if self._last.is_newer_than(task):
            return self._refusal(task, "stale")
        answer = self._client.handle(task, self._bench)
        block = to_bytes(answer)
        if isinstance(answer, Reply):
            self._last.keep(task, block)
        return block

    def epsilon(self) -> float:
        """Return ε spent by this run so far, at the δ of its terms, add/remove one record."""
        return self._terms.epsilon_after(self.ledger.spent(self.run))

    def spent(self) -> str:
        """Return `epsilon` in words, to the last digit: rounded down it would be no bound."""
        return (
            f"spent ε <= {self.epsilon()!r} at δ = {self._terms.budget.delta!r}, {ADJACENCY}, "
            f"accountant {self.plan.privacy.accountant}"
        )

    def _refusal(self, question: Task | Step, code: str) -> bytes:
        return to_bytes(Refusal(question.run, question.round, self.name, code))

    def _take_part(self) -> None:
        if not self.ledger.has_reserved(self.run):
            self._policy.check_run(self.plan.algorithm, self._terms, self.ledger.total())
        terms = self._terms
        self.ledger.reserve(self.run, terms.budget, terms.history(terms.steps))

    def _oracle(self, task: Task, memory: State, bench: Bench) -> Oracle:
        test = SeededDraws(self.plan.seed, self.name, task.round) if self._test else None
        charge = Charge(
            self.ledger, self.run, task.round, task.digest + memory.digest, task.attempt
        )
        left = partial(charge.steps_left, self._terms)
        draws = test or self._secure
        return PrivateOracle(self._records, bench.private, self._terms, draws, charge, left)

    def _load(self, path: Path) -> Records:
        federation = self.federation
        data = datasets.load(str(path), self.settings.label, classes=federation.classes)
        found = tuple(data.x.shape[1:]), str(data.x.dtype).removeprefix("torch.")
        if found != (federation.shape, federation.values):
            raise DataError(
                f"a record of {path} has shape {found[0]} and type {found[1]}: federation.toml has "
                f"{federation.shape} and {federation.values}; bring the file into that form"
            )
        records = Records(data.x.to(self._device), data.y.to(self._device))
        return usable(records, self._bench.private, str(path))


_LOST = (
    "move it away. If the server asks for that round once more, it is charged once more, and never "
    "beyond the budget"
)


class _LastReply:
    """The last reply and the question that it answers, in one file, written before it is sent."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._key: _Question = "", 0, 0, ""
        self._block = b""
        with suppress(FileNotFoundError), understood(path, _LOST):
            head, _, self._block = path.read_bytes().partition(b"\n")
            run, number, attempt, digest = json.loads(head)
            self._key = str(run), int(number), int(attempt), str(digest)
            _answer(self._block)

    def answer_to(self, task: Task) -> bytes | None:
        return self._block if self._key == _key(task) else None

    def is_newer_than(self, task: Task) -> bool:
        run, number, attempt, _ = self._key
        return run == task.run and (number, attempt) >= (task.round, task.attempt)

    def keep(self, task: Task, block: bytes) -> None:
        key = _key(task)
        write_whole(self._path, json.dumps(key).encode() + b"\n" + block)
        self._key, self._block = key, block


def _key(task: Task) -> "_Question":
    return task.run, task.round, task.attempt, task.digest


_Question = tuple[str, int, int, str]


def decode_task(block: bytes) -> Task:
    """Decode a task. Raises InputError: another kind of message, or none."""
    message = from_bytes(block)
    if not isinstance(message, Task):
        raise DataError(f"a {type(message).__name__} came where a task is expected")
    return message


def answer(site: Site, block: bytes) -> tuple[bytes, str]:
    """Return a site's answer to an encoded question, and what to write into the site's own log.

    Whatever goes wrong inside leaves the site as a refusal with the code "error" and no word more.
    """
    run, number = "", 0
    try:
        question = from_bytes(block)
        if not isinstance(question, Task | Step):
            raise DataError(f"a {type(question).__name__} came where a question is expected")
        run, number = question.run, question.round
        if isinstance(question, Task):
            encoded, done = site.handle(question), "replied"
        else:
            encoded, done = site.handle_step(question), f"answered {question.step!r}"
        message = from_bytes(encoded)
        what = f"refused: {message.code}" if isinstance(message, Refusal) else done
        return encoded, f"round {number}: {what}; {site.spent()}"
    except Exception as error:  # the text may speak of records: it stays here
        told = f"round {number}: {type(error).__name__}: {error}"
        return to_bytes(Refusal(run, number, site.name, "error")), told


def _answer(block: bytes) -> Reply | Refusal:
    """Decode what the site itself has encoded."""
    message = from_bytes(block)
    if not isinstance(message, Reply | Refusal):
        raise DataError(f"a {type(message).__name__} was found where the site's answer should be")
    return message
