"""What a module holds: found once, compared after each record, and put back.

Held are its parameters and buffers with their gradients, its submodules, of which class each is and
whether it trains, attributes of all these, and what lies in lists, dicts, sets, tuples, NumPy's
arrays and bytearrays of theirs. Tensors are compared by the bytes of their memory, so that no way
to write to them is passed over (`p.data`, `b.numpy()`). What else there is, other objects,
variables of files, closures, is not held.
"""

from collections import deque
from contextlib import suppress
from operator import is_
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy


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
