"""The reference of all configuration keys and algorithm settings, read from their classes.

A field of a pydantic class is the only place for a key, its default, its range and, in the string
below it, its meaning. For an algorithm's settings the meaning may be in its file's table instead:

    Symbols   paper  code           meaning, unit or range                        who chooses it
              η      learning_rate  step size, > 0                                plan

Importing the classes takes seconds, since it imports torch. So `make reference` writes them to
reference.json, and a test compares both. An algorithm that is not in it is imported.
"""

import importlib
import json
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fedpact.common.configuration import OTHER_NAMES
from fedpact.common.errors import PlanError, nearest, with_colon

if TYPE_CHECKING:
    from pydantic import BaseModel

FILES: Final = {
    "federation.toml": ("fedpact.deployment.federation", "Federation"),
    "site.toml": ("fedpact.deployment.site_records", "SiteSettings"),
    "policy.toml": ("fedpact.privacy.policy", "Policy"),
}
"""A deployment's other files, and the classes that read them."""

_PACKAGE = Path(__file__).parents[1]
_Schema = Mapping[str, Any]
WRITTEN: Final = Path(__file__).with_name("reference.json")


@dataclass(frozen=True)
class Key:
    """A key. name: with its tables, as in privacy.epsilon. symbol: of the papers, "" for none.

    type, range: as text. default: None for none. required: whether it must be given.
    """

    name: str
    type: str
    range: str
    default: Any
    required: bool
    meaning: str
    symbol: str = ""

    @property
    def last(self) -> str:
        """The name without its tables."""
        return self.name.rsplit(".", 1)[-1]


@dataclass(frozen=True)
class KeyTable:
    """A table. name: "" for the top level; NAME in it is a user's own name."""

    name: str
    about: str
    keys: tuple[Key, ...]


@dataclass(frozen=True)
class Described:
    """An algorithm. title: its full name. text: its file's docstring."""

    name: str
    title: str
    text: str
    settings: KeyTable


def algorithm_names() -> list[str]:
    """Return the sorted names of all algorithms, like `algorithms.names` but without imports."""
    folder = _PACKAGE / "algorithms"
    files = (*folder.glob("*.py"), *folder.glob("private/*.py"))
    return sorted(file.stem for file in files if not file.stem.startswith("_"))


def tables() -> list[KeyTable]:
    """Return the tables of a plan; the first is the top level."""
    return _read_stored()["plan"]


def everything() -> list[KeyTable]:
    """Return all tables of a plan, then those of a deployment's files."""
    return [*tables(), *(table for file in FILES for table in _read_stored()[file])]


def algorithm(name: str) -> Described:
    """Return the description of an algorithm, which may be a user's 'package.module:name'.

    Raises PlanError: there is no such algorithm.
    """
    if ":" in name:
        return _describe(name)
    known = algorithm_names()
    if name not in known:
        expected = f"expected one of {', '.join(known)}{nearest(name, known) or with_colon(name)}"
        raise PlanError(f"algorithm is {name!r}: {expected}")
    return _read_stored()["algorithms"].get(name) or _describe(name)


def find(name: str) -> list[KeyTable]:
    """Return the tables of that name, or the keys of that name with their tables.

    name: of a table ("privacy"), a key ("privacy.epsilon", "epsilon", or one of `OTHER_NAMES`), or
    a deployment's file. Failing that, the keys whose meaning or allowed values have the word.
    Raises PlanError: there is none.
    """
    if name in FILES:
        return _read_stored()[name]
    name = OTHER_NAMES.get(name, name)
    known = tables()
    if found := [table for table in known if f"{table.name}.".startswith(f"{name}.")]:
        return found
    for one in map(algorithm, algorithm_names()):
        known = [*known, KeyTable(f"settings of {one.name}", "", one.settings.keys)]
    word = re.compile(rf"\b{re.escape(name)}\b", re.IGNORECASE)
    for fits in (
        lambda key: name in (key.name, key.last),
        lambda key: word.search(f"{key.type} {key.meaning}"),
    ):
        found = [
            KeyTable(table.name, table.about, keys)
            for table in known
            if (keys := tuple(filter(fits, table.keys)))
        ]
        if found:
            return found
    shown = [*(table.name for table in tables() if table.name), *FILES]
    every = [key for table in known for key in table.keys]
    meant = nearest(name, [*shown, *(key.name for key in every), *(key.last for key in every)])
    raise PlanError(f"{name} is no known table or key: expected one of {', '.join(shown)}{meant}")


# ---------------------------------------------------------------- reading and writing


@cache
def _read_stored() -> dict[str, Any]:
    written = json.loads(WRITTEN.read_text(encoding="utf-8"))
    algorithms = {
        name: Described(**one | {"settings": _table(one["settings"])})
        for name, one in written.pop("algorithms").items()
    }
    return {key: list(map(_table, some)) for key, some in written.items()} | {
        "algorithms": algorithms
    }


def _table(raw: dict[str, Any]) -> KeyTable:
    return KeyTable(raw["name"], raw["about"], tuple(Key(**key) for key in raw["keys"]))


def to_json() -> str:
    """Return reference.json's content, read from the classes."""
    from fedpact.plan import Plan

    found: dict[str, Any] = {"plan": list(describe_class(Plan))}
    for file, (module, name) in FILES.items():
        top, *inner = describe_class(getattr(importlib.import_module(module), name))
        inside = [KeyTable(f"{file} [{t.name}]", t.about, t.keys) for t in inner]
        found[file] = [KeyTable(file, top.about, top.keys), *inside]
    found = {key: [asdict(table) for table in some] for key, some in found.items()}
    found["algorithms"] = {name: asdict(_describe(name)) for name in algorithm_names()}
    # A line for each table and key, for readable diffs.
    return json.dumps(found, ensure_ascii=False).replace('{"name"', '\n{"name"') + "\n"


