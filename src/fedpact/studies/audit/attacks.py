"""Three attacks on the privacy claim: many runs, one run with many canaries, membership inference.

Many runs. As in the definition of (ε, δ), the attacker knows and chooses all other records and the
model, and makes the algorithm's requests. Each run asks the oracle `events` times. Pilot runs
choose the attack, its weights and its thresholds; the bounds come from other runs, so Clopper and
Pearson's intervals hold. Statistics of a release:

    <release, u>, u the canary's direction       the canary's contribution
    log ‖release‖                                what scales with the batch
    the number itself                            for a loss or a count

ε is bounded from below at the plan's δ and at larger ones: an accountant states ε(δ) for every δ,
and wrong noise shows at a large δ with the fewest runs.

Membership. Yeom, Giacomelli, Fredrikson, Jha 2018: a threshold on the loss, over all thresholds.
Members are the training records, non-members the held-out records, or else the public test set. It
is weaker than attacks on the releases, but everyone who gets the model can carry it out.

One run. Steinke, Nasr, Jagielski 2023, arXiv 2305.08846. Each of many canaries is added to the
site's records or not, by a coin. The attacker sees every release and knows every record, but not
the coins, and guesses those with the clearest scores. If it is right too often for (ε, δ), the
claim is wrong. Scores are the posterior means of the coins in a Gaussian model: with one release
R = q S + (q/2) Σ_j s_j c_j g_j + noise, s_j = ±1, and S the sum over known records,

    scores = (I + Σ_t (a²/v) G Gᵀ)^-1 Σ_t (a/v) G (R - q S),   a = q/2,   rows c_j g_j of G,
    v = ‖R - q S‖²/d, the measured noise

They depend on the releases only, so they need no proof (under batch clipping the model is rough).
Adding canaries at an unchanged public size matches add/remove adjacency.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from scipy.special import ndtr
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fedpact.common.check import count
from fedpact.common.errors import DataError, InputError, ModelError
from fedpact.common.losses import cross_entropy
from fedpact.common.randomness.seeded import SeededDraws, seeded_generator
from fedpact.per_sample.clipping import UNIFORM, Fair, coefficients, weights_of
from fedpact.per_sample.kernel import PlainKernel
from fedpact.per_sample.share import unit_of
from fedpact.privacy.mechanisms import mechanism_of
from fedpact.privacy.oracle import Records
from fedpact.privacy.terms import Terms
from fedpact.report.audited import AuditRow
from fedpact.simulation.setup import SimulationSetup
from fedpact.simulation.simulate import simulate
from fedpact.studies.audit.bounds import (
    Auc,
    Counts,
    auc,
    auc_ceiling,
    auc_power,
    curve_p_value,
    expect_right,
    gaussian_mu,
    make_loss_bound,
    many_runs_epsilon,
    many_runs_power,
    one_run_epsilon,
)
from fedpact.studies.audit.noise import (
    NoiseLevel,
    Tested,
    noise_alone,
    noise_levels,
    noise_tests,
    rows_of_tests,
    sampling_tests,
)
from fedpact.studies.audit.target import Asked, Target, draw_mislabelled, simulate_rounds

_CHANNELS = ("gradient", "loss", "below")
_DELTAS = (0.05, 0.1)
_PILOT = 100
_RUNS = 500
_EVENTS = 40
# The norm of a canary's gradient before clipping over C, if a record can reach it.
_LENGTH = 10.0
_SCALES = (1.0, 10.0, 100.0, 1000.0)


@dataclass(frozen=True)
class LowerBound:
    """ε at one δ: the lower bound, the accountant's claim, and the counts behind the bound.

    power: the bound that the best attack would reach at the expected counts, if the claim is tight.
    """

    delta: float
    epsilon: float
    claimed: float
    counts: Counts
    power: float

    @property
    def passed(self) -> bool:
        """Whether the claim stands."""
        return self.epsilon <= self.claimed


@dataclass(frozen=True)
class ManyRuns:
    """The result of many runs with `events` joint events each, by the attack chosen by pilots."""

    attack: str
    events: int
    bounds: tuple[LowerBound, ...]
    noise: tuple[NoiseLevel, ...]
    tests: tuple[Tested, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether every claim stands."""
        return all(part.passed for part in (*self.bounds, *self.noise, *self.tests))

    def rows(self, method: str, confidence: float) -> list[AuditRow]:
        """Return the rows of a table: results and claims."""
        rows = list[AuditRow]()
        for b in self.bounds:
            told = (
                f"{self.events} events, seen in {b.counts.seen_with} runs of {b.counts.runs_with} "
                f"with the canary, {b.counts.seen_without} without ({self.attack})"
            )
            found = b.epsilon, b.claimed, b.delta, confidence, told, b.power
            rows.append(AuditRow(method, "ε", *found))
        rows += [level.row(method) for level in self.noise]
        return rows + rows_of_tests(method, self.tests)


