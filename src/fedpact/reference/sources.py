"""Classes of settings as their source files have them, read without running anything.

Importing them takes seconds, torch is among what they need, and whoever mistypes a key or asks what
one means computes nothing. The tests hold what is read here against the classes themselves.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

Model = tuple[str, str]
"""A class of settings: the module that defines it, and its name."""

_ROOT = Path(__file__).parents[1]
_OURS = "fedpact."


@dataclass(frozen=True)
class Declared:
    """A key as its class declares it. home: the module by whose names it is to be read.

    default: what stands behind "=", None for nothing.
    """

    home: str
    annotation: ast.expr
    default: ast.expr | None


@dataclass(frozen=True)
class _Module:
    heading: str
    defined: dict[str, ast.ClassDef | ast.expr]
    imported: dict[str, Model]


def declared_keys(model: Model) -> dict[str, Declared]:
    """Return the keys of a class and its bases, in their order.

    Raises LookupError: no such class, or a base that cannot be read. OSError: no source file.
    """
    found = dict[str, Declared]()
    for base in reversed(_bases(model)):
        found |= declared_keys(base)
    for line in _class(model).body:
        if not (isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)):
            continue
        if not ast.unparse(line.annotation).startswith("ClassVar["):
            found[line.target.id] = Declared(model[0], line.annotation, line.value)
    return found


def lineage(model: Model) -> Iterator[Model]:
    """The class, then its bases with theirs: the nearest first."""
    yield model
    for base in _bases(model):
        yield from lineage(base)


def docstring(model: Model) -> str:
    """Return what a class says of itself, "" for nothing."""
    return ast.get_docstring(_class(model)) or ""


def heading(module: str) -> str:
    """Return what a module says of itself, "" for nothing."""
    return _read(module).heading


def table(annotation: ast.expr, home: str) -> Model | None:
    """Return the class of ours that an annotation names, None where it names none."""
    try:
        module, meant = resolve(annotation, home)
    except LookupError:
        return None
    return (module, meant.name) if isinstance(meant, ast.ClassDef) else None


def resolve(name: ast.expr, module: str) -> tuple[str, ast.ClassDef | ast.expr]:
    """Return what a name of a module stands for, and the module that defines it.

    Raises LookupError: nothing of ours.
    """
    *packages, last = ast.unparse(name).split(".")
    for package in packages:
        module = ".".join(_read(module).imported[package])
    known = _read(module)
    while last not in known.defined:
        module, last = known.imported[last]
        if not module.startswith(_OURS):
            raise LookupError(f"{module}.{last} is none of fedpact's")
        known = _read(module)
    return module, known.defined[last]


def algorithm_names() -> list[str]:
    """Return the names of all algorithms, sorted; as `algorithms.names`, without loading it."""
    files = (_ROOT / "algorithms").glob("*.py")
    return sorted(file.stem for file in files if not file.stem.startswith("_"))


def _class(model: Model) -> ast.ClassDef:
    found = _read(model[0]).defined.get(model[1])
    if not isinstance(found, ast.ClassDef):
        raise LookupError(f"{model[0]} has no class {model[1]}")
    return found


def _bases(model: Model) -> list[Model]:
    found = list[Model]()
    for base in _class(model).bases:
        if _read(model[0]).imported.get(ast.unparse(base)) == ("pydantic", "BaseModel"):
            continue
        home = table(base, model[0])
        if home is None:
            raise LookupError(f"{ast.unparse(base)}, which {model[1]} is made of, cannot be read")
        found.append(home)
    return found


@cache
def _read(module: str) -> _Module:
    path = _ROOT.joinpath(*module.split(".")[1:])
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = _Module(ast.get_docstring(tree) or "", {}, {})
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            found.defined[node.name] = node
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found.defined[node.targets[0].id] = node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
            found.defined[node.target.id] = node.value
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.imported.update({a.asname or a.name: (node.module, a.name) for a in node.names})
    return found
