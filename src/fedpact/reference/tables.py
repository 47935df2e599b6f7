"""The tables of a configuration, of a deployment's files and of each algorithm, with all keys."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from fedpact.errors import PlanError, nearest
from fedpact.reference import forms, meanings
from fedpact.reference.sources import Model, algorithm_names, declared_keys, heading

PLAN: Final[Model] = ("fedpact.plan", "Plan")

FILES: Final[dict[str, Model]] = {
    "federation.toml": ("fedpact.engines.parties.federation", "Federation"),
    "site.toml": ("fedpact.engines.parties.records", "SiteSettings"),
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
    meant = meanings.find_meanings(model, known)
    for key, place in known.items():
        form, default = forms.form(place), forms.find_default(place)
        full = f"{name}.{key}" if name else key
        told, symbol = meant[key]
        required = default is forms.REQUIRED
        if form.table is not None:
            below += tables(form.table, f"{full}.NAME" if form.named else full)
        if form.table is None or form.named:
            value = None if required else default
            found.append(Key(full, form.words, form.range, value, required, told, symbol))
    return [KeyTable(name, meanings.summarise_class(model), tuple(found)), *below]


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
