"""One form for plans that mean the same: what was typed in two ways is no difference.

A list of one value for every site is that value, and a site's own grant that is what all have is
none; all sites in each round are no part of them; classes that all weigh 1 have no weights, and
factors that are all 1 no schedule; weights are told by their digest, wherever their file is; a
count's noise is nothing where no count is released.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from fedpact.data.kinds import site_names

_EACH: Final = ("epsilon", "delta", "sigma")
_SCHEDULES: Final = (("privacy", "clip_schedule"), ("local", "schedule"))


def canonical(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return a plan.json's content in the form that all plans of its meaning share."""
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
    names = _simulated(plan)
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


def _simulated(plan: Mapping[str, Any]) -> list[str]:
    """Return the sites' names; none where only the data set knows them."""
    kind = (plan.get("partition") or {}).get("kind", "natural")
    return [] if kind == "natural" else site_names(plan.get("sites") or 0)


def _shared(value: Any, own: dict[str, dict[str, Any]], key: str, names: Sequence[str]) -> Any:
    """Return what all sites have, a list of what each has, in the names' order, where they differ.

    What `own`, site -> its grant, says of it is taken out of there, as far as this list says it.
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
