"""User code and objects in a plan: their names, their digests, and how they are found again.

A class or function that any process can import is named `package.module:name`, and a plan with it
is carried out anywhere. What has no such place (a module that exists already, a class of a
notebook, a lambda) is kept by this process as NAME@DIGEST: the plan then says which one it was, and
another process needs it handed in again. A model that brings weights is NAME.weights@DIGEST.
"""

import copy
import dis
import hashlib
import importlib
import os
import re
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Annotated, Any, Final, cast

import numpy as np
import torch
from pydantic import BeforeValidator
from torch import Tensor, nn

from fedpact.common.errors import ModelError


class _Identity(str):
    """Which thing it is in this process, of what nobody can tell otherwise."""


_Parts = list[str | bytes]


class _Seen(dict[int, tuple[int, Any]]):
    """What was read, by its identity: which it was, and it itself, so that no other comes to it.

    files: whether of modules that code refers to the files count, and not their names alone.
    forms: whether of a module's weights and buffers the forms count, and not the numbers.
    """

    files = False
    forms = False

    def copied(self) -> "_Seen":
        found = _Seen(self)
        found.files, found.forms = self.files, self.forms
        return found


_PLAIN: Final = (bool, int, float, complex, str, bytes, range, type(None), type(...))
_PLAIN_OF_TORCH: Final = (torch.dtype, torch.device, np.dtype)
_HOOKS: Final = ("_forward_pre_hooks", "_forward_hooks")


def digest_of_module(module: nn.Module) -> str:
    """Of its weights and other attributes, what it prints, and the code that is not torch's."""
    return _digest(_module(module, _Seen()))


def digest_of_form(*things: Any) -> str | None:
    """Of what modules and functions compute with weights of any values, None where none can tell.

    That is code, attributes, and forms of weights and buffers. Within this process.
    """
    seen = _Seen()
    seen.forms = True
    parts = _each(things, seen)
    return None if any(isinstance(part, _Identity) for part in parts) else _digest(parts)


def digest_of_code(thing: Any) -> str:
    """Of what a class, function or object does, as far as that can be read."""
    return _digest(_code(thing, _Seen()))


def _digest(parts: Iterable[str | bytes]) -> str:
    found = hashlib.sha256()
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part
        found.update(len(raw).to_bytes(8, "big") + raw)
    return found.hexdigest()


def _module(module: nn.Module, seen: _Seen) -> _Parts:
    parts: _Parts = [repr(module)]
    every = [*module.named_modules()]
    weights = [*module.named_parameters(), *module.named_buffers()]
    for _, part in (*every, *(weights if seen.forms else ())):
        seen.setdefault(id(part), (len(seen), part))
    base = vars(nn.Module())
    for name, part in every:
        own = {key: value for key, value in vars(part).items() if key not in base}
        # A hook's key is its number in this process.
        hooks = [list(vars(part)[key].values()) for key in _HOOKS]
        parts += [name, *_each((type(part), own, *hooks), seen)]
    # Buffers that no state dict has decide, too; so does which weights are frozen.
    for name, value in weights if not seen.forms else ():
        parts += [f"{name} {value.requires_grad}", *_array(value)]
    return parts + (_forms(module, seen) if seen.forms else [])


def _forms(module: nn.Module, seen: _Seen) -> _Parts:
    """Whether each part is trained, and of each weight and buffer its form and which it is."""
    parts: _Parts = [f"{name} {part.training}" for name, part in module.named_modules()]
    every = (module.named_parameters, module.named_buffers)
    for name, value in (pair for named in every for pair in named(remove_duplicate=False)):
        form = value.dtype, tuple(value.shape), value.stride(), value.device, value.requires_grad
        parts.append(f"{name} {form} {type(value)} {seen[id(value)][0]}")
    return parts


def _array(value: Tensor) -> _Parts:
    raw = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return [f"{value.dtype} {tuple(value.shape)}", raw]


