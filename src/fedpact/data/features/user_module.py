"""A user's module for features, and the check that it changes nothing as it runs.

Held are its parameters and buffers with their gradients, its submodules, of which class each is and
whether it trains, attributes of all these, and what lies in lists, dicts, sets, tuples, NumPy's
arrays and bytearrays of theirs. Tensors are compared by the bytes of their memory, so that no way
to write to them is passed over (`p.data`, `b.numpy()`). What else there is, other objects,
variables of files, closures, is not held.

A module is given each record alone, as a batch of one, with the random state of every other. What
it holds (see held) is put back after each; where its weights or buffers had become others, the
record is left out. What is kept elsewhere, as in a variable of its file, is tried on made-up
records in two orders: a factory is code that its users answer for. Its weights are those that the
factory leaves, or those of a file of safetensors or of torch, whose SHA-256 the plan names.
"""

import hashlib
import inspect
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from operator import is_
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedpact.common.errors import ModelError
from fedpact.common.params import one_thread
from fedpact.common.user_code import own_factory, stable_digest
from fedpact.common.weights import read_checked, tensors_of
from fedpact.data.features.settings import FeatureSettings


class ModuleSnapshot:
    """What a module holds now, whose parameters learn nothing from here on.

    Raises TypeError: tensors that cannot be compared.
    """

    def __init__(self, module: nn.Module) -> None:
        # Kept for good, so that an id is one thing's alone.
        self._seen = dict[int, Any]()
        self._tensors = list[tuple[Tensor, Tensor, Tensor | None, bool]]()
        self._parts = list[tuple[nn.Module, type, dict[str, Any]]]()
        self._memory = dict[int, list[tuple[Tensor, Tensor]]]()
        self._places = list[tuple[Any, list[Any]]]()
        self._arrays = list[tuple[np.ndarray, np.ndarray, bool]]()
        waiting: list[Any] = [module, *module.parameters(), *module.buffers()]
        while waiting:
            thing = waiting.pop()
            if id(thing) not in self._seen:
                self._seen[id(thing)] = thing
                waiting.extend(self._found_in(thing))
        self._module, self._registered = module, _registered(module)

    def put_back(self) -> bool:
        """Put all of it back; whether weights, buffers, submodules or modes had become others."""
        try:
            changed = _registered(self._module) != self._registered
        except Exception:  # torch's own attributes are gone
            changed = True
        for place, kept in self._places:
            if not _same(_listed(place), kept):
                _fill(place, kept)
        for array, kept, writeable in self._arrays:
            try:
                _put_back(array, kept, writeable)
            except ValueError:  # of memory that is another's
                changed = True
        for memory, kept in (pair for pairs in self._memory.values() for pair in pairs):
            if not torch.equal(memory, kept):
                changed = True
                memory.copy_(kept)
        for t, own, gradient, learnt in self._tensors:
            if _form(t) != _form(own):
                changed = True
                t.data = own
            if _gradient(t) is not gradient:
                changed = True
                t.grad = gradient
            if _learns(t) != learnt:
                changed = True
                t.requires_grad_(learnt)
        for part, kind, own in self._parts:
            if type(part) is not kind:
                changed = True
                part.__class__ = kind
            if part.__dict__ is not own:
                object.__setattr__(part, "__dict__", own)
        return changed

    def _found_in(self, thing: Any) -> list[Any]:
        """Note a thing; return what lies in it."""
        if isinstance(thing, Tensor):
            self._note(thing)
            gradient = _gradient(thing)
            return [vars(thing)] if gradient is None else [vars(thing), gradient]
        if isinstance(thing, nn.Module):
            self._parts.append((thing, type(thing), vars(thing)))
            return [vars(thing)]
        if isinstance(thing, np.ndarray):
            return self._note_array(thing)
        if isinstance(thing, dict | list | set | deque | bytearray):
            listed = _listed(thing)
            self._places.append((thing, listed))
            return listed
        return list(cast(tuple[Any, ...], thing)) if isinstance(thing, tuple) else []

    def _note_array(self, array: np.ndarray) -> list[Any]:
        """Note an array; return what lies in it, where it holds objects."""
        writeable = array.flags.writeable
        with suppress(ValueError):  # of what nobody can write to, as a file that is read only
            array.flags.writeable = True
            array.flags.writeable = writeable
            self._arrays.append((array, array.copy(), writeable))
        return array.ravel().tolist() if array.dtype.hasobject else []

    def _note(self, t: Tensor) -> None:
        if t.device.type != "cpu" or t.layout is not torch.strided or is_lazy(t):
            raise TypeError(f"a tensor of {type(t).__name__}, {t.device}, {t.layout}")
        if isinstance(t, nn.Parameter):  # of TorchScript too, which has no requires_grad_
            t.requires_grad_(False)
        self._tensors.append((t, t.detach(), _gradient(t), _learns(t)))
        storage = t.untyped_storage()
        if storage.data_ptr() not in self._memory:
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)
            # Eight bytes at a time are compared fastest.
            even = len(whole) - len(whole) % 8
            parts = whole[:even].view(torch.int64), whole[even:]
            self._memory[storage.data_ptr()] = [(part, part.clone()) for part in parts]


