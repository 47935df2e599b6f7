"""Models of text: from the last characters, or words, to the next one; (shape, classes) -> module.

A record is [length] places in a vocabulary, and its label the next one's, so the vocabulary has as
many entries as there are classes. Every position of a record is the record's own: no operation
mixes records.
"""

from typing import cast

import torch
from torch import Tensor, nn

from fedpact.errors import ModelError


class NextByLSTM(nn.Module):
    """The last state of an LSTM of 64 units over embeddings of 16."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(classes, 16)
        self.lstm = nn.LSTM(16, 64, batch_first=True)
        self.last = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, classes] of records x [B, length]."""
        states, _ = self.lstm(self.embedding(x))
        return self.last(states[:, -1])


class NextByAttention(nn.Module):
    """One block of attention, four heads over embeddings of 32, and what its last position says."""

    def __init__(self, length: int, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(classes, 32)
        self.position = nn.Parameter(0.02 * torch.randn(length, 32))
        self.before, self.between = nn.LayerNorm(32), nn.LayerNorm(32)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.wide, self.narrow = nn.Linear(32, 64), nn.Linear(64, 32)
        self.last = nn.Linear(32, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, classes] of records x [B, length]."""
        h = self.embedding(x) + self.position
        n = self.before(h)
        h = h + cast(Tensor, self.attention(n, n, n, need_weights=False)[0])
        h = h + self.narrow(torch.relu(self.wide(self.between(h))))
        return self.last(h[:, -1])


def lstm(shape: tuple[int, ...], classes: int) -> nn.Module:
    """An LSTM for the next character: 26,257 weights with 65 of them."""
    _length("lstm", shape)
    return NextByLSTM(classes)


def transformer(shape: tuple[int, ...], classes: int) -> nn.Module:
    """A small transformer for the next character: 14,049 weights with 65 of them and length 40."""
    return NextByAttention(_length("transformer", shape), classes)


def _length(name: str, shape: tuple[int, ...]) -> int:
    if len(shape) != 1:
        raise ModelError(
            f"model {name!r} got records of shape {shape}: expected words, (length,), whole "
            "numbers that are places in a vocabulary of as many entries as there are classes"
        )
    return shape[0]