def _code(thing: Any, seen: _Seen) -> _Parts:
    """What decides what a thing of Python's does: code, and the values that the code refers to.

    Of what nobody can tell that by looking, its identity: then it is nowhere else the same.
    """
    if type(thing) in _PLAIN or isinstance(thing, _PLAIN_OF_TORCH):
        return [repr(thing)]
    if isinstance(thing, ModuleType):
        return _file(thing, seen)
    if type(thing) is tuple:
        # Which of them Python keeps once, it decides anew in each process.
        return ["tuple", *_each(cast(tuple[Any, ...], thing), seen)]
    if seen.forms and isinstance(thing, weakref.ref):
        return ["weak", *_code(thing(), seen)]
    if id(thing) in seen:
        return [f"again {seen[id(thing)][0]}"]
    seen[id(thing)] = len(seen), thing
    if isinstance(thing, nn.Module):
        return _module(thing, seen)
    if type(thing).__name__ == "FakeTensor":
        # What code kept of its own tracing, which has no numbers.
        return [_Identity(f"{type(thing)} {id(thing)}")]
    if isinstance(thing, Tensor):
        return _array(thing)
    if isinstance(thing, np.ndarray) and not thing.dtype.hasobject:
        return [f"{thing.dtype.descr} {thing.shape}", thing.tobytes()]
    if isinstance(thing, set | frozenset):
        # A set has another order in each process.
        each = [_code(e, seen.copied()) for e in cast(set[Any], thing)]
        unclear = [part for parts in each for part in parts if isinstance(part, _Identity)]
        return ["set", *sorted(map(_digest, each)), *(unclear if seen.forms else ())]
    if isinstance(thing, list) and type(cast(Any, thing)) is list:
        return ["list", *_each(cast(list[Any], thing), seen)]
    if isinstance(thing, dict) and type(cast(Any, thing)) is dict:
        return ["dict", *_each([*cast(dict[Any, Any], thing).items()], seen)]
    if isinstance(thing, type):
        return _class(thing, seen)
    return _function(thing, seen) or _object(thing, seen)


def _file(thing: ModuleType, seen: _Seen) -> _Parts:
    """Return the text of a module of one's own and of those that it refers to; of a package all.

    What is in a package's memory follows from who else has imported what of it: its files do not.
    """
    name, path = thing.__name__, Path(getattr(thing, "__file__", None) or "")
    installed = bool({"site-packages", "dist-packages"} & set(path.parts))
    known = installed or _is_of_known(name) or name.partition(".")[0] == "fedpact"
    if not seen.files or id(thing) in seen or known or not path.is_file():
        return [name]
    seen[id(thing)] = len(seen), thing
    if hasattr(thing, "__path__"):
        return [name, *(each.read_bytes() for each in sorted(path.parent.rglob("*.py")))]
    inside = [each for _, each in sorted(vars(thing).items()) if isinstance(each, ModuleType)]
    return [name, path.read_bytes(), *_each(inside, seen)]


def _class(thing: type, seen: _Seen) -> _Parts:
    name = f"{thing.__module__}.{thing.__qualname__}"
    if _is_known(thing) or (seen.forms and _is_installed(thing)):
        return [name]
    # What Python itself puts into a class is no code, and what abc does is this process's.
    own = {
        key: value
        for key, value in vars(thing).items()
        if key != "_abc_impl"
        and (not key.startswith("__") or hasattr(value, "__code__") or hasattr(value, "__func__"))
    }
    return [thing.__qualname__, *_each((*thing.__bases__, own), seen)]


def _function(thing: Any, seen: _Seen) -> _Parts | None:
    """Return what decides what a function or method does, None where it is neither."""
    if isinstance(thing, MethodType | staticmethod | classmethod):
        own = cast(Any, thing)
        return [type(own).__name__, *_each((own.__func__, getattr(own, "__self__", None)), seen)]
    if isinstance(thing, property):
        return ["property", *_each((thing.fget, thing.fset, thing.fdel), seen)]
    if isinstance(thing, BuiltinFunctionType):
        return [thing.__qualname__, *_code(thing.__self__, seen)]
    if not isinstance(thing, FunctionType):
        return None
    if _is_known(thing) or (seen.forms and _is_installed(thing)):
        return [f"{thing.__module__}.{thing.__qualname__}"]
    code, space = thing.__code__, thing.__globals__
    used = {name: space[name] for name in sorted(_globals(code)) if name in space}
    values = thing.__defaults__, thing.__kwdefaults__, _closure(thing), used, vars(thing)
    return [*_bytes(code), *_each(values, seen)]


def _object(thing: Any, seen: _Seen) -> _Parts:
    """Return an object's class and what it holds, as a copy of it would be made."""
    try:
        made = thing.__reduce_ex__(4)
    except Exception:
        return [_Identity(f"{type(thing)} {id(thing)}")]
    if isinstance(made, str):
        return [made, *_code(getattr(thing, "__wrapped__", None), seen)]
    first, *rest = made
    # What it holds beside its state comes as iterators.
    held = [[*each] if hasattr(each, "__next__") else each for each in rest]
    return [type(thing).__qualname__, *_each((type(thing), first, *held), seen)]


def _closure(thing: FunctionType) -> list[Any]:
    found: list[Any] = []
    for cell in thing.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not bound yet
            found.append(None)
    return found


