"""Models that others' bug reports are about: the last step by index, tied tables, packed rows."""

import math
from functools import partial

import pytest
import torch
from tests.per_sample.attacked import allowed, moved
from tests.per_sample.small import by_autograd, off_by
from tests.spread import spread
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from fedpact.common.errors import ModelError
from fedpact.common.losses import cross_entropy
from fedpact.common.params import FlatModel
from fedpact.per_sample import norms
from fedpact.per_sample.gradients import Lookup, Outer, part
from fedpact.per_sample.kernel import PerSampleKernel
from fedpact.per_sample.layout import Placement

PICKS = {
    "gather": lambda o, n: o.gather(1, n.view(-1, 1, 1).expand(-1, 1, o.shape[2]))[:, 0],
    "arange": lambda o, n: o[torch.arange(o.size(0), device=o.device), n],
    "one-hot": lambda o, n: (nn.functional.one_hot(n, o.shape[1])[..., None] * o).sum(1),
    "masked mean": lambda o, n: (o * (torch.arange(o.shape[1]) <= n[:, None])[..., None]).sum(1),
}


class LastStep(nn.Module):
    """Takes the last step that is no padding; of padding alone some picks raise."""

    def __init__(self, pick, body=None):
        super().__init__()
        self.words, self.head, self.pick = nn.Embedding(30, 6), nn.Linear(6, 3), pick
        self.body = body

    def forward(self, x):
        steps = self.words(x).tanh() if self.body is None else self.body(self.words(x))[0]
        return self.head(self.pick(steps, (x != 0).sum(1) - 1))


@pytest.mark.parametrize(
    ("picks", "recurrent"),
    [(("gather", "one-hot"), False), (("arange", "masked mean"), True)],
)
def test_the_last_step_is_taken_many_records_at_a_time(picks, recurrent):
    body = nn.LSTM(6, 6, batch_first=True) if recurrent else None
    model = LastStep(lambda o, n: sum(PICKS[pick](o, n) for pick in picks), body)
    kernel = PerSampleKernel(FlatModel(model), off_by)
    x, y = torch.randint(1, 30, (11, 7)), torch.arange(11) % 3
    for j in range(11):
        x[j, 2 + j % 6 :] = 0
    expected = by_autograd(kernel, x, y, 0.5)
    places = torch.arange(11) + 3
    assert kernel.way(x, y) == "graph"
    # Eleven records fill no pass: whatever empty slots hold, the model has to take it.
    for layout in (Placement(length=8), Placement(places=places, slots=16, length=16)):
        found = kernel.clipped_sum(x, y, 0.5, layout=layout)
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-6)
    kernel.invariant(x, y)  # whatever it finds, nothing raises


@pytest.mark.parametrize(
    "pick",
    [
        lambda o, n: o.flatten(0, 1)[n + torch.arange(len(o)) * o.shape[1]],
        lambda o, n: o[torch.arange(o.shape[1]) == n[:, None]],
        lambda o, n: o[torch.arange(o.shape[1]) <= n[:, None]].mean(0, keepdim=True),
        lambda o, n: torch.stack([o[i, n[i]] for i in range(len(o))]),
        lambda o, n: torch.stack([o[i, :, 1:][n[i] - 9] for i in range(len(o))]).repeat(1, 2)[
            :, :6
        ],
    ],
    ids=["flat", "one by mask", "mask", "numbers", "below 0"],
)
def test_some_picks_are_made_record_by_record(pick):
    """How many a mask picks is no constant, and a loop is over the records: exact all the same."""
    kernel = PerSampleKernel(FlatModel(LastStep(pick)), off_by)
    x, y = torch.randint(1, 30, (5, 7)), torch.arange(5) % 3
    assert kernel.way(x, y) == "records"
    found = kernel.clipped_sum(x, y, 0.5, layout=Placement(length=8))
    assert torch.allclose(found, by_autograd(kernel, x, y, 0.5), rtol=1e-4, atol=1e-6)


def test_a_step_taken_out_as_a_number_is_refused_with_its_line():
    model = LastStep(lambda o, n: torch.stack([o[i, int(n[i])] for i in range(len(o))]))
    kernel = PerSampleKernel(FlatModel(model), cross_entropy)
    x, y = torch.randint(1, 30, (5, 7)), torch.arange(5) % 3
    with pytest.raises(ModelError, match=r"a number taken out of a tensor in test_cases\.py, line"):
        kernel.clipped_sum(x, y, 0.5)


