"""Which way a model takes, and that all of them give the same sums: see passes.

Layers that no rule knows, parameters of a model's own, attention, recurrence, random numbers, and
what is not shown to keep records apart: such models are differentiated record by record.
"""

import logging
import math

import pytest
import torch
import torch.nn.functional as F
from tests.per_sample.small import by_autograd, off_by
from torch import nn

from fedpact.common.errors import ModelError
from fedpact.common.losses import cross_entropy, squared_error
from fedpact.common.params import FlatModel
from fedpact.per_sample import norms, per_record
from fedpact.per_sample.kernel import PerSampleKernel


def words(count=5):
    return torch.randint(0, 7, (count, 4), generator=torch.Generator().manual_seed(1))


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # the reference's
@pytest.mark.parametrize("causal", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_torch_transformer_with_a_mask_of_unknown_kind(reference, causal):
    """It looks into the mask whether it is the causal one, which a trace does not."""

    def run(m, x):
        ahead, padding = torch.ones(4, 4, dtype=torch.bool).triu(1), None
        mask = ahead.flip(0).fill_diagonal_(False)
        if causal:
            mask = torch.zeros(4, 4).masked_fill(ahead, -torch.inf)
            padding = torch.zeros(x.shape).masked_fill(x == 6, -torch.inf)
        h = m.encoder(m.embedding(x), mask=mask, src_key_padding_mask=padding)
        return m.last(h).mean(1)

    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    model = reference.Apply(
        run, embedding=nn.Embedding(7, 8), encoder=encoder, last=nn.Linear(8, 3)
    )
    looks = nn.modules.transformer._detect_is_causal_mask
    reference.check_structure(model, words())
    assert nn.modules.transformer._detect_is_causal_mask is looks


def test_modules_with_parameters_of_their_own(reference):
    class Maybe(reference.Shift):
        def forward(self, x):
            return x

    reference.check_structure(nn.Sequential(reference.Shift(4), nn.Tanh(), nn.Linear(4, 2)))
    reference.check_structure(nn.Sequential(nn.Linear(4, 4), reference.Shift(4), nn.PReLU()))
    x = reference.data(5, 4)
    reference.check_structure(nn.Sequential(Maybe(4), nn.Linear(4, 2)), x, rows="loop")
    assert not x.requires_grad


def test_a_module_that_is_given_no_records(reference):
    class Table(reference.Shift):
        def forward(self):
            return self.shift

    model = reference.Apply(
        lambda m, x: m.linear(x) * m.table() + 1, linear=nn.Linear(4, 4), table=Table(4)
    )
    reference.check_structure(model, rows="loop")


def test_a_batch_that_does_not_lead(reference):
    """[B, T, D] -> [T, B, D] and back, and [B, T, D] -> [B T, D] and back, even where B = T."""
    length = 3
    turned = reference.Apply(
        lambda m, x: m.unit(m.layer(x.transpose(0, 1)).tanh()).transpose(0, 1),
        layer=nn.Linear(4, 4), unit=reference.Shift(length, 1, 4),
    )  # fmt: skip
    flat = nn.Sequential(
        nn.Flatten(0, 1), nn.Linear(4, 3), nn.Unflatten(0, (-1, length)), nn.Flatten()
    )
    x = reference.data(3, length, 4)
    for model in (turned, flat):
        kernel = reference.check_structure(model, x, rows="loop")
        kernel.verify(x, torch.zeros_like(model(x)).detach())


@pytest.mark.parametrize(
    ("mode", "padding", "weighted"),
    [
        ("sum", 0, True), ("mean", 0, False), ("max", -1, False),
    ],
)  # fmt: skip
def test_bags_of_indices_are_traced(reference, mode, padding, weighted):
    bag = nn.EmbeddingBag(7, 4, mode=mode, padding_idx=padding)

    def run(m, x):
        factors = torch.linspace(0.5, 2, 4, dtype=torch.float64).expand(x.shape)
        return m.head(m.bag(x, per_sample_weights=factors) if weighted else m.bag(x))

    model, x = reference.Apply(run, bag=bag, head=nn.Linear(4, 3)), words()
    x[0] = 0 if padding == 0 else 6  # all of it padding
    reference.check_structure(model, x, rows="loop")


class Clipped(nn.Linear):
    """A weight that every pass shortens, as discriminators have."""

    def forward(self, x):
        self.weight.data = self.weight.data.clamp(-0.01, 0.01)
        return super().forward(x)


def added(m, x):
    """Products that torch adds in the same operation."""
    first = torch.addmm(m.bias, x[:, 0], m.weight, beta=0.5, alpha=2)
    return first[:, None] + torch.baddbmm(m.rows, x, m.weight.expand(x.shape[0], 4, 3))


def sampled(m, x):
    """An image, looked at where the image says, and tables as large as it."""
    grid = m.where(x.flatten(1)).view(-1, 4, 4, 2)
    found = F.grid_sample(x, grid, align_corners=False)
    found = found + m.table.float().type_as(x).expand_as(x)
    return m.head(found.flatten(1).reshape_as(x).view_as(x).flatten(1))


def modes(m, x):
    """The first waves of a record, mixed and written in front of zeros, as Fourier operators do."""
    waves = torch.fft.rfft(x)
    out = torch.zeros(x.shape[0], 2, 4, dtype=waves.dtype)
    mixed = torch.einsum("bit,iot->bot", waves[..., :2], torch.view_as_complex(m.mix))
    out[:, :, :2], out[..., 3] = mixed, waves[:, :2, 0]
    return torch.fft.irfft(out, n=6)


def prompted(m, x):
    """Rows in front of a record's, computed for one record and expanded to all; more at the end."""
    count = x.shape[0]
    names = torch.arange(2).unsqueeze(0).expand(count, -1).to(torch.int64)
    prompt = m.prompt(names[:1]).expand(count, -1, -1)
    tail = m.tail.repeat(count, 1).view(-1, 2, 4).repeat_interleave(2, 1)
    h = torch.cat([prompt, x, tail], 1)
    return m.layer(F.pad(h[:, 1:], (0, 0, 0, 1, 0, 0)))


def composed(m, x):
    """Operations that torch makes of others, or gives another name, and complex numbers."""
    h = m.first(x).clip(-1, 1)
    waves = torch.polar(h.arcsinh().multiply(2), torch.logaddexp(h, x))
    near = F.pairwise_distance(h[..., None, :], m.points)
    return torch.tensordot(waves.conj().angle(), m.points, ([-1], [1])) + near + h.diff()


def fixed(m, x):
    """A weight and a number as they are, without gradient, by their .data."""
    h = m.first(x)
    return F.linear(h * h.data, m.first.weight.data)


def numbers(*shape):
    return nn.Parameter(torch.randn(shape))


def called(m, x):
    return m.layer(x)


LAYERS = {
    "instance norm": (called, lambda: {"layer": nn.InstanceNorm2d(2, affine=True)}, (2, 3, 3)),
    "a convolution before a pooling of films": (
        lambda m, x: F.max_pool2d(m.layer(x.flatten(0, 1)), 2).unflatten(0, (-1, 3)),
        lambda: {"layer": nn.Conv2d(32, 4, 2)}, (3, 32, 5, 5),
    ),
    "patches": (
        lambda m, x: F.fold(m.layer(F.unfold(x, 2)), 5, 2),
        lambda: {"layer": nn.Linear(16, 16)}, (2, 5, 5),
    ),
    "bilinear": (
        lambda m, x: m.both(x[:, 0], x[:, 1]) * m.first(x[:, 0]),
        lambda: {"both": nn.Bilinear(4, 4, 3), "first": nn.Linear(4, 3)}, (2, 4),
    ),
    "added products": (
        added, lambda: {"bias": numbers(3), "weight": numbers(4, 3), "rows": numbers(2, 3)}, (2, 4),
    ),
    "points of their own": (
        sampled, lambda: {"where": nn.Linear(48, 32), "head": nn.Linear(48, 3),
                          "table": numbers(1, 4, 4)}, (3, 4, 4),
    ),
    "waves that are written": (modes, lambda: {"mix": numbers(3, 2, 2, 2)}, (3, 6)),
    "the larger and the smaller": (
        lambda m, x: torch.min(torch.max(m.first(x), m.least), torch.maximum(x[..., 1:], -m.least)),
        lambda: {"first": nn.Linear(4, 3), "least": numbers(3)}, (2, 4),
    ),
    "operations made of others": (
        composed, lambda: {"first": nn.Linear(4, 4), "points": numbers(3, 4)}, (2, 4),
    ),
    "weights by their data": (fixed, lambda: {"first": nn.Linear(4, 4)}, (2, 4)),
    "padded by name in three dimensions": (
        called, lambda: {"layer": nn.Conv3d(2, 2, (1, 3, 3), padding="same")}, (2, 3, 3, 3),
    ),
    "a prompt": (
        prompted, lambda: {"prompt": nn.Embedding(2, 4), "tail": numbers(2, 4),
                           "layer": nn.Linear(4, 3)}, (3, 4),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_layers_whose_operations_are_known(reference, name):
    run, parts, shape = LAYERS[name]
    model = nn.Sequential(reference.Apply(run, **parts()), nn.Tanh(), nn.Flatten())
    reference.check_structure(model, reference.data(4, *shape), rows="loop")


def test_a_weight_that_a_pass_replaces_is_refused():
    kernel = PerSampleKernel(FlatModel(Clipped(4, 3)), cross_entropy)
    with pytest.raises(ModelError, match=r"changes a tensor by its \.data in test_ways"):
        kernel.way(torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64))


def test_a_compiled_model_is_traced_as_it_was_written():
    def refused(*_):
        raise RuntimeError("compiled")

    model = torch.compile(nn.Linear(4, 3), backend=refused)
    kernel = PerSampleKernel(FlatModel(model), cross_entropy)
    assert kernel.way(torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64)) == "graph"


def test_recurrent_cells(reference):
    def steps(m, x):
        h, state = None, None
        for t in range(x.shape[1]):
            state = m.lstm(x[:, t], state)
            h = m.rnn(m.gru(state[0]), h)
        return h

    cells = {"lstm": nn.LSTMCell(4, 3), "gru": nn.GRUCell(3, 3), "rnn": nn.RNNCell(3, 3)}
    model = reference.Apply(steps, **cells)
    reference.check_structure(model, reference.data(4, 2, 4), rows="loop")


@pytest.mark.parametrize("recurrent", [False, True])
def test_records_of_a_model_that_is_not_traced(reference, recurrent, caplog, monkeypatch):
    """By vmap, or in a loop where torch's recurrent layers keep out of its sight: told once."""
    monkeypatch.setattr(per_record, "_announced", set())

    def by_size(m, x):
        h = m.cell(x)[0] if recurrent else x
        return m.head(h.flatten(1)) if x.shape[0] < 1000 else h

    cell = {"cell": nn.GRU(4, 4, batch_first=True)} if recurrent else {}
    model = reference.Apply(by_size, head=nn.Linear(12, 2), **cell)
    with caplog.at_level(logging.INFO, logger="fedpact"):
        reference.check_structure(model, reference.data(5, 3, 4), rows="loop", way="records")
    (record,) = [r for r in caplog.records if r.name == "fedpact"]
    assert record.levelname == ("WARNING" if recurrent else "INFO")
    how = "differentiated in a loop" if recurrent else "vmap differentiates it record by record"
    assert record.message.startswith("model Apply is not shown to keep records apart")
    assert how in record.message


def test_a_model_for_neither_vmap_nor_trace_is_refused(reference):
    def branch(m, x):
        return m.layer(x) if x.sum().item() > 0 else x

    model = reference.Apply(branch, layer=nn.Linear(4, 4)).double()
    kernel = PerSampleKernel(FlatModel(model), squared_error)
    x = reference.data(3, 4)
    for ask in (lambda: kernel.clipped_sum(x, x, 1.0), lambda: kernel.losses(x, x)):
        with pytest.raises(ModelError, match="cannot be differentiated record by record"):
            ask()


@pytest.mark.parametrize("keep", [0, 20 * 2**20])
def test_passes_hold_as_many_records_as_memory_allows(reference, keep, monkeypatch):
    monkeypatch.setattr(norms, "KEEP_BYTES", keep)
    x, y = reference.data(8, 4), reference.data(8, 2, seed=1)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    kernel = reference.forced("records", model, squared_error)
    seen = []

    def weights(losses):
        seen.append(len(losses))
        return torch.ones_like(losses)

    found = kernel.clipped_sum(x, y, 0.3, weights)
    assert seen == ([8] if keep else [1] * 8)
    rows = reference.per_sample(model, squared_error, x, y)
    assert reference.error(found, reference.clipped(rows, 0.3)) < 1e-12
    losses = squared_error(model(x), y).detach()
    assert torch.allclose(kernel.losses(x, y), losses, rtol=1e-12, atol=0)


def test_a_trace_follows_training_and_hooks(reference):
    model = reference.Apply(
        lambda m, x: m.last(m.drop(m.first(x))),
        first=nn.Linear(4, 4), drop=nn.Dropout(0.5), last=nn.Linear(4, 2),
    ).double()  # fmt: skip
    kernel = PerSampleKernel(FlatModel(model), squared_error)
    x, y = reference.data(5, 4), reference.data(5, 2, seed=1)

    def exact():
        rows = reference.per_sample_loop(model, squared_error, x, y)
        return reference.error(kernel.clipped_sum(x, y, math.inf), rows) < 1e-12

    assert not exact()
    model.eval()
    assert exact()
    for register, hook in (
        (model.first.register_forward_hook, lambda _m, _args, output: output * 3),
        (model.first.register_forward_pre_hook, lambda _m, args: (args[0] + 1,)),
    ):
        handle = register(hook)
        assert exact()
        handle.remove()
        assert exact()
    model.drop.forward = lambda h: torch.sigmoid(h)
    assert exact()


def test_way_is_found_once_and_on_dummy_records(reference, monkeypatch):
    """A record that vmap fails at, as for want of memory, sends no later batch through the loop."""
    taken, seen = per_record.Alone._run_by_vmap, []

    def some(self, x, y):
        seen.append(x)
        if x.max() > 100:
            raise RuntimeError("not this batch")
        return taken(self, x, y)

    monkeypatch.setattr(per_record.Alone, "_run_by_vmap", some)
    model = FlatModel(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double())
    x, y = reference.data(16, 4), reference.data(16, 2, seed=1)
    far = torch.cat([x[:15], x[15:] + 1000])
    before = torch.get_rng_state()
    way = per_record.Alone(model, squared_error, far, y, "as the test wants it")
    assert [float(made_up.abs().max()) for made_up in seen] == [0.0]
    assert torch.equal(torch.get_rng_state(), before)
    of_others = way.losses(x, y)
    with pytest.raises(RuntimeError, match="not this batch"):
        way.losses(far, y)
    monkeypatch.setattr(per_record.Alone, "_run_in_loop", None)
    assert torch.equal(way.losses(x, y), of_others)


class AtTheEnd(nn.Module):
    """As encoder-decoder classifiers answer: at the last 2 of a sequence, which zeros have not."""

    def __init__(self):
        super().__init__()
        self.table, self.last = nn.Embedding(5, 4), nn.Linear(4, 3)

    def forward(self, x):
        ends = torch.masked_select(self.table(x), (x == 2)[..., None])
        return self.last(ends.view(len(x), -1, 4)[:, -1])


def test_a_model_that_fails_at_zeros_runs_in_a_loop():
    model = AtTheEnd()
    x, y = torch.tensor([[1, 0, 2], [4, 3, 2], [2, 0, 1]]), torch.arange(3)
    kernel = PerSampleKernel(FlatModel(model), cross_entropy)
    assert kernel.way(x, y) == "records"
    nn.functional.cross_entropy(model(x), y, reduction="sum").backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    torch.testing.assert_close(kernel.clipped_sum(x, y, math.inf), expected)


@pytest.mark.parametrize(
    ("dims", "layer"),
    [
        (1, lambda: nn.Conv1d(5, 4, 1)),
        (2, lambda: nn.Conv2d(5, 4, 1, padding="valid")),
        (3, lambda: nn.Conv3d(5, 4, 1)),
    ],
)
def test_pointwise_convolutions_are_traced_on_one_thread(dims, layer):
    """There torch chooses an algorithm by the number of records."""
    model = FlatModel(nn.Sequential(layer(), nn.Flatten(), nn.Linear(4 * 3**dims, 3)))
    x, y = torch.randn(4, 5, *[3] * dims), torch.arange(4) % 3
    assert PerSampleKernel(model, off_by).way(x, y) == "graph"


def test_a_convolution_without_a_batch_is_refused():
    """Two dimensions are one record to torch, and their first its channels."""
    model = FlatModel(nn.Sequential(nn.Conv1d(1, 1, 1), nn.Linear(6, 3)))
    x, y = torch.randn(3, 6), torch.arange(3)
    with pytest.raises(ModelError, match="a convolution of one record, without a batch"):
        PerSampleKernel(model, cross_entropy).way(x, y)


class Choosing(nn.Module):
    """Writes a number wherever a mask of its own records, or of their rows, says so."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        h = self.first(x).view(-1, 2, 3).clone()
        h[h < 0] = 0.125
        h[h.amax(2) < 0.5] = 0.25
        return self.head(h.flatten(1))


class Frozen(nn.Module):
    """BatchNorm by running statistics, and then a layer that writes in place."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6).eval()
        self.norm.running_mean.normal_()
        self.norm.running_var.uniform_(0.5, 2)
        self.rest = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 3))

    def forward(self, x):
        return self.rest(self.norm(x))

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self


