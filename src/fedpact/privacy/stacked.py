"""Several sites' questions of one turn, answered together: clipped sums and noise.

A step of a small model is many operations, each of them short; stacked, the sites share them. No
site's numbers enter another's, so what is summed for a site is what its own kernel sums, up to
rounding: 1e-12 of the sum's length in float64, 1e-5 in float32 (tested). Noise is the same bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from fedpact.losses import Loss
from fedpact.params import FlatModel
from fedpact.persample.dense import Dense, Sum
from fedpact.privacy.keystream import normals_of, together


@dataclass(eq=False, slots=True)
class Noise:
    """One site's question: total [d] plus `scale` times the normal numbers of `key`.

    Where it is answered, total is written over.
    """

    total: Tensor
    scale: float
    key: bytes


class Stack:
    """Answers the questions of sites whose models `dense` knows."""

    def __init__(self, dense: Dense) -> None:
        self._dense = dense

    @staticmethod
    def of(model: FlatModel, loss: Loss) -> "Stack | None":
        """Return what stacks the model, None where it is no chain of dense layers."""
        dense = Dense.of(model, loss)
        return None if dense is None else Stack(dense)

    def answers(self, questions: Sequence[Sum | Noise]) -> list[Tensor | None]:
        """Return each question's answer; None where a site has to answer it itself."""
        found: list[Tensor | None] = [None] * len(questions)
        sums = {i: one for i, one in enumerate(questions) if isinstance(one, Sum)}
        noise = {i: one for i, one in enumerate(questions) if isinstance(one, Noise)}
        for i, answer in zip(sums, self._dense.sums(list(sums.values())), strict=True):
            found[i] = answer
        for i, answer in zip(noise, _with_noise(list(noise.values())), strict=True):
            found[i] = answer
        return found


def _with_noise(requests: Sequence[Noise]) -> list[Tensor]:
    """Return each request's total [d], with its noise."""
    kinds = {(one.total.numel(), one.total.dtype): list[Noise]() for one in requests}
    for one in requests:
        kinds[one.total.numel(), one.total.dtype].append(one)
    for (size, dtype), alike in kinds.items():
        some = together(size, dtype)
        for start in range(0, len(alike), some):
            now = alike[start : start + some]
            numbers = normals_of([one.key for one in now], size, dtype)
            for one, z in zip(now, numbers, strict=True):
                one.total.add_(z, alpha=one.scale)
    return [one.total for one in requests]
