"""A kernel's own threads: blocks of records side by side, with the sums that one thread makes.

What threads may not change is shown as an identity: the sum over a batch is that of its blocks'
sums, one after another on one thread, bit for bit, on however many threads.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from tests.persample.attacked import allowed
from torch import nn

from fedpact.losses import cross_entropy
from fedpact.params import FlatModel, begin_alone, threads
from fedpact.persample import passes
from fedpact.persample.kernel import PerSampleKernel
from fedpact.persample.weighting import Fair

CLIP = 0.1
LENGTH = 32
"""Of a block, here for every way."""


@pytest.fixture(autouse=True)
def short_blocks_of_small_models(monkeypatch):
    monkeypatch.setattr(passes, "_WORTHWHILE", 0)
    monkeypatch.setattr(passes, "_BLOCK", {True: LENGTH, False: LENGTH})


class Own(nn.Module):
    """A module of one's own, which is traced."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return self.layers(x)


class Attentive(nn.Module):
    """A transformer's layer, whose attention and dropout draw nothing at a rate of 0."""

    def __init__(self, rate=0.0):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(36, 2, 12, rate, batch_first=True)
        self.head = nn.Linear(36, 3)

    def forward(self, x):
        return self.head(self.layer(x.flatten(1).reshape(-1, 3, 36)).mean(1))


def _convolutional():
    return [
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(72, 3),
    ]


MODELS = {
    "chain": lambda: nn.Sequential(*_convolutional()),
    "graph": lambda: Own(*_convolutional()),
    "normalised": lambda: Own(nn.GroupNorm(3, 3), *_convolutional()),
    "transformer": Attentive,
}


