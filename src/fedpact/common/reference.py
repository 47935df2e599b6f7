"""What every key of a configuration and every algorithm's setting means, read from the sources.

Importing them takes seconds, torch is among what they need, and whoever mistypes a key or asks what
one means computes nothing. The tests hold what is read here against the classes themselves.

A class says of its keys, in sentences of this form, one after another or each in a line:

    momentum: β in [0, 1). schedule, halved_after: f of the local steps.

What a subclass does not say, its bases say. An algorithm's file has a table of symbols:

    Symbols   paper  code           meaning, unit or range                        who chooses it
              η      learning_rate  step size, > 0                                plan

The fields of the classes in `fedpact.plan` are read from the source files (`sources`). Whatever is
refused here `Plan.read` would refuse, in the same words; all that passes is checked there.
"""

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any, Final

from fedpact.common.configuration import read_configuration, unknown_key
from fedpact.common.errors import PlanError, nearest

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


_WORDS: Final = {
    "str": "text",
    "int": "whole number",
    "float": "number",
    "bool": "true or false",
    "Any": "anything",
}
_SIGNS: Final = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}

REQUIRED: Final = object()
"""The default of a key that has to be given."""


@dataclass(frozen=True)
class KeyForm:
    """What a key may be.

    words: its type. range: what numbers may be, "" for any. optional: whether it may be left out
    with nothing in its place. table: the class whose keys it has, if it is a table; named: whether
    it is a table of such tables, under names of the user's.
    """

    words: str
    range: str = ""
    optional: bool = False
    table: Model | None = None
    named: bool = False


def form(key: Declared) -> KeyForm:
    """Return what a key may be. Raises LookupError: its annotation cannot be read."""
    found = _form(key.annotation, key.home)
    asked = _bounds(key.default, key.home)
    return replace(found, range=" and ".join(filter(None, (found.range, asked))))


def find_default(key: Declared) -> Any:
    """Return what a key is if nobody says, None for nothing; REQUIRED: it has to be given.

    Of a table with keys it is None. Raises LookupError: the default cannot be read.
    """
    node = key.default
    if node is None:
        return REQUIRED
    if not isinstance(node, ast.Call):
        return _value(node, key.home)
    if ast.unparse(node.func) != "Field":
        return None
    given = {word.arg: word.value for word in node.keywords}
    if node.args or "default" in given:
        return _value(node.args[0] if node.args else given["default"], key.home)
    made = ast.unparse(given["default_factory"]) if "default_factory" in given else ""
    return {} if made.startswith("dict") else [] if made.startswith("list") else REQUIRED


def _form(node: ast.expr, home: str) -> KeyForm:
    if isinstance(node, ast.Constant):
        return KeyForm("", optional=True)
    if isinstance(node, ast.BinOp):
        return _either(_form(node.left, home), _form(node.right, home))
    if isinstance(node, ast.Subscript):
        return _of(ast.unparse(node.value), node.slice, home)
    if (word := _WORDS.get(ast.unparse(node))) is not None:
        return KeyForm(word)
    if (model := table(node, home)) is not None:
        return KeyForm("table", table=model)
    module, meant = resolve(node, home)
    if isinstance(meant, ast.ClassDef):
        raise LookupError(f"{ast.unparse(node)} is a class")
    return _form(meant, module)


def _of(outer: str, inner: ast.expr, home: str) -> KeyForm:
    parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
    if outer == "Literal":
        return KeyForm(" | ".join(_literal(part) for part in parts))
    if outer == "Annotated":
        asked = (_bounds(part, home) for part in parts[1:])
        found = _form(parts[0], home)
        return replace(found, range=" and ".join(filter(None, (found.range, *asked))))
    found = _form(parts[-1] if outer == "dict" else parts[0], home)
    if outer == "dict":
        return replace(found, words="table", named=True)
    return replace(found, words=f"[{found.words}, ...]")


def _either(one: KeyForm, other: KeyForm) -> KeyForm:
    words = " | ".join(filter(None, (one.words, other.words)))
    ranges = dict.fromkeys(filter(None, (one.range, other.range)))
    return KeyForm(
        words,
        " and ".join(ranges),
        one.optional or other.optional,
        one.table or other.table,
        one.named or other.named,
    )


def _literal(node: ast.expr) -> str:
    value = ast.literal_eval(node)
    return f'"{value}"' if isinstance(value, str) else str(value)


def _bounds(node: ast.expr | None, home: str) -> str:
    """What a call of Field asks of a number, as in "> 0, < 1"; "" for nothing."""
    if not isinstance(node, ast.Call) or ast.unparse(node.func) != "Field":
        return ""
    given = {word.arg or "": word.value for word in node.keywords}
    return ", ".join(
        f"{sign} {_short(given[name], home)}" for name, sign in _SIGNS.items() if name in given
    )


