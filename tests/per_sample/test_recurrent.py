"""Recurrent layers run step by step, against torch's own modules record by record."""

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedpact.common.errors import ModelError
from fedpact.per_sample import recurrent
from fedpact.per_sample.recurrent import RECURRENT, run

_KINDS = {
    "lstm": torch.ops.aten.lstm.input,
    "gru": torch.ops.aten.gru.input,
    "tanh": torch.ops.aten.rnn_tanh.input,
    "relu": torch.ops.aten.rnn_relu.input,
}
_EXACT = {torch.float64: 1e-12, torch.float32: 2e-5}


@dataclass
class Case:
    """A layer with input and states, whose outputs' sums weigh as `weights` says."""

    kind: str
    module: nn.RNNBase
    x: Tensor
    states: list[Tensor]
    weights: list[Tensor]

    @property
    def batch(self) -> int:
        return self.x.shape[0 if self.module.batch_first else 1]

    def args(self, x: Tensor, states: list[Tensor]) -> tuple:
        m, hx = self.module, states if self.kind == "lstm" else states[0]
        settings = (m.bias, m.num_layers, m.dropout, m.training, m.bidirectional, m.batch_first)
        return (x, hx, list(m._flat_weights), *settings)

    def plain(self, x: Tensor, states: list[Tensor]) -> tuple[Tensor, ...]:
        return _KINDS[self.kind](*self.args(x, states))

    def one(self, j: int) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Record j alone: input, states and weights."""
        along = 0 if self.module.batch_first else 1
        x, out = (t.narrow(along, j, 1) for t in (self.x, self.weights[0]))
        states, rest = ([t.narrow(1, j, 1) for t in ts] for ts in (self.states, self.weights[1:]))
        return x, states, [out, *rest]


def case_of(kind, *, batch=3, steps=4, layers=1, width=5, first=True, seed=0, **torchs) -> Case:
    torch.manual_seed(seed)
    torchs = {"bias": True, "bidirectional": False, "dtype": torch.float64, **torchs}
    dtype = torchs["dtype"]
    make = {"lstm": nn.LSTM, "gru": nn.GRU}.get(kind, nn.RNN)
    more = {"nonlinearity": kind} if make is nn.RNN else {}
    module = make(3, width, layers, batch_first=first, **torchs, **more)
    x = torch.randn(*((batch, steps) if first else (steps, batch)), 3, dtype=dtype)
    sides = layers * (1 + torchs["bidirectional"])
    states = [torch.randn(sides, batch, width, dtype=dtype)]
    states += [torch.randn(sides, batch, width, dtype=dtype)] if kind == "lstm" else []
    case = Case(kind, module, x, states, [])
    with torch.no_grad():
        case.weights = [torch.randn_like(y) for y in case.plain(x, states)]
    return case


def loss_of(outputs, weights) -> Tensor:
    return sum((y * w).sum() for y, w in zip(outputs, weights, strict=True))


def leaves(tensors: list[Tensor]) -> list[Tensor]:
    return [t.detach().clone().requires_grad_() for t in tensors]


def recorder():
    """What was told by place, and what tells it."""
    told = {}

    def record(i, g, u):
        assert i not in told
        assert not g.requires_grad
        told[i] = (g, u)

    return told, record


def rows_of(case: Case, told: dict) -> list[Tensor]:
    """The per-sample gradients [B, ...] that follow from what was told."""
    rows = []
    for i, p in enumerate(case.module._flat_weights):
        g, u = told[i]
        assert g.shape[0] == case.batch
        rows.append(g.sum(1) if u is None else torch.bmm(g.mT, u))
        assert rows[-1].shape == (case.batch, *p.shape)
    return rows


def ours(case: Case, x: Tensor, states: list[Tensor], weights=None):
    """Outputs, gradients of x and the states, and per-sample gradients."""
    told, record = recorder()
    x, *states = leaves([x, *states])
    outputs = run(_KINDS[case.kind], case.args(x, states), record)
    loss_of(outputs, weights or case.weights).backward()
    return [y.detach() for y in outputs], [t.grad for t in (x, *states)], rows_of(case, told)


def close(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    scale = max(1e-3, expected.abs().max().item())
    assert (found - expected).abs().max().item() <= _EXACT[expected.dtype] * scale


def check_against_torch(case: Case) -> None:
    outputs, grads, rows = ours(case, case.x, case.states)
    for j in range(case.batch):
        x, states, weights = case.one(j)
        x, *states = leaves([x, *states])
        expected = case.plain(x, states)
        params = list(case.module._flat_weights)
        alone = torch.autograd.grad(loss_of(expected, weights), [x, *states, *params])
        own = Case(case.kind, case.module, outputs[0], outputs[1:], [grads[0], *grads[1:]])
        y, last, gradients = own.one(j)
        for found, wanted in zip([y, *last], expected, strict=True):
            close(found, wanted)
        for found, wanted in zip(gradients, alone, strict=False):
            close(found, wanted)
        for found, wanted in zip(rows, alone[len(gradients) :], strict=True):
            close(found[j], wanted)


@example(
    kind="lstm", batch=2, steps=3, layers=2, width=5, bias=True, bidirectional=True, first=True,
    dtype=torch.float64, seed=0,
)  # fmt: skip
@settings(derandomize=True, deadline=None, max_examples=25)
@given(
    kind=st.sampled_from(sorted(_KINDS)),
    batch=st.integers(1, 4),
    steps=st.integers(1, 6),
    layers=st.integers(1, 3),
    width=st.integers(3, 6),
    bias=st.booleans(),
    bidirectional=st.booleans(),
    first=st.booleans(),
    dtype=st.sampled_from([torch.float64, torch.float64, torch.float32]),
    seed=st.integers(0, 2**16),
)
def test_everything_agrees_with_autograd_record_by_record(kind, **settings):
    check_against_torch(case_of(kind, **settings))


@pytest.mark.parametrize("steps", [1, 2])
def test_blocks_of_steps_do_not_show(steps, monkeypatch):
    case = case_of("lstm", steps=7)
    bytes_of_gates = case.batch * 4 * case.module.hidden_size * 8
    monkeypatch.setattr(recurrent, "_BLOCK_BYTES", steps * 3 * bytes_of_gates)
    check_against_torch(case)


@pytest.mark.parametrize("kind", sorted(_KINDS))
@pytest.mark.parametrize("both", [False, True])
def test_dropout_between_layers_is_torchs(kind, both):
    case = case_of(kind, layers=3, bidirectional=both, dropout=0.4)
    torch.manual_seed(7)
    x, *states = leaves([case.x, *case.states])
    expected = case.plain(x, states)
    params = list(case.module._flat_weights)
    alone = torch.autograd.grad(loss_of(expected, case.weights), [x, *states, *params])
    torch.manual_seed(7)
    outputs, grads, rows = ours(case, case.x, case.states)
    for found, wanted in zip(outputs, expected, strict=True):
        close(found, wanted)
    for found, wanted in zip([*grads, *(r.sum(0) for r in rows)], alone, strict=True):
        close(found, wanted)
    case.module.eval()
    check_against_torch(case)


@pytest.mark.parametrize("kind", sorted(_KINDS))
def test_one_output_alone_may_carry_the_gradient(kind):
    case = case_of(kind, layers=2, bidirectional=True)
    full = case.weights
    for kept in range(len(full)):
        case.weights = [w if i == kept else torch.zeros_like(w) for i, w in enumerate(full)]
        check_against_torch(case)
        # So that the others reach the layers as nothing at all.
        told, record = recorder()
        outputs = run(_KINDS[kind], case.args(case.x, case.states), record)
        (outputs[kept] * full[kept]).sum().backward()
        rows = ours(case, case.x, case.states)[2]
        assert told
        for i, (g, u) in told.items():
            close(g.sum(1) if u is None else torch.bmm(g.mT, u), rows[i])


@pytest.mark.parametrize("kind", sorted(_KINDS))
def test_data_and_constant_states_need_no_gradient(kind):
    case = case_of(kind, layers=2)
    told, record = recorder()
    outputs = run(_KINDS[kind], case.args(case.x, case.states), record)
    loss_of(outputs, case.weights).backward()
    rows = ours(case, case.x, case.states)[2]
    assert all(map(torch.equal, rows_of(case, told), rows))
    assert all(p.grad is None for p in case.module.parameters())


@pytest.mark.parametrize("kind", sorted(_KINDS))
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_record_that_is_not_finite_touches_no_other(kind, value, dtype):
    case = case_of(kind, batch=5, layers=2, bidirectional=True, width=9, dtype=dtype)
    spoilt, states = case.x.clone(), [s.clone() for s in case.states]
    spoilt[2, 1], states[0][:, 2] = value, value
    good = torch.tensor([0, 1, 3, 4])
    before, after = ours(case, case.x, case.states), ours(case, spoilt, states)
    assert not after[0][0][2].isfinite().all() or kind == "tanh"
    for part, records in ((0, [0, 1, 1]), (1, [0, 1, 1]), (2, [0] * 99)):
        for a, b, along in zip(before[part], after[part], records, strict=False):
            assert torch.equal(a.index_select(along, good), b.index_select(along, good))


@pytest.mark.parametrize("kind", sorted(_KINDS))
def test_small_activations_keep_their_digits_in_float32(kind):
    case = case_of(kind, dtype=torch.float32)
    states = [torch.zeros_like(s) for s in case.states]
    with torch.no_grad():
        for p in case.module.parameters():
            p.mul_(1e-6)
        found = run(_KINDS[kind], case.args(case.x, states), lambda *_: None)[0]
        case.module.double()
        exact = case.plain(case.x.double(), [s.double() for s in states])[0]
    # A tanh that errs by float32's rounding of 1 would err by a tenth here.
    assert (found - exact).abs().max() <= 2e-6 * exact.abs().max()


@pytest.mark.parametrize("kind", sorted(_KINDS))
def test_the_model_may_write_over_its_outputs(kind):
    case = case_of(kind, layers=2)
    x, *states = leaves([case.x, *case.states])
    told, record = recorder()
    outputs = run(_KINDS[kind], case.args(x, states), record)
    for y in outputs:
        y.mul_(1)
    loss_of(outputs, case.weights).backward()
    assert all(map(torch.equal, rows_of(case, told), ours(case, case.x, case.states)[2]))


def test_without_gradient_nothing_is_reported():
    case = case_of("lstm")
    with torch.no_grad():
        outputs = run(_KINDS["lstm"], case.args(case.x, case.states), pytest.fail)
    assert not any(y.requires_grad for y in outputs)


def test_other_operations_are_refused():
    assert set(_KINDS.values()) == RECURRENT
    with pytest.raises(ModelError, match=r"aten\.lstm\.data.*padded"):
        run(torch.ops.aten.lstm.data, (), lambda *_: None)
