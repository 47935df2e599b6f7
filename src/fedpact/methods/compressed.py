"""Fewer bytes from the sites: what leaves a site is rounded, after its oracle has protected it.

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
"""

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from fedpact.draws.seeded import seeded_generator
from fedpact.errors import InputError
from fedpact.messages import Local, Reply, State, Task, join, split_state
from fedpact.methods import Method, MethodWrapper
from fedpact.privacy.oracle import Oracle, ReplyBounds, Terms, reach

_PREFIX = "compressed/"
_LEVELS = 127


class CompressionSettings(BaseModel):
    """What sites' replies are cut to, after all protection.

    kind: "none"; "float16" and "int8" round; "topk" sends the largest coordinates only; "grid"
    rounds to a small part of the noise. "auto" is grid where all that leaves sites has a gradient's
    noise, else none. keep: of topk, the share of coordinates that is sent.

    "auto" becomes what `settled` returns as soon as a plan is made.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
    kind: Literal["auto", "none", "float16", "int8", "topk", "grid"] = "auto"
    keep: float = Field(default=0.1, gt=0, le=1)

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

    def bounds(self, task: Task, terms: Terms) -> ReplyBounds:
        """Return what an honest reply to the task can be, of a site with these terms. With X the
        bound on ‖x‖, which is one on max|x| too:

        float16: s <= 2X, ‖error‖ <= (2^-11 + 2^-24 sqrt(d)) X.   int8: s <= X/127, ‖error‖ <=
        sqrt(d) s, and so at most X/127 sqrt(d).   topk: what is left out of v is at most r ‖v‖,
        r = sqrt(1 - k/d), so e never exceeds rX/(1 - r), and what is sent X/(1 - r).
        """
        inner = self.inner.bounds(self._longest_round(task), terms)
        d = len(task.vectors["w"])
        longest = {name: inner.longest(name, task.vectors) for name in inner.vectors}
        vectors, numbers = dict[str, float](), dict(inner.numbers)
        for name, most in longest.items():
            if self._kind == "topk":
                left_out = math.sqrt(1 - math.ceil(self._keep * d) / d)
                # Twice, as what was rounded in earlier rounds was rounded near other models.
                vectors[name] = 2 * most / (1 - left_out)
                # Places have no length; `opened` checks them.
                vectors[_PREFIX + name] = math.inf
            elif self._kind == "float16":
                vectors[name] = most * (1 + 2**-11 + 2**-24 * math.sqrt(d))
                numbers[_PREFIX + name] = reach.range_between(0.0, 2 * most)
            else:
                vectors[name] = most * (1 + math.sqrt(d) / _LEVELS)
                numbers[_PREFIX + name] = reach.range_between(0.0, most / _LEVELS)
        return replace(inner, vectors=vectors, numbers=numbers)

    def _longest_round(self, task: Task) -> Task:
        """Return a task of as many steps as any round's, whose leavings topk may still send."""
        if self._kind != "topk" or "local_steps" not in task.numbers:
            return task
        return replace(task, numbers={**task.numbers, "local_steps": self.inner.steps()})

    def local(self, task: Task, oracle: Oracle, memory: State) -> Local:
        """Return a site's reply and its next memory."""
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
        """Return the server's next state, folding the replies."""
        told = self.inner.task(state).vectors
        return self.inner.update(state, self._all_opened(replies, told))

    def decode_reply(self, reply: Reply, told: Mapping[str, Tensor]) -> Reply:
        """Return a reply as the algorithm made it, from what was sent of it."""
        names = [name for name in reply.vectors if not name.startswith(_PREFIX)]
        vectors = {name: self._restored(reply, name, told) for name in names}
        numbers = {n: v for n, v in reply.numbers.items() if not n.startswith(_PREFIX)}
        return self.inner.decode_reply(replace(reply, vectors=vectors, numbers=numbers), told)

    def _all_opened(self, replies: Iterable[Reply], told: Mapping[str, Tensor]) -> Iterator[Reply]:
        for reply in replies:
            yield self.decode_reply(reply, told)

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