@dataclass(frozen=True)
class Attack:
    """Records, a canary to add, and the requests and directions by channel."""

    name: str
    records: Records
    canary: Records
    queries: dict[str, tuple[Any, ...]]
    directions: dict[str, Tensor]

    def play(self, target: Target, present: bool, events: int, key: tuple[str | int, ...]) -> Any:
        """Return one run's statistics, means over its events."""
        records = self.records
        if present:
            # At a random position, in case a faulty oracle treats positions differently.
            generator = seeded_generator(target.plan.seed, "audit", self.name, "place", *key)
            at = int(torch.randint(len(records.y) + 1, (), generator=generator))
            k = target.canary_records
            x, y = (part.repeat_interleave(k, 0) for part in (self.canary.x, self.canary.y))
            records = records.join(x, y, at, together=True)
        draws = SeededDraws(target.plan.seed, "audit", self.name, present, *key)
        oracle, rows = target.oracle(records, draws), list[list[float]]()
        for batch in oracle.batches(events, *self.queries):
            row = list[float]()
            for channel, query in self.queries.items():
                answer = torch.as_tensor(getattr(batch, channel)(*query)).reshape(-1).double()
                row.append(float(answer @ self.directions[channel]))
                if len(answer) > 1:
                    row.append(math.log(max(float(answer.norm()), 1e-300)))
            rows.append(row)
        return np.mean(rows, axis=0)


def attackable(target: Target) -> bool:
    """Whether many_runs can attack everything that the site's batches release."""
    return not target.terms.openings and set(target.terms.sigmas) <= set(_CHANNELS)


def many_runs(
    target: Target, runs: int = _RUNS, confidence: float = 0.95, events: int = _EVENTS
) -> ManyRuns:
    """Audit with `runs` runs with the canary and as many without, of at most `events` events.

    If the clip changes with the round, all events are the last round's; multipliers are the same.
    """
    count(runs=runs)
    if not attackable(target):
        raise InputError(
            f"algorithm {target.plan.algorithm!r} releases {', '.join(target.terms.releases)}: the "
            f"many-runs attack only knows {', '.join(_CHANNELS)} of batches without an opening; "
            "audit it with --method one-run or membership"
        )
    target = target.at(target.rounds)
    events = min(events, target.terms.steps)
    pilots = [(attack, _Rule.learn(target, attack, events)) for attack in attacks(target)]
    attack, rule = max(pilots, key=lambda pilot: pilot[1].separation)
    with_it, without = (
        np.array([rule.score(attack.play(target, p, events, ("run", r))) for r in range(runs)])
        for p in (True, False)
    )
    deltas = (target.terms.budget.delta, *_DELTAS)
    each = 1 - (1 - confidence) / len(deltas)
    bounds = list[LowerBound]()
    for delta in deltas:
        at = rule.threshold(runs, delta, each)
        counts = Counts(int((with_it > at).sum()), runs, int((without > at).sum()), runs)
        found = many_runs_epsilon(counts, delta, each)
        claimed = target.claimed(events, delta)
        power = many_runs_power(claimed, delta, runs, each)
        bounds.append(LowerBound(delta, found, claimed, counts, power))
    alone = noise_alone(target, attack.queries)
    noise = noise_levels(target, attack.queries, alone)
    tests = (*noise_tests(target, attack.queries, alone), *sampling_tests(target, attack.queries))
    return ManyRuns(attack.name, events, tuple(bounds), noise, tests)


