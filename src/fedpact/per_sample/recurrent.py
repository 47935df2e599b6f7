"""LSTM, GRU and RNN layers that expose the gradients of their gates, for per-sample gradients.

torch's recurrent operations return the gradients of their weights summed over records. Here the
recurrence runs step by step, forward and backward through time, as one autograd function per layer
and direction, which reports the gradient of every gate before its nonlinearity.

Tensors are [T, B, ·]: the rows of a step are contiguous, so a step is one product, and independent
steps are one product together. A layer that runs backward in time reads flipped input, so for a
cell the first step always comes first.

The factors between the gates' gradients and ∂ℓ/∂h_t, ∂ℓ/∂c_t are known beforehand: they are
computed for many steps at once, in the memory of the gradients, and multiplied step by step.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fedpact.common.errors import ModelError
from fedpact.common.params import without_autocast
from fedpact.per_sample.products import filled_linear

Record = Callable[[int, Tensor, Tensor | None], None]
"""Told a parameter's place in the operation's list, g [B, T, O], and u [B, T, K] or None.

The parameter's gradient for record j is Σ_t g_jt u_jtᵀ [O, K], or Σ_t g_jt [O] where u is None.
"""

_BLOCK_BYTES = 2**20
"""About what the factors of one block of steps are computed from and into."""

_Rows = tuple[Tensor, ...]

_aten = cast(Any, torch.ops.aten)

# ∂ℓ/∂y and the function's value y to the gradient at its argument; to a place that may be either's.
_sigmoid_backward = cast(Callable[..., Tensor], _aten.sigmoid_backward.default)
_sigmoid_backward_to = cast(Callable[..., Tensor], _aten.sigmoid_backward.grad_input)
_tanh_backward = cast(Callable[..., Tensor], _aten.tanh_backward.default)
_tanh_backward_to = cast(Callable[..., Tensor], _aten.tanh_backward.grad_input)


@dataclass(frozen=True)
class _Found:
    """Gradients of W_ih x + b_ih (inner) and W_hh h + b_hh (outer) [T, B, O], of h_0 and c_0."""

    inner: Tensor
    outer: Tensor
    hidden: Tensor
    cell: Tensor | None = None


_Step = Callable[[Tensor, Tensor, Tensor], Tensor]
"""The next state from W_ih x + b_ih, W_hh h + b_hh and the state h."""


def gru_step(of_x: Tensor, of_h: Tensor, state: Tensor) -> Tensor:
    """Return (1 - z) n + z h of a gated recurrent unit."""
    x, h = of_x.chunk(3, 1), of_h.chunk(3, 1)
    reset, update = torch.sigmoid(x[0] + h[0]), torch.sigmoid(x[1] + h[1])
    return torch.lerp(torch.tanh(x[2] + reset * h[2]), state, update)


class _Cell(ABC):
    """A layer in one direction, with its parameters and saved values of a forward pass.

    params: W_ih [O, K], W_hh [O, H], then b_ih and b_hh [O] if any. place: the index of the first
    of them in the operation's list.
    """

    def __init__(self, params: list[Tensor], biased: bool, place: int, record: Record) -> None:
        self.w_ih, self.w_hh, *biases = params
        self.b_ih, self.b_hh = biases or [params[0].new_zeros(len(params[0]))] * 2
        self._biased, self._place, self._record = biased, place, record

    @abstractmethod
    def forward(self, x: Tensor, first: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Compute h_0, ..., h_T [T+1, B, H] (and c) from x [T, B, K] and h_0 (and c_0).

        The other returned tensors are saved for `backward`.
        """

    @abstractmethod
    def backward(self, kept: Sequence[Tensor], direct: Tensor, cells: Tensor | None) -> _Found:
        """Compute gradients from forward's tensors and the direct parts of ∂ℓ/∂h_t and ∂ℓ/∂c_t.

        Both are [T+1, B, ·]; all arguments may be overwritten.
        """

    def tell(self, x: Tensor, states: Tensor, found: _Found) -> None:
        """Report the factors of every parameter's gradient."""
        inner, outer = (g.transpose(0, 1) for g in (found.inner, found.outer))
        self._record(self._place, inner, x.transpose(0, 1))
        self._record(self._place + 1, outer, states[:-1].transpose(0, 1))
        if self._biased:
            self._record(self._place + 2, inner, None)
            self._record(self._place + 3, outer, None)


