"""Checks that every algorithm has to pass, on a federation with three sites and a linear model.

The test suite and `fedpact algorithms check` run the same checks, for every variant of the
algorithm's settings, plain and private.
"""

import math
import tempfile
import typing
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, TypeVar, cast

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
from fedpact.privacy.ledger.hash_chain import read_entries
from fedpact.privacy.ledger.ledger import Ledger
from fedpact.privacy.oracle import Charge, Opening, Oracle, PlainOracle, PrivateOracle, Records
from fedpact.privacy.terms import Terms

FEATURES, CLASSES = 3, 3


_M = TypeVar("_M", State, Task, Reply)


def _send(message: _M) -> _M:
    """Return a message after encoding and decoding."""
    return cast(_M, from_bytes(to_bytes(message)))


class CountedDraws(SeededDraws):
    """Counts draws: "batch", and every channel's noise."""

    def __init__(self, counts: Counter[str], seed: int, *around: str | int) -> None:
        super().__init__(seed, *around)
        self.counts = counts

    def batch(self, records: int, rate: float, step: int) -> Tensor:
        """Return a batch's indices; see SeededDraws."""
        self.counts["batch"] += 1
        return super().batch(records, rate, step)

    def add_noise(
        self, total: Tensor, sigma: float, sensitivity: float, step: int, purpose: str
    ) -> Tensor:
        """Return the total with noise; see SeededDraws."""
        self.counts[purpose] += 1
        return super().add_noise(total, sigma, sensitivity, step, purpose)


@lru_cache(maxsize=4)  # a trace takes longer than what is asked of it
def _model(dtype: torch.dtype, loss: Loss) -> tuple[FlatModel, PerSampleKernel, PlainKernel]:
    """Return the linear model of all federations, and its kernels."""
    model = FlatModel(nn.Linear(FEATURES, CLASSES, dtype=dtype))
    return model, PerSampleKernel(model, loss), PlainKernel(model, loss)


@dataclass
class HandFederation:
    """Three sites of different sizes, a linear model, and a plain loop over rounds.

    counts: true numbers of records. sizes: declared N_i, by default the true numbers.
    around: wraps every oracle. ledgers: charged, if given. steps_left: the steps that a site's
    reservation allows.
    """

    private: bool
    dtype: torch.dtype = torch.float64
    sigma: float = 1.0
    clip: float = 0.5
    rate: float = 0.5
    seed: int = 0
    counts: Mapping[str, int] = field(default_factory=lambda: {"a": 12, "b": 30, "c": 7})
    sizes: Mapping[str, float] = field(default_factory=dict[str, float])
    loss: Loss = cross_entropy
    around: Callable[[Oracle], Any] = lambda oracle: oracle
    ledgers: Mapping[str, Ledger] | None = None
    steps_left: float = 40.0
    drawn: dict[str, Counter[str]] = field(default_factory=dict)
    memories: dict[str, State] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sites = sorted(self.counts)
        self.sizes = self.sizes or {site: float(n) for site, n in self.counts.items()}
        self.model, self.kernel, self.plain = _model(self.dtype, self.loss)
        w = torch.randn(self.model.size, generator=seeded_generator("w"), dtype=torch.float64)
        self.w = w.to(self.dtype)
        self.model.load(self.w)
        self.records = {site: self.make_dummy_records(site, n) for site, n in self.counts.items()}

    def make_dummy_records(self, site: str, count: int) -> Records:
        """Return records; each site prefers another class."""
        generator = seeded_generator("records", site)
        x = torch.randn(count, FEATURES, generator=generator, dtype=torch.float64)
        lean = x.new_tensor([3.0, 1.0, 1.0]).roll(ord(site[0]))
        y = torch.multinomial(lean, count, True, generator=generator) if count else torch.empty(0)
        return Records(x.to(self.dtype), y.long())

    def terms(self, site: str, channels: Mapping[str, float], opens: Opening | None) -> Terms:
        """Return a site's terms for channels with these multiples of σ."""
        sigmas = {name: ratio * self.sigma for name, ratio in channels.items()}
        budget, opening = Budget(1.0, 1e-5), {}
        if opens:
            ratios = opens.ratios(self.rate, 9)
            noise = {name: ratio * self.sigma for name, ratio in ratios.items()}
            opening = {"opening_rate": opens.rate, "opening_sigmas": noise, "openings": 9}
        return Terms(
            site, self.sizes[site], self.rate, self.clip, sigmas, 9, budget, "best", **opening
        )

    def oracle(
        self, site: str, task: Task, channels: Mapping[str, float], opens: Opening | None = None
    ) -> Oracle:
        """Return a site's oracle for a task."""
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
        """Return a site's result for a task."""
        oracle = self.oracle(site, task, method.facts.channels, method.facts.opening)
        return method.local(task, oracle, self.memories.get(site, State()))

    def begin(self, state: State, number: int) -> State:
        """Return a round's first state, with the remaining budgets; see rounds.py."""
        left = {
            "left/rounds": float(9 - number),
            "left/seconds": math.inf,
            "left/round_seconds": 0.0,
            "left/step_seconds": 0.0,
        }
        return State(state.vectors, {**state.numbers, **left})

    def task(self, method: Method, state: State, number: int = 1) -> Task:
        """Return the task of a round."""
        told = method.task(self.begin(state, number) if method.facts.controlled else state)
        return Task("run", number, method.name, told.vectors, told.numbers)

    def replies(self, method: Method, state: State, number: int = 1) -> Iterator[Reply]:
        """Yield a round's replies; all messages are encoded and decoded."""
        for site in self.sites:
            task = _send(self.task(method, state, number))
            local = self.local(method, site, task)
            self.memories[site] = _send(local.memory)
            reply = Reply("run", number, site, self.sizes[site], local.vectors, local.numbers)
            yield _send(reply)

    def run(self, method: Method, rounds: int = 2) -> State:
        """Return the server's state after some rounds, starting from w without memory."""
        self.memories.clear()
        state = method.init(self.w)
        for number in range(1, rounds + 1):
            replies = self.replies(method, state, number)
            begun = self.begin(state, number) if method.facts.controlled else state
            state = _send(method.update(begun, replies))
        return state


