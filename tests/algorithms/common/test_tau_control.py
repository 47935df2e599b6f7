"""The controller of τ: its estimators where the truth is known, its choices, and its budgets.

F_i(w) = ½ (w - b_i)ᵀ H_i (w - b_i) with Gaussian noise of variance v in each coordinate of a
gradient. With A = I - ηH, local SGD has w_t - b = Aᵗ(w - b) - η Σ_k A^(t-1-k) n_k, from which all
expectations below follow.

Randomised checks compare a mean of independent trials with its expectation and allow five of its
standard errors: a true expectation fails once in 1.7 million comparisons. A wrong one is off by
more than three. All seeds are fixed.
"""

import itertools
import math
import random
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpact.algorithms.common import tau_control, tau_site
from fedpact.algorithms.common.steps import sgd, weighted_mean
from fedpact.algorithms.common.tau_control import CONTROL_PREFIX, Ali, Controller
from fedpact.common.errors import InputError
from fedpact.common.messages import Local, Reply, State, Task

D, RATE, V = 12, 0.2, 0.3
SPECTRUM = torch.linspace(0.1, 1.5, D, dtype=torch.float64)


@dataclass
class Quadratic:
    """A site's oracle, and its batches: exact gradients with noise."""

    h: torch.Tensor
    b: torch.Tensor
    v: float
    draws: torch.Generator
    steps_left: float = math.inf
    asked: list = field(default_factory=list)

    @property
    def noise_variance(self):
        return self.v

    def batches(self, count, *channels):
        for _ in range(count):
            yield self

    def exact(self, w):
        return self.h @ (w - self.b)

    def gradient(self, w, weighting=None):
        noise = torch.randn(len(w), generator=self.draws, dtype=w.dtype)
        return self.exact(w) + math.sqrt(self.v) * noise

    def unprotected(self, w):
        return 0.5 * float((w - self.b) @ self.h @ (w - self.b)), self.exact(w)


def sites(count, seed=0, v=V):
    """Quadratics of unlike curvature and optimum, with weights 1, 2, ...; and a start."""
    draws = torch.Generator().manual_seed(seed)
    made = {}
    for i in range(count):
        q, _ = torch.linalg.qr(torch.randn(D, D, generator=draws, dtype=torch.float64))
        b = torch.randn(D, generator=draws, dtype=torch.float64)
        h = q @ torch.diag(SPECTRUM * (1 + 0.3 * i)) @ q.T
        made[f"s{i}"] = (Quadratic(h, b, v * (1 + i), draws), 1.0 + i)
    return made, torch.randn(D, generator=draws, dtype=torch.float64)


def plain_sgd(task, oracle, memory):
    return Local({"w": sgd(oracle, task.vectors["w"], int(task.numbers["local_steps"]), RATE)})


def other_solver(task, oracle, memory):
    """Moves otherwise than its gradients say."""
    w = plain_sgd(task, oracle, memory).vectors["w"]
    return Local({"w": w + 0.5 * (task.vectors["w"] - w)})


def replies(controller, made, w, steps, memories=None, inner=plain_sgd):
    """One round's replies; `memories` is filled where it is given."""
    task = Task("run", 1, "x", {"w": w}, {"local_steps": steps})
    for name, (oracle, weight) in made.items():
        memory = State() if memories is None else memories.get(name, State())
        local = controller.local(task, oracle, memory, inner)
        if memories is not None:
            memories[name] = local.memory
        yield Reply("run", 1, name, weight, local.vectors, local.numbers)


def folded(controller, made, w, steps, memories=None, inner=plain_sgd):
    """What the server holds after one round from w, without any before it."""
    fold = tau_control.Fold(w, steps, RATE)
    after = weighted_mean(fold.through(replies(controller, made, w, steps, memories, inner)))
    return tau_control.update_averages({}, fold), after.vectors["w"]


CONTROLLER = Controller(Ali(), RATE)