class _Stepped(_Cell):
    """h_t = step(W_ih x_t + b_ih, W_hh h_t-1 + b_hh, h_t-1), differentiated by autograd."""

    def __init__(self, step: _Step, *of: Any) -> None:
        super().__init__(*of)
        self._step = step

    def forward(self, x: Tensor, first: Sequence[Tensor]) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            self._inner = _all_steps(x, self.w_ih, self.b_ih).requires_grad_()
            self._outer: list[Tensor] = []
            self._states = [first[0].detach().requires_grad_()]
            for of_x in self._inner.unbind(0):
                of_h = filled_linear(F.linear, self._states[-1], self.w_hh, self.b_hh)
                self._outer.append(of_h)
                self._states.append(self._step(of_x, of_h, self._states[-1]))
        return (torch.stack([h.detach() for h in self._states]),)

    def backward(self, kept: Sequence[Tensor], direct: Tensor, cells: Tensor | None) -> _Found:  # noqa: ARG002
        first, *states = self._states
        wanted = [self._inner, *self._outer, first]
        inner, *outer, hidden = torch.autograd.grad(states, wanted, [*direct[1:].unbind(0)])
        return _Found(inner, torch.stack(outer), direct[0] + hidden)


def _step_of(curve: Callable[[Tensor], Tensor]) -> _Step:
    def step(of_x: Tensor, of_h: Tensor, _: Tensor) -> Tensor:
        return curve(of_x + of_h)

    return step


class _Lstm(_Cell):
    """c_t = f c_t-1 + i g and h_t = o tanh c_t; gates in the order i, f, g, o."""

    def forward(self, x: Tensor, first: Sequence[Tensor]) -> tuple[Tensor, ...]:
        hs, cs = (_history(state, len(x)) for state in first)
        tanh = torch.empty_like(cs[1:])
        # The three sigmoids are contiguous, so they are one operation.
        w_ih, w_hh, bias = map(_sigmoids_first, (self.w_ih, self.w_hh, self.b_ih + self.b_hh))
        gates, width, w_hh = _all_steps(x, w_ih, bias), cs.shape[2], w_hh.t()
        sigmoids = gates[:, :, : 3 * width].unbind(0)
        i, f, o, g = (part.unbind(0) for part in _by_gate(gates).unbind(2))
        h, c = hs.unbind(0), cs.unbind(0)
        for t, (z, tanh_c) in enumerate(zip(gates.unbind(0), tanh.unbind(0), strict=True)):
            z.addmm_(h[t], w_hh)
            sigmoids[t].sigmoid_()
            g[t].tanh_()
            torch.mul(f[t], c[t], out=c[t + 1]).addcmul_(i[t], g[t])
            torch.tanh(c[t + 1], out=tanh_c)
            torch.mul(o[t], tanh_c, out=h[t + 1])
        return hs, cs, gates, tanh

    def backward(self, kept: Sequence[Tensor], direct: Tensor, cells: Tensor | None) -> _Found:
        _, cs, gates, tanh = kept
        width = cs.shape[2]
        dc = torch.zeros_like(cs[0])
        dh, each_gate = direct.unbind(0), dc.unsqueeze(1)
        grads, do = gates.unbind(0), gates[:, :, 3 * width :].unbind(0)
        by_cell = _by_gate(gates)[:, :, :3].unbind(0)
        # Four gates' numbers lie together, which 4 divides; see products.FILLED.
        w_hh = self.w_hh if width % 4 == 0 else self.w_hh.t().contiguous().t()
        for start, end in reversed(_blocks(gates)):
            f, slope = self._factors(gates[start:end], cs[start:end], tanh[start:end])
            for t in reversed(range(start, end)):
                k, dm = t - start, dh[t + 1]
                if cells is not None:
                    dc.add_(cells[t + 1])
                dc.addcmul_(dm, slope[k])
                do[t].mul_(dm)
                by_cell[t].mul_(each_gate)
                dc.mul_(f[k])
                dh[t].addmm_(grads[t], w_hh)
        return _Found(gates, gates, dh[0], dc)

    @staticmethod
    def _factors(gates: Tensor, cs: Tensor, tanh: Tensor) -> tuple[_Rows, _Rows]:
        """Replace gates by the factors of ∂ℓ/∂c_t (i, f, g) and ∂ℓ/∂h_t (o) in their gradients.

        They are in torch's order. Returns f_t = ∂c_t+1/∂c_t and ∂h_t/∂c_t.
        """
        i, f, o, g = _by_gate(gates).unbind(2)
        slopes, kept, do = _tanh_backward(o, tanh), f.clone(), _sigmoid_backward(tanh, o)
        _tanh_backward_to(i, g, grad_input=o)
        _sigmoid_backward_to(g, i, grad_input=i)
        _sigmoid_backward_to(cs, f, grad_input=f)
        g.copy_(do)
        return kept.unbind(0), slopes.unbind(0)


