"""The plans of a sweep: each plan with each combination of values."""

import json
import re
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import product
from typing import Any

from fedpact import algorithms
from fedpact.common.configuration import (
    drop_overridden,
    flatten,
    key_of,
    select_given,
    set_key,
    value_of,
)
from fedpact.common.errors import PlanError
from fedpact.common.files import safe_name
from fedpact.common.user_code import name_object, name_of_function
from fedpact.plan import Plan
from fedpact.report.compared_runs import SweepPoint

_ELSEWHERE = {
    "seed": "every entry runs with the same seeds: give their number with --seeds",
    "algorithm": "each algorithm has settings of its own: name them with --algorithms",
}


_COMMA = re.compile(r""",(?=(?:[^][{}"']|"[^"]*"|'[^']*'|\[[^]]*\]|\{[^}]*\})*$)""")


def read_sweeps(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Return key -> values from `KEY=V1,V2,...`; values are read as in `--set`.

    Raises PlanError: another form, or a repeated key.
    """
    found = dict[str, list[Any]]()
    for text in texts:
        key, equals, values = text.partition("=")
        key = key.strip()
        if not (key and equals and values.strip()):
            raise PlanError(
                f"--sweep {text!r}: expected KEY=V1,V2,..., as in privacy.epsilon=0.5,1,2"
            )
        if key in found:
            raise PlanError(
                f"--sweep {text!r}: {key} is swept already; give all its values at once"
            )
        found[key] = _values(values)
    return found


def expand_sweep(
    plans: Mapping[str, Plan], sweeps: Mapping[str, Sequence[Any]]
) -> tuple[dict[str, Plan], dict[str, SweepPoint]]:
    """Return the plans with each combination of values, and each entry's place in the sweep.

    A plan is swept over the settings that its algorithm knows. Entries are named NAME-KEY-VALUE.
    Raises PlanError: an invalid value, or a key that no plan has.
    """
    if not isinstance(sweeps, Mapping):
        raise PlanError(f'sweep is {sweeps!r}: expected {{"privacy.epsilon": [0.5, 1, 2]}}')
    if not sweeps:
        return dict(plans), {}
    sweeps = {key: _plain(key, values) for key, values in sweeps.items()}
    for key, values in sweeps.items():
        if key in _ELSEWHERE:
            raise PlanError(f"sweep {key}: {_ELSEWHERE[key]}")
        texts = [json.dumps(value) for value in values]
        if not texts or len(set(texts)) < len(texts):
            raise PlanError(f"sweep {key}: its values are {list(values)}: expected some, each once")
        if not any(has_key(plan, key) for plan in plans.values()):
            raise PlanError(
                f"sweep {key}: it is {no_setting(plan.algorithm for plan in plans.values())}"
            )
    points = dict[str, list[dict[str, Any]]]()
    for name, plan in plans.items():
        own = [key for key in sweeps if has_key(plan, key)]
        each = product(*(sweeps[key] for key in own))
        points[name] = [dict(zip(own, values, strict=True)) for values in each]
    return expand_points(plans, points)


def expand_points(
    plans: Mapping[str, Plan], points: Mapping[str, Sequence[Mapping[str, Any]]]
) -> tuple[dict[str, Plan], dict[str, SweepPoint]]:
    """Return each plan at each of its points (key -> value), as expand_sweep.

    Raises PlanError: an invalid value, or a key that a plan does not have.
    """
    entries, at = dict[str, Plan](), dict[str, SweepPoint]()
    for name, plan in plans.items():
        for point in points[name]:
            for key in point:
                if key in _ELSEWHERE:
                    raise PlanError(f"point {key}: {_ELSEWHERE[key]}")
                if not has_key(plan, key):
                    raise PlanError(f"point {key}: it is {no_setting([plan.algorithm])}")
            texts = [f"{key.rpartition('.')[2]}-{value}" for key, value in point.items()]
            # "1e+16" must not become "1e-16".
            texts = [re.sub(r"(?<=\de)\+", "", text) for text in texts]
            parts = [re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-") or "value" for text in texts]
            entry = free_name(safe_name("-".join([name, *parts])), entries)
            entries[entry], at[entry] = change(plan, point), SweepPoint(name, point)
    return entries, at


def _plain(key: str, values: Any) -> list[Any]:
    """Return a key's values as in plan.json: models, losses and metrics by name."""
    values = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(values, str | Mapping) or not isinstance(values, Iterable):
        raise PlanError(f"sweep {key}: its values are {values!r}: expected a list, as [{values!r}]")
    name = name_of_function if key.startswith("task.") else name_object
    found = [value.item() if hasattr(value, "item") else name(value) for value in values]
    try:
        return json.loads(json.dumps(found))
    except TypeError as error:
        raise PlanError(
            f"sweep {key}: its values are {found!r}: expected what a plan has under it ({error})"
        ) from None


def no_setting(algorithms_: Iterable[str]) -> str:
    """Return that a key is no setting of these algorithms, and which ones they have."""
    names = list(dict.fromkeys(algorithms_))
    known = sorted({field for name in names for field in settings_of(name)})
    return f"no setting of {' or '.join(names)}: expected one of {', '.join(known)}"


def settings_of(algorithm: str) -> Collection[str]:
    """Return the names of an algorithm's settings. Raises PlanError: there is none."""
    return algorithms.load(algorithm).Settings.model_fields


def _values(text: str) -> list[Any]:
    try:
        return tomllib.loads(f"values = [{text}]")["values"]
    except tomllib.TOMLDecodeError:
        # Unquoted words; the commas in lists and tables do not separate values.
        return [value_of(part.strip()) for part in _COMMA.split(text)]


def has_key(plan: Plan, key: str) -> bool:
    """Whether the plan may have this key, a setting of its algorithm among others."""
    name = key.removeprefix("settings.")
    return name == key or name in settings_of(plan.algorithm)


def change(plan: Plan, chosen: Mapping[str, Any]) -> Plan:
    """Return a plan with these values (key -> value). Raises PlanError: an invalid one."""
    # Only given keys are kept, so that derived values follow from the swept ones.
    raw = select_given(plan.document(), lambda found: Plan.parse(found).document())
    keys = [key_of(key) for key in chosen]
    drop_overridden(raw, keys)
    for key, value in chosen.items():
        set_key(raw, key, value, f"sweep {key}")
    try:
        return Plan.parse(raw, typed=keys)
    except PlanError as error:
        told = ", ".join(f"{key}={value}" for key, value in flatten(chosen).items())
        raise PlanError(f"sweep {told}: {error}") from None


def free_name(name: str, taken: Collection[str]) -> str:
    """Return a name, numbered if it is taken."""
    numbered = (f"{name}-{i}" if i > 1 else name for i in range(1, len(taken) + 2))
    return next(each for each in numbered if each not in taken)