class Tied(nn.Module):
    """Next words by the table that words are looked up in, from some of the steps."""

    def __init__(self, steps, twice=False):
        super().__init__()
        self.words, self.body, self.steps = nn.Embedding(200, 40), nn.Linear(40, 40), steps
        self.twice = twice

    def forward(self, x):
        z = torch.tanh(self.body(self.words(x)))[:, -self.steps :]
        z = self.body(z).tanh() if self.twice else z
        return nn.functional.linear(z, self.words.weight).sum(1)


@pytest.mark.parametrize(
    ("steps", "twice", "rows"), [(1, False, 60), (2, False, 1000), (1, True, 60)]
)
def test_a_tied_table_is_summed_without_one_for_each_record(steps, twice, rows, monkeypatch):
    monkeypatch.setattr(norms, "CHUNK_BYTES", rows * 40 * 8)
    kernel = PerSampleKernel(FlatModel(Tied(steps, twice)), off_by)
    x, y = torch.randint(0, 9, (12, 6)), torch.randint(0, 200, (12,))
    x[:, 1:4] *= 22
    expected = by_autograd(kernel, x, y, 0.5)
    monkeypatch.setattr(Lookup, "rows", lambda *_: pytest.fail("a table for a record"))
    found = kernel.clipped_sum(x, y, 0.5, layout=Placement(length=16))
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-6)


def test_uses_of_a_tied_table_that_cancel_are_measured_as_added():
    """What is left of them is rounding: of the very numbers that are added."""
    g, u, view = torch.zeros(1, 1, 99), torch.randn(1, 1, 40), torch.zeros(99, 40)
    g[0, 0, 7], g[0, 0, 8] = 1, 1e-6
    looked_up = Lookup(torch.tensor([[7]]), -u * (1 + 1e-6), 99, None)
    both = part([looked_up, Outer(g, u)])
    both.add(torch.ones(1), None, view)
    assert 0 < both.squares.sqrt() == pytest.approx(float(view.double().norm()), rel=1e-5)


def test_indices_of_a_small_table_are_not_sorted(monkeypatch):
    """Sorting takes longer than a table for each record, as of relative positions."""
    index, g, c = torch.randint(3, (5, 8)), torch.randn(5, 8, 2), torch.rand(5)
    monkeypatch.setattr(torch.Tensor, "argsort", lambda *_, **__: pytest.fail("sorted"))
    found, view = part([Lookup(index, g, 3, 0)]), torch.zeros(3, 2)
    each = nn.functional.one_hot(index, 3).float().mT @ g
    each[:, 0] = 0
    assert torch.allclose(found.squares.float(), each.square().sum((1, 2)))
    found.add(c, None, view)
    assert torch.allclose(view, torch.einsum("b,bve->ve", c, each), atol=1e-6)


@pytest.mark.parametrize("alike", [True, False])
def test_a_difference_of_look_ups_is_that_of_their_rows(alike):
    index, g, h = torch.randint(30, (5, 4)), torch.randn(5, 4, 2), torch.randn(5, 4, 2)
    one, other = Lookup(index, g, 30, 0), Lookup(index if alike else index.flip(0), h, 30, 0)
    rows = one.rows(slice(5)) - other.rows(slice(5))
    found, view = part(one.minus(other)), torch.zeros(30, 2)
    assert torch.allclose(found.squares.float(), rows.square().sum(1))
    found.add(torch.ones(5), None, view)
    assert torch.allclose(view.flatten(), rows.sum(0), atol=1e-6)


class Given(nn.Module):
    """ℓ = a·(scores by a table) + b·(rows of it) for y = (a, b), behind a ReLU at its kink."""

    def __init__(self, steps):
        super().__init__()
        self.words, self.inner, self.steps = nn.Embedding(300, 32), nn.Linear(32, 32), steps

    def forward(self, x):
        ids, u = x[:, :5].nan_to_num(0, 0, 0).clamp(0, 299).long(), x[:, 5:].unflatten(1, (-1, 32))
        scores = nn.functional.linear(torch.relu(self.inner(u)) + u, self.words.weight)
        return torch.cat([scores.flatten(1), self.words(ids).flatten(1)], 1)


