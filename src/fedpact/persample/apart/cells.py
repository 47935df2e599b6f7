"""Recurrent cells as the operations that they are made of, each of which has a rule.

An nn.LSTMCell, GRUCell or RNNCell that a model calls step by step leaves one operation a step; in
place of it the tracer puts linear layers, whose shares over all steps are then summed as one.
Arguments and results are torch's.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

_aten = cast(Any, torch.ops.aten)


def _lstm(
    x: Tensor,
    hx: Sequence[Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    gates = F.linear(x, w_ih, b_ih) + F.linear(hx[0], w_hh, b_hh)
    i, f, g, o = gates.chunk(4, 1)
    cell = torch.sigmoid(f) * hx[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(cell), cell


def _gru(
    x: Tensor,
    hx: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Tensor:
    of_x, of_h = F.linear(x, w_ih, b_ih).chunk(3, 1), F.linear(hx, w_hh, b_hh).chunk(3, 1)
    reset, update = torch.sigmoid(of_x[0] + of_h[0]), torch.sigmoid(of_x[1] + of_h[1])
    new = torch.tanh(of_x[2] + reset * of_h[2])
    return (1 - update) * new + update * hx


def _plain(curve: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def cell(
        x: Tensor,
        hx: Tensor,
        w_ih: Tensor,
        w_hh: Tensor,
        b_ih: Tensor | None = None,
        b_hh: Tensor | None = None,
    ) -> Tensor:
        return curve(F.linear(x, w_ih, b_ih) + F.linear(hx, w_hh, b_hh))

    return cell


CELLS: dict[Any, Callable[..., Any]] = {
    _aten.lstm_cell.default: _lstm,
    _aten.gru_cell.default: _gru,
    _aten.rnn_tanh_cell.default: _plain(torch.tanh),
    _aten.rnn_relu_cell.default: _plain(torch.relu),
}
"""By torch's operation."""
