"""`fedpact settings`, `fedpact algorithms` and `fedpact init`: what can be set."""

import os
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track

from fedpact.cli import reference
from fedpact.cli.console import AsJson, Overrides, plain_console, show
from fedpact.cli.reference import Key, KeyTable
from fedpact.common.configuration import read_configuration
from fedpact.common.errors import InputError
from fedpact.common.files import check_file
from fedpact.common.format import toml
from fedpact.common.notebook import print_table


def settings(
    name: Annotated[
        str | None,
        typer.Argument(help="A table, a key, or federation.toml, site.toml, policy.toml."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the tables and keys of a plan, with type, default, range and meaning."""
    found = reference.everything() if name is None else reference.find(name)

    def text() -> None:
        if name is None:
            _overview(found)
        for table in found if name else ():
            _print(table)

    show({"tables": [asdict(table) for table in found]}, as_json, text)


def algorithms(
    name: Annotated[
        str | None, typer.Argument(help="Show this algorithm in full; or `check`, and a name.")
    ] = None,
    checked: Annotated[
        str | None, typer.Argument(help="Check this one, such as mypackage.module:name.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the algorithms, or show one: its paper, method, releases and settings.

    `fedpact algorithms check NAME` checks an algorithm on made-up records: that it releases and
    charges what it says, changes no argument, and equals its parent under neutral settings.
    """
    if name == "check":
        return _check(checked, as_json)
    if checked is not None:
        raise InputError(
            f"{name} {checked}: expected one name, or `fedpact algorithms check {name}`"
        )
    found = [reference.algorithm(one) for one in ([name] if name else reference.algorithm_names())]

    def text() -> None:
        if name:
            print(found[0].text, end="\n\n")
            _print(found[0].settings)
            return
        rows = [(one.name, one.title, _names(one.settings.keys)) for one in found]
        _print_grid(("algorithm", "what", "settings"), rows)

    show({"algorithms": [asdict(one) for one in found]}, as_json, text)


def _check(name: str | None, as_json: bool) -> None:
    if name is None:
        raise InputError("which algorithm? Name one, as `fedpact algorithms check mypackage:name`")
    from fedpact import algorithms as known
    from fedpact.studies import conformance

    neutral, found = known.load(name).NEUTRAL, list[conformance.Finding]()
    for one in track(conformance.examine(name), "checking", conformance.COUNT, disable=as_json):
        found.append(one)
    bad = sum(bool(one.violation) for one in found)
    document: dict[str, Any] = {"algorithm": name, "violations": bad, "neutral": None}
    if neutral is not None and not bad:  # else its functions may raise
        apart, allowed = conformance.neutral_gap(name, private=True)
        document["neutral"] = {**asdict(neutral), "apart": apart, "allowed": allowed}
    document["checks"] = [asdict(one) for one in found]

    def text() -> None:
        rows = [(one.check, f"no: {one.violation}" if one.violation else "yes") for one in found]
        _print_grid(("check", "passed"), rows)
        if bad:
            print(f"{bad} of {len(found)} checks failed.")
            return
        print(_explain_neutral(document["neutral"]))
        print("All checks passed.")

    show(document, as_json, text)
    if bad:
        raise typer.Exit(1)


def _explain_neutral(neutral: dict[str, Any] | None) -> str:
    if neutral is None:
        return (
            "NEUTRAL is None: no settings are declared under which it equals another algorithm, so "
            "nothing was compared. If there are some, declare them: this finds most mistakes."
        )
    settings = ", ".join(f"{key} = {value}" for key, value in neutral["settings"].items())
    allowed = f"at most {neutral['allowed']:.2g}" if neutral["tolerance"] else "exactly 0"
    return (
        f"Neutral settings ({settings or 'the defaults'}): after three rounds, the largest "
        f"difference of a weight from {neutral['parent']}'s is {neutral['apart']:.2g}; {allowed} "
        "is expected."
    )


def init(
    file: Annotated[Path, typer.Argument(help="The file to write.")] = Path("plan.toml"),
    overrides: Overrides = [],  # noqa: B006 - typer reads the default, nobody changes it
    every: Annotated[
        bool, typer.Option("--all", help="Write every key; defaults are commented out with '#'.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write a starting plan: a TOML file of at most 60 lines with the most important keys.

    With --all it has every key, each with its default and its meaning.
    """
    check_file("the file", file, ".toml")
    if os.path.lexists(file):
        raise InputError(f"{file} exists already: name a new file, as in `fedpact init new.toml`")
    text = starting_plan(overrides, every=every)
    if overrides:
        # The embedded default is a valid plan; with overrides it is checked before it is written.
        from fedpact.plan import Plan

        Plan.read(None, overrides)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    told = f"Wrote {file}. `fedpact plan {file}` shows what it will spend; to train: "
    show({"file": str(file)}, as_json, lambda: print(f"{told}`fedpact run {file}`"))


def _overview(found: list[KeyTable]) -> None:
    rows = [(_heading(one.name) or "(top level)", one.about, _names(one.keys)) for one in found]
    _print_grid(("table", "what", "keys"), rows)
    print("`fedpact settings NAME` shows a table or a key; `fedpact algorithms` has [settings].")


def _heading(table: str) -> str:
    return f"[{table}]" if table and table not in reference.FILES else table


def _names(keys: Sequence[Key]) -> str:
    return ", ".join(key.last for key in keys)


def _print(table: KeyTable) -> None:
    told = f"{_heading(table.name)}  {table.about}".strip()
    plain_console().print(told, style="bold")
    rows = [
        (
            key.last,
            f"{key.type} {key.range}".strip(),
            format_default(key),
            f"{key.symbol}: {key.meaning}" if key.symbol else key.meaning,
        )
        for key in table.keys
    ]
    _print_grid(("key", "type", "default", "meaning"), rows)


def format_default(key: Key) -> str:
    """Return a key's default for a reader."""
    if key.required:
        return "required"
    return "none" if key.default is None else toml(key.default)


def _print_grid(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    print_table(Console(), columns, rows, show_lines=True)


# ---------------------------------------------------------------- a starting plan

_WIDE = 98
_TOP = """\
# A plan for `fedpact run`, with the values that `fedpact run` uses without a plan.{every}"""
_EVERY = """
# All other keys are commented out at their defaults: to change one, remove its "#". Keys with
# "no default" have no value unless you give one."""
_MORE = """
# `fedpact init --all` writes every key; `fedpact settings` and `algorithms` explain them."""


def starting_plan(overrides: Sequence[str] = (), *, every: bool = True) -> str:
    """Return the text: the embedded default with `key=value` overrides.

    every: also the keys that it leaves at their defaults. A line that begins with "#" and no space
    is such a key: without the "#" the file means the same. Lines with "# " are explanations.
    Raises PlanError: an override cannot be read, or there is no such algorithm.
    """
    raw = read_configuration(None, overrides)
    chosen = reference.algorithm(str(raw["algorithm"]))
    top, *others = reference.tables()
    about = f"The settings of {chosen.name}, {chosen.title}."
    parts = [_TOP.format(every=_EVERY if every else _MORE), *_lines(top, raw, every)]
    for table in (KeyTable("settings", about, chosen.settings.keys), *others):
        given: Any = raw
        for part in table.name.split("."):
            given = given.get(part, {}) if isinstance(given, Mapping) else {}
        if "NAME" in table.name and every:
            # Below a user's own name: comments only.
            lines = (one.replace("#", "# ", not one.startswith("# ")) for one in _lines(table, {}))
            parts += ["", f"# [{table.name}]", *_prose(table.about), *lines]
        elif "NAME" not in table.name and (given or every):
            head = f"[{table.name}]" if given else f"#[{table.name}]"
            parts += ["", head, *_prose(table.about), *_lines(table, given, every)]
    return "\n".join(parts) + "\n"


def _lines(table: KeyTable, given: Mapping[str, Any], every: bool = True) -> list[str]:
    found, last = list[str](), ""
    for key in table.keys:
        if key.name != "settings" and (every or key.last in given):
            # In the short plan, a meaning's first sentence, and once for keys that share it.
            told = key.meaning if every else re.split(r"(?<=[a-z)]\.) ", key.meaning)[0]
            if every or told != last:
                found += ["", *_prose(f"{told} ({kind(key)})")]
            found, last = [*found, _line(key, given)], told
    return found


def _line(key: Key, given: Mapping[str, Any]) -> str:
    if key.last in given:
        return f"{key.last} = {toml(given[key.last])}"
    if key.default is None:
        return f"# {key.last} ="
    return f"#{key.last} = {toml(key.default)}"


def kind(key: Key) -> str:
    """Return a key's type and range in a few words, and whether it is required or has no default.

    >>> kind(Key("a.b", "number", "> 0", None, False, "what it means"))
    'number > 0; no default'
    """
    told = f"{key.type} {key.range}".strip()
    if key.required:
        return f"{told}; required"
    return f"{told}; no default" if key.default is None else told


def _prose(text: str) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(text, _WIDE)]
