"""NbAFL's local training, with noise that is counted. Wei, Li, Ding, Ma, Yang, Farokhi, Jin, Quek,
Poor. Federated learning with differential privacy: algorithms and performance analysis. IEEE TIFS
2020, arXiv 1911.00222.

Symbols   paper  code           meaning, unit or range                        who chooses it
          η      learning_rate  step size, > 0                                plan
          τ      local_steps    local iterations of a round, >= 1             plan
          μ      proximal       weight of the proximal term, >= 0             plan
          C      model_clip     bound on the length of a site's model, > 0    plan
          w̄      "w"            the broadcast model                           server
Client    w_i ← w̄;  τ times: w_i ← w_i - η (g(w_i) + μ (w_i - w̄)), g on a Poisson batch of its own;
          w_i ← w_i / max(1, ‖w_i‖/C)
Server    w ← Σ p_i w_i
Releases  τ gradient sums: τ events
Neutral   C = ∞ gives fedprox, and with μ = 0 fedavg, bit for bit: C from 1e300 on is infinite
Differs   the paper adds noise to the clipped model for a sensitivity of 2C/m, which is wrong
          (docs/notes/errata.md, N1): one record can move a trained model by 2C, for any m. Here the
          noise is in the gradients, so the ledger's ε holds. The server adds no noise, as replies
          are already private.
"""

from dataclasses import replace

from pydantic import Field

from fedpact.algorithms import MethodFacts, Neutral, fedprox
from fedpact.common.messages import Local, State, Task
from fedpact.privacy.oracle import Oracle

NEUTRAL: Neutral | None = Neutral(parent="fedavg", settings={"model_clip": 1e300, "proximal": 0.0})


class Settings(fedprox.Settings):
    """Symbols at the top."""

    model_clip: float = Field(default=20.0, gt=0)


def facts(settings: Settings) -> MethodFacts:
    # A clipped model is not a sum of releases.
    return replace(fedprox.facts(settings), sums_releases=False)


def local(task: Task, oracle: Oracle, memory: State, settings: Settings) -> Local:
    w = fedprox.local(task, oracle, memory, settings).vectors["w"]
    length = float(w.double().square().sum().sqrt())
    return Local({"w": w * (settings.model_clip / length) if length > settings.model_clip else w})
