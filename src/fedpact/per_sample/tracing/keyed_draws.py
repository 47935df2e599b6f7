"""Random numbers of a pass, such as dropout's: drawn from a key, not torch's global generator.

That generator belongs to the process, so neither runs nor threads would be reproducible. Here a
record's numbers follow from the step's key and from that record, x and y. They do not depend on its
slot or on other records, so at each step the model is a deterministic function of single records.
Numbers that belong to no record, such as one factor for a whole pass, follow from the key alone.
`use_means` replaces every number by its mean, so that dropout does nothing while a model is
checked.
"""

import hashlib
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from fedpact.common.errors import ModelError
from fedpact.common.params import FlatModel, on_cpu
from fedpact.per_sample.tracing.batch_rules import Where

Seed = Callable[[], int]

_aten = cast(Any, torch.ops.aten)


_DEFAULTS: Final[dict[str, tuple[float, ...]]] = {
    "bernoulli": (0.5,),
    "uniform": (0.0, 1.0),
    "normal": (0.0, 1.0),
    "exponential": (1.0,),
    "random": (),
}
"""A tensor's methods that fill it with random numbers, with their default arguments.

How many numbers they draw follows from shapes alone. For others, such as poisson, it may depend on
a record, and then so would the numbers of later records.
"""


def _mean(method: str, *more: float) -> float:
    """The mean of the numbers that a tensor's method draws."""
    a, b = (*more, *_DEFAULTS[method][len(more) :], 0.0)[:2]
    if method == "random":  # below a, or from a to below b
        return (a - 1) // 2 if len(more) < 2 else (a + b - 1) // 2
    return {"uniform": (a + b) / 2, "exponential": 1 / max(a, 1e-30)}.get(method, a)


_DRAWN_BY: Final = {
    **{name: name for name in _DEFAULTS},
    **dict.fromkeys(("rand", "rand_like"), "uniform"),
    **dict.fromkeys(("randn", "randn_like", "normal_functional"), "normal"),
    **dict.fromkeys(("randint", "randint_like"), "random"),
}
"""An operation's name to the method that draws its numbers."""


@dataclass(frozen=True, eq=False)
class PassNumbers:
    """The generators of a pass. shared: for numbers of no record. rows: one per record, in order.

    leading: the batch is the first dimension of all draws, as under vmap. rows is () in plain
    passes, which draw everything from the shared generator.
    """

    shared: torch.Generator
    rows: tuple[torch.Generator, ...] = ()
    leading: bool = False

    @staticmethod
    def of(seed: Seed, place: int = 0) -> "PassNumbers":
        """Return those of plain passes. place: the index of the pass in the batch."""
        return PassNumbers(_generator(_key(seed, b"pass", place.to_bytes(8, "little"))))

    @staticmethod
    def of_records(seed: Seed, x: Tensor, y: Tensor, *, leading: bool) -> "PassNumbers":
        """Return those of the records x, y [B, ...]."""
        parts = [_bytes(v) for v in (x, y)]
        rows = (_key(seed, a, b) for a, b in zip(*parts, strict=True))
        return PassNumbers(_generator(_key(seed)), tuple(map(_generator, rows)), leading)

    def alone(self, j: int) -> "PassNumbers":
        """Return those of a single record."""
        return replace(self, rows=self.rows[j : j + 1])

    def named(self, name: str) -> "PassNumbers":
        """Return the same with shared numbers of a name's own, which may be drawn again."""
        return replace(self, shared=_generator(_key(self.shared.initial_seed, name.encode())))


def _key(seed: Seed, *parts: bytes) -> int:
    found = hashlib.blake2b(seed().to_bytes(8, "little"), digest_size=8)
    for part in parts:
        found.update(len(part).to_bytes(8, "little") + part)
    return int.from_bytes(found.digest(), "little") >> 1


def _generator(key: int) -> torch.Generator:
    return torch.Generator().manual_seed(key)


def _bytes(records: Tensor) -> list[bytes]:
    flat = records.detach().cpu().reshape(len(records), -1).contiguous()
    return [row.numpy().tobytes() for row in flat]