_CELLS: dict[object, Callable[..., _Cell]] = {
    _aten.lstm.input: _Lstm,
    _aten.gru.input: partial(_Stepped, gru_step),
    _aten.rnn_tanh.input: partial(_Stepped, _step_of(torch.tanh)),
    _aten.rnn_relu.input: partial(_Stepped, _step_of(torch.relu)),
}

RECURRENT = frozenset(_CELLS)
"""The operations that `run` knows."""


class _Recurrence(torch.autograd.Function):
    """A cell's outputs [T, B, H], last h and, for an LSTM, last c, differentiable in x, h0, c0.

    With an end, outputs after it are 0, and the states at it are the last ones.
    """

    @staticmethod
    def forward(
        ctx: Any, cell: _Cell, end: "_End | None", _: Tensor, x: Tensor, *first: Tensor
    ) -> tuple[Tensor, ...]:
        kept = cell.forward(x, first)
        at = -1 if end is None else end.at
        # Copies, so that the model may modify its inputs in place.
        lasts = [states[at].clone() for states in kept[: len(first)]]
        if end is not None:
            kept[0].masked_fill_(end.past, 0)
        ctx.save_for_backward(x, *kept)
        ctx.set_materialize_grads(False)
        ctx.cell, ctx.end = cell, end
        return kept[0][1:].clone(), *lasts

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *passed: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        x, *kept = cast(tuple[Tensor, ...], ctx.saved_tensors)
        cell, end = cast(_Cell, ctx.cell), cast(_End | None, ctx.end)
        outputs, hidden, *last = passed
        cells = _direct(kept[1], None, last[0], end) if last and last[0] is not None else None
        found = cell.backward(kept, _direct(kept[0], outputs, hidden, end), cells)
        # Detached: a reference to it would keep the graph alive, and the graph the recorder.
        cell.tell(x.detach(), kept[0], found)
        dx = _all_steps(found.inner, cell.w_ih.t()) if ctx.needs_input_grad[3] else None
        return None, None, None, dx, found.hidden, *([found.cell] if last else [])


class _End:
    """The ends of records with lengths [B] in T steps.

    at: the index of each last state in [T+1, B]. past: the mask of states after it, [T+1, B, 1].
    turned: the steps [T, B, 1] in reverse order, except those after the end.
    """

    def __init__(self, lengths: Tensor, steps: int) -> None:
        lengths = lengths.clamp(1, steps)
        self.at = (lengths, torch.arange(len(lengths), device=lengths.device))
        t = torch.arange(steps + 1, device=lengths.device).unsqueeze(1)
        self.past = (t > lengths).unsqueeze(2)
        self.turned = torch.where(t < lengths, lengths - 1 - t, t)[:-1].unsqueeze(2)

    def turn(self, x: Tensor) -> Tensor:
        """x [T, B, K] with each record's steps in reverse order."""
        return x.gather(0, self.turned.expand_as(x))


