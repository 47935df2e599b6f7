"""Models of text: from the last characters, or words, to the next one; (shape, classes) -> module.

A record is [length] places in a vocabulary, and its label the next one's, so the vocabulary has as
many entries as there are classes. Every position of a record is the record's own: no operation
mixes records.
"""

from typing import Final, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedpact.errors import ModelError
from fedpact.persample.dense import ScaledBias

_PLACES: Final = 3
_FURTHER: Final = 0.7
_BIAS: Final = 0.3


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


class LastOneHot(nn.Module):
    """The last places of a record, each one-hot, as one row of unit length.

    Each place counts 0.7 of the one behind it: what stands nearest says most.
    """

    weights: Tensor  # [places, 1]

    def __init__(self, places: int, vocabulary: int) -> None:
        super().__init__()
        self._places, self._vocabulary = places, vocabulary
        weights = torch.tensor([[_FURTHER**k] for k in reversed(range(places))])
        self.register_buffer("weights", F.normalize(weights, dim=0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return rows [B, places · vocabulary] of records x [B, length]."""
        last = F.one_hot(x[:, -self._places :].long(), self._vocabulary)
        return (last * self.weights).flatten(1)


def ngram(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Logistic regression on the last three places: 12,740 weights with 65 characters.

    A log-linear model of four-grams. It begins where all characters are alike. As of other rows of
    unit length, an input of 0.3 is the bias's, which takes little of what a clip leaves.
    """
    places = min(_PLACES, _length("ngram", shape))
    last = ScaledBias.of(places * classes, classes, _BIAS)
    for parameter in last.parameters():
        nn.init.zeros_(parameter)
    return nn.Sequential(LastOneHot(places, classes), last)


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


def check_vocabulary(model: str, vocabulary: int | None, classes: int) -> None:
    """Raise ModelError: a model of text whose words are more than its classes, which it predicts.

    Records with the others would be left out, each by itself. vocabulary: None: it is not declared.
    """
    of_text = {f.__name__ for f in (ngram, lstm, transformer)}
    if model in of_text and vocabulary is not None and vocabulary > classes:
        raise ModelError(
            f"model {model!r} with records.vocabulary = {vocabulary} and {classes} classes: it "
            "predicts the next word, so expected a class for each; name all of them in "
            "records.classes, or use a model of your own"
        )
