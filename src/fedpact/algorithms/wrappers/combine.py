"""Combining an algorithm with wrappers: `combine_wrappers` does it, or says why not.

A combination is refused if its parts would no longer mean what they mean alone;
docs/reference/combinations.md has the table.
"""

from collections.abc import Mapping
from typing import Final

from fedpact.algorithms import BaseSettings, Summed
from fedpact.algorithms.wrappers.base import Method
from fedpact.algorithms.wrappers.compression import Compressed, CompressionSettings, Gridded
from fedpact.algorithms.wrappers.fairness import FairMethod, FairnessSettings
from fedpact.algorithms.wrappers.local_optimizer import Headed, LocalSettings, Stepped, check_goes
from fedpact.algorithms.wrappers.released_scales import Released
from fedpact.algorithms.wrappers.robust import Robust, RobustSettings
from fedpact.algorithms.wrappers.secure import SecureSettings, check_summed
from fedpact.algorithms.wrappers.server_optimizer import Averaged, ServerOptimised, ServerSettings
from fedpact.algorithms.wrappers.tau import Controlled, ControlSettings
from fedpact.common.errors import PlanError
from fedpact.privacy.mechanisms import mechanism_of
from fedpact.privacy.settings import Privacy

READS_SINGLE_REPLIES: Final[dict[str, str]] = {
    "control": "the controller reads single replies, so one lie moves its estimates",
    "fairness": "F is a mean over single replies, so one lie moves every record's weight; with "
    "algorithm = 'fedfdp' the robust rule aggregates F as well",
}
"""Table of a plan -> why it cannot be combined with [robust]."""

NEEDS_PLAIN_STEPS: Final[dict[str, str]] = {
    "control": "the controller's estimates assume plain steps"
}
"""Table of a plan -> why it cannot be combined with [local]."""


def _check_clips(method: Method, control: ControlSettings, kind: str) -> None:
    """Raise PlanError if the clip cannot change from round to round. kind: of compression."""
    reason = method.facts.excludes.get("privacy.clip_schedule")
    if control.kind != "fixed":
        reason = "[control]: the controller's estimates assume a constant clip"
    if kind == "topk":
        reason = "[compression] kind = 'topk': a site sends later what it left out of earlier sums"
    if reason:
        raise PlanError(
            f"privacy.clip_schedule cannot be combined with algorithm = {method.name!r} and these "
            f"tables: {reason}; leave it out"
        )


NEEDS_SINGLE_REPLIES: Final[dict[str, str]] = {
    "robust": "it compares the sites' vectors with each other",
    "control": "the controller needs the minimum of the sites' remaining steps, and squares of "
    "each site's vector",
    "compression": "each reply has its own scale or indices, and is decoded before it is summed",
}
"""Table of a plan -> why it cannot be combined with [secure_aggregation]."""

NEEDS_THE_LIST: Final = (
    "masks, shares of noise and the threshold belong to one list of sites for all rounds"
)

RELEASED_NEEDS_SIZES: Final = (
    "it weights replies by other numbers than the declared sizes, which means over sites use"
)


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
    rounds: int,
    columns: int,
) -> Method:
    """Return the algorithm with its wrappers.

    rounds: of the run. columns: the number of columns scaled by released means.
    Raises PlanError: they cannot be combined.
    """
    method = Method(name, settings)
    if privacy.clip_schedule != "constant":
        _check_clips(method, control, compression.kind)
    chosen = {
        "robust": robust.rule != "mean",
        "fairness": fairness.weight > 0,
        "control": control.kind != "fixed",
        "compression": compression.kind not in ("auto", "none", "grid"),
    }
    if chosen["robust"]:
        # Innermost, so that the wrappers around it still see the sites' own replies.
        _check("robust", method)
        _check_tables("robust", READS_SINGLE_REPLIES, chosen)
        method = Robust(method, robust)
    if not local.plain:
        _check("local", method)
        _check_tables("local", NEEDS_PLAIN_STEPS, chosen)
        if local.schedule != "constant" and compression.kind == "topk":
            raise PlanError(
                f"[local] schedule = {local.schedule!r} cannot be combined with [compression] kind "
                "= 'topk': a site sends later what it left out of earlier, longer steps, but the "
                "bound on a reply follows from its own round; use another kind, or a constant "
                "schedule"
            )
        local.check_moves("local", rounds * method.steps())
        method = Stepped(method, local, rounds)
    if local.head:
        check_goes(method, {**chosen, "average": server.average != "none"})
        method = Headed(method, local.head)
    if chosen["fairness"]:
        _check("fairness", method)
        method = FairMethod(method, fairness)
    if server.optimiser != "none":
        _check("server", method)
        server.check_moves("server", rounds)
        method = ServerOptimised(method, server, rounds)
    if chosen["control"]:
        _check("control", method)
        method = Controlled(method, control)
    if compression.kind == "grid":
        # Outermost, as it encodes what leaves a site. A masked reply has its own encoding.
        method = Gridded(method, up=not secure.threshold)
    elif chosen["compression"]:
        method = Compressed(method, compression)
    if secure.threshold:
        _check_tables("secure_aggregation", NEEDS_SINGLE_REPLIES, chosen)
        check_summed(method)
    if server.average != "none":
        if why := method.facts.excludes.get("server.average"):
            raise PlanError(
                f"server.average = {server.average!r} cannot be combined with algorithm = "
                f"{name!r}: {why}; leave it out"
            )
        method = Averaged(method, server, rounds)
    if columns:
        # Outside of all: it adds round 0, which is no part of the algorithm.
        _check_columns(method, compression.kind, secure)
        method = Released(method, columns, privacy.least_noise_of)
    return method


def _check_columns(method: Method, kind: str, secure: SecureSettings) -> None:
    """Raise PlanError if columns cannot be scaled by released means. kind: of compression."""
    if kind == "grid":
        raise PlanError(
            'compression.kind = "grid" cannot be combined with scale = "released" of a column: '
            "it rounds to a part of the gradients' noise, and released means have other noise; "
            "use another kind, or declare mean and deviation"
        )
    if secure.threshold and method.facts.summed != Summed():
        raise PlanError(
            f'[secure_aggregation] with scale = "released" of a column cannot be combined with '
            f"algorithm = {method.name!r}: {RELEASED_NEEDS_SIZES}; declare mean and deviation, or "
            "choose another algorithm"
        )


def _check_tables(table: str, reasons: Mapping[str, str], chosen: Mapping[str, bool]) -> None:
    for other, reason in reasons.items():
        if chosen[other]:
            raise PlanError(
                f"[{table}] cannot be combined with [{other}]: {reason}; leave one of them out"
            )


def _check(table: str, method: Method) -> None:
    reason = method.facts.excludes.get(table)
    if reason:
        raise PlanError(
            f"[{table}] cannot be combined with algorithm = {method.name!r}: {reason}; leave the "
            f"table out (--set '{table}={{}}') or choose another algorithm"
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


def check_part(each: int | None, method: Method, threshold: int) -> None:
    """Raise ValueError if a round needs all sites but does not ask them.

    each: how many sites a round asks, None for all. threshold: of secure aggregation, 0 for none.
    """
    if each is None:
        return
    whose, why = f"algorithm = {method.name!r} with these tables", method.facts.needs_all_sites
    if threshold:
        whose, why = "[secure_aggregation]", NEEDS_THE_LIST
    if why:
        raise ValueError(f"sites_per_round cannot be combined with {whose}: {why}; leave it out")
