"""Old and exact composition side by side, and the table of trade-offs they give.

They drop O(·) terms and are unsound even inside their own conditions: at q = 1e-3, δ = 1e-4, ε = 2,
T = 1e5 "proposed" gives σ = 1.183, whose true ε is 5.5, and MA 1.43 (2.9). No guarantee and no
calibration of a run rests on them. `exact_noise` is the sound answer to the same question.

Per client: T rounds, a batch-mean gradient clipped to C with sensitivity 2C, Poisson rate q, noise
of variance C²σ² a coordinate: a sampled Gaussian of noise multiplier σ/2. With pre = 4q²/(1-q),

    proposed  σ² = pre T [ (2/ε²) ln(1/δ) + 1/ε - (2/ε²)(ln(2 ln(1/δ)) + 1 - ln ε) ]
    MA        σ² = pre T [ (2/ε²) ln(1/δ) + 1/ε ]        moments accountant, Abadi et al. 2016
    AC1       σ² = pre 2 ln(1.25/δ0)/ε0²                 Dwork, Roth 2014, Theorems 3.20 and 3.22,
              ε = sqrt(2T ln(1/δ~)) ε0 + T ε0 (e^ε0 - 1),  δ = T δ0 + δ~
    AC2       σ² = pre 8T ln(e + ε/δ)/ε²                 Kairouz, Oh, Viswanath 2015

The factor q²/(1-q) in AC1 and AC2 is the paper's, unproven.

d coordinates, clip C, gradients bounded by G, loss μ-smooth and λ-strongly convex, step
η_t = G/(Cλt), T rounds; client k has N_k records, rate q_k and noise of variance C²σ_k² a
coordinate on its clipped batch mean. Rates are in nats a client and round.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, cast, get_args

import numpy as np
from rich.console import Console

from fedpact.common import check
from fedpact.common.errors import InputError
from fedpact.common.files import check_file
from fedpact.common.format import upper
from fedpact.common.notebook import TextTable
from fedpact.common.records import strict
from fedpact.privacy.accounting import gaussian
from fedpact.privacy.accounting.accountant import Accountant, Budget, SampledGaussian
from fedpact.privacy.accounting.accountant import epsilon as epsilon_of
from fedpact.privacy.accounting.calibration import smallest_sigma

OldBound = Literal["proposed", "MA", "AC1", "AC2"]
OLD_BOUNDS: Final[tuple[OldBound, ...]] = get_args(OldBound)

AC1_SLACK: Final = 1e-5  # the paper's δ~
LogFunction = Callable[[float], float]


def unconditional_noise(
    bound: OldBound, budget: Budget, q: float, steps: int, log: LogFunction = math.log
) -> float:
    """Return the paper's σ, noise over C a coordinate, by one of its four bounds. No guarantee.

    It is what the formula gives, whether its conditions (`violations`) hold or not. q: in (0, 1).
    log: the logarithm of "proposed", MA and AC1's last step (the paper's printed numbers come of
    base 10). Raises InputError where it gives no positive variance.
    """
    pre = 4 * q**2 / (1 - q)
    epsilon, delta = budget.epsilon, budget.delta
    moments = 2 / epsilon**2 * log(1 / delta) + 1 / epsilon
    if bound == "proposed":
        saved = 2 / epsilon**2 * (log(2 * log(1 / delta)) + 1 - log(epsilon))
        variance = pre * steps * (moments - saved)
    elif bound == "MA":
        variance = pre * steps * moments
    elif bound == "AC1":
        each = _advanced_composition(budget, steps)
        variance = pre * 2 * log(1.25 / each.delta) / each.epsilon**2
    else:
        variance = pre * 8 * steps * math.log(math.e + epsilon / delta) / epsilon**2
    if not variance > 0:
        raise InputError(
            f"bound is {bound!r}: at (ε = {epsilon:g}, δ = {delta:g}) its bracket is "
            f"{variance / (pre * steps):.4g}, not positive, so it gives no noise; "
            "expected a smaller δ, a larger ε, or another bound"
        )
    return math.sqrt(variance)


def _advanced_composition(budget: Budget, steps: int) -> Budget:
    """Return the (ε0, δ0) of each of T mechanisms whose composition is the budget."""
    left = budget.delta - AC1_SLACK
    if not left > 0:
        raise InputError(
            f"δ is {budget.delta!r}: AC1 spends δ~ = {AC1_SLACK:g} of it on composition; "
            "expected a larger δ"
        )
    slope = math.sqrt(2 * steps * math.log(1 / AC1_SLACK))

    def excess(epsilon: float) -> float:
        return slope * epsilon + steps * epsilon * math.expm1(epsilon) - budget.epsilon

    # Without its second term the equation's root is larger.
    top = min(budget.epsilon / slope, 600.0)
    return Budget(gaussian.root(excess, 0.0, top, 1e-15), left / steps)


def violations(sigma: float, budget: Budget, q: float) -> list[str]:
    """Return which of the moments bound's conditions fail at σ, each with its numbers.

    q < 1/(16σ), σ >= 1 and ε > 2 ln(1/δ) max(δ, 1/(σ² ln(1/(qσ)))).
    """
    failed: list[str] = []
    if not q < 1 / (16 * sigma):
        failed.append(f"q < 1/(16σ) fails, {q:g} against {1 / (16 * sigma):.4g}")
    if not sigma >= 1:
        failed.append(f"σ >= 1 fails, σ = {sigma:.4g}")
    spread = sigma**2 * -math.log(q * sigma)
    least = 2 * -math.log(budget.delta) * max(budget.delta, 1 / spread if spread > 0 else math.inf)
    if not budget.epsilon > least:
        failed.append(
            f"ε > 2 ln(1/δ) max(δ, 1/(σ² ln(1/(qσ)))) fails, {budget.epsilon:g} against {least:.4g}"
        )
    return failed


def exact_noise(budget: Budget, q: float, steps: int, accountant: Accountant = "best") -> float:
    """Return the smallest σ, noise over C a coordinate, that keeps the budget; twice a multiplier.

    Sensitivity 2C: adding or removing one record can turn the clipped batch mean round.
    """
    return 2 * smallest_sigma(budget, q, steps, accountant)


@dataclass(frozen=True)
class Problem:
    """The numbers of the paper's example."""

    dimension: int = 10_000
    clients: int = 100
    gradient_bound: float = 5.0
    clip: float = 1.0
    smoothness: float = 1.0
    convexity: float = 1.0
    q: float = 1e-3
    delta: float = 1e-4


