"""Fewer bytes: sparse vectors up, a grid of whole numbers, and changes in place of models.

With x = (a vector of the reply) - (what the sites were told under that name, 0 where nothing was):

    float16   x / s to 11 bits, s the power of two with max|x| / s in [1/2, 1)      2 bytes each
    int8      floor(x / s + u), u uniform in [0, 1), s = max|x| / 127: E[s code] = x  1 byte each
    topk      the k = ceil(keep d) largest |x + e| as they are, with their places     8 k bytes
              e ← what was left out, added to the next x (error feedback)

int8 is unbiased (stochastic rounding: Alistarh, Grubic, Li, Tomioka, Vojnović, arXiv 1610.02132).
float16 errs by at most 2^-11 |x| + 2^-25 s in each coordinate. topk is biased in a round; over
rounds nothing is lost: what was sent plus what is still kept is all there was (Stich, Cordonnier,
Jaggi, arXiv 1809.07599). All of it follows from released numbers and public ones, e too, so it is
post-processing and spends no privacy. The rounding's u follows from the round and x: the same
reply is made again, in every engine and every run of a plan.

Wherever it is handled, digested and answered it is whole, and its short form is a Task like any
other, whose vectors "grid/NAME" are blocks of `integers`. So nobody but who sends it and who takes
it in knows of changes.

Before the first round that is what the plan's own start tells, which every site makes for itself:
the short form is its digest, and whoever makes another one is told in full.

With x = (a vector of the reply) - (what the sites were told under that name, 0 where nothing was):

    up      code = floor(x / s + 1/2),   s = sqrt(Σ c_t² v_t) / 4, the deviation of x's noise over 4
    down    code = floor((w' - w + e) / r + 1/2),   r = half the median deviation of w' - w + e;
            the server goes on from w + r code, which is what the sites have, and adds what is left
            out, e, to the next change

c_t are the weights with which released gradients enter the reply (`linear`), v_t their noise's
variance: public numbers. Rounding adds s²/12, 1/192 of that variance, and its error is as good as
independent of x: of a rounded normal of deviation ν = 4 the law differs by less than 1e-33 from
that of a normal with a uniform number added (privacy.accounting.shared_noise). Where a reply is one
release times a
public number, x / s is what the oracle has rounded already, and is only found again. Down nothing
is lost: after any number of rounds w is off by the last rounding alone, r/2 a coordinate at most.
What else is told, as scaffold's c, is new in each round and no sum of changes: it is rounded to a
twelfth of its change's deviation, and nothing is kept. Codes are written by `integers`.

All of it is post-processing of releases, lengths too: it spends no privacy.

A site that took part in the last round is sent the codes alone, every other one the model itself;
before the first round nobody is sent any (`short`). Whoever has w, r and the codes has w', bit for
bit.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final, Literal

import torch
from pydantic import BaseModel, Field
from torch import Tensor

from fedpact.algorithms.wrappers import integers
from fedpact.algorithms.wrappers.base import Method, MethodWrapper
from fedpact.algorithms.wrappers.integers import NoiseWeights, weights
from fedpact.common.configuration import FROZEN
from fedpact.common.errors import InputError
from fedpact.common.messages import (
    Local,
    Reply,
    State,
    Task,
    Vectors,
    encoded_length,
    join,
    split_state,
)
from fedpact.common.params import all_finite
from fedpact.common.randomness.seeded import seeded_generator
from fedpact.privacy.accounting.shared_noise import FINE_UNITS, SHARE_DEVIATION
from fedpact.privacy.oracle import Batch, Oracle, OracleWrapper

_PREFIX = "compressed/"
_LEVELS = 127


class CompressionSettings(BaseModel):
    """What sites' replies are cut to, after all protection.

    "auto" becomes what `settled` returns as soon as a plan is made.
    """

    model_config = FROZEN
    kind: Literal["auto", "none", "float16", "int8", "topk", "grid"] = "auto"
    """"none"; "float16" and "int8" round; "topk" sends the largest coordinates only; "grid"
    rounds to a small part of the noise. "auto" is grid where all that leaves sites has a
    gradient's noise, else none."""
    keep: float = Field(default=0.1, gt=0, le=1)
    """Of topk, the share of coordinates that is sent."""

    def check_noise(self, why_unprotected: str) -> None:
        """Raise ValueError: a grid of the noise in a run that has none, for this reason."""
        if self.kind == "grid" and why_unprotected:
            raise ValueError(
                'compression.kind = "grid" rounds to a part of the noise that protects the run\'s '
                f"records, and {why_unprotected} adds none: use none, int8, float16 or topk"
            )

    def settled(self, noisy: bool) -> "CompressionSettings":
        """Return what "auto" means. noisy: whether all that leaves sites has gradients' noise.

        "grid" is finer than such noise: it costs half a per cent of its variance, and saves seven
        eighths of the bytes. What has none, or another, is told as it is.
        """
        # Nobody gave it, so it does not count as given.
        given = self.model_fields_set - {"kind"}
        kind = "grid" if noisy else "none"
        return CompressionSettings.model_construct(given, kind=kind, keep=self.keep)


