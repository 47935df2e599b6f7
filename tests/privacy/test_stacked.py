"""Stacked sums against each site's own: float64 to 1e-12 of what was summed, float32 to 1e-5."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from fedpact.losses import cross_entropy, squared_error
from fedpact.models import papers
from fedpact.params import FlatModel
from fedpact.privacy.keystream import CHUNK
from fedpact.privacy.noise import SeededDraws
from fedpact.privacy.seats import Noise, PlainSeat, Seat, SeatDraws, Sum
from fedpact.privacy.stacked import Stack


def chain(*layers):
    return nn.Sequential(nn.Flatten(), *layers)


MODELS = {
    "logistic": lambda: chain(nn.Linear(12, 3)),
    "without a bias": lambda: chain(nn.Linear(12, 3, bias=False)),
    "two layers": lambda: chain(nn.Linear(12, 7), nn.ReLU(), nn.Linear(7, 3)),
    "three layers": lambda: chain(
        nn.Linear(12, 7), nn.Tanh(), nn.Linear(7, 5, bias=False), nn.Sigmoid(), nn.Linear(5, 3)
    ),
    "the papers' logistic": lambda: papers.logistic((3, 4), 3),
    "the papers' mlp": lambda: papers.mlp((3, 4), 3),
}
SIZES = (5, 1, 9, 5, 40)


def requests(model, dtype, clip=math.inf, weights=None, sizes=SIZES):
    """Sites of several batch sizes, each at weights of its own."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for size in sizes:
        # Not so large that all is decided: what float32 then leaves of a gradient is rounding.
        w = 0.2 * torch.randn(model.size, generator=generator, dtype=dtype)
        x = torch.randn(size, 3, 4, generator=generator, dtype=dtype)
        y = torch.randint(3, (size,), generator=generator)
        found.append(Sum(w, x, y, clip, weights))
    return found


def own(reference, module, request, w):
    """What the records of one site contribute, as rows [B, d], by torch.func."""
    model = FlatModel(module)
    model.load(request.w)
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
        for request, total in zip(asked, stack.sums(asked), strict=True):
            assert total is not None
            rows = own(reference, module, request, weights)
            assert reference.error(total, rows) < tolerance
            # No record beyond C: of a batch of one the sum is the record's part.
            if len(request.y) == 1 and clip < math.inf:
                assert float(total.norm()) <= clip * (1 + 1e-5)


def test_what_is_not_finite_at_one_site_disturbs_no_other():
    model = FlatModel(MODELS["two layers"]().double())
    stack = Stack.of(model, cross_entropy)
    asked = requests(model, torch.float64, 0.5)
    before = stack.sums(asked)
    asked[2].x[3] = math.nan
    after = stack.sums(asked)
    assert after[2] is None
    for i in (0, 1, 3, 4):
        assert torch.equal(before[i], after[i])
    asked[0].w[1] = math.inf
    assert stack.sums(asked)[0] is None


def test_what_overflows_where_there_is_no_record_is_the_sites_own_to_answer():
    """x = 0 stands for records that only another site has: here it alone goes beyond float32."""
    model = FlatModel(chain(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 2)))
    w = torch.zeros(model.size)
    parts = dict(model.views(w))
    parts["1.weight"].fill_(-3e20)
    parts["1.bias"].fill_(3e20)
    parts["3.weight"].fill_(1e20)
    few, many = (Sum(w, torch.ones(n, 1), torch.zeros(n).long(), 1.0, None) for n in (2, 3))
    stack = Stack.of(model, cross_entropy)
    found = stack.sums([few, many])
    assert found[0] is None
    assert torch.equal(found[1], stack.sums([many])[0])
    assert found[1].isfinite().all()


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
        model.load(request.w)
        clip = 0.5 if isinstance(seat, Seat) else math.inf
        rows = own(reference, model.module, replace(request, clip=clip), None)
        assert reference.error(total(seat), rows) < 1e-12
        assert len(asked) == 1
        assert asked[0].clip == clip
    empty = Seat(model, cross_entropy, nobody).clipped_sum(request.x[:0], request.y[:0], 0.5)
    assert not empty.any()
    assert len(asked) == 1


def frozen():
    module = MODELS["two layers"]()
    module[1].bias.requires_grad_(False)
    return module


def twice():
    layer = nn.Linear(12, 12)
    return chain(layer, nn.ReLU(), layer)


@pytest.mark.parametrize(
    "module",
    [
        papers.cnn((1, 28, 28), 10),
        chain(nn.Linear(12, 7), nn.LayerNorm(7), nn.Linear(7, 3)),
        nn.Sequential(nn.LayerNorm(4), nn.Flatten(), nn.Linear(12, 3)),
        chain(nn.Linear(12, 7), nn.GELU(), nn.Linear(7, 3)),
        frozen(),
        twice(),
    ],
    ids=["cnn", "norm", "norm first", "gelu", "frozen", "twice"],
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
        Noise(total, 1.5 * 0.2, own.noise_key(3, "gradient"))
        for own, total in zip(draws, totals, strict=True)
    ]
    for expected, found, total in zip(alone, stack.answers(asked), totals, strict=True):
        assert found is total
        assert torch.equal(found, expected)


def test_sums_and_noise_are_answered_in_one_turn():
    model = FlatModel(MODELS["logistic"]().double())
    stack = Stack.of(model, cross_entropy)
    first, second = requests(model, torch.float64, 0.5, sizes=(4, 5))
    noise = Noise(torch.zeros(3), 1.0, bytes(32))
    found = stack.answers([first, noise, second])
    assert found[1] is noise.total
    for answer, total in zip(found[::2], stack.sums([first, second]), strict=True):
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
