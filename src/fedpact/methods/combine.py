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
}
"""Table of a plan -> algorithm -> why the two do not go together."""


def combined(
    name: str,
    settings: BaseSettings,
    fairness: FairnessSettings,
    control: ControlSettings,
    server: ServerSettings,
    compression: CompressionSettings,
    robust: RobustSettings,
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
    return method


def _check(table: str, algorithm: str) -> None:
    reason = REFUSED[table].get(algorithm)
    if reason:
        raise PlanError(
            f"[{table}] does not go with algorithm = {algorithm!r}: {reason}; leave the table out, "
            "or choose another algorithm"
        )
