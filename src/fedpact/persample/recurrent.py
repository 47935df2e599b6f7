"""LSTM, GRU and RNN layers whose gate gradients can be seen: what per-sample gradients are made of.

torch's recurrent operations give the gradients of their weights summed over the records. Here the
recurrence runs step by step, forward and back through time, as one autograd function for each layer
and direction; the gradient of every gate before its nonlinearity is handed over on the way back.

Tensors are [T, B, ·], step after step: a step's rows lie together, so one product takes a step, and
one product takes all steps wherever they do not wait for each other. A layer that runs backward in
time reads flipped input, so to a cell the first step is always the first.

What the gradients of the gates are times ∂ℓ/∂h_t and ∂ℓ/∂c_t is known before these are: it is
computed for many steps at once, in place of the gradients, and multiplied when its step is due.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fedpact.errors import ModelError

Record = Callable[[int, Tensor, Tensor | None], None]
"""Told a parameter's place in the operation's list, g [B, T, O], and u [B, T, K] or None.

The parameter's gradient for record j is Σ_t g_jt u_jtᵀ [O, K], or Σ_t g_jt [O] where u is None.
"""

_BLOCK_BYTES = 2**20
"""About what the factors of one block of steps are computed from and into."""

_aten = cast(Any, torch.ops.aten)

# ∂ℓ/∂y and the function's value y to the gradient at its argument; to a place that may be either's.
_sigmoid_backward = cast(Callable[..., Tensor], _aten.sigmoid_backward.default)
_sigmoid_backward_to = cast(Callable[..., Tensor], _aten.sigmoid_backward.grad_input)
_tanh_backward = cast(Callable[..., Tensor], _aten.tanh_backward.default)
_tanh_backward_to = cast(Callable[..., Tensor], _aten.tanh_backward.grad_input)
_threshold_backward_to = cast(Callable[..., Tensor], _aten.threshold_backward.grad_input)


@dataclass(frozen=True)
class _Passed:
    """∂ℓ/∂ a cell's outputs [T, B, P], last h [B, P] and last c [B, H].

    None for one that no loss depends on.
    """

    outputs: Tensor | None
    hidden: Tensor | None
    cell: Tensor | None = None

    def direct(self, states: Tensor) -> Tensor:
        """∂ℓ/∂h_t [T+1, B, P] past all later steps, for states h_0, ..., h_T; to be written to."""
        found = torch.empty_like(states)
        found[0] = 0
        found[1:] = 0 if self.outputs is None else self.outputs
        if self.hidden is not None:
            found[-1] += self.hidden
        return found


@dataclass(frozen=True)
class _Found:
    """Gate gradients and what follows from them, all [T, B, ·] but for the first states' [B, ·].

    inner, outer: of W_ih x + b_ih and W_hh h + b_hh. projected: g and u of the projection's weight.
    """

    inner: Tensor
    outer: Tensor
    hidden: Tensor
    cell: Tensor | None = None
    projected: tuple[Tensor, Tensor] | None = None


class _Cell(ABC):
    """A layer in one direction, with its parameters and what it keeps of a forward pass.

    params: W_ih [O, K], W_hh [O, P], then b_ih and b_hh [O] if any, then W_hr [P, H] if any.
    place: of the first of them in the operation's list.
    """

    def __init__(self, params: list[Tensor], biased: bool, place: int, record: Record) -> None:
        self.w_ih, self.w_hh, *others = params
        self.b_ih, self.b_hh = others[:2] if biased else (None, None)
        self.w_hr = others[-1] if len(params) % 2 else None
        self._place, self._record = place, record

    @abstractmethod
    def forward(self, x: Tensor, h0: Tensor, c0: Tensor | None) -> tuple[Tensor, ...]:
        """From x [T, B, K] to h_0, ..., h_T [T+1, B, P], then c_0, ..., c_T if any, and the rest.

        The rest is what `backward` needs besides.
        """

    @abstractmethod
    def backward(self, kept: Sequence[Tensor], passed: _Passed) -> _Found:
        """From what forward returned to the gradients; kept is not written to."""

    def tell(self, x: Tensor, states: Tensor, found: _Found) -> None:
        """Hand over the factors of every parameter's gradient."""
        inner, outer = found.inner.transpose(0, 1), found.outer.transpose(0, 1)
        self._record(self._place, inner, x.transpose(0, 1))
        self._record(self._place + 1, outer, states[:-1].transpose(0, 1))
        if self.b_ih is not None:
            self._record(self._place + 2, inner, None)
            self._record(self._place + 3, outer, None)
        if found.projected is not None:
            g, u = found.projected
            place = self._place + (2 if self.b_ih is None else 4)
            self._record(place, g.transpose(0, 1), u.transpose(0, 1))

    @property
    def bias(self) -> Tensor | None:
        """The biases' sum."""
        return None if self.b_ih is None or self.b_hh is None else self.b_ih + self.b_hh


