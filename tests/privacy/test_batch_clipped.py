"""Batch clipping: one record moves the release by up to 2C, and that is what is accounted for."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import recounted
from tests.policies import GENEROUS
from torch import nn

from fedpact.common.errors import InputError, ModelError, PlanError, PolicyRefused
from fedpact.common.losses import cross_entropy
from fedpact.common.params import FlatModel
from fedpact.common.randomness.seeded import SeededDraws
from fedpact.per_sample.kernel import PerSampleKernel, PlainKernel
from fedpact.plan import Plan
from fedpact.privacy.accounting.accountant import Budget
from fedpact.privacy.accounting.calibration import smallest_sigma
from fedpact.privacy.batches import BatchClippedKernel
from fedpact.privacy.mechanisms import sensitivity
from fedpact.privacy.noise import calibrate
from fedpact.privacy.noise import with_noise as given_noise
from fedpact.privacy.oracle import Fair, PlainOracle, PrivateOracle, Records
from fedpact.privacy.policy import Policy
from fedpact.privacy.terms import Terms

CLIP = 0.5
TERMS = Terms(
    "a", 40.0, 1.0, CLIP, {"gradient": 0.0}, 10, Budget(2.0, 1e-5), "best", "batch_clipped"
)
DRAWS = SeededDraws(5, "a", 1)


def itself(outputs, y, /):
    """A loss whose gradient at every weight is the record: x without a bias."""
    del y
    return outputs[:, 0]


def linear(features, loss=itself, dtype=torch.float64):
    return BatchClippedKernel(FlatModel(nn.Linear(features, 1, bias=False, dtype=dtype)), loss)


def records(rows, dtype=torch.float64):
    x = torch.as_tensor(rows, dtype=dtype)
    x = x[:, None] if x.dim() == 1 else x
    return Records(x, torch.zeros(len(rows), dtype=torch.int64))


def free(*_):
    """Charge nothing."""


def release(held, terms=TERMS, kernel=None):
    features = held.x.shape[1]
    kernel = kernel or linear(features, dtype=held.x.dtype)
    oracle = PrivateOracle(held, kernel, terms, DRAWS, free)
    return next(oracle.batches(1, "gradient")).gradient(torch.zeros_like(kernel.model.vector))


# Sensitivity

LARGE = st.floats(-1e6, 1e6)
ROW = st.lists(LARGE, min_size=2, max_size=2)
# Traced once: each is most of what an example would cost.
KERNELS = {kind: linear(2, dtype=kind) for kind in (torch.float32, torch.float64)}


@given(rows=st.lists(ROW, max_size=6), row=ROW, dtype=st.sampled_from(["float32", "float64"]))
@settings(deadline=None, max_examples=50)
def test_one_record_moves_the_release_by_2c_at_most(rows, row, dtype):
    """Before noise, on one batch (q = 1); from the empty batch on."""
    kind = getattr(torch, dtype)
    x = torch.tensor([*rows, row], dtype=kind)
    less, more = (
        release(records(part, kind), kernel=KERNELS[kind]).double() for part in (x[:-1], x)
    )
    assert less.norm() <= CLIP
    assert more.norm() <= CLIP
    allowed = CLIP * sensitivity("batch_clipped", "gradient")
    assert (more - less).norm() <= allowed


@pytest.mark.parametrize("rows", [[1.0], [1.0] * 9, [0.5, 2.0, 0.6]])
def test_2c_is_attained_so_that_nothing_less_will_do(rows):
    """A record that turns the mean round: from +C to -C."""
    away = release(records([*rows, -100.0])) - release(records(rows))
    assert sensitivity("batch_clipped", "gradient") == 2.0
    assert float(away.abs()) == pytest.approx(2 * CLIP, rel=2e-6)


def test_one_record_alone_moves_the_empty_batch_by_c():
    assert torch.equal(release(records(torch.zeros(0, 1))), torch.zeros(1).double())
    assert float(release(records([-3.0]))) == pytest.approx(-CLIP, rel=2e-6)


# The release, by hand


@pytest.mark.parametrize(
    ("size", "clip", "dtype"), [(1.0, CLIP, torch.float64), (40.0, 1e4, torch.float32)]
)
def test_the_release_is_the_clipped_mean_of_the_batch_plus_noise(size, clip, dtype):
    """Over the realised batch size, whatever the declared one."""
    held = records((torch.arange(30.0).reshape(10, 3) / 20 - 0.6) * clip, dtype)
    terms = dataclasses.replace(TERMS, rate=0.3, size=size, clip=clip, sigmas={"gradient": 1.5})
    lengths, oracle = [], PrivateOracle(held, linear(3, dtype=dtype), terms, DRAWS, free)
    for step, asked in enumerate(oracle.batches(120, "gradient")):
        batch = held.x[DRAWS.batch(10, 0.3, step)]
        mean = batch.mean(0) if len(batch) else torch.zeros(3, dtype=dtype)
        lengths.append(float(mean.norm()))
        clipped = mean * min(1.0, clip / max(lengths[-1], 1e-300))
        noise = DRAWS.gaussian(3, mean, step, "gradient")
        found = asked.gradient(torch.zeros_like(mean))
        expected = clipped + 1.5 * clip * noise
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-6 * clip)
    assert min(lengths) < clip < max(lengths)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e308])
def test_a_record_that_is_not_finite_adds_nothing_to_the_mean(value):
    """It is in the batch's size all the same; a batch of nothing else is nothing but noise."""
    half = records([[0.25, 0.5], [value, value]])
    assert torch.equal(release(half), torch.tensor([0.125, 0.25]).double())
    held = records([[value, value]])
    assert torch.equal(release(held), torch.zeros(2).double())
    terms = dataclasses.replace(TERMS, sigmas={"gradient": 1.5})
    noise = DRAWS.gaussian(2, held.x, 0, "gradient")
    torch.testing.assert_close(release(held, terms), 1.5 * CLIP * noise, rtol=1e-12, atol=0)


