"""User code, objects and files of weights in a plan: names, digests, and how they are looked up.

A class or function that any process can import is named `package.module:name`, and its plan can be
carried out anywhere. Other objects (an nn.Module instance, a class of a notebook, a lambda) are
registered in this process as NAME@DIGEST: the plan then identifies the object, but another process
has to be given it again. A model with weights is NAME.weights@DIGEST. A file of weights is named
with its SHA-256, so that all parties have the same.
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
from safetensors.torch import load as load_tensors
from torch import Tensor, nn

from fedpact.common.errors import ModelError, with_colon


def digest_of_code(thing: Any) -> str:
    """Return the digest of a class, function or object; of a module including its weights.

    An object that cannot be serialised, such as a lock, gets a digest of its identity.
    """
    try:
        return _digest(thing, forms=False)
    except Exception:
        return hashlib.sha256(f"{type(thing)} {id(thing)}".encode()).hexdigest()


def digest_of_form(*things: Any) -> str | None:
    """Return a digest of modules and functions that ignores the values of weights and buffers.

    It covers code, attributes and the forms of weights and buffers, within this process. None if
    something cannot be serialised.
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
    """Serialises what determines an object's behaviour: source code and what it refers to.

    Objects of Python, torch and installed packages are written by name only. forms: whether the
    forms of a module's weights and buffers count instead of their values.
    """

    def __init__(self, forms: bool) -> None:
        self.raw, self.forms = io.BytesIO(), forms
        # id -> (number, object); holding the object keeps its id from being reused.
        self._seen: dict[int, tuple[int, Any]] = {}
        super().__init__(self.raw, 4)
        # No memo references: which equal strings are one object differs between processes.
        self.fast = True

    def persistent_id(self, obj: Any) -> Any:
        """Return what to write for objects that pickle writes by name or not at all."""
        if isinstance(obj, set | frozenset):  # its order differs between processes
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
        """Return the number of an object that was written already; else number it."""
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
            # Among names with underscores, only functions are code of the class's author.
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
        """Return the form of each weight and buffer; for a tied one, which it is tied to."""
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
        # Python 3.13 finds the text of `python -c` for all code that was made from strings.
        text = "" if code.co_filename == "<string>" else dedent(inspect.getsource(code))
    except (OSError, TypeError):
        text = ""
    if text and code.co_name != "<lambda>":
        return text
    # One line may hold several lambdas, and generated code (dataclass) has no source.
    values = [c for c in code.co_consts if not isinstance(c, CodeType)]
    inner = [_source(c) for c in code.co_consts if isinstance(c, CodeType)]
    return f"{text} {code.co_code!r} {code.co_names} {values} {inner}"


def _names(code: CodeType) -> set[str]:
    """Return the names that code, and functions inside it, load."""
    inner = (_names(c) for c in code.co_consts if isinstance(c, CodeType))
    return set(code.co_names).union(*inner)


def _is_installed(thing: Any) -> bool:
    """Whether an object can be imported by name from Python or an installed package."""
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
    """Whether a plan's data, model or loss was passed in from Python, so it cannot be imported."""
    return bool(_HANDED.fullmatch(name))


def is_own(name: str) -> bool:
    """Whether a plan's model or loss is the user's code, from a file or passed in."""
    return ":" in name or is_handed(name)


def brings_weights(name: str) -> bool:
    """Whether a plan's model was passed in as a module, with its weights."""
    return is_handed(name) and name.partition("@")[0].endswith(_WEIGHTS)


def name_handed_in(name: str, digest: str) -> str:
    """Return a plan's name for a passed-in object. digest: SHA-256 in hexadecimal digits."""
    return f"{re.sub(r'[^A-Za-z0-9_.+-]+', '-', name).strip('-') or 'own'}@{digest[:_DIGITS]}"