def _put_back(array: np.ndarray, kept: np.ndarray, writeable: bool) -> None:
    """Give an array its numbers again, and its form, which code may set in place as well."""
    if _form_of(array) == _form_of(kept) and array.tobytes() == kept.tobytes():
        if array.flags.writeable != writeable:
            array.flags.writeable = writeable
        return
    array.flags.writeable = True
    if array.dtype != kept.dtype:
        setattr(array, "dtype", kept.dtype)  # noqa: B010 - to numpy's stubs it is read only
    if array.size != kept.size:
        array.resize(kept.shape, refcheck=False)
    if array.shape != kept.shape:
        array.shape = kept.shape
    array[...] = kept
    array.flags.writeable = writeable


def _form_of(array: np.ndarray) -> tuple[Any, ...]:
    return array.shape, array.dtype


def _registered(module: nn.Module) -> list[int]:
    things = (module.modules(), module.parameters(), module.buffers())
    return [*(m.training for m in module.modules()), *(id(thing) for t in things for thing in t)]


def _gradient(t: Tensor) -> Tensor | None:
    return t.grad if t.is_leaf else None


def _form(t: Tensor) -> tuple[Any, ...]:
    return t.data_ptr(), t.dtype, t.shape, t.stride()


def _learns(t: Tensor) -> bool:
    """Whether a gradient is asked for, which is another's to say unless it is a leaf."""
    return t.is_leaf and t.requires_grad


def _listed(place: Any) -> list[Any]:
    return [x for pair in place.items() for x in pair] if isinstance(place, dict) else list(place)


def _same(now: list[Any], kept: list[Any]) -> bool:
    return len(now) == len(kept) and all(map(is_, now, kept))


def _fill(place: Any, kept: list[Any]) -> None:
    if isinstance(place, bytearray):
        # Of one that has a view on it the length is fixed, for whoever writes to it as well.
        place[:] = bytes(kept)
        return
    place.clear()
    if isinstance(place, dict):
        # One by one: what `update` does to a Counter is to count.
        for key, value in zip(kept[::2], kept[1::2], strict=True):
            place[key] = value
    elif isinstance(place, set):
        place.update(kept)
    else:
        place.extend(kept)


_logger = logging.getLogger("fedpact")
_FORM = "factory(shape) -> nn.Module"
# The random state is the process's: two threads of one would draw from each other's.
_ONE_AT_A_TIME = threading.RLock()
_TOLD = 32  # numbers of an answer


def _anew() -> None:
    """In a fork, whose parent may have been within, nobody is."""
    global _ONE_AT_A_TIME
    _ONE_AT_A_TIME = threading.RLock()


os.register_at_fork(after_in_child=_anew)


