"""What the oracle releases, by hand: what is charged, sampled, clipped, noised and divided by."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn

from fedpact.common.errors import BudgetExhausted, InputError, ModelError, PolicyRefused
from fedpact.common.losses import cross_entropy
from fedpact.common.params import FlatModel
from fedpact.common.randomness.seeded import SeededDraws, seeded_generator
from fedpact.per_sample.kernel import PerSampleKernel, PlainKernel
from fedpact.privacy.accounting.accountant import Budget, joint
from fedpact.privacy.batches import BatchClippedKernel, clip_for
from fedpact.privacy.ledger.hash_chain import read_entries
from fedpact.privacy.ledger.ledger import Ledger
from fedpact.privacy.oracle import Charge, Fair, PlainOracle, PrivateOracle, Records, Uniform
from fedpact.privacy.terms import Terms

SIGMAS = {"gradient": 1.5, "loss": 4.0, "below": 10.0}
TERMS = Terms("a", 40.0, 0.3, 0.5, SIGMAS, 10, Budget(50.0, 1e-5), "best")
DRAWS = SeededDraws(5, "a", 1)


def model(features: int = 3, dtype: torch.dtype = torch.float64) -> FlatModel:
    return FlatModel(nn.Linear(features, 2, dtype=dtype))


def point(size: int) -> Tensor:
    return torch.randn(size, generator=seeded_generator("w"), dtype=torch.float64)


def records(count: int = 30, features: int = 3) -> Records:
    x = torch.randn(count, features, generator=seeded_generator("x"), dtype=torch.float64)
    return Records(x, torch.randint(2, (count,), generator=seeded_generator("y")))


def free(*_: object) -> None:
    """Charge nothing."""


def private(
    held: Records, terms: Terms = TERMS, charge: Callable[..., None] = free, **other: Any
) -> PrivateOracle:
    kernel = other.get("kernel") or PerSampleKernel(model(held.x.shape[1]), cross_entropy)
    return PrivateOracle(held, kernel, terms, other.get("draws", DRAWS), charge)


def plain(held: Records, rate: float = 0.3, size: float = 40.0) -> PlainOracle:
    return PlainOracle(held, PlainKernel(model(held.x.shape[1]), cross_entropy), rate, size, DRAWS)


def each(held: Records, w: Tensor) -> tuple[Tensor, Tensor]:
    """Losses [n] and gradients [n, d] at w, one record at a time, by ordinary autograd."""
    weight = w[:-2].view(2, -1).clone().requires_grad_()
    bias = w[-2:].clone().requires_grad_()
    losses, rows = [], []
    for x, y in zip(held.x, held.y, strict=True):
        loss = -torch.log_softmax(weight @ x + bias, 0)[y]
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, [weight, bias])]))
        losses.append(loss.detach())
    return torch.stack(losses), torch.stack(rows)


def chosen(step: int, held: Records) -> Tensor:
    return DRAWS.batch(len(held.y), TERMS.rate, step)


# The releases, by hand


@pytest.mark.parametrize(
    ("weighting", "bound"),
    [(Uniform(), 0.5), (Fair(2.0, 0.7), 1e-3), (Fair(0.0, 0.7), 0.1), (Fair(1e300, 0.0), 0.5)],
)
def test_gradient_is_noisy_clipped_sum_over_expected_size(weighting, bound):
    held, w, terms = records(), point(8), dataclasses.replace(TERMS, clip=bound)
    losses, rows = each(held, w)
    norms = rows.norm(dim=1)
    weights = torch.ones_like(losses)
    if isinstance(weighting, Fair):
        weights = (1 + weighting.lam * (losses - weighting.reference)).clamp(min=0)
    clip = clip_for(bound, 0.3 * 40)
    shares = rows * torch.minimum(weights, clip / norms)[:, None]
    assert shares.norm(dim=1).max() <= clip * (1 + 1e-12)
    assert (norms > bound).any()
    for step, batch in enumerate(private(held, terms).batches(4, "gradient")):
        noise = DRAWS.gaussian(8, w, step, "gradient")
        total = shares[chosen(step, held)].sum(0) + 1.5 * bound * noise
        assert torch.allclose(batch.gradient(w, weighting), total / (0.3 * 40), rtol=0, atol=1e-12)


def test_one_record_moves_a_loss_sum_by_at_most_its_bound():
    """S(D + r) - S(D), of one noise, to 10^-9 of the bound; float32 is off by 10^-3."""
    many, bound = 100_000, 0.7
    x = torch.randn(many, 3, generator=seeded_generator("x"), dtype=torch.float32)
    held = Records(x, torch.randint(2, (many,), generator=seeded_generator("y")))
    terms = dataclasses.replace(TERMS, rate=1.0, sigmas={"gradient": 1.0, "loss": 1.0})
    kernel = PerSampleKernel(model(dtype=torch.float32), cross_entropy)
    sums = list[float]()
    for x, y in ((held.x[1:], held.y[1:]), (held.x, held.y)):
        batch = next(iter(private(Records(x, y), terms, kernel=kernel).batches(1, "loss")))
        sums.append(batch.loss(point(8).float(), bound) * terms.batch_size)
    kernel.model.load(point(8).float())
    own = kernel.losses(held.x[:1], held.y[:1]).double().clamp(0, bound)
    assert sums[1] - sums[0] == pytest.approx(float(own), abs=1e-9)


def test_loss_is_noisy_clipped_sum_over_expected_size():
    held, w, bound = records(), point(8), 0.6
    losses, _ = each(held, w)
    assert (losses > bound).any()
    for step, batch in enumerate(private(held).batches(4, "loss")):
        noise = float(DRAWS.gaussian(1, w, step, "loss"))
        total = float(losses[chosen(step, held)].clamp(max=bound).sum()) + 4.0 * bound * noise
        assert batch.loss(w, bound) == pytest.approx(total / (0.3 * 40), rel=1e-12)


@pytest.mark.parametrize("bound", [1e-306, 2.0**-101, 2.0**101, math.inf, math.nan, 0.0, -1.0])
def test_a_bound_that_has_no_digits_is_refused(bound):
    batch = next(iter(private(records()).batches(1, "loss", "below")))
    # A count has digits for any bound that is a number.
    for release in (batch.loss,) if 0 < bound < math.inf else (batch.loss, batch.below):
        with pytest.raises(InputError, match="bound is"):
            release(point(8), bound)


def test_the_share_below_is_a_sum_of_halves_plus_noise():
    held, w, bound = records(), point(8), 0.6
    losses, _ = each(held, w)
    for step, batch in enumerate(private(held).batches(4, "below")):
        noise = float(DRAWS.gaussian(1, w, step, "below"))
        among = losses[chosen(step, held)] <= bound
        total = float(among.sum()) - 0.5 * len(among) + 10.0 * 0.5 * noise
        assert batch.below(w, bound) == pytest.approx(total / (0.3 * 40) + 0.5, rel=1e-12)


def test_losses_below_zero_count_as_zero():
    def negative(outputs: Tensor, y: Tensor, /) -> Tensor:
        return -cross_entropy(outputs, y)

    held = records()
    kernel = PerSampleKernel(model(), negative)
    batch = next(private(held, kernel=kernel).batches(1, "loss"))
    noise = float(DRAWS.gaussian(1, point(8), 0, "loss"))
    assert batch.loss(point(8), 0.6) == pytest.approx(4.0 * 0.6 * noise / 12, rel=1e-12)


def test_the_divisor_is_the_declared_size_whatever_the_true_one():
    held, w = records(), point(8)
    assert each(held, w)[1].norm(dim=1).max() < 50
    # A clip that nobody reaches: what the oracle takes off it follows from the declared size.
    one, other = (
        next(private(held, dataclasses.replace(TERMS, size=size, clip=100.0)).batches(1, *SIGMAS))
        for size in (40.0, 10.0)
    )
    assert torch.allclose(one.gradient(w) * 40, other.gradient(w) * 10, rtol=1e-12)
    assert one.loss(w, 1.0) * 40 == pytest.approx(other.loss(w, 1.0) * 10, rel=1e-12)
    assert (one.below(w, 1.0) - 0.5) * 40 == pytest.approx((other.below(w, 1.0) - 0.5) * 10)


@pytest.mark.parametrize("held", [records(0), records(3)])
def test_an_empty_batch_yields_noise_alone(held):
    terms = dataclasses.replace(TERMS, rate=1e-12)
    w, expected = point(8), 40 * 1e-12
    batch = next(private(held, terms).batches(1, *SIGMAS))
    noise = DRAWS.gaussian(8, w, 0, "gradient")
    assert torch.allclose(batch.gradient(w), 1.5 * 0.5 * noise / expected, rtol=1e-12)
    noise = float(DRAWS.gaussian(1, w, 0, "loss"))
    assert batch.loss(w, 2.0) == pytest.approx(4.0 * 2.0 * noise / expected, rel=1e-12)
    noise = float(DRAWS.gaussian(1, w, 0, "below"))
    assert batch.below(w, 2.0) == pytest.approx(10.0 * 0.5 * noise / expected + 0.5, rel=1e-12)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e200])
def test_a_record_that_is_not_finite_adds_nothing(value):
    terms = dataclasses.replace(TERMS, rate=1.0)
    held, w = records(), point(8)
    spoilt = held.x.clone()
    spoilt[[4, 9]] = value
    keep = [j for j in range(30) if j not in (4, 9)]
    with_them = next(private(Records(spoilt, held.y), terms).batches(1, *SIGMAS))
    without = next(private(Records(held.x[keep], held.y[keep]), terms).batches(1, *SIGMAS))
    # The loss at 1e200 is a number, clipped as any other; its gradient's norm is none.
    if value != 1e200:
        assert with_them.loss(w, 1.0) == pytest.approx(without.loss(w, 1.0), rel=1e-12)
        assert with_them.below(w, 1.0) == pytest.approx(without.below(w, 1.0), rel=1e-12)
    found = with_them.gradient(w)
    assert found.isfinite().all()
    assert torch.allclose(found, without.gradient(w), rtol=1e-12)


def test_a_model_that_has_diverged_releases_noise_alone():
    held, w = records(), torch.full((8,), math.nan, dtype=torch.float64)
    batch = next(private(held).batches(1, *SIGMAS))
    assert torch.allclose(batch.gradient(w), 0.75 * DRAWS.gaussian(8, w, 0, "gradient") / 12)
    assert math.isfinite(batch.loss(w, 1.0))
    assert math.isfinite(batch.below(w, 1.0))


# The noise


@pytest.mark.parametrize(
    ("clip", "dtype"), [(1e-3, torch.float32), (1e4, torch.float32), (1e4, torch.float64)]
)
def test_noise_is_sigma_clip_in_either_precision(clip, dtype):
    """Beside the sum without noise, which is far smaller than it at a declared size of 10^6."""
    held, w = Records(records().x.to(dtype), records().y), point(8).to(dtype)
    found = []
    for sigma in (1.5, 0.0):
        terms = dataclasses.replace(TERMS, clip=clip, size=1e6, sigmas={"gradient": sigma})
        kernel = PerSampleKernel(model(dtype=dtype), cross_entropy)
        batches = private(held, terms, kernel=kernel).batches(3, "gradient")
        found.append([batch.gradient(w) * (0.3 * 1e6) for batch in batches])
    for step, (noisy, exact) in enumerate(zip(*found, strict=True)):
        assert noisy.dtype == dtype
        noise = 1.5 * clip * DRAWS.gaussian(8, w, step, "gradient")
        assert torch.allclose(noisy - exact, noise, rtol=1e-4, atol=1e-4 * clip)


# Order: charge, draw, read


class Refusing:
    """Stands in for the kernel and the draws of a site that must not be touched."""

    repeats = True

    def seed(self, _: object) -> None:
        """Told what a model's random numbers would be drawn by, which draws none."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AssertionError(f"{name} was used before the charge")


