"""Configurations as text: files, `key=value` overrides, and errors that name every mistake."""

import json
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast, get_args

from fedpact.common.check import WITHOUT_PRIVACY
from fedpact.common.errors import FedpactError, PlanError, nearest
from fedpact.common.format import toml, toml_key

if TYPE_CHECKING:
    from pydantic import BaseModel, ConfigDict, ValidationError

# A plain dictionary, so that reading a configuration does not import pydantic.
FROZEN: Final["ConfigDict"] = {
    "frozen": True,
    "extra": "forbid",
    "strict": True,
    "allow_inf_nan": False,
    "use_attribute_docstrings": True,
}
"""The pydantic options of every table of settings. The docstring of a field is its meaning."""

_DEFAULT = Path(__file__).with_name("default.toml")

DEFAULTS_KEY = "defaults"
"""The key of a written plan that lists the keys left at their defaults."""

OTHER_NAMES: Final = {
    **dict.fromkeys(("alpha", "concentration", "dirichlet_alpha"), "partition.beta"),
    "num_classes_per_partition": "partition.labels_per_site",
    "num_shards_per_partition": "partition.shards_per_site",
    **dict.fromkeys(("lr", "eta"), "settings.learning_rate"),
    **dict.fromkeys(("clients", "num_clients", "num_partitions"), "sites"),
    **dict.fromkeys(("num_rounds", "num_server_rounds"), "rounds"),
    **dict.fromkeys(("local_epochs", "epochs"), "settings.local_steps"),
    **dict.fromkeys(("eps", "target_epsilon"), "privacy.epsilon"),
    **dict.fromkeys(("target_delta",), "privacy.delta"),
    **dict.fromkeys(("max_grad_norm", "clipping_norm"), "privacy.clip"),
    **dict.fromkeys(("noise_multiplier",), "privacy.sigma"),
}
"""Names of keys in papers and other libraries: an error about one suggests the key."""

_FORM = re.compile(r"(constrained-)?(float|int|str|bool)$|(list|literal)\[")
_ONE_OF = {"batch_size": "sampling_rate", "sampling_rate": "batch_size"}