def estimates(made, w, steps, trials, inner=plain_sgd):
    """Each number's trials, one round each, all from w."""
    rounds = [folded(CONTROLLER, made, w, steps, inner=inner)[0] for _ in range(trials)]
    names = ("change", "distance", "length", "divergence")
    return {name: torch.tensor([r[name] for r in rounds if name in r]) for name in names}


def errors(values, expected):
    """How many standard errors the mean of independent values is off."""
    return abs(float(values.mean()) - expected) / (float(values.std()) / math.sqrt(len(values)))


def shares(made):
    total = sum(weight for _, weight in made.values())
    return {name: weight / total for name, (_, weight) in made.items()}


def power(matrix, k):
    return torch.linalg.matrix_power(matrix, k)


def expected_change(q, w, steps):
    """E‖H(w_l - w_f)‖² at l = τ - 1, and what the dependence of w_l on n_f adds to it."""
    eye = torch.eye(D, dtype=torch.float64)
    a, last = eye - RATE * q.h, steps - 1
    drift = q.h @ (power(a, last) - eye) @ (w - q.b)
    noise = sum(float((q.h @ power(a, k)).square().sum()) for k in range(last))
    bias = 2 * RATE * q.v * float((q.h @ power(a, last - 1)).trace())
    return float(drift @ drift) + RATE**2 * q.v * noise, bias


def expected_length(q, w, steps):
    """The mean over t of E‖∇F(w_t)‖², at the points where the gradients were taken."""
    a = torch.eye(D, dtype=torch.float64) - RATE * q.h
    total = 0.0
    for t in range(steps):
        drift = q.h @ power(a, t) @ (w - q.b)
        noise = sum(float((q.h @ power(a, k)).square().sum()) for k in range(t))
        total += float(drift @ drift) + RATE**2 * q.v * noise
    return total / steps


def local_means(made, w, steps):
    """Each site's mean gradient of a round in expectation, and the variance of its noise."""
    eye = torch.eye(D, dtype=torch.float64)
    for q, _ in made.values():
        a = eye - RATE * q.h
        mean = sum(q.h @ power(a, t) @ (w - q.b) for t in range(steps)) / steps
        noise = q.v / steps**2 * sum(float(power(a, 2 * k).trace()) for k in range(steps))
        yield mean, noise


def mean_over(made, values):
    return sum(p * x for p, x in zip(shares(made).values(), values, strict=True))


def test_estimators_expectation_is_truth_plus_stated_bias():
    made, w = sites(3)
    steps = 3
    found = estimates(made, w, steps, 150)
    oracles = [q for q, _ in made.values()]
    parts = [expected_change(q, w, steps) for q in oracles]
    truth, bias = (mean_over(made, part) for part in zip(*parts, strict=True))
    assert errors(found["change"], truth + bias) < 5
    # Without the bias, or its sign, the test rejects: what the module states is there.
    assert errors(found["change"], truth) > 3
    assert errors(found["change"], truth - bias) > 3
    # "About" 2ηv tr H, to first order in η.
    first = mean_over(made, [2 * RATE * q.v * float(q.h.trace()) for q in oracles])
    assert bias / first == pytest.approx(1, rel=0.35)
    lengths = mean_over(made, [expected_length(q, w, steps) for q in oracles])
    assert errors(found["length"], lengths) < 5
    # The variance of one noise too many, of both or of the only one, is rejected.
    once = D * mean_over(made, [q.v for q in oracles])
    assert errors(found["change"] + once, truth + bias) > 3
    assert errors(found["length"] + once, lengths) > 3


