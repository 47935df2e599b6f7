"""FedFDP's own parts: the loss bound, the first round, the settings."""

import math
from bisect import bisect_right

import pytest
import torch
from pydantic import ValidationError
from tests.algorithms.made_up import Told

from fedpact.algorithms.fedfdp import Settings, facts, local
from fedpact.common.messages import State, Task
from fedpact.privacy.oracle import Fair, Uniform

# The quantiles of an exponential with mean 1 are -log(1 - γ).
LOSSES = [-math.log(1 - (k + 0.5) / 10_000) for k in range(10_000)]


def share_below(bound):
    return bisect_right(LOSSES, bound) / len(LOSSES)


@pytest.mark.parametrize("quantile", [0.5, 0.9])
@pytest.mark.parametrize("start", [0.02, 9.0], ids=["from below", "from above"])
def test_the_bound_converges_to_the_quantile(quantile, start):
    settings = Settings(loss_quantile=quantile)
    bound = start
    for _ in range(500):
        bound = settings.after(bound, {"below": share_below(bound)})
    assert bound == pytest.approx(-math.log(1 - quantile), rel=1e-3)


@pytest.mark.parametrize("start", [0.02, 9.0])
def test_the_wrong_sign_would_run_away(start):
    """What the test above rejects: with the share of losses above the bound it leaves the range."""
    settings = Settings(loss_quantile=0.5)
    bound = start
    for _ in range(500):
        bound = settings.after(bound, {"below": 1 - share_below(bound)})
    assert bound in (
        pytest.approx(settings.least_loss_bound),
        pytest.approx(settings.most_loss_bound),
    )


def test_a_step_is_the_papers():
    """C ← C exp(-η_q (b - γ)), Andrew et al., their Section 2."""
    settings = Settings(loss_quantile=0.9, quantile_rate=0.2)
    assert settings.after(2.0, {"below": 0.4}) == pytest.approx(2.0 * math.exp(0.1), rel=1e-14)
    assert settings.after(2.0, {"below": 0.9}) == pytest.approx(2.0, rel=1e-14)


@pytest.mark.parametrize(("share", "end"), [(1e9, "least_loss_bound"), (-1e9, "most_loss_bound")])
def test_noise_cannot_drive_the_bound_out_of_its_range(share, end):
    settings = Settings()
    assert settings.after(2.0, {"below": share}) == pytest.approx(getattr(settings, end), rel=1e-14)


def answer(oracle, settings, memory=None, numbers=None):
    task = Task("run", 1, "fedfdp", {"w": torch.zeros(2)}, numbers or {})
    return local(task, oracle, memory or State(), settings)


def test_a_round_is_the_papers():
    oracle, settings = Told(loss=1.5, share=0.4), Settings(learning_rate=0.5, fairness_weight=0.3)
    reply = answer(oracle, settings, State(numbers={"loss_bound": 2.0}), {"loss": 0.7})
    moved = torch.full((2,), -0.5)
    assert oracle.asked[0] == (1, ("gradient", "loss", "below"))
    assert oracle.weightings == [Fair(0.3, 0.7)]
    for w, bound in oracle.asked[1:]:
        assert torch.equal(w, moved)
        assert bound == 2.0
    assert torch.equal(reply.vectors["w"], moved)
    assert reply.numbers == {"loss": 1.5}
    assert reply.memory == State(numbers={"loss_bound": settings.after(2.0, {"below": 0.4})})


@pytest.mark.parametrize(
    "numbers", [{}, {"loss": math.nan}, {"loss": math.inf}, {"loss": -math.inf}], ids=str
)
def test_without_a_finite_reference_the_weighting_is_uniform(numbers):
    """The first round has none; a plain run that diverges has one that is no number."""
    oracle = Told()
    answer(oracle, Settings(), numbers=numbers)
    assert oracle.weightings == [Uniform()]
    assert oracle.asked[1][1] == Settings().loss_bound


def test_without_a_fairness_weight_the_reference_does_not_count():
    """Else 0 times an infinite loss would be no number, where FedAvg's gradient is one."""
    oracle = Told()
    answer(oracle, Settings(fairness_weight=0.0), numbers={"loss": 0.7})
    assert oracle.weightings == [Uniform()]


@pytest.mark.parametrize(
    ("loss", "bound"), [(1.5, 1.5), (-3.0, 0.01), (0.0, 0.01), (50.0, 10.0), (math.nan, 0.01)]
)
def test_papers_rule_uses_the_released_mean_in_its_range(loss, bound):
    reply = answer(Told(loss=loss), Settings(loss_bound_rule="mean"))
    assert reply.memory.numbers == {"loss_bound": bound}


def test_the_papers_rule_only_ratchets_down():
    """E[min(C_l, ℓ)] <= C_l: without noise C_l falls, whatever the losses."""

    class Exact(Told):
        def loss(self, w, bound):
            return sum(min(bound, loss) for loss in LOSSES) / len(LOSSES)

    memory, bounds = State(), []
    for _ in range(30):
        memory = answer(Exact(), Settings(loss_bound_rule="mean"), memory).memory
        bounds.append(memory.numbers["loss_bound"])
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[-1] < 0.1  # while the mean loss is 1


def test_site_with_fewer_records_stays_within_the_ceiling():
    """Its share of losses below is at most (1 + n/N)/2, under γ = 0.9 for n < 0.8 N."""
    settings, memory = Settings(), State()
    for _ in range(200):
        memory = answer(Told(share=0.75), settings, memory).memory  # n = N/2, every loss below
    assert memory.numbers["loss_bound"] == pytest.approx(settings.most_loss_bound, rel=1e-14)


def test_channels_follow_the_rule():
    assert facts(Settings(loss_noise=2.5, count_noise=10.0)).channels == {
        "gradient": 1.0,
        "loss": 2.5,
        "below": 10.0,
    }
    assert set(facts(Settings(loss_bound_rule="mean")).channels) == {"gradient", "loss"}


def test_the_count_costs_half_a_percent_of_the_gradients_noise():
    """σ_joint = σ (Σ r_c^-2)^(-1/2): at a given σ_joint, σ grows with the root of Σ r_c^-2."""

    def growth(settings):
        return math.sqrt(sum(ratio**-2 for ratio in facts(settings).channels.values()))

    assert growth(Settings()) / growth(Settings(loss_bound_rule="mean")) - 1 < 0.005


@pytest.mark.parametrize(
    "wrong",
    [
        {"learning_rate": math.nan},
        {"learning_rate": True},
        {"learning_rate": "0.5"},
        {"loss_bound": 11.0},
        {"least_loss_bound": 3.0},
    ],
    ids=str,
)
def test_settings_are_checked(wrong):
    (name,) = wrong
    with pytest.raises(ValidationError, match=name):
        Settings(**wrong)