class _Rnn(_Cell):
    """h_t = φ(W_ih x_t + b_ih + W_hh h_t-1 + b_hh), φ of which `curve` writes over its argument."""

    curve: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor, Tensor, Tensor], Tensor]
    """Writes ∂ℓ/∂h φ'(h) to its third argument, from the first two."""

    def forward(self, x: Tensor, h0: Tensor, c0: Tensor | None) -> tuple[Tensor, ...]:  # noqa: ARG002
        """See _Cell."""
        states = _history(h0, len(x))
        states[1:] = _all_steps(x, self.w_ih, self.bias)
        w = self.w_hh.t()
        for h, following in pairwise(states.unbind(0)):
            self.curve(following.addmm_(h, w))
        return (states,)

    def backward(self, kept: Sequence[Tensor], passed: _Passed) -> _Found:
        """See _Cell."""
        (states,) = kept
        dh, grads = passed.direct(states).unbind(0), torch.empty_like(states[1:])
        for t, g in reversed(list(enumerate(grads.unbind(0)))):
            self.slope(dh[t + 1], states[t + 1], g)
            dh[t].addmm_(g, self.w_hh)
        return _Found(grads, grads, dh[0])


class _TanhRnn(_Rnn):
    """φ = tanh."""

    curve = staticmethod(torch.tanh_)

    @staticmethod
    def slope(grad: Tensor, h: Tensor, out: Tensor) -> Tensor:
        """See _Rnn."""
        return _tanh_backward_to(grad, h, grad_input=out)


class _ReluRnn(_Rnn):
    """φ = max(·, 0)."""

    curve = staticmethod(torch.relu_)

    @staticmethod
    def slope(grad: Tensor, h: Tensor, out: Tensor) -> Tensor:
        """See _Rnn."""
        return _threshold_backward_to(grad, h, 0, grad_input=out)


