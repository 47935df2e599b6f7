"""Differences of plans, and which of them make a comparison unfair.

Plans are compared in canonical form. A list of equal values for all sites is a single value, and
per-site settings equal to the general ones are left out. sites_per_round equal to the number of
sites, class weights and schedules of ones, and the noise of sizes that are not released count as
not given. Weights are identified by their digest.

A comparison is fair if its runs have the same data, partition, seeds, rounds, budgets and kind of
privacy. Parts of the method may differ, and are shown. A setting that several algorithms share,
such as τ or η, makes runs unequal if one of them uses a default that differs from the others.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Final

from fedpact import algorithms
from fedpact.algorithms.wrappers.base import Method
from fedpact.common.configuration import DEFAULTS_KEY, flatten
from fedpact.data.partition import site_names

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
    """Put what [privacy.per_site] says into lists, in the order of the sites' names."""
    # A natural partition's sites have the data set's own names.
    natural = (plan.get("partition") or {}).get("kind", "natural") == "natural"
    names = [] if natural else site_names(plan.get("sites") or 0)
    own = privacy.get("per_site") or {}
    rate = ("sampling_rate", plan)
    for key, table in (("epsilon", privacy), ("delta", privacy), ("sigma", privacy), rate):
        each = table.get(key)
        if names and own.keys() <= {*names}:
            each = each if isinstance(each, list) else [each] * len(names)
            granted = [own.get(name, {}).get(key) for name in names]
            # A list of another length is refused when the run begins.
            each = [e if one is None else one for one, e in zip(granted, each, strict=False)]
            privacy["per_site"] = {}
        if isinstance(each, list) and all(one == each[0] for one in each):
            each = each[0]
        if key in table:
            table[key] = each
    if privacy.get("sizes") == "public":
        privacy.pop("size_noise", None)


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
