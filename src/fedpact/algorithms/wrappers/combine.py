"""Combining an algorithm with wrappers: `combine_wrappers` does it, or says why not.

A combination is refused if its parts would no longer mean what they mean alone: by the algorithm's
facts (`MethodFacts.excludes`), or by CONFLICTS. docs/reference/combinations.md has the table.
"""

from collections.abc import Mapping
from typing import Any, Final

from fedpact.algorithms import BaseSettings, Summed
from fedpact.algorithms.common.limits import SecureSettings
from fedpact.algorithms.wrappers.base import Method
from fedpact.algorithms.wrappers.compression import Compressed, CompressionSettings, Gridded
from fedpact.algorithms.wrappers.fairness import FairMethod, FairnessSettings
from fedpact.algorithms.wrappers.local_optimizer import Headed, LocalSettings, Stepped
from fedpact.algorithms.wrappers.released_scales import Released
from fedpact.algorithms.wrappers.robust import Robust, RobustSettings
from fedpact.algorithms.wrappers.server_optimizer import Averaged, ServerOptimised, ServerSettings
from fedpact.algorithms.wrappers.tau import Controlled, ControlSettings
from fedpact.common.errors import PlanError
from fedpact.privacy.mechanisms import mechanism_of
from fedpact.privacy.settings import Privacy

_TOPK: Final = 'compression.kind = "topk"'
_GRID: Final = 'compression.kind = "grid"'
_COLUMNS: Final = 'scale = "released" of a column'

CONFLICTS: Final[dict[str, dict[str, str]]] = {
    "robust": {
        "control": "the controller reads single replies, so one lie moves its estimates",
        "fairness": "F is a mean over single replies, so one lie moves every record's weight; with "
        "algorithm = 'fedfdp' the robust rule aggregates F as well",
    },
    "local": {"control": "the controller's estimates assume plain steps"},
    "local.schedule": {
        _TOPK: "a site sends later what it left out of earlier, longer steps, but the bound on a "
        "reply follows from its own round"
    },
    "local.head": {
        "fairness": "it compares the sites' losses at one model, and here each site has its own "
        "head",
        "control": "the controller's estimates compare the sites' gradients at one model",
        "server.average": "an average would include a head that is never trained",
    },
    "privacy.clip_schedule": {
        "control": "the controller's estimates assume a constant clip",
        _TOPK: "a site sends later what it left out of earlier sums",
    },
    "secure_aggregation": {
        "robust": "it compares the sites' vectors with each other",
        "control": "the controller needs the minimum of the sites' remaining steps, and squares of "
        "each site's vector",
        "compression": "each reply has its own scale or indices, and is decoded before it is "
        "summed",
    },
    "sites_per_round": {
        "secure_aggregation": "masks, shares of noise and the threshold belong to one list of "
        "sites for all rounds"
    },
    _COLUMNS: {
        _GRID: "it rounds to a part of the gradients' noise, and released means have other noise; "
        "use another kind, or declare mean and deviation"
    },
}
"""Part of a plan -> another part that cannot be combined with it -> why."""