class _Lstm(_Cell):
    """c_t = f c_t-1 + i g and h_t = o tanh c_t, or W_hr times it; gates in the order i, f, g, o."""

    def forward(self, x: Tensor, h0: Tensor, c0: Tensor | None) -> tuple[Tensor, ...]:
        """See _Cell."""
        hs, cs = _history(h0, len(x)), _history(cast(Tensor, c0), len(x))
        tanh = torch.empty_like(cs[1:])
        # The three sigmoids side by side are one operation.
        bias = None if self.bias is None else _sigmoids_first(self.bias)
        gates = _all_steps(x, _sigmoids_first(self.w_ih), bias)
        w_hh, width = _sigmoids_first(self.w_hh).t(), cs.shape[2]
        sigmoids = gates[:, :, : 3 * width].unbind(0)
        i, f, o, g = (part.unbind(0) for part in _by_gate(gates).unbind(2))
        h, c = hs.unbind(0), cs.unbind(0)
        # Without a projection o tanh c is h itself.
        inside = h[1:] if self.w_hr is None else [torch.empty_like(cs[0])] * len(x)
        for t, (z, tanh_c) in enumerate(zip(gates.unbind(0), tanh.unbind(0), strict=True)):
            z.addmm_(h[t], w_hh)
            sigmoids[t].sigmoid_()
            g[t].tanh_()
            torch.mul(f[t], c[t], out=c[t + 1]).addcmul_(i[t], g[t])
            torch.tanh(c[t + 1], out=tanh_c)
            torch.mul(o[t], tanh_c, out=inside[t])
            if self.w_hr is not None:
                torch.mm(inside[t], self.w_hr.t(), out=h[t + 1])
        return hs, cs, gates, tanh

    def backward(self, kept: Sequence[Tensor], passed: _Passed) -> _Found:
        """See _Cell."""
        hs, cs, gates, tanh = kept
        width, direct = cs.shape[2], passed.direct(hs)
        inside = None if self.w_hr is None else gates[:, :, 2 * width : 3 * width] * tanh
        dh = direct.unbind(0)
        dc = torch.zeros_like(cs[0]) if passed.cell is None else passed.cell.clone()
        dm, each_gate = torch.empty_like(dc), dc.unsqueeze(1)
        grads, do = gates.unbind(0), gates[:, :, 3 * width :].unbind(0)
        by_cell = _by_gate(gates)[:, :, :3].unbind(0)
        for start, end in reversed(_blocks(gates)):
            f, slope = self._factors(gates[start:end], cs[start:end], tanh[start:end])
            for t in reversed(range(start, end)):
                k = t - start
                if self.w_hr is None:
                    dm = dh[t + 1]
                else:
                    torch.mm(dh[t + 1], self.w_hr, out=dm)
                dc.addcmul_(dm, slope[k])
                do[t].mul_(dm)
                by_cell[t].mul_(each_gate)
                dc.mul_(f[k])
                dh[t].addmm_(grads[t], self.w_hh)
        return _Found(gates, gates, dh[0], dc, None if inside is None else (direct[1:], inside))

    @staticmethod
    def _factors(
        gates: Tensor, cs: Tensor, tanh: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Write over gates what ∂ℓ/∂c_t (i, f, g) and ∂ℓ/∂h_t (o) are times in their gradients.

        These are in torch's order. Returns f_t = ∂c_t+1/∂c_t and ∂h_t/∂c_t.
        """
        i, f, o, g = _by_gate(gates).unbind(2)
        slopes, kept, do = _tanh_backward(o, tanh), f.clone(), _sigmoid_backward(tanh, o)
        _tanh_backward_to(i, g, grad_input=o)
        _sigmoid_backward_to(g, i, grad_input=i)
        _sigmoid_backward_to(cs, f, grad_input=f)
        g.copy_(do)
        return kept.unbind(0), slopes.unbind(0)


class _Gru(_Cell):
    """h_t = (1 - z) n + z h_t-1, n = tanh(W_in x + b_in + r q), q = W_hn h_t-1 + b_hn.

    torch's order is r, z, n. Here a step is r, z, q, n: one product adds W_hh h to the first three.
    """

    def forward(self, x: Tensor, h0: Tensor, c0: Tensor | None) -> tuple[Tensor, ...]:  # noqa: ARG002
        """See _Cell."""
        hs, width = _history(h0, len(x)), h0.shape[1]
        gates = x.new_zeros(*x.shape[:2], 4 * width)
        rows, two = gates.flatten(0, 1), 2 * width
        inputs, w_ih, w_hh = x.flatten(0, 1), self.w_ih.t(), self.w_hh.t()
        torch.mm(inputs, w_ih[:, :two], out=rows[:, :two])
        torch.mm(inputs, w_ih[:, two:], out=rows[:, 3 * width :])
        if self.b_ih is not None and self.bias is not None and self.b_hh is not None:
            rows += torch.cat([self.bias[:two], self.b_hh[two:], self.b_ih[two:]])
        h, sums = hs.unbind(0), gates[:, :, : 3 * width].unbind(0)
        sigmoids = gates[:, :, :two].unbind(0)
        r, z, q, n = (part.unbind(0) for part in _by_gate(gates).unbind(2))
        for t in range(len(x)):
            sums[t].addmm_(h[t], w_hh)
            sigmoids[t].sigmoid_()
            n[t].addcmul_(r[t], q[t]).tanh_()
            torch.lerp(n[t], h[t], z[t], out=h[t + 1])
        return hs, gates

    def backward(self, kept: Sequence[Tensor], passed: _Passed) -> _Found:
        """See _Cell."""
        hs, gates = kept
        width, direct = hs.shape[2], passed.direct(hs)
        dh, each_gate = direct.unbind(0), direct.unsqueeze(2).unbind(0)
        outer, by_gate = gates[:, :, : 3 * width], _by_gate(gates).unbind(0)
        grads = outer.unbind(0)
        for start, end in reversed(_blocks(gates)):
            z = self._factors(gates[start:end], hs[start:end])
            for t in reversed(range(start, end)):
                by_gate[t].mul_(each_gate[t + 1])
                dh[t].addcmul_(dh[t + 1], z[t - start]).addmm_(grads[t], self.w_hh)
        inner = torch.cat([gates[:, :, : 2 * width], gates[:, :, 3 * width :]], 2)
        return _Found(inner, outer, dh[0])

    @staticmethod
    def _factors(gates: Tensor, hs: Tensor) -> tuple[Tensor, ...]:
        """Write over r, z, q, n what ∂ℓ/∂h_t is times in their gradients; returns z."""
        r, z, q, n = _by_gate(gates).unbind(2)
        kept, dn = z.clone(), _tanh_backward(1 - z, n)
        _sigmoid_backward_to(hs - n, z, grad_input=z)
        n.copy_(dn)
        _sigmoid_backward_to(dn * q, r, grad_input=dn)
        torch.mul(n, r, out=q)
        r.copy_(dn)
        return kept.unbind(0)


_CELLS: dict[object, type[_Cell]] = {
    _aten.lstm.input: _Lstm,
    _aten.gru.input: _Gru,
    _aten.rnn_tanh.input: _TanhRnn,
    _aten.rnn_relu.input: _ReluRnn,
}

RECURRENT = frozenset(_CELLS)
"""The operations that `run` knows."""


class _Recurrence(torch.autograd.Function):
    """A cell's outputs [T, B, P], last h and, of an LSTM, last c, by autograd from x, h0 and c0."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        h0: Tensor,
        c0: Tensor | None,
        anchor: Tensor,  # noqa: ARG004
        cell: _Cell,
    ) -> tuple[Tensor, ...]:
        kept = cell.forward(x, h0, c0)
        ctx.save_for_backward(x, *kept)
        ctx.set_materialize_grads(False)
        ctx.cell = cell
        # Copies, so that the model may write over what it is given.
        found = kept[0][1:].clone(), kept[0][-1].clone()
        return found if c0 is None else (*found, kept[1][-1].clone())

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *passed: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        x, *kept = cast(tuple[Tensor, ...], ctx.saved_tensors)
        cell = cast(_Cell, ctx.cell)
        found = cell.backward(kept, _Passed(*passed))
        # Without its history: whoever keeps it would keep the graph, and the graph whom it tells.
        cell.tell(x.detach(), kept[0], found)
        dx = _all_steps(found.inner, cell.w_ih.t(), None) if ctx.needs_input_grad[0] else None
        return dx, found.hidden, found.cell, None, None