def _describe(name: str) -> Described:
    from fedpact import algorithms

    module = algorithms.load(name)
    text = (module.__doc__ or "").strip()
    (settings,) = describe_class(module.Settings, "settings")
    return Described(name, re.split("[.;]", text)[0], text, settings)


def describe_class(model: "type[BaseModel]", name: str = "") -> Iterator[KeyTable]:
    """Yield a class as a table, then the tables in it, each with all its keys."""
    schema = _schema_of(model)
    told = dict[str, tuple[str, str]]()
    for base in reversed(model.__mro__):
        for key, (symbol, meaning) in symbols(sys.modules[base.__module__].__doc__ or "").items():
            told[key] = symbol or told.get(key, ("", ""))[0], meaning
    return _tables(schema, schema.get("$defs", {}), name, told)


def _schema_of(model: "type[BaseModel]") -> _Schema:
    """Return the JSON schema of a class, which may be a user's own."""
    from pydantic.json_schema import GenerateJsonSchema, NoDefault

    class AnyClass(GenerateJsonSchema):
        def handle_invalid_for_json_schema(self, schema: Any, error_info: str) -> Any:  # noqa: ARG002
            return {}  # what JSON lacks may be anything

        def get_default_value(self, schema: Any) -> Any:
            factory = schema.get("default_factory")
            return factory() if factory else schema.get("default", NoDefault)

    with warnings.catch_warnings(action="ignore"):  # of such a default
        return model.model_json_schema(schema_generator=AnyClass)


def _tables(
    table: _Schema, defs: Mapping[str, _Schema], name: str, told: Mapping[str, tuple[str, str]]
) -> Iterator[KeyTable]:
    """Yield a class's JSON schema as KeyTables. told: key -> (symbol, meaning) by `symbols`."""
    keys, below = list[Key](), list[KeyTable]()
    for last, value in table["properties"].items():
        words, limits, inner, named = _describe_values(value, defs)
        full = f"{name}.{last}" if name else last
        if inner:
            below += _tables(defs[inner], defs, f"{full}.NAME" if named else full, {})
        if named or not inner:
            required = last in table.get("required", ())
            symbol, meaning = told.get(last, ("", ""))
            meaning = " ".join(value.get("description", meaning).split())
            default = None if required else value.get("default")
            keys.append(Key(full, words, limits, default, required, meaning, symbol.strip("-")))
    about = " ".join(table.get("description", "").split("\n\n")[0].split())
    yield KeyTable(name, re.split(r"(?<=\.) (?=[A-Z`_a-z])", about)[0], tuple(keys))
    yield from below


_COLUMNS = ("paper", "code", "meaning", "who")


def symbols(text: str) -> dict[str, tuple[str, str]]:
    """Return an algorithm's table of symbols: code -> (the paper's symbol, meaning)."""
    lines = text.splitlines()
    heads = [n for n, line in enumerate(lines) if line.startswith("Symbols ")]
    if not heads or not all(column in lines[heads[0]] for column in _COLUMNS):
        return {}
    starts = [lines[heads[0]].index(column) for column in _COLUMNS]
    found, last = dict[str, tuple[str, str]](), ""
    for line in lines[heads[0] + 1 :]:
        if not line.startswith(" "):
            break
        paper, code, meaning = (line[a:b].strip() for a, b in pairwise(starts))
        if code:
            last = code
            found.setdefault(code, (paper, meaning))
        elif last and meaning:
            found[last] = (found[last][0], f"{found[last][1]} {meaning}")
    return found


_WORDS: Final = {
    "string": "text",
    "integer": "whole number",
    "number": "number",
    "boolean": "true or false",
}
_SIGNS: Final = {
    **{"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="},
    **{"gt": ">", "ge": ">=", "lt": "<", "le": "<="},  # of a union
}


def _describe_values(
    value: _Schema, defs: Mapping[str, _Schema]
) -> tuple[str, str, str | None, bool]:
    """Return type and range of a key's values, "" for any; if these are a class's tables, its name
    in `defs`, and whether users name these tables."""
    if "$ref" in value:
        name = value["$ref"].rpartition("/")[2]
        if "properties" in defs[name]:
            return "table", "", name, False
        return _describe_values(defs[name], defs)
    own = [f"{sign} {_short(value[name])}" for name, sign in _SIGNS.items() if name in value]
    if "anyOf" in value:
        each = [_describe_values(one, defs) for one in value["anyOf"] if one.get("type") != "null"]
        words, limits, inner, named = zip(*each, strict=True)
        limits = ", ".join(filter(None, dict.fromkeys([*limits, *own])))
        return " | ".join(words), limits, next(filter(None, inner), None), any(named)
    if "const" in value or "enum" in value:
        allowed = value.get("enum", [value.get("const")])
        words = (f'"{one}"' if isinstance(one, str) else str(one) for one in allowed)
        return " | ".join(words), "", None, False
    kind = str(value.get("type"))
    if kind == "object":
        values = value["additionalProperties"]
        _, limits, inner, _ = _describe_values({} if values is True else values, defs)
        return "table", limits, inner, True
    if kind == "array":
        one = value.get("items") or value.get("prefixItems", [{}])[0]
        words, limits, inner, named = _describe_values(one, defs)
        return f"[{words}, ...]", limits, inner, named
    return _WORDS.get(kind, "anything"), ", ".join(own), None, False


def _short(number: float) -> str:
    if isinstance(number, int) and number >= 2**20 and number.bit_count() == 1:
        return f"2^{number.bit_length() - 1}"
    return f"{number:g}"


if __name__ == "__main__":
    WRITTEN.write_text(to_json(), encoding="utf-8")