@pytest.mark.parametrize("steps", [1, 4])
def test_the_divergence_at_the_server(steps):
    made, w = sites(3)
    found = estimates(made, w, steps, 120)["divergence"]
    p = list(shares(made).values())
    means, noises = zip(*local_means(made, w, steps), strict=True)
    middle = mean_over(made, means)
    truth = mean_over(made, [float((m - middle).square().sum()) for m in means])
    variances = [q.v for q, _ in made.values()]
    bias = sum(
        (a - a * a) * (n - D * v / steps) for a, n, v in zip(p, noises, variances, strict=True)
    )
    assert errors(found, truth + bias) < 5
    if steps == 1:
        assert bias == pytest.approx(0, abs=1e-12)
    # What the spec takes away, site by site, as printed; not to take it away is rejected.
    squares = [a * a * v for a, v in zip(p, variances, strict=True)]
    parts = zip(p, variances, squares, strict=True)
    printed = sum(a * ((1 - a) ** 2 * v + sum(squares) - own) for a, v, own in parts)
    assert printed == pytest.approx(mean_over(made, variances) - sum(squares))
    assert errors(found + D / steps * printed, truth + bias) > 3


def test_other_solvers_send_a_bound_of_the_divergence():
    """The mean square of the sites' mean gradients, less their noise: at least ξ²."""
    made, w = sites(3)
    steps = 4
    found = estimates(made, w, steps, 120, inner=other_solver)["divergence"]
    means, noises = zip(*local_means(made, w, steps), strict=True)
    squares = [float(m @ m) for m in means]
    extra = [n - D * q.v / steps for n, (q, _) in zip(noises, made.values(), strict=True)]
    assert errors(found, mean_over(made, squares) + mean_over(made, extra)) < 5
    middle = mean_over(made, means)
    assert mean_over(made, squares) > mean_over(made, squares) - float(middle @ middle) > 0


def test_one_step_rounds_compare_consecutive_rounds():
    """First releases at w and at w⁺ = w - η Σ p_j g_j, which has a site's noise p_i times."""
    made, w = sites(3)
    p, rows = shares(made), []
    for _ in range(250):
        memories = {}
        first, after = folded(CONTROLLER, made, w, 1, memories)
        assert first["pairs"] == 0
        second, _ = folded(CONTROLLER, made, after, 1, memories)
        assert second["pairs"] == 1
        rows.append(second["change"])
    changes = torch.tensor(rows)
    step = RATE * mean_over(made, [q.exact(w) for q, _ in made.values()])
    change = bias = 0.0
    for name, (q, _) in made.items():
        noise = RATE**2 * sum(
            p[other] ** 2 * o.v * float(q.h.square().sum()) for other, (o, _) in made.items()
        )
        change += p[name] * (float((q.h @ step).square().sum()) + noise)
        bias += p[name] ** 2 * RATE * q.v * float(q.h.trace())
    assert errors(changes, change + 2 * bias) < 5
    assert errors(changes, change) > 3


def test_the_spread_falls_with_sites_and_rounds():
    """The stated variance of the noise is the true one, and k sites or k rounds divide it by k."""
    draws = torch.Generator().manual_seed(1)
    h = 0.05 * torch.eye(D, dtype=torch.float64)  # so that noise dominates
    one = Quadratic(h, torch.zeros(D, dtype=torch.float64), V, draws)
    w, trials = torch.zeros(D, dtype=torch.float64), 200

    def deviations(count, rounds):
        made = {f"s{i}": (one, 1.0) for i in range(count)}
        found, numbers = {"change": [], "length": []}, {}
        for _ in range(trials):
            numbers = {}
            for _ in range(rounds):
                fold = tau_control.Fold(w, 2, RATE)
                weighted_mean(fold.through(replies(CONTROLLER, made, w, 2)))
                numbers = tau_control.update_averages(numbers, fold)
            for name, values in found.items():
                values.append(numbers[name])
        return {
            name: (float(torch.tensor(values).std()), math.sqrt(numbers[f"{name}_variance"]))
            for name, values in found.items()
        }

    base, stated = deviations(1, 1)["change"]
    # The change is close to a χ² with d = 12 degrees, kurtosis 4: the deviation of 200 trials has
    # an error of sqrt(3/800) = 6 %, of which five are allowed, and 2 % that H adds to the spread.
    assert base == pytest.approx(stated, rel=0.32)
    found = deviations(2, 2)
    assert found["change"][1] == pytest.approx(stated / 2)
    # Two steps, two sites, two rounds: (‖g‖² - dv)'s variance 2dv² eight times less.
    assert found["length"][1] == pytest.approx(math.sqrt(2 * D * V**2 / 8))
    for spread, promised in found.values():
        assert spread == pytest.approx(promised, rel=0.32)


