"""A federation small enough to check by hand, which every algorithm is run on."""

import math
import typing
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedpact import algorithms
from fedpact.algorithms.wrappers.base import Method
from fedpact.common.losses import Loss, cross_entropy
from fedpact.common.messages import Local, Reply, State, Task, from_bytes, to_bytes
from fedpact.common.params import FlatModel
from fedpact.common.randomness.seeded import SeededDraws, seeded_generator
from fedpact.per_sample.kernel import PerSampleKernel, PlainKernel
from fedpact.plan import Plan
from fedpact.privacy.accounting.accountant import Budget
from fedpact.privacy.ledger.ledger import Ledger
from fedpact.privacy.oracle import Charge, Opening, Oracle, PlainOracle, PrivateOracle, Records
from fedpact.privacy.terms import Terms

FEATURES, CLASSES = 3, 3


class CountedDraws(SeededDraws):
    """Counts what was drawn: "batch", and every channel's noise."""

    def __init__(self, counts: Counter[str], seed: int, *around: str | int) -> None:
        super().__init__(seed, *around)
        self.counts = counts

    def batch(self, records: int, rate: float, step: int) -> Tensor:
        self.counts["batch"] += 1
        return super().batch(records, rate, step)

    def add_noise(
        self, total: Tensor, sigma: float, sensitivity: float, step: int, purpose: str
    ) -> Tensor:
        self.counts[purpose] += 1
        return super().add_noise(total, sigma, sensitivity, step, purpose)


@dataclass
class Federation:
    """Three unequal sites, a linear model, and a loop without any engine.

    counts: true numbers of records. sizes: declared N_i, the true numbers by default.
    around: wraps every oracle. ledgers: where given, real ledgers are charged. steps_left: what a
    site's reservation is said to allow.
    """

    private: bool
    dtype: torch.dtype = torch.float64
    sigma: float = 1.0
    clip: float = 0.5
    rate: float = 0.5
    seed: int = 0
    counts: Mapping[str, int] = field(default_factory=lambda: {"a": 12, "b": 30, "c": 7})
    sizes: Mapping[str, float] | None = None
    loss: Loss = cross_entropy
    around: Callable[[Oracle], Any] = lambda oracle: oracle
    ledgers: Mapping[str, Ledger] | None = None
    steps_left: float = 40.0
    drawn: dict[str, Counter[str]] = field(default_factory=dict)
    memories: dict[str, State] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sites = sorted(self.counts)
        self.sizes = self.sizes or {site: float(n) for site, n in self.counts.items()}
        self.model = FlatModel(nn.Linear(FEATURES, CLASSES, dtype=self.dtype))
        w = torch.randn(self.model.size, generator=seeded_generator("w"), dtype=torch.float64)
        self.w = w.to(self.dtype)
        self.model.load(self.w)
        self.kernel = PerSampleKernel(self.model, self.loss)
        self.plain = PlainKernel(self.model, self.loss)
        self.records = {site: self.make_dummy_records(site, n) for site, n in self.counts.items()}

    def make_dummy_records(self, site: str, count: int) -> Records:
        """Records whose classes lean to one that differs from site to site."""
        generator = seeded_generator("records", site)
        x = torch.randn(count, FEATURES, generator=generator, dtype=torch.float64)
        lean = x.new_tensor([3.0, 1.0, 1.0]).roll(ord(site[0]))
        y = torch.multinomial(lean, count, True, generator=generator) if count else torch.empty(0)
        return Records(x.to(self.dtype), y.long())

    def terms(self, site: str, channels: Mapping[str, float], opens: Opening | None) -> Terms:
        sigmas = {name: ratio * self.sigma for name, ratio in channels.items()}
        budget, opening = Budget(1.0, 1e-5), {}
        if opens:
            noise = {name: ratio * self.sigma for name, ratio in opens.channels.items()}
            opening = {"opening_rate": opens.rate, "opening_sigmas": noise, "openings": 9}
        return Terms(
            site, self.sizes[site], self.rate, self.clip, sigmas, 9, budget, "best", **opening
        )

    def oracle(
        self, site: str, task: Task, channels: Mapping[str, float], opens: Opening | None = None
    ) -> Oracle:
        counts = self.drawn.setdefault(site, Counter())
        draws = CountedDraws(counts, self.seed, site, task.round)
        records = self.records[site]
        if not self.private:
            rates = self.rate, opens.rate if opens else 1.0
            size = self.sizes[site]
            return self.around(PlainOracle(records, self.plain, rates[0], size, draws, rates[1]))

        def free(*_: object) -> None:
            pass

        charge = free
        if self.ledgers:
            charge = Charge(self.ledgers[site], task.run, task.round, task.digest)
        terms = self.terms(site, channels, opens)
        left = self.steps_left
        oracle = PrivateOracle(
            records, self.kernel, terms, draws, charge, lambda: left, placement="compact"
        )
        return self.around(oracle)

    def local(self, method: Method, site: str, task: Task) -> Local:
        oracle = self.oracle(site, task, method.facts.channels, method.facts.opening)
        return method.local(task, oracle, self.memories.get(site, State()))

    def begin(self, state: State, number: int) -> State:
        """A round's first state, with what is left of the budgets: see rounds.py."""
        left = {
            "left/rounds": float(9 - number),
            "left/seconds": math.inf,
            "left/round_seconds": 0.0,
            "left/step_seconds": 0.0,
        }
        return State(state.vectors, {**state.numbers, **left})

    def task(self, method: Method, state: State, number: int = 1) -> Task:
        told = method.task(self.begin(state, number) if method.facts.controlled else state)
        return Task("run", number, method.name, told.vectors, told.numbers)

    def replies(self, method: Method, state: State, number: int = 1) -> Iterator[Reply]:
        """One round's replies; everything goes through the codec."""
        for site in self.sites:
            task = from_bytes(to_bytes(self.task(method, state, number)))
            local = self.local(method, site, task)
            self.memories[site] = from_bytes(to_bytes(local.memory))
            reply = Reply("run", number, site, self.sizes[site], local.vectors, local.numbers)
            yield from_bytes(to_bytes(reply))

    def run(self, method: Method, rounds: int = 3) -> State:
        """The server's state after some rounds, from w and no memory."""
        self.memories.clear()
        state = method.init(self.w)
        for number in range(1, rounds + 1):
            replies = self.replies(method, state, number)
            begun = self.begin(state, number) if method.facts.controlled else state
            state = from_bytes(to_bytes(method.update(begun, replies)))
        return state