def test_nothing_is_drawn_or_read_before_the_charge():
    def broke(*_: object) -> NoReturn:
        raise BudgetExhausted("spent")

    oracle = private(records(), charge=broke, kernel=Refusing(), draws=Refusing())
    for _ in range(2):
        with pytest.raises(BudgetExhausted):
            next(oracle.batches(1, "gradient"))


def test_all_steps_are_charged_before_the_first_batch_is_drawn():
    log: list[object] = []

    class Logged(SeededDraws):
        def batch(self, records: int, rate: float, step: int) -> Tensor:
            log.append(("batch", step))
            return super().batch(records, rate, step)

    def charge(_: Terms, first: int, count: int, channels: tuple[str, ...]) -> None:
        log.append((first, count, channels))

    oracle = private(records(), charge=charge, draws=Logged(5, "a", 1))
    for batch in oracle.batches(2, "gradient", "loss"):
        batch.loss(point(8), 1.0)
    next(oracle.batches(1, "below"))
    charges = [(0, 2, ("gradient", "loss")), (2, 1, ("below",))]
    assert log == [charges[0], ("batch", 0), ("batch", 1), charges[1], ("batch", 2)]


@pytest.mark.parametrize("chosen", [[1, 3], [], [0, 1, 2, 3]])
def test_records_are_copies_of_those_of_the_indices(chosen):
    """Whoever writes over them, a model or a loss, leaves the site's own as they are."""
    rows = torch.arange(12.0).view(4, 3)
    records = Records(rows.clone(), torch.arange(4))
    x, y = records.at(torch.tensor(chosen, dtype=torch.int64))
    assert (x.tolist(), y.tolist()) == (rows[chosen].tolist(), chosen)
    x.zero_()
    y.zero_()
    assert torch.equal(records.x, rows)
    assert records.y.tolist() == [0, 1, 2, 3]


