"""MR-MTL, mean-regularised multi-task learning. Liu, Hu, Wu, Smith. On privacy and personalization
in cross-silo federated learning. arXiv 2206.07902.

Symbols   paper  code           meaning, unit or range                              who chooses it
          η      learning_rate  step size, > 0                                      plan
          τ      local_steps    local iterations of a round, >= 1                   plan
          λ      proximal       how strongly w_i is held to the mean, >= 0          plan
          κ      proximal_noise how much more so a site with more noise, >= 0       plan
          β      average_decay  of the average of a site's own models, in [0, 1)    plan
          λ_i                   λ + κ v_i, v_i the variance of its gradient's noise
          w_k    memory "w"     w_i, the site's own model after its steps [d]       released
          w̄      "w"            Σ p_i w_i, the sites' mean [d]                      released
          b_i                   1 / (1 + ητλ_i), what is left of w_i - w̄ in a round
Client    w_i ← w̄ + b_i (w_i - w̄), from w_i = w̄ in its first round
          τ times: w_i ← w_i - η g(w_i), g on a Poisson batch of its own
          upload u_i = w̄ - η Σ g: as far from w̄ as w_i went in this round
          Its own model is w̄ + b_i (w_i - w̄), with the newest w̄ that it knows; where β > 0, the
          exponential average of those of all its rounds, which steps do not see
Server    w̄ ← Σ p_i u_i, which at κ = 0 is Σ p_i w_i, as Σ p_i (w_i - w̄) was 0 before
Bounds    u_i - w̄ = -η Σ g, whatever w_i is: fedavg's
Releases  τ gradient sums: τ events. w_i follows from them and costs nothing further
Neutral   λ = ∞ gives fedavg: from 1e300 on, as b_i is then 0, bit for bit; with privacy κ = ∞ too
          λ = κ = 0 is each site by itself, bit for bit: the baseline "local with privacy"
          Both without compression: it rounds what crosses the wire, on grids of its own
Differs   the paper's step has -ηλ (w_i - w̄) in it, with the w̄ of the round before. Here each round
          ends with the proximal step of length ητ on (λ/2) Σ p_i ‖w_i - w̄‖², over all w_i together:
          it leaves their mean where it is and shortens every w_i - w̄ to b of itself. It is stable
          for every λ, and the fixed point at τ = 1 is the same: the optimum of Σ p_i (F_i(w_i) +
          λ/2 ‖w_i - w̄‖²) over all w_i.
          κ is ours: the paper's sites have one λ. Where λ_i differ, the fixed point is the optimum
          of Σ p_i (F_i(w_i) + λ_i/2 ‖w_i - w̄‖²) over all w_i and w̄, as Σ p_i ∇F_i(w_i) is 0 there;
          w̄ is then Σ p_i λ_i w_i / Σ p_i λ_i.
          Every site takes part, with weights p_i; the paper's are even.
          The sites that reply are the federation. Where one stops, or comes back with an old w_i,
          Σ p_i (w_i - w̄) is not 0; what it is shrinks by b a round, as each of them does.

The noise of w_i is its own, of some 1/(ητλ_i) rounds, and little of the others': that of w̄ is the
mean's. So small ε asks for larger λ, unlike sites for smaller. What stays of it in a coordinate of
w_i - w̄, where the loss is flat, has a variance of about η v_i / (2 λ_i). Under one λ a site with a
tenth of the records keeps a hundred times as much; λ_i = κ v_i leaves the same to all, η / (2 κ),
whatever their sizes, their ε and the number of rounds are. v_i is public (Terms.noise_variance).
An own model is made of released numbers, and as private as w̄; it is evaluated at its own site, w̄
on the public test set.
"""

from typing import Final

from pydantic import Field
from torch import Tensor

from fedpact.algorithms import MethodFacts, Neutral, fedavg
from fedpact.algorithms.common.steps import round_steps
from fedpact.common.messages import Local, State, Task
from fedpact.privacy.oracle import Oracle

