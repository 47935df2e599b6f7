"""Random numbers of a pass, as dropout draws them: from a key, in place of torch's own generator.

That generator is the process's: neither could a run be repeated, nor threads beside it. Here the
numbers of each record follow from the key of its step and from that record itself, x and y. So they
are the same whatever stands beside it, wherever it stands: to the batch's sum the model is one that
draws nothing, of each record by itself. Numbers that belong to no record, as one for all, follow
from the key alone. `expected` puts every number's mean in its place, by which dropout does nothing:
so a model is tried without chance.
"""

import hashlib
import math
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fedpact.common.errors import ModelError
from fedpact.per_sample.tracing.batch_rules import Where

Seed = Callable[[], int]

_aten = cast(Any, torch.ops.aten)
_Op = Callable[..., Any]


def _bernoulli(block: Tensor, g: torch.Generator, p: float = 0.5) -> None:
    block.bernoulli_(p, generator=g)


def _uniform(block: Tensor, g: torch.Generator, low: float = 0.0, high: float = 1.0) -> None:
    block.uniform_(low, high, generator=g)


def _normal(block: Tensor, g: torch.Generator, mean: float = 0.0, deviation: float = 1.0) -> None:
    block.normal_(mean, deviation, generator=g)


def _exponential(block: Tensor, g: torch.Generator, rate: float = 1.0) -> None:
    block.exponential_(rate, generator=g)


def _log_normal(block: Tensor, g: torch.Generator, mean: float = 1.0, of: float = 2.0) -> None:
    block.log_normal_(mean, of, generator=g)


def _cauchy(block: Tensor, g: torch.Generator, median: float = 0.0, of: float = 1.0) -> None:
    block.cauchy_(median, of, generator=g)


def _geometric(block: Tensor, g: torch.Generator, p: float) -> None:
    block.geometric_(p, generator=g)


def _whole(block: Tensor, g: torch.Generator, low: int, high: int | None = None) -> None:
    block.random_(*((0, low) if high is None else (low, high)), generator=g)


_DRAWN_BY: Final[dict[Any, Callable[..., None]]] = {
    _aten.log_normal_.default: _log_normal,
    _aten.log_normal.default: _log_normal,
    _aten.cauchy_.default: _cauchy,
    _aten.cauchy.default: _cauchy,
    _aten.geometric_.default: _geometric,
    _aten.geometric.default: _geometric,
    _aten.randint.default: _whole,
    _aten.randint.low: _whole,
    _aten.randint_like.default: _whole,
    _aten.randint_like.low_dtype: _whole,
    _aten.normal.float_float: _normal,
    _aten.bernoulli_.float: _bernoulli,
    _aten.bernoulli.p: _bernoulli,
    _aten.uniform_.default: _uniform,
    _aten.uniform.default: _uniform,
    _aten.normal_.default: _normal,
    _aten.normal_functional.default: _normal,
    _aten.exponential_.default: _exponential,
    _aten.exponential.default: _exponential,
    _aten.rand_like.default: _uniform,
    _aten.randn_like.default: _normal,
    _aten.rand.default: _uniform,
    _aten.randn.default: _normal,
}
"""How a block of the numbers is drawn, from the operation's further arguments."""


def _chance(p: float = 0.5) -> float:
    return p


def _middle(low: float = 0.0, high: float = 1.0) -> float:
    return (low + high) / 2


def _mean(mean: float = 0.0, _: float = 1.0) -> float:
    return mean


def _inverse(rate: float = 1.0) -> float:
    return 1 / rate


def _log_mean(mean: float = 1.0, of: float = 2.0) -> float:
    return math.exp(mean + of**2 / 2)


def _whole_mean(low: int, high: int | None = None) -> int:
    return (low - 1) // 2 if high is None else (low + high - 1) // 2


def _filled(mean: Callable[..., float]) -> _Op:
    def run(x: Tensor, *args: float, **_: Any) -> Tensor:
        return x.fill_(mean(*args))

    return run