class Branching(nn.Module):
    """Looks at a record's numbers, so it is given each by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.where(x.sort(0).values > 9, x, torch.relu(x)))


@pytest.mark.parametrize(
    ("module", "way"),
    [
        (nn.Linear(3, 2), "dense"),
        (nn.Sequential(nn.Linear(3, 4), nn.ELU(inplace=True), nn.Linear(4, 2)), "graph"),
        (nn.Sequential(nn.LayerNorm(3), nn.Softmax(1), nn.Linear(3, 2)), "graph"),
        (Branching(), "records"),
    ],
)
def test_a_full_batch_is_not_copied_and_left_unchanged(module, way):
    held = records(70)
    before = held.x.clone(), held.y.clone()
    terms = dataclasses.replace(TERMS, rate=1.0, sigmas={**SIGMAS, "difference": 2.0})
    oracle = private(held, terms, kernel=PerSampleKernel(FlatModel(module.double()), cross_entropy))
    w = point(oracle._kernel.model.size)
    for batch in oracle.batches(2, *SIGMAS, "difference"):
        assert batch._x.data_ptr() == held.x.data_ptr()
        batch.gradient(w)
        batch.difference(w, w + 1, 0.5)
        batch.loss(w, 2.0)
        batch.below(w, 1.0)
    assert torch.equal(held.x, before[0])
    assert torch.equal(held.y, before[1])
    assert oracle._kernel.way(held.x, held.y) == way


def test_a_batch_that_is_clipped_as_a_whole_is_a_copy():
    """Its model is any, and may write over what it is given."""
    held = records(8)
    before = held.x.clone()
    module = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 2)).double()
    kernel = BatchClippedKernel(FlatModel(module), cross_entropy)
    terms = dataclasses.replace(
        TERMS, rate=1.0, sigmas={"gradient": 1.0}, mechanism="batch_clipped"
    )
    for batch in private(held, terms, kernel=kernel).batches(2, "gradient"):
        batch.gradient(point(8))
    assert torch.equal(held.x, before)


@pytest.mark.parametrize("count", [0, -1, True, 1.0, math.nan])
def test_an_invalid_count_is_refused_before_the_charge(count):
    for oracle in (private(records(), charge=Refusing()), plain(records())):  # type: ignore[arg-type]
        with pytest.raises(InputError, match="count is"):
            next(iter(oracle.batches(count, "gradient")))


# Channels


@pytest.mark.parametrize("oracle", [private, plain])
def test_a_channel_answers_once_and_not_after_the_next_batch(oracle):
    w = point(8)
    ask: dict[str, Callable[[Any], object]] = {
        "gradient": lambda batch: batch.gradient(w),
        "loss": lambda batch: batch.loss(w, 1.0),
        "below": lambda batch: batch.below(w, 1.0),
    }
    for channel, release in ask.items():
        others = [name for name in ask if name != channel]
        batches: Iterator[Any] = oracle(records()).batches(3, channel)
        first = next(batches)
        release(first)
        for batch, name in [(first, channel), (first, others[0]), (first, others[1])]:
            with pytest.raises(PolicyRefused, match=f"channel '{name}' is not open"):
                ask[name](batch)
        second = next(batches)
        release(next(batches))
        with pytest.raises(PolicyRefused, match="not open"):
            release(second)


def test_a_refused_channel_releases_nothing():
    batch = next(private(records(), kernel=Refusing()).batches(1, "loss"))
    with pytest.raises(PolicyRefused):
        batch.gradient(point(8))


def test_a_weighting_is_of_finite_numbers():
    for lam, reference in [(-1.0, 0.0), (math.nan, 0.0), (math.inf, 0.0), (1.0, math.nan)]:
        with pytest.raises(InputError):
            Fair(lam, reference)


def test_a_point_of_another_model_is_refused():
    batch = next(private(records()).batches(1, "gradient"))
    with pytest.raises(ModelError):
        batch.gradient(point(9))


# The plain twin


@pytest.mark.parametrize("weighting", [Uniform(), Fair(0.3, 0.7)])
def test_without_noise_and_clip_the_two_oracles_agree(weighting):
    held, w = records(), point(8)
    terms = dataclasses.replace(TERMS, clip=math.inf, sigmas=dict.fromkeys(SIGMAS, 0.0))
    pairs = zip(
        private(held, terms).batches(3, *SIGMAS), plain(held).batches(3, *SIGMAS), strict=True
    )
    for one, other in pairs:
        assert torch.allclose(one.gradient(w, weighting), other.gradient(w, weighting), rtol=1e-9)
        assert one.loss(w, 1e9) == pytest.approx(other.loss(w, 1e9), rel=1e-12)
        assert one.below(w, 0.6) == pytest.approx(other.below(w, 0.6), rel=1e-12)


# With a ledger


@pytest.fixture
def ledger(tmp_path):
    with Ledger(tmp_path / "ledger.jsonl", "a", hypothetical=True) as found:
        found.reserve("run", TERMS.budget, {TERMS.event: TERMS.steps})
        yield found


def charged(ledger: Ledger) -> int:
    return sum(ledger.spent("run").values())


def test_every_batch_is_charged_as_the_joint_event(ledger):
    assert TERMS.event == joint(0.3, [1.5, 4.0, 10.0])
    oracle = private(records(), charge=Charge(ledger, "run", 7, "digest", attempt=1))
    list(oracle.batches(3, *SIGMAS))
    # Fewer channels cost no less: the reservation knows one event.
    list(oracle.batches(2, "gradient"))
    assert ledger.spent("run") == {TERMS.event: 5}
    first, second = read_entries(ledger.path)[-2:]
    assert first["purpose"] == sorted(SIGMAS)
    assert second["purpose"] == ["gradient"]
    for entry, count, step in [(first, 3, 0), (second, 2, 3)]:
        assert (entry["round"], entry["attempt"], entry["count"]) == (7, 1, count)
        assert entry["request"] == f"7/{step}/digest"


def test_the_last_events_are_the_last(ledger):
    oracle = private(records(), charge=Charge(ledger, "run", 1, "digest"))
    list(oracle.batches(9, "gradient"))
    with pytest.raises(BudgetExhausted):
        next(oracle.batches(2, "gradient"))
    next(oracle.batches(1, "gradient"))
    with pytest.raises(BudgetExhausted):
        next(oracle.batches(1, "gradient"))


def test_the_same_request_is_the_same_release_and_charged_once(ledger):
    def ask(digest: str, count: int, *channels: str, number: int = 1) -> list[Tensor]:
        oracle = private(records(), charge=Charge(ledger, "run", number, digest))
        return [batch.gradient(point(8)) for batch in oracle.batches(count, *channels)]

    once = ask("x", 2, "gradient")
    assert charged(ledger) == 2
    again = ask("x", 2, "gradient")
    assert charged(ledger) == 2
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
    longer = ask("x", 3, "gradient")
    assert charged(ledger) == 3
    assert all(torch.equal(a, b) for a, b in zip(once, longer[:2], strict=True))
    for number, other in enumerate([("y", 2, "gradient"), ("x", 2, "gradient", "loss")], start=1):
        ask(*other)
        assert charged(ledger) == 3 + 2 * number
    ask("x", 2, "gradient", number=2)
    assert charged(ledger) == 9


@pytest.mark.parametrize(
    "channels", [(), ("gradient", "gradient"), ("hessian",), ("gradient", "hessian")]
)
def test_channels_outside_the_terms_are_refused(ledger, channels):
    charge = Charge(ledger, "run", 1, "digest")
    oracle = private(records(), charge=charge, kernel=Refusing(), draws=Refusing())
    with pytest.raises(PolicyRefused, match="were asked for"):
        next(oracle.batches(1, *channels))
    assert charged(ledger) == 0


def test_terms_without_noise_cannot_be_charged(ledger):
    terms = dataclasses.replace(TERMS, sigmas=dict.fromkeys(SIGMAS, 0.0))
    charge = Charge(ledger, "run", 1, "digest")
    oracle = private(records(), terms, charge, kernel=Refusing(), draws=Refusing())
    with pytest.raises(InputError, match="sigma is 0"):
        next(oracle.batches(1, "gradient"))


def test_repeating_draws_and_a_real_ledger_do_not_go_together(tmp_path):
    class Fresh(SeededDraws):
        repeats = False

    for hypothetical, draws in [(False, DRAWS), (True, Fresh(5, "a", 1))]:
        with Ledger(tmp_path / str(hypothetical), "a", hypothetical=hypothetical) as real:
            charge = Charge(real, "run", 1, "digest")
            with pytest.raises(PolicyRefused, match="a simulation has both"):
                private(records(), charge=charge, draws=draws)
    with Ledger(tmp_path / "False", "a", hypothetical=False) as real:
        charge = Charge(real, "run", 1, "digest")
        private(records(), charge=charge, draws=Fresh(5, "a", 1))