def test_sampling_adds_its_variance_to_a_square():
    """(1 - q)/(qn) mean‖g_j‖², as each of n records is in a batch with chance q."""
    draws = torch.Generator().manual_seed(2)
    records, q = torch.randn(10, D, generator=draws, dtype=torch.float64) + 1, 0.3

    class Sampled(Quadratic):
        def gradient(self, w, weighting=None):
            chosen = torch.rand(len(records), generator=self.draws) < q
            return (w - records[chosen]).sum(0) / (q * len(records))

    w = torch.zeros(D, dtype=torch.float64)
    oracle = Sampled(torch.eye(D, dtype=torch.float64), records.mean(0), 0.0, draws)
    made = {"s0": (oracle, 1.0)}
    found = estimates(made, w, 1, 400, inner=other_solver)["divergence"]
    bias = (1 - q) / (q * len(records)) * float(records.square().sum(1).mean())
    truth = float(records.mean(0).square().sum())
    assert errors(found, truth + bias) < 5
    assert errors(found, truth) > 3


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_without_noise_a_quadratic_is_estimated_as_it_is(steps):
    """Exactly: β is ‖HΔ‖/‖Δ‖, ρ² the gradients' mean square, ξ the spread of local means."""
    made, w = sites(2, v=0.0)
    memories = {}
    found, after = folded(CONTROLLER, made, w, steps, memories)
    start = w
    if steps == 1:
        assert tau_control.drift(found, RATE, D) is None
        start = after
        found, _ = folded(CONTROLLER, made, after, steps, memories)
    change, distance = [], []
    for q, _ in made.values():
        last = sgd(q, start, steps - 1, RATE) if steps > 1 else after
        first = start if steps > 1 else w
        change.append(float((q.h @ (last - first)).square().sum()))
        distance.append(float((last - first).square().sum()))
    drift = tau_control.drift(found, RATE, D)
    assert drift.smoothness**2 == pytest.approx(mean_over(made, change) / mean_over(made, distance))
    if steps > 1:
        lengths = [expected_length(q, start, steps) for q, _ in made.values()]
        assert drift.lipschitz**2 == pytest.approx(mean_over(made, lengths))
    means = [m for m, _ in local_means(made, start, steps)]
    middle = mean_over(made, means)
    truth = mean_over(made, [float((m - middle).square().sum()) for m in means])
    assert drift.spread**2 == pytest.approx(truth)


def test_an_estimate_within_the_noise_is_not_used():
    numbers = {"pairs": 1.0, "distance": 1.0, "divergence": -1.0, "noise": 0.01, "length": 1.0}
    numbers |= {"length_variance": 0.0, "change_variance": 0.25}
    assert tau_control.drift({**numbers, "change": 0.99}, RATE, D) is None
    found = tau_control.drift({**numbers, "change": 1.01}, RATE, D)
    # ξ² below 0 counts as 0 once it is used, so that s is the noise's part alone.
    assert found.spread == pytest.approx(2 * math.sqrt(D * 0.01))
    assert found.smoothness == pytest.approx(math.sqrt(1.01))
    bad = [{"length": -0.1}, {"change": math.nan}, {"change": math.inf}, {"distance": 0.0}]
    # Whatever a site may send: no number stops the server.
    bad += [{"noise": -1.0}, {"noise": math.nan}, {"divergence": math.inf}, {"distance": 1e-320}]
    bad += [{"change_variance": -1.0}, {"length_variance": math.nan}, {"change": 1e308}]
    for gone in bad:
        assert (
            tau_control.drift({**numbers, "change": 1.01, "distance": 0.1, **gone}, RATE, D) is None
        )


