"""A site's records, and Poisson batches: of records, or of persons with all their records."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from fedpact.draws.seeded import Draws
from fedpact.params import sent
from fedpact.persample.layout import aligned


@dataclass(frozen=True)
class Records:
    """A site's training records: x [n, ...], y [n]. Only oracles hold one.

    columns: of a row's numbers those that are scaled by what sites release; in [-1, 1] till then.
    persons: where a batch is of persons, each record's person, int64 [n] in the CPU's memory,
    numbered from 0 without gaps; None where it is of records.
    """

    x: Tensor
    y: Tensor
    columns: tuple[int, ...] = ()
    persons: Tensor | None = None

    def __post_init__(self) -> None:
        # A batch of all is these very numbers, and any other a copy: both lie alike in memory, else
        # whether one record is in it would decide by what code the others are multiplied.
        object.__setattr__(self, "x", aligned(self.x))
        object.__setattr__(self, "y", aligned(self.y))

    def to(self, device: torch.device) -> "Records":
        """Return the records on a device."""
        return replace(self, x=self.x.to(device), y=self.y.to(device))

    def join(self, x: Tensor, y: Tensor, at: int, *, together: bool = False) -> "Records":
        """Return the records with others x, y [m, ...] before place `at`.

        Where a batch is of persons, of a new person each, or of one `together`.
        """
        persons = self.persons
        if persons is not None:
            new = torch.zeros(len(y), dtype=torch.int64) if together else torch.arange(len(y))
            persons = torch.cat([persons[:at], self.count + new, persons[at:]])
        return Records(
            torch.cat([self.x[:at], x, self.x[at:]]),
            torch.cat([self.y[:at], y, self.y[at:]]),
            self.columns,
            persons,
        )

    @cached_property
    def count(self) -> int:
        """How many there are of what is sampled: persons, or records."""
        if self.persons is None:
            return len(self.y)
        return int(self.persons.max()) + 1 if len(self.persons) else 0

    @cached_property
    def _shares(self) -> Tensor | None:
        """1/m [n] for each of a person's m records, in float64, in the CPU's memory."""
        if self.persons is None:
            return None
        each = torch.bincount(self.persons).double()[self.persons]
        # Rounded down, so that a person's add up to 1 at most.
        return (2.0**40 / each).floor() / 2.0**40

    def batch(
        self, draws: Draws, rate: float, step: int, *, lent: bool = False
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return a Poisson batch of records, or of persons with all their records and shares.

        Shares are in the CPU's memory, wherever the records are.

        lent: see `at`.
        """
        chosen = draws.batch(self.count, rate, step)
        if self.persons is None or self._shares is None:
            return *self.at(chosen, lent=lent), None
        drawn = torch.zeros(self.count, dtype=torch.bool)
        drawn[chosen] = True
        places = drawn[self.persons].nonzero()[:, 0]
        return *self.at(places, lent=lent), self._shares[places]

    def at(self, chosen: Tensor, *, lent: bool = False) -> tuple[Tensor, Tensor]:
        """Return copies of the records of these indices, which ascend.

        lent: of all records no copy, for whoever leaves them as they are.
        """
        if chosen.shape == self.y.shape[:1]:
            return (self.x, self.y) if lent else (self.x.clone(), self.y.clone())
        chosen = sent(chosen, self.x.device)
        # A quarter of the time of x[chosen].
        return self.x.index_select(0, chosen), self.y.index_select(0, chosen)
