"""Stacked sums against each site's own: float64 to 1e-12 of what was summed, float32 to 1e-5."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from fedpact.common.errors import InputError
from fedpact.common.losses import cross_entropy, squared_error
from fedpact.common.params import FlatModel
from fedpact.common.randomness.keystream import CHUNK, KeyStream
from fedpact.common.randomness.seeded import SeededDraws
from fedpact.models import zoo
from fedpact.per_sample import dense
from fedpact.per_sample.dense import SiteSum
from fedpact.simulation.stacked import NoiseRequest, PlainSeat, Seat, SeatDraws, Stack


def chain(*layers):
    return nn.Sequential(nn.Flatten(), *layers)


MODELS = {
    "logistic": lambda: chain(nn.Linear(12, 3)),
    "without a bias": lambda: chain(nn.Linear(12, 3, bias=False)),
    "two layers": lambda: chain(nn.Linear(12, 7), nn.ReLU(), nn.Linear(7, 3)),
    "three layers": lambda: chain(
        nn.Linear(12, 7), nn.Tanh(), nn.Linear(7, 5, bias=False), nn.Sigmoid(), nn.Linear(5, 3)
    ),
    "an activation at the end": lambda: chain(nn.Linear(12, 3), nn.Tanh()),
    "the papers' logistic": lambda: zoo.logistic((3, 4), 3),
    "the papers' mlp": lambda: zoo.mlp((3, 4), 3),
}
SIZES = (5, 1, 9, 5, 40)


def requests(model, dtype, clip=math.inf, weights=None, sizes=SIZES):
    """Sites of several batch sizes, each at weights of its own."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for size in sizes:
        # Not so large that all is decided: what float32 then leaves of a gradient is rounding.
        own = FlatModel(copy.deepcopy(model.module))
        own.load(0.2 * torch.randn(model.size, generator=generator, dtype=dtype))
        x = torch.randn(size, 3, 4, generator=generator, dtype=dtype)
        y = torch.randint(3, (size,), generator=generator)
        found.append(SiteSum(own, x, y, clip, weights))
    return found


def contributions(reference, request, w):
    """What the records of one site contribute, as rows [B, d], by torch.func."""
    module = request.model.module
    rows = reference.per_sample(module, cross_entropy, request.x, request.y)
    losses = cross_entropy(module(request.x), request.y).detach()
    return reference.clipped(rows, request.clip, None if w is None else w(losses))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_every_site_gets_the_sum_of_its_own_records(reference, name, dtype, tolerance):
    module = MODELS[name]().to(dtype)
    model = FlatModel(module)
    stack = Stack.of(model, cross_entropy)
    assert stack is not None
    for clip, weights in ((math.inf, None), (0.5, None), (0.5, lambda losses: losses - 1)):
        asked = requests(model, dtype, clip, weights)
        for request, total in zip(asked, stack.answers(asked), strict=True):
            assert total is not None
            rows = contributions(reference, request, weights)
            assert reference.error(total, rows) < tolerance
            # No record beyond C: of a batch of one the sum is the record's part.
            if len(request.y) == 1 and clip < math.inf:
                assert float(total.norm()) <= clip * (1 + 1e-5)


def test_what_is_not_finite_is_left_out_and_disturbs_no_other():
    model = FlatModel(MODELS["two layers"]().double())
    stack = Stack.of(model, cross_entropy)
    asked = requests(model, torch.float64, 0.5)
    before = stack.answers(asked)
    asked[2].x[3] = math.nan
    others = [0, 1, 2, 4, 5, 6, 7, 8]
    (expected,) = stack.answers([replace(asked[2], x=asked[2].x[others], y=asked[2].y[others])])
    after = stack.answers(asked)
    assert torch.allclose(after[2], expected, rtol=0, atol=1e-13)
    for i in (0, 1, 3, 4):
        assert torch.equal(before[i], after[i])
    asked[0].model.vector[1] = math.nan
    assert not stack.answers(asked)[0].any()


