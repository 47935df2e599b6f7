"""Packed sequences while a model is traced: padded rows with their lengths.

torch concatenates the steps of all records, sorted by length, which would mix them. Here a
PackedSequence has data [B, T, ...], zero after each record's last step, and the lengths [B] as
`batch_sizes`; layers use these lengths for each record separately.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from fedpact.per_sample.tracing.replacements import WITH_LENGTHS


def _present(data: Tensor, lengths: Tensor) -> Tensor:
    """The mask of steps that are not padding, [B, T, 1, ...]."""
    steps = torch.arange(data.shape[1], device=data.device)
    present = steps < lengths.to(data.device).unsqueeze(1)
    return present[(..., *[None] * (data.dim() - 2))]


def pack_padded_sequence(
    input: Tensor,
    lengths: Any,
    batch_first: bool = False,
    enforce_sorted: bool = True,  # noqa: ARG001
) -> PackedSequence:
    """Like torch's, but always in the records' own order. A length of 0 counts as 1."""
    data = input if batch_first else input.transpose(0, 1)
    lengths = torch.as_tensor(lengths).to("cpu", torch.int64).clamp(1, data.shape[1])
    return PackedSequence(torch.where(_present(data, lengths), data, 0), lengths)


def pad_packed_sequence(
    sequence: PackedSequence,
    batch_first: bool = False,
    padding_value: float = 0.0,
    total_length: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Like torch's, but as long as the packed tensor instead of the longest record."""
    data, lengths = sequence[:2]
    out = torch.where(_present(data, lengths), data, padding_value)
    if total_length is not None:
        more = [0, 0] * (out.dim() - 2)
        out = F.pad(out, [*more, 0, total_length - out.shape[1]], value=padding_value)
    return out if batch_first else out.transpose(0, 1), lengths


def forward(layer: nn.RNNBase, input: Any, hx: Any = None) -> Any:
    """The forward pass of nn.LSTM, nn.GRU or nn.RNN over such sequences."""
    if not isinstance(input, PackedSequence):
        return NotImplemented
    data, lengths = input[:2]
    count = layer.num_layers * (2 if layer.bidirectional else 1)
    if hx is None:
        widths = [layer.proj_size or layer.hidden_size, layer.hidden_size]
        states = [data.new_zeros(count, data.shape[0], width) for width in widths]
        hx = states if layer.mode == "LSTM" else states[0]
    weights = [weight for each in layer.all_weights for weight in each]
    settings: list[Any] = [layer.bias, layer.num_layers, layer.dropout, layer.training]
    out, *last = WITH_LENGTHS[layer.mode.lower()](
        data, hx, weights, *settings, layer.bidirectional, True, lengths=lengths
    )
    return PackedSequence(out, lengths), tuple(last) if layer.mode == "LSTM" else last[0]