@dataclass(frozen=True)
class _Rule:
    """A run's score, learnt from pilot runs: weights, and mean and deviation with and without."""

    weights: Any
    mean_with: float
    mean_without: float
    deviation_with: float
    deviation_without: float

    @staticmethod
    def learn(target: Target, attack: Attack, events: int) -> "_Rule":
        with_it, without = (
            np.array([attack.play(target, p, events, ("pilot", r)) for r in range(_PILOT)])
            for p in (True, False)
        )
        apart = with_it.mean(0) - without.mean(0)
        spread = with_it.var(0) + without.var(0)
        # Statistics without a clear difference would only add noise. If none is clear, use the
        # first, the canary's direction.
        clear = apart**2 > 16 * spread / _PILOT
        weights = np.where(clear, apart / (spread + 1e-300), 0.0)
        if not clear.any():
            weights[0] = 1.0
        a, b = with_it @ weights, without @ weights
        return _Rule(weights, a.mean(), b.mean(), a.std() + 1e-12, b.std() + 1e-12)

    @property
    def separation(self) -> float:
        """The distance between the two kinds of runs in standard deviations."""
        apart = self.mean_with - self.mean_without
        return apart / math.hypot(self.deviation_with, self.deviation_without)

    def score(self, statistics: Any) -> float:
        """Return a number that is larger with the canary."""
        return float(statistics @ self.weights)

    def threshold(self, runs: int, delta: float, confidence: float) -> float:
        """Return the threshold with the largest expected bound for normal scores."""
        low = min(self.mean_without, self.mean_with) - 2 * self.deviation_without
        high = max(self.mean_without, self.mean_with) + 4 * self.deviation_without

        def expected(at: float) -> float:
            p1 = float(ndtr((self.mean_with - at) / self.deviation_with))
            p0 = float(ndtr((self.mean_without - at) / self.deviation_without))
            counts = Counts(round(p1 * runs), runs, round(p0 * runs), runs)
            # Without any bound, prefer the threshold with the largest difference.
            return many_runs_epsilon(counts, delta, confidence) or p1 - p0 - 1

        return max(np.linspace(low, high, 61).tolist(), key=expected)


def attacks(target: Target) -> list[Attack]:
    """Return the attacks to try: the canary among all the site's records, and with only one."""
    *_, asked = simulate_rounds(target, target.records, min(2, target.rounds), "questions")
    first = [a for a in asked if a.batch == asked[0].batch]
    alone = None if target.records.persons is None else torch.zeros(1, dtype=torch.int64)
    one = Records(target.records.x[:1], target.records.y[:1], persons=alone)
    queries = {a.channel: a.query for a in first}
    canary, directions = _canary(target, queries)
    return [
        Attack("all records", target.records, canary, queries, directions),
        Attack("one record", one, canary, queries, directions),
    ]


def _canary(
    target: Target, queries: dict[str, tuple[Any, ...]]
) -> tuple[Records, dict[str, Tensor]]:
    """Return a crafted record with a large gradient, and its unit direction by channel."""
    w = next(q for query in queries.values() for q in query if isinstance(q, Tensor))
    canary = _worst_record(target, w)
    directions = dict[str, Tensor]()
    for channel, query in queries.items():
        # With weight 0 there is no direction: use the unweighted gradient.
        plain = tuple(UNIFORM if isinstance(q, Fair) else q for q in query)
        answer = target.answer(canary, channel, plain).double()
        directions[channel] = answer / answer.norm() if len(answer) > 1 else torch.ones_like(answer)
    return canary, directions


def _worst_record(target: Target, w: Tensor) -> Records:
    """Return the site's first record, negated and scaled until its gradient is far larger than C.

    It has the record's label, so that it pulls against that record, or the label that the model
    finds least likely if the gradient is then too small. Tokens cannot be scaled: a mislabelled
    record is used.
    """
    if not target.records.x.is_floating_point():
        return draw_mislabelled(target, 1)
    x, y, model = target.records.x[:1], target.records.y[:1], target.kernel.model
    model.load(w)
    found = list[tuple[float, Records]]()
    for scale in _SCALES:
        with torch.no_grad():
            least = model.module(-scale * x).view(-1, target.classes).mean(0, True).argmin(1)
        for label in (y, least):
            made = Records(-scale * x, label)
            length = float(PlainKernel(model, cross_entropy).weighted_sum(made.x, made.y).norm())
            if length >= _LENGTH * target.terms.clip:
                return made
            found.append((length, made))
    return max(found, key=lambda pair: pair[0])[1]


@dataclass(frozen=True)
class Membership:
    """AUC with its interval, and the numbers of records. ceiling: the largest AUC under (ε, δ).

    advantage: the largest TPR - FPR of any threshold, without an interval.
    """

    auc: Auc
    advantage: float
    members: int
    others: int
    ceiling: float

    @property
    def passed(self) -> bool:
        """Whether the claim stands."""
        return self.auc.low <= self.ceiling

    def rows(self, method: str, confidence: float) -> list[AuditRow]:
        """Return the rows of a table: results and claims."""
        a, counts = self.auc, (self.members, self.others)
        told = (
            f"AUC {a.value:.3f} ({a.low:.3f} to {a.high:.3f}), {counts[0]} members, "
            f"{counts[1]} others, advantage {self.advantage:.3f}"
        )
        best = auc_power(self.ceiling, *counts, confidence)
        return [AuditRow(method, "AUC", a.low, self.ceiling, None, confidence, told, best)]


