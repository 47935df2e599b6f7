"""What stands in place of a record's numbers, by constants that were declared before ([records]).

    "range"      (2 x - low - high) / (high - low)      in -1..1
    "unit"       (x - low) / (high - low)               in 0..1
    "standard"   (x - mean) / deviation
    "released"   as "range", and then by what sites release of that (privacy.columns)
    "one-hot"    for each category a number, 1 for the record's own and 0 for the others

A record's numbers follow from that record and the constants alone, so the numbers that are clipped
and sampled are still one record's.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedpact.data.form import Column, RecordForm, ValueRange


@dataclass(frozen=True)
class Scaling:
    """What a form makes of records of one shape. features: a row's columns, in its order.

    Of arrays they are "0", "1", ...; of a record that is no row there are none.
    """

    form: RecordForm
    features: tuple[str, ...]

    @staticmethod
    def of(form: RecordForm, shape: Sequence[int], features: Sequence[str] = ()) -> "Scaling":
        """Return it for records [*shape]. features: of a table; () for arrays."""
        row = len(shape) == 1
        return Scaling(form, tuple(features or map(str, range(shape[0]))) if row else ())

    @property
    def used(self) -> bool:
        """Whether it changes anything."""
        return any(own.scale != "none" for own in (self.form, *self.form.kept.values()))

    @property
    def names(self) -> tuple[str, ...]:
        """The columns of what comes out; "ward=A" where one became several."""
        if not self.used:
            return self.features
        named = [[name, *_each(name, self.form.of(name))] for name in self.features]
        return tuple(name for first, *rest in named for name in rest or [first])

    @property
    def released(self) -> tuple[int, ...]:
        """The places, in what comes out, of columns that are scaled by what sites release.

        In the order of the declaration, which is the same at all sites.
        """
        places, place = dict[str, int](), 0
        for name in self.features:
            places[name] = place
            place += len(_each(name, self.form.of(name))) or 1
        return tuple(places[name] for name in self.form.released)

    def example(self, record: Tensor) -> Tensor:
        """Return zeros of the form that a record [*shape] comes out in.

        Which column is which does not matter to it: a server may not know their names.
        """
        if not self.used:
            return record
        own = self.form.kept.values()
        more = sum(len(c.categories or []) - 1 for c in own if c.scale == "one-hot")
        shape = (len(record) + more,) if record.ndim == 1 else record.shape
        return torch.zeros(shape)

    def __call__(self, x: Tensor) -> Tensor:
        """Return what stands in place of records x [n, *shape], float32 [n, ...]."""
        if not self.used:
            return x
        if not self.form.columns:
            return rescale(x.double(), self.form).float()
        columns = [
            rescale(x[:, [k]].double(), self.form.of(n)) for k, n in enumerate(self.features)
        ]
        return torch.cat(columns, 1).float()


def rescale(x: Tensor, own: ValueRange) -> Tensor:
    """Return what stands in place of numbers x [n, ...] of one declaration; both in float64."""
    if isinstance(own, Column):
        if own.scale == "one-hot":
            known = own.as_numbers().categories or []
            # As they were read, which is in float32.
            return (x == torch.tensor(known, dtype=torch.float32).double()).double()
        if own.mean is not None and own.deviation is not None:
            return (x - own.mean) / own.deviation
    low, high = own.low or 0.0, own.high or 0.0
    if own.scale in ("range", "released"):
        return (2 * x - low - high) / (high - low)
    return (x - low) / (high - low) if own.scale == "unit" else x


def _each(name: str, own: ValueRange) -> list[str]:
    if not isinstance(own, Column) or own.scale != "one-hot":
        return []
    return [f"{name}={category}" for category in own.categories or []]
