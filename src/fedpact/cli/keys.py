"""Mistyped keys of a configuration, found before anything is loaded.

The classes of `fedpact.plan` say which keys there are, but importing them takes seconds: torch is
among what they need. So their fields are read from the source files, without running them. Whatever
is refused here `Plan.read` would refuse, in the same words; all that passes is checked there.
"""

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

from fedpact.configuration import read_configuration, unknown_key
from fedpact.errors import PlanError

_ROOT = Path(__file__).parents[1]
_PLAN = ("fedpact.plan", "Plan")

Model = tuple[str, str]
"""A class of settings: the module that defines it, and its name."""


def check_keys(config: Path | None, overrides: Sequence[str] = ()) -> None:
    """Raise PlanError, naming each, where a configuration has keys that no plan has.

    config: a .toml or .json file, None for the embedded default; overrides: `key=value`, over it.
    """
    if found := list(_unknown(read_configuration(config, overrides), _PLAN, ())):
        raise PlanError("; ".join(found))


def _unknown(raw: object, model: Model, place: tuple[str, ...]) -> Iterator[str]:
    """Every mistake of a table; none where the sources do not tell: the whole check comes later."""
    if not isinstance(raw, dict):
        return
    try:
        known = keys(model)
    except (OSError, LookupError, SyntaxError, ValueError):
        return
    for key, value in raw.items():
        if key not in known:
            yield unknown_key(".".join((*place, key)), known)
        elif (model, key) == (_PLAN, "settings"):
            algorithm = raw.get("algorithm")
            yield from _unknown(value, (f"fedpact.algorithms.{algorithm}", "Settings"), (key,))
        elif (table := known[key]) is not None:
            yield from _unknown(value, table, (*place, key))


def keys(model: Model) -> dict[str, Model | None]:
    """Return the keys of a class and its bases: key -> what its annotation names in fedpact, if so.

    Raises LookupError: no such class, or a base that cannot be read. OSError: no source file.
    """
    module, name = model
    tree = ast.parse(_file(module).read_text(encoding="utf-8"))
    homes = _names(tree, module)
    try:
        (body,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name)
    except ValueError:
        raise LookupError(f"{module} has not one class {name}") from None
    found = dict[str, Model | None]()
    for base in reversed(body.bases):
        home = homes[ast.unparse(base)]
        found |= {} if home == ("pydantic", "BaseModel") else keys(home)
    for line in body.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            table = homes.get(ast.unparse(line.annotation))
            found[line.target.id] = table if table and table[0].startswith("fedpact.") else None
    return found


def _names(tree: ast.Module, module: str) -> dict[str, Model]:
    """What the names of a module's top level stand for; `fedavg.Settings` for those of a module."""
    found = {n.name: (module, n.name) for n in tree.body if isinstance(n, ast.ClassDef)}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                name = alias.asname or alias.name
                found[name] = (node.module, alias.name)
                found[f"{name}.Settings"] = (f"{node.module}.{alias.name}", "Settings")
    return found


def _file(module: str) -> Path:
    path = _ROOT.joinpath(*module.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
