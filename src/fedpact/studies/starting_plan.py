"""A plan to begin with, as TOML: every table with its keys, their defaults and what they mean.

A line that begins with "#" and no space after it is a key at its default: without the "#" the file
means the same. What begins with "# " explains.
"""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedpact.common.configuration import read_configuration
from fedpact.common.format import toml, toml_key
from fedpact.common.reference import Key, KeyTable, algorithm, tables

_WIDE = 98
_TOP = """\
# A plan for `fedpact run`. What `fedpact run` does without a plan stands here as it is; every other
# key stands at its default behind a "#": take that away and change the value. `fedpact settings`
# and `fedpact algorithms` show the same. "left out": there is no value unless you give one.
"""


def starting_plan(overrides: Sequence[str] = ()) -> str:
    """Return the text: the embedded default with `key=value` overrides.

    Raises PlanError: an override cannot be read, or there is no such algorithm.
    """
    raw = read_configuration(None, overrides)
    chosen = algorithm(str(raw["algorithm"]))
    top, *others = tables()
    about = f"The settings of {chosen.name}, {chosen.title}."
    parts = [_TOP, *_lines(top, raw, ["settings"])]
    for table in (KeyTable("settings", about, chosen.settings.keys), *others):
        parts += ["", *_table(table, raw)]
    return "\n".join(parts) + "\n"


def _table(table: KeyTable, raw: Mapping[str, Any]) -> list[str]:
    given: Any = raw
    for part in table.name.split("."):
        given = given.get(part, {}) if isinstance(given, Mapping) else {}
    if "NAME" in table.name:
        # Under a name of the user's own: all of it explains.
        lines = (line.replace("#", "# ", not line.startswith("# ")) for line in _lines(table, {}))
        return [f"# [{table.name}]", *_prose(table.about), *lines]
    head = f"[{table.name}]" if given else f"#[{table.name}]"
    return [head, *_prose(table.about), *_lines(table, given)]


def _lines(table: KeyTable, given: Mapping[str, Any], but: Iterable[str] = ()) -> list[str]:
    found = list[str]()
    for key in table.keys:
        if key.last not in but:
            found += ["", *_prose(f"{key.meaning} ({kind(key)})"), _line(key, given)]
    return found


def _line(key: Key, given: Mapping[str, Any]) -> str:
    if key.last in given:
        return f"{key.last} = {toml(given[key.last])}"
    if key.default is None:
        return f"# {key.last} ="
    return f"#{key.last} = {toml(key.default)}"


def kind(key: Key) -> str:
    """Return a key's type and range in a few words; whether it may be left out, or has to be given.

    >>> kind(Key("a.b", "number", "> 0", None, False, "what it means"))
    'number > 0; left out'
    """
    told = f"{key.type} {key.range}".strip()
    if key.required:
        return f"{told}; to be given"
    return f"{told}; left out" if key.default is None else told


def configuration(raw: Mapping[str, Any], reasons: Mapping[str, str]) -> str:
    """Return a configuration as a file, a table in a table under its own head.

    reasons: what is said beside a key, by its path ("privacy.clip").

    >>> print(configuration({"a": 1, "b": {"c": 2, "d e": {"f": True}}}, {"b.c": "so"}), end="")
    a = 1
    <BLANKLINE>
    [b]
    c = 2                           # so
    <BLANKLINE>
    [b."d e"]
    f = true
    """
    return "\n".join(_within(raw, reasons, ())) + "\n"


def _within(
    table: Mapping[str, Any], reasons: Mapping[str, str], path: tuple[str, ...]
) -> list[str]:
    inner = {k: v for k, v in table.items() if isinstance(v, Mapping) and v}
    own = {k: v for k, v in table.items() if k not in inner}
    found = [f"[{'.'.join(map(toml_key, path))}]"] if path and own else []
    for key, value in own.items():
        line, why = f"{toml_key(key)} = {toml(value)}", reasons.get(".".join((*path, key)))
        # It may name a table's columns, which are called as they please; a comment is one line.
        told = "".join(c if c.isprintable() else " " for c in why or "")
        found.append(f"{line:<31} # {told}" if told else line)
    for key, value in inner.items():
        below = _within(value, reasons, (*path, str(key)))
        found += ["", *below] if found else below
    return found


def _prose(text: str) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(text, _WIDE)]