def _alike(mean: Callable[..., float]) -> _Op:
    def run(x: Tensor, *args: float, **how: Any) -> Tensor:
        return torch.full_like(x, mean(*args), **how)

    return run


def _sized(mean: Callable[..., float], whole: bool = False) -> _Op:
    """Of an operation whose last argument is a size."""

    def run(*args: Any, **how: Any) -> Tensor:
        if whole:
            how["dtype"] = how.get("dtype") or torch.int64
        return cast(Tensor, cast(Any, torch).full(args[-1], mean(*args[:-1]), **how))

    return run


def _around(mean: Any, deviation: Any, **_: Any) -> Tensor:
    """The mean in the form that numbers around it have."""
    zero = 0 * deviation if isinstance(deviation, Tensor) else 0.0
    return mean + zero


def _backwards(count: int, **how: Any) -> Tensor:
    """An order that is not the records' own, so that one of the batch is found."""
    return torch.arange(count - 1, -1, -1, **how)


def _likeliest(p: Tensor, count: int, *_: Any, **__: Any) -> Tensor:
    order = p.argsort(-1, descending=True)
    return order[..., torch.arange(count, device=p.device) % p.shape[-1]]


def _kept(x: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    return x.clone(), torch.ones_like(x, dtype=torch.bool)


def _itself(p: Tensor, **_: Any) -> Tensor:
    return p.clone()


def _taken(x: Tensor, p: Tensor, **_: Any) -> Tensor:
    return x.copy_(p)


def _leaks(
    x: Tensor, noise: Tensor, low: float = 1 / 8, high: float = 1 / 3, *_: Any, **__: Any
) -> Tensor:
    return x * noise.copy_(torch.where(x < 0, torch.full_like(x, (low + high) / 2), 1))


_MEANS: Final[dict[Any, _Op]] = {
    _aten.bernoulli_.float: _filled(_chance),
    _aten.bernoulli_.Tensor: _taken,
    _aten.bernoulli.default: _itself,
    _aten.bernoulli.p: _alike(_chance),
    _aten.uniform_.default: _filled(_middle),
    _aten.uniform.default: _alike(_middle),
    _aten.normal_.default: _filled(_mean),
    _aten.normal_functional.default: _alike(_mean),
    _aten.exponential_.default: _filled(_inverse),
    _aten.exponential.default: _alike(_inverse),
    _aten.native_dropout.default: _kept,
    _aten.rand.default: _sized(_middle),
    _aten.randn.default: _sized(_mean),
    _aten.normal.float_float: _sized(_mean),
    _aten.normal.float_Tensor: _around,
    _aten.normal.Tensor_float: _around,
    _aten.normal.Tensor_Tensor: _around,
    _aten.randint.default: _sized(_whole_mean, whole=True),
    _aten.randint.low: _sized(_whole_mean, whole=True),
    _aten.randint_like.default: _alike(_whole_mean),
    _aten.randint_like.low_dtype: _alike(_whole_mean),
    _aten.randperm.default: _backwards,
    _aten.multinomial.default: _likeliest,
    _aten.log_normal_.default: _filled(_log_mean),
    _aten.log_normal.default: _alike(_log_mean),
    _aten.cauchy_.default: _filled(_mean),
    _aten.cauchy.default: _alike(_mean),
    _aten.geometric_.default: _filled(_inverse),
    _aten.geometric.default: _alike(_inverse),
    _aten.rand_like.default: _alike(_middle),
    _aten.randn_like.default: _alike(_mean),
    # torch's draws for numbers below 0 alone: in a trace another stands in its place.
    _aten.rrelu_with_noise.default: _leaks,
}
"""What is each operation's result at the mean of every number that it draws.

How many numbers each of these draws follows from forms alone. How many another draws, as poisson,
may follow from records, and with that what is drawn for the records behind them.
"""


@dataclass(frozen=True, eq=False)
class PassNumbers:
    """What numbers are drawn from. shared: those of no record. rows: each record's own, in order.

    leading: the records are in front of whatever is drawn, as under vmap. rows is () in plain
    passes, which draw all from the shared one.
    """

    shared: torch.Generator
    rows: tuple[torch.Generator, ...] = ()
    leading: bool = False

    @staticmethod
    def of(seed: Seed, place: int = 0) -> "PassNumbers":
        """Return those of plain passes. place: the pass's among the batch's."""
        return PassNumbers(_generator(_key(seed, b"pass", place.to_bytes(8, "little"))))

    @staticmethod
    def of_records(seed: Seed, x: Tensor, y: Tensor, *, leading: bool) -> "PassNumbers":
        """Return those of the records x, y [B, ...]."""
        parts = [_bytes(v) for v in (x, y)]
        rows = (_key(seed, a, b) for a, b in zip(*parts, strict=True))
        return PassNumbers(_generator(_key(seed)), tuple(map(_generator, rows)), leading)

    def alone(self, j: int) -> "PassNumbers":
        """Return those of one record by itself."""
        return replace(self, rows=self.rows[j : j + 1])


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
    """Has every operation of this thread draw from a key.

    numbers: None for their means. where: where the records are in what is drawn; None: nowhere.
    used: whether any has drawn. Raises ModelError at an operation whose numbers it does not know.
    """

    def __init__(self, numbers: PassNumbers | None, where: Where | None = None) -> None:
        cast(Any, super()).__init__()
        self.numbers, self.used = numbers, False
        self._where = Where(0) if numbers is not None and numbers.leading else where

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled here. To have that skipped loads the compiler: 100 MB, two seconds.
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[Any],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Do an operation; one that draws from the key, unless it brings a generator."""
        del types
        named = dict(kwargs or {})
        # torch marks every operation that draws, so none is missed that is not in the tables.
        if torch.Tag.nondeterministic_seeded not in func.tags or named.get("generator"):
            return func(*args, **named)
        if _rate(func, args, named) == 0:
            return func(*args, **named)
        self.used = True
        if func not in _MEANS:
            raise ModelError(
                f"the model draws random numbers by {func}, of which it is not known that how many "
                "are drawn follows from no record: write it with dropout, torch.rand, torch.randn "
                "or torch.bernoulli"
            )
        named.pop("generator", None)
        if self.numbers is None:
            return _MEANS[func](*args, **named)
        return self._drawn(func, args, named, self.numbers)

    def _drawn(self, func: Any, args: Any, named: dict[str, Any], numbers: PassNumbers) -> Any:
        if func is _aten.native_dropout.default:
            x, p, *train = args
            if train[:1] == [False]:
                return _kept(x)
            kept = self._made(torch.empty_like(x), _bernoulli, (1 - p,), numbers)
            return x * kept / max(1 - p, 1e-30), kept.bool()
        if func in (_aten.bernoulli_.Tensor, _aten.bernoulli.default):
            chance = args[-1]
            drawn = self._made(torch.empty_like(chance), _uniform, (), numbers) < chance
            return args[0].copy_(drawn) if len(args) > 1 else drawn.to(chance.dtype)
        if func is _aten.rrelu_with_noise.default:
            # Of plain passes alone, as a trace has another in its place.
            return func(*args, **named, generator=numbers.shared)
        if func is _aten.randperm.default:
            rows = () if self._where is None else numbers.rows
            if len(rows) > 1:
                raise ModelError("an order is drawn for each of several records")
            order = torch.randperm(args[0], generator=(*rows, numbers.shared)[0])
            return _MEANS[func](*args, **named).copy_(order)
        if func is _aten.multinomial.default:
            return self._chosen(numbers, *args, **named)
        # What lies in the place is written over, and says how the numbers lie.
        like = _MEANS[func](*args, **named)
        if func in _AROUND:
            return args[0] + args[1] * self._made(torch.empty_like(like), _normal, (), numbers)
        more = args[:-1] if func in _SIZED else args[1:]
        return self._made(like, _DRAWN_BY[func], more, numbers)

    def _chosen(self, numbers: PassNumbers, p: Tensor, count: int, again: bool = False) -> Tensor:
        """Places [..., count] drawn by weights p [..., K], all anew or none twice."""
        if not again or count == 1:
            waiting = self._made(torch.empty_like(p), _exponential, (), numbers)
            return (p / waiting).topk(count).indices
        below = p.cumsum(-1)
        at = self._made(p.new_empty(*p.shape[:-1], count), _uniform, (), numbers)
        found = torch.searchsorted(below, at * below[..., -1:])
        return found.clamp_max(p.shape[-1] - 1)

    def _made(
        self, into: Tensor, draw: Callable[..., None], more: tuple[Any, ...], numbers: PassNumbers
    ) -> Tensor:
        """Write numbers over a tensor: each record's from its own generator."""
        rows = numbers.rows
        if not rows or self._where is None:
            block = torch.empty(into.shape, dtype=into.dtype)
            draw(block, numbers.shared, *more)
            return into.copy_(block)
        dim, outer, inner = self._where
        shape = list(into.shape)
        if len(rows) > 1 and (dim >= len(shape) or shape[dim] != outer * len(rows) * inner):
            raise ModelError(
                f"the model draws random numbers of shape {tuple(shape)}, of which it is not known "
                "which are whose: draw them in the form of what they are put to"
            )
        block = torch.empty(len(rows), into.numel() // len(rows), dtype=into.dtype)
        for row, generator in zip(block, rows, strict=True):
            draw(row, generator, *more)
        if len(rows) == 1:
            return into.copy_(block.view(shape))
        # From [B, ...] to where the records lie: outer · B · inner entries of one dimension.
        apart = block.view(len(rows), *shape[:dim], outer, inner, *shape[dim + 1 :])
        return into.copy_(apart.movedim(0, dim + 1).reshape(shape))


_SIZED: Final = (
    *(_aten.rand.default, _aten.randn.default, _aten.normal.float_float),
    *(_aten.randint.default, _aten.randint.low),
)
_AROUND: Final = (_aten.normal.float_Tensor, _aten.normal.Tensor_float, _aten.normal.Tensor_Tensor)


def _rate(func: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> float:
    """The rate at which attention drops; 1 for an operation that has none."""
    arguments = func._schema.arguments
    place = next((i for i, a in enumerate(arguments) if a.name == "dropout_p"), None)
    if place is None:
        return 1.0
    given = args[place] if place < len(args) else named.get("dropout_p")
    return arguments[place].default_value if given is None else given


class _OfThread(threading.local):
    """What the thread's operations draw from. still: the means stand in their place."""

    numbers: PassNumbers | None = None
    still = False


_own = _OfThread()


@contextmanager
def drawing(numbers: PassNumbers) -> Generator[None]:
    """Have `drawn` draw from these meanwhile; within `expected` the means stay."""
    before = _own.numbers
    _own.numbers = numbers
    try:
        yield
    finally:
        _own.numbers = before


def numbers_at_hand() -> PassNumbers | None:
    """Return what the thread's operations draw from now."""
    return _own.numbers


@contextmanager
def expected() -> Generator[None]:
    """Have every operation of this thread take the mean of each number that it would draw."""
    before = _own.still
    _own.still = True
    try:
        with KeyedDraws(None):
            yield
    finally:
        _own.still = before


def drawn(op: Callable[..., Any], where: Where | None = None) -> Callable[..., Any]:
    """Return an operation that draws as the thread has been told to.

    where: where the records are in what it draws; None: it draws for none of them.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        if _own.still:
            with KeyedDraws(None):
                return op(*args, **kwargs)
        with KeyedDraws(_own.numbers or PassNumbers.of(lambda: 0), where):
            return op(*args, **kwargs)

    return run
