"""SHA-256 of code and weights: what tells one model that was handed in from another."""

import hashlib
import inspect
from collections.abc import Iterable
from functools import partial
from types import CodeType, ModuleType
from typing import Any, cast

import torch
from torch import nn


def digest_of_module(module: nn.Module) -> str:
    """Of its weights, what it prints, and the code of every class in it that is not torch's."""
    own = {type(part) for part in module.modules() if not _is_torch(type(part))}
    parts: list[Any] = [repr(module)]
    for each in sorted(own, key=lambda c: c.__qualname__):
        parts += _code(each, set())
    for name, value in module.state_dict().items():
        parts += [f"{name} {value.dtype} {tuple(value.shape)}"]
        parts += [value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()]
    return _digest(parts)


def digest_of_code(thing: Any) -> str:
    """Of what a class or function does, as far as that can be read."""
    return _digest(_code(thing, set()))


def _digest(parts: Iterable[str | bytes]) -> str:
    found = hashlib.sha256()
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part
        found.update(len(raw).to_bytes(8, "big") + raw)
    return found.hexdigest()


def _code(thing: Any, seen: set[int]) -> list[str | bytes]:
    """What decides what a thing of Python's does: code, and the values that the code refers to.

    Of what nobody can tell that by looking, its identity: then it is nowhere else the same.
    """
    if id(thing) in seen or isinstance(thing, ModuleType) or _is_torch(thing):
        return [getattr(thing, "__name__", "")]
    seen.add(id(thing))
    if thing is None or isinstance(thing, bool | int | float | str | bytes | torch.dtype):
        return [repr(thing)]
    if isinstance(thing, set | frozenset):
        return [_sorted(thing)]
    if isinstance(thing, list | tuple):
        return [type(thing).__name__, *_each(cast(Iterable[Any], thing), seen)]
    if isinstance(thing, dict):
        return ["dict", *_each(cast(dict[Any, Any], thing).items(), seen)]
    if isinstance(thing, nn.Module):
        return [digest_of_module(thing)]
    if isinstance(thing, partial):
        own = cast(Any, thing)
        return ["partial", *_each((own.func, own.args, own.keywords), seen)]
    if isinstance(thing, type):
        own = {k: v for k, v in vars(thing).items() if not k.startswith("__") or k == "__init__"}
        return [thing.__qualname__, *_each((*thing.__bases__, own), seen)]
    code = getattr(thing, "__code__", None)
    if code is None:
        inner = getattr(thing, "__func__", None)
        return _code(inner, seen) if inner is not None else [f"{type(thing)} {id(thing)}"]
    used = inspect.getclosurevars(thing)
    values = (thing.__defaults__, thing.__kwdefaults__, used.nonlocals, used.globals)
    return [*_bytes(code), *_each(values, seen)]


def _each(things: Iterable[Any], seen: set[int]) -> list[str | bytes]:
    return [text for thing in things for text in _code(thing, seen)]


def _bytes(code: CodeType) -> list[str | bytes]:
    inner = [part for c in code.co_consts if isinstance(c, CodeType) for part in _bytes(c)]
    others = [c for c in code.co_consts if not isinstance(c, CodeType)]
    plain = [_sorted(c) if isinstance(c, frozenset) else repr(c) for c in others]
    return [code.co_code, repr(code.co_names), *plain, *inner]


def _sorted(things: Any) -> str:
    # A set has another order in each process.
    return repr(sorted(map(repr, things)))


def _is_torch(thing: Any) -> bool:
    return str(getattr(thing, "__module__", "")).partition(".")[0] in ("torch", "builtins")