def membership(scene: SimulationSetup, confidence: float = 0.95) -> Membership:
    """Train as the plan says, in a temporary folder, and attack the model."""
    others = [(site.x_held, site.y_held) for site in scene.sites if len(site.y_held)]
    data = scene.dataset
    if not others and data.x_test is not None and data.y_test is not None:
        others = [(data.x_test, data.y_test)]
    if not others:
        raise DataError(
            f"data set {data.name} has no records that were not trained on, which a membership "
            "attack needs; set partition.held_out above 0"
        )
    with TemporaryDirectory() as folder:
        model = simulate(scene.plan, Path(folder) / "run", data=scene.raw).model
    inside = _scores(model, [(site.x, site.y) for site in scene.sites])
    outside = _scores(model, others)
    ceiling = max(auc_ceiling(t.budget.epsilon, t.budget.delta) for t in scene.terms.values())
    return Membership(
        auc(inside, outside, confidence),
        _advantage(inside, outside),
        len(inside),
        len(outside),
        ceiling,
    )


def _scores(module: nn.Module, parts: list[tuple[Tensor, Tensor]]) -> np.ndarray:
    """Return the negative loss of every record, in evaluation mode."""
    module.eval()
    with torch.no_grad():
        losses = [
            cross_entropy(module(xs), ys)
            for x, y in parts
            for xs, ys in zip(x.split(1024), y.split(1024), strict=True)
        ]
    return -torch.nan_to_num(torch.cat(losses).double(), nan=np.inf).numpy()


def _advantage(inside: np.ndarray, outside: np.ndarray) -> float:
    at = np.concatenate([inside, outside])
    true = 1 - np.searchsorted(np.sort(inside), at, "left") / len(inside)
    false = 1 - np.searchsorted(np.sort(outside), at, "left") / len(outside)
    return float(np.max(true - false))


# Guesses as shares of the canaries; the largest bound counts, each at its part of the error.
_SHARES = (0.05, 0.2, 1.0)
# Where the claimed curve is tested, in addition to the budget's δ.
_ONE_RUN_DELTAS = (1e-4, 1e-3, 0.01, 0.03, 0.1, 0.2, 0.4)
# The most numbers in the canaries' gradients: half a gigabyte.
_MOST_NUMBERS = 1 << 27


@dataclass(frozen=True)
class OneRun:
    """The result of one run: `correct` of `guesses` about m canaries, at the largest bound.

    epsilon: the lower bound. claimed: the accountant's ε at delta for the run's events. power: the
    bound that the best attack would reach if the claim is tight. curve: a test of the trade-off
    curve that the accountant states, at all δ together.
    """

    canaries: int
    guesses: int
    correct: int
    events: int
    delta: float
    epsilon: float
    claimed: float
    power: float
    curve: Tested

    @property
    def passed(self) -> bool:
        """Whether the claim stands: ε at its δ, and the whole trade-off curve."""
        return self.epsilon <= self.claimed and self.curve.passed

    def rows(self, method: str, confidence: float) -> list[AuditRow]:
        """Return the rows of a table: results and claims."""
        told = (
            f"{self.correct} of {self.guesses} guesses right, {self.canaries} canaries, "
            f"{self.events} events"
        )
        found = self.epsilon, self.claimed, self.delta, confidence, told, self.power
        return [AuditRow(method, "ε", *found), *rows_of_tests(method, (self.curve,))]


