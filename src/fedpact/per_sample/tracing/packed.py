"""Packed sequences while a model is traced: padded rows beside their lengths.

torch packs the steps of all records one behind the other, sorted by length, which would mix them.
Here a PackedSequence holds data [B, T, ...] with zeros behind each record's last step, and its
lengths [B] as `batch_sizes`; layers over it run by those lengths, each record by itself.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from fedpact.per_sample.tracing.replacements import WITH_LENGTHS


def _present(data: Tensor, lengths: Tensor) -> Tensor:
    """Which steps are no padding: [B, T, 1, ...]."""
    steps = torch.arange(data.shape[1], device=data.device)
    present = steps < lengths.to(data.device).unsqueeze(1)
    return present[(..., *[None] * (data.dim() - 2))]


def pack_padded_sequence(
    input: Tensor,
    lengths: Any,
    batch_first: bool = False,
    enforce_sorted: bool = True,  # noqa: ARG001
) -> PackedSequence:
    """As torch's; in the records' own order, whatever that is. A length of 0 counts as 1."""
    data = input if batch_first else input.transpose(0, 1)
    lengths = torch.as_tensor(lengths).to("cpu", torch.int64).clamp(1, data.shape[1])
    return PackedSequence(torch.where(_present(data, lengths), data, 0), lengths)


def pad_packed_sequence(
    sequence: PackedSequence,
    batch_first: bool = False,
    padding_value: float = 0.0,
    total_length: int | None = None,
) -> tuple[Tensor, Tensor]:
    """As torch's, but as long as what was packed, and not as the longest record of the batch."""
    data, lengths = sequence[:2]
    out = torch.where(_present(data, lengths), data, padding_value)
    if total_length is not None:
        more = [0, 0] * (out.dim() - 2)
        out = F.pad(out, [*more, 0, total_length - out.shape[1]], value=padding_value)
    return out if batch_first else out.transpose(0, 1), lengths


def forward(layer: nn.RNNBase, input: Any, hx: Any = None) -> Any:
    """Of nn.LSTM, nn.GRU or nn.RNN, over such sequences alone."""
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
