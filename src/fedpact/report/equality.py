"""Whether runs may be compared at all: what differs between their plans, and what that makes of it.

A comparison is equal where its runs have the same data, partition, seeds, rounds, budgets and kind
of privacy. What the method itself consists of may differ, and is shown.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Document = Mapping[str, Any]

# Part of what is being compared. Whatever is not named here has to be equal.
_METHOD = (
    *("algorithm", "model", "settings", "control", "fairness", "server", "compression", "robust"),
    *("secure_aggregation", "sampling_rate", "batch_size"),
)
_METHOD_OF_PRIVACY = ("privacy.clip", "privacy.sigma")
# Does not change what is trained; or differs between the runs of one entry.
_NOTHING = ("run", "seed", "about")
DATA = ("data", "label", "site")
"""What must be equal for any figure to mean the same."""


@dataclass(frozen=True)
class Difference:
    """One key of the plans that differs. values: entry -> value, for the entries that have it.

    unequal: the comparison is not between equals because of it.
    """

    key: str
    values: Mapping[str, str]
    unequal: bool


def differences(plans: Mapping[str, Document]) -> list[Difference]:
    """Return every key in which plans (entry -> plan.json's content) differ, unequal ones first.

    The privacy settings of a plain run apply to nothing, so only its mode is looked at.
    """
    flat = {name: _applicable(flatten(plan)) for name, plan in plans.items()}
    keys = dict.fromkeys(key for values in flat.values() for key in values)
    found = []
    for key in keys:
        private = key.startswith("privacy.")
        values = {
            name: repr(values.get(key))
            for name, values in flat.items()
            if key in values or not private
        }
        if len(set(values.values())) > 1:
            found.append(Difference(key, values, unequal=not _is_method(key)))
    return sorted(found, key=lambda difference: not difference.unequal)


def flatten(document: Document, prefix: str = "") -> dict[str, Any]:
    """Return a document's leaves by dotted key; an empty table is a leaf of its own.

    >>> flatten({"a": {"b": 1, "c": {}}, "d": 2})
    {'a.b': 1, 'a.c': {}, 'd': 2}
    """
    leaves: dict[str, Any] = {}
    for key, value in document.items():
        if isinstance(value, Mapping) and value:
            leaves.update(flatten(value, f"{prefix}{key}."))
        else:
            leaves[prefix + key] = value
    return leaves


def _applicable(flat: dict[str, Any]) -> dict[str, Any]:
    plain = flat.get("privacy.mode") == "none"
    return {
        key: value
        for key, value in flat.items()
        if key.split(".")[0] not in _NOTHING
        and not (plain and key.startswith("privacy.") and key != "privacy.mode")
    }


def _is_method(key: str) -> bool:
    return key.split(".")[0] in _METHOD or key in _METHOD_OF_PRIVACY