def variants(name: str) -> list[Method]:
    """An algorithm worth a run: its defaults, three local steps, each named choice by itself."""
    fields = algorithms.load(name).Settings.model_fields
    steps = {"local_steps": 3} if "local_steps" in fields else {}
    choices = [
        {key: choice}
        for key, info in fields.items()
        if typing.get_origin(info.annotation) is typing.Literal
        for choice in typing.get_args(info.annotation)
        if choice != info.default
    ]
    found = [{}, *([steps] if steps else []), *({**choice, **steps} for choice in choices)]
    return [of({"algorithm": name, "settings": settings}) for settings in found]


COMBINATIONS: list[dict[str, Any]] = [
    {"algorithm": "fedavg", "settings": {"local_steps": 3}, "server": {"optimiser": "momentum"}},
    {"algorithm": "fedfdp", "server": {"optimiser": "adam"}},
    {"algorithm": "fedavg", "settings": {"local_steps": 3}, "local": {"momentum": 0.9}},
    # The bias of the federation's model stays at each site.
    {"algorithm": "fedavg", "settings": {"local_steps": 3}, "local": {"head": 3}},
    {
        "algorithm": "fedprox",
        "local": {"head": 3, "momentum": 0.5},
        "server": {"optimiser": "adam"},
    },
    {
        "algorithm": "fedprox",
        "settings": {"local_steps": 3},
        "local": {"momentum": 0.5, "schedule": [1.0, 2.0, 0.5]},
    },
    {
        "algorithm": "fedfdp",
        "settings": {"local_steps": 3},
        "local": {"schedule": "inverse"},
    },
    {"algorithm": "fedproxvr", "server": {"optimiser": "yogi"}},
    {"algorithm": "fedavg", "settings": {"local_steps": 3}, "fairness": {"weight": 0.3}},
    {"algorithm": "fedavg", "control": {"kind": "ali", "iterations": 7}},
    {"algorithm": "scaffold", "control": {"kind": "ali"}},
    {"algorithm": "fedfdp", "control": {"kind": "ali"}},
    {"algorithm": "fedproxvr", "control": {"kind": "ali"}},
    {
        "algorithm": "fedavg",
        "fairness": {"weight": 0.3},
        "control": {"kind": "ali"},
        "server": {"optimiser": "momentum"},
    },
]
"""Tables of a plan, for what goes around an algorithm."""


def of(tables: dict[str, Any]) -> Method:
    """The method of a plan's tables, with these beside it for the tests of an engine."""
    # A plan refuses the private form of some; at the oracle it is tested all the same.
    method = Plan.parse({**tables, "privacy": {"mode": "none"}}).method
    method.tables = tables
    return method


def label(tables: dict[str, Any]) -> str:
    """A test's name for a method."""
    rest = [f"{key}={value}" for key, value in tables.items() if key != "algorithm" and value]
    return "-".join([tables["algorithm"], *rest])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`case` is every method: an algorithm in each of its variants; `reducible` each
    algorithm that names a parent."""
    if "reducible" in metafunc.fixturenames:
        named = [name for name in algorithms.names() if algorithms.load(name).NEUTRAL]
        metafunc.parametrize("reducible", named)
    if "case" in metafunc.fixturenames:
        cases = [method for name in algorithms.names() for method in variants(name)]
        cases += [of(tables) for tables in COMBINATIONS]
        # What lets exact numbers out by design has tests of its own: test_ali_dpfl.
        cases = [method for method in cases if not method.facts.unprotected]
        labels = [label(method.tables) for method in cases]
        metafunc.parametrize("case", cases, ids=labels)


@pytest.fixture(scope="session")
def federation() -> type[Federation]:
    return Federation
