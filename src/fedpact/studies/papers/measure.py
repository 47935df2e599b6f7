"""Measure a problem's constants: smoothness, curvature, variance.

Assumption 1 of the paper needs one L, λ and σ_n for every w. Here only a few points are examined,
so L and λ are estimated from below, and σ̄² for these points. σ̄² is unbounded where the global
gradient vanishes and the sites' do not (docs/notes/errata.md, V5): it grows as a run converges.

    L    max over records i of ‖∇²f_i(w)‖                  spectra of single records' losses
    λ    max(0, max over sites n of -λ_min(∇²F_n(w)))      spectra of whole sites' losses
    σ̄²   Σ p_n ‖∇F_n(w) - ∇F(w)‖² / ‖∇F(w)‖²

All are exact numbers of the records, which no (ε, δ) covers: compute them for your own data, public
data or simulations, and never send them from a site.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor, nn

from fedpact.common.errors import DataError, InputError
from fedpact.common.format import count_noun
from fedpact.common.losses import cross_entropy
from fedpact.common.messages import RoundRecord
from fedpact.common.params import FlatModel
from fedpact.common.run_folder import Costs, Folder
from fedpact.data.partition import Partition
from fedpact.plan import Plan
from fedpact.report.run_summary import RunSummary
from fedpact.simulation.setup import SimulationSetup

Vector = NDArray[np.float64]
Product = Callable[[Vector], Vector]
"""v [d] -> Hv [d], for a symmetric H."""


def spectrum(
    product: Product, dimension: int, draws: np.random.Generator, iterations: int = 30
) -> tuple[float, float]:
    """Return the ends of a symmetric operator's spectrum from inside: Ritz values, low <= high.

    By Lanczos' method with full reorthogonalisation. The ends converge first; with iterations >=
    dimension they are exact. Raises InputError: a product that is not finite.

    >>> diagonal = np.array([-1.0, 0.5, 2.0, 7.0])
    >>> low, high = spectrum(lambda v: diagonal * v, 4, np.random.default_rng(0))
    >>> round(low, 9), round(high, 9)
    (-1.0, 7.0)
    """
    steps = min(iterations, dimension)
    basis, images = np.zeros((2, steps, dimension))
    rest = draws.standard_normal(dimension)
    for k in range(steps):
        basis[k] = rest / np.linalg.norm(rest)
        images[k] = rest = image = product(basis[k])
        if not np.all(np.isfinite(image)):
            raise InputError(
                "the loss has curvatures that are not finite: L and λ cannot be estimated; give "
                "--L and --lam"
            )
        for _ in range(2):  # twice makes it orthogonal up to rounding
            rest = rest - basis[: k + 1].T @ (basis[: k + 1] @ rest)
        if np.linalg.norm(rest) <= 1e-12 * np.linalg.norm(image):
            steps = k + 1
            break
    values = np.linalg.eigvalsh(basis[:steps] @ images[:steps].T)
    return float(values[0]), float(values[-1])


def heterogeneity(gradients: Vector, weights: Sequence[float]) -> float:
    """Return σ̄² = Σ p_n σ_n² at one point, σ_n = ‖∇F_n - ∇F‖/‖∇F‖, ∇F = Σ p_n ∇F_n.

    gradients: [N, d], the sites' at that point; gradients of samples add their variance. weights:
    p_n up to a factor, > 0. inf if ∇F is 0 and a site's gradient is not.

    >>> towards = np.array([[1.0, 0.0], [3.0, 0.0]])
    >>> heterogeneity(towards, [1, 1])
    0.25
    """
    p = np.array(weights) / sum(weights)
    mean = p @ gradients
    apart = ((gradients - mean) ** 2).sum(1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(p @ np.where(apart > 0, apart / (mean @ mean), 0.0))


# Gradients of SITES sites, IN_GRADIENT records each; spectra of CURVED of them, by IN_HESSIAN
# records and SINGLE single ones: a minute of computing for a CNN of half a million weights.
SITES, IN_GRADIENT = 20, 1000
CURVED, IN_HESSIAN, SINGLE, ITERATIONS = 3, 40, 2, 8
UNPROTECTED = (
    "L, λ and σ̄² were estimated from the simulation's records: exact numbers of them, which no "
    "(ε, δ) covers. L and λ are seen from below; σ̄² grows as a run converges, and where the sites' "
    "optima differ it has no bound (docs/notes/errata.md, V5)."
)

_EVALUATED = (
    " The time of evaluations is among it: run with run.evaluate_every above the number of rounds "
    "to leave it out."
)


def from_run(
    run: RunSummary, given: Mapping[str, float | None]
) -> tuple[dict[str, float], dict[str, Any]]:
    """Return L, lam, sigma2 and gamma, measured unless given, and a report.

    Raises DataError: the run's records are not on this machine. InputError: γ cannot be measured.
    """
    numbers = {name: value for name, value in given.items() if value is not None}
    notes, measured = list[str](), dict[str, Any]()
    if "gamma" not in numbers:
        costs = split_records(run.records)
        numbers["gamma"] = costs.d_cmp / costs.d_com
        measured["costs"] = asdict(costs)
        notes.append(costs.note)
    if wanted := {"L", "lam", "sigma2"} - set(numbers):
        with Console(stderr=True).status("estimating L, λ and σ̄²"):
            estimates = _estimates(run.path)
        chosen = {"L": estimates["L"], "lam": estimates["lam"]}
        # Assumption 1 is about every w, so the worse of two points counts.
        chosen["sigma2"] = max(estimates["sigma2_first"], estimates["sigma2_last"])
        numbers |= {name: chosen[name] for name in wanted}
        if "lam" in wanted:
            # An L-smooth loss is L-weakly convex; the estimates are from different samples.
            numbers["lam"] = min(numbers["lam"], numbers["L"])
        measured["estimates"] = estimates
        names = ("L", "λ", "σ̄² at the first model", "σ̄² at the last")
        each = zip(names, estimates.values(), strict=True)
        notes += [UNPROTECTED, ", ".join(f"{name} = {value:.3g}" for name, value in each) + "."]
    return numbers, {"run": str(run.path), **measured, "notes": notes}


@dataclass(frozen=True)
class Split:
    """Seconds of a round without its steps, and of one local iteration, with a note."""

    d_com: float
    d_cmp: float
    rounds: int
    separated: bool
    note: str


def split_records(records: Sequence[RoundRecord]) -> Split:
    """Return d_com and d_cmp by least squares of seconds = d_com + d_cmp τ over the rounds.

    Rounds with an evaluation, which takes time, too, are left out, unless only they have several τ.
    If all τ are equal, d_com and d_cmp cannot be separated, and each gets half of a round.
    Raises InputError: no rounds with steps, or an estimate that is not positive.
    """
    trained = [record for record in records if record.round and record.steps]
    bare = [record for record in trained if record.accuracy is None and not record.scores]
    several, bare_taus = ({r.steps for r in records} for records in (trained, bare))
    evaluated = len(bare_taus) < min(2, len(several))
    costs = Costs()
    for record in trained if evaluated else bare:
        costs = costs.after(record.bytes_down + record.bytes_up, record.steps, record.seconds)
    if not costs.rounds or not costs.seconds > 0:
        raise InputError(
            "the run has no round with local steps and seconds: expected at least one; give "
            "--gamma, or run more rounds"
        )
    if costs.rounds * costs.squares == costs.steps**2:
        tau, each = costs.steps // costs.rounds, costs.seconds / costs.rounds
        note = (
            f"All {costs.rounds} rounds had τ = {tau}, so their {each:.3g} s cannot be split into "
            f"messages and local steps. Half of it is put on each: d_com = {each / 2:.3g} s, "
            f"d_cmp = {each / 2 / tau:.3g} s, γ = 1/τ. Anything else is as possible: give --gamma, "
            "or a run with several τ."
        )
        return Split(each / 2, each / 2 / tau, costs.rounds, False, note + _EVALUATED * evaluated)
    d_com, d_cmp = costs.split_seconds()
    if not (d_com > 0 and d_cmp > 0):
        raise InputError(
            f"the rounds' seconds give d_com = {d_com:.3g} and d_cmp = {d_cmp:.3g}: expected both "
            "> 0, the time of a round to grow with τ; give --gamma"
        )
    note = (
        f"{count_noun(costs.rounds, 'round')} of several τ: d_com = {d_com:.3g} s a round, "
        f"d_cmp = {d_cmp:.3g} s a local step, by least squares. In a simulation messages "
        "cross no network."
    )
    return Split(d_com, d_cmp, costs.rounds, True, note + _EVALUATED * evaluated)


def _estimates(run: Path) -> dict[str, float]:
    if not Folder(run).partition.exists():
        raise DataError(
            f"{run} has no partition.json: the records are with the sites, so L, λ and σ̄² cannot "
            "be estimated here; give --L, --lam and --sigma2"
        )
    plan = Plan.parse(Folder(run).read_json("plan.json"))
    scene = SimulationSetup.of(plan, partition=Partition.load(Folder(run).partition))
    checkpoint, _ = Folder(run).restore()
    model = FlatModel(scene.workshop.module().eval())
    points = [model.vector.clone(), checkpoint.state.vectors["w"]]
    draws = np.random.default_rng(plan.seed)
    chosen = draws.permutation(len(scene.sites))[:SITES].tolist()
    sites = list[tuple[Tensor, Tensor]]()
    for site in (scene.sites[i] for i in chosen):
        order = torch.from_numpy(draws.permutation(len(site.y))[:IN_GRADIENT])
        sites.append((site.x[order], site.y[order]))
    sizes = [float(len(scene.sites[i].y)) for i in chosen]
    single, whole, gradients = list[float](), list[float](), list[Vector]()
    for w in points:
        model.load(w)
        slopes = [_slopes(model, x, y, again=False)[1] for x, y in sites]
        gradients.append(torch.stack(slopes).double().numpy())
        for x, y in sites[:CURVED]:
            whole.append(-_spectrum(model, x[:IN_HESSIAN], y[:IN_HESSIAN], draws)[0])
            for i in range(min(SINGLE, len(y))):
                single += map(abs, _spectrum(model, x[i : i + 1], y[i : i + 1], draws))
    return {
        "L": max(single),
        "lam": max(0.0, *whole),
        "sigma2_first": heterogeneity(gradients[0], sizes),
        "sigma2_last": heterogeneity(gradients[1], sizes),
    }


def _slopes(
    model: FlatModel, x: Tensor, y: Tensor, *, again: bool
) -> tuple[list[nn.Parameter], Tensor]:
    parameters = [p for p in model.module.parameters() if p.requires_grad]
    loss = cross_entropy(model.module(x), y).mean()
    slopes = torch.autograd.grad(loss, parameters, create_graph=again)
    return parameters, torch.cat([g.reshape(-1) for g in slopes])


def _spectrum(
    model: FlatModel, x: Tensor, y: Tensor, draws: np.random.Generator
) -> tuple[float, float]:
    """Return the ends of the mean loss's Hessian's spectrum at the model's current weights."""
    parameters, slope = _slopes(model, x, y, again=True)

    def product(v: Vector) -> Vector:
        along = slope @ torch.from_numpy(v).to(slope)
        rows = torch.autograd.grad(along, parameters, retain_graph=True, materialize_grads=True)
        return torch.cat([row.reshape(-1) for row in rows]).double().numpy()

    return spectrum(product, model.size, draws, ITERATIONS)