def combine_wrappers(
    name: str,
    settings: BaseSettings,
    fairness: FairnessSettings,
    control: ControlSettings,
    server: ServerSettings,
    compression: CompressionSettings,
    robust: RobustSettings,
    secure: SecureSettings,
    local: LocalSettings,
    privacy: Privacy,
    sites_per_round: int | None,
    rounds: int,
    columns: int,
) -> Method:
    """Return the algorithm with its wrappers.

    rounds: of the run. columns: the number of columns scaled by released means.
    Raises PlanError: they cannot be combined.
    """
    method = Method(name, settings)
    used: dict[str, Any] = {
        "privacy.clip_schedule": privacy.clip_schedule != "constant" and privacy.clip_schedule,
        "robust": robust.rule != "mean",
        "local": not local.plain,
        "local.schedule": local.schedule != "constant" and local.schedule,
        "local.head": local.head,
        "fairness": fairness.weight > 0,
        "server": server.optimiser != "none",
        "control": control.kind != "fixed",
        "compression": compression.kind not in ("auto", "none", "grid"),
        _TOPK: compression.kind == "topk",
        _GRID: compression.kind == "grid",
        "secure_aggregation": secure.threshold > 0,
        "server.average": server.average != "none" and server.average,
        "sites_per_round": sites_per_round,
        _COLUMNS: columns > 0,
    }
    for part in used:
        if used[part]:
            _check(part, method, used)
    if used["robust"]:
        # Innermost, so that the wrappers around it still see the sites' own replies.
        method = Robust(method, robust)
    if used["local"]:
        local.check_moves("local", rounds * method.steps())
        method = Stepped(method, local, rounds)
    if used["local.head"]:
        method = Headed(method, local.head)
    if used["fairness"]:
        method = FairMethod(method, fairness)
    if used["server"]:
        server.check_moves("server", rounds)
        method = ServerOptimised(method, server, rounds)
    if used["control"]:
        method = Controlled(method, control)
    if used[_GRID]:
        # Outermost, as it encodes what leaves a site. A masked reply has its own encoding.
        method = Gridded(method, up=not secure.threshold)
    elif used["compression"]:
        method = Compressed(method, compression)
    if used["secure_aggregation"]:
        _check_summed(method, columns)
    if used["server.average"]:
        method = Averaged(method, server, rounds)
    if columns:
        # Outside of all: it adds round 0, which is no part of the algorithm.
        method = Released(method, columns, privacy.least_noise_of)
    if used["sites_per_round"] and (why := method.facts.needs_all_sites):
        raise PlanError(
            f"sites_per_round = {sites_per_round} cannot be combined with algorithm = {name!r} "
            f"with these tables: {why}; leave it out"
        )
    return method


def _check(part: str, method: Method, used: Mapping[str, Any]) -> None:
    """Raise PlanError if the algorithm, or another used part, excludes this part of a plan.

    used: part -> True, or its value if it is a key; false if it is not used.
    """
    if reason := method.facts.excludes.get(part):
        how = "" if "." in part else f" (--set '{part}={{}}')"
        raise PlanError(
            f"{_named(part, used)} cannot be combined with algorithm = {method.name!r}: {reason}; "
            f"leave it out{how} or choose another algorithm"
        )
    for other, reason in CONFLICTS.get(part, {}).items():
        if used[other]:
            raise PlanError(
                f"{_named(part, used)} cannot be combined with {_named(other, used)}: {reason}; "
                "leave one of them out"
            )


def _named(part: str, used: Mapping[str, Any]) -> str:
    if used[part] is True:
        return part if " " in part else f"[{part}]"
    return f"{part} = {used[part]!r}"


def _check_summed(method: Method, columns: int) -> None:
    """Raise PlanError if the update of a method needs more than the sum of the replies."""
    if why_not := method.facts.summed.why_not:
        raise PlanError(
            f"[secure_aggregation] cannot be combined with these settings of algorithm = "
            f"{method.name!r}: {why_not}; leave the table out, or change the settings"
        )
    if columns and method.facts.summed != Summed():
        raise PlanError(
            f"[secure_aggregation] with {_COLUMNS} cannot be combined with algorithm = "
            f"{method.name!r}: it weights replies by other numbers than the declared sizes, which "
            "means over sites use; declare mean and deviation, or choose another algorithm"
        )


def check_mode(method: Method, algorithm: str, mode: str) -> None:
    """Raise ValueError if the method cannot be private in this way. mode: privacy.mode."""
    if mode == "none":
        return
    if method.facts.plain_only:
        raise ValueError(
            f"algorithm = {algorithm!r} has no private form: {method.facts.plain_only}"
        )
    if mode == "automatic" and (why := method.facts.excludes.get("privacy.mode")):
        raise ValueError(
            f"privacy.mode = 'automatic' cannot be combined with algorithm = {algorithm!r}: {why}; "
            "use privacy.mode = 'per_sample'"
        )
    if method.facts.weighs_records and not mechanism_of(mode).summed:
        raise ValueError(
            f"algorithm = {algorithm!r} with these settings weights each record within its clip, "
            f"but privacy.mode = {mode!r} does not clip records: use privacy.mode = 'per_sample'"
        )
