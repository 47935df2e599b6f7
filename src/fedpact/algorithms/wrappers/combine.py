"""Combining an algorithm with wrappers, or saying why not, and the settings in effect.

A combination is refused if its parts would no longer mean what they mean alone: by the algorithm's
facts (`MethodFacts.excludes`), or by CONFLICTS. docs/reference/combinations.md has the table.
Settings that would do nothing are refused, too (USES).
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final, NamedTuple, TypeVar

from pydantic import BaseModel

from fedpact.algorithms import BaseSettings, Summed
from fedpact.algorithms.common.fairness import FairRelease
from fedpact.algorithms.common.tau_control import STEPS_A_ROUND, Ali
from fedpact.algorithms.wrappers.base import Method
from fedpact.algorithms.wrappers.compression import Compressed, CompressionSettings, Gridded
from fedpact.algorithms.wrappers.fairness_and_control import (
    Controlled,
    ControlSettings,
    FairMethod,
    FairnessSettings,
)
from fedpact.algorithms.wrappers.optimizers import (
    Averaged,
    Headed,
    LocalSettings,
    ServerOptimised,
    ServerSettings,
    Stepped,
)
from fedpact.algorithms.wrappers.released_scales import Released
from fedpact.algorithms.wrappers.robust import Robust, RobustSettings
from fedpact.common.configuration import flatten
from fedpact.common.errors import PlanError
from fedpact.common.run_settings import SecureSettings
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
            f"{_name(part, used)} cannot be combined with algorithm = {method.name!r}: {reason}; "
            f"leave it out{how} or choose another algorithm"
        )
    for other, reason in CONFLICTS.get(part, {}).items():
        if used[other]:
            raise PlanError(
                f"{_name(part, used)} cannot be combined with {_name(other, used)}: {reason}; "
                "leave one of them out"
            )


def _name(part: str, used: Mapping[str, Any]) -> str:
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


_Settings = TypeVar("_Settings", bound=BaseModel)


def with_iterations(settings: _Settings, rounds: int) -> _Settings:
    """Return settings of a τ controller with R_c filled in; other settings unchanged."""
    if not isinstance(settings, Ali) or settings.iterations is not None:
        return settings
    if getattr(settings, "kind", "ali") == "fixed":
        return settings
    return settings.model_copy(update={"iterations": STEPS_A_ROUND * rounds})


class Use(NamedTuple):
    """Keys of a table that have an effect only if another key, `beside`, has a good value.

    by: the good values, in words.
    """

    table: str
    keys: Iterable[str]
    beside: str
    good: Callable[[Any], bool]
    by: str


def _of(table: str, keys: str, beside: str, *values: str) -> Use:
    return Use(table, keys.split(), beside, values.__contains__, " or ".join(map(repr, values)))


def _positive(weight: float | None) -> bool:
    return weight is None or weight > 0


def _absent(value: object) -> bool:
    return value is None


_MEAN, _SCALED = "loss_quantile quantile_rate count_noise", 'a column with scale = "released"'

USES: Final[tuple[Use, ...]] = (
    _of("server", "momentum learning_rate", "server.optimiser", "momentum", "adam", "yogi"),
    _of("server", "second_moment adaptivity", "server.optimiser", "adam", "yogi"),
    _of("server", "average_decay", "server.average", "exponential"),
    _of("server", "average_share", "server.average", "tail"),
    _of("privacy", "size_noise", "privacy.sizes", "noisy"),
    Use("privacy", ["column_share"], "records.released", bool, _SCALED),
    _of("compression", "keep", "compression.kind", "topk"),
    _of("robust", "liars", "robust.rule", "median", "trimmed", "krum"),
    Use(
        "fairness", (*FairRelease.model_fields, "weight_rule"), "fairness.weight", _positive, "> 0"
    ),
    _of("fairness", _MEAN, "fairness.loss_bound_rule", "quantile"),
    _of("settings", _MEAN, "settings.loss_bound_rule", "quantile"),
    Use("settings", ["weight_rule"], "settings.fairness_weight", _positive, "one above 0"),
    Use("settings", ["least_loss"], "settings.fairness_exponent", _positive, "one above 0"),
    _of("settings", "bias_penalty", "settings.aggregation", "least_noise"),
    Use("settings", ["step_divisor"], "settings.learning_rate", _absent, "none"),
    _of("settings", "difference_bound", "settings.solver", "sarah", "svrg"),
    Use("evaluation", ["epsilon", "delta"], "evaluation.releases", bool, "some"),
    Use("evaluation", ["loss_bound"], "evaluation.releases", lambda of: "loss" in of, '"loss"'),
    Use("evaluation", ["bins"], "evaluation.releases", lambda of: "roc" in of, '"roc"'),
    Use("logistic", ["start"], "initial.weights", _absent, "none"),
    Use(
        "local", ["momentum"], "settings.local_steps", lambda n: n is None or n > 1, "more than one"
    ),
)
"""What settings need to have an effect. Others always have one, or their table refuses them.

[privacy] with mode = "none" is not listed: a run without protection says so wherever it is shown,
and plans are often run with and without it.
"""


def check_used(plan: Any, typed: Collection[str] | None) -> None:
    """Raise PlanError if a setting has no effect and differs from its default.

    plan: a Plan. typed: the dotted keys to check, None for any: in a sweep, a setting that has an
    effect only at some swept values is not a mistake.
    """
    for use in USES:
        table = _value(plan, use.table)
        beside = _value(plan, use.beside)
        owner, _, other = use.beside.rpartition(".")
        if use.table == owner == "settings" and other not in type(table).model_fields:
            continue  # another algorithm's key, of the same name
        for key in use.keys:
            field, name = type(table).model_fields.get(key), f"{use.table}.{key}"
            if field is None or use.good(beside) or not (typed is None or name in typed):
                continue
            if (value := getattr(table, key)) != field.default:
                raise PlanError(
                    f"{name} is {value!r} with {use.beside} = {beside!r}: it has an effect only "
                    f"with {use.by}; leave it out"
                )


def check_numbers(plan: Any) -> None:
    """Raise ValueError if a setting is out of range in single precision, in which models compute.

    plan: a Plan. δ, and what is declared about records, are used in double precision.
    """
    whole = plan.model_dump(exclude={"records", "settings"})
    for name, value in flatten({**whole, "settings": plan.algorithm_settings.model_dump()}).items():
        for number in value if isinstance(value, list | tuple) else [value]:
            # NaN is refused here, too.
            if not isinstance(number, float) or number == 0 or math.isinf(number):
                continue
            if not 2.0**-100 <= abs(number) <= 2.0**100 and not name.endswith("delta"):
                raise ValueError(
                    f"{name} is {number!r}: expected 0 or a number from 2^-100 to 2^100, as others "
                    f"are not representable in float32; set {name} to such a number"
                )


def _value(plan: Any, key: str) -> Any:
    """Return a plan's value at a dotted key, or None."""
    found = plan
    for part in key.split("."):
        part = "algorithm_settings" if part == "settings" else part
        found = getattr(found, part, None)
    return found
