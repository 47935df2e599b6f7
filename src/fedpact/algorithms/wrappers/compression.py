"""Fewer bytes: sparse or rounded replies, a grid of integers, and changes instead of models.

With x = (a vector of the reply) - (the vector of that name that sites were sent, or 0):

    float16   x / s to 11 bits, s the power of two with max|x| / s in [1/2, 1)      2 bytes each
    int8      floor(x / s + u), u uniform in [0, 1), s = max|x| / 127: E[s code] = x  1 byte each
    topk      the k = ceil(keep d) largest |x + e|, with their indices                8 k bytes
              e ← the rest, added to the next x (error feedback)
    grid up   floor(x / s + 1/2),   s = sqrt(Σ c_t² v_t) / 4
    grid down floor((w' - w + e) / r + 1/2),   r = half the median deviation of w' - w + e;
              the server continues from w + r code, as the sites do, and adds the rounding error e
              to the next change

int8 is unbiased (stochastic rounding: Alistarh, Grubic, Li, Tomioka, Vojnović, arXiv 1610.02132);
u depends on the round and x, so a repeated reply is the same. float16 errs by at most
2^-11 |x| + 2^-25 s in each coordinate. topk is biased in one round, but loses nothing over rounds
(Stich, Cordonnier, Jaggi, arXiv 1809.07599). All of it depends on released and public numbers only,
so it is post-processing and spends no privacy, lengths included.

In the grid, c_t are the weights of released gradients in the reply (`integers.weights`), and v_t
their noise's variance. Rounding adds s²/12, 1/192 of that variance, and its error is practically
independent of x: the distribution of a rounded normal of deviation ν = 4 differs by less than 1e-33
from that of a normal plus a uniform number (privacy.accounting.shared_noise). If a reply is one
release times a public number, x / s is the oracle's own integer. Down, after any number of rounds w
is off by the last rounding only, at most r/2 a coordinate. Other vectors, such as scaffold's c, are
new in each round; they are rounded to a twelfth of their change's deviation.

A site of the last round is sent the codes alone, and computes w' bit for bit; others are sent the
model. Before the first round, the codes are replaced by the digest of the plan's initial vectors,
which every site computes itself (`short`). A DeltaTask is whole wherever it is handled; only its
encoding is short, as a Task with blocks "grid/NAME".
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
    """How vectors are encoded, after all protection. A plan replaces "auto" by `settle`."""

    model_config = FROZEN
    kind: Literal["auto", "none", "float16", "int8", "topk", "grid"] = "auto"
    """"none"; "float16" and "int8" round; "topk" sends the largest coordinates only; "grid"
    rounds to a small part of the noise. "auto" is "grid" if everything that leaves sites has a
    gradient's noise, else "none"."""
    keep: float = Field(default=0.1, gt=0, le=1)
    """The share of coordinates that "topk" sends."""

    def check_noise(self, why_unprotected: str) -> None:
        """Raise ValueError if kind is "grid" in a run without noise, for this reason."""
        if self.kind == "grid" and why_unprotected:
            raise ValueError(
                'compression.kind = "grid" rounds to a part of the noise that protects the run\'s '
                f"records, and {why_unprotected} adds none: use none, int8, float16 or topk"
            )

    def settle(self, noisy: bool) -> "CompressionSettings":
        """Return what "auto" means. noisy: whether all that leaves sites has gradients' noise.

        "grid" adds half a per cent of such noise's variance, and saves seven eighths of the bytes.
        """
        # The user did not set it, so it does not count as set.
        given = self.model_fields_set - {"kind"}
        kind = "grid" if noisy else "none"
        return CompressionSettings.model_construct(given, kind=kind, keep=self.keep)


