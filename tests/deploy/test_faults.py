"""SIGKILL of real processes in mid-round: the run ends, nobody over budget, no round lost."""

import os
import random
import signal
import time

import pytest

from fedpact.deploy import local
from fedpact.privacy.receipt import receipt

SECONDS = 240  # far beyond what it takes: machines are shared
PATIENCE = {"round_seconds": 90, "resend_seconds": 6, "join_seconds": 90, "least_replies": 2}


def wait_for(condition, seconds=SECONDS):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


class Federation:
    """A deployment of three sites under attack. lines: what was committed when last looked at."""

    def __init__(self, directory):
        self.directory, self.lines = directory, []
        self.numbers = local.start(directory)

    def committed(self):
        """The records on the disk; every earlier one has to be among them, unchanged."""
        path = self.directory / "server" / "run" / "rounds.jsonl"
        text = path.read_text() if path.exists() else ""
        lines = text[: text.rfind("\n") + 1].splitlines()
        # A record counts once the state does: the last line may still be taken back.
        state = (self.directory / "server" / "run" / "state.safetensors").exists()
        assert lines[: len(self.lines)] == self.lines
        self.lines = lines[:-1] if state else []
        return len(lines) - 1

    def ended(self):
        return local.look(self.directory)["status"] != "not ended"

    def kill(self, name):
        """End a party as a power cut would: its process, and Flower's, at once."""
        os.killpg(self.numbers[name], signal.SIGKILL)
        wait_for(lambda: not local.look(self.directory)["running"][name])
        self.numbers = local.start(self.directory, name)


def check_ledgers(directory, steps):
    for name in ("site-00", "site-01", "site-02"):
        run = next(iter(receipt(directory / "sites" / name / "ledger.jsonl")["runs"].values()))
        assert run["epsilon_spent"] <= run["epsilon_reserved"] == 2.0
        (event,) = run["events"]
        assert event["spent"] <= event["reserved"] == steps


def survive(make, directory, rounds, victims, seconds=4, spare=0, **plan):
    """Kill the victims one after the other, each at a random instant of a later round.

    seconds: what a round takes, most of it Flower's waiting. spare: rounds set aside for crashes.
    """
    budget = {"spare_rounds": spare}
    make(directory, {"patience": PATIENCE}, rounds=rounds, budget=budget, **plan)
    choose = random.Random(int.from_bytes(os.urandom(4)))
    federation = Federation(directory)
    try:
        for number, name in enumerate(victims, start=1):
            wait_for(lambda number=number: federation.committed() >= number)
            time.sleep(choose.uniform(0, seconds))
            assert not federation.ended(), "the kill came too late to try anything"
            federation.kill(name)
        wait_for(federation.ended)
        assert federation.committed() == rounds
        found = local.look(directory)
        assert found["status"] == "finished"
        check_ledgers(directory, steps=2 * (rounds + spare))
    finally:
        local.stop(directory)
        for path in directory.rglob("log.txt"):
            print(path, path.read_text()[-3000:], sep="\n")


def test_two_sites_and_the_server_are_killed(make, tmp_path):
    survive(make, tmp_path / "d", 5, ["site-01", "server", "site-02"])


@pytest.mark.slow
def test_ten_sites_and_three_servers_are_killed(make, tmp_path):
    names = ["site-00", "site-01", "site-02"]
    victims = [names[i % 3] for i in range(10)]
    for place in (3, 7, 11):
        victims.insert(place, "server")
    survive(make, tmp_path / "d", 18, victims)


@pytest.mark.slow
def test_two_sites_and_two_servers_are_killed_under_secure_aggregation(make, tmp_path):
    """A server that dies after it asked for a sum charges that round anew: twice at most here."""
    victims = ["site-01", "server", "site-02", "server"]
    secure = {"secure_aggregation": {"threshold": 2}}
    survive(make, tmp_path / "d", 5, victims, seconds=14, spare=2, **secure)