_NOISE: Final = "noise"
"""What a site's memory calls v_i of the round that its w_i is of; there where κ is not 0."""

_AVERAGE: Final = "average"
_COUNT: Final = "averaged"
"""What it calls the average of the own models before w_i, and their number; there where β > 0."""

NEUTRAL: Neutral | None = Neutral(parent="fedavg", settings={"proximal": 1e300})


class Settings(fedavg.Settings):
    """Symbols at the top."""

    proximal: float = Field(default=0.01, ge=0)
    proximal_noise: float = Field(default=0.0, ge=0)
    average_decay: float = Field(default=0.0, ge=0, lt=1)

    def own_model(self, w: Tensor, memory: State) -> Tensor | None:
        """Return a site's own model [d], where each trains one; None where w is everybody's."""
        held = _held(w, memory, self, self.local_steps)
        return _averaged(held, memory, self)[0] if _averages(memory, self) else held


def facts(settings: Settings) -> MethodFacts:
    # A site remembers its w_i, so noise is its own even where τ = 1.
    return MethodFacts(
        needs_all_sites="it holds each site's model to the mean of all of them, and those of the "
        "sites that were not asked would be missing in it",
        sums_releases=True,
        excludes={
            "fairness": "a site's loss would be that of a model which nobody uses: its own is "
            "not sent",
            "control": "its estimates compare the sites' gradients at one model, and here each "
            "site's are at its own",
            "local": "its sites' models are held to their mean by the length of plain steps",
            "server": "the sites' own models are held to their mean, which an optimiser's model "
            "is not",
            "local.head": "each of its sites has a whole model of its own already",
        },
    )


def local(task: Task, oracle: Oracle, memory: State, settings: Settings) -> Local:
    steps, rate = round_steps(task, settings.local_steps), settings.learning_rate
    held = _held(task.vectors["w"], memory, settings, steps)
    # Two sums of the same steps: at b = 0 both are fedavg's, to the last bit.
    sent, own = task.vectors["w"].clone(), held.clone()
    for batch in oracle.batches(steps, "gradient"):
        step = batch.gradient(own)
        own.add_(step, alpha=-rate)
        sent.add_(step, alpha=-rate)
    kept, numbers = {"w": own}, dict[str, float]()
    if settings.proximal_noise:
        numbers[_NOISE] = oracle.noise_variance
    if _averages(memory, settings):
        kept[_AVERAGE], numbers[_COUNT] = _averaged(held, memory, settings)
    return Local({"w": sent}, memory=State(kept, numbers))


def _averages(memory: State, settings: Settings) -> bool:
    """Whether there is an own model to average: not before a site's first round."""
    return settings.average_decay > 0 and "w" in memory.vectors


def _averaged(held: Tensor, memory: State, settings: Settings) -> tuple[Tensor, int]:
    """Return the average of the own models up to `held`, and of how many it is.

    That of the server's models in algorithms.wrappers.server_optimizer, of a site's own.
    """
    count, beta = int(memory.numbers.get(_COUNT, 0)) + 1, settings.average_decay
    before = memory.vectors.get(_AVERAGE, held)
    return before.lerp(held, (1 - beta) / (1 - beta**count)), count


def _held(mean: Tensor, memory: State, settings: Settings, steps: int) -> Tensor:
    """Return w̄ + b_i (w_i - w̄), after `steps` steps: w̄ itself of a site that has no w_i yet."""
    own = memory.vectors.get("w")
    if own is None:
        return mean
    weight = settings.proximal + settings.proximal_noise * memory.numbers.get(_NOISE, 0.0)
    held = mean.lerp(own, 1 / (1 + settings.learning_rate * steps * weight))
    # One mean that is out of all range must not stay in a site's own model for good.
    return held if bool(held.isfinite().all()) else mean
