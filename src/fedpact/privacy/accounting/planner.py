"""Plan σ, rates and rounds: aggregation, full batches, and the search over both.

Site k reports g_k plus noise of variance v_k in each of d coordinates. The target is Σ p_k g_k,
p_k = J_k/J from the expected batch sizes; weights ω with Σ ω_k = 1 miss it by a bias, and

    E‖Σ ω_k (g_k + noise_k) - Σ p_k g_k‖² <= d Σ ω_k² v_k + D Σ (ω_k - p_k)²,   D = Σ ‖g_k - ḡ‖²,

with ḡ any vector, as Σ (ω_k - p_k) ḡ = 0 (Cauchy-Schwarz). With κ = D/d the minimum is at

    ω_k = (κ p_k + ν) / (v_k + κ),   ν = (Σ p_k v_k/(v_k + κ)) / (Σ 1/(v_k + κ)),

where the gradient of Σ ω² v + κ Σ (ω - p)² is the multiplier 2ν of Σ ω = 1. The ω_k are positive.
Large κ gives p, small κ the least noise, ω_k ~ 1/v_k. For each κ no other weights have both less
noise and less bias Σ (ω - p)².

With q = 1, one step per round with learning rate η on the mean gradient and momentum β, each weight
ends with noise of standard deviation (N records at K sites, each with noise σ C / sqrt(h))

    a = η (σ C / N) sqrt(K / h) sqrt(Σ_t g_t²),    g_t = (1 + β + ... + β^(t-1))

over t = 1 .. T (if each site has its own noise, σ² is the mean of theirs), and clipped signals can
have moved it by η C Σ_t g_t. For rows of unit norm a is the noise of the model's output in log
odds, for any data. At a given (ε, δ) σ grows with sqrt(T), so a depends on the total path length
and not on T: more rounds make smaller steps on the same path. The same holds for a run's
signal-to-noise ratio. If noise moves the model as far as all records together, more than a few
rounds gain nothing; otherwise short steps reach points that long ones overshoot. Two constants
describe this, which experiments/recommend/fit.py fits on the digits (1,442 images): a, and the
number of rounds for a signal-to-noise ratio.

At a given (ε, δ), the benefit for training grows with

    snr = sqrt(T) q / σ        (for large σ nearly the Gaussian-DP parameter of the whole run)

T iterations at rate q read q T times the site's data. Fewer iterations on larger batches have a
larger snr, but a run needs iterations. So every round has at least one, and among the plans within
the budgets the one with the largest snr is chosen, or the cheaper one if they are nearly equal.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from fedpact.common import check
from fedpact.privacy.accounting.accountant import Accountant, Budget, History
from fedpact.privacy.accounting.calibration import smallest_sigma


def multiplier(batch_sizes: Sequence[float], variances: Sequence[float], penalty: float) -> float:
    """Return ν. batch_sizes: J_k > 0. variances: v_k >= 0. penalty: κ > 0."""
    shares = [1 / (v + penalty) for v in variances]
    noises = (n * v * a for n, v, a in zip(batch_sizes, variances, shares, strict=True))
    return math.fsum(noises) / (math.fsum(batch_sizes) * math.fsum(shares))


def least_noise(
    batch_sizes: Sequence[float], variances: Sequence[float], penalty: float
) -> list[float]:
    """Return the weights ω_k; see above, and `multiplier` for the arguments.

    >>> [round(w, 3) for w in least_noise([10, 10], [1.0, 3.0], 1e-9)]
    [0.75, 0.25]
    >>> [round(w, 3) for w in least_noise([10, 30], [1.0, 3.0], 1e9)]
    [0.25, 0.75]
    """
    # The stationary point of a strictly convex function: the only one.
    nu, total = multiplier(batch_sizes, variances, penalty), math.fsum(batch_sizes)
    return [
        (penalty * size / total + nu) / (variance + penalty)
        for size, variance in zip(batch_sizes, variances, strict=True)
    ]


NOISE: Final = 1.0
"""a, where the way is as long as noise allows."""
TABLE_NOISE: Final = 0.25
"""a of tables, chosen on records set aside. On a small table a larger one is no more accurate and
has a larger loss, as long steps along clipped gradients make a model overconfident."""
MOST_ROUNDS: Final = 100
"""Beyond, steps are short enough, and messages cost."""

LEAST_ROUNDS: Final = 3
_ROUNDS_OF_SIGNAL: Final = 4.0
_MOMENTUM: Final = 0.8
# With fewer rounds momentum cannot build up.
_MOMENTUM_FROM: Final = 20


@dataclass(frozen=True)
class FullBatch:
    """One way to spend a budget with q = 1 and τ = 1.

    learning_rate: η > 0, for the mean gradient. noise: a, see the module. useful: the useful number
    of rounds.
    """

    rounds: int
    sigma: float
    momentum: float
    learning_rate: float
    noise: float
    useful: int


def useful_rounds(snr: float) -> int:
    """Return the useful number of rounds at q = 1 for a run's signal-to-noise ratio > 0.

    It is four times the ratio, from 3 to 100; see the module and `signal_to_noise`.
    """
    # Fitted to experiments (see the module); irrelevant for privacy.
    return round(min(max(_ROUNDS_OF_SIGNAL * snr, LEAST_ROUNDS), MOST_ROUNDS))


def full_batch(
    sigma: Callable[[int], float],
    records: float,
    shares: float,
    rounds: int,
    *,
    weights: int = 1,
    clip: float = 0.2,
    length: float = 1.0,
    noise: float = NOISE,
) -> FullBatch:
    """Return the number of rounds, at most `rounds`, with suitable σ, β and η.

    sigma: rounds -> the smallest σ with which a site's budget allows this many at q = 1; for sites
    with different budgets the root mean square. records: N > 0, of all sites together. shares:
    K / h >= 1, of K sites, h of which protect a sum by their noise; K if each site's own does.
    weights: d >= 1, of the model. clip: C > 0. length: the norm of a record's row, > 0; the noise
    of an output is the same for any norm. noise: a > 0. Raises the errors of `sigma`.
    """
    snr = signal_to_noise(1.0, sigma(1), 1, records, shares, weights)
    useful = useful_rounds(snr)
    chosen = min(rounds, useful)
    # With fewer rounds than useful, a step of the whole path would overshoot.
    noise = noise / length * math.sqrt(chosen / useful)
    # β changes neither the releases nor their cost.
    momentum = _MOMENTUM if chosen >= _MOMENTUM_FROM else 0.0
    share = (noisy := sigma(chosen)) * clip / records * math.sqrt(shares)
    rate = noise / (share * math.sqrt(sum(g * g for g in _gains(momentum, chosen))))
    return FullBatch(chosen, noisy, momentum, rate, noise, useful)


def _gains(momentum: float, rounds: int) -> list[float]:
    """g_1 .. g_T: the movement by a step after t rounds, relative to its length."""
    found, gain = list[float](), 0.0
    for _ in range(rounds):
        gain = 1 + momentum * gain
        found.append(gain)
    return found


def signal_to_noise(
    rate: float, sigma: float, steps: int, records: float, shares: float, weights: int
) -> float:
    """Return the largest movement by clipped signals over that by noise, for a whole run.

        sqrt(T) q N / (σ sqrt(K / h) sqrt(d))

    rate: q in (0, 1]. sigma: σ > 0 over C. steps: T >= 1. shares: K / h >= 1. weights: d >= 1. It
    is the ratio of the norms of two vectors [d]; below 1 the noise is longer even if all records
    point in one direction.
    """
    return math.sqrt(steps / (shares * weights)) * rate * records / sigma


# Plans whose snr differs by less than this are similar; then the cheaper computation is chosen.
_ALIKE = 0.01
_HALVINGS = 5
_LOCAL_STEPS = (1, 2, 4, 8, 16)
MOST_STEPS = _LOCAL_STEPS[-1]


@dataclass(frozen=True)
class Choice:
    """One way to spend a budget. passes: q T, the number of passes over each site's data."""

    rate: float
    sigma: float
    rounds: int
    local_steps: int

    @property
    def steps(self) -> int:
        """T = τ times the rounds."""
        return self.rounds * self.local_steps

    @property
    def passes(self) -> float:
        """The expected number of passes over the data, q T."""
        return self.rate * self.steps

    @property
    def snr(self) -> float:
        """sqrt(T) q / σ."""
        return math.sqrt(self.steps) * self.rate / self.sigma

    def to_dict(self) -> dict[str, float]:
        """Return it as plain data, its rate and number of iterations by their keys in a plan."""
        return {
            "sampling_rate": self.rate,
            "sigma": self.sigma,
            "rounds": self.rounds,
            "steps": self.steps,
            "local_steps": self.local_steps,
            "passes": self.passes,
            "snr": self.snr,
        }