def run(op: object, args: Sequence[object], record: Record) -> tuple[Tensor, ...]:
    """What the operation returns of its arguments, (out, hn, cn) or (out, hn).

    Autograd differentiates it with respect to input, h0 and c0; parameters are constants to it. As
    the gradient passes, `record` is told the factors of every parameter's per-sample gradients; of
    a layer that no loss depends on it is told nothing. Raises ModelError for an operation that is
    not in RECURRENT.
    """
    kind = _CELLS.get(op)
    if kind is None:
        raise ModelError(
            f"operation {op} is no recurrent layer that can be run step by step: use nn.LSTM, "
            "nn.GRU or nn.RNN on padded sequences [B, T, K]"
        )
    inputs, hx, listed, biased, layers, dropout, train, both, batch_first = cast(Any, args)
    params = [p.detach() for p in cast(Sequence[Tensor], listed)]
    starts = [s.unbind(0) for s in (hx if kind is _Lstm else [hx])]
    x = cast(Tensor, inputs.transpose(0, 1) if batch_first else inputs)
    # Autograd passes where something requires grad: x and h0 may both be data.
    anchor = torch.zeros((), requires_grad=True)
    size, directions = len(params) // len(starts[0]), 2 if both else 1
    lasts: list[tuple[Tensor, ...]] = []
    for layer in range(layers):
        x = F.dropout(x, dropout, train) if layer else x
        made: list[Tensor] = []
        for k in range(layer * directions, (layer + 1) * directions):
            reverse, place = k % directions == 1, k * size
            cell = kind(params[place : place + size], biased, place, record)
            first = [s[k] for s in starts] if kind is _Lstm else [starts[0][k], None]
            read = x.flip(0) if reverse else x
            y, *last = cast(Any, _Recurrence).apply(read, *first, anchor, cell)
            made.append(y.flip(0) if reverse else y)
            lasts.append(tuple(last))
        x = torch.cat(made, 2) if both else made[0]
    states = [torch.stack(each) for each in zip(*lasts, strict=True)]
    return x.transpose(0, 1) if batch_first else x, *states


def _history(first: Tensor, steps: int) -> Tensor:
    """Room for a state's values [T+1, B, ·], the first of which is known."""
    values = first.new_empty(steps + 1, *first.shape)
    values[0] = first
    return values


def _all_steps(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x Wᵀ + b [T, B, O] of x [T, B, K], all steps in one product."""
    return F.linear(x.flatten(0, 1), weight, bias).view(*x.shape[:2], -1)


def _by_gate(rows: Tensor) -> Tensor:
    """Four gates side by side [T, B, 4H] as [T, B, 4, H]."""
    return rows.view(*rows.shape[:2], 4, -1)


def _sigmoids_first(rows: Tensor) -> Tensor:
    """An LSTM's weight or bias with its gates in the order i, f, o, g."""
    i, f, g, o = rows.chunk(4)
    return torch.cat([i, f, o, g])


def _blocks(gates: Tensor) -> list[tuple[int, int]]:
    """Steps to compute factors for at a time, so that the cache still holds them when due."""
    # Besides the gates there are their gradients, and almost as much of states.
    step = 3 * gates[0].numel() * gates.element_size()
    count = max(1, _BLOCK_BYTES // max(1, step))
    return [(t, min(t + count, len(gates))) for t in range(0, len(gates), count)]
