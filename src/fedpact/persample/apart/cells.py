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


# What a step makes of the linear layers of x and of h, and of the state that h is from.
_Step = Callable[[Tensor, Tensor, Any], Any]


def _cell(step: _Step, of_state: Callable[[Any], Tensor] = lambda h: h) -> Callable[..., Any]:
    def cell(
        x: Tensor,
        hx: Any,
        w_ih: Tensor,
        w_hh: Tensor,
        b_ih: Tensor | None = None,
        b_hh: Tensor | None = None,
    ) -> Any:
        return step(F.linear(x, w_ih, b_ih), F.linear(of_state(hx), w_hh, b_hh), hx)

    return cell


def _lstm(of_x: Tensor, of_h: Tensor, hx: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    i, f, g, o = (of_x + of_h).chunk(4, 1)
    cell = torch.sigmoid(f) * hx[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(cell), cell


def _gru(of_x: Tensor, of_h: Tensor, hx: Tensor) -> Tensor:
    x, h = of_x.chunk(3, 1), of_h.chunk(3, 1)
    reset, update = torch.sigmoid(x[0] + h[0]), torch.sigmoid(x[1] + h[1])
    new = torch.tanh(x[2] + reset * h[2])
    return (1 - update) * new + update * hx


CELLS: dict[Any, Callable[..., Any]] = {
    _aten.lstm_cell.default: _cell(_lstm, lambda hx: hx[0]),
    _aten.gru_cell.default: _cell(_gru),
    _aten.rnn_tanh_cell.default: _cell(lambda of_x, of_h, _: torch.tanh(of_x + of_h)),
    _aten.rnn_relu_cell.default: _cell(lambda of_x, of_h, _: torch.relu(of_x + of_h)),
}
"""By torch's operation."""