@pytest.mark.parametrize(
    ("kind", "steps"),
    spread(("nan", "inf", "huge", "tiny", "cancel", "loss"), (1, 3), one_in=2),
)
def test_a_record_moves_a_tied_table_by_its_clip(kind, steps):
    module = Given(steps)
    base = torch.randn(steps, 32)
    with torch.no_grad():
        module.inner.bias.copy_(-(base @ module.inner.weight.t())[0])
    kernel = PerSampleKernel(FlatModel(module), lambda out, y: (out * y).sum(1))
    words = torch.randint(0, 300, (40, 5)).float()
    x = torch.cat([words, base.flatten().expand(40, -1)], 1)
    y = torch.randn(40, steps * 300 + 160)
    r, of_r = x[:1].clone(), y[:1].clone()
    if kind in ("nan", "inf", "huge", "tiny"):
        r[0, 5:] *= {"nan": math.nan, "inf": math.inf, "huge": 1e30, "tiny": 1e-40}[kind]
    if kind == "loss":
        of_r[0, 3] = math.inf
    if kind == "cancel":
        r[0, :5], of_r[:] = 7, 0
        with torch.no_grad():
            u = torch.relu(module.inner(base)) + base
        of_r[0, 7 : steps * 300 : 300] = 1e6
        of_r[0, steps * 300 :] = (-1e6 / 5 * u.sum(0)).repeat(5)
    assert kernel.way(x, y) == "graph"
    for clip in (1.0, 2.0**-30):
        for place in (0, 17):

            def summed(x, y, clip=clip, place=place):
                places = torch.arange(41)
                places = (
                    places if len(x) == 41 else torch.cat([places[:place], places[place + 1 :]])
                )
                layout = Placement(places=places, slots=48, length=16)
                return kernel.clipped_sum(x, y, clip, layout=layout)

            assert moved(summed, x, y, r, of_r, place) <= allowed(41, clip)


def last_state(body, packed):
    last = body(packed)[1]
    return torch.cat(last, -1)[-1] if isinstance(last, tuple) else last[-1]


def mean_output(body, packed):
    out, lengths = pad_packed_sequence(body(packed)[0], batch_first=body.batch_first)
    return out.sum(1 if body.batch_first else 0) / lengths[:, None]


def last_output(body, packed):
    first = body.batch_first
    out, lengths = pad_packed_sequence(body(packed)[0], first, total_length=6, padding_value=-1.0)
    return out[torch.arange(len(lengths)), lengths - 1] if first else out.sum(0)


def of_steps(body, packed):
    doubled = PackedSequence(packed.data * 2, *packed[1:])
    return last_state(body, doubled)


def in_order(x, lengths, *_):
    return x, lengths, slice(None)


def by_length(x, lengths, first):
    lengths, order = lengths.sort(descending=True)
    return x.index_select(0 if first else 1, order), lengths.tolist(), order.argsort()


class Packed(nn.Module):
    """Reads packed rows of words; enforce_sorted as torch has it by default where it sorts them."""

    def __init__(self, kind, read, settings, place):
        super().__init__()
        self.words, self.body = nn.Embedding(9, 4), kind(4, 5, **settings)
        self.head, self.read, self.place = nn.LazyLinear(3), read, place

    def forward(self, x):
        first = self.body.batch_first
        x = x if first else x.t()
        lengths = (x != 0).sum(1 if first else 0).cpu()
        x, lengths, back = self.place(x, lengths, first)
        packed = pack_padded_sequence(self.words(x), lengths, first, self.place is by_length)
        return self.head(self.read(self.body, packed)[back])


class Folded(nn.Module):
    """Packs two sequences of a record, [B, 2, T], in one batch."""

    def __init__(self, inner):
        super().__init__()
        self.words, self.body = nn.Embedding(9, 4), nn.LSTM(4, 5, batch_first=True)
        self.head, self.inner = nn.Linear(10, 3), inner

    def forward(self, x):
        rows = (x.transpose(0, 1) if self.inner else x).reshape(-1, x.shape[2])
        lengths = (rows != 0).sum(1).cpu()
        packed = pack_padded_sequence(self.words(rows), lengths, True, False)
        last = self.body(packed)[1][0][0]
        if self.inner:
            return self.head(last.view(2, -1, 5).transpose(0, 1).flatten(1))
        return self.head(last.view(-1, 10))