def remove_marks(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration without the keys it marks as defaults, and without the marks.

    Raises PlanError: the marks are not a list of keys.
    """
    # If it is not a table, reading its keys will raise a clearer error.
    return without(raw, [*read_marks(raw), DEFAULTS_KEY]) if isinstance(raw, Mapping) else raw


def read_configuration(
    path: Path | str | None,
    overrides: Sequence[str] = (),
    read: Callable[[Mapping[str, Any]], dict[str, Any]] = remove_marks,
) -> dict[str, Any]:
    """Read a configuration, None for the default one, and apply `key=value` overrides.

    read: returns the keys of a file that count as given. [settings] of the default configuration
    belong to its algorithm, and are dropped if an override names another.
    Raises PlanError: the file or an override cannot be read.
    """
    typed = dict[str, Any]()
    for setting in overrides:
        override(typed, setting)  # before the file, as "--set key value" makes a file of the value
    raw = read(read_file(_DEFAULT if path is None else Path(path)))
    if path is None and typed.get("algorithm", raw["algorithm"]) != raw["algorithm"]:
        del raw["settings"]
    # If both alternatives were typed, both are kept, so that the plan refuses them.
    drop_overridden(raw, [key_of(setting) for setting in overrides])
    for setting in overrides:
        override(raw, setting)
    return raw


def plain(value: Any) -> Any:
    """Return settings with Python's numbers and lists instead of numpy's, which JSON lacks."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in cast(dict[Any, Any], value).items()}
    if isinstance(value, list):
        return [plain(each) for each in cast(list[Any], value)]
    return value.tolist() if hasattr(value, "dtype") and hasattr(value, "tolist") else value


def drop_overridden(raw: dict[str, Any], keys: Collection[str]) -> None:
    """Remove the alternative of each key that is now set, such as sampling_rate for batch_size."""
    for key in keys:
        if (other := _ONE_OF.get(key)) is not None and other not in keys:
            raw.pop(other, None)


def select_given(
    raw: Mapping[str, Any], document: Callable[[Mapping[str, Any]], Mapping[str, Any]]
) -> dict[str, Any]:
    """Return a configuration's given keys, and marked defaults that differ from today's defaults.

    document: returns the document that would be written of a configuration, with every default.
    """
    bare = remove_marks(raw)
    if not isinstance(raw, Mapping) or DEFAULTS_KEY not in raw:
        return bare
    written, here = flatten(raw), flatten(document(bare))
    same = [key for key in read_marks(raw) if written.get(key) == here.get(key)]
    return without(raw, [*same, DEFAULTS_KEY])


def find_typed_keys(
    raw: Mapping[str, Any] | Path, overrides: Sequence[str] = ()
) -> list[str] | None:
    """Return the keys that a person typed: None for all, or the overrides of a written plan."""
    raw = read_file(raw) if isinstance(raw, Path) else raw
    if not isinstance(raw, Mapping) or DEFAULTS_KEY not in raw:
        return None
    return [key_of(setting) for setting in overrides]


def read_marks(raw: Mapping[str, Any]) -> list[str]:
    """Return the keys that a written plan marks as defaults. Raises PlanError: not a list."""
    found = raw.get(DEFAULTS_KEY, [])
    if not (isinstance(found, list) and all(isinstance(key, str) for key in found)):
        raise PlanError(
            f"{DEFAULTS_KEY} is {found!r}: expected the list of keys that were left to their "
            "defaults, as a run's plan.json has it; leave it out"
        )
    return found


def without(raw: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """Return a copy of a configuration without these dotted keys, as far as it has them."""
    found = deepcopy(dict(raw))
    for key in keys:
        *tables, last = key.split(".")
        place: Any = found
        for table in tables:
            place = place.get(table) if isinstance(place, dict) else None
        if isinstance(place, dict):
            place.pop(last, None)
    return found


def flatten(document: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a document's leaves by dotted key; an empty table is a leaf.

    >>> flatten({"a": {"b": 1, "c": {}}, "d": 2})
    {'a.b': 1, 'a.c': {}, 'd': 2}
    """
    found: dict[str, Any] = {}
    for key, value in document.items():
        if isinstance(value, Mapping) and value:
            found.update(flatten(value, f"{prefix}{key}."))
        else:
            found[prefix + key] = value
    return found


def defaults_used(model: "BaseModel", prefix: str = "") -> Iterable[str]:
    """Yield every dotted key of a configuration that was not given."""
    from pydantic import BaseModel

    for key in type(model).model_fields:
        value = getattr(model, key)
        if isinstance(value, BaseModel):
            # A table that was not given holds no given key.
            yield from defaults_used(value, f"{prefix}{key}.")
        elif key not in model.model_fields_set:
            yield prefix + key


def read_file(path: Path) -> dict[str, Any]:
    """Read a .toml or .json file. Raises PlanError: it cannot be read or understood."""
    try:
        # Some editors begin a file with a byte-order mark.
        text = path.read_text(encoding="utf-8-sig")
        if text.strip():
            return json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        remedy = "name a .toml or .json file, or none for the embedded default"
        told = f"a key is set as --set {path}" if "=" in path.name else remedy
        raise PlanError(f"configuration {path} cannot be read ({error.strerror}): {told}") from None
    except ValueError as error:
        if path.suffix not in (".toml", ".json"):
            raise PlanError(
                f"configuration {path} is not a plan ({error}): name a .toml or .json file; a "
                f"file of records is given as data, as in --set data={path}"
            ) from None
        raise PlanError(f"configuration {path} is not valid {path.suffix[1:]}: {error}") from None
    # An empty file is likely left by a failed `command > FILE`, not a wish for every default.
    raise PlanError(
        f"configuration {path} is empty: expected keys such as data and privacy.epsilon; "
        "`fedpact init` writes them; without a file the default plan is used"
    )


def override(raw: dict[str, Any], setting: str) -> None:
    """Write `key=value` into a configuration. Raises PlanError: not of this form."""
    key, equals, text = setting.partition("=")
    if not equals or not key:
        raise PlanError(
            f"--set {setting!r}: expected key=value with = and no space between them, as in "
            "--set privacy.epsilon=1"
        )
    set_key(raw, key.strip(), value_of(text), f"--set {setting!r}")


def value_of(text: str) -> Any:
    """Return the value of a text in TOML, or the text itself if it is not TOML."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def key_of(setting: str) -> str:
    """Return the key of `key=value` in the form of `flatten`, however its names are quoted."""
    return ".".join(_names(setting.partition("=")[0].strip(), f"--set {setting!r}"))


def set_key(raw: dict[str, Any], key: str, value: Any, who: str) -> None:
    """Write a value under a dotted key. who: begins the error. Raises PlanError: unsuitable key."""
    *tables, last = _names(key, who)
    for table in tables:
        raw = raw.setdefault(table, {})
        if not isinstance(raw, dict):
            raise PlanError(f"{who}: {table!r} is a value, not a table")
    raw[last] = value


def _names(key: str, who: str) -> list[str]:
    """Return the names of a dotted key; those with dots are quoted, as in TOML."""
    if not {'"', "'"} & set(key):
        return key.split(".")
    names = []
    try:
        place: Any = tomllib.loads(f"{key} = 0")
        while isinstance(place, dict):
            ((name, place),) = place.items()
            names.append(name)
    except ValueError:  # no TOML, or more than one key
        raise PlanError(f"{who}: {key}: expected a key as in TOML, a.'b.c'.d") from None
    return names


def plan_error(
    error: "ValidationError",
    prefix: tuple[str, ...],
    model: "type[BaseModel]",
    tables: "Mapping[str, type[BaseModel]] | None" = None,
    whole: "type[BaseModel] | None" = None,
) -> PlanError:
    """Return an error that names every mistake by its key.

    model: the class that was read, under `prefix`. whole: the class that contains it, to find
    misplaced keys. tables: classes of tables that the fields of `whole`, or `model`, do not name.
    """
    entries = [entry for entry in error.errors() if not _is_other_branch(entry)]
    everywhere = list(_dotted_keys(whole or model, () if whole else prefix, tables or {}))
    of = dict[str, list[Any]]()
    for entry in entries or error.errors():
        of.setdefault(_key(entry, prefix), []).append(entry)
    told = (_explain(key, each, model, everywhere) for key, each in of.items())
    return PlanError("; ".join(told))


def _is_other_branch(entry: Any) -> bool:
    """Whether an entry only says that a list is not a single value."""
    a_list = isinstance(entry["input"], list) and entry["type"] != "list_type"
    return a_list and any(_FORM.match(str(part)) for part in entry["loc"][-1:])


def _fitting(entries: Sequence[Any]) -> Sequence[Any]:
    """Return the errors of a value whose type is accepted; all errors if none is."""
    found = [each for each in entries if each["type"] != "list_type"]
    fits = any(not each["type"].endswith(("_type", "literal_error")) for each in found)
    return found if fits else entries


def _dotted_keys(
    model: "type[BaseModel]", place: tuple[str, ...], tables: "Mapping[str, type[BaseModel]]"
) -> Iterable[str]:
    """Yield every dotted key of a model under a prefix."""
    from pydantic import BaseModel

    for key in model.model_fields:
        inner = tables.get(key) or model.model_fields[key].annotation
        yield ".".join((*place, key))
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from _dotted_keys(inner, (*place, key), {})


def check_kinds(
    kinds: Mapping[str, Any], settings: "type[BaseModel]", shared: Iterable[str]
) -> None:
    """Raise FedpactError: a kind's setting is not a field, or a field is no kind's.

    kinds: each with the names of its `own` settings. shared: the fields that no kind names.
    """
    named = {name for kind in kinds.values() for name in kind.own}
    if odd := named ^ (set(settings.model_fields) - set(shared)):
        raise FedpactError(
            f"{', '.join(sorted(odd))}: expected the settings of {settings.__name__}, but for "
            f"{', '.join(shared)}, to be those that kinds have as their own; add the field, or "
            "name it in the kind's `own`"
        )


def unknown_key(key: str, known: Iterable[str], everywhere: Iterable[str] = ()) -> str:
    """Return the message on a key that its table, with the keys `known`, does not have.

    everywhere: all dotted keys, to find the same name in another table.
    """
    names, last = sorted(known), key.rsplit(".", 1)[-1]
    of = list(everywhere)
    same = [other for other in of if other.rsplit(".", 1)[-1] == last]
    if not same and (usual := OTHER_NAMES.get(last)) in of:
        same = [usual]
    if same:
        told = [_with_place(other, of) for other in same]
        return f"{key} is not a known key: expected {' or '.join(told)}"
    meant = nearest(last, names)
    return f"{key} is not a known key: expected one of {', '.join(names)}{meant}"


def _with_place(key: str, everywhere: Iterable[str]) -> str:
    """Return a key and, if it is in no table, where in a file that is, which is easily missed."""
    if any(other.startswith(f"{key}.") for other in everywhere):
        return f"the table [{key}]"
    return key if "." in key else f"{key} (a top-level key: in a file, put it above all [tables])"


def _place(entry: Any) -> list[Any]:
    # A value of several forms is reported under each form's name, which is no key.
    return [part for part in entry["loc"] if not _FORM.match(str(part))]


def _key(entry: Any, prefix: tuple[str, ...]) -> str:
    return ".".join(map(str, (*prefix, *_place(entry)))) or "configuration"


def _explain(
    key: str, entries: Sequence[Any], model: "type[BaseModel]", everywhere: Iterable[str]
) -> str:
    """Return what is wrong with a key in one sentence. entries: of each form that it may have."""
    first, place = entries[0], _place(entries[0])
    if first["type"] == "extra_forbidden":
        return unknown_key(key, _table_at(model, place[:-1]).model_fields, everywhere)
    messages = [entry["msg"].removeprefix("Value error, ") for entry in _fitting(entries)]
    if first["type"] == "value_error":
        told = "; ".join(dict.fromkeys(messages))
        return f"{key}: {told}" if place else told
    hint = WITHOUT_PRIVACY if re.fullmatch(r"privacy(\..*epsilon)?", key) else ""
    if first["type"] in ("model_type", "model_attributes_type"):
        return f"{key} is {first['input']!r}: expected a table of keys{hint}"
    if first["type"] == "finite_number" and hint:
        return f"{key} is {first['input']!r}: expected a finite number{hint}"
    if first["type"] == "string_type" and isinstance(first["input"], int | float):
        hint = f'; write it in quotes, as text: "{first["input"]}"'
    begin = "Input should be "
    others = [message.removeprefix(begin) for message in messages if message != messages[0]]
    told = ", or ".join([messages[0], *dict.fromkeys(others)])
    told = f"{told[0].lower()}{told[1:]}{hint or f'; set {key} to such a value'}"
    return f"{key} is {first['input']!r}: {told}"


def _table_at(model: "type[BaseModel]", place: list[Any]) -> "type[BaseModel]":
    from pydantic import BaseModel

    for part in place:
        field = model.model_fields.get(str(part))
        if field is not None:
            forms = (field.annotation, *get_args(field.annotation))
            tables = (f for f in forms if isinstance(f, type) and issubclass(f, BaseModel))
            model = next(tables, model)
    return model


def write_toml(raw: Mapping[str, Any], reasons: Mapping[str, str]) -> str:
    """Return a configuration as a file, a table in a table under its own head.

    reasons: what is said beside a key, by its path ("privacy.clip").

    >>> print(write_toml({"a": 1, "b": {"c": 2, "d e": {"f": True}}}, {"b.c": "so"}), end="")
    a = 1
    <BLANKLINE>
    [b]
    c = 2                           # so
    <BLANKLINE>
    [b."d e"]
    f = true
    """
    return "\n".join(_toml_lines(raw, reasons, ())) + "\n"


def _toml_lines(
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
        below = _toml_lines(value, reasons, (*path, str(key)))
        found += ["", *below] if found else below
    return found
