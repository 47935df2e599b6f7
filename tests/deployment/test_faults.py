"""SIGKILL of real processes at any instant: the run ends, nobody over budget, no round lost.

Every wait is for something that happens (see waiting), so that a busy machine makes these tests
slower and not wrong. What is killed, and when, is drawn by chance: what is asserted holds always.
A party that has ended is started again as a supervisor would, by its exit code alone.
"""

import json
import math
import os
import random
import signal
import time
from contextlib import suppress

import pytest
from tests import recounted
from tests.deployment.grid import allow
from tests.waiting import wait_for

from fedpact.deployment import processes
from fedpact.deployment.snapshot import inspect_deployment
from fedpact.privacy.ledger.receipt import receipt

# Far beyond what it takes: rounds are to wait for whoever was killed.
PATIENCE = {"round_seconds": 600, "resend_seconds": 6, "join_seconds": 600}


def child(pid):
    """The number of a process's only child, None where it has none."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as children:
            return next(map(int, children.read().split()), None)
    except OSError:
        return None


def names_of(directory):
    return sorted(path.name for path in (directory / "sites").iterdir())


class Federation:
    """A deployment under attack. lines: what was committed when last looked at."""

    def __init__(self, directory):
        self.directory, self.lines, self.names = directory, [], names_of(directory)
        self.parties = processes.Parties(directory)
        self.numbers = self.parties.start()

    def committed(self):
        """The last committed round, -1 if none; every earlier record is there, unchanged."""
        path = self.directory / "server" / "run" / "rounds.jsonl"
        text = path.read_text() if path.exists() else ""
        lines = text[: text.rfind("\n") + 1].splitlines()
        # A record counts once the state does: the last line may still be taken back.
        state = (self.directory / "server" / "run" / "state.safetensors").exists()
        assert lines[: len(self.lines)] == self.lines
        self.lines = lines[:-1] if state else []
        return len(lines) - 1

    def reached(self, number):
        """Wait for a round to be committed."""
        wait_for(lambda: self.committed() >= number, self.directory)

    def runs(self, name):
        return self.parties.runs(name)

    def kill(self, name, part="both"):
        """Kill a party's process, its child if it has one now, or both at once as a power cut."""
        if not self.runs(name):  # the server of a run that has ended
            self.numbers |= self.parties.start(name)
        number = self.numbers[name]
        victim = (child(number) if part == "child" else None) or number
        print(f"kill {part} of {name}: {victim} of {number}", flush=True)
        with suppress(ProcessLookupError):
            (os.killpg if part == "both" else os.kill)(victim, signal.SIGKILL)
        if victim != number:  # what the child was to compute, the party computes itself
            return
        wait_for(lambda: not self.runs(name), self.directory, pause=0.01)
        # 0: it was over before the signal came. Anything else would wait for a person.
        assert self.parties.exit_code(name) in (0, -signal.SIGKILL)
        self.numbers |= self.parties.start(name)

    def finish(self, rounds):
        """Wait for the end, which nobody helps to come; look at what it is."""
        wait_for(lambda: not self.runs("server"), self.directory)
        assert inspect_deployment(self.directory)["status"] == "finished"
        assert self.committed() == rounds
        # Whoever was not ended by us has not ended.
        assert all(map(self.runs, self.names))


def check_ledgers(directory, rounds, each):
    """Nobody is over budget, as our own reader has it and as another accountant counts anew.

    rounds: with those set aside. each: joint events of a round.
    """
    for name in names_of(directory):
        path = directory / "sites" / name / "ledger.jsonl"
        run = next(iter(receipt(path)["runs"].values()))
        assert run["epsilon_spent"] <= run["epsilon_reserved"] == 2.0
        (event,) = run["events"]
        assert event["spent"] <= event["reserved"] == each * rounds
        events = charged(path)
        assert sum(count for _, _, count in events) == event["spent"]
        assert recounted.epsilon(events, run["delta"], "rdp") <= 2.0 * (1 + 1e-9)
        if run["honest"]:
            own = [(q, s / math.sqrt(run["honest"]), n) for q, s, n in events]
            alone = run["epsilon_alone_reserved"]
            assert run["epsilon_alone_spent"] <= alone
            assert recounted.epsilon(own, run["delta"], "rdp") <= alone * (1 + 1e-9)


def charged(path):
    """(q, σ, number) of joint events, from the file's lines alone."""
    events = []
    for line in path.read_bytes().splitlines():
        with suppress(ValueError):  # a line that a kill has torn: the next one counts it
            entry = json.loads(line)
            if entry["kind"] == "charge":
                events.append((entry["q"], entry["sigma"], entry["count"]))
            if entry["kind"] == "torn":
                events += [(q, sigma, count) for _, q, sigma, count in entry["charges"]]
    return events


MASKED = {"secure_aggregation": {"threshold": 2}}
SHARED = {
    "sites": 5,
    "secure_aggregation": {"threshold": 4},
    "privacy": {"trust": "sum", "honest": 2, "accountant": "rdp"},
    "settings": {"local_steps": 1},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "spare", "pause"),
    [({}, 40, 4), (MASKED, 60, 8), (SHARED, 60, 8)],
    ids=["plain", "masked", "shared noise"],
)
def test_parties_are_killed(make, tmp_path, plan, spare, pause):
    """Parties are killed by chance, from the start to the end; the run ends as it should.

    A server that dies after it asked for a masked sum charges that round anew. Of shared noise both
    ε are counted anew, that of h = 2 shares and that of one alone.

    spare: rounds set aside for what crashes take. pause: the longest wait before one, in seconds.
    """
    directory, rounds, kills = tmp_path / "d", 11, 60
    budget = {"spare_rounds": spare}
    # A round is to wait for whoever was killed, where others are there.
    patience = PATIENCE | {"least_replies": min(2, plan.get("sites", 3))}
    make(directory, {"patience": patience}, rounds=rounds, budget=budget, **plan)
    if plan.get("privacy", {}).get("honest"):
        allow(directory)
    each = plan.get("settings", {}).get("local_steps", 2)
    seed = int.from_bytes(os.urandom(4))
    print("seed", seed)
    choose = random.Random(seed)
    federation = Federation(directory)
    try:
        for number in range(kills):
            # The first may come before anything was committed, the last one in the last round.
            federation.reached(int((number + choose.random()) * (rounds + 1) / kills) - 1)
            time.sleep(choose.uniform(0, pause))
            name = choose.choice([*federation.names, "server"])
            federation.kill(name, choose.choice(["party", "child", "both"]))
        federation.finish(rounds)
        # Once more, after the end: the server finds that there is nothing left to do.
        federation.numbers |= federation.parties.start("server")
        federation.finish(rounds)
        check_ledgers(directory, rounds + spare, each)
    finally:
        federation.parties.stop()
        for path in directory.rglob("log.txt"):
            print(path, path.read_text()[-3000:], sep="\n")