def _globals(code: CodeType) -> set[str]:
    """Return the global names that code loads, that of functions inside it included."""
    loads = {"LOAD_GLOBAL", "LOAD_NAME"}
    found = {str(i.argval) for i in dis.get_instructions(code) if i.opname in loads}
    return found.union(*(_globals(c) for c in code.co_consts if isinstance(c, CodeType)))


def _each(things: Sequence[Any], seen: _Seen) -> _Parts:
    return [str(len(things)), *(text for thing in things for text in _code(thing, seen))]


def _bytes(code: CodeType) -> _Parts:
    inner = [part for c in code.co_consts if isinstance(c, CodeType) for part in _bytes(c)]
    others = [c for c in code.co_consts if not isinstance(c, CodeType)]
    plain = [repr(sorted(map(repr, c))) if isinstance(c, frozenset) else repr(c) for c in others]
    return [code.co_code, repr(code.co_names), *plain, *inner]


def _is_known(thing: Any) -> bool:
    """Whether a class or function is Python's own, numpy's or torch's: then its name says which."""
    return _is_of_known(str(thing.__module__))


def _is_installed(thing: Any) -> bool:
    """Whether it is an installed package's by its name, whose code this process has read once."""
    module = sys.modules.get(str(thing.__module__))
    found: Any = module
    for part in thing.__qualname__.split("."):
        found = getattr(found, part, None)
    parts = Path(getattr(module, "__file__", None) or "").parts
    return found is thing and bool({"site-packages", "dist-packages"} & set(parts))


def _is_of_known(module: str) -> bool:
    package = module.partition(".")[0]
    return package in ("torch", "numpy") or (
        package in sys.stdlib_module_names and package != "__main__"
    )


_DIGITS: Final = 16
_WEIGHTS: Final = ".weights"
_HANDED: Final = re.compile(rf"[A-Za-z0-9_.+-]+@[0-9a-f]{{{_DIGITS}}}")

_kept: dict[str, Callable[..., Any]] = {}


def is_handed(name: str) -> bool:
    """Whether a plan's data, model or loss was handed in from Python, so that it names no place."""
    return bool(_HANDED.fullmatch(name))


def is_own(name: str) -> bool:
    """Whether a plan's model or loss is code of the user's, of a file or handed in."""
    return ":" in name or is_handed(name)


def brings_weights(name: str) -> bool:
    """Whether a plan's model was handed in as a module, with the weights that it had."""
    return is_handed(name) and name.partition("@")[0].endswith(_WEIGHTS)


def name_handed_in(name: str, digest: str) -> str:
    """Return what a plan calls what was handed in. digest: SHA-256 in hexadecimal digits."""
    return f"{re.sub(r'[^A-Za-z0-9_.+-]+', '-', name).strip('-') or 'own'}@{digest[:_DIGITS]}"