def run(
    op: object, args: Sequence[object], record: Record, lengths: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Run a recurrent operation; return (out, hn, cn) or (out, hn).

    args: input [B, T, K] (or [T, B, K]), h0 or [h0, c0], the parameters, has_biases, num_layers,
    dropout, train, bidirectional, batch_first. Autograd differentiates it once, in input, h0 and
    c0; parameters are constants. During the backward pass `record` receives the factors of every
    parameter's per-sample gradients, except for layers that no loss depends on. lengths: the number
    of steps of each record [B], 1 to T, as in packed sequences; None if all have T.
    Raises ModelError: op is not in RECURRENT.
    """
    if op not in RECURRENT:
        raise ModelError(f"operation {op} is not known: use nn.LSTM, nn.GRU or nn.RNN, padded")
    kind = _CELLS[op]
    inputs, hx, listed, biased, layers, dropout, train, both, batch_first = cast(Any, args)
    params = [p.detach() for p in cast(Sequence[Tensor], listed)]
    # In float32 even under autocast, as errors accumulate over the steps.
    inputs, *states = (v.to(params[0].dtype) for v in (inputs, *(hx if kind is _Lstm else [hx])))
    starts = list(zip(*(s.unbind(0) for s in states), strict=True))
    x = cast(Tensor, inputs.transpose(0, 1) if batch_first else inputs)
    # Autograd needs an input that requires grad, but x and h0 may both be data.
    anchor = torch.zeros((), requires_grad=True)
    size, directions = len(params) // len(starts), 2 if both else 1
    lasts: list[tuple[Tensor, ...]] = []
    end = None if lengths is None else _End(lengths.to(x.device), len(x))
    turn = partial(torch.flip, dims=[0]) if end is None else end.turn
    for layer in range(layers):
        x = F.dropout(x, dropout, train) if layer else x
        made: list[Tensor] = []
        for k in range(layer * directions, (layer + 1) * directions):
            reverse, place = k % directions == 1, k * size
            cell = kind(params[place : place + size], biased, place, record)
            read = turn(x) if reverse else x
            with without_autocast(x.device.type):
                y, *last = cast(Any, _Recurrence).apply(cell, end, anchor, read, *starts[k])
            made.append(turn(y) if reverse else y)
            lasts.append(tuple(last))
        x = torch.cat(made, 2) if both else made[0]
    states = [torch.stack(each) for each in zip(*lasts, strict=True)]
    return x.transpose(0, 1) if batch_first else x, *states


def _history(first: Tensor, steps: int) -> Tensor:
    """Memory for a state's values [T+1, B, ·], with the first one set."""
    values = first.new_empty(steps + 1, *first.shape)
    values[0] = first
    return values


def _direct(
    states: Tensor, outputs: Tensor | None, last: Tensor | None, end: _End | None
) -> Tensor:
    """The direct part of ∂ℓ/∂h_t, for h_0, ..., h_T [T+1, B, H], from outputs and h_T."""
    found = torch.empty_like(states)
    found[0] = 0
    found[1:] = 0 if outputs is None else outputs
    if end is not None:
        found.masked_fill_(end.past, 0)
    if last is not None:
        found[-1 if end is None else end.at] += last
    return found


def _all_steps(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b [T, B, O] from x [T, B, K], all steps in one product."""
    return filled_linear(F.linear, x.flatten(0, 1), weight, bias).view(*x.shape[:2], -1)


def _by_gate(rows: Tensor) -> Tensor:
    """Four gates side by side [T, B, 4H] as [T, B, 4, H]."""
    return rows.view(*rows.shape[:2], 4, -1)


def _sigmoids_first(rows: Tensor) -> Tensor:
    """An LSTM's weight or bias with its gates in the order i, f, o, g."""
    i, f, g, o = rows.chunk(4)
    return torch.cat([i, f, o, g])


def _blocks(gates: Tensor) -> list[tuple[int, int]]:
    """Blocks of steps whose factors fit into the cache until they are used."""
    # In addition to the gates there are their gradients, and almost as many states.
    step = 3 * gates[0].numel() * gates.element_size()
    count = max(1, _BLOCK_BYTES // max(1, step))
    return [(t, min(t + count, len(gates))) for t in range(0, len(gates), count)]
