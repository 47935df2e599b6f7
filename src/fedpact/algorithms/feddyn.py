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
Neutral   none: α divides. α → 0 makes steps without end, as h_i/α stays the gradients' size
Differs   τ steps, where the paper solves the local problem: h_i approaches ∇F_i over rounds.
          h is not kept: u_i carries each site's share of it, in the d numbers of w_i. So the sites
          that reply are the federation: one that stops takes its h_i along, and one that returns,
          or whose reply was lost, goes on with the h_i of its last reply that was included. The
          paper's h keeps those of sites that were not asked; here all are asked, and
          sites_per_round is refused.
          Weights p_i, and with them the optimum of Σ p_i F_i; the paper's are even.

Choose α near 1/(τη), and η <= 1/(β + α) for β-smooth loss. In the end a gradient moves w by 1/α,
over some 1/(ατη) rounds, where fedavg moves it by τη at once. So does noise: α far below 1/(τη)
magnifies it by 1/(ατη), and shows only in the accuracy. h_i's own noise settles at v_i αη/(2 - αη)
a coordinate, v_i the gradients', and does not grow.
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
    """Sites count by their "size", N_i / Σ N, or alike ("uniform")."""


def facts(settings: Settings) -> MethodFacts:
    return MethodFacts(
        summed=Summed() if settings.aggregation == "size" else EVEN_IS_NOT_SUMMED,
        needs_all_sites="each reply carries its site's share of h, so a round of some sites would "
        "leave out the others' h_i; with the paper's h, the server would need what each of them "
        "has sent",
        excludes={
            "fairness": "it sends its model less h_i/α, at which a loss would mean nothing",
            "local": "its h_i adds up what plain steps moved, as a gradient where they end",
            "server": "FedDyn's next model is the sites' mean less the server's h, no step from "
            "w: an optimiser would integrate the sites' drift a second time",
            "local.head": "its h adds up all of w, and of a head nothing is sent",
            "privacy.clip_schedule": "its h_i adds up gradients of earlier rounds, and how far a "
            "reply may go follows one clip of them all",
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