def choice(
    budget: Budget,
    rate: float,
    rounds: int,
    local_steps: int,
    accountant: Accountant = "best",
    spent: History | None = None,
) -> Choice:
    """Return the choice with the smallest σ at which T = τ rounds iterations fit the budget.

    spent: other events within the budget.
    """
    sigma = smallest_sigma(budget, rate, rounds * local_steps, accountant, spent=spent)
    return Choice(rate, sigma, rounds, local_steps)


def candidates(
    budget: Budget,
    rounds: int,
    passes: float,
    spent: History | None = None,
    most_steps: int = MOST_STEPS,
) -> list[Choice]:
    """Return the plans within the budgets, cheapest first, with σ by RDP: enough to rank them.

    rounds: >= 1, all of them used. passes: the most passes over each site's data, > 0; if one
    record per round exceeds that, rates go down to passes / rounds. spent: see `choice`.
    most_steps: the largest τ, >= 1.
    """
    check.positive(passes=passes)
    found: list[Choice] = []
    for local_steps in (each for each in _LOCAL_STEPS if each <= most_steps):
        most = min(1.0, passes / (rounds * local_steps))
        # Local steps multiply what one round's message is worth, not what a batch is: once the
        # rate has to fall below a hundredth for them, they are no gain by any measure.
        if local_steps > 1 and most < 0.01:
            break
        for halvings in range(_HALVINGS):
            rate = most * 0.5**halvings
            found.append(choice(budget, rate, rounds, local_steps, "rdp", spent))
    return sorted(found, key=lambda c: c.passes)


def best(
    budget: Budget,
    rounds: int,
    passes: float,
    spent: History | None = None,
    most_steps: int = MOST_STEPS,
) -> Choice:
    """Return the candidate with the largest snr, the cheapest of similar ones, with its exact σ."""
    # RDP ranks candidates in microseconds; only the chosen one is priced exactly.
    found = candidates(budget, rounds, passes, spent, most_steps)
    top = max(c.snr for c in found)
    chosen = next(c for c in found if c.snr >= (1 - _ALIKE) * top)
    return choice(budget, chosen.rate, chosen.rounds, chosen.local_steps, spent=spent)
