"""Initial weights: from a finished run, from a file, or from the user's module.

initial = "runs/first"             a finished run or a file of weights; or the table

    [initial]
    weights = "model.safetensors"      the model's state_dict, or the folder of a run
    sha256 = "..."                     of that file; by default computed when the plan is read
    trained_on = "..."                 what the weights were trained on; required to state an ε

The initial weights are public, the same at every party, and part of the plan. A finished private
run records what its model was trained on and the ε spent. `trained_on` alone describes the weights
of a module that was passed in.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Self, cast

import numpy as np
import torch
from pydantic import AfterValidator, BaseModel, Field, model_validator
from torch import Tensor, nn

from fedpact.common.configuration import FROZEN
from fedpact.common.errors import ModelError, PlanError
from fedpact.common.format import list_some
from fedpact.common.run_settings import JoinedText
from fedpact.common.user_code import (
    block_of,
    brings_weights,
    is_own,
    lower_digest,
    read_checked,
    tensors_of,
)
from fedpact.models.constants import find_library_tensors, is_constant

_WIDE: Final = {"b": bool, "i": np.int64, "u": np.int64, "f": np.float64, "c": np.complex128}
"""A type that torch has for each kind of numpy numbers."""


def all_held(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors and arrays of a module by name.

    They are its parameters and buffers, and the attributes of the module, its class and its layers,
    also inside lists, tuples, dicts and modules.
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
            # Keep a reference, so that ids stay unique.
            seen[id(thing)] = thing
            inner = reversed([*_inside(thing)])
            waiting += [(".".join(filter(None, (name, key))), value) for key, value in inner]
    return found


def _inside(thing: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(thing, nn.Module):
        # torch's own containers are no part of the names.
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
    """Raise ModelError if two modules of one name share trained weights.

    All parties of a simulation would then write to the same model.
    """
    known = {id(p) for p in one.parameters() if p.requires_grad}
    if one is other or any(id(p) in known for p in other.parameters()):
        raise ModelError(
            f"model {name!r} returns a module, or a part of one, that was there before: expected a "
            "new one at every call, as each party has its own, and training writes to it; return "
            "copy.deepcopy(module), or pass in the module itself"
        )


def check_repeated(name: str, one: nn.Module, other: nn.Module) -> None:
    """Raise ModelError if modules of one name, made from one seed, hold different numbers."""
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


_SETTING = "initial.weights"
_RELEASED = (
    "weights that were chosen by a site's records release them before anything is charged, so no ε "
    "can be stated"
)
_INSTEAD = (
    "hand in its class or a factory, which draws them from torch's generator and does not seed it; "
    'or say what chose them: initial = {"trained_on": "ImageNet-1k"}, or of what no record has '
    'chosen {"trained_on": "nothing: a mask"}, or "nothing: drawn from a seed of its own"'
)
_ITSELF = ", by itself: it adds to this run's for whoever is in both"
"""Part of what a run states of its weights; other statements do not contain it."""
_BESIDE = "; said of it: "
"""Separates a run's statement of its weights from the user's words."""


class InitialSettings(BaseModel):
    """Initial weights, instead of weights drawn from the seed."""

    model_config = FROZEN
    weights: str | None = Field(default=None, min_length=1)
    """A file of the model's weights (.safetensors or torch's), or the folder of a run that has
    ended."""
    sha256: Annotated[str | None, AfterValidator(lower_digest)] = None
    """Of that file; by default as it is when the plan is read."""
    trained_on: JoinedText | None = None
    """What the weights were chosen by; a private run that has ended says it by itself, and what
    a run says stands beside it. Without weights: what those were chosen by that a model of
    one's own brings."""

    @model_validator(mode="before")
    @classmethod
    def _read_name(cls, raw: Any) -> Any:
        raw = raw if isinstance(raw, Mapping | BaseModel) else {"weights": raw}
        if not isinstance(raw, Mapping) or "weights" not in raw:
            return raw
        # A run's result has the folder that its weights are in.
        weights = getattr(raw["weights"], "folder", raw["weights"])
        weights = os.fspath(weights) if isinstance(weights, os.PathLike) else weights
        if not isinstance(weights, str | None):
            raise ValueError(
                f"{weights!r}: expected a run's folder, a file of weights, or a table with weights"
            )
        return {**raw, "weights": weights}

    @model_validator(mode="after")
    def _check_and_record(self) -> Self:
        if self.weights is None:
            if self.sha256 is not None:
                raise ValueError("initial.sha256 without initial.weights: name the file")
            return self
        # plan.json records what was found. Only validators have seen the plan yet.
        if self.sha256 is None:
            try:
                block = block_of(self.file(), _SETTING)
            except ModelError as error:
                raise ValueError(str(error)) from None
            self._set_found("sha256", hashlib.sha256(block).hexdigest())
            private = _read_origin(self.file(), self.sha256)[0]
            if self.trained_on is None and private:
                self._set_found("trained_on", private)
        said = self.trained_on or _ITSELF
        if _ITSELF not in said and _BESIDE not in said:
            # The user's words are added to the run's statement, and never replace it.
            known = "".join(_read_origin(self.file(), self.sha256)[:2])
            self._set_found("trained_on", f"{known}{_BESIDE}{said}" if known else said)
        return self

    def _set_found(self, name: str, value: str) -> None:
        object.__setattr__(self, name, value)
        self.model_fields_set.add(name)

    def check_model(self, model: str) -> None:
        """Raise ValueError if trained_on describes weights that do not exist."""
        if self.trained_on is not None and self.weights is None and not is_own(model):
            raise ValueError(
                f"initial.trained_on without initial.weights: model {model!r} draws its weights "
                "from the seed; name the file that it is of"
            )

    def why_unstated(self, model: str) -> str:
        """Return why no ε can be stated with these initial weights; "" if it can."""
        if self.trained_on is not None:
            return ""
        if self.weights is not None:
            return (
                f"initial.weights = {self.weights!r} without initial.trained_on: {_RELEASED}; "
                f"{_read_origin(self.file(), self.sha256)[2]}"
                'say what they were trained on (trained_on = "ImageNet-1k"), or name the '
                "folder of a private run that has ended, which says it by itself"
            )
        if not brings_weights(model):
            return ""
        return f"model is {model!r}, a module with the weights that it has: {_RELEASED}; {_INSTEAD}"

    def check_drawn(self, model: str, first: nn.Module, second: nn.Module) -> None:
        """Raise PlanError unless the model draws its weights or trained_on describes them.

        first, second: modules made from two seeds, which must share no tensor but constants (see
        models.constants). A run's statement covers its weights, no other numbers of the module.
        """
        given = self.weights is not None
        said = self.trained_on
        if said is not None and not (given and _ITSELF in said and _BESIDE not in said):
            return
        ours, theirs = all_held(first), all_held(second)
        if given:
            filled = {id(value) for value in first.state_dict(keep_vars=True).values()}
            ours = {n: v for n, v in ours.items() if id(v) not in filled}
        same = [n for n, v in ours.items() if n in theirs and _same(v, theirs[n])]
        public = find_library_tensors(first)
        same = [n for n in same if ours[n].numel() and id(ours[n]) not in public]
        same = [n for n in same if not is_constant(ours[n])]
        if not same:
            return
        told = ", ".join(same[:3]) + f" and {len(same) - 3} others" * (len(same) > 3)
        if not given:
            raise PlanError(
                f"model {model!r} begins with the same {told}, whatever the seed: {_RELEASED}; "
                f"{_INSTEAD}"
            )
        raise PlanError(
            f"model {model!r} brings {told} beside the weights of initial.weights, and the run "
            f"that these are of says nothing of it: {_RELEASED}; say in words of your own what "
            'chose both: initial = {"weights": ..., "trained_on": "..."}'
        )

    @property
    def uncovered(self) -> str:
        """What ε does not cover of the initial weights, "" for nothing."""
        if self.trained_on is None:
            return ""
        return (
            f"What the model's first weights were trained on: {self.trained_on}. What that has "
            "cost whoever is in it is no part of this run's ε."
        )

    def describe(self) -> str:
        """Describe the initial weights in a sentence; "" if they are drawn from the seed."""
        if self.weights is None:
            brought = f"The model began with weights of its own, trained on: {self.trained_on}."
            return "" if self.trained_on is None else brought
        return (
            f"The model began with given weights, SHA-256 {self.sha256}, trained on: "
            f"{self.trained_on or 'not said'}."
        )

    def tensors(self, at: Path = Path()) -> Mapping[str, Tensor] | None:
        """Return the weights by name, None if there are none. at: the base of a relative path.

        Raises ModelError: no file of tensors with that SHA-256.
        """
        if self.weights is None:
            return None
        path = self.file(at)
        block = read_checked(path, self.sha256, _SETTING)
        return _tensors(path, tensors_of(path, block, _SETTING))

    def file(self, at: Path = Path()) -> Path:
        """Return the file, or the model in the folder, relative to a folder."""
        path = at / str(self.weights)
        if path.is_dir():
            run = path / "run" if (path / "federation.toml").exists() else path
            path = run / "model.safetensors"
        return path

    def check_form(self, classes: Sequence[str], features: Sequence[str]) -> None:
        """Raise PlanError if the weights are of a run whose classes or columns are others.

        Their number alone would fit, and every answer would mean something else.
        """
        path = self.file().parent / "records.json" if self.weights is not None else None
        if path is None or not path.exists():
            return
        known = json.loads(path.read_text(encoding="utf-8"))
        for name, own in (("classes", classes if len(classes) > 1 else ()), ("features", features)):
            if own and known.get(name) and [*known[name]] != [*own]:
                raise PlanError(
                    f"{_SETTING} is of a run with {name} {list_some(known[name])}, and this plan "
                    f"has {list_some(own)}: declare records.{name} in that order, or give the "
                    "file of the weights from another folder"
                )


