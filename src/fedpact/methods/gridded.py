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

from fedpact.messages import Local, Reply, State, Task, Vectors, join, split_state
from fedpact.methods import Method, MethodWrapper, integers
from fedpact.methods.linear import NoiseWeights, weights
from fedpact.methods.short import DELTA_PREFIX, start_told
from fedpact.params import all_finite
from fedpact.privacy.around import OracleWrapper
from fedpact.privacy.oracle import Batch, Oracle, ReplyBounds, Terms
from fedpact.theory.shares import FINE_UNITS, SHARE_DEVIATION

_MODEL: Final = "w"
_LEFT: Final = "left/w"
"""In the server's state: what rounding has left out of the model so far [d]."""

UNITS_DOWN: Final = 2.0
"""The deviation of a model's change in units of the grid that it is rounded to."""

_Question = tuple[int, tuple[tuple[str, float], ...]]


class Gridded(MethodWrapper):
    """A method whose vectors cross the wire as whole numbers; the outermost of all.

    up: whether replies do, which no masked one can.
    """

    def __init__(self, inner: Method, *, up: bool) -> None:
        super().__init__(inner)
        self._up = up
        self._weights = dict[_Question, NoiseWeights]()

    @property
    def coded(self) -> bool:
        """Whether a reply's vectors are blocks of codes, as long as they came out."""
        return self._up

    @property
    def units(self) -> float:
        """The deviation of noise in units of a grid, finer where a release is rounded once more."""
        if not self._up:
            return 0.0
        one_release = self.steps() == 1 and not self.needs_own_noise
        return SHARE_DEVIATION if one_release else FINE_UNITS

    def bounds(self, task: Task, terms: Terms) -> ReplyBounds:
        """Return what an honest reply can be: a coordinate is rounded by half a step at most."""
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
        """Return a site's reply and its next memory."""
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
            vectors[name] = integers.pack_codes(*integers.quantise(vector, step, told))
        return replace(local, vectors=vectors)

    def update(self, state: State, replies: Iterable[Reply]) -> State:
        """Return the server's next state, folding the replies."""
        own, rest = split_state(state, DELTA_PREFIX)
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
                units = UNITS_DOWN if name == _MODEL else integers.DEFAULT_STEPS
                codes, step = integers.quantise(change, integers.step_of(change, units))
                vectors[name] = integers.apply_codes(start, codes, step)
                sent[name] = integers.pack_codes(codes, step)
                if name == _MODEL:
                    sent[_LEFT] = change.sub_(vectors[name].double().sub_(start)).float()
        return join(State(sent), DELTA_PREFIX, State(vectors, after.numbers))

    def task(self, state: State) -> State:
        """Return what every site is told."""
        return self.inner.task(split_state(state, DELTA_PREFIX)[1])

    def steps(self, state: State | None = None) -> int:
        """Return τ of the next round; without a state, the most that it can be."""
        return self.inner.steps(None if state is None else split_state(state, DELTA_PREFIX)[1])

    def short(self, state: State) -> Vectors | None:
        """Return what may be told in place of `task`'s vectors (methods.short), or None."""
        own, rest = split_state(state, DELTA_PREFIX)
        codes = {name: block for name, block in own.vectors.items() if name != _LEFT}
        if not codes:
            # Nothing was changed yet: a plan's start is what its sites make themselves.
            return start_told(self.inner.task(rest).vectors)
        told = self.inner.task(rest).vectors
        whole = {name: vector for name, vector in told.items() if name not in codes}
        return whole | {DELTA_PREFIX + name: block for name, block in codes.items()}

    def decode_reply(self, reply: Reply, told: Mapping[str, Tensor]) -> Reply:
        """Return a reply as the algorithm made it, from what was sent of it."""
        if self._up:
            vectors = {n: _restored(n, block, told) for n, block in reply.vectors.items()}
            reply = replace(reply, vectors=vectors)
        return self.inner.decode_reply(reply, told)

    def _all_opened(self, replies: Iterable[Reply], told: Mapping[str, Tensor]) -> Iterator[Reply]:
        for reply in replies:
            yield self.decode_reply(reply, told)

    def _weights_of(self, task: Task) -> NoiseWeights:
        """Return the weights of a reply to the task, found once a round for all sites."""
        question = task.round, tuple(sorted(task.numbers.items()))
        found = self._weights.get(question)
        if found is None:
            found = weights(self.inner, task)
            # Threads that come at once find the same.
            self._weights = {question: found}
        return found


class _Opened(OracleWrapper):
    """An oracle that lets everything through, and keeps the variance of the opening's noise."""

    variance = 0.0

    def opening(self, *channels: str) -> Batch:
        """Return the batch that opens a round, of the rate that the algorithm's Opening names."""
        batch = self._inner.opening(*channels)
        self.variance = batch.noise_variance
        return batch


def _step(weight: tuple[float, float], of_batches: float, of_opening: float) -> float:
    """Return the unit of the grid, s: the deviation of the step's noise over SHARE_DEVIATION."""
    return math.sqrt(weight[0] ** 2 * of_batches + weight[1] ** 2 * of_opening) / SHARE_DEVIATION


def _restored(name: str, block: Tensor, told: Mapping[str, Tensor]) -> Tensor:
    # What was not told is as long as w, which always is.
    start = told[name] if name in told else torch.zeros_like(told["w"])
    return integers.apply_codes(start, *integers.unpack_codes(block, start.numel()))
