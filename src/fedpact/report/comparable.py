"""Differences of plans, and which of them make a comparison unfair.

Plans are compared in canonical form. A list of equal values for all sites is a single value, and
per-site settings equal to the general ones are left out. sites_per_round equal to the number of
sites, class weights and schedules of ones, and the noise of sizes that are not released count as
not given. Weights are identified by their digest.

A comparison is fair if its runs have the same data, partition, seeds, rounds, budgets and kind of
privacy. Parts of the method may differ, and are shown. A setting that several algorithms share,
such as τ or η, makes runs unequal if one of them uses a default that differs from the others.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Final

from fedpact import algorithms
from fedpact.algorithms.wrappers.base import Method
from fedpact.common.configuration import DEFAULTS_KEY, flatten
from fedpact.data.partition import site_names

_EACH: Final = ("epsilon", "delta", "sigma")
_SCHEDULES: Final = (("privacy", "clip_schedule"), ("local", "schedule"))


def canonical(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return a plan.json's content in canonical form."""
    found = {k: dict(v) if isinstance(v, Mapping) else v for k, v in plan.items()}
    if found.get("sites_per_round") == found.get("sites") is not None:
        found["sites_per_round"] = None
    for table, key, factor in (
        *((*s, "constant") for s in _SCHEDULES),
        ("task", "class_weights", None),
    ):
        value = (found.get(table) or {}).get(key)
        if isinstance(value, list) and all(one == 1 for one in value):
            found[table][key] = factor
    for table in ("initial", "features"):
        if (found.get(table) or {}).get("sha256"):
            found[table].pop("weights", None)
    if found.get("privacy"):
        _grant(found, found["privacy"])
    return found


def _grant(plan: dict[str, Any], privacy: dict[str, Any]) -> None:
    own = {site: dict(of) for site, of in (privacy.get("per_site") or {}).items()}
    kind = (plan.get("partition") or {}).get("kind", "natural")
    # A natural partition's sites have the data set's own names.
    names = [] if kind == "natural" else site_names(plan.get("sites") or 0)
    for key in (key for key in _EACH if key in privacy):
        privacy[key] = _shared(privacy[key], own, key, names)
    if plan.get("batch_size") is None and "sampling_rate" in plan:
        plan["sampling_rate"] = _shared(plan["sampling_rate"], own, "sampling_rate", names)
    if "per_site" in privacy:
        privacy["per_site"] = {
            site: kept
            for site, of in own.items()
            if (kept := {key: value for key, value in of.items() if value is not None})
        }
    if privacy.get("sizes") == "public":
        privacy.pop("size_noise", None)


def _shared(value: Any, own: dict[str, dict[str, Any]], key: str, names: Sequence[str]) -> Any:
    """Return the common value of all sites, or a list in the names' order if they differ.

    Values that it covers are removed from `own`, site -> settings.
    """
    each = value if isinstance(value, list) else [value] * len(names)
    if names and len(each) == len(names) and own.keys() <= set(names):
        given = [own.get(name, {}).pop(key, None) for name in names]
        value = [all_ if one is None else one for one, all_ in zip(given, each, strict=True)]
    if isinstance(value, list) and all(one == value[0] for one in value):
        value = value[0]
    for of in own.values():
        if of.get(key) == value:
            of.pop(key, None)
    return value


JsonMapping = Mapping[str, Any]

# Parts of the method, which may differ. All other keys must be equal.
_METHOD = (
    *("algorithm", "model", "settings", "control", "fairness", "server", "compression", "robust"),
    *("secure_aggregation", "sampling_rate", "batch_size"),
)
_METHOD_OF_PRIVACY = ("privacy.clip", "privacy.sigma")
# Does not change what is trained, or differs between the runs of an entry.
_NOTHING = ("run", "seed", "about")
LOCAL_STEPS_KEY = "settings.local_steps"
"""The key of τ, also for algorithms without such a setting."""
_UNKNOWN = object()
DATA = ("data", "label", "site")
"""Keys that must be equal for figures to be comparable at all."""


@dataclass(frozen=True)
class Difference:
    """A key in which plans differ. values: entry -> value, marked if it is a default.

    unequal: whether it makes the comparison unfair.
    """

    key: str
    values: Mapping[str, str]
    unequal: bool


def differences(plans: Mapping[str, JsonMapping], swept: Collection[str] = ()) -> list[Difference]:
    """Return every key in which plans (entry -> plan.json's content) differ, unequal ones first.

    swept: keys that are compared. Of a plain run's privacy settings only the mode counts.
    """
    flat = {name: _applicable(plan) for name, plan in plans.items()}
    keys = dict.fromkeys(key for values in flat.values() for key in values)
    found = []
    for key in keys:
        # Keys that a plain run or another algorithm does not have are no difference, unless given.
        optional = key.startswith("privacy.") or (
            key.startswith("settings.")
            and all(_is_left(key, plans[name]) for name, own in flat.items() if key in own)
        )
        values = {
            name: repr(values.get(key))
            for name, values in flat.items()
            if key in values or not optional
        }
        if len(set(values.values())) > 1:
            method = key.split(".")[0] in _METHOD or key in _METHOD_OF_PRIVACY
            having = {n: value for n, value in values.items() if key in flat[n]}
            unequal = key not in swept and (not method or _left_apart(key, having, plans))
            shown = {
                n: value + " by default" * _is_left(key, plans[n]) for n, value in values.items()
            }
            found.append(Difference(key, shown, unequal))
    return sorted(found, key=lambda difference: not difference.unequal)


def _left_apart(key: str, values: Mapping[str, str], plans: Mapping[str, JsonMapping]) -> bool:
    """Whether two algorithms differ in a shared setting, and one of the values is a default."""
    return key.startswith("settings.") and any(
        values[one] != values[other]
        and plans[one].get("algorithm") != plans[other].get("algorithm")
        and (_is_left(key, plans[one]) or _is_left(key, plans[other]))
        for one, other in combinations(values, 2)
    )


def _is_left(key: str, plan: JsonMapping) -> bool:
    return key in plan.get(DEFAULTS_KEY, ())


def _applicable(plan: JsonMapping) -> dict[str, Any]:
    flat = flatten(canonical(plan))
    flat.setdefault(LOCAL_STEPS_KEY, _steps(plan))
    plain = flat.get("privacy.mode") == "none"
    return {
        key: value
        for key, value in flat.items()
        if key.split(".")[0] not in (*_NOTHING, DEFAULTS_KEY)
        and value is not _UNKNOWN
        and not (plain and key.startswith("privacy.") and key != "privacy.mode")
    }


def _steps(plan: JsonMapping) -> Any:
    """Return τ of a plan without such a setting."""
    name, control = str(plan.get("algorithm")), plan.get("control", {})
    if name not in algorithms.names() and ":" not in name:
        return _UNKNOWN
    method = Method(name)
    if method.facts.controlled or control.get("kind", "fixed") != "fixed":
        return "chosen in each round"
    return _UNKNOWN if "local_steps" in type(method.settings).model_fields else method.steps()