@pytest.mark.parametrize("module", [Choosing(), Frozen()])
def test_masks_and_frozen_batchnorm_are_traced(module):
    kernel = PerSampleKernel(FlatModel(module.train()), off_by)
    x, y = torch.randn(9, 6), torch.arange(9) % 3
    assert kernel.way(x, y) == "graph"
    torch.testing.assert_close(kernel.clipped_sum(x, y, 0.5), by_autograd(kernel, x, y, 0.5))


def experts(m, x):
    """Gives each record to its best expert alone, as a mixture of experts is usually written."""
    best, out = m.gate(x).argmax(1), x.new_zeros(len(x), 3)
    for k, expert in enumerate(m.experts):
        (rows,) = torch.where(best == k)
        out = out.index_add(0, rows, expert(x[rows]))
    return out


def edges(m, x):
    """Adds up along the edges of graphs of two nodes [B, 2, 3]: adjacency, and a feature."""
    graph, start, end = (x[:, :, :2] > 0).nonzero(as_tuple=True)
    h = m.node(x[:, :, 2:]).flatten(0, 1)
    h = torch.zeros_like(h).index_add(0, 2 * graph + end, h[2 * graph + start])
    return h.view(-1, 2, 3).sum(1)


def selected(m, x):
    return m.gate(x) + x.masked_select(x > 0).sum() * torch.argwhere(x > 0).shape[0]


@pytest.mark.parametrize("act", [experts, edges, selected])
def test_places_found_by_values_are_looked_up_record_by_record(reference, act):
    parts = {"gate": nn.Linear(6, 3), "node": nn.Linear(1, 3)}
    parts["experts"] = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)])
    kernel = PerSampleKernel(FlatModel(reference.Apply(act, **parts)), off_by)
    x = torch.randn(9, *((2, 3) if act is edges else (6,)))
    y = torch.arange(9) % 3
    assert kernel.way(x, y) == "records"
    torch.testing.assert_close(kernel.clipped_sum(x, y, 0.5), by_autograd(kernel, x, y, 0.5))