class Backbone:
    """A frozen module: records [1, *shape] -> numbers [1, ...], the same for equal records.

    shape: a record's. seed: what weights are drawn from where the factory draws some. at: where a
    relative `weights` is looked for. Raises ModelError: the factory, the file, or what comes out.
    """

    def __init__(
        self, settings: FeatureSettings, shape: tuple[int, ...], seed: int, at: Path
    ) -> None:
        self._name = f"features.kind = {settings.kind!r}"
        # Kept, so that no other has its identity while this is known by it.
        self._factory = factory_of(settings.kind)
        # Of now: whoever edits the file while a run goes on has not changed what it computes.
        self.source = _source_of(self._factory)
        with _ONE_AT_A_TIME, one_thread(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            try:
                module = self._factory(shape)
            except (Exception, SystemExit) as error:
                raise ModelError(
                    f"{self._name}: calling it with shape {shape} failed with "
                    f"{type(error).__name__}: {error}; expected {_FORM}"
                ) from error
        if not isinstance(module, nn.Module):
            raise ModelError(f"{self._name} returned {type(module).__name__}: expected {_FORM}")
        if settings.weights is not None:
            self._fill(module, at / settings.weights, settings.sha256)
        self._module, self._seed = module.eval(), seed
        try:
            self._held = ModuleSnapshot(module)
        except TypeError as error:
            raise ModelError(
                f"{self._name} holds {error}: expected dense tensors with values in the CPU's "
                "memory; of lazy layers, have the factory call the module once"
            ) from None
        self._try(shape)

    def __call__(self, x: Tensor) -> Tensor:
        """Return a record's features [p] as float32, of x [1, *shape], times some power of two.

        The largest is in [0.5, 1) then, unless all are 0, so that no length is beyond float32.
        Raises ModelError: another form, or a module that changes itself; and whatever it raises.
        """
        with _ONE_AT_A_TIME, one_thread():
            found = self._asked(x)
        if not isinstance(found, Tensor) or found.dim() < 2 or len(found) != 1:
            what = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise ModelError(
                f"{self._name} answers a batch of one record with {what}: expected [1, ...]"
            )
        if found.is_complex() or not found.numel():
            raise ModelError(
                f"{self._name} answers a record with {found.numel()} numbers of {found.dtype}: "
                "expected at least one, and real numbers, as torch.view_as_real makes of others"
            )
        values = found.detach().reshape(-1).double().numpy()
        exponent = np.frexp(np.abs(values).max())[1]
        return torch.from_numpy(np.ldexp(values, -exponent)).float()

    def _asked(self, x: Tensor) -> Any:
        """Return what the module answers, with all that it holds put back."""
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self._seed)
                found = self._module(x.clone())
        except (Exception, KeyboardInterrupt):  # the latter is the user's, as far as one can tell
            raise
        except BaseException as error:  # as of sys.exit(): at a record it must not end a party
            raise RuntimeError(f"{self._name} raised {type(error).__name__}") from error
        finally:
            changed = self._held.put_back()
        if changed:
            raise ModelError(
                f"{self._name} changes its own weights, buffers or mode at a record, which the "
                "next one would tell of: expected a module that leaves them as they are; what it "
                "fills at its first call, have the factory fill by a call of its own"
            )
        return found

    def _try(self, shape: tuple[int, ...]) -> None:
        """Raise ModelError where made-up records are answered otherwise in another order."""
        generator = torch.Generator().manual_seed(0)
        drawn = torch.rand(1, *shape, generator=generator)
        made = [torch.zeros(1, *shape), torch.ones(1, *shape), drawn]
        with torch.no_grad():
            self.width = self._width(made[0])
            once = [self._answer(x) for x in made]
            self.answer = self._shown(drawn)
            again = [self._answer(x) for x in reversed(made)][::-1]
        of = (*self._module.parameters(), *self._module.buffers())
        state = [t.reshape(-1).view(torch.uint8).numpy().tobytes() for t in of]
        # Of code in other files than the factory's: what it refers to, and what it answers.
        code = stable_digest(self._module).encode()
        self.fingerprint = hashlib.sha256(b"".join([code, *state, *once])).hexdigest()
        if len(set(once)) == 1:
            _logger.warning(
                "%s answers zeros, ones and drawn numbers with the same: a model of it learns "
                "nothing, unless records are of another kind",
                self._name,
            )
        if once != again:
            raise ModelError(
                f"{self._name} answers a record otherwise after others: expected a module without "
                "state of its own and without random numbers but torch's"
            )

    def _width(self, zeros: Tensor) -> int:
        try:
            return len(self(zeros))
        except ModelError:
            raise
        except Exception as error:
            raise ModelError(
                f"{self._name} failed at a record of zeros with {type(error).__name__}: {error}; "
                "expected numbers, which say how many a record has"
            ) from error

    def _shown(self, x: Tensor) -> tuple[float, ...]:
        """Return how an answer begins, of unit length; () where it fails."""
        try:
            found = self(x)
        except Exception:  # whatever a module raises at what is no record of its own
            return ()
        return tuple(F.normalize(found[None])[0, :_TOLD].tolist())

    def _answer(self, x: Tensor) -> bytes:
        try:
            return self(x).numpy().tobytes()
        except ModelError:
            raise
        except Exception as error:  # whatever a module raises at what is no record of its own
            return repr(type(error)).encode()

    def _fill(self, module: nn.Module, path: Path, sha256: str | None) -> None:
        block = read_checked(path, sha256, "features.weights")
        tensors = tensors_of(path, block, "features.weights")
        try:
            module.load_state_dict(tensors)
        except Exception as error:
            raise ModelError(
                f"features.weights: {path} does not fill the module of {self._name} "
                f"({type(error).__name__}: {error}): expected its state_dict, as "
                "safetensors.torch.save_file or torch.save writes it"
            ) from error


def factory_of(kind: str) -> Callable[..., Any]:
    """Return what a 'package.module:factory' names at this moment. Raises ModelError."""
    return own_factory(kind, "features.kind", (), _FORM)


def _source_of(factory: Callable[..., Any]) -> str:
    """Return the SHA-256 of the file that a factory is in, "" where there is none."""
    path = Path(getattr(inspect.getmodule(factory), "__file__", None) or "")
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