# ---------------------------------------------------------------- choices and budgets


def begun(state, **left):
    return State(state.vectors, {**state.numbers, **{f"left/{k}": v for k, v in left.items()}})


def first_state(controller):
    return controller.init(State({"w": torch.zeros(2, dtype=torch.float64)}))


def told(numbers):
    """A reply with these numbers of the controller."""
    zero = torch.zeros(2, dtype=torch.float64)
    sent = {f"{CONTROL_PREFIX}{name}": value for name, value in numbers.items()}
    return Reply("run", 1, "a", 1.0, {"w": zero}, sent)


ANSWER = {
    **dict.fromkeys(("pairs", "change", "distance", "length", "square", "noise", "straight"), 0.0),
    **dict.fromkeys(("change_variance", "length_variance"), 0.0),
    "steps_left": tau_site.UNLIMITED,
}


def rounds_of(controller, allowed, answers):
    """τ of every round and the last state, of a loop as rounds.py has it."""
    state, chosen = first_state(controller), []
    for number in range(allowed):
        state = begun(state, rounds=float(allowed - number), seconds=math.inf)
        steps = controller.steps(state)
        if steps == 0:
            return chosen, state
        chosen.append(steps)
        answer = told({**ANSWER, **answers(sum(chosen))})
        state = controller.update(state, iter([answer]), lambda rest, got: weighted_mean(got))
    return chosen, state


@given(
    iterations=st.integers(1, 400),
    rounds=st.integers(1, 120),
    kappa=st.floats(1e-3, 1e3),
    private=st.booleans(),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=25, deadline=None)
def test_budgets_are_used_up_and_not_exceeded(iterations, rounds, kappa, private, seed):
    """Whatever the sites answer. private: the sites' reservations say what is left, not R_c."""
    controller = Controller(Ali(kappa=kappa, iterations=None if private else iterations), RATE)
    draws = random.Random(seed)

    def answers(spent):
        drawn = {name: draws.uniform(-2, 2) for name in ("change", "length", "square", "noise")}
        left = {"steps_left": float(iterations - spent)} if private else {}
        return {**drawn, "noise": abs(drawn["noise"]), "pairs": 1.0, "distance": 0.5, **left}

    chosen, state = rounds_of(controller, rounds, answers)
    assert all(steps >= 1 for steps in chosen)
    assert sum(chosen) <= iterations
    assert len(chosen) <= rounds
    # It ends because one of the two is used up, exactly.
    assert sum(chosen) == iterations or len(chosen) == rounds
    assert chosen[0] == 1
    assert all(b <= min(2 * a, 100) for a, b in itertools.pairwise(chosen))
    if rounds >= iterations:
        assert chosen == [1] * iterations
        assert controller.steps(begun(state, rounds=rounds - iterations)) == 0


def test_without_estimates_both_budgets_end_together():
    controller = Controller(Ali(iterations=1585), RATE)
    chosen, state = rounds_of(controller, 317, lambda spent: {})
    assert (len(chosen), sum(chosen)) == (317, 1585)
    assert chosen[:3] == [1, 2, 4]
    assert set(chosen[3:]) <= {5, 6}
    # All but the first, whose τ is 1 by definition, were split evenly, and the state says so.
    assert state.numbers["control/even"] == 316


