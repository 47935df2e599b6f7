"""As few bytes as noise leaves: vectors cross the wire as whole numbers of a quarter of it.

With x = (a vector of the reply) - (what the sites were told under that name, 0 where nothing was):

    up      code = floor(x / s + 1/2),   s = sqrt(Σ c_t² v_t) / 4, the deviation of x's noise over 4
    down    code = floor((w' - w + e) / r + 1/2),   r = half the median deviation of w' - w + e;
            the server goes on from w + r code, which is what the sites have, and adds what is left
            out, e, to the next change

c_t are the weights with which released gradients enter the reply (`linear`), v_t their noise's
variance: public numbers. Rounding adds s²/12, 1/192 of that variance, and its error is as good as
independent of x: of a rounded normal of deviation ν = 4 the law differs by less than 1e-33 from
that of a normal with a uniform number added (theory.shares). Where a reply is one release times a
public number, x / s is what the oracle has rounded already, and is only found again. Down nothing
is lost: after any number of rounds w is off by the last rounding alone, r/2 a coordinate at most.
What else is told, as scaffold's c, is new in each round and no sum of changes: it is rounded to a
twelfth of its change's deviation, and nothing is kept. Codes are written by `integers`.

All of it is post-processing of releases, lengths too: it spends no privacy.

A site that took part in the last round is sent the codes alone, every other one the model itself;
before the first round nobody is sent any (`short`). Whoever has w, r and the codes has w', bit for
bit.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from fedpact.messages import Local, Reply, State, Task, Vectors, join, split
from fedpact.methods import Around, Method, integers
from fedpact.methods.linear import Weights, weights
from fedpact.methods.short import PREFIX, start_told
from fedpact.params import all_finite
from fedpact.privacy.around import OracleAround
from fedpact.privacy.oracle import Batch, Bounds, Oracle, Terms
from fedpact.theory.shares import FINE_UNITS, UNITS

_MODEL: Final = "w"
_LEFT: Final = "left/w"
"""In the server's state: what rounding has left out of the model so far [d]."""

UNITS_DOWN: Final = 2.0
"""The deviation of a model's change in units of the grid that it is rounded to."""

_Question = tuple[int, tuple[tuple[str, float], ...]]


class Gridded(Around):
    """A method whose vectors cross the wire as whole numbers; the outermost of all.

    up: whether replies do, which no masked one can.
    """

    def __init__(self, inner: Method, *, up: bool) -> None:
        super().__init__(inner)
        self._up = up
        self._weights = dict[_Question, Weights]()

    @property
    def coded(self) -> bool:
        """See Method."""
        return self._up

    @property
    def units(self) -> float:
        """See Method: finer where what is released is rounded once more."""
        if not self._up:
            return 0.0
        one_release = self.steps() == 1 and not self.needs_own_noise
        return UNITS if one_release else FINE_UNITS

    def bounds(self, task: Task, terms: Terms) -> Bounds:
        """See Method: a coordinate is rounded by half a step at most."""
        inner = self.inner.bounds(task, terms)
        if not self._up:
            return inner
        terms = terms.at(task.round)
        variances = terms.noise_variance, terms.opening.noise_variance if terms.openings else 0.0
        half = 0.5 * math.sqrt(len(task.vectors["w"]))
        found = self._weights_of(task)
        rounding = {n: half * _step(weight, *variances) for n, weight in found.items()}
        vectors = {n: most + rounding[n] for n, most in inner.vectors.items()}
        return replace(inner, vectors=vectors)

    def local(self, task: Task, oracle: Oracle, memory: State) -> Local:
        """See Method."""
        if not self._up:
            return self.inner.local(task, oracle, memory)
        opened = _Opened(oracle)
        local = self.inner.local(task, opened, memory)
        found = self._weights_of(task)
        vectors = dict[str, Tensor]()
        for name, vector in local.vectors.items():
            told = task.vectors.get(name)
            step = _step(found[name], oracle.noise_variance, opened.variance)
            # Without noise, as on the records that are nobody's, nothing says how coarse.
            step = step or integers.step_of(vector if told is None else vector - told)
            vectors[name] = integers.encode(*integers.coded(vector, step, told))
        return replace(local, vectors=vectors)

    def update(self, state: State, replies: Iterable[Reply]) -> State:
        """See Method."""
        own, rest = split(state, PREFIX)
        before = self.inner.task(rest).vectors
        after = self.inner.update(rest, self._all_opened(replies, before))
        if not all(map(all_finite, after.vectors.values())):
            # A run that diverges is to be seen as it is.
            return after
        vectors, sent = dict(after.vectors), dict[str, Tensor]()
        for name, start in before.items():
            if name in vectors:
                change = vectors[name].double().sub_(start)
                if name == _MODEL and _LEFT in own.vectors:
                    change += own.vectors[_LEFT]
                units = UNITS_DOWN if name == _MODEL else integers.EXACT
                codes, step = integers.coded(change, integers.step_of(change, units))
                vectors[name] = integers.moved(start, codes, step)
                sent[name] = integers.encode(codes, step)
                if name == _MODEL:
                    sent[_LEFT] = change.sub_(vectors[name].double().sub_(start)).float()
        return join(State(sent), PREFIX, State(vectors, after.numbers))

    def task(self, state: State) -> State:
        """See Method."""
        return self.inner.task(split(state, PREFIX)[1])

    def steps(self, state: State | None = None) -> int:
        """See Method."""
        return self.inner.steps(None if state is None else split(state, PREFIX)[1])

    def short(self, state: State) -> Vectors | None:
        """See Method."""
        own, rest = split(state, PREFIX)
        codes = {name: block for name, block in own.vectors.items() if name != _LEFT}
        if not codes:
            # Nothing was changed yet: a plan's start is what its sites make themselves.
            return start_told(self.inner.task(rest).vectors)
        told = self.inner.task(rest).vectors
        whole = {name: vector for name, vector in told.items() if name not in codes}
        return whole | {PREFIX + name: block for name, block in codes.items()}

    def opened(self, reply: Reply, told: Mapping[str, Tensor]) -> Reply:
        """See Method."""
        if self._up:
            vectors = {n: _restored(n, block, told) for n, block in reply.vectors.items()}
            reply = replace(reply, vectors=vectors)
        return self.inner.opened(reply, told)

    def _all_opened(self, replies: Iterable[Reply], told: Mapping[str, Tensor]) -> Iterator[Reply]:
        for reply in replies:
            yield self.opened(reply, told)

    def _weights_of(self, task: Task) -> Weights:
        """Return the weights of a reply to the task, found once a round for all sites."""
        question = task.round, tuple(sorted(task.numbers.items()))
        found = self._weights.get(question)
        if found is None:
            found = weights(self.inner, task)
            # Threads that come at once find the same.
            self._weights = {question: found}
        return found


class _Opened(OracleAround):
    """An oracle that lets everything through, and keeps the variance of the opening's noise."""

    variance = 0.0

    def opening(self, *channels: str) -> Batch:
        """See Oracle."""
        batch = self._inner.opening(*channels)
        self.variance = batch.noise_variance
        return batch


def _step(weight: tuple[float, float], of_batches: float, of_opening: float) -> float:
    """Return the unit of the grid, s: the deviation of the step's noise over UNITS."""
    return math.sqrt(weight[0] ** 2 * of_batches + weight[1] ** 2 * of_opening) / UNITS


def _restored(name: str, block: Tensor, told: Mapping[str, Tensor]) -> Tensor:
    # What was not told is as long as w, which always is.
    start = told[name] if name in told else torch.zeros_like(told["w"])
    return integers.moved(start, *integers.decode(block, start.numel()))
