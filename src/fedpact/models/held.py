"""The numbers that a module holds, and what has to be so of one that is made more than once."""

from collections.abc import Iterator
from typing import Any, Final, cast

import numpy as np
import torch
from torch import Tensor, nn

from fedpact.errors import ModelError

_WIDE: Final = {"b": bool, "i": np.int64, "u": np.int64, "f": np.float64, "c": np.complex128}
"""A type of torch's for each kind of numpy's numbers."""


def all_held(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors and arrays of a module by name.

    They are its weights and buffers, and whatever is an attribute of it, of its class or of its
    layers: by itself, or in lists, tuples and dicts, modules in these included.
    """
    found, seen = dict[str, Tensor](), dict[int, Any]()
    waiting = [("", cast(Any, module))]
    while waiting:
        name, thing = waiting.pop()
        if isinstance(thing, Tensor):
            found[name] = thing
        elif isinstance(thing, np.ndarray):
            if wide := _WIDE.get(thing.dtype.kind):
                found[name] = torch.from_numpy(thing.astype(wide))
        elif isinstance(thing, nn.Module | list | tuple | dict) and id(thing) not in seen:
            # Kept too, so that nothing else comes to have its identity.
            seen[id(thing)] = thing
            inner = reversed([*_inside(thing)])
            waiting += [(".".join(filter(None, (name, key))), value) for key, value in inner]
    return found


def _inside(thing: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(thing, nn.Module):
        # Where torch itself keeps layers and tensors is no part of their names.
        base, parts = vars(nn.Module()), dict[str, Any]()
        for kind in reversed(type(thing).__mro__):
            parts |= vars(kind)
        parts |= {key: value for key, value in vars(thing).items() if key not in base}
        for named in (thing.named_parameters, thing.named_buffers):
            parts |= dict(named(recurse=False))
        return iter({**parts, **dict(thing.named_children())}.items())
    pairs = cast(Any, thing).items() if isinstance(thing, dict) else enumerate(thing)
    return ((str(key), value) for key, value in pairs)


def check_apart(name: str, one: nn.Module, other: nn.Module) -> None:
    """Raise ModelError: two modules of one name have weights in common that are trained.

    All parties of a simulation would then compute with one model, each in turn with its weights.
    """
    known = {id(p) for p in one.parameters() if p.requires_grad}
    if one is other or any(id(p) in known for p in other.parameters()):
        raise ModelError(
            f"model {name!r} returns a module, or a part of one, that was there before: expected a "
            "new one at every call, as each party has its own, and training writes to it; return "
            "copy.deepcopy(module), or hand in the module itself"
        )


def check_repeated(name: str, one: nn.Module, other: nn.Module) -> None:
    """Raise ModelError: modules of one name, made from one seed, hold other numbers."""
    ours, theirs = all_held(one), all_held(other)
    odd = sorted(n for n in ours.keys() | theirs if not _same(ours.get(n), theirs.get(n)))
    if odd:
        more = f" and {len(odd) - 3} others" * (len(odd) > 3)
        raise ModelError(
            f"model {name!r} has another {', '.join(odd[:3])}{more} at each call, from one seed: "
            "each party would compute with another model, and none with the one that is saved; "
            "draw from torch's generator (torch.rand, torch.randn), which follows the plan's seed, "
            "and from no other (numpy, random)"
        )


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())


def alike(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same, and that is not one number all over."""
    return _same(one, other) and bool((one != one.flatten()[:1]).any())
