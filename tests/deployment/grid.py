"""Flower's network in memory, and real sites behind it, for tests of what goes over it."""

import shutil
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
import torch
from flwr.app import Message
from flwr.supercore.task_identity import TaskIdentity

from fedpact.common.messages import FREE, READY, Task, from_bytes, to_bytes
from fedpact.common.run_folder import Folder
from fedpact.deployment.flower import flower_records
from fedpact.deployment.flower.server_process import coordinate
from fedpact.deployment.flower.site_process import respond
from fedpact.deployment.server import Coordinator
from fedpact.deployment.site import Site
from fedpact.deployment.store import Store, read_store
from fedpact.plan import Plan
from fedpact.privacy.ledger.receipt import receipt
from fedpact.simulation.secure_aggregation import keys

NAMES = ("site-00", "site-01", "site-02")

SECURE = {"secure_aggregation": {"threshold": 2}}

PATIENCE = {"round_seconds": 0.6, "resend_seconds": 0.15, "join_seconds": 0.2, "retries": 1}

FLOATS = {"compression": {"kind": "none"}}
"""Of a plan whose messages hold the numbers as they are, to be compared and forged."""


def content(message):
    """What a message of Flower's holds."""
    return from_bytes(flower_records.from_record(message.content)[0])


class Node:
    """One site behind the network. `behave(message, answer)` returns what arrives, if anything."""

    def __init__(self, number, directory):
        self.number, self.directory = number, directory
        self.site = Site(directory)
        self.key = keys.read_private_key(directory / "site.key")
        self.here, self.behave, self.heard = True, lambda _, answer: answer(), []
        self.hangs, self.since, self.said = False, "first", []
        self.handed = 0

    @property
    def asked(self):
        """The last question."""
        return from_bytes(self.heard[-1])

    def is_stuck_at(self, message):
        """A site that hangs does so in its rounds."""
        return self.hangs and getattr(content(message), "algorithm", "") != READY

    def hear(self, message):
        question = content(message)
        if getattr(question, "algorithm", "") in FREE:
            # Before and after a run: tests are of what is between.
            self.handed += question.algorithm != READY
            return respond(self.site, self.key, message)
        self.heard.append(flower_records.from_record(message.content)[0])
        return self.behave(message, lambda: self.answer(message))

    def answer(self, message):
        answer = respond(self.site, self.key, message)
        self.said.append(flower_records.from_record(answer.content)[0])
        return answer

    def forge(self, message, block, key=None, name=None):
        signature = keys.sign(key or self.key, f"reply of {name or self.site.name}", block)
        return Message(flower_records.to_record(block, signature), reply_to=message)

    def change(self, message, answer, **changes):
        """The site's own answer with other fields, signed by it."""
        reply = content(answer())
        return self.forge(message, to_bytes(type(reply)(**{**vars(reply), **changes})))

    def restart(self, directory=None):
        """Begin a new process, in another directory if one is given."""
        self.site.close()
        self.directory = directory or self.directory
        self.site = Site(self.directory)

    def spend(self, *rounds):
        """Charge for rounds whose replies are lost."""
        self.site.take_part()
        for number in rounds:
            task = Task(self.site.run, number, "fedavg", {"w": torch.zeros(650)}, {})
            self.site._client.handle(task, self.site._bench)


class Clock:
    """Time that passes where the transport waits and nowhere else: a busy machine changes nothing.

    Put it in the place of the transport's `time`.
    """

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now

    perf_counter = monotonic

    def sleep(self, seconds):
        self.now += seconds