def fill(module: nn.Module, start: Mapping[str, Tensor]) -> None:
    """Set a module's weights.

    Raises ModelError: other names, shapes or types of number, or numbers that are not finite.
    """
    needed, given = _forms(module.state_dict()), _forms(start)
    odd = sorted(name for name in needed | given if needed.get(name) != given.get(name))
    if odd:
        told = "; ".join(
            f"{n}: {given.get(n, 'missing')}, expected {needed.get(n, 'none')}" for n in odd
        )
        raise ModelError(
            f"{_SETTING} does not fit the plan's model: {told}; give the weights of the same "
            "model, on records of the same form, converted to its types of number"
        )
    for name, value in start.items():
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise ModelError(f"{_SETTING}: {name} holds NaN or infinity: expected finite numbers")
    module.load_state_dict(dict(start))


def _forms(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    return {n: f"{str(v.dtype)[6:]} {tuple(v.shape)}" for n, v in tensors.items()}


def _tensors(path: Path, found: object) -> dict[str, Tensor]:
    what = f"{type(found).__name__}"
    if isinstance(found, Mapping):
        held = cast(Mapping[object, object], found)
        odd = {str(n): type(v).__name__ for n, v in held.items() if not isinstance(v, Tensor)}
        if not odd:
            return {str(name): cast(Tensor, value) for name, value in held.items()}
        what = ", ".join(f"{name} ({kind})" for name, kind in list(odd.items())[:4])
    raise ModelError(
        f"{_SETTING}: {path} holds {what}, which is no tensor: expected the state_dict alone; of a "
        'checkpoint save that part, as torch.save(torch.load(path)["state_dict"], "model.pt")'
    )


def _read_origin(file: Path, sha256: str | None) -> tuple[str, str, str]:
    """Return what the run in a file's folder says of it: by a private run, by another, and why not.

    A run describes only files that it wrote and whose SHA-256 it recorded. Each is "" for nothing.
    """
    run = file.parent
    try:
        summary = json.loads((run / "summary.json").read_bytes())
        plan = json.loads((run / "plan.json").read_bytes())
        wrote = sha256 in summary["weights"].values()
        if summary["private"] is False:
            return "", f"{plan['data']} by the run {run.name}, which had no privacy" * wrote, ""
        spent, deltas = summary["epsilon"], summary["delta"]
        if not (summary["private"] is True and spent and deltas):
            return "", "", ""
        if not wrote:
            return "", "", f"{file.name} is none of the weights that the run in {run} wrote: "
        unit, adjacency = plan["privacy"]["unit"], summary["adjacency"]
        # Its own initial weights and features are in its model, too.
        before = [(plan.get(t) or {}).get("trained_on") for t in ("initial", "features")]
        others = f", given {summary['condition']}" * bool(summary.get("condition"))
        # Records that were held out pay for evaluations, which may have ended the run; those whose
        # answers were all lost may have been charged.
        held = json.loads((run / "privacy.json").read_bytes())["evaluation"] or {}
        found = summary["evaluation"] or {"epsilon_spent": {"": held.get("epsilon_reserved", 0.0)}}
        cost = max([*spent.values(), *found["epsilon_spent"].values()])
        delta = max([*deltas.values(), held.get("delta", 0.0)])
        told = (
            f"{plan['data']} by the private run {run.name}, which spent "
            f"ε <= {cost!r} at δ = {delta!r} per {unit}, "
            f"{adjacency}{others}{_ITSELF}"
        )
        return "; before that, on: ".join([told, *filter(None, before)]), "", ""
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return "", "", ""
