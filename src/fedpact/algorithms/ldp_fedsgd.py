"""LDP FedSGD. Kim, Günlü, Schaefer. Federated learning with local differential privacy: trade-offs
between privacy, utility, and communication. arXiv 2102.04737.

Symbols   paper    code           meaning, unit or range                       who chooses it
          η_t      learning_rate  η_1 > 0: constant, or η_1/t under "inverse"  plan
          G/(Cλ)   learning_rate  the paper's η_1 for λ-strongly convex loss   plan
          |J_k|    batch_size     expected batch size q_k N_k                  the sites
          C²σ_k²   noise_variance of site k's gradient, a coordinate           the sites
          κ d      bias_penalty   squared length > 0, see privacy.accounting.planner   plan
Client    g_k = clip(mean gradient at w over one Poisson batch, C) + N(0, C²σ_k² I)
Server    w ← w - η_t Σ ω_k g_k
          ω_k = J_k/J                           aggregation "batch_size", the paper's
          ω_k = (κ J_k/J + ν)/(v_k + κ)         aggregation "least_noise", Σ ω_k = 1
Releases  one gradient a round: one event. The paper's is privacy.mode = "batch_clipped", with
          sensitivity 2C; per-sample clipping works as well
          |J_k| and C²σ_k² follow from the site's terms
Neutral   a constant step gives fedavg with τ = 1 for equal q_k, up to rounding: fedavg averages
          w - η g_k
Differs   σ_k comes from PLD or RDP, never from the paper's bounds, which are unsound.
          |J_k| is the batch's expected size, as the true one is private. If the q_k differ, the
          objective is therefore Σ q_k N_k F_k instead of Σ N_k F_k, as in the paper.
          "least_noise" is ours. It gives sites with less noise more weight: use it if the sites'
          budgets differ more than their data.

bias_penalty is D = Σ ‖g_k - ḡ‖² <= K C² of K sites for one round. Noise averages out over T rounds,
a bias does not: for the mean of T steps use T D. With equal v_k, "least_noise" makes the weights
more equal, as equal weights have the least noise. J_k and v_k are public, from a site's terms.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Literal

from pydantic import Field
from torch import Tensor

from fedpact.algorithms import BaseSettings, MethodFacts, Neutral, Summed
from fedpact.algorithms.common.steps import weighted_mean
from fedpact.common.check import non_negative, positive
from fedpact.common.messages import Local, Reply, State, Task
from fedpact.privacy.accounting.planner import least_noise, multiplier
from fedpact.privacy.oracle import Oracle, Range, Terms, nearly

NEUTRAL: Neutral | None = Neutral(
    parent="fedavg",
    settings={"step_schedule": "constant"},
    parent_settings={"local_steps": 1},
    tolerance=1e-12,
)


class Settings(BaseSettings):
    """Symbols at the top."""

    learning_rate: float = Field(default=1.0, gt=0)
    """η_1, of every round or of the first."""
    step_schedule: Literal["inverse", "constant"] = "inverse"
    """"constant", or "inverse", η_1/t in round t."""
    aggregation: Literal["batch_size", "least_noise"] = "batch_size"
    """Weights of sites: the expected "batch_size", or those with the "least_noise"."""
    bias_penalty: float = Field(default=1.0, gt=0)
    """The weight of bias in least_noise: the squared length κ d, see privacy.accounting.planner."""


def facts(settings: Settings) -> MethodFacts:
    # J_k and v_k are public.
    by_size = Summed("batch_size", ("batch_size", "noise_variance"))
    two_sums = "aggregation = 'least_noise' needs two sums with different weights"
    return MethodFacts(
        summed=by_size if settings.aggregation == "batch_size" else Summed(why_not=two_sums),
        needs_all_sites="",
        needs_own_noise="",
        sums_releases=True,
        excludes={
            "fairness": "it sends a gradient, not a model at which the site could release its loss",
            "control": "it makes one step a round, so there is no τ to choose",
            "robust": "it weights releases by their noise, and robust aggregates have no weights",
            "local": "its step is the server's: [server] has momentum and schedules",
            "local.head": "it sends a gradient and no model, so there is no head to keep",
        },
    )


def steps(settings: Settings, state: State | None = None) -> int:
    return 1


def init(w: Tensor, settings: Settings) -> State:
    return State({"w": w}, {"round": 0})


def task(state: State, settings: Settings) -> State:
    return State({"w": state.vectors["w"]})


def public_numbers(task: Task, terms: Terms, settings: Settings) -> dict[str, Range]:
    public = {"batch_size": terms.batch_size, "noise_variance": terms.noise_variance}
    return {name: nearly(value) for name, value in public.items()}


def local(task: Task, oracle: Oracle, memory: State, settings: Settings) -> Local:
    gradient = next(oracle.batches(1, "gradient")).gradient(task.vectors["w"])
    told = {"batch_size": oracle.batch_size, "noise_variance": oracle.noise_variance}
    return Local({"gradient": gradient}, told)


def update(state: State, replies: Iterable[Reply], settings: Settings) -> State:
    """Return the server's next state. The state's "noise_variance" is the aggregate's, a
    coordinate."""
    w, number = state.vectors["w"], int(state.numbers["round"]) + 1
    rate = settings.learning_rate / (number if settings.step_schedule == "inverse" else 1)
    sizes, variances, penalty = list[float](), list[float](), settings.bias_penalty / len(w)
    by_size = settings.aggregation == "batch_size"

    def noted() -> Iterator[Reply]:
        for reply in replies:
            sizes.append(positive(batch_size=reply.numbers["batch_size"]))
            variances.append(non_negative(noise_variance=reply.numbers["noise_variance"]))
            yield replace(reply, weight=sizes[-1]) if by_size else _weigh_by_noise(reply, penalty)

    if by_size:
        gradient = weighted_mean(noted(), vectors=("gradient",)).vectors["gradient"]
        weights = [size / math.fsum(sizes) for size in sizes]
    else:
        # Σ ω_k g_k in one pass, though the ω_k are known at its end only: with s_k = 1/(v_k + κ)
        # it is (κ/J) Σ s_k J_k g_k + ν Σ s_k g_k.
        folded = weighted_mean(noted(), vectors=("sized", "even")).vectors
        shares = math.fsum(1 / (v + penalty) for v in variances)
        gradient = folded["sized"].mul_(penalty * shares / math.fsum(sizes))
        gradient.add_(folded["even"], alpha=multiplier(sizes, variances, penalty) * shares)
        weights = least_noise(sizes, variances, penalty)
    noise = math.fsum(a * a * v for a, v in zip(weights, variances, strict=True))
    return State({"w": w.add(gradient, alpha=-rate)}, {"round": number, "noise_variance": noise})


def _weigh_by_noise(reply: Reply, penalty: float) -> Reply:
    gradient, size = reply.vectors["gradient"], reply.numbers["batch_size"]
    share = 1 / (reply.numbers["noise_variance"] + penalty)
    return replace(reply, weight=share, vectors={"sized": gradient * size, "even": gradient})