class Compressed(MethodWrapper):
    """A method whose replies' vectors are float16, int8 or topk; the outermost wrapper."""

    def __init__(self, inner: Method, compression: CompressionSettings) -> None:
        super().__init__(inner)
        self._kind, self._keep = compression.kind, compression.keep

    def local(self, task: Task, oracle: Oracle, memory: State) -> Local:
        left, rest = split_state(memory, _PREFIX)
        local = self.inner.local(task, oracle, rest)
        vectors, numbers = dict[str, Tensor](), dict(local.numbers)
        kept = dict[str, Tensor]()
        for name, vector in local.vectors.items():
            x = vector - _get_or_zeros(task.vectors, name, vector)
            if self._kind == "topk":
                x = x + left.vectors.get(name, 0.0)
            sent, scales = self.encode(name, x, task)
            vectors |= sent
            numbers |= scales
            if self._kind == "topk":
                kept[name] = x - _spread(name, vectors, x)
        return Local(vectors, numbers, join(State(kept), _PREFIX, local.memory))

    def encode(
        self, name: str, x: Tensor, task: Task
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Return the vectors and numbers of a reply by which x [d] is sent under this name."""
        if self._kind == "topk":
            return _largest(name, x, self._keep), {}
        codes, scale = self._round(x, task)
        return {name: codes}, {_PREFIX + name: scale}

    def update(self, state: State, replies: Iterable[Reply]) -> State:
        told = self.inner.task(state).vectors
        return self.inner.update(state, (self.decode_reply(reply, told) for reply in replies))

    def decode_reply(self, reply: Reply, told: Mapping[str, Tensor]) -> Reply:
        names = [name for name in reply.vectors if not name.startswith(_PREFIX)]
        vectors = {name: self._restore(reply, name, told) for name in names}
        numbers = {n: v for n, v in reply.numbers.items() if not n.startswith(_PREFIX)}
        return self.inner.decode_reply(replace(reply, vectors=vectors, numbers=numbers), told)

    def _round(self, x: Tensor, task: Task) -> tuple[Tensor, float]:
        """Return codes [d] and their scale s >= 0."""
        most = float(x.abs().max()) if x.numel() else 0.0
        if not math.isfinite(most):
            # The scale makes a diverged vector NaN again.
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
        # The clamp is for rounding errors of x / s in the coordinate with max|x|.
        codes = (x.double() / scale + u.to(x.device)).floor().clamp(-_LEVELS, _LEVELS)
        return codes.to(torch.int8), scale

    @property
    def _type(self) -> torch.dtype:
        return torch.float16 if self._kind == "float16" else torch.int8

    def _restore(self, reply: Reply, name: str, told: Mapping[str, Tensor]) -> Tensor:
        if self._kind == "topk":
            # A vector that was not sent is as long as w.
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


def _get_or_zeros(vectors: Mapping[str, Tensor], name: str, like: Tensor) -> Tensor:
    told = vectors.get(name)
    return torch.zeros_like(like) if told is None or told.shape != like.shape else told


def _largest(name: str, x: Tensor, keep: float) -> dict[str, Tensor]:
    """Return the largest coordinates of x [d] and their indices, by index."""
    k = math.ceil(keep * x.numel())
    places = x.abs().topk(k).indices.sort().values
    return {name: x[places], _PREFIX + name: places.to(torch.int32)}


def _spread(name: str, vectors: Mapping[str, Tensor], like: Tensor) -> Tensor:
    """Return [d] with the values at their indices, else 0. Raises InputError: malformed."""
    values, places = vectors[name], vectors.get(_PREFIX + name)
    if places is None or places.dtype != torch.int32 or places.shape != values.shape:
        raise InputError(f"vector {name!r} of a reply came without the places of its values")
    if len(places) and not 0 <= int(places.min()) <= int(places.max()) < like.numel():
        raise InputError(f"vector {name!r} of a reply has places outside of 0..{like.numel() - 1}")
    whole = torch.zeros_like(like)
    whole[places.long()] = values.to(like.dtype)
    return whole


DELTA_PREFIX: Final = "grid/"
"""Prefix of the names of changes, in a short task and in the server's state."""

START: Final = DELTA_PREFIX + "start"
"""Name of the SHA-256 of a plan's initial vectors, uint8 [32], which is sent instead of them."""


def start_told(vectors: Vectors) -> Vectors:
    """Return the short form of a plan's initial vectors."""
    digest = hashlib.sha256()
    for name, vector in sorted(vectors.items()):
        digest.update(f"{name} {vector.dtype} {list(vector.shape)}\n".encode())
        digest.update(vector.detach().cpu().contiguous().numpy().tobytes())
    return {START: torch.tensor(list(digest.digest()), dtype=torch.uint8)}


def is_initial(task: Task) -> bool:
    """Whether a task's short form is the digest of the initial vectors."""
    return isinstance(task, DeltaTask) and START in task.changes


@dataclass(frozen=True)
class DeltaTask(Task):
    """A whole task with a short form. changes: replace the vectors in the short form."""

    changes: Vectors = field(default_factory=dict[str, Tensor])

    @cached_property
    def wire_bytes(self) -> int:
        """The length of the encoded short form, which is sent."""
        return encoded_length(shortest(self))


def expand_task(task: Task) -> Task:
    """Return the whole task, without a short form."""
    told = (task.run, task.round, task.algorithm, task.vectors, task.numbers)
    return Task(*told, task.included, task.attempt)


def shortest(task: Task) -> Task:
    """Return a task in its short form, if it has one."""
    if not isinstance(task, DeltaTask):
        return task
    return replace(expand_task(task), vectors=task.changes)


def whole(task: Task, base: Vectors | None) -> Task | None:
    """Return a received task in full; None if the base that it needs is missing or differs.

    base: the vectors that the site was sent in the round before, or the plan's initial vectors;
    None if unknown. Raises InputError: changes that do not fit the base.
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
"""Name of the model's rounding error e [d] in the server's state."""

UNITS_DOWN: Final = 2.0
"""The standard deviation of a model's change in units of its grid."""

_Question = tuple[int, tuple[tuple[str, float], ...], tuple[tuple[str, float], ...]]


class Gridded(MethodWrapper):
    """A method whose vectors are sent as integers; the outermost wrapper.

    up: whether replies are, too; masked replies have their own encoding.
    """

    prefix = DELTA_PREFIX

    def __init__(self, inner: Method, *, up: bool) -> None:
        # A finer grid if a reply sums several releases, and so is rounded again.
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
        found = self._weights_of(task, memory)
        vectors = dict[str, Tensor]()
        for name, vector in local.vectors.items():
            told = task.vectors.get(name)
            step = _step(found[name], oracle.noise_variance, opened.variance)
            # Without noise, as on dummy records, take the step from the vector.
            step = step or integers.step_of(vector if told is None else vector - told)
            vectors[name] = integers.pack_codes(*integers.quantise(vector, step, told))
        return replace(local, vectors=vectors)

    def update(self, state: State, replies: Iterable[Reply]) -> State:
        own, rest = split_state(state, DELTA_PREFIX)
        before = self.inner.task(rest).vectors
        opened = (self.decode_reply(reply, before) for reply in replies)
        after = self.inner.update(rest, opened)
        if not all(map(all_finite, after.vectors.values())):
            # Show a diverged run as it is.
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
        own, rest = split_state(state, DELTA_PREFIX)
        codes = {name: block for name, block in own.vectors.items() if name != _LEFT}
        if not codes:
            # Nothing has changed yet: sites compute the initial vectors themselves.
            return start_told(self.inner.task(rest).vectors)
        told = self.inner.task(rest).vectors
        whole = {name: vector for name, vector in told.items() if name not in codes}
        return whole | {DELTA_PREFIX + name: block for name, block in codes.items()}

    def decode_reply(self, reply: Reply, told: Mapping[str, Tensor]) -> Reply:
        if self._up:
            vectors = {n: _restore_block(n, block, told) for n, block in reply.vectors.items()}
            reply = replace(reply, vectors=vectors)
        return self.inner.decode_reply(reply, told)

    def _weights_of(self, task: Task, memory: State) -> NoiseWeights:
        """Return the weights of a reply to the task, computed once a round and site's clip."""
        own = {n: memory.numbers[n] for n in self.inner.facts.scales_steps if n in memory.numbers}
        question = task.round, tuple(sorted(task.numbers.items())), tuple(sorted(own.items()))
        found = self._weights.get(question)
        if found is None:
            found = weights(self.inner, task, own)
            # Concurrent threads compute the same.
            self._weights = {question: found}
        return found


class _Opened(OracleWrapper):
    """An oracle that records the variance of the opening's noise."""

    variance = 0.0

    def opening(self, *channels: str) -> Batch:
        batch = self._inner.opening(*channels)
        self.variance = batch.noise_variance
        return batch


def _step(weight: tuple[float, float], of_batches: float, of_opening: float) -> float:
    """Return the grid's unit s: the deviation of the reply's noise over SHARE_DEVIATION."""
    return math.sqrt(weight[0] ** 2 * of_batches + weight[1] ** 2 * of_opening) / SHARE_DEVIATION


def _restore_block(name: str, block: Tensor, told: Mapping[str, Tensor]) -> Tensor:
    # A vector that was not sent is as long as w.
    start = told[name] if name in told else torch.zeros_like(told["w"])
    return integers.apply_codes(start, *integers.unpack_codes(block, start.numel()))