def variants(name: str) -> list[Method]:
    """Return an algorithm with its defaults, with three local steps, and with each choice."""
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
    return [method_of({"algorithm": name, "settings": settings}) for settings in found]


def method_of(tables: dict[str, Any]) -> Method:
    """Return the method of a plan's tables."""
    # Plans refuse the private form of some methods, which is tested at the oracle all the same.
    return Plan.parse({**tables, "privacy": {"mode": "none"}}).method


class Violation(Exception):
    """A check failed; the message says how."""


def _need(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Violation(otherwise)


def check_equal(one: Any, other: Any, what: str) -> None:
    """Raise Violation unless two messages are equal bit for bit."""
    _need(one.numbers == other.numbers, f"{what}: numbers {other.numbers} instead of {one.numbers}")
    keys = one.vectors.keys()
    _need(keys == other.vectors.keys(), f"{what}: vectors {[*other.vectors]} instead of {[*keys]}")
    for key in keys:
        _need(torch.equal(one.vectors[key], other.vectors[key]), f"{what}: vector {key!r} differs")


def check_close(one: Any, other: Any, tolerance: float, what: str) -> None:
    """Raise Violation unless two messages are equal up to `tolerance`, relative to the largest
    entry."""
    keys = other.vectors.keys()
    _need(one.vectors.keys() == keys, f"{what}: vectors {[*one.vectors]} instead of {[*keys]}")
    pairs = {k: (one.vectors[k], other.vectors[k], float(v.abs().max()))
             for k, v in other.vectors.items()}  # fmt: skip
    pairs |= {k: (torch.tensor(one.numbers.get(k, math.nan)), torch.tensor(v), abs(v))
              for k, v in other.numbers.items()}  # fmt: skip
    for key, (found, expected, largest) in pairs.items():
        apart = float((found - expected).abs().max())
        allowed = tolerance * max(1.0, largest)
        _need(apart <= allowed, f"{what}: {key!r} is {apart:.2g} away, allowed {allowed:.2g}")


def list_draws(method: Method) -> set[str]:
    """Return the names of a site's draws: "batch", and the noise of every channel."""
    opening = method.facts.opening.channels if method.facts.opening else ()
    return {"batch", *method.facts.channels, *opening}


class Unbounded:
    """An oracle with unbounded losses and differences, like C = ∞ for gradients."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        return {
            "batches": lambda *asked: map(Unbounded, found(*asked)),
            "opening": lambda *asked: Unbounded(found(*asked)),
            "difference": lambda w, anchor, *_, **__: found(w, anchor, 1e30),
            "loss": lambda w, *_, **__: found(w, 1e30),
        }.get(name, found)


@lru_cache(maxsize=4)  # shared by several checks of a method
def _after(case: Method, private: bool) -> tuple[HandFederation, State]:
    """Return a federation, and the server's state after two rounds of the method in it."""
    bed = HandFederation(private)
    return bed, bed.run(case)


def _first(case: Method, **setting: Any) -> tuple[HandFederation, State]:
    """Return a federation, and the method's first state in it."""
    bed = HandFederation(**setting)
    return bed, case.init(bed.w)


def neutral_gap(name: str, *, private: bool) -> tuple[float, float]:
    """Return the distance of the models of an algorithm and its parent under neutral settings, and
    the allowed distance.

    Raises PlanError: there is no such algorithm.
    """
    algorithm = algorithms.load(name)
    neutral = algorithm.NEUTRAL
    if neutral is None:
        return 0.0, 0.0
    parent = algorithms.load(neutral.parent)
    settings = algorithm.Settings(**neutral.settings)
    shared = settings.model_dump(include={*parent.Settings.model_fields})
    theirs = parent.Settings(**{**shared, **neutral.parent_settings})
    # Same gradient σ and same draws; the other channels have separate noise.
    ours_w = HandFederation(private).run(Method(name, settings)).vectors["w"]
    parents_w = HandFederation(private).run(Method(neutral.parent, theirs)).vectors["w"]
    allowed = neutral.tolerance * float(parents_w.abs().max())
    return float((ours_w - parents_w).abs().max()), allowed


def check_neutral(name: str, private: bool) -> None:
    """Under its neutral settings it equals its parent."""
    apart, allowed = neutral_gap(name, private=private)
    _need(apart <= allowed, f"its model is {apart:.2g} from its parent's, allowed {allowed:.2g}")


def check_not_neutral(name: str, private: bool) -> None:
    """Its default settings give another model than its neutral ones."""
    algorithm = algorithms.load(name)
    if algorithm.NEUTRAL is not None and not private:
        neutral = algorithm.Settings(**algorithm.NEUTRAL.settings)
        # Some differ from the third round on.
        settings = neutral, algorithm.Settings()
        runs = [HandFederation(False).run(Method(name, one), 3) for one in settings]
        same = torch.equal(runs[0].vectors["w"], runs[1].vectors["w"])
        _need(not same, "its default settings give the same model as its neutral ones")


def check_order(case: Method, private: bool) -> None:
    """The order of replies does not matter, up to rounding."""
    bed, state = _first(case, private=private)
    replies = list(bed.replies(case, state))
    back = case.update(state, iter(replies[::-1]))
    check_close(case.update(state, iter(replies)), back, 1e-13, "in another order")


def check_plain_twin(case: Method, private: bool) -> None:
    """Without noise and without a clip, the private run equals the plain one."""
    if private:
        # As in a plain run, no reservation ends the run.
        without: dict[str, Any] = {"sigma": 0.0, "clip": math.inf, "steps_left": math.inf}
        twin = HandFederation(True, around=Unbounded, **without).run(case)
        check_close(twin, _after(case, False)[1], 1e-10, "without noise and clip")
        # Another precision needs no second round.
        single = torch.float32
        twin = HandFederation(True, single, around=Unbounded, **without).run(case, 1)
        plain = HandFederation(False, single).run(case, 1)
        check_close(twin, plain, 1e-5, "without noise and clip in float32")


def check_noise_and_clip(case: Method, private: bool) -> None:
    """Noise and a clip change the model."""
    if private:
        plain = HandFederation(False).run(case, 1).vectors["w"]
        for what, sigma, clip in (("noise", 1e-3, 1e3), ("the clip", 0.0, 0.01)):
            w = HandFederation(True, sigma=sigma, clip=clip).run(case, 1).vectors["w"]
            _need(float((w - plain).abs().max()) > 1e-3, f"{what} does not change its model")


_LITTLE: Final[dict[str, dict[str, Any]]] = {
    "empty batches": {"rate": 1e-12},
    "an empty site": {"counts": {"a": 0, "b": 20}, "sizes": {"a": 10.0, "b": 20.0}},
    "nothing but an empty site": {"counts": {"a": 0}, "sizes": {"a": 10.0}},
    "one site": {"counts": {"a": 20}},
    "one record": {"counts": {"a": 1}, "rate": 1.0},
}


def check_little_data(case: Method, private: bool) -> None:
    """Empty batches, empty sites and single records leave the model finite."""
    for what, setting in _LITTLE.items():
        # Without noise at a tiny rate, since it is divided by the expected batch size.
        bed = HandFederation(private, sigma=0.0 if "rate" in setting else 1.0, **setting)
        state = bed.run(case, 2)
        values = [*state.vectors.values(), *map(torch.tensor, state.numbers.values())]
        _need(all(bool(v.isfinite().all()) for v in values), f"{what}: its state is not finite")
        shape = tuple(state.vectors["w"].shape)
        _need(shape == tuple(bed.w.shape), f"{what}: its model has shape {shape}")


def check_empty_site(case: Method, private: bool) -> None:
    """An empty site adds noise, too, so its reply does not reveal that it is empty."""
    if private:
        empty: dict[str, Any] = {"counts": {"a": 0}, "sizes": {"a": 10.0}}
        bed, state = _first(case, private=True, **empty)
        (reply,) = bed.replies(case, state)
        (silent,) = HandFederation(True, sigma=0.0, **empty).replies(case, state)
        for key, vector in reply.vectors.items():
            _need(not torch.equal(vector, silent.vectors[key]), f"vector {key!r} has no noise")
        drawn = set(bed.drawn["a"])
        _need(
            drawn == list_draws(case),
            f"it draws for {sorted(drawn)}, not {sorted(list_draws(case))}",
        )


def check_pure(case: Method, private: bool) -> None:
    """Its functions do not change their arguments, and are deterministic."""
    bed, state = _after(case, private)
    task, memory = bed.task(case, state, 3), bed.memories["a"]
    before = to_bytes(task), to_bytes(memory)
    once = bed.local(case, "a", task)
    _need((to_bytes(task), to_bytes(memory)) == before, "local changes its task or its memory")
    again = bed.local(case, "a", task)
    check_equal(once, again, "local the second time")
    check_equal(once.memory, again.memory, "local's memory the second time")
    replies = list(bed.replies(case, state, 3))
    given = [to_bytes(m) for m in (state, *replies)]
    case.update(state, iter(replies))
    _need([to_bytes(m) for m in (state, *replies)] == given, "update changes its state or replies")


def check_batches(case: Method, private: bool) -> None:
    """A site requests at most as many batches as `steps` says."""
    bed, state = _first(case, private=private)
    list(bed.replies(case, state))
    allowed = case.steps(state)
    _need(allowed <= case.steps(), f"steps(state) is {allowed}, more than {case.steps()} at most")
    allowed += 1 if case.facts.opening else 0
    for site, counts in bed.drawn.items():
        asked = counts["batch"]
        _need(1 <= asked <= allowed, f"site {site} asked for {asked} batches, of {allowed}")


def check_ledger(case: Method, private: bool) -> None:
    """Ledgers are charged for exactly what was drawn, on the channels that its facts name."""
    if not private:
        return
    rounds, plan = 2, HandFederation(True)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        ledgers: dict[str, Ledger] = {}
        for site in plan.sites:
            ledger = Ledger(Path(folder) / f"{site}.jsonl", site, hypothetical=True)
            ledgers[site] = stack.enter_context(closing(ledger))
            terms = plan.terms(site, case.facts.channels, case.facts.opening)
            # The cost is tested elsewhere.
            history = terms.history(rounds * case.steps(), rounds)
            ledgers[site].reserve("run", Budget(1e6, 1e-5), history)
        bed = HandFederation(True, ledgers=ledgers)
        bed.run(case, rounds)
        for site, ledger in ledgers.items():
            ledger.close()
            terms, held = bed.terms(site, case.facts.channels, case.facts.opening), Counter[str]()
            events = {(event.q, event.sigma) for event in (terms.event, terms.opening.event)}
            for entry in read_entries(ledger.path):
                if entry["kind"] == "charge":
                    held["batch"] += entry["count"]
                    event = entry["q"], entry["sigma"]
                    _need(event in events, f"site {site} was charged (q, σ) = {event}")
                    held.update(dict.fromkeys(entry["purpose"], entry["count"]))
            drawn = bed.drawn[site]
            _need(held == drawn, f"site {site} was charged {dict(held)} and drew {dict(drawn)}")
            named = list_draws(case)
            _need(held.keys() == named, f"it is charged for {sorted(held)}, not {sorted(named)}")


def check_own_noise(case: Method, private: bool) -> None:
    """Seeds, sites and rounds have independent noise."""
    if not private:
        return
    drawn: list[list[Mapping[str, Tensor]]] = []
    for seed in (0, 1):
        bed, state = _first(case, private=True, seed=seed)
        drawn.append([reply.vectors for reply in bed.replies(case, state)])
    for one, other in zip(*drawn, strict=True):
        for key, vector in one.items():
            _need(not torch.equal(vector, other[key]), f"two seeds give the same {key!r}")
    counts, noise = {"a": 0, "b": 0}, list[Mapping[str, Tensor]]()
    bed, state = _first(case, private=True, counts=counts, sizes={"a": 9.0, "b": 9.0})
    for number in (1, 2):
        bed.memories.clear()
        noise += [reply.vectors for reply in bed.replies(case, state, number)]
    for key in noise[0]:
        different = len({tuple(vectors[key].tolist()) for vectors in noise})
        _need(different == 4, f"two sites and two rounds give {different} different {key!r}, not 4")


def check_start(case: Method, private: bool) -> None:
    """The first state contains the model."""
    bed, state = _first(case, private=private)
    _need("w" in state.vectors and torch.equal(state.vectors["w"], bed.w), "its 'w' is another")


OF_NAME: Final[tuple[Callable[[str, bool], None], ...]] = (check_neutral, check_not_neutral)
"""Checks of an algorithm by name and privacy; each raises Violation."""

OF_METHOD: Final[tuple[Callable[[Method, bool], None], ...]] = (
    *(check_order, check_plain_twin, check_noise_and_clip, check_little_data, check_empty_site),
    *(check_pure, check_batches, check_ledger, check_own_noise, check_start),
)
"""Checks of a method: an algorithm with settings."""

COUNT: Final = len(OF_NAME) + len(OF_METHOD)


@dataclass(frozen=True)
class Finding:
    """The result of a check. violation: how it failed, "" if it passed."""

    check: str
    violation: str


def examine(name: str) -> Iterator[Finding]:
    """Yield the result of each check over all variants of an algorithm, plain and private.

    Raises PlanError or ModelError: there is no such algorithm.
    """
    cases = variants(name)
    for check in OF_NAME:
        yield _finding(check, [name])
    for check in OF_METHOD:
        yield _finding(check, cases)


def _finding(check: Callable[[Any, bool], None], of: list[Any]) -> Finding:
    (meaning, *_) = (check.__doc__ or check.__name__).splitlines()
    for one in of:
        for private in (False, True):
            try:
                check(one, private)
            except Exception as error:  # an algorithm under development may raise anything
                where = ""
                if isinstance(one, Method):
                    own = one.settings.model_dump(exclude_defaults=True)
                    where = f"with {own or 'its defaults'}, "
                kind = "" if isinstance(error, Violation) else f"{type(error).__name__}: "
                form = "private" if private else "plain"
                return Finding(meaning, f"{where}{form}: {kind}{error}")
    return Finding(meaning, "")
