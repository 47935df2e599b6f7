"""What three algorithms keep at the sites, behind the real client shell: it follows who replied.

Sites refuse, return, and lose replies on the way. A site's memory is seen where its oracle is made.
"""

import json
from dataclasses import dataclass, field
from types import MappingProxyType

import pytest
import torch
from torch import Tensor

from fedpact import algorithms
from fedpact.algorithms.wrappers.base import Method
from fedpact.client import Client
from fedpact.common.messages import Reply, State, Task, from_bytes, split_state, to_bytes
from fedpact.common.run_folder import Folder
from fedpact.data.load import from_arrays
from fedpact.plan import Plan
from fedpact.simulation.simulate import simulate


def pending(path):
    """What a site's last request left in its memory, which is pending."""
    return split_state(from_bytes(path.read_bytes()), "new/")[0]


@dataclass
class Site:
    """A site with the loss ½ a ‖w - b‖²: its own oracle, which keeps the memories it came with."""

    a: float
    b: Tensor
    seen: list[State] = field(default_factory=list)
    shares = MappingProxyType({})

    def oracle(self, task, memory, bench):
        self.seen.append(memory)
        return self

    def batches(self, count, *channels):
        for _ in range(count):
            yield self

    def gradient(self, w):
        return self.a * (w - self.b)


SIZES = {"a": 30.0, "b": 10.0, "c": 20.0}
CURVATURES = {"a": 1.0, "b": 4.0, "c": 2.0}
CENTRES = {
    name: torch.tensor(b, dtype=torch.float64)
    for name, b in {"a": (1.0, 0.0), "b": (-1.0, 2.0), "c": (3.0, 3.0)}.items()
}


def optimum(names):
    """The minimum of Σ N_i F_i over these sites."""
    pulls = {name: SIZES[name] * CURVATURES[name] for name in names}
    return sum(pull * CENTRES[name] for name, pull in pulls.items()) / sum(pulls.values())


def stated(folder):
    return json.loads((folder / "privacy.json").read_text())["sites"]


class Rounds:
    """The server's loop of rounds.py, with a say in which replies arrive.

    restarts: every site's shell is made anew, from its files, before every round.
    """

    def __init__(self, name, folder, restarts=False):
        self.method = Method(name, SETTINGS[name])
        self.folder, self.restarts = folder, restarts
        self.sites = {n: Site(CURVATURES[n], CENTRES[n]) for n in SIZES}
        self.state = self.method.init(torch.tensor([3.0, -2.0], dtype=torch.float64))
        self.included, self.number = {}, 0
        self.clients = {name: self.client(name) for name in self.sites}

    def client(self, name):
        site, path = self.sites[name], self.folder / name / "memory.safetensors"
        return Client(name, SIZES[name], self.method, site.oracle, None, path)

    def round(self, arrive="abc", lost=""):
        """One round: the sites of `arrive` are heard, those of `lost` reply in vain."""
        self.number += 1
        told, replies = self.method.task(self.state), []
        for name in sorted({*arrive, *lost}):
            if self.restarts:
                self.clients[name] = self.client(name)
            last = self.included.get(name, -1)
            task = Task("run", self.number, self.method.name, told.vectors, told.numbers, last)
            reply = self.clients[name].handle(from_bytes(to_bytes(task)), None)
            assert isinstance(reply, Reply)
            if name in arrive:
                replies.append(from_bytes(to_bytes(reply)))
        self.state = from_bytes(to_bytes(self.method.update(self.state, iter(replies))))
        self.included |= dict.fromkeys(arrive, self.number)

    def many(self, count, **who):
        for _ in range(count):
            self.round(**who)
        return self.state.vectors["w"]

    def left(self, name):
        return pending(self.folder / name / "memory.safetensors")


RATE, STEPS, ALPHA = 0.1, 4, 1.5
SETTINGS = {
    "scaffold": algorithms.load("scaffold").Settings(learning_rate=RATE, local_steps=STEPS),
    "feddyn": algorithms.load("feddyn").Settings(
        learning_rate=RATE, local_steps=STEPS, proximal=ALPHA
    ),
    "proxskip": algorithms.load("proxskip").Settings(learning_rate=RATE, communication=1 / STEPS),
}
both = pytest.mark.parametrize("name", ["scaffold", "feddyn"])
each = pytest.mark.parametrize("name", list(SETTINGS))
# Everybody; b away; b's reply lost and c away; everybody; nobody but a; everybody.
SCHEDULE = [{}, {}, {"arrive": "ac"}, {"arrive": "a", "lost": "b"}, {}, {"arrive": "a"}, {}, {}]


def mean(vectors, arrive):
    weights = {name: SIZES[name] / sum(SIZES[n] for n in arrive) for name in arrive}
    return sum(weight * vectors[name] for name, weight in weights.items())


