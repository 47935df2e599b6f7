"""Which algorithm goes with which wrapper: `combine_wrappers` puts them together, or says why not.

A combination is refused where it would not mean what its parts mean alone; docs/combinations.md
has the table.
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

_OWN_FAIRNESS = "it has a fairness of its own, and two would pull at each other"

REFUSED: Final[dict[str, dict[str, str]]] = {
    "fairness": {
        "fedfdp": _OWN_FAIRNESS + ": set its settings.fairness_weight",
        "fedfair": _OWN_FAIRNESS + ": set its settings.fairness_weight",
        "qffl": _OWN_FAIRNESS,
        "feddyn": "it sends its model less h_i/α, at which a loss would mean nothing",
        "fedproxvr": "its gradient differences are clipped to how far a gradient can move, and a "
        "weight that follows the loss moves too: the weighted difference has no such bound",
        "ldp_fedsgd": "it sends a gradient, not a model at which the site could release its loss",
        "mr_mtl": "a site's loss would be that of a model which nobody uses: its own is not sent",
    },
    "control": {
        "ali_dpfl": "it chooses τ by itself, as fedavg with [control] does",
        "ldp_fedsgd": "it makes one step a round, so there is no τ to choose",
        "mr_mtl": "its estimates compare the sites' gradients at one model, and here each site's "
        "are at its own",
    },
    "robust": {
        "ali_dpfl": "its controller reads single replies, so one lie moves its estimates",
        "ldp_fedsgd": "it weighs releases by their noise, and robust aggregates have no weights",
        "qffl": "its weights follow the losses that sites report, so a lie would choose its own",
    },
    "local": {
        "ali_dpfl": "its controller's estimates are of plain steps",
        "feddyn": "its h_i adds up what plain steps moved, as a gradient where they end",
        "fedfair": "it scales each step by the loss where it is made, and with momentum a step is "
        "made of earlier ones, too",
        "fedproxvr": "its differences are clipped by how far plain steps move",
        "ldp_fedsgd": "its step is the server's: [server] has momentum and schedules",
        "mr_mtl": "its sites' models are held to their mean by the length of plain steps",
        "qffl": "it takes the noise of plain steps off the way that a site has moved",
        "scaffold": "its control variate is the mean gradient of plain steps, their way over τ η",
    },
    "server": {
        "feddyn": "FedDyn's next model is the sites' mean less the server's h, no step from w: an "
        "optimiser would integrate the sites' drift a second time",
        "mr_mtl": "the sites' own models are held to their mean, which an optimiser's model is not",
    },
    "secure_aggregation": {
        "ali_dpfl": "its controller takes the least of the sites' remaining steps and squares of "
        "each site's vector, which no sum of vectors gives",
        "qffl": "its weights follow the losses that sites report, and the weights of a masked sum "
        "have to be public",
    },
}
"""Table of a plan -> algorithm -> why the two do not go together."""

READS_SINGLE_REPLIES: Final[dict[str, str]] = {
    "control": "the controller reads single replies, so one lie moves its estimates",
    "fairness": "F is the mean of what single replies say, so one lie moves every record's weight; "
    "algorithm = 'fedfdp' has its F among what the robust rule aggregates",
}
"""Table of a plan -> why it does not go with [robust]."""

NEEDS_PLAIN_STEPS: Final[dict[str, str]] = {
    "control": "the controller's estimates are of plain steps, and their number follows them",
}
"""Table of a plan -> why it does not go with [local]."""

NEEDS_ONE_CLIP: Final[dict[str, str]] = {
    "ali_dpfl": "its controller's estimates are of gradients of one clip",
    "feddyn": "its h_i adds up gradients of earlier rounds, and how far a reply may go follows one "
    "clip of them all",
    "fedproxvr": "its openings and differences are bounded by one clip",
    "scaffold": "its control variates are gradients of earlier rounds, clipped to another length "
    "than those that they correct",
}
"""Algorithm -> why it does not go with privacy.clip_schedule."""


def _check_clips(name: str, control: ControlSettings, kind: str) -> None:
    """Raise PlanError where a clip that changes from round to round would break something.

    name: of the algorithm. kind: of compression.
    """
    reason = NEEDS_ONE_CLIP.get(name)
    if control.kind != "fixed":
        reason = "[control]: " + NEEDS_ONE_CLIP["ali_dpfl"]
    if kind == "topk":
        reason = "[compression] kind = 'topk': a site sends later what it left out of earlier sums"
    if reason:
        raise PlanError(
            f"privacy.clip_schedule does not go with algorithm = {name!r} and these tables: "
            f"{reason}; leave it out"
        )


NEEDS_SINGLE_REPLIES: Final[dict[str, str]] = {
    "robust": "it compares the sites' vectors with each other",
    "control": "the controller takes the least of the sites' remaining steps and squares of each "
    "site's vector",
    "compression": "each reply has a scale or places of its own, and is opened before it is summed",
}
"""Table of a plan -> why it does not go with [secure_aggregation]."""

NEEDS_THE_LIST: Final = (
    "masks, shares of noise and the threshold are of one list of sites for all rounds"
)

RELEASED_NEEDS_SIZES: Final = (
    "it weighs replies by other numbers than declared sizes, by which means over sites are"
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
    """Return the algorithm with everything around it.

    rounds: of the run. columns: that are scaled by what the sites release.
    Raises PlanError: they do not go together.
    """
    method = Method(name, settings)
    if privacy.clip_schedule != "constant":
        _check_clips(name, control, compression.kind)
    chosen = {
        "robust": robust.rule != "mean",
        "fairness": fairness.weight > 0,
        "control": control.kind != "fixed",
        "compression": compression.kind not in ("auto", "none", "grid"),
    }
    if chosen["robust"]:
        # Innermost: whatever is around it still sees the sites' own replies.
        _check("robust", name)
        _check_tables("robust", READS_SINGLE_REPLIES, chosen)
        method = Robust(method, robust)
    if not local.plain:
        _check("local", name)
        _check_tables("local", NEEDS_PLAIN_STEPS, chosen)
        if local.schedule != "constant" and compression.kind == "topk":
            raise PlanError(
                f"[local] schedule = {local.schedule!r} does not go with [compression] kind = "
                "'topk': a site sends later what it left out of earlier, longer steps, and how far "
                "a reply may go follows the round's own; use another kind, or a constant schedule"
            )
        local.check_moves("local", rounds * method.steps())
        method = Stepped(method, local, rounds)
    if local.head:
        check_goes(name, {**chosen, "average": server.average != "none"})
        method = Headed(method, local.head)
    if chosen["fairness"]:
        _check("fairness", name)
        method = FairMethod(method, fairness)
    if server.optimiser != "none":
        _check("server", name)
        server.check_moves("server", rounds)
        method = ServerOptimised(method, server, rounds)
    if chosen["control"]:
        _check("control", name)
        method = Controlled(method, control)
    if compression.kind == "grid":
        # Outermost, as is the other: what leaves a site, whatever made it. A masked reply has words
        # of its own.
        method = Gridded(method, up=not secure.threshold)
    elif chosen["compression"]:
        method = Compressed(method, compression)
    if secure.threshold:
        _check_tables("secure_aggregation", NEEDS_SINGLE_REPLIES, chosen)
        _check("secure_aggregation", method.name)
        check_summed(method)
    if server.average != "none":
        method = Averaged(method, server, rounds)
    if columns:
        # Outside of all: its round is before the first one, and no algorithm's.
        _check_columns(method, compression.kind, secure)
        method = Released(method, columns, privacy.least_noise_of)
    return method


def _check_columns(method: Method, kind: str, secure: SecureSettings) -> None:
    """Raise PlanError where columns cannot be scaled by what is released. kind: of compression."""
    if kind == "grid":
        raise PlanError(
            'compression.kind = "grid" does not go with records.columns of scale = "released": it '
            "tells whole numbers of the gradients' noise, and what scales columns has another; "
            "take another kind, or declare mean and deviation"
        )
    if secure.threshold and method.facts.summed != Summed():
        raise PlanError(
            f'[secure_aggregation] with records.columns of scale = "released" does not go with '
            f"algorithm = {method.name!r}: {RELEASED_NEEDS_SIZES}; declare mean and deviation, or "
            "choose another algorithm"
        )


def _check_tables(table: str, reasons: Mapping[str, str], chosen: Mapping[str, bool]) -> None:
    for other, reason in reasons.items():
        if chosen[other]:
            raise PlanError(
                f"[{table}] does not go with [{other}]: {reason}; leave one of them out"
            )


def _check(table: str, algorithm: str) -> None:
    reason = REFUSED[table].get(algorithm)
    if reason:
        raise PlanError(
            f"[{table}] does not go with algorithm = {algorithm!r}: {reason}; leave the table out "
            f"(--set '{table}={{}}'), with an η of the algorithm's own, or choose another algorithm"
        )


def check_mode(method: Method, algorithm: str, mode: str) -> None:
    """Raise ValueError for a method that a private run cannot have. mode: privacy.mode."""
    if mode == "none":
        return
    if method.facts.plain_only:
        raise ValueError(
            f"algorithm = {algorithm!r} has no private form: {method.facts.plain_only}"
        )
    if method.facts.weighs_records and not mechanism_of(mode).summed:
        raise ValueError(
            f"algorithm = {algorithm!r} with these settings weights each record in its own clip, "
            f"and under privacy.mode = {mode!r} records have none: use privacy.mode = 'per_sample'"
        )


def check_part(each: int | None, method: Method, threshold: int) -> None:
    """Raise ValueError where no part of the sites can be asked in a round.

    each: how many are, None for all of them. threshold: of secure aggregation, 0 for none.
    """
    if each is None:
        return
    whose, why = f"algorithm = {method.name!r} with these tables", method.facts.needs_all_sites
    if threshold:
        whose, why = "[secure_aggregation]", NEEDS_THE_LIST
    if why:
        raise ValueError(f"sites_per_round does not go with {whose}: {why}; leave it out")
