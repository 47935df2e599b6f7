"""User code and objects in a plan: their names, their digests, and how they are found again.

A class or function that any process can import is named `package.module:name`, and a plan with it
is carried out anywhere. What has no such place (a module that exists already, a class of a
notebook, a lambda) is kept by this process as NAME@DIGEST: the plan then says which one it was, and
another process needs it handed in again. A model that brings weights is NAME.weights@DIGEST.
"""

import copy
import hashlib
import importlib
import inspect
import io
import os
import pickle
import re
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from textwrap import dedent
from types import CodeType, FunctionType, ModuleType
from typing import Annotated, Any, Final, cast

import torch
from pydantic import BeforeValidator
from torch import Tensor, nn

from fedpact.common.errors import ModelError


def digest_of_code(thing: Any) -> str:
    """Return the digest of a class, function or object; of a module with its weights.

    Of what cannot be written, as a lock, it follows from the object's identity.
    """
    try:
        return _digest(thing, forms=False)
    except Exception:
        return hashlib.sha256(f"{type(thing)} {id(thing)}".encode()).hexdigest()


def digest_of_form(*things: Any) -> str | None:
    """Return the digest of what modules and functions compute with weights of any values.

    That is code, attributes, and forms of weights and buffers, within this process. None where
    something cannot be written.
    """
    try:
        return _digest(things, forms=True)
    except Exception:
        return None


def _digest(thing: Any, forms: bool) -> str:
    digester = _Digester(forms)
    digester.dump(thing)
    return hashlib.sha256(digester.raw.getvalue()).hexdigest()


class _Digester(pickle.Pickler):
    """Writes what decides what a thing does: the source of code and what the code refers to.

    What is of Python, torch or an installed package is known by its name. forms: whether of a
    module's weights and buffers the forms count, and not the numbers.
    """

    def __init__(self, forms: bool) -> None:
        self.raw, self.forms = io.BytesIO(), forms
        # With each thing its number, and it itself, so that no other comes to its identity.
        self._seen: dict[int, tuple[int, Any]] = {}
        super().__init__(self.raw, 4)
        # Which equal strings Python keeps once, it decides anew in each process: no references.
        self.fast = True

    def persistent_id(self, obj: Any) -> Any:
        """Return what is written in place of what pickle would write by name or not at all."""
        if isinstance(obj, set | frozenset):  # whose order differs between processes
            return "set", sorted(_digest(one, self.forms) for one in cast(set[Any], obj))
        if isinstance(obj, ModuleType):
            return "module", obj.__name__
        if isinstance(obj, weakref.ref):
            return "weak", obj()
        if isinstance(obj, property):
            return "property", obj.fget, obj.fset, obj.fdel
        if isinstance(obj, staticmethod | classmethod):
            return type(obj).__name__, obj.__func__
        if isinstance(obj, cached_property):
            return "cached_property", obj.func
        if hasattr(obj, "cache_clear"):  # a function whose results are kept
            return "cached", getattr(obj, "__wrapped__", None)
        if not isinstance(obj, type | FunctionType | nn.Module | Tensor):
            return None
        return self._again(obj) or self._content(obj)

    def _again(self, thing: Any) -> tuple[str, int] | None:
        """Return the number of what was written already; else number it."""
        if id(thing) in self._seen:
            return "again", self._seen[id(thing)][0]
        self._seen[id(thing)] = len(self._seen), thing
        return None

    def _content(self, thing: Any) -> Any:
        if isinstance(thing, nn.Module):
            weights = self._weights(thing) if self.forms else ()
            # A hook's key is its number in this process.
            state = {
                key: [*value.values()] if key.endswith("_hooks") else value
                for key, value in vars(thing).items()
            }
            return type(thing), weights, state
        if isinstance(thing, Tensor):
            raw = thing.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
            return str(thing.dtype), tuple(thing.shape), thing.requires_grad, raw.tobytes()
        if _is_installed(thing):
            return thing.__module__, thing.__qualname__
        if isinstance(thing, type):
            # Beside functions Python itself puts into a class what is no code of its author's.
            own = {
                key: value
                for key, value in vars(thing).items()
                if key != "_abc_impl"
                and (not key.startswith("__") or isinstance(value, FunctionType))
            }
            return thing.__qualname__, thing.__bases__, own
        code, space = thing.__code__, thing.__globals__
        used = {name: space[name] for name in sorted(_names(code)) if name in space}
        inside = [cell.cell_contents for cell in thing.__closure__ or ()]
        return _source(code), inside, used, thing.__defaults__, thing.__kwdefaults__, vars(thing)

    def _weights(self, module: nn.Module) -> list[Any]:
        """Return each weight's and buffer's form, of one that is tied which it is."""
        every = (module.named_parameters, module.named_buffers)
        return [
            self._again(v)
            or f"{n} {type(v)} {v.dtype} {tuple(v.shape)} {v.stride()} {v.device} {v.requires_grad}"
            for named in every
            for n, v in named(remove_duplicate=False)
        ]


@lru_cache(1024)
def _source(code: CodeType) -> str:
    try:
        text = dedent(inspect.getsource(code))
    except (OSError, TypeError):
        text = ""
    if text and code.co_name != "<lambda>":
        return text
    # Several lambdas stand on one line; and what makes code, as dataclass does, keeps no source.
    values = [c for c in code.co_consts if not isinstance(c, CodeType)]
    inner = [_source(c) for c in code.co_consts if isinstance(c, CodeType)]
    return f"{text} {code.co_code!r} {code.co_names} {values} {inner}"


def _names(code: CodeType) -> set[str]:
    """Return the names that code loads, and functions inside it."""
    inner = (_names(c) for c in code.co_consts if isinstance(c, CodeType))
    return set(code.co_names).union(*inner)


def _is_installed(thing: Any) -> bool:
    """Whether it can be imported by its name, from Python, torch or an installed package."""
    module = sys.modules.get(str(thing.__module__))
    found: Any = module
    for part in thing.__qualname__.split("."):
        found = getattr(found, part, None)
    package = str(thing.__module__).partition(".")[0]
    standard = package in sys.stdlib_module_names and package != "__main__"
    parts = Path(getattr(module, "__file__", None) or "").parts
    return found is thing and (standard or bool({"site-packages", "dist-packages"} & set(parts)))


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
        name = name_handed_in(type(thing).__name__ + _WEIGHTS, digest_of_code(kept))
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
    name = name_handed_in(type(thing).__name__, digest_of_code(kept))
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
                "fedpact.load (fedpact predict and evaluate: --model train.py:Net), or define it "
                "in a file of its own, which a plan can name as "
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
        module = importlib.import_module(package)
        if not hasattr(module, attribute) and hasattr(module, "__path__"):
            importlib.import_module(f"{package}.{attribute}")  # a file of a package
        return getattr(module, attribute)
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
