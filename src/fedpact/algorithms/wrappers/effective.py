"""Settings in effect: derived defaults, and refusing settings that do nothing."""

import math
from collections.abc import Callable, Collection, Iterable
from typing import Any, Final, NamedTuple, TypeVar

from pydantic import BaseModel

from fedpact.algorithms.common.fairness import FairRelease
from fedpact.algorithms.common.tau_control import STEPS_A_ROUND, Ali
from fedpact.common.configuration import flatten
from fedpact.common.errors import PlanError
from fedpact.per_sample.clipping import SHORTEST

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
            if not SHORTEST <= abs(number) <= 1 / SHORTEST and not name.endswith("delta"):
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