class Compressed(MethodWrapper):
    """A method whose replies' vectors are float16, int8 or topk; the outermost of all."""

    def __init__(self, inner: Method, compression: CompressionSettings) -> None:
        super().__init__(inner)
        self._kind, self._keep = compression.kind, compression.keep

    def local(self, task: Task, oracle: Oracle, memory: State) -> Local:
        left, rest = split_state(memory, _PREFIX)
        local = self.inner.local(task, oracle, rest)
        vectors, numbers = dict[str, Tensor](), dict(local.numbers)
        kept = dict[str, Tensor]()
        for name, vector in local.vectors.items():
            x = vector - _told(task.vectors, name, vector)
            if self._kind == "topk":
                x = x + left.vectors.get(name, 0.0)
                vectors |= _largest(name, x, self._keep)
                kept[name] = x - _spread(name, vectors, x)
            else:
                codes, scale = self._rounded(x, task)
                vectors[name], numbers[_PREFIX + name] = codes, scale
        return Local(vectors, numbers, join(State(kept), _PREFIX, local.memory))

    def update(self, state: State, replies: Iterable[Reply]) -> State:
        told = self.inner.task(state).vectors
        return self.inner.update(state, (self.decode_reply(reply, told) for reply in replies))

    def decode_reply(self, reply: Reply, told: Mapping[str, Tensor]) -> Reply:
        """Return a reply as the algorithm returned it, from its encoded form."""
        names = [name for name in reply.vectors if not name.startswith(_PREFIX)]
        vectors = {name: self._restored(reply, name, told) for name in names}
        numbers = {n: v for n, v in reply.numbers.items() if not n.startswith(_PREFIX)}
        return self.inner.decode_reply(replace(reply, vectors=vectors, numbers=numbers), told)

    def _rounded(self, x: Tensor, task: Task) -> tuple[Tensor, float]:
        """Return codes [d] and the scale s >= 0 by which they are multiplied again."""
        most = float(x.abs().max()) if x.numel() else 0.0
        if not math.isfinite(most):
            # A run that diverges is to be seen: the scale is what makes it NaN again.
            return torch.zeros_like(x, dtype=self._type), math.nan
        if self._kind == "float16":
            scale = 2.0 ** math.frexp(most)[1] if most else 0.0
            return (x / (scale or 1.0)).half(), scale
        scale = most / _LEVELS
        if not scale:
            return torch.zeros_like(x, dtype=torch.int8), 0.0
        seed = hashlib.blake2b(x.cpu().contiguous().numpy().tobytes()).hexdigest()
        u = torch.rand(
            x.shape, generator=seeded_generator("rounding", task.round, seed), dtype=torch.float64
        )
        # In float64 x / s is off by 1e-16 of itself; the clamp is for the coordinate with max|x|.
        codes = (x.double() / scale + u.to(x.device)).floor().clamp(-_LEVELS, _LEVELS)
        return codes.to(torch.int8), scale

    @property
    def _type(self) -> torch.dtype:
        return torch.float16 if self._kind == "float16" else torch.int8

    def _restored(self, reply: Reply, name: str, told: Mapping[str, Tensor]) -> Tensor:
        if self._kind == "topk":
            # What was not told is as long as w, which always is.
            base = told[name] if name in told else torch.zeros_like(told["w"])
            return base + _spread(name, reply.vectors, base)
        codes = reply.vectors[name]
        scale = reply.numbers.get(_PREFIX + name)
        if codes.dtype != self._type or scale is None:
            raise InputError(
                f"vector {name!r} of a reply has type {codes.dtype} and scale {scale}: expected "
                f"{self._type} and a number"
            )
        x = codes.double() * scale
        base = told.get(name)
        if base is None or base.shape != x.shape:
            return x.to(next(iter(told.values())).dtype)
        return base + x.to(base.dtype)


def _told(vectors: Mapping[str, Tensor], name: str, like: Tensor) -> Tensor:
    told = vectors.get(name)
    return torch.zeros_like(like) if told is None or told.shape != like.shape else told


def _largest(name: str, x: Tensor, keep: float) -> dict[str, Tensor]:
    """Return the largest coordinates of x [d] and their places, in the order of the places."""
    k = math.ceil(keep * x.numel())
    places = x.abs().topk(k).indices.sort().values
    return {name: x[places], _PREFIX + name: places.to(torch.int32)}