def one_run(target: Target, canaries: int = 500, confidence: float = 0.95) -> OneRun:
    """Audit the whole run of one site with m canaries; fewer if the model is very large."""
    m = min(count(canaries=canaries), max(1, _MOST_NUMBERS // target.w.numel()))
    made = draw_mislabelled(target, m)
    coins = torch.randint(
        2, (m,), generator=seeded_generator(target.plan.seed, "audit", "coins")
    ).bool()
    # One record per canary: a person with several equal records contributes the same.
    records = target.records.join(made.x[coins], made.y[coins], len(target.records.y))
    scores, events, openings = _one_run_scores(target, records, made)
    # Each share of guesses bounds ε, and tests the curve.
    error = (1 - confidence) / (2 * len(_SHARES))
    guessed = [_guess(scores, coins, share) for share in _SHARES]
    delta = target.terms.budget.delta
    found = [(one_run_epsilon(m, r, v, delta, 1 - error), r, v) for r, v in guessed]
    best, guesses, correct = max(found)
    claimed = target.claimed(events, delta, openings)
    stated = [(target.claimed(events, d, openings), d) for d in (delta, *_ONE_RUN_DELTAS)]
    p = min(curve_p_value(make_loss_bound(stated), m, r, v) for r, v in guessed)
    told = f"trade-off curve at {len(stated)} δ (Mahloujifar, Melis, Chaudhuri 2024)"
    return OneRun(
        m, guesses, correct, events + openings, delta, best, claimed,
        power=_power(m, claimed, delta, error),
        curve=Tested(told, p, error),
    )  # fmt: skip


def _power(canaries: int, claimed: float, delta: float, error: float) -> float:
    """Return the bound at the expected number of right guesses, for Gaussian scores."""
    mu = min(gaussian_mu(claimed, delta), 50.0)
    shown = [0.0]
    for share in _SHARES:
        r = 2 * max(1, round(share * canaries / 2))
        r = min(r, canaries)
        right = math.floor(r * expect_right(mu, share))
        shown.append(one_run_epsilon(canaries, r, right, delta, 1 - error))
    return max(shown)


def _guess(scores: Tensor, coins: Tensor, share: float) -> tuple[int, int]:
    """Return the numbers of guesses and right guesses, from the highest and lowest scores."""
    half = max(1, round(share * len(scores) / 2))
    order = torch.argsort(scores)
    right = int(coins[order[-half:]].sum())
    lowest = order[: min(half, len(scores) - half)]
    right += int((~coins[lowest]).sum())
    return half + len(lowest), right


def _one_run_scores(target: Target, records: Records, canaries: Records) -> tuple[Tensor, int, int]:
    """Return the canaries' scores [m] after a run, and its numbers of joint events and openings.

    Only gradients are used; an attacker could use other releases, too.
    """
    m = len(canaries.y)
    precision, evidence = torch.eye(m, dtype=torch.float64), torch.zeros(m, dtype=torch.float64)
    events = openings = gradients = 0
    for asked in simulate_rounds(target, records, target.rounds, "one run"):
        opened = len({a.batch for a in asked if a.opening})
        openings += opened
        events += len({a.batch for a in asked}) - opened
        for a in asked:
            if a.channel == "gradient":
                gradients += 1
                whole, known, half = _scale(target, a.terms)
                shares = _shares(target, canaries, a)
                rest = a.answer * whole - half * shares.sum(0)
                rest -= known * target.answer(target.records, "gradient", a.query, a.terms)
                # The measured variance, not the claimed one: sampling adds to the noise.
                variance = float(rest.square().mean())
                evidence += (half / variance) * (shares @ rest).double()
                precision += (half**2 / variance) * (shares @ shares.T).double()
    if not gradients:
        raise InputError(
            f"algorithm {target.plan.algorithm!r} releases no gradient, which the one-run attack "
            "needs: audit it with --method membership"
        )
    return torch.linalg.solve(precision, evidence), events, openings


def _scale(target: Target, terms: Terms) -> tuple[float, float, float]:
    """Return the factor from an answer to a sum, and the shares of known records and canaries."""
    if not mechanism_of(terms.mechanism).summed:
        return 1.0, 1.0, 0.5 / len(target.records.y)
    return terms.batch_size, terms.rate, terms.rate / 2


def _shares(target: Target, canaries: Records, asked: Asked) -> Tensor:
    """Return what each canary adds to a sum if it is in the batch: rows c_j g_j [m, d]."""
    target.kernel.model.load(asked.query[0])
    rows, losses = _gradients(target, canaries)
    norms, clip = rows.norm(dim=1), asked.terms.clip
    gamma = getattr(mechanism_of(asked.terms.mechanism).batch, "gamma", None)
    w = weights_of(asked.weighting, losses).clamp_min(0)
    c = coefficients(clip, norms, w, None, gamma).to(rows) * unit_of(clip)
    return torch.nan_to_num(rows * c[:, None], nan=0.0, posinf=0.0, neginf=0.0)


def _gradients(target: Target, records: Records) -> tuple[Tensor, Tensor]:
    """Return the per-sample gradients [m, d] and losses [m] at the model's weights."""
    model = target.kernel.model
    weights = {name: view.detach() for name, view in model.views(model.vector)}

    def loss(w: dict[str, Tensor], x: Tensor, y: Tensor) -> Any:
        value = cross_entropy(functional_call(model.module, w, (x[None],)), y[None])[0]
        return value, value

    each = vmap(grad(loss, has_aux=True), (None, 0, 0), chunk_size=32, randomness="different")
    try:
        rows, losses = each(weights, records.x, records.y)
    except RuntimeError as error:
        raise ModelError(
            f"model {type(model.module).__name__} has a layer that torch.func.vmap cannot batch "
            f"({error}): audit it with --method membership"
        ) from error
    return torch.cat([rows[name].flatten(1) for name in weights], 1), losses.detach()