def get_handed_in(plan: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return what a plan names that was handed in from Python, by the key that has it.

    plan: its content, as plan.json has it.
    """
    task = plan.get("task") or {}
    named = {
        "data": [plan.get("data")],
        "model": [plan.get("model")],
        "task.loss": [task.get("loss")],
        "task.metrics": task.get("metrics") or [],
    }
    own = {key: [str(n) for n in names if is_handed(str(n))] for key, names in named.items()}
    return {key: names for key, names in own.items() if names}


def not_in_process(plan: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return what `get_handed_in` does, without what this process has: the data are never kept."""
    own = get_handed_in(plan).items()
    return {key: left for key, names in own if (left := [n for n in names if n not in _kept])}


def with_user_objects(
    plan: Mapping[str, Any], *, model: Any = None, loss: Any = None, metrics: Any = None
) -> dict[str, Any]:
    """Return a plan's content with what is handed in, for the first time or again.

    metrics: one or several, those of a name among them.
    """
    found = dict(plan)
    if model is not None:
        found["model"] = name_object(model)
    own = dict[str, Any]() if loss is None else {"loss": name_of_function(loss)}
    if metrics is not None:
        several = cast(list[Any], metrics) if isinstance(metrics, list | tuple) else [metrics]
        own["metrics"] = [name_of_function(one) for one in several]
    return {**found, "task": {**(found.get("task") or {}), **own}} if own else found


def check_same(plan: Mapping[str, Any], *, loss: Any = None, metrics: Any = None) -> None:
    """Keep a loss and metrics of a plan that are handed in again. Raises ModelError: others."""
    own = with_user_objects(plan, loss=loss, metrics=metrics).get("task") or {}
    known = plan.get("task") or {}
    for key, given in (("loss", loss), ("metrics", metrics)):
        if given is not None and own[key] != known.get(key):
            raise ModelError(
                f"{key} is {own[key]!r}, and the run's is {known.get(key)!r}: hand in the same, as "
                "it was then, or leave it out"
            )


def model_again(model: Any, known: str) -> str:
    """Return the name of a run's model that is handed in again. known: what its plan calls it.

    Its weights count for nothing, so a module of the class will do. Raises ModelError: another.
    """
    name = name_object(model)
    kind: Any = type(model) if isinstance(model, nn.Module) else model
    if callable(kind):
        title = getattr(kind, "__name__", type(kind).__name__)
        # What another process calls by its place, as a script that is imported, is the same code.
        same = {name, name_object(kind), name_handed_in(title, digest_of_code(kind))}
        of_class = isinstance(kind, type) and brings_weights(known)
        if known in same or (of_class and known.startswith(name_handed_in(title + _WEIGHTS, ""))):
            return name
    elif name == known:
        return name
    raise ModelError(
        f"model is {name}, and the run's is {known}: hand in the same, as it was then, or leave it "
        "out where the run's names a place (package.module:name) or a model of fedpact's"
    )


def name_object(thing: Any) -> Any:
    """Return what a plan calls a module, class or function; anything else as it is.

    A module is kept as it is now: what becomes of it later changes no run.
    """
    if isinstance(thing, nn.Module):
        kept = copy.deepcopy(thing).cpu()
        name = name_handed_in(type(thing).__name__ + _WEIGHTS, digest_of_module(kept))
        _kept[name] = lambda: copy.deepcopy(kept)
        return name
    if not callable(thing):
        return thing
    title = getattr(thing, "__name__", type(thing).__name__)
    place = f"{getattr(thing, '__module__', None)}:{title}"
    if _found_at(place) is thing:
        return place
    name = name_handed_in(title, digest_of_code(thing))
    _kept[name] = thing
    return name


def name_of_function(thing: Any) -> Any:
    """Return what a plan calls a loss or metric, as `name_object` does; a module is the function.

    It is kept as it is now, and called with outputs and labels.
    """
    if not isinstance(thing, nn.Module):
        return name_object(thing)
    kept = copy.deepcopy(thing).cpu()
    name = name_handed_in(type(thing).__name__, digest_of_module(kept))
    _kept[name] = kept
    return name


def _name_of_factory(thing: Any) -> str:
    found = name_object(thing)
    if not isinstance(found, str):
        raise ValueError(f"{thing!r} is no model: expected a name, a module, a class or a factory")
    return found


Named = Annotated[str, BeforeValidator(_name_of_factory)]
"""A plan's field that names something, or is given it."""

NamedFunction = Annotated[str, BeforeValidator(name_of_function)]
"""A plan's field that names a loss or metric, or is given it."""


def own_factory(name: str, what: str, known: Sequence[str], form: str) -> Callable[..., Any]:
    """Return what a 'package.module:name' names, or what was handed in under a name.

    what, known, form: for the error's text. Raises ModelError: it is no such name, cannot be
    imported, or was handed in to another process.
    """
    if is_handed(name):
        if name not in _kept:
            raise ModelError(
                f"{what} is {name!r}: it was handed in from Python and is no part of the plan; "
                f"hand in the same again, as {what.rpartition('.')[2]}=... of fedpact.run or "
                "fedpact.load, or define it in a file of its own, which a plan can name as "
                "'package.module:name'"
            )
        return _kept[name]
    package, colon, attribute = name.partition(":")
    if not colon:
        raise ModelError(
            f"{what} is {name!r}: expected one of {', '.join(sorted(known))}, or your own as "
            f"'package.module:factory' with {form}"
        )
    # A file beside the configuration is found as `python -m` would find it.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(package), attribute)
    except Exception as error:
        raise ModelError(
            f"{what} is {name!r}: {type(error).__name__}: {error}; expected "
            "'package.module:factory' where the module can be imported from the working directory "
            "or the environment"
        ) from error


def own_function(name: str, what: str, known: Sequence[str], form: str) -> Callable[..., Any]:
    """Return the loss or metric of a name, as `own_factory` does. Raises ModelError: a class."""
    found = own_factory(name, what, known, form)
    if isinstance(found, type):
        raise ModelError(
            f"{what} is {name!r}, which is a class: expected {form}; hand in an object of it, "
            f"{found.__name__}(...), or name a function or an object of a file"
        )
    return found


def _found_at(place: str) -> Any:
    """Return what another process would import there, None for nothing."""
    package, _, attribute = place.partition(":")
    # What runs as __main__ is not imported again, and an interpreter's has no file.
    module = sys.modules.get(package) if package != "__main__" else None
    return getattr(module, attribute, None) if getattr(module, "__file__", None) else None