def test_the_choice_is_that_of_the_theory():
    """With estimates of every kind, τ is best_tau of the drift that they make."""
    answer = {"pairs": 1.0, "change": 0.01, "distance": 1.0, "length": 1.0, "square": 1.0}
    answer |= {"noise": 0.0}
    controller = Controller(Ali(kappa=0.12, iterations=1585), 0.5)
    chosen, state = rounds_of(controller, 317, lambda spent: answer)
    drift = tau_control.Drift(0.5, 1.0, 0.1, 1.0)
    spent, previous = 1, 1
    for number, steps in enumerate(chosen[1:], 1):
        left = tau_control.allowed_iterations(1585 - spent, 317 - number)
        assert steps == tau_control.best_tau(
            drift, 0.12, left, min(2 * previous, 1585 - spent, 100)
        )
        spent, previous = spent + steps, steps
    assert max(chosen) == 3
    assert state.numbers["control/even"] == 0
    # A larger κ works more: up to the even split; a smaller one less.
    counts = [
        sum(rounds_of(Controller(Ali(kappa=k, iterations=1585), 0.5), 317, lambda _: answer)[0])
        for k in (1e-3, 100.0)
    ]
    assert counts == [317, 1585]
    assert 317 < sum(chosen) < 1585


@pytest.mark.parametrize("unit", [1e-3, 7.0])
def test_without_kappa_the_unit_of_the_loss_does_not_matter(unit):
    """a times the loss with η/a is the same run: gradients and β grow by a, and κ = c ρ² by a²."""
    answer = {"pairs": 1.0, "change": 1.5, "distance": 0.7, "length": 1.3, "square": 0.9}
    answer |= {"noise": 0.01}
    other = {name: value * unit**2 for name, value in answer.items()}
    other |= {"pairs": 1.0, "distance": 0.7}
    one, _ = rounds_of(Controller(Ali(iterations=400), 0.5), 60, lambda spent: answer)
    two, _ = rounds_of(Controller(Ali(iterations=400), 0.5 / unit), 60, lambda spent: other)
    assert one == two
    assert 1 < max(one) < 7
    given = Ali(iterations=400, kappa=tau_control.KAPPA * 1.3)
    assert rounds_of(Controller(given, 0.5), 60, lambda spent: answer)[0] == one


def test_seconds_allow_fewer_rounds_of_more_steps():
    """T(τ) = τ · seconds/(d_com + d_cmp τ), and not more than the rounds that are left allow."""
    left = tau_control.rounds_left(
        {"rounds": 100.0, "seconds": 30.0, "round_seconds": 1.0, "step_seconds": 0.5}
    )
    assert [left(1), left(4)] == [20.0, 10.0]
    cheap = tau_control.rounds_left({"rounds": 100.0, "seconds": math.inf, "round_seconds": 1.0})
    assert cheap(7) == 100.0
    unmeasured = tau_control.rounds_left({"rounds": 9.0, "seconds": 30.0})
    assert unmeasured(3) == 9.0
    over = tau_control.rounds_left({"rounds": 9.0, "seconds": -1.0, "round_seconds": 1.0})
    assert over(3) == 0.0
    controller = Controller(Ali(iterations=100), RATE)
    state = first_state(controller)
    for steps in (1, 2, 4):
        state = begun(state, rounds=99.0, seconds=20.0, round_seconds=2.0, step_seconds=0.0)
        assert controller.steps(state) == steps
        answer = iter([told(ANSWER)])
        state = controller.update(state, answer, lambda rest, got: weighted_mean(got))


def test_no_more_local_steps_than_allowed():
    assert Controller(Ali(most_local_steps=7), RATE).steps(None) == 7
    chosen, _ = rounds_of(Controller(Ali(most_local_steps=3, iterations=50), RATE), 9, lambda _: {})
    assert chosen == [1, 2] + [3] * 7


def test_the_least_of_the_sites_reservations_counts():
    controller = Controller(Ali(), RATE)
    state = begun(first_state(controller), rounds=9.0)
    answers = [told({**ANSWER, "steps_left": left}) for left in (7.0, 3.0, tau_site.UNLIMITED)]
    after = controller.update(state, iter(answers), lambda rest, got: weighted_mean(got))
    assert after.numbers["control/iterations"] == 3.0