def utility_bound(problem: Problem, variance: float, steps: int) -> float:
    """Return U(T) = λ²T/(μG²) · min(1/2, 1/(1 + dσ²)), a lower bound on 1/(E loss - optimum).

    variance: σ² of the aggregate, a coordinate, in units of C².
    """
    scale = problem.convexity**2 * steps / (problem.smoothness * problem.gradient_bound**2)
    return scale * min(0.5, 1 / (1 + problem.dimension * variance))


def entropy_bound(dimension: int, moment: float, variance: float) -> float:
    """Return (d/2) ln(2πe (m/d + v)), the most entropy X + N(0, v I_d) can have, in nats.

    m = `moment` >= E‖X‖², v = `variance` >= 0, not both 0. Of all laws with that second moment the
    Gaussian has the most differential entropy (Cover and Thomas, Theorem 8.6.5, and Jensen).
    """
    return dimension / 2 * math.log(2 * math.pi * math.e * (moment / dimension + variance))


def rate_bound(dimension: int, sigma: float, clip: float) -> float:
    """Return (d/2) ln(2πe C² (σ² + 1/d)), the most entropy one release can have, in nats.

    `entropy_bound` of a vector of at most C with noise of σC. Differential entropy: with a
    quantisation step s see `bits_on_the_wire`.
    """
    return entropy_bound(dimension, clip**2, (sigma * clip) ** 2)


def paper_rate(dimension: int, sigma: float, clip: float) -> float:
    """Return the paper's (12), d ln(2πe C² σ/sqrt(d)), for comparison. Not a bound.

    It rests on h(X + Y) <= h(X) + h(Y), which differential entropy does not satisfy, and can lie
    below the entropy of the noise alone.
    """
    return dimension * math.log(2 * math.pi * math.e * clip**2 * sigma / math.sqrt(dimension))


def bits_on_the_wire(rate: float, dimension: int, step: float) -> float:
    """Return (R - d ln s)/ln 2, the bits of a release of rate R (nats) quantised with step s."""
    return (rate - dimension * math.log(step)) / math.log(2)


