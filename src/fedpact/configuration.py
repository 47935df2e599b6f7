"""Configurations as text: files, `key=value` overrides, and errors that name every mistake."""

import json
import re
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from fedpact.errors import PlanError

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError

_DEFAULT = Path(__file__).with_name("default.toml")

_FORM = re.compile(r"(constrained-)?(float|int)$|list\[")
_ONE_OF = {"batch_size": "sampling_rate", "sampling_rate": "batch_size"}


def read_configuration(path: Path | None, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Read a configuration, None for the embedded default, and write `key=value` overrides into it.

    Raises PlanError: the file or an override cannot be read.
    """
    raw = read_file(_DEFAULT if path is None else path)
    for setting in overrides:
        override(raw, setting)
    return raw


def read_file(path: Path) -> dict[str, Any]:
    """Read a .toml or .json file. Raises PlanError: it cannot be read or understood."""
    try:
        text = path.read_text(encoding="utf-8")
        return json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise PlanError(
            f"configuration {path} cannot be read ({error.strerror}): name a .toml or .json file, "
            "or none for the embedded default"
        ) from None
    except ValueError as error:
        raise PlanError(f"configuration {path} is not valid {path.suffix[1:]}: {error}") from None


def override(raw: dict[str, Any], setting: str) -> None:
    """Write `key=value` into a configuration. Raises PlanError: it is no such setting."""
    key, equals, text = setting.partition("=")
    if not equals or not key:
        raise PlanError(f"--set {setting!r}: expected key=value, as in privacy.epsilon=1")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *tables, last = key.strip().split(".")
    for table in tables:
        raw = raw.setdefault(table, {})
        if not isinstance(raw, dict):
            raise PlanError(f"--set {setting!r}: {table!r} is a value, not a table")
    if last in _ONE_OF and not tables:
        raw.pop(_ONE_OF[last], None)
    raw[last] = value


def plan_error(
    error: "ValidationError", prefix: tuple[str, ...], model: "type[BaseModel]"
) -> PlanError:
    """Return an error that names every mistake by its key. model: what was read, below `prefix`."""
    entries = [entry for entry in error.errors() if not _is_other_branch(entry)]
    told = [_explain(entry, prefix, model) for entry in entries or error.errors()]
    return PlanError("; ".join(dict.fromkeys(told)))


def _is_other_branch(entry: Any) -> bool:
    """Whether it only says that a value is not of the other form: a number or a list of them."""
    if len(entry["loc"]) < 2:
        return False
    a_list = isinstance(entry["input"], list)
    return (entry["type"] == "list_type" and not a_list) or (
        entry["type"] == "float_type" and a_list
    )


def unknown_key(key: str, known: Iterable[str]) -> str:
    """Return what is said of a key that no table has."""
    return f"{key} is no known key: expected one of {', '.join(sorted(known))}"


def _explain(entry: Any, prefix: tuple[str, ...], model: "type[BaseModel]") -> str:
    # A value of several forms is reported under each form's name, which is no key.
    place = [part for part in entry["loc"] if not _FORM.match(str(part))]
    key = ".".join(map(str, (*prefix, *place))) or "configuration"
    if entry["type"] == "extra_forbidden":
        return unknown_key(key, _table_at(model, place[:-1]).model_fields)
    message = entry["msg"].removeprefix("Value error, ")
    if entry["type"] == "value_error":
        return f"{key}: {message}" if place else message
    return (
        f"{key} is {entry['input']!r}: {message[0].lower()}{message[1:]}; set {key} to such a value"
    )


def _table_at(model: "type[BaseModel]", place: list[Any]) -> "type[BaseModel]":
    from pydantic import BaseModel

    for part in place:
        field = model.model_fields.get(str(part))
        if field is not None:
            forms = (field.annotation, *get_args(field.annotation))
            tables = (f for f in forms if isinstance(f, type) and issubclass(f, BaseModel))
            model = next(tables, model)
    return model
