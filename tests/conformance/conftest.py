"""A federation small enough to check by hand, which every algorithm is run on."""

import itertools
import typing
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedpact import algorithms
from fedpact.losses import Loss, cross_entropy
from fedpact.messages import Local, Reply, State, Task, from_bytes, to_bytes
from fedpact.params import FlatModel
from fedpact.privacy.kernel import PerSampleKernel, PlainKernel
from fedpact.privacy.ledger import Ledger
from fedpact.privacy.noise import SeededDraws, stream
from fedpact.privacy.oracle import Charge, Oracle, PlainOracle, PrivateOracle, Records
from fedpact.privacy.terms import Terms
from fedpact.theory.accounting import Budget

FEATURES, CLASSES = 3, 3


class CountedDraws(SeededDraws):
    """Counts what was drawn: "batch", and every channel's noise."""

    def __init__(self, counts: Counter[str], seed: int, *around: str | int) -> None:
        super().__init__(seed, *around)
        self.counts = counts

    def batch(self, records: int, rate: float, step: int) -> Tensor:
        self.counts["batch"] += 1
        return super().batch(records, rate, step)

    def gaussian(self, size: int, like: Tensor, step: int, purpose: str) -> Tensor:
        self.counts[purpose] += 1
        return super().gaussian(size, like, step, purpose)


@dataclass
class Federation:
    """Three unequal sites, a linear model, and a loop without any engine.

    counts: true numbers of records. sizes: declared N_i, the true numbers by default.
    around: wraps every oracle. ledgers: where given, real ledgers are charged.
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
    drawn: dict[str, Counter[str]] = field(default_factory=dict)
    memories: dict[str, State] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sites = sorted(self.counts)
        self.sizes = self.sizes or {site: float(n) for site, n in self.counts.items()}
        self.model = FlatModel(nn.Linear(FEATURES, CLASSES, dtype=self.dtype))
        w = torch.randn(self.model.size, generator=stream("w"), dtype=torch.float64)
        self.w = w.to(self.dtype)
        self.model.load(self.w)
        self.kernel = PerSampleKernel(self.model, self.loss)
        self.plain = PlainKernel(self.model, self.loss)
        self.records = {site: self.made_up(site, n) for site, n in self.counts.items()}

    def made_up(self, site: str, count: int) -> Records:
        """Records whose classes lean to one that differs from site to site."""
        generator = stream("records", site)
        x = torch.randn(count, FEATURES, generator=generator, dtype=torch.float64)
        lean = x.new_tensor([3.0, 1.0, 1.0]).roll(ord(site[0]))
        y = torch.multinomial(lean, count, True, generator=generator) if count else torch.empty(0)
        return Records(x.to(self.dtype), y.long())

    def terms(self, site: str, channels: Mapping[str, float]) -> Terms:
        sigmas = {name: ratio * self.sigma for name, ratio in channels.items()}
        budget = Budget(1.0, 1e-5)
        return Terms(site, self.sizes[site], self.rate, self.clip, sigmas, 9, budget, "best")

    def oracle(self, site: str, task: Task, channels: Mapping[str, float]) -> Oracle:
        counts = self.drawn.setdefault(site, Counter())
        draws = CountedDraws(counts, self.seed, site, task.round)
        records = self.records[site]
        if not self.private:
            return self.around(PlainOracle(records, self.plain, self.rate, self.sizes[site], draws))

        def free(*_: object) -> None:
            pass

        charge = free
        if self.ledgers:
            charge = Charge(self.ledgers[site], task.run, task.round, task.digest)
        terms = self.terms(site, channels)
        return self.around(PrivateOracle(records, self.kernel, terms, draws, charge))

    def local(self, name: str, settings: Any, site: str, task: Task) -> Local:
        algorithm = algorithms.load(name)
        oracle = self.oracle(site, task, algorithm.channels(settings))
        return algorithm.local(task, oracle, self.memories.get(site, State()), settings)

    def task(self, name: str, settings: Any, state: State, number: int = 1) -> Task:
        told = algorithms.load(name).task(state, settings)
        return Task("run", number, name, told.vectors, told.numbers)

    def replies(self, name: str, settings: Any, state: State, number: int = 1) -> Iterator[Reply]:
        """One round's replies; everything goes through the codec."""
        for site in self.sites:
            task = from_bytes(to_bytes(self.task(name, settings, state, number)))
            local = self.local(name, settings, site, task)
            self.memories[site] = from_bytes(to_bytes(local.memory))
            reply = Reply("run", number, site, self.sizes[site], local.vectors, local.numbers)
            yield from_bytes(to_bytes(reply))

    def run(self, name: str, settings: Any, rounds: int = 3) -> State:
        """The server's state after some rounds, from w and no memory."""
        algorithm = algorithms.load(name)
        self.memories.clear()
        state = algorithm.init(self.w, settings)
        for number in range(1, rounds + 1):
            replies = self.replies(name, settings, state, number)
            state = from_bytes(to_bytes(algorithm.update(state, replies, settings)))
        return state


def variants(name: str) -> list[Any]:
    """An algorithm's settings worth a run: the defaults, three local steps, every named choice."""
    model = algorithms.load(name).Settings
    axes: list[list[dict[str, Any]]] = []
    for key, info in model.model_fields.items():
        if typing.get_origin(info.annotation) is typing.Literal:
            axes.append([{key: choice} for choice in typing.get_args(info.annotation)])
        elif key == "local_steps":
            axes.append([{}, {key: 3}])
    return [model(**_merged(parts)) for parts in itertools.product(*axes)]


def _merged(parts: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    return {key: value for part in parts for key, value in part.items()}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`case` is every algorithm in each of its variants, `reducible` each that names a parent."""
    if "reducible" in metafunc.fixturenames:
        named = [name for name in algorithms.names() if algorithms.load(name).NEUTRAL]
        metafunc.parametrize("reducible", named)
    if "case" in metafunc.fixturenames:
        cases = [(name, s) for name in algorithms.names() for s in variants(name)]
        labels = [f"{name}-{s.model_dump(exclude_defaults=True)}" for name, s in cases]
        metafunc.parametrize("case", cases, ids=labels)


@pytest.fixture(scope="session")
def federation() -> type[Federation]:
    return Federation