def _short(node: ast.expr, home: str) -> str:
    if isinstance(node, ast.BinOp):
        return ast.unparse(node).replace(" ** ", "^")
    return f"{_value(node, home):g}"


def _value(node: ast.expr, home: str) -> Any:
    if isinstance(node, ast.Name | ast.Attribute):
        module, meant = resolve(node, home)
        if isinstance(meant, ast.ClassDef):
            raise LookupError(f"{ast.unparse(node)} is a class")
        return _value(meant, module)
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise LookupError(f"{ast.unparse(node)} cannot be read") from None


_COLUMNS = ("paper", "code", "meaning", "who")


def summarise_class(model: Model) -> str:
    """Return the first sentence of what a class says of itself."""
    text = " ".join(docstring(model).split("\n\n")[0].split())
    return re.split(r"(?<=\.) (?=[A-Z`_a-z])", text)[0]


def find_meanings(model: Model, keys: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return of each of a class' keys the meaning and the papers' symbol, "" for none."""
    names, told, rows = tuple(keys), dict[str, str](), dict[str, tuple[str, str]]()
    for place in lineage(model):
        table = symbols(heading(place[0]))
        told = (
            {key: row[1] for key, row in table.items()}
            | parse_meanings(docstring(place), names)
            | told
        )
        rows = table | rows
    return {key: (told.get(key, ""), rows.get(key, ("", ""))[0].strip("-")) for key in names}


def parse_meanings(text: str, keys: Iterable[str]) -> dict[str, str]:
    """Return what a docstring says of these keys.

    >>> parse_meanings("Of a site. a, b: both > 0. Else it is refused. c: text.", ["a", "b", "c"])
    {'a': 'both > 0. Else it is refused.', 'b': 'both > 0. Else it is refused.', 'c': 'text.'}
    """
    one = "|".join(map(re.escape, sorted(keys, key=len, reverse=True)))
    names = re.compile(rf"(?:^|(?<=[.;:] ))((?:{one})(?:(?:, | and )(?:{one}))*): ")
    found = dict[str, str]()
    for paragraph in text.split("\n\n"):
        line = " ".join(paragraph.split())
        places = list(names.finditer(line))
        for place, after in zip_longest(places, places[1:]):
            end = after.start() if after else len(line)
            for key in re.split(r", | and ", place[1]):
                found.setdefault(key, line[place.end() : end].strip().rstrip(";"))
    return found


def symbols(text: str) -> dict[str, tuple[str, str]]:
    """Return the table of symbols of an algorithm's file: code -> the papers' symbol, meaning."""
    lines = text.splitlines()
    heads = [n for n, line in enumerate(lines) if line.startswith("Symbols ")]
    if not heads or not all(column in lines[heads[0]] for column in _COLUMNS):
        return {}
    starts = [lines[heads[0]].index(column) for column in _COLUMNS]
    found, last = dict[str, tuple[str, str]](), ""
    for line in lines[heads[0] + 1 :]:
        if not line.startswith(" "):
            break
        paper, code, told = (line[a:b].strip() for a, b in pairwise(starts))
        if code:
            last = code
            found.setdefault(code, (paper, told))
        elif last and told:
            found[last] = (found[last][0], f"{found[last][1]} {told}")
    return found


PLAN: Final[Model] = ("fedpact.plan", "Plan")

FILES: Final[dict[str, Model]] = {
    "federation.toml": ("fedpact.deployment.federation", "Federation"),
    "site.toml": ("fedpact.deployment.site_records", "SiteSettings"),
    "policy.toml": ("fedpact.privacy.policy", "Policy"),
}
"""A deployment's files, beside the plan."""


@dataclass(frozen=True)
class Key:
    """A key. name: with its tables, as in privacy.epsilon. symbol: the papers', "" for none.

    type, range: in words and signs. default: None for nothing in its place; required: it has to be
    given, and there is none.
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
        """Its own name, without its tables."""
        return self.name.rsplit(".", 1)[-1]


@dataclass(frozen=True)
class KeyTable:
    """A table. name: "" for what stands in no table; NAME in it is for the user to fill in."""

    name: str
    about: str
    keys: tuple[Key, ...]


@dataclass(frozen=True)
class Described:
    """An algorithm. title: its name, paper the source, text all that its file says at the top."""

    name: str
    title: str
    text: str
    settings: KeyTable


def tables(model: Model = PLAN, name: str = "") -> list[KeyTable]:
    """Return a class as a table, and after it the tables in it, each with all its keys."""
    found, below, known = list[Key](), list[KeyTable](), declared_keys(model)
    meant = find_meanings(model, known)
    for key, place in known.items():
        form_, default = form(place), find_default(place)
        full = f"{name}.{key}" if name else key
        told, symbol = meant[key]
        required = default is REQUIRED
        if form_.table is not None:
            below += tables(form_.table, f"{full}.NAME" if form_.named else full)
        if form_.table is None or form_.named:
            value = None if required else default
            found.append(Key(full, form_.words, form_.range, value, required, told, symbol))
    return [KeyTable(name, summarise_class(model), tuple(found)), *below]


def algorithm(name: str) -> Described:
    """Return what is known of an algorithm. Raises PlanError: there is none of that name."""
    if name not in algorithm_names():
        known = algorithm_names()
        told = f"expected one of {', '.join(known)}{nearest(name, known)}"
        raise PlanError(f"algorithm is {name!r}: {told}")
    module = f"fedpact.algorithms.{name}"
    text = heading(module)
    (settings,) = tables((module, "Settings"), "settings")
    return Described(name, text.split(".")[0].split(";")[0], text, settings)


def everything() -> list[KeyTable]:
    """Return all tables of a plan, then the files of a deployment, each by its name."""
    return [*tables(), *(table for file in FILES for table in _file(file))]


def _file(name: str) -> list[KeyTable]:
    top, *inner = tables(FILES[name])
    return [KeyTable(name, top.about, top.keys), *(_in_file(name, table) for table in inner)]


def _in_file(name: str, table: KeyTable) -> KeyTable:
    return KeyTable(f"{name} [{table.name}]", table.about, table.keys)


def find(name: str) -> list[KeyTable]:
    """Return the tables of that name, or the one key with its table.

    name: of a table ("privacy"), of a key in it ("privacy.epsilon", or "epsilon" alone where it
    tells), or of a deployment's file. Raises PlanError: none has it.
    """
    if name in FILES:
        return _file(name)
    known = tables()
    if found := [table for table in known if table.name and _within(table.name, name)]:
        return found
    own = [algorithm(one) for one in algorithm_names()]
    known += [KeyTable(f"settings of {one.name}", "", one.settings.keys) for one in own]
    asked = [KeyTable(t.name, t.about, tuple(_named(t, name))) for t in known]
    if found := [table for table in asked if table.keys]:
        return found
    shown = [*(table.name for table in tables() if table.name), *FILES]
    keys = [key for table in known for key in table.keys]
    meant = nearest(name, [*shown, *(key.name for key in keys), *(key.last for key in keys)])
    raise PlanError(f"{name} is no known table or key: expected one of {', '.join(shown)}{meant}")


def _within(table: str, name: str) -> bool:
    return table == name or table.startswith(f"{name}.")


def _named(table: KeyTable, name: str) -> Iterator[Key]:
    return (key for key in table.keys if name in (key.name, key.last))


def check_keys(config: Path | None, overrides: Sequence[str] = ()) -> None:
    """Raise PlanError, naming each, where a configuration has keys that no plan has.

    config: a .toml or .json file, None for the embedded default; overrides: `key=value`, over it.
    """
    if found := list(_unknown(read_configuration(config, overrides), PLAN, (), None)):
        raise PlanError("; ".join(found))


def _settings(algorithm: object) -> Model:
    return f"fedpact.algorithms.{algorithm}", "Settings"


def _dotted(model: Model, place: tuple[str, ...], algorithm: object) -> Iterator[str]:
    """Every dotted key of a table, settings of an algorithm among them; none if none can tell."""
    try:
        known = keys(model)
    except (OSError, LookupError, SyntaxError, ValueError):
        return
    for key, table_of in known.items():
        inner = _settings(algorithm) if (model, key) == (PLAN, "settings") else table_of
        yield ".".join((*place, key))
        if inner is not None:
            yield from _dotted(inner, (*place, key), algorithm)


def _unknown(raw: object, model: Model, place: tuple[str, ...], algorithm: object) -> Iterator[str]:
    """Every mistake of a table; none where the sources do not tell: the whole check comes later."""
    if not isinstance(raw, dict):
        return
    try:
        known = keys(model)
    except (OSError, LookupError, SyntaxError, ValueError):
        return
    algorithm = algorithm if place else raw.get("algorithm")
    for key, value in raw.items():
        if key not in known:
            # As the plan says it, which reads settings by themselves.
            everywhere = () if "settings" in place else _dotted(PLAN, (), algorithm)
            yield unknown_key(".".join((*place, key)), known, everywhere)
        elif (model, key) == (PLAN, "settings"):
            yield from _unknown(value, _settings(algorithm), (key,), algorithm)
        elif (inner := known[key]) is not None:
            yield from _unknown(value, inner, (*place, key), algorithm)


def keys(model: Model) -> dict[str, Model | None]:
    """Return the keys of a class and its bases: key -> what its annotation names in fedpact, if so.

    Raises LookupError: no such class, or a base that cannot be read. OSError: no source file.
    """
    return {key: table(it.annotation, it.home) for key, it in declared_keys(model).items()}
