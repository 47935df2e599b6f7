"""FedDyn. Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama. Federated learning based on
dynamic regularization. arXiv 2111.04263.

Symbols   paper  code           meaning, unit or range                        who chooses it
          η      learning_rate  step size, > 0                                plan
          τ      local_steps    local iterations of a round, >= 1             plan
          α      proximal       weight of the proximal term, > 0              plan
          h_i    memory "h"     sum of the site's -α (w_i - w̄): [d]           released
          p_i    aggregation    N_i / Σ N ("size"), or even ("uniform")       plan
Client    w_i ← w̄;  τ times: w_i ← w_i - η (g(w_i) - h_i + α (w_i - w̄)), g on a Poisson batch of its
          own: steps on F_i(w) - ⟨h_i, w⟩ + (α/2)‖w - w̄‖²
          h_i ← h_i - α (w_i - w̄), from h_i = 0
          upload u_i = w_i - h_i/α
Server    w ← Σ p_i u_i, which is Σ p_i w_i - h/α with the paper's h = Σ p_i h_i
Releases  τ gradient sums: τ events. u_i and h_i follow from them and cost nothing further
Neutral   none: α is a divisor, and α → 0 gives unbounded steps, as h_i/α keeps the gradients' size
Differs   τ steps, where the paper solves the local problem: h_i approaches ∇F_i over rounds.
          The server stores no h: u_i includes each site's share of it. So h is over the sites that
          reply. A site that returns, or whose reply was lost, continues with the h_i of its last
          included reply. The paper's h includes sites that were not asked; here all are asked, and
          sites_per_round is refused.
          Weights p_i, and so the optimum of Σ p_i F_i; the paper's are even.

Choose α near 1/(τη), and η <= 1/(β + α) for a β-smooth loss. A gradient finally moves w by 1/α,
over some 1/(ατη) rounds, where fedavg moves it by τη at once. So does noise: α far below 1/(τη)
magnifies it by 1/(ατη), which only the accuracy shows. h_i's noise converges to v_i αη/(2 - αη) a
coordinate, with v_i the gradients'.
"""

from collections.abc import Iterable

import torch
from pydantic import Field

from fedpact.algorithms import EVEN_IS_NOT_SUMMED, MethodFacts, Neutral, Summed, fedprox
from fedpact.algorithms.common.steps import (
    Aggregation,
    proximal_sgd,
    round_steps,
    weigh_replies,
    weighted_mean,
)
from fedpact.common.messages import Local, Reply, State, Task
from fedpact.privacy.oracle import Oracle

NEUTRAL: Neutral | None = None


class Settings(fedprox.Settings):
    """Symbols at the top. η α < 2, as in fedprox; the defaults have α = 1/(τη)."""

    learning_rate: float = Field(default=0.2, gt=0)
    proximal: float = Field(default=1.0, gt=0)
    aggregation: Aggregation = "size"
    """Weights of sites: "size", N_i / Σ N, or "uniform"."""


def facts(settings: Settings) -> MethodFacts:
    return MethodFacts(
        summed=Summed() if settings.aggregation == "size" else EVEN_IS_NOT_SUMMED,
        needs_all_sites="each reply includes its site's share of h, so a round of some sites would "
        "omit the others' h_i",
        excludes={
            "fairness": "it sends its model less h_i/α, at which a loss has no meaning",
            "local": "its h_i sums the movements of plain steps, as gradients where they end",
            "server": "FedDyn's next model is the sites' mean less the server's h, not a step from "
            "w: an optimiser would integrate the sites' drift a second time",
            "local.head": "its h sums all of w, and a head is not sent",
            "privacy.clip_schedule": "its h_i sums gradients of earlier rounds, and the bound on a "
            "reply assumes one clip for all",
        },
    )


def local(task: Task, oracle: Oracle, memory: State, settings: Settings) -> Local:
    steps = round_steps(task, settings.local_steps)
    rate, alpha, centre = settings.learning_rate, settings.proximal, task.vectors["w"]
    h = memory.vectors.get("h", torch.zeros_like(centre))
    w = proximal_sgd(oracle, centre, steps, rate, alpha, linear=h)
    h = torch.sub(h, w - centre, alpha=alpha)
    return Local({"w": torch.sub(w, h, alpha=1 / alpha)}, memory=State({"h": h}))


def update(state: State, replies: Iterable[Reply], settings: Settings) -> State:
    return weighted_mean(weigh_replies(replies, settings.aggregation))