@dataclass(frozen=True)
class Point:
    """One curve at one ε. notes: which of the bound's own conditions fail, or why it has no σ.

    proven: the ε that exact accounting proves for this σ; None where there is no σ.
    """

    curve: str
    epsilon: float
    steps: int
    sigma: float | None
    utility: float | None
    rate: float | None
    notes: tuple[str, ...] = ()
    proven: float | None = None

    @property
    def unsound(self) -> bool:
        """Whether the σ does not keep the ε that the curve claims for it.

        Exact accounting is within 2 % of the truth, so what it proves beyond that is not proof's.
        """
        return self.proven is not None and self.proven > 1.02 * self.epsilon


# How the paper's printed example comes out of its formulas: T/10 in the noise, T in the utility,
# base-10 logarithms except in AC2. AC1's convention is unknown: this one gives 0.24 for its 0.22.
_PAPER_DIVISOR: Final = 10


def find_point(
    problem: Problem, curve: OldBound | Accountant, epsilon: float, steps: int, paper: bool = False
) -> Point:
    """Return a bound's σ, with what follows from it; paper: by the printed conventions.

    Of an accountant: the smallest σ with a proof. Of an older bound, notes name the conditions of
    its own that σ fails; where the formula gives none, sigma is None. All clients are alike: the
    aggregate's variance is σ²/K.
    """
    budget, q, notes = Budget(epsilon, problem.delta), problem.q, list[str]()
    if curve in OLD_BOUNDS:
        inside = max(1, steps // _PAPER_DIVISOR) if paper else steps
        log = math.log10 if paper else math.log
        try:
            sigma = unconditional_noise(cast(OldBound, curve), budget, q, inside, log)
        except InputError as error:
            return Point(curve, epsilon, steps, None, None, None, (str(error),))
        notes = violations(sigma, budget, q)
    else:
        sigma = exact_noise(budget, q, steps, cast(Accountant, curve))
    utility = utility_bound(problem, sigma**2 / problem.clients, steps)
    rate = rate_bound(problem.dimension, sigma, problem.clip)
    # Sensitivity 2C, as `exact_noise` has it.
    proven = epsilon_of({SampledGaussian(q, sigma / 2): steps}, problem.delta, "pld")
    return Point(curve, epsilon, steps, sigma, utility, rate, tuple(notes), proven)


STEP_COUNTS = (70_000, 700_000)
EPSILONS = (0.3, 0.5, 1.0, 2.0, 4.0)
EXACT_ACCOUNTANTS: tuple[Accountant, ...] = ("rdp", "pld")
STYLES = {"rdp": ("k", "s-."), "pld": ("k", "o-")}
LABELS = {"rdp": "RDP, proven", "pld": "PLD, proven"}
GUARANTEE = (
    "RDP and PLD: proven (ε, δ)-differential privacy for each client, add/remove one record, over "
    "all T releases. proposed, MA, AC1, AC2: comparison only, no guarantee, even where their own "
    "conditions hold; UNSOUND where what is proven for their σ is more than the ε they claim"
)
PAPER = (
    "preset paper: the older bounds with T/10 in the noise and base-10 logarithms (AC2 natural), "
    "as the printed numbers come out; AC1 gives 0.24 where the paper prints 0.22"
)


def tradeoffs(
    preset: str | None,
    q: float | None,
    delta: float | None,
    steps: Sequence[int],
    epsilons: Sequence[float],
    out: Path | None,
    as_json: bool,
) -> None:
    """Carry out `fedpact tradeoffs`, with the paper's numbers where none are given.

    Raises InputError: a number out of range, another suffix, or a file out of reach.
    """
    if preset not in (None, "paper"):
        raise InputError(f"--preset is {preset!r}: expected paper, or no preset")
    if preset and (q is not None or delta is not None or steps):
        raise InputError(
            "--preset paper has the printed q, δ and T: leave --q, --delta and --steps out, or "
            "the preset"
        )
    usual, paper = Problem(), preset == "paper"
    # The bounds divide by 1 - q.
    q = check.fraction(q=usual.q if q is None else q)
    problem = replace(
        usual, q=q, delta=check.fraction(delta=usual.delta if delta is None else delta)
    )
    steps = sorted({check.count(steps=number) for number in steps or STEP_COUNTS})
    epsilons = sorted({check.positive(epsilon=epsilon) for epsilon in epsilons or EPSILONS})
    if out is not None:
        check_file("--out", out, ".png", ".svg")
    console, points = Console(stderr=True), list[Point]()
    for number in steps:
        console.print(f"T = {number:,}: calibrating σ by exact accounting", highlight=False)
        points += [
            find_point(problem, curve, epsilon, number, paper)
            for epsilon in epsilons
            for curve in (*OLD_BOUNDS, *EXACT_ACCOUNTANTS)
        ]
    if out is not None:
        _draw(problem, points, out)
    if as_json:
        print(json.dumps(strict(_document(problem, paper, points)), indent=2, allow_nan=False))
    else:
        _show(problem, paper, points)


def _document(problem: Problem, paper: bool, points: list[Point]) -> dict[str, Any]:
    return {
        "problem": asdict(problem),
        "preset": "paper" if paper else None,
        "guarantee": GUARANTEE,
        "units": {"sigma": "noise over C a coordinate", "rate": "nats a client and round"},
        "points": [{**asdict(point), "unsound": point.unsound} for point in points],
    }


def _show(problem: Problem, paper: bool, points: list[Point]) -> None:
    console = Console()
    for steps in dict.fromkeys(point.steps for point in points):
        title = f"T = {steps:,}, δ = {problem.delta:g}, q = {problem.q:g}; rate in nats a round"
        columns = ("bound", "σ", "ε, proven", "", "utility", "rate", "own conditions")
        rows = [_cells(point) for point in points if point.steps == steps]
        TextTable(columns, rows, first="ε").print(console, title)
    console.print(GUARANTEE + ".")
    if paper:
        console.print(PAPER + ".")


def _cells(point: Point) -> tuple[str, ...]:
    numbers = ("none", "", "", "", "")
    if point.sigma is not None and point.proven is not None:
        mark = "UNSOUND" if point.unsound else ""
        numbers = (f"{point.sigma:.4g}", upper(point.proven), mark)
        numbers += (f"{point.utility:.4g}", f"{point.rate:,.0f}")
    state = "proven" if point.curve in EXACT_ACCOUNTANTS else "violated" if point.notes else "hold"
    return f"{point.epsilon:g}", LABELS.get(point.curve, point.curve), *numbers, state


_QUANTITIES: list[tuple[str, Callable[[Point], float | None]]] = [
    ("noise σ²", lambda p: None if p.sigma is None else p.sigma**2),
    ("utility bound U(T)", lambda p: p.utility),
    ("rate bound, nats a round", lambda p: p.rate),
]


def _draw(problem: Problem, points: list[Point], out: Path) -> None:
    """Draw σ², utility and rate against ε for every T: the paper's Figure 1, with exact curves.

    Dotted where a bound is unsound, or its own conditions fail. Raises InputError.
    """
    from matplotlib.figure import Figure

    from fedpact.report.drawing import save_figure

    counts = list(dict.fromkeys(point.steps for point in points))
    epsilons = list(dict.fromkeys(point.epsilon for point in points))
    figure = Figure(figsize=(1 + 4.5 * len(counts), 10), layout="constrained")
    axes: Any = figure.subplots(3, len(counts), sharex=True, squeeze=False)
    for column, steps in zip(axes.T, counts, strict=True):
        for axis, (title, value) in zip(column, _QUANTITIES, strict=True):
            for number, name in enumerate((*OLD_BOUNDS, *EXACT_ACCOUNTANTS)):
                curve = [p for p in points if (p.curve, p.steps) == (name, steps)]
                every = [np.nan if (v := value(p)) is None else v for p in curve]
                colour, style = STYLES.get(name, (f"C{number}", ".-"))
                sound = [
                    np.nan if p.notes or p.unsound else y for p, y in zip(curve, every, strict=True)
                ]
                axis.plot(epsilons, every, ".:", ms=4, lw=1, color=colour)
                label = LABELS.get(name, name)
                axis.plot(epsilons, sound, style, ms=4, color=colour, label=label)
            axis.set(xscale="log", yscale="log", ylabel=title)
            axis.grid(alpha=0.3)
        column[0].set_title(f"T = {steps:,}")
        column[2].set(yscale="linear", xlabel="ε")
        column[2].set_xticks(epsilons, [f"{e:g}" for e in epsilons])
        column[2].minorticks_off()
    axes[0][0].legend(fontsize="small")
    figure.suptitle(
        f"record-level (ε, δ = {problem.delta:g}), add/remove one record; q = {problem.q:g}, "
        f"d = {problem.dimension:,}, K = {problem.clients}\n"
        "dotted: unsound, or outside the bound's own conditions; only RDP and PLD are guarantees",
        fontsize="medium",
    )
    save_figure(figure, out)