class Grid:
    """Flower's Grid in memory; a message is answered when it is pulled."""

    def __init__(self, nodes):
        self.nodes, self.waiting, self.count = {node.number: node for node in nodes}, {}, 0

    def get_nodes(self):
        found = []
        for node in self.nodes.values():
            line = (node.directory / "site.pub").read_text()
            pem = keys.public_key(line).public_bytes(
                keys.serialization.Encoding.PEM,
                keys.serialization.PublicFormat.SubjectPublicKeyInfo,
            )
            if node.here:
                found.append(
                    SimpleNamespace(
                        node_id=node.number, public_key=pem, last_activated_at=node.since
                    )
                )
        return found

    def push_messages(self, messages):
        numbers = []
        for message in messages:
            self.count += 1
            message.metadata.__dict__["_message_id"] = str(self.count)
            self.waiting[str(self.count)] = message
            numbers.append(str(self.count))
        return numbers

    def pull_messages(self, numbers):
        replies = []
        for number in list(numbers):
            message = self.waiting.get(number)
            if message is None or self.nodes[message.metadata.dst_node_id].is_stuck_at(message):
                continue
            TaskIdentity.node_id = message.metadata.dst_node_id
            reply = self.nodes[message.metadata.dst_node_id].hear(message)
            TaskIdentity.node_id = 1
            # None is lost; whoever is asked again gets a new message.
            del self.waiting[number]
            if reply is not None:
                replies.append(reply)
        return replies


def stored(directory, name="reply"):
    """What a site keeps under a name, None if nothing."""
    return read_store(directory, name)


def forget(directory, *names):
    """Have a site lose what it keeps under these names."""
    with closing(Store(directory)) as store:
        for name in names:
            store.remove(name)


def read_from(table, *sites):
    """Have these sites read their records from a table, as their owners do."""
    for site in sites:
        path = site / "site.toml"
        path.write_text(path.read_text().replace("/path/to/records.csv", str(table)))


def charged(node):
    return events_in(node.directory / "ledger.jsonl")


def events_in(ledger):
    """How many events a ledger's runs were charged, whether or not it has been put back."""
    with TemporaryDirectory() as alone:
        runs = receipt(Path(shutil.copy(ledger, alone)))["runs"]
    return sum(event["spent"] for run in runs.values() for event in run["events"])


class Run:
    """A deployment over the network in memory: calling it carries it out, and returns its records.

    nodes: its sites, by name. records, summary: of the last call, the records also of one that
    raised.
    """

    def __init__(self, directory):
        sites = sorted((directory / "sites").iterdir())
        self.directory = directory
        self.nodes = [Node(10 + i, site) for i, site in enumerate(sites)]
        self.records, self.summary = [], None

    def __call__(self, grid=Grid, on_round=lambda record: None):
        self.records = []

        def note(record):
            self.records.append(record)
            on_round(record)

        self.summary = coordinate(self.coordinator, grid(self.nodes), note)
        return self.records

    @property
    def coordinator(self):
        return Coordinator(self.directory / "server")

    def plan(self, **asked):
        """The sites' plan, of records that were asked for in these tables."""
        return Plan.parse({**self.nodes[0].site.plan.model_dump(mode="json"), **asked})

    def refused(self):
        """Carry it out, and return who was refused in each round, and why."""
        return [record.refused for record in self()[1:]]


def allow(directory):
    """Each owner says that it relies on the others: takes the lines out of their comment."""
    for path in sorted((directory / "sites").glob("*/policy.toml")):
        text = path.read_text()
        assert "# honest = 2" in text
        for name in ("honest", "epsilon_alone_per_run", "epsilon_alone_ever"):
            text = text.replace(f"# {name} =", f"{name} =")
        path.write_text(text)


def killed_before(run, number, monkeypatch):
    """Carry a run out on a server that dies when a round is to be committed."""
    commit, died = Folder.commit, []

    def die(folder, checkpoint, record):
        if record.round == number and not died:
            died.append(number)
            raise KeyboardInterrupt
        commit(folder, checkpoint, record)

    monkeypatch.setattr(Folder, "commit", die)
    with pytest.raises(KeyboardInterrupt):
        run()


def bound_on_spent(site):
    """The bound on ε of what a site has charged, as a server has it that asked as often."""
    return site._terms.guarantee_after(site.ledger.spent(site.run)).epsilon