def test_without_noise_and_clip_it_is_the_plain_mean():
    """At q = 1 the plain oracle's divisor q N is the number of records."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20, 3, generator=generator, dtype=torch.float64)
    held = Records(x, torch.randint(2, (20,), generator=generator))
    model = FlatModel(nn.Linear(3, 2, dtype=torch.float64))
    w = torch.randn(8, generator=generator, dtype=torch.float64)
    exact = PlainOracle(held, PlainKernel(model, cross_entropy), 1.0, 20.0, DRAWS)
    terms = dataclasses.replace(TERMS, clip=math.inf)
    kernel = BatchClippedKernel(model, cross_entropy)
    one = next(PrivateOracle(held, kernel, terms, DRAWS, free).batches(1, "gradient"))
    other = next(exact.batches(1, "gradient"))
    torch.testing.assert_close(one.gradient(w), other.gradient(w), rtol=1e-12, atol=1e-15)


# The accounting

COMMON = {
    "site": "a",
    "size": 5000.0,
    "clip": CLIP,
    "rate": 0.015,
    "sigmas": {"gradient": 1.0},
    "steps": 300,
    "budget": Budget(2.0, 1e-5),
    "mechanism": "batch_clipped",
}


def calibrated(**asked):
    return calibrate(Terms(**asked))


def with_noise(sigma, **asked):
    return given_noise(Terms(**asked), sigma)


@pytest.mark.parametrize(
    ("accountant", "rate", "steps"), [("rdp", 0.015, 300), ("pld", 0.25, 40), ("pld", 1.0, 10)]
)
def test_calibration_spends_the_budget_at_half_of_sigma(accountant, rate, steps):
    asked = {**COMMON, "rate": rate, "steps": steps, "accountant": accountant}
    terms = calibrated(**asked)
    sigma = terms.sigmas["gradient"]
    assert sigma == 2 * smallest_sigma(Budget(2.0, 1e-5), rate, steps, accountant)
    assert (terms.event.q, terms.event.sigma) == (rate, sigma / 2)
    spent = recounted.epsilon([(rate, sigma / 2, steps)], 1e-5, accountant)
    assert 0.99 * 2 <= spent <= 2 * (1 + 1e-3)  # other grids, other orders
    # With the sensitivity taken for C the same noise would seem to cost far less.
    assert recounted.epsilon([(rate, sigma, steps)], 1e-5, accountant) < 0.7 * 2
    # Given back as the plan's sigma it allows the same steps.
    given = with_noise(**asked | {"sigma": sigma})
    assert (given.sigmas, given.steps, given.event) == (terms.sigmas, steps, terms.event)


def test_other_channels_on_the_batch_keep_their_own_sensitivity():
    terms = with_noise(
        **COMMON | {"sigmas": {"gradient": 1.0, "loss": 2.5, "below": 10.0}},
        sigma=4.0,
        accountant="rdp",
    )
    assert terms.multipliers == {"gradient": 2.0, "loss": 10.0, "below": 40.0}
    assert terms.event.sigma == pytest.approx((2.0**-2 + 10.0**-2 + 40.0**-2) ** -0.5, rel=1e-12)
    whole = calibrated(**COMMON | {"sigmas": {"gradient": 1.0, "loss": 2.5}}, accountant="rdp")
    least = smallest_sigma(Budget(2.0, 1e-5), 0.015, 300, "rdp")
    assert least <= whole.event.sigma <= least * (1 + 1e-12)


def test_a_channel_without_a_known_sensitivity_is_refused():
    for sigmas in ({"gradient": 1.0, "difference": 1.0}, {"difference": 1.0}):
        with pytest.raises(PlanError, match="'difference' has no known sensitivity"):
            dataclasses.replace(TERMS, sigmas=sigmas)
        with pytest.raises(PlanError, match="'difference' has no known sensitivity"):
            calibrated(**COMMON | {"sigmas": sigmas}, accountant="best")


def test_policys_smallest_sigma_applies_to_the_multiplier():
    policy = Policy.parse(GENEROUS | {"smallest_sigma": 1.0})
    enough, less = (dataclasses.replace(TERMS, sigmas={"gradient": s}) for s in (2.0, 1.99))
    policy.check_run("fedavg", enough, (0.0, 0.0))
    with pytest.raises(PolicyRefused, match=r"sigma would be 0\.995"):
        policy.check_run("fedavg", less, (0.0, 0.0))


# What is refused


def test_weights_of_records_are_refused():
    oracle = PrivateOracle(records([1.0]), linear(1), TERMS, DRAWS, free)
    batch = next(oracle.batches(1, "gradient"))
    with pytest.raises(PolicyRefused, match="there is no clip per record"):
        batch.gradient(torch.zeros(1).double(), Fair(0.1, 0.0))


def test_a_plan_that_weights_records_is_refused_at_the_start():
    raw = {"algorithm": "fedfdp", "privacy": {"mode": "batch_clipped"}}
    with pytest.raises(PlanError, match="weights each record within its clip"):
        Plan.parse(raw)
    Plan.parse({**raw, "settings": {"fairness_weight": 0.0}})
    Plan.parse({**raw, "privacy": {"mode": "per_sample"}})


@pytest.mark.parametrize(
    ("mechanism", "kernel"),
    [("per_sample", BatchClippedKernel), ("batch_clipped", PerSampleKernel)],
)
def test_kernel_with_other_clipping_releases_nothing(mechanism, kernel):
    made = kernel(FlatModel(nn.Linear(1, 1, bias=False, dtype=torch.float64)), itself)
    with pytest.raises(AttributeError):
        release(records([1.0]), dataclasses.replace(TERMS, mechanism=mechanism), made)


def test_batch_norm_is_refused():
    model = FlatModel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    with pytest.raises(ModelError, match="BatchNorm"):
        BatchClippedKernel(model, itself)


class Counting(nn.Linear):
    """A buffer that keeps what has passed."""

    def __init__(self):
        super().__init__(2, 1)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x, /):  # type: ignore[override]
        self.seen += x.detach().sum(0)
        return super().forward(x)


def test_a_model_that_keeps_what_it_saw_is_refused():
    with pytest.raises(ModelError, match="a pass changes seen"):
        BatchClippedKernel(FlatModel(Counting()), itself).verify(torch.ones(3, 2), torch.ones(3))


def test_python_state_from_a_batch_enters_no_other_batch():
    """A loss that turns round once it has seen a record: sampling would save nothing against it."""
    seen = []

    def remembering(outputs, y, /):
        each = itself(outputs, y)
        if torch.compiler.is_compiling():
            return each
        turned = any(value > 1e6 for value in seen)
        seen.append(float(outputs.detach().abs().max()))
        return -each if turned else each

    x, y = torch.randn(8, 2, generator=torch.Generator().manual_seed(0)).double(), torch.zeros(8)
    kernel = linear(2, remembering)
    before = kernel.clipped_mean(x, y, 1.0)
    kernel.clipped_mean(torch.full((1, 2), 1e9).double(), y[:1], 1.0)
    assert torch.equal(kernel.clipped_mean(x, y, 1.0), before)


def test_weights_too_coarse_to_clip_by_are_refused():
    with pytest.raises(InputError, match="float16"):
        linear(2, dtype=torch.float16)