def close(one, other):
    torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@both
def test_server_state_follows_the_replying_sites_states(name, tmp_path):
    """scaffold: c = Σ p_i c_i and w = w̄ - τη c. feddyn: w = Σ p_i w_i - Σ p_i h_i/α, where
    w_i = w̄ - (h_i - h_i before)/α. Sums and p_i are of those who replied in that round."""
    rounds, key = Rounds(name, tmp_path), {"scaffold": "c", "feddyn": "h"}[name]
    kept = dict.fromkeys("abc", torch.zeros(2, dtype=torch.float64))
    for who in SCHEDULE:
        before, arrive = rounds.state.vectors["w"], who.get("arrive", "abc")
        rounds.round(**who)
        now = {site: rounds.left(site).vectors[key] for site in arrive}
        for site in [*arrive, *who.get("lost", "")]:
            # A site is shown what its last reply that was included left, and no other.
            shown = rounds.sites[site].seen[-1].vectors
            assert torch.equal(shown.get(key, torch.zeros_like(before)), kept[site])
        if name == "scaffold":
            close(rounds.state.vectors["c"], mean(now, arrive))
            close(rounds.state.vectors["w"], before - STEPS * RATE * mean(now, arrive))
        else:
            w = {site: before - (now[site] - kept[site]) / ALPHA for site in arrive}
            close(rounds.state.vectors["w"], mean(w, arrive) - mean(now, arrive) / ALPHA)
        kept |= now


@each
def test_remaining_sites_reach_their_optimum_until_return(name, tmp_path):
    # Ten rounds leave a twentieth of the way or less: 1e-4 of it after thirty.
    near, rounds = 1e-4, Rounds(name, tmp_path)
    assert float((rounds.many(30) - optimum("abc")).norm()) < near
    assert float((rounds.many(30, arrive="ac") - optimum("ac")).norm()) < near
    # On the way back replies are lost.
    for who in SCHEDULE:
        rounds.round(**who)
    assert float((rounds.many(30) - optimum("abc")).norm()) < near
    assert float((optimum("abc") - optimum("ac")).norm()) > 1000 * near


@each
def test_sites_restarted_from_files_change_nothing(name, tmp_path):
    ends = []
    for restarts in (False, True):
        rounds = Rounds(name, tmp_path / str(restarts), restarts)
        for who in SCHEDULE:
            rounds.round(**who)
        ends.append(to_bytes(rounds.state))
    assert ends[0] == ends[1]


@both
def test_a_site_that_has_spent_its_budget_takes_its_state_along(name, tmp_path):
    """In a private run of the engine, whose noise is in all of it; float32."""
    settings = SETTINGS[name].model_dump() | {"local_steps": 2}
    spent = {"site-02": {"epsilon": 0.6, "sigma": 9.0}}
    plan = Plan.parse(
        {
            "algorithm": name,
            "settings": settings,
            "rounds": 8,
            "sites": 3,
            "partition": {"kind": "dirichlet", "held_out": 0.25},
            "run": {"workers": 1, "evaluate_every": 8},
            "privacy": {"sigma": 3.0, "epsilon": 9.0, "accountant": "rdp", "per_site": spent},
            "compression": {"kind": "none"},
        }
    )
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(120, 4, generator=generator), torch.randint(3, (120,), generator=generator)
    key = {"scaffold": "c", "feddyn": "h"}[name]
    before, kept, stayed = {}, {}, []

    def look(record):
        state = Folder(tmp_path / "run").restore()[0].state.vectors
        if record.round:
            stay = [f"site-0{k}" for k in range(3) if f"site-0{k}" not in record.refused]
            files = {n: tmp_path / "run" / "sites" / n / "memory.safetensors" for n in stay}
            now = {n: pending(file).vectors[key] for n, file in files.items()}
            sizes = {n: held["size"] for n, held in stated(tmp_path / "run").items()}
            total = sum(sizes[n] for n in stay)
            average = sum(sizes[n] / total * now[n] for n in stay)
            rate = settings["learning_rate"]
            if name == "scaffold":
                expected = before["w"] - 2 * rate * average
                torch.testing.assert_close(state["c"], average, rtol=1e-4, atol=1e-5)
            else:
                was = sum(sizes[n] / total * kept.get(n, 0 * now[n]) for n in stay)
                expected = before["w"] + (was - 2 * average) / settings["proximal"]
            torch.testing.assert_close(state["w"], expected, rtol=1e-5, atol=1e-5)
            kept.update(now)
            stayed.append(len(stay))
        before.update(state)

    simulate(plan, tmp_path / "run", data=from_arrays(x, y), on_round=look)
    assert sorted(stayed, reverse=True) == stayed
    assert set(stayed) == {2, 3}