def _spread(name: str, vectors: Mapping[str, Tensor], like: Tensor) -> Tensor:
    """Return [d] with what was sent at its places, 0 elsewhere. Raises InputError: impossible."""
    values, places = vectors[name], vectors.get(_PREFIX + name)
    if places is None or places.dtype != torch.int32 or places.shape != values.shape:
        raise InputError(f"vector {name!r} of a reply came without the places of its values")
    if len(places) and not 0 <= int(places.min()) <= int(places.max()) < like.numel():
        raise InputError(f"vector {name!r} of a reply has places outside of 0..{like.numel() - 1}")
    whole = torch.zeros_like(like)
    whole[places.long()] = values.to(like.dtype)
    return whole


DELTA_PREFIX: Final = "grid/"
"""Of the names of vectors that are changes: in a short task, and in the server's state."""

START: Final = DELTA_PREFIX + "start"
"""Of the vector that stands for all of a plan's start: its SHA-256, uint8 [32]."""


def start_told(vectors: Vectors) -> Vectors:
    """Return the short form of what the plan's start tells."""
    digest = hashlib.sha256()
    for name, vector in sorted(vectors.items()):
        digest.update(f"{name} {vector.dtype} {list(vector.shape)}\n".encode())
        digest.update(vector.detach().cpu().contiguous().numpy().tobytes())
    return {START: torch.tensor(list(digest.digest()), dtype=torch.uint8)}


def is_initial(task: Task) -> bool:
    """Whether a task's short form needs no earlier one."""
    return isinstance(task, DeltaTask) and START in task.changes


@dataclass(frozen=True)
class DeltaTask(Task):
    """A whole task that has a short form. changes: what that tells in place of the vectors."""

    changes: Vectors = field(default_factory=dict[str, Tensor])

    @cached_property
    def wire_bytes(self) -> int:
        """The length of the encoded short form, which is what is sent."""
        return encoded_length(shortest(self))


def expand_task(task: Task) -> Task:
    """Return the task without a short form."""
    told = (task.run, task.round, task.algorithm, task.vectors, task.numbers)
    return Task(*told, task.included, task.attempt)


def shortest(task: Task) -> Task:
    """Return a task as it is sent."""
    if not isinstance(task, DeltaTask):
        return task
    return replace(expand_task(task), vectors=task.changes)


def whole(task: Task, base: Vectors | None) -> Task | None:
    """Return a task that came, in full.

    base: what its site was told in the round before, or of the first round the plan's start; None:
    it does not know. Returns None where the task tells changes to that, or is of another start.
    Raises InputError: changes that do not fit it.
    """
    if START in task.vectors:
        block = task.vectors[START]
        if len(task.vectors) > 1 or (block.dtype, block.shape) != (torch.uint8, (32,)):
            raise InputError(
                f"a task tells the start and {sorted(task.vectors)}: expected 32 bytes alone"
            )
        same = base is not None and torch.equal(start_told(base)[START], block)
        return replace(task, vectors=dict(base)) if base is not None and same else None
    codes, rest = split_state(State(task.vectors, {}), DELTA_PREFIX)
    if not codes.vectors:
        return task
    if base is None:
        return None
    vectors = dict(rest.vectors)
    for name, block in codes.vectors.items():
        if name not in base or name in vectors:
            raise InputError(f"a task changes {name!r}: the last one had {sorted(base)}")
        vectors[name] = integers.apply_codes(
            base[name], *integers.unpack_codes(block, base[name].numel())
        )
    return replace(task, vectors=vectors)


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

    prefix = DELTA_PREFIX

    def __init__(self, inner: Method, *, up: bool) -> None:
        # Finer where a release is rounded once more, and not sent as it is.
        one_release = inner.steps() == 1 and not inner.facts.needs_own_noise
        units = SHARE_DEVIATION if one_release else FINE_UNITS
        super().__init__(inner, coded=up, units=units if up else 0.0)
        self._up = up
        self._weights = dict[_Question, NoiseWeights]()

    def local(self, task: Task, oracle: Oracle, memory: State) -> Local:
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
        own, rest = split_state(state, DELTA_PREFIX)
        before = self.inner.task(rest).vectors
        opened = (self.decode_reply(reply, before) for reply in replies)
        after = self.inner.update(rest, opened)
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

    def short(self, state: State) -> Vectors | None:
        """Return what may be told in place of `task`'s vectors."""
        own, rest = split_state(state, DELTA_PREFIX)
        codes = {name: block for name, block in own.vectors.items() if name != _LEFT}
        if not codes:
            # Nothing was changed yet: a plan's start is what its sites make themselves.
            return start_told(self.inner.task(rest).vectors)
        told = self.inner.task(rest).vectors
        whole = {name: vector for name, vector in told.items() if name not in codes}
        return whole | {DELTA_PREFIX + name: block for name, block in codes.items()}

    def decode_reply(self, reply: Reply, told: Mapping[str, Tensor]) -> Reply:
        """Return a reply as the algorithm returned it, from its encoded form."""
        if self._up:
            vectors = {n: _restored(n, block, told) for n, block in reply.vectors.items()}
            reply = replace(reply, vectors=vectors)
        return self.inner.decode_reply(reply, told)

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
