"""Mistyped keys of a configuration, found before anything is loaded.

The fields of the classes in `fedpact.plan` are read from the source files (`sources`). Whatever is
refused here `Plan.read` would refuse, in the same words; all that passes is checked there.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from fedpact.configuration import read_configuration, unknown_key
from fedpact.errors import PlanError
from fedpact.reference.sources import Model, declared_keys, table
from fedpact.reference.tables import PLAN


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
