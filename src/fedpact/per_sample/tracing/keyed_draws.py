"""Random numbers of a pass, as dropout draws them: from a key, in place of torch's own generator.

That generator is the process's: neither could a run be repeated, nor threads beside it. Here all
numbers of a pass follow from the key of its step and from the pass's place in it, and each slot's
numbers from where they stand in a tensor of one shape. So a slot has the same numbers whoever
stands in it, and whoever stands beside. `expected` puts every number's mean in its place, by which
dropout does nothing: so a model is tried without chance.
"""

import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fedpact.common.errors import ModelError
from fedpact.common.randomness.seeded import seeded_generator

Seed = Callable[[], int]

_aten = cast(Any, torch.ops.aten)
_Op = Callable[..., Any]

# torch has these without a generator, and beside them the same with one.
_WITH: Final[dict[Any, Any]] = {
    _aten.rand.default: _aten.rand.generator,
    _aten.randn.default: _aten.randn.generator,
}


def _dropout(
    x: Tensor, p: float, train: bool | None = True, *, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    if train is False:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    kept = torch.empty_like(x).bernoulli_(1 - p, generator=generator)
    return x * kept / max(1 - p, 1e-30), kept.bool()


def _uniform_like(x: Tensor, *, generator: torch.Generator, **how: Any) -> Tensor:
    return torch.empty_like(x, **how).uniform_(generator=generator)


def _normal_like(x: Tensor, *, generator: torch.Generator, **how: Any) -> Tensor:
    return torch.empty_like(x, **how).normal_(generator=generator)


_IN_PLACE_OF: Final[dict[Any, _Op]] = {
    _aten.native_dropout.default: _dropout,
    _aten.rand_like.default: _uniform_like,
    _aten.randn_like.default: _normal_like,
}
"""Of those that take no generator at all."""


def _chance(p: float = 0.5) -> float:
    return p


def _middle(low: float = 0.0, high: float = 1.0) -> float:
    return (low + high) / 2


def _mean(mean: float = 0.0, _: float = 1.0) -> float:
    return mean


def _inverse(rate: float = 1.0) -> float:
    return 1 / rate


def _filled(mean: Callable[..., float]) -> _Op:
    def run(x: Tensor, *args: float, **_: Any) -> Tensor:
        return x.fill_(mean(*args))

    return run


def _alike(mean: Callable[..., float]) -> _Op:
    def run(x: Tensor, *args: float, **how: Any) -> Tensor:
        return torch.full_like(x, mean(*args), **how)

    return run


def _sized(value: float) -> _Op:
    def run(size: list[int], **how: Any) -> Tensor:
        return cast(Tensor, cast(Any, torch).full(size, value, **how))

    return run


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
    _aten.rand.default: _sized(0.5),
    _aten.randn.default: _sized(0.0),
    _aten.rand_like.default: _alike(_middle),
    _aten.randn_like.default: _alike(_mean),
    # torch's draws for numbers below 0 alone: in a trace another stands in its place.
    _aten.rrelu_with_noise.default: _leaks,
}
"""What is each operation's result at the mean of every number that it draws.

Each of these draws as many numbers as its result has, whatever it is given. How many another draws,
as poisson or multinomial, may follow from records, and with that what is drawn for the records
behind them.
"""


class KeyedDraws(TorchDispatchMode):
    """Has every operation of this thread draw from a key. seed: None for the numbers' means.

    used: whether any has drawn. Raises ModelError at an operation whose numbers it does not know.
    """

    def __init__(self, seed: Seed | None, *place: int) -> None:
        cast(Any, super()).__init__()
        self.seed, self._place, self.used = seed, place, False
        self._generators: dict[torch.device, torch.Generator] = {}

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
        if torch.Tag.nondeterministic_seeded not in func.tags or named.get("generator"):
            return func(*args, **named)
        if _rate(func, args, named) == 0:
            return func(*args, **named)
        self.used = True
        if func not in _MEANS:
            raise _unknown(func)
        if self.seed is None:
            return _MEANS[func](*args, **{k: v for k, v in named.items() if k != "generator"})
        like = next((a for a in args if isinstance(a, Tensor)), None)
        device = like.device if like is not None else torch.device(named.get("device") or "cpu")
        generator = self._generator(device, self.seed)
        if func in _IN_PLACE_OF:
            return _IN_PLACE_OF[func](*args, generator=generator, **named)
        return _WITH.get(func, func)(*args, **{**named, "generator": generator})

    def _generator(self, device: torch.device, seed: Seed) -> torch.Generator:
        if device not in self._generators:
            found = seeded_generator("numbers of a pass", seed(), *self._place)
            if device.type != "cpu":
                number = int(torch.randint(2**62, (), generator=found))
                found = torch.Generator(device).manual_seed(number)
            self._generators[device] = found
        return self._generators[device]


def _unknown(func: Any) -> ModelError:
    return ModelError(
        f"the model draws random numbers by {func}, of which it is not known that how many are "
        "drawn follows from no record: write it with dropout, torch.rand, torch.randn or "
        "torch.bernoulli"
    )


def _rate(func: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> float:
    """The rate at which attention drops; 1 for an operation that has none."""
    arguments = func._schema.arguments
    place = next((i for i, a in enumerate(arguments) if a.name == "dropout_p"), None)
    if place is None:
        return 1.0
    given = args[place] if place < len(args) else named.get("dropout_p")
    return arguments[place].default_value if given is None else given


class _OfThread(threading.local):
    """What the thread's operations draw by; None: nobody has said."""

    mode: KeyedDraws | None = None


_own = _OfThread()


@contextmanager
def keyed(seed: Seed, *place: int) -> Generator[None]:
    """Have `drawn` draw from a key meanwhile; within `expected` the means stay."""
    before = _own.mode
    try:
        if before is None or before.seed is not None:
            _own.mode = KeyedDraws(seed, *place)
        yield
    finally:
        _own.mode = before


@contextmanager
def expected() -> Generator[None]:
    """Have every operation of this thread take the mean of each number that it would draw."""
    before = _own.mode
    try:
        with KeyedDraws(None) as mode:
            _own.mode = mode
            yield
    finally:
        _own.mode = before


def drawn(op: Callable[..., Any]) -> Callable[..., Any]:
    """Return an operation that draws as the thread has been told to."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with _own.mode or KeyedDraws(lambda: 0):
            return op(*args, **kwargs)

    return run