def test_what_is_left_out_takes_its_own_weights(reference):
    """At the second of two sites, of which each record has another weight."""
    model = FlatModel(MODELS["logistic"]().double())
    stack = Stack.of(model, cross_entropy)
    first, second = requests(model, torch.float64, 0.5, sizes=(3, 4))
    w = torch.tensor([0.1, 0.2, 0.3, 0.4]).double()
    used = [0, 2, 3]
    fixed = replace(second, x=second.x[used], y=second.y[used], weights=reference.dealt(w[used]))
    (expected,) = stack.answers([fixed])
    second.x[1] = math.inf
    found = stack.answers([first, replace(second, weights=reference.dealt(w))])
    assert torch.allclose(found[1], expected, rtol=0, atol=1e-13)


def test_a_weight_that_is_not_finite_is_none(reference):
    model = FlatModel(MODELS["logistic"]().double())
    stack = Stack.of(model, cross_entropy)
    (asked,) = requests(model, torch.float64, 0.5, sizes=(4,))
    some, left = ([1, 3], [0, 2])
    for bad in (math.nan, math.inf):
        w = torch.ones(4).double()
        w[left] = bad
        (found,) = stack.answers([replace(asked, weights=reference.dealt(w))])
        (expected,) = stack.answers([replace(asked, x=asked.x[some], y=asked.y[some])])
        assert torch.allclose(found, expected, rtol=0, atol=1e-13)


def test_sums_that_the_site_has_to_compute_itself():
    """Without privacy what is not finite is for a plain kernel to spread; and what fits nobody."""
    model = FlatModel(MODELS["logistic"]().double())
    stack = Stack.of(model, cross_entropy)
    (good,) = requests(model, torch.float64, 0.5, sizes=(4,))
    spoilt = good.x.clone()
    spoilt[1] = math.inf
    many = dense.MOST // 3 + 1
    for one in (
        replace(good, x=spoilt, plain=True),
        replace(good, x=good.x.float()),
        replace(good, y=good.y.float()),
        replace(good, y=good.y[:3]),
        replace(good, y=torch.eye(4)[:, :3].double()),
        replace(good, x=good.x[:0], y=good.y[:0]),
        replace(good, x=good.x[:1].expand(many, 3, 4), y=good.y[:1].expand(many)),
        replace(good, y=torch.tensor([0, 1, 2, 3]), plain=True),
    ):
        assert stack.answers([one]) == [None]
    # Of several, those that fit are answered.
    found = stack.answers([good, replace(good, x=good.x.float()), good])
    assert [answer is None for answer in found] == [False, True, False]


@pytest.mark.parametrize("label", [-100, -1, 3, 99])
def test_a_record_with_a_label_of_another_model_is_left_out(label):
    """Bit for bit as if it were not there: others must not take another way because of it."""
    model = FlatModel(MODELS["logistic"]().double())
    stack = Stack.of(model, cross_entropy)
    (good,) = requests(model, torch.float64, 0.5, sizes=(4,))
    y = good.y.clone()
    y[2] = label
    others = torch.tensor([0, 1, 3])
    (found,) = stack.answers([replace(good, y=y)])
    (expected,) = stack.answers([replace(good, x=good.x[others], y=good.y[others])])
    assert torch.equal(found, expected)


def test_too_many_records_for_one_pass_take_several(monkeypatch):
    model = FlatModel(MODELS["logistic"]().double())
    stack = Stack.of(model, cross_entropy)
    asked = requests(model, torch.float64, 0.5)
    together = stack.answers(asked)
    monkeypatch.setattr(dense, "MOST", 3 * 40)
    for one, other in zip(together, stack.answers(asked), strict=True):
        assert (one - other).norm() <= 1e-12 * one.norm()


