"""What a key may be, and what it is if nobody says: of its annotation and default in the source."""

import ast
from dataclasses import dataclass, replace
from typing import Any, Final

from fedpact.reference.sources import Declared, Model, resolve, table

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
