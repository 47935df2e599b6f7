"""Which algorithm goes with which wrapper: `combined` puts them together, or says why not.

A combination is refused where it would not mean what its parts mean alone; docs/combinations.md
has the table.
"""

from typing import Final

from fedpact.algorithms import BaseSettings
from fedpact.errors import PlanError
from fedpact.methods import Method
from fedpact.methods.compressed import Compressed, CompressionSettings
from fedpact.methods.controlled import Controlled, ControlSettings
from fedpact.methods.fair import FairMethod, FairnessSettings
from fedpact.methods.robust import Robust, RobustSettings
from fedpact.methods.secure import SecureSettings, check_summed
from fedpact.methods.server import ServerOptimised, ServerSettings

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
    },
    "control": {
        "ali_dpfl": "it chooses τ by itself, as fedavg with [control] does",
        "ldp_fedsgd": "it makes one step a round, so there is no τ to choose",
    },
    "robust": {
        "ali_dpfl": "its controller reads single replies, so one lie moves its estimates",
        "ldp_fedsgd": "it weighs releases by their noise, and robust aggregates have no weights",
        "qffl": "its weights follow the losses that sites report, so a lie would choose its own",
    },
    "server": {
        "feddyn": "FedDyn's next model is the sites' mean less the server's h, no step from w: an "
        "optimiser would integrate the sites' drift a second time",
    },
    "secure_aggregation": {
        "ali_dpfl": "its controller takes the least of the sites' remaining steps and squares of "
        "each site's vector, which no sum of vectors gives",
        "qffl": "its weights follow the losses that sites report, and the weights of a masked sum "
        "have to be public",
    },
}
"""Table of a plan -> algorithm -> why the two do not go together."""

NEEDS_SINGLE_REPLIES: Final[dict[str, str]] = {
    "robust": "it compares the sites' vectors with each other",
    "control": "the controller takes the least of the sites' remaining steps and squares of each "
    "site's vector",
    "compression": "each reply has a scale or places of its own, and is opened before it is summed",
}
"""Table of a plan -> why it does not go with [secure_aggregation]."""


def combined(
    name: str,
    settings: BaseSettings,
    fairness: FairnessSettings,
    control: ControlSettings,
    server: ServerSettings,
    compression: CompressionSettings,
    robust: RobustSettings,
    secure: SecureSettings,
) -> Method:
    """Return the algorithm with everything around it. Raises PlanError: they do not go together."""
    method = Method(name, settings)
    if robust.rule != "mean":
        # Innermost: whatever is around it still sees the sites' own replies.
        _check("robust", name)
        method = Robust(method, robust)
    if fairness.weight > 0:
        _check("fairness", name)
        method = FairMethod(method, fairness)
    if server.optimiser != "none":
        _check("server", name)
        method = ServerOptimised(method, server)
    if control.kind != "fixed":
        _check("control", name)
        method = Controlled(method, control)
    if compression.kind != "none":
        # Outermost: what leaves a site, whatever made it.
        method = Compressed(method, compression)
    if secure.threshold:
        chosen = {
            "robust": robust.rule != "mean",
            "control": control.kind != "fixed",
            "compression": compression.kind != "none",
        }
        _check_secure(method, [table for table, is_chosen in chosen.items() if is_chosen])
    return method


def _check_secure(method: Method, tables: list[str]) -> None:
    for table in tables:
        raise PlanError(
            f"[secure_aggregation] does not go with [{table}]: {NEEDS_SINGLE_REPLIES[table]}; "
            "leave one of them out"
        )
    _check("secure_aggregation", method.name)
    check_summed(method)


def _check(table: str, algorithm: str) -> None:
    reason = REFUSED[table].get(algorithm)
    if reason:
        raise PlanError(
            f"[{table}] does not go with algorithm = {algorithm!r}: {reason}; leave the table out, "
            "or choose another algorithm"
        )