@pytest.mark.parametrize("inner", [False, True])
def test_packed_sequences_of_a_record_are_exact_or_refused(inner):
    x, y = torch.randint(1, 9, (5, 2, 6)), torch.arange(5) % 3
    x[:, 1, 4:] = 0
    kernel = PerSampleKernel(FlatModel(Folded(inner).double()), off_by)
    if inner:
        with pytest.raises(ModelError, match="fold them with the records first"):
            kernel.clipped_sum(x, y, 0.5)
        return
    found = kernel.clipped_sum(x, y, 0.5, layout=Placement(length=8))
    assert torch.allclose(found, by_autograd(kernel, x, y, 0.5), rtol=1e-9, atol=1e-12)


LAYERS = [
    {"batch_first": True},
    {"bidirectional": True},
    {"num_layers": 2, "batch_first": True, "bidirectional": True},
]


@pytest.mark.parametrize(
    ("kind", "read", "settings", "place"),
    [
        (nn.LSTM, last_state, LAYERS[2], in_order),
        (nn.LSTM, of_steps, LAYERS[0], in_order),
        (partial(nn.LSTM, proj_size=3), last_state, LAYERS[0], in_order),
        (nn.GRU, last_output, LAYERS[1], by_length),
        (nn.RNN, mean_output, LAYERS[2], in_order),
    ],
)
def test_packed_rows_have_the_gradients_of_each_alone(kind, read, settings, place):
    x, y = torch.randint(1, 9, (5, 6)), torch.arange(5) % 3
    for j in range(5):
        x[j, 1 + (3 * j) % 6 :] = 0
    module = Packed(kind, read, settings, place).double()
    # As torch runs the packed batch, each record's loss is what it is by itself.
    together = off_by(module(x), y)
    kernel, layout = PerSampleKernel(FlatModel(module), off_by), Placement(length=8)
    assert kernel.way(x, y) == ("records" if module.body.proj_size else "graph")
    assert torch.allclose(kernel.losses(x, y, layout), together)
    found = kernel.clipped_sum(x, y, 0.5, layout=layout)
    assert torch.allclose(found, by_autograd(kernel, x, y, 0.5), rtol=1e-9, atol=1e-12)


def test_one_thread_traces_a_small_convolution():
    """torch then asks whether a batch has 16 records, to choose how it is computed."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        layers = [nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1, groups=2)]
        net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
        kernel = PerSampleKernel(FlatModel(net), cross_entropy)
        x, y = torch.randn(6, 3, 8, 8), torch.arange(6) % 3
        assert kernel.way(x, y) == "graph"
        kernel.verify(x, y)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("pool", ["max_pool1d", "max_pool3d"])
def test_windows_wholly_in_the_padding_are_refused(pool):
    """There torch writes the gradient of one record to another, so a bad one would remove it."""
    dimensions = int(pool[-2])
    net = nn.Sequential(
        getattr(nn, f"Conv{dimensions}d")(1, 2, 1),
        getattr(nn, f"MaxPool{dimensions}d")(2, 1, 1, dilation=2),
        nn.Sigmoid(),
        nn.Flatten(),
        nn.LazyLinear(3),
    )
    x, y = torch.randn(4, 1, *[1] * dimensions), torch.arange(4) % 3
    net(x)
    with pytest.raises(ModelError, match="wholly in its padding"):
        PerSampleKernel(FlatModel(net), cross_entropy).clipped_sum(x, y, 1.0)


@pytest.mark.parametrize("dilation", [1, 8])
def test_pooling_after_relu_gives_what_the_model_gives(reference, dilation):
    def pooled(m, x):
        h = nn.functional.max_pool2d(m.conv(x).relu(), 2, stride=1, padding=1, dilation=dilation)
        return m.out(h.clamp(min=-1).mean((2, 3)))

    x, y = torch.randn(4, 1, 9, 9, generator=torch.Generator().manual_seed(0)), torch.arange(4) % 3
    model = FlatModel(reference.Apply(pooled, conv=nn.Conv2d(1, 2, 1), out=nn.Linear(2, 3)))
    kernel = PerSampleKernel(model, off_by)
    found = kernel.clipped_sum(x, y, 1e6)
    torch.testing.assert_close(found, by_autograd(kernel, x, y, 1e6), rtol=1e-4, atol=1e-5)