def get_handed_in(plan: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the passed-in objects that a plan names, by key. plan: the content of plan.json."""
    task = plan.get("task") or {}
    named = {
        "data": [plan.get("data")],
        "model": [plan.get("model")],
        "task.loss": [task.get("loss")],
        "task.metrics": task.get("metrics") or [],
    }
    own = {key: [str(n) for n in names if is_handed(str(n))] for key, names in named.items()}
    return {key: names for key, names in own.items() if names}


def with_user_objects(
    plan: Mapping[str, Any], *, model: Any = None, loss: Any = None, metrics: Any = None
) -> dict[str, Any]:
    """Return a plan's content with the names of objects passed in, which are registered.

    metrics: one or several, functions or names.
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
    """Register a plan's loss and metrics again. Raises ModelError: they differ from the plan's."""
    own = with_user_objects(plan, loss=loss, metrics=metrics).get("task") or {}
    known = plan.get("task") or {}
    for key, given in (("loss", loss), ("metrics", metrics)):
        if given is not None and own[key] != known.get(key):
            raise ModelError(
                f"{key} is {own[key]!r}, but the run's is {known.get(key)!r}: pass the same object "
                "as then, or leave it out"
            )


def model_again(model: Any, known: str) -> str:
    """Return the name of a run's model that is passed in again. known: its name in the plan.

    Weights are ignored, so any module of the class will do. Raises ModelError: another model.
    """
    name = name_object(model)
    kind: Any = type(model) if isinstance(model, nn.Module) else model
    if callable(kind):
        title = getattr(kind, "__name__", type(kind).__name__)
        # The same code may have an importable name elsewhere, such as a script that is imported.
        same = {name, name_object(kind), name_handed_in(title, digest_of_code(kind))}
        of_class = isinstance(kind, type) and brings_weights(known)
        if known in same or (of_class and known.startswith(name_handed_in(title + _WEIGHTS, ""))):
            return name
    elif name == known:
        return name
    raise ModelError(
        f"model is {name}, but the run's is {known}: pass the same model as then; leave it out if "
        "the run's is importable (package.module:name) or one of fedpact's models"
    )


def name_object(thing: Any) -> Any:
    """Return a plan's name for a module, class or function; anything else unchanged.

    A module is copied: later changes to it do not affect a run.
    """
    if isinstance(thing, nn.Module):
        kept = copy.deepcopy(thing).cpu()
        return _keep(type(thing).__name__ + _WEIGHTS, kept, lambda: copy.deepcopy(kept))
    if not callable(thing):
        return thing
    title = getattr(thing, "__name__", type(thing).__name__)
    place = f"{getattr(thing, '__module__', None)}:{title}"
    return place if _find(place) is thing else _keep(title, thing, thing)


def name_of_function(thing: Any) -> Any:
    """Return a plan's name for a loss or metric, as `name_object` does.

    A module is copied, and itself called with outputs and labels.
    """
    if not isinstance(thing, nn.Module):
        return name_object(thing)
    kept = copy.deepcopy(thing).cpu()
    return _keep(type(thing).__name__, kept, kept)


def _keep(title: str, thing: Any, factory: Callable[..., Any]) -> str:
    name = name_handed_in(title, digest_of_code(thing))
    _kept[name] = factory
    return name


def _name_of_factory(thing: Any) -> str:
    found = name_object(thing)
    if not isinstance(found, str):
        raise ValueError(f"{thing!r}: expected a model: a name, a module, a class or a factory")
    return found


Named = Annotated[str, BeforeValidator(_name_of_factory)]
"""A plan's field with a model's name; it accepts the model itself."""

NamedFunction = Annotated[str, BeforeValidator(name_of_function)]
"""A plan's field with the name of a loss or metric; it accepts the function itself."""


def own_factory(name: str, what: str, known: Sequence[str], form: str) -> Callable[..., Any]:
    """Return the object of a 'package.module:name', or the one registered under a name.

    what, known, form: for the error's text. Raises ModelError: not such a name, cannot be
    imported, or registered in another process.
    """
    if is_handed(name):
        if name not in _kept:
            raise ModelError(
                f"{what} is {name!r}: it was passed in from Python and is not stored in the plan; "
                f"pass the same again, as {what.rpartition('.')[2]}=... of fedpact.run or "
                "fedpact.load (fedpact predict and evaluate: --model train.py:Net), or define it "
                "in a file, which a plan can name as 'package.module:name'"
            )
        return _kept[name]
    package, colon, attribute = name.partition(":")
    if not colon:
        ours = f"one of {', '.join(sorted(known))}, or " * bool(known)
        raise ModelError(
            f"{what} is {name!r}: expected {ours}your own as "
            f"'package.module:factory' with {form}{with_colon(name)}"
        )
    # Files in the working directory are importable, as with `python -m`.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(package)
        if not hasattr(module, attribute) and hasattr(module, "__path__"):
            importlib.import_module(f"{package}.{attribute}")  # a submodule
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
            f"{what} is {name!r}, which is a class: expected {form}; pass an instance, "
            f"{found.__name__}(...), or name a function or instance in a file"
        )
    return found


def _find(place: str) -> Any:
    """Return the object that another process would import by this name, or None."""
    package, _, attribute = place.partition(":")
    # Another process does not import this __main__, and an interpreter's code has no file.
    module = sys.modules.get(package) if package != "__main__" else None
    return getattr(module, attribute, None) if getattr(module, "__file__", None) else None


def block_of(path: Path, setting: str) -> bytes:
    """Return a file's bytes. setting: what names it, for errors. Raises ModelError: unreadable."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ModelError(
            f"{setting}: {path} cannot be read ({error.strerror}): expected the file of "
            "weights at every party; check the path, which is relative to the directory of a "
            "deployment's party, else to the working directory"
        ) from None


def read_checked(path: Path, sha256: str | None, setting: str) -> bytes:
    """Return a file's bytes. Raises ModelError: unreadable, or not of this SHA-256."""
    block = block_of(path, setting)
    found = hashlib.sha256(block).hexdigest()
    if found != sha256:
        raise ModelError(
            f"{setting}: {path} has SHA-256 {found}: the plan names {sha256}; get the "
            "file that the parties agreed on"
        )
    return block


def tensors_of(path: Path, block: bytes, setting: str) -> Mapping[str, Any]:
    """Return the tensors of a file of safetensors or torch, by name. Raises ModelError: it is none.

    setting: what names the file, for errors.
    """
    try:
        if path.suffix == ".safetensors":
            return load_tensors(block)
        # weights_only: a file of torch's may otherwise hold code, which would be carried out.
        return torch.load(io.BytesIO(block), map_location="cpu", weights_only=True)
    except Exception as error:  # torch's own text is of other settings than a user's
        raise ModelError(
            f"{setting}: {path} cannot be read as weights ({type(error).__name__}): expected a "
            "state_dict, as safetensors.torch.save_file (NAME.safetensors) or torch.save writes "
            "it, without code of other classes"
        ) from error


def lower_digest(sha256: str | None) -> str | None:
    """Return a SHA-256 in lower case. Raises ValueError: it is none."""
    if sha256 is None or re.fullmatch(r"[0-9a-f]{64}", sha256.lower()):
        return sha256 and sha256.lower()
    raise ValueError(
        f"{sha256!r} is no SHA-256: expected 64 hexadecimal digits, as `sha256sum FILE` prints them"
    )