def made(name, count):
    """A kernel, and records one of which is no number."""
    torch.manual_seed(0)
    kernel = PerSampleKernel(FlatModel(MODELS[name]()), cross_entropy)
    x, y = torch.randn(count, 3, 6, 6), torch.arange(count) % 3
    x[count // 2] = torch.nan
    return kernel, x, y


@pytest.mark.parametrize("number", [2, 3, 5])
@pytest.mark.parametrize("count", [100, 700], ids=["float32", "float64"])
@pytest.mark.parametrize("name", MODELS)
def test_the_sum_is_the_sum_of_its_blocks_sums(name, count, number):
    kernel, x, y = made(name, count)
    weights, shares = Fair(0.5, 1.0), torch.rand(count, dtype=torch.float64) * 0.9 + 0.1
    with threads(number):
        found = kernel.clipped_sum(x, y, CLIP, weights, most=count, shares=shares)
        again = kernel.clipped_sum(x, y, CLIP, weights, most=count, shares=shares)
        plain = kernel.clipped_sum(x, y, CLIP)
    blocks = kernel._passes.blocks(x, y)
    length = blocks[0].stop
    assert blocks == [slice(i, min(i + length, count)) for i in range(0, count, length)]
    assert length in (LENGTH, 2 * LENGTH)
    with threads(1):
        each = [kernel.clipped_sum(x[b], y[b], CLIP) for b in blocks if count <= 512]
        whole = kernel.clipped_sum(x, y, CLIP, weights, most=count, shares=shares)
    assert torch.equal(found, again)
    if count <= 512:
        assert torch.equal(plain, sum(each[1:], torch.zeros_like(plain) + each[0]))
    # One pass on one thread adds the same numbers in another order.
    assert float((found - whole).double().norm()) <= count * CLIP * 2**-21
    assert torch.isfinite(found).all()
    assert float(found.norm()) > 0


@pytest.mark.parametrize("name", MODELS)
def test_blocks_are_taken_by_several_threads(name, monkeypatch):
    kernel, x, y = made(name, 100)
    taken = []
    gradients = passes.Passes.gradients

    def seen(self, x, y, every=None):
        taken.append((threading.current_thread().name, every, self))
        return gradients(self, x, y, every)

    monkeypatch.setattr(passes.Passes, "gradients", seen)
    with threads(2):
        kernel.clipped_sum(x, y, CLIP)
    in_blocks = [one for one in taken if one[1] is not None]
    assert sorted(block.start for _, [block], _ in in_blocks) in ([0, 32, 64, 96], [0, 64])
    assert all(name.startswith("records") for name, _, _ in in_blocks)
    # Memory and a chain's stages hold one pass at a time.
    assert len({id(own) for _, _, own in in_blocks}) == 2
    assert len({id(own._space) for _, _, own in in_blocks}) == 2


BIAS = {"chain": "0.bias", "graph": "layers.0.bias"}
"""Of the convolution."""


@pytest.mark.parametrize("name", BIAS)
def test_equal_records_at_a_kink_behind_and_before(name):
    """One record more moves a sum over blocks by no more than it may, wherever it stands."""
    for seed in range(5):
        kernel, _, _ = made(name, 2)
        torch.manual_seed(seed)
        first = next(m for m in kernel.model.module.modules() if isinstance(m, nn.Conv2d))
        row = torch.rand(3, 1, 1).expand(3, 6, 6).contiguous()
        other = torch.randn(1, 3, 6, 6)
        with torch.no_grad():
            seen = row.expand(LENGTH, 3, 6, 6).contiguous()
            found = F.conv2d(seen, first.weight, padding=1)[0].flatten(1)
            kernel.model.own[BIAS[name]].copy_(-found.max(1)[0])
        for count, number in ((31, 2), (32, 2), (64, 3), (95, 4)):
            given, y = row.expand(count, 3, 6, 6).clone(), torch.zeros(count + 1, dtype=torch.int64)
            with threads(number):
                before = kernel.clipped_sum(given, y[:count], CLIP).double()
                for more in (torch.cat([given, other]), torch.cat([other, given])):
                    change = kernel.clipped_sum(more, y, CLIP).double() - before
                    assert float(change.norm()) <= allowed(count, CLIP)


def test_of_no_more_than_a_block_there_is_one_pass():
    kernel, x, y = made("graph", LENGTH)
    assert kernel._passes.blocks(x, y) == [slice(0, LENGTH)]
    assert len(kernel._passes.blocks(*made("graph", LENGTH + 1)[1:])) == 2


IN_TURN = {
    "dropout": lambda: Own(nn.Flatten(), nn.Linear(108, 3), nn.Dropout(0.5)),
    "attention that drops": lambda: Attentive(0.1),
    "recurrence": lambda: Recurrent(),
    "record by record": lambda: Spectrum(),
}


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.GRU(36, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.layer(x.flatten(2))[0][:, -1])


class Spectrum(nn.Module):
    """Of an operation that no table knows."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(18, 3)

    def forward(self, x):
        return self.head(torch.fft.rfft(x.flatten(1)[:, :34]).abs())


@pytest.mark.parametrize("name", IN_TURN)
def test_what_is_drawn_or_taken_step_by_step_stays_on_one_thread(name):
    torch.manual_seed(0)
    kernel = PerSampleKernel(FlatModel(IN_TURN[name]()), cross_entropy)
    x, y = torch.randn(100, 3, 6, 6), torch.arange(100) % 3
    assert kernel._passes.blocks(x, y) == []
    torch.manual_seed(1)
    with threads(1):
        expected = kernel.clipped_sum(x, y, CLIP)
    torch.manual_seed(1)
    with threads(3):
        assert torch.equal(kernel.clipped_sum(x, y, CLIP), expected)


def test_an_error_in_a_block_is_told_and_harms_no_later_sum():
    kernel, x, y = made("graph", 100)

    def weights(losses):
        if len(losses) < LENGTH:
            raise ValueError("no weights today")
        return torch.ones_like(losses)

    with threads(2):
        before = kernel.clipped_sum(x, y, CLIP)
        with pytest.raises(ValueError, match="no weights today"):
            kernel.clipped_sum(x, y, CLIP, weights)
        assert torch.equal(kernel.clipped_sum(x, y, CLIP), before)
        assert torch.get_num_threads() == 2


def test_small_models_are_one_threads(monkeypatch):
    monkeypatch.undo()
    kernel, x, y = made("chain", 1000)
    assert kernel.model.size < passes._WORTHWHILE
    assert kernel._passes.blocks(x, y) == []


def test_a_thread_of_ones_own_stays_one_whatever_others_set_as_it_begins():
    """torch gives a new thread what was set last, at its first operation: seen in half of 60."""
    over = threading.Event()

    def setting():
        while not over.is_set():
            with threads(3):
                pass

    other = threading.Thread(target=setting)
    other.start()
    try:
        for _ in range(60):
            with ThreadPoolExecutor(1, initializer=begin_alone) as pool:
                pool.submit(lambda: torch.ones(40_000).exp().sum()).result()
                assert pool.submit(torch.get_num_threads).result() == 1
    finally:
        over.set()
        other.join()


def test_one_block_goes_the_way_of_two():
    """What the calling thread has set for itself would hold for one block and not for two.

    Every unit's input is a number that float32 holds only as a denormal: above zero or at it.
    """
    first, last = nn.Linear(108, 64, bias=False), nn.Linear(64, 3)
    x, y = torch.ones(LENGTH + 1, 108), torch.zeros(LENGTH + 1).long()
    with torch.no_grad():
        first.weight.fill_(1e-41)
        last.weight *= 1e4
    kernel = PerSampleKernel(FlatModel(Own(first, nn.ReLU(), last)), cross_entropy)
    with threads(2):
        kernel.clipped_sum(x, y, CLIP)  # a thread begins as the one that started it has been set
        assert torch.set_flush_denormal(True)
        try:
            one, two = (kernel.clipped_sum(x[:n], y[:n], CLIP) for n in (LENGTH, LENGTH + 1))
        finally:
            torch.set_flush_denormal(False)
    assert float((two - one).double().norm()) <= allowed(LENGTH, CLIP)


def test_a_sum_that_was_interrupted_leaves_the_next_one_as_it_is(monkeypatch):
    """What is at work still goes on with its own passes: the next sum has others."""
    model = FlatModel(nn.Sequential(*_convolutional()))
    x, y = torch.rand(4 * LENGTH, 3, 6, 6), torch.arange(4 * LENGTH) % 3
    kernel = PerSampleKernel(model, cross_entropy)
    with threads(2):
        expected = kernel.clipped_sum(x, y, CLIP)
        before = kernel._team._passes

        def interrupted(_):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(passes, "wait", interrupted)
            with pytest.raises(KeyboardInterrupt):
                kernel.clipped_sum(1e3 * x, y, CLIP)
        assert torch.equal(kernel.clipped_sum(x, y, CLIP), expected)
    assert not {*map(id, before)} & {*map(id, kernel._team._passes)}


def test_a_team_takes_the_ways_that_its_model_has_now():
    model = nn.Sequential(*_convolutional())
    x, y = torch.rand(3 * LENGTH, 3, 6, 6), torch.arange(3 * LENGTH) % 3
    kernel = PerSampleKernel(FlatModel(model), cross_entropy)
    hook = model[0].register_forward_hook(lambda *_: None)
    with threads(2):
        kernel.clipped_sum(x, y, CLIP)
        hook.remove()
        kernel.clipped_sum(x, y, CLIP)
    assert all(one.chain is not None for one in kernel._team._passes)


def test_a_fork_sums_with_threads_of_its_own():
    model = FlatModel(nn.Sequential(*_convolutional()))
    x, y = torch.rand(3 * LENGTH, 3, 6, 6), torch.arange(3 * LENGTH) % 3
    kernel = PerSampleKernel(model, cross_entropy)
    with threads(2):
        kernel.clipped_sum(x, y, CLIP)
        pool = kernel._team._pool
        kernel._team._of = (0, kernel._team._of[1])  # as a process of another number finds it
        kernel.clipped_sum(x, y, CLIP)
    assert kernel._team._pool is not pool