def test_a_seat_falls_back_on_its_own_kernel(reference):
    """Where the others cannot answer, and for what is summed alone anyway."""
    model = FlatModel(MODELS["logistic"]().double())
    (request,) = requests(model, torch.float64, 0.5, sizes=(6,))
    asked = []

    def nobody(question):
        asked.append(question)

    for seat, total in (
        (Seat(model, cross_entropy, nobody), lambda s: s.clipped_sum(request.x, request.y, 0.5)),
        (PlainSeat(model, cross_entropy, nobody), lambda s: s.weighted_sum(request.x, request.y)),
    ):
        asked.clear()
        model.load(request.model.vector)
        clip = 0.5 if isinstance(seat, Seat) else math.inf
        rows = contributions(reference, replace(request, clip=clip), None)
        assert reference.error(total(seat), rows) < 1e-12
        assert len(asked) == 1
        assert asked[0].clip == clip
    with pytest.raises(InputError, match="clip is 0"):
        Seat(model, cross_entropy, nobody).clipped_sum(request.x, request.y, 0.0)
    assert len(asked) == 1
    empty = Seat(model, cross_entropy, nobody).clipped_sum(request.x[:0], request.y[:0], 0.5)
    assert not empty.any()
    assert len(asked) == 1


def frozen():
    module = MODELS["two layers"]()
    module[1].bias.requires_grad_(False)
    return module


def tied():
    module = chain(nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 12))
    module[3].weight = module[1].weight
    return module


def twice():
    layer = nn.Linear(12, 12)
    return chain(layer, nn.ReLU(), layer)


@pytest.mark.parametrize(
    "module",
    [
        zoo.cnn((1, 28, 28), 10),
        chain(nn.Linear(12, 7), nn.LayerNorm(7), nn.Linear(7, 3)),
        nn.Sequential(nn.LayerNorm(4), nn.Flatten(), nn.Linear(12, 3)),
        chain(nn.Linear(12, 7), nn.GELU(), nn.Linear(7, 3)),
        frozen(),
        twice(),
        tied(),
    ],
    ids=["cnn", "norm", "norm first", "gelu", "frozen", "twice", "tied"],
)
def test_other_models_are_not_stacked(module):
    assert Stack.of(FlatModel(module), cross_entropy) is None


def test_other_losses_are_not_stacked():
    assert Stack.of(FlatModel(MODELS["logistic"]()), squared_error) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_stacked_noise_is_each_sites_own_bit_for_bit(dtype):
    """Sites and channels of several lengths, more of them than there is room for at a time."""
    stack = Stack.of(FlatModel(MODELS["logistic"]().to(dtype)), cross_entropy)
    sizes = [7, 8, 1, 7, *[CHUNK // 3] * 4, 7]
    draws = [SeededDraws(5, f"site-{i}", 2) for i in range(len(sizes))]
    totals = [torch.arange(size, dtype=dtype) for size in sizes]
    alone = [
        own.add_noise(total.clone(), 1.5, 0.2, 3, "gradient")
        for own, total in zip(draws, totals, strict=True)
    ]
    asked = [
        NoiseRequest(total, 1.5 * 0.2, own.noise_words(3, "gradient"))
        for own, total in zip(draws, totals, strict=True)
    ]
    for expected, found, total in zip(alone, stack.answers(asked), totals, strict=True):
        assert found is total
        assert torch.equal(found, expected)


def test_sums_and_noise_are_answered_in_one_turn():
    model = FlatModel(MODELS["logistic"]().double())
    stack = Stack.of(model, cross_entropy)
    first, second = requests(model, torch.float64, 0.5, sizes=(4, 5))
    noise = NoiseRequest(torch.zeros(3), 1.0, KeyStream(bytes(32)))
    found = stack.answers([first, noise, second])
    assert found[1] is noise.total
    for answer, total in zip(found[::2], stack.answers([first, second]), strict=True):
        assert torch.equal(answer, total)


def test_a_seats_draws_are_its_own_where_nobody_answers():
    """And where nothing would be saved: beside a vector so long there is no room for another."""
    asked = []

    def nobody(question):
        asked.append(question)

    seat, own = SeatDraws(nobody, 5, "a", 2), SeededDraws(5, "a", 2)
    for size, questions in ((7, 1), (CHUNK, 1), (CHUNK + 1, 0)):
        asked.clear()
        found, expected = (
            each.add_noise(torch.zeros(size), 1.0, 0.5, 3, "loss") for each in (seat, own)
        )
        assert torch.equal(found, expected)
        assert len(asked) == questions
    assert seat.batch(100, 0.3, 4).tolist() == own.batch(100, 0.3, 4).tolist()