@pytest.mark.parametrize("opens", [False, True])
def test_a_site_that_says_it_has_less_does_not_end_the_run(opens):
    """Before, one site with steps_left = 0 ended it for all, in any round."""
    controller = Controller(Ali(iterations=50), RATE, opens)
    state, mean = first_state(controller), lambda rest, got: weighted_mean(got)
    left = 50.0
    for number in range(3):
        state = begun(state, rounds=9.0 - number)
        steps = controller.steps(state)
        said = left - steps if number == 0 else 0.0
        answer = told({**ANSWER, "steps_left": said})
        state = controller.update(state, iter([answer]), mean)
        # An opening may be an event like a step's; then a round takes one more.
        left -= steps + (opens and number > 0)
        assert state.numbers["control/iterations"] == left


def test_nothing_limits_a_plain_run_without_iterations():
    _, state = rounds_of(Controller(Ali(), RATE), 3, lambda _: {})
    assert "control/iterations" not in state.numbers


# ---------------------------------------------------------------- raw estimates, and what passes


def test_raw_estimates_are_the_papers():
    """ρ_i, β_i by the quotients at w_i and w; ξ² by the exact gradients; as the paper defines."""
    made, w = sites(3, v=0.0)
    controller = Controller(Ali(estimator="raw"), RATE)
    memories, state = {}, controller.init(State({"w": w}))
    for number in (1, 2):
        w = state.vectors["w"]
        models = {n: m.vectors["control/w"] for n, m in memories.items()}
        state = begun(state, rounds=9.0)
        steps = controller.steps(state)
        answers = list(replies(controller, made, w, steps, memories))
        state = controller.update(state, iter(answers), lambda rest, got: weighted_mean(got))
        assert state.numbers["control/pairs"] == number - 1
    lipschitz, smoothness, gradients = [], [], []
    for name, (q, _) in made.items():
        distance = float((models[name] - w).norm())
        lipschitz.append(abs(q.unprotected(models[name])[0] - q.unprotected(w)[0]) / distance)
        smoothness.append(float((q.h @ (models[name] - w)).norm()) / distance)
        gradients.append(q.exact(w))
    middle = mean_over(made, gradients)
    spread = mean_over(made, [float((g - middle).square().sum()) for g in gradients])
    drift = tau_control.drift(
        {k.removeprefix(CONTROL_PREFIX): v for k, v in state.numbers.items()}, RATE, len(w)
    )
    assert drift.lipschitz == pytest.approx(mean_over(made, lipschitz))
    assert drift.smoothness == pytest.approx(mean_over(made, smoothness))
    assert drift.spread == pytest.approx(math.sqrt(spread))


def test_watch_shows_released_values_only():
    made, w = sites(1)
    oracle = made["s0"][0]
    watched = tau_site.RecordingOracle(oracle)
    assert watched.noise_variance == oracle.v
    model = sgd(watched, w, 3, RATE)
    assert watched.count == 3
    torch.testing.assert_close(w - model, RATE * watched.total)
    assert torch.equal(watched.first.w, w)
    torch.testing.assert_close(watched.last.w - RATE * watched.last.g, model)


def test_every_reply_has_the_same_numbers():
    """A server of a deployment knows the form of a reply without having been at the site."""
    made, w = sites(1)
    memories, names = {}, set()
    for steps in (1, 1, 3):
        (reply,) = replies(CONTROLLER, made, w, steps, memories)
        names.add(frozenset(reply.numbers))
        assert all(math.isfinite(value) for value in reply.numbers.values())
    assert len(names) == 1


def test_dot_is_the_sum_of_products():
    x = torch.randn(10_003, generator=torch.Generator().manual_seed(0))
    exact = math.fsum(float(a) * float(b) for a, b in zip(x, x.flip(0), strict=True))
    assert tau_site.dot(x, x.flip(0)) == pytest.approx(exact, rel=1e-12, abs=1e-9)


def test_weights_are_checked():
    fold = tau_control.Fold(torch.zeros(2), 1, RATE)
    bad = Reply("run", 1, "a", math.nan, {"w": torch.zeros(2)}, {})
    with pytest.raises(InputError, match="weight"):
        list(fold.through([bad]))