class KeyedDraws(TorchDispatchMode):
    """Makes every operation of this thread draw from a key.

    numbers: None for means. where: the batch dimension of the draws; None without one. used:
    whether an operation has drawn. Raises ModelError for an unknown random operation.
    """

    def __init__(self, numbers: PassNumbers | None, where: Where | None = None) -> None:
        cast(Any, super()).__init__()
        self.numbers, self.used = numbers, False
        self._where = Where(0) if numbers is not None and numbers.leading else where

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled here, and the default loads the compiler: 100 MB, two seconds.
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[Any],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation, drawing from the key unless it has a generator as an argument."""
        del types
        named = dict(kwargs or {})
        if named.get("generator") or not draws(func, args, named):
            return func(*args, **named)
        self.used = True
        named.pop("generator", None)
        name = func._schema.name.removeprefix("aten::").removesuffix("_")
        if (special := getattr(self, f"_as_{name}", None)) is not None:
            return special(*args, **named)
        sized = name in ("rand", "randn", "randint") or func is _aten.normal.float_float
        more = args[:-1] if sized else args[1:]
        tensors = any(isinstance(a, Tensor) for a in more)
        if name == "bernoulli" and (tensors or func is _aten.bernoulli.default):
            return self._by_chances(args[0], args[-1])
        if name == "normal" and (tensors or (not sized and func.overloadpacket is _aten.normal)):
            around = args[0] + 0 * args[1]
            return args[0] + args[1] * self._fill(torch.empty_like(around), "normal")
        if name not in _DRAWN_BY or tensors or "out" in named:
            raise ModelError(
                f"the model draws random numbers by {func}, of which it is not known that how many "
                "are drawn follows from no record: write it with dropout, torch.rand, torch.randn "
                "or torch.bernoulli"
            )
        # The tensor to be filled gives the shape and the memory layout.
        if func._schema.is_mutable:
            into = cast(Tensor, args[0])
        elif sized:
            named["dtype"] = named.get("dtype") or (torch.int64 if name == "randint" else None)
            into = cast(Tensor, cast(Any, torch).empty(args[-1], **named))
        else:
            into = torch.empty_like(args[0], **named)
        return self._fill(into, _DRAWN_BY[name], *more)

    def _by_chances(self, x: Tensor, chance: Tensor) -> Tensor:
        drawn = chance
        if self.numbers is not None:
            drawn = (self._fill(torch.empty_like(chance), "uniform") < chance).to(chance.dtype)
        return drawn.clone() if x is chance else x.copy_(drawn)

    def _as_native_dropout(self, x: Tensor, p: float, _: bool | None = True) -> Any:
        kept = self._fill(torch.empty_like(x), "bernoulli", 1 - p)
        return x * (kept / max(1 - p, 1e-30)), kept.bool()

    def _as_rrelu_with_noise(
        self, x: Tensor, noise: Tensor, low: float = 1 / 8, high: float = 1 / 3, *how: Any
    ) -> Tensor:
        """Slopes for negative numbers: drawn for all in training, their mean otherwise."""
        slopes = torch.full_like(x, (low + high) / 2)
        if how and how[0]:
            slopes = self._fill(slopes, "uniform", low, high)
        return x * noise.copy_(torch.where(x < 0, slopes, 1))

    def _as_multinomial(self, p: Tensor, count: int, again: bool = False) -> Tensor:
        """Indices [..., count] drawn by weights p [..., K], with or without replacement."""
        if not again or count == 1:
            waiting = self._fill(torch.empty_like(p), "exponential")
            return (p / waiting).topk(count).indices
        below = p.cumsum(-1)
        at = self._fill(p.new_empty(*p.shape[:-1], count), "uniform")
        found = torch.searchsorted(below, at * below[..., -1:])
        return found.clamp_max(p.shape[-1] - 1)

    def _fill(self, into: Tensor, method: str, *more: Any) -> Tensor:
        """Write numbers over a tensor: each record's from its own generator."""
        if self.numbers is None:
            return into.fill_(_mean(method, *more))

        def fill(block: Tensor, generator: torch.Generator) -> Tensor:
            return getattr(block, f"{method}_")(*more, generator=generator)

        rows = self.numbers.rows
        if not rows or self._where is None:
            block = torch.empty(into.shape, dtype=into.dtype)
            return into.copy_(fill(block, self.numbers.shared))
        dim, outer, inner = self._where
        shape = list(into.shape)
        if len(rows) > 1 and (dim >= len(shape) or shape[dim] != outer * len(rows) * inner):
            raise ModelError(
                f"the model draws random numbers of shape {tuple(shape)}, of which it is not known "
                "which are whose: draw them in the form of what they are put to"
            )
        block = torch.empty(len(rows), into.numel() // len(rows), dtype=into.dtype)
        for row, generator in zip(block, rows, strict=True):
            fill(row, generator)
        if len(rows) == 1:
            return into.copy_(block.view(shape))
        # From [B, ...] to the records' layout: outer · B · inner entries of one dimension.
        apart = block.view(len(rows), *shape[:dim], outer, inner, *shape[dim + 1 :])
        return into.copy_(apart.movedim(0, dim + 1).reshape(shape))


def draws(op: Any, args: Sequence[Any], named: Mapping[str, Any]) -> bool:
    """Whether an operation draws random numbers; dropout at a rate of 0 does not."""
    # torch tags every random operation, so none is missed.
    if torch.Tag.nondeterministic_seeded not in getattr(op, "tags", ()):
        return False
    options = {a.name: a.default_value for a in op._schema.arguments}
    options |= dict(zip(options, args, strict=False)) | dict(named)
    rate = next((options[name] for name in ("p", "dropout", "dropout_p") if name in options), 1)
    return rate != 0 and options.get("train", True) is not False


class _OfThread(threading.local):
    """The source of the thread's random numbers. still: means instead."""

    numbers: PassNumbers | None = None
    still = False


_own = _OfThread()
_SWITCHES: Final = threading.RLock()


@contextmanager
def without_fused_draws(model: FlatModel) -> Generator[None]:
    """Let a GPU compute the model by operations whose draws KeyedDraws sees.

    Its fused attention and cuDNN's recurrent layers drop out by numbers of their own. One thread at
    a time, as the switches are the process's.
    """
    if on_cpu(model.vector):
        yield
        return
    cudnn = torch.backends.cudnn
    layers = (m for m in model.module.modules() if isinstance(m, nn.RNNBase))
    with _SWITCHES, sdpa_kernel(SDPBackend.MATH):
        before = cudnn.enabled
        try:
            # Convolutions are slow without cuDNN.
            cudnn.enabled = before and not any(layer.dropout for layer in layers)
            yield
        finally:
            cudnn.enabled = before


@contextmanager
def drawing(numbers: PassNumbers | None) -> Generator[None]:
    """Let `draw_by_key` draw from these numbers; within `use_means` it still takes means.

    None: from the generator of seed 0, for no record.
    """
    before = _own.numbers
    _own.numbers = numbers
    try:
        yield
    finally:
        _own.numbers = before


def numbers_at_hand() -> PassNumbers | None:
    """Return the current source of the thread's random numbers."""
    return _own.numbers


@contextmanager
def use_means() -> Generator[None]:
    """Replace each random number of this thread's operations by its mean."""
    before = _own.still
    _own.still = True
    try:
        with KeyedDraws(None):
            yield
    finally:
        _own.still = before


def draw_by_key(
    op: Callable[..., Any], where: Where | None = None, name: str = ""
) -> Callable[..., Any]:
    """Return an operation that draws the thread's numbers; see `drawing`.

    where: the batch dimension of its draws; None: it draws for no record, in a pass the same
    numbers whenever it runs, as where a weight is computed from others again for its derivative.
    name: the operation's among the model's.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        numbers = None if _own.still else _own.numbers or PassNumbers.of(lambda: 0)
        if numbers is not None and where is None:
            numbers = numbers.named(name)
        with KeyedDraws(numbers, where):
            return op(*args, **kwargs)

    return run
