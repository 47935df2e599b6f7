"""Which module answers for which trainable parameter: a layer with a rule, or a fallback unit.

A layer whose rule is known answers for its own parameters. Any other owner of parameters is a unit:
the fallback computes its gradients sample by sample. A unit is promoted to its parent where it does
not map tensors [B, ...] to one tensor [B, ...], and a parameter with two owners makes a unit of
their common ancestor. The first pass settles the cover; it grows towards the root only.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from fedpact.errors import ModelError
from fedpact.params import FlatModel
from fedpact.persample.fallback import Unit
from fedpact.persample.layers import Layer, layer_of
from fedpact.persample.norms import Part
from fedpact.persample.tape import Call, named_modules

Path = tuple[str, ...]


class NotAUnit(Exception):
    """A unit was called with, or returned, what cannot be split by record."""

    def __init__(self, owner: "Owner", why: str) -> None:
        super().__init__(f"module {owner.path!r} {why}")
        self.owner = owner


@dataclass(frozen=True, eq=False)
class Owner:
    """A module that answers for parameters. names: its own parameter names -> the model's.

    layer: what is known of it, None for a unit.
    """

    path: str
    module: nn.Module
    names: dict[str, str]
    layer: Layer | None
    measure: Callable[[list[Call]], Part]

    def accept(self, batch: int, call: Call, output: object) -> None:
        """Raise where a call's leading dimension is not the batch: ModelError, or NotAUnit."""
        shapes = [tuple(t.shape) for t in call.tensors]
        led = bool(shapes) and all(shape[:1] == (batch,) for shape in shapes)
        if self.layer is None:
            constants = (bool, int, float, str, type(None))
            others = [a for a in call.values if not isinstance(a, (Tensor, *constants))]
            if not (led and not others and isinstance(output, Tensor) and len(output) == batch):
                raise NotAUnit(self, "does not map tensors [B, ...] to one tensor [B, ...]")
        elif not (led and len(shapes[0]) >= self.layer.dimensions(self.module)):
            raise ModelError(
                f"layer {self.path!r} ({type(self.module).__name__}) was given {shapes} in a batch "
                f"of {batch} records: expected the batch as leading dimension, so that each "
                "record's gradient can be bounded; keep x [B, ...] in front of every layer"
            )


class Cover:
    """The owners of a model's trainable parameters, each parameter with exactly one."""

    def __init__(self, model: FlatModel) -> None:
        self._root = model.module
        named = dict(model.module.named_parameters())
        self._flat = {id(named[name]): name for name, _ in model.views(model.vector)}
        # A module may stand at several paths, and a parameter in several modules.
        self._paths: dict[int, list[Path]] = defaultdict(list)
        self._owners_of: dict[int, list[nn.Module]] = defaultdict(list)
        for path, module in named_modules(self._root):
            self._paths[id(module)].append(tuple(path.split(".")) if path else ())
        for module in self._root.modules():
            for _, p in module.named_parameters(recurse=False):
                self._owners_of[id(p)].append(module)
        self.owners: list[Owner] = []
        for module in self._root.modules():
            if self._names(module, recurse=False) and not self._covered(module):
                self._cover(module)

    def promote(self, owner: Owner) -> None:
        """Replace a unit by its parent. Raises ModelError where it is the root."""
        paths = self._paths[id(owner.module)]
        if () in paths:
            raise ModelError(
                f"model {type(self._root).__name__} does not map a batch [B, ...] to one tensor "
                "[B, ...]: expected a row for each record; join several outputs to one tensor"
            )
        self._add_unit(self._ancestor([path[:-1] for path in paths]))

    def _cover(self, module: nn.Module) -> None:
        names, layer = self._names(module, recurse=False), layer_of(module)
        own = list(module.parameters(recurse=False))
        if layer is None or any(len(self._owners_of[id(p)]) > 1 for p in own):
            self._add_unit(module)
        else:
            path = ".".join(self._paths[id(module)][0])
            rule, trainable = layer.rule, frozenset(names)

            def measure(calls: list[Call]) -> Part:
                return rule(module, calls, trainable)

            self.owners.append(Owner(path, module, names, layer, measure))

    def _add_unit(self, module: nn.Module) -> None:
        """Make a unit of the module, or of the nearest module above that holds its parameters."""
        inside = set(module.modules())
        holders = [m for p in module.parameters() for m in self._owners_of[id(p)]]
        outside = [m for m in holders if m not in inside]
        if outside:
            above = [path for m in (module, *outside) for path in self._paths[id(m)]]
            return self._add_unit(self._ancestor(above))
        path, names = ".".join(self._paths[id(module)][0]), self._names(module, recurse=True)
        unit = Unit(path, module, frozenset(names))
        self.owners = [o for o in self.owners if o.module not in inside]
        self.owners.append(Owner(path, module, names, None, unit.measure))

    def _names(self, module: nn.Module, recurse: bool) -> dict[str, str]:
        own = module.named_parameters(recurse=recurse)
        return {local: self._flat[id(p)] for local, p in own if id(p) in self._flat}

    def _covered(self, module: nn.Module) -> bool:
        return any(o.layer is None and module in set(o.module.modules()) for o in self.owners)

    def _ancestor(self, paths: list[Path]) -> nn.Module:
        common: list[str] = []
        for names in zip(*paths, strict=False):
            if len(set(names)) > 1:
                break
            common.append(names[0])
        return self._root.get_submodule(".".join(common))
