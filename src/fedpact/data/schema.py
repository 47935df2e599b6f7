"""The declaration of records, and the scaling of their columns.

It is part of federation.toml, the same for every party, and of a plan. Whether a record is valid,
and its numbers, follow from the record and the declaration alone, so clipping and sampling still
act on single records.

docs/how-to/prepare-tables.md shows how it is written. In an array of records [n, d] the columns are
called "0", "1", ... Scales are

    "range"      (2 x - low - high) / (high - low)      in -1..1
    "unit"       (x - low) / (high - low)               in 0..1
    "standard"   (x - mean) / deviation
    "released"   as "range", then by moments that sites release (privacy.column_scales)
    "one-hot"    a number for each category, 1 for the record's own and 0 for the others
"""

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, Final, Literal, Self, cast

import torch
from pydantic import BaseModel, Field, model_validator
from torch import Tensor

from fedpact.common.configuration import FROZEN

_OF_COLUMNS: Final = ("standard", "released", "one-hot")
_BY_RANGE: Final = ("range", "unit", "released")


class ValueRange(BaseModel):
    """Numbers from low to high, both optional."""

    model_config = FROZEN
    low: float | None = None
    """The least and the most that a value may be; a record beyond is left out."""
    high: float | None = None
    """The least and the most that a value may be; a record beyond is left out."""
    clamp: bool = False
    """Whether a number beyond becomes the nearer bound instead."""
    fill: str | float | None = None
    """Stands for a value that is missing; without it the record is left out."""
    scale: Literal["none", "range", "unit", "standard", "released", "one-hot"] = "none"
    """What becomes of a number x before it is trained on: "none" leaves it; "range" maps
    low..high to -1..1, "unit" to 0..1. Of a column also "standard", (x - mean) / deviation,
    which are declared; "released", the same with what the sites release with noise
    (privacy.column_scales), of values between low and high; "one-hot", of categories."""

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if self.low is not None and self.high is not None and not self.low <= self.high:
            raise ValueError(f"low = {self.low:g} and high = {self.high:g}: expected low <= high")
        if self.clamp and self.low is None and self.high is None:
            raise ValueError("clamp = true without low or high: say where values are clamped")
        if self.scale in _BY_RANGE:
            low, high = self.low, self.high
            if low is None or high is None or not 0 < high - low < math.inf:
                raise ValueError(
                    f'scale = "{self.scale}" with low = {low} and high = {high}: expected both, '
                    "with low < high: the least and the most that such a value can be"
                )
            step = 2.0 ** (math.frexp(max(abs(low), abs(high)))[1] - 24)
            whole = low.is_integer() and high.is_integer() and step <= 1
            if not whole and high - low < 128 * step:
                raise ValueError(
                    f"low = {low!r} and high = {high!r}: single precision, in which numbers are "
                    "read, has fewer than 128 between them; take an offset off in the file "
                    "(seconds since the first, say), and declare the range of what is left"
                )
        low, high = self.ends
        if isinstance(self.fill, float) and not low <= self.fill <= high:
            raise ValueError(
                f"fill = {self.fill:g} is beyond low = {self.low} and high = {self.high}: it "
                "stands for a value that is missing; expected one between them"
            )
        return self

    @property
    def ends(self) -> tuple[float, float]:
        """Low and high, infinite if they are not given."""
        low, high = self.low, self.high
        return -math.inf if low is None else low, math.inf if high is None else high

    @property
    def bounded(self) -> bool:
        """Whether low or high is given."""
        return self.low is not None or self.high is not None


class Column(ValueRange):
    """One column: its range or its categories. range: [low, high], instead of the two keys."""

    categories: list[str] | list[float] | None = Field(default=None, min_length=1)
    """All texts or numbers that there are; texts become 0.0, 1.0, ... in this order."""
    other: str | float | None = None
    """A category that stands for a value that is none of them; without it the record is left
    out."""
    mean: float | None = None
    """Declared, with scale = "standard"."""
    deviation: float | None = Field(default=None, gt=0)
    """Declared, with scale = "standard"."""

    @model_validator(mode="before")
    @classmethod
    def _range_is_low_and_high(cls, raw: Any) -> Any:
        if not isinstance(raw, dict) or "range" not in raw:
            return raw
        given = {**cast(dict[str, Any], raw)}
        match given.pop("range"):
            case [low, high] if not {"low", "high"} & {*given}:
                return {**given, "low": low, "high": high}
            case ends:
                raise ValueError(
                    f"range = {ends}: expected [low, high], and neither low nor high beside it"
                )

    @model_validator(mode="after")
    def _range_or_categories(self) -> Self:
        if {self.scale == "standard"} != {self.mean is not None, self.deviation is not None}:
            raise ValueError(
                f'scale = "{self.scale}" with mean = {self.mean} and deviation = {self.deviation}: '
                'expected scale = "standard" with both, or none of them'
            )
        known = self.categories
        if known is None:
            if isinstance(self.fill, str) and self.low is not None:
                raise ValueError(
                    f"fill = {self.fill!r} beside a range of numbers: expected a number in it"
                )
            if self.other is not None or self.scale == "one-hot" or isinstance(self.fill, str):
                raise ValueError(
                    f'other = {self.other!r}, fill = {self.fill!r}, scale = "{self.scale}" without '
                    "categories: declare them, all that there are"
                )
            return self
        if self.bounded:
            raise ValueError("a column has low and high, or categories: leave one out")
        if len(set(known)) < len(known):
            raise ValueError(f"categories = {known}: expected each once")
        numbers = [each for each in known if isinstance(each, float)]
        if len(set(array("f", numbers))) < len(numbers):
            raise ValueError(
                f"categories = {known}: some are the same number in single precision, in which "
                "they are read; give them as text, or smaller codes"
            )
        for name, value in (("fill", self.fill), ("other", self.other)):
            if value is not None and value not in known:
                raise ValueError(f"{name} = {value!r}: expected one of the categories {known}")
        return self

    @property
    def names(self) -> list[str] | None:
        """The categories, if they are text."""
        return [c for c in self.categories or [] if isinstance(c, str)] or None

    def as_numbers(self) -> "Column":
        """Return the column's declaration in an array, where text categories are numbered."""
        if self.names is None:
            return self
        places = {"categories": [float(i) for i in range(len(self.names))]}
        own = {"fill": self.number(self.fill), "other": self.number(self.other)}
        return self.model_copy(update={**places, **own})

    def number(self, value: str | float | None) -> float | None:
        """Return the number of a value; for a text category its index."""
        return float((self.names or []).index(value)) if isinstance(value, str) else value


class LabelForm(BaseModel):
    """The type of labels: a class, a number, several labels, or a class per pixel ([task])."""

    model_config = FROZEN
    kind: Literal["class", "number", "several", "pixels"] = "class"
    """"class"; "number", in whose place -1..1 is trained on; "several", 0 or 1 for each of the
    labels; "pixels", the number of a class at each place."""
    low: float = -1.0
    """The least that a number can be; what is below becomes it."""
    high: float = 1.0
    """The most that a number can be."""
    next: bool = False
    """Whether each token is labelled with the next one; the given labels are the tokens."""


class RecordForm(ValueRange):
    """What a record may hold, declared before anybody looks at one. See the module."""

    vocabulary: int | None = Field(default=None, ge=1)
    """Values are words, whole numbers 0, ..., vocabulary - 1."""
    length: int | None = Field(default=None, ge=1, le=2**20)
    """Of a record of tokenised text, to which it is padded, with its mask, or cut; left out,
    that of the longest, in a simulation; a deployment has it in the records' shape."""
    labels: Literal["numbers", "names"] | None = None
    """Of arrays, "numbers" for the classes' places from 0, "names" for their names. Left out,
    numbers are places and text is names; it has to be given where a class's name is another number
    than its place. Tables have names."""
    features: list[str] | None = Field(default=None, min_length=1)
    """Of a table the columns that a record is made of, in this order."""
    drop: list[str] = Field(default_factory=list[str])
    """The columns that it is not made of, in place of features; without either it is made of
    all that are no label, site, person or index of pandas'."""
    target: LabelForm = LabelForm()
    """What a label is, as the plan's [task] says it."""
    columns: dict[str, Column] = Field(default_factory=dict[str, Column])
    """What single columns may hold, by name; of an array [n, d] they are called "0", "1", ..."""

    @model_validator(mode="after")
    def _words_or_numbers(self) -> Self:
        if isinstance(self.fill, str) or self.scale in _OF_COLUMNS:
            raise ValueError(
                f'fill = {self.fill!r}, scale = "{self.scale}" for all values: expected a number, '
                'and "none", "range" or "unit"; declare the rest in [records.columns.NAME]'
            )
        if self.features is not None and (self.drop or len({*self.features}) < len(self.features)):
            raise ValueError(
                f"features = {self.features} with drop = {self.drop}: expected the columns to "
                "use, each once, or those to leave out, not both"
            )
        other = self.bounded or self.columns or self.fill is not None
        if self.vocabulary is not None and other:
            raise ValueError(
                f"vocabulary = {self.vocabulary} beside low, high, fill or columns: words have "
                "none; leave one out"
            )
        return self

    @property
    def kept(self) -> dict[str, Column]:
        """The declarations of columns that are not dropped."""
        return {name: own for name, own in self.columns.items() if name not in self.drop}

    @property
    def released(self) -> tuple[str, ...]:
        """The columns that are scaled by released moments."""
        return tuple(name for name, own in self.kept.items() if own.scale == "released")

    @property
    def general(self) -> Column:
        """The declaration of what has none of its own."""
        return Column(**{name: getattr(self, name) for name in ValueRange.model_fields})

    def of(self, column: str) -> Column:
        """Return a column's own declaration, or the general one."""
        return self.columns.get(column) or self.general

    def choosing(self, features: Sequence[str] | None) -> "RecordForm":
        """Return the declaration of a table of which these columns are used, in this order."""
        named = {"features": features and [*features], "drop": [], "columns": self.kept}
        return self.model_copy(update=named)

    def by_place(self, features: Sequence[str]) -> "RecordForm":
        """Return the declaration of arrays with a table's numbers in its order.

        features: the table's columns in order; () for arrays without a table.
        """
        place = {name: str(i) for i, name in enumerate(features)}
        named = {place.get(name, name): own.as_numbers() for name, own in self.kept.items()}
        columns = named if features else self.columns
        return self.model_copy(update={"columns": columns, "features": None, "drop": []})

    def in_arrays(self, features: Sequence[str]) -> "RecordForm":
        """Return the declaration of the same records, labels included, as converted; see above."""
        told = {"labels": "numbers", "target": LabelForm(kind=self.target.kind)}
        return self.by_place(features).model_copy(update=told)


class PlanRecords(RecordForm):
    """What a record of your own data may hold, declared before anybody looks at one."""

    classes: list[str] | None = Field(default=None, min_length=1)
    """The labels' names in order; left out, those that are found."""
    most_left_out: float = Field(default=0.5, ge=0, le=1)
    """The share of a simulation's records, and of each named site's, that may be left out because
    they do not fit; with more it does not start. A deployed site has its own in site.toml."""

    @model_validator(mode="after")
    def _target_is_the_tasks(self) -> Self:
        if self.target != LabelForm():
            raise ValueError("records.target: a plan says what its labels are in [task]")
        return self

    def shared(self, target: LabelForm | None = None) -> RecordForm:
        """Return the declaration alone: federation.toml names the classes separately."""
        found = RecordForm(**self.model_dump(exclude={"classes", "most_left_out"}))
        return found if target is None else found.model_copy(update={"target": target})


@dataclass(frozen=True)
class Scaling:
    """The scaling of records of one shape. features: the columns of a row, in order.

    For arrays they are "0", "1", ...; a record that is not a row has none.
    """

    form: RecordForm
    features: tuple[str, ...]

    @staticmethod
    def of(form: RecordForm, shape: Sequence[int], features: Sequence[str] = ()) -> "Scaling":
        """Return the scaling of records [*shape]. features: of a table; () for arrays."""
        row = len(shape) == 1
        return Scaling(form, tuple(features or map(str, range(shape[0]))) if row else ())

    @property
    def used(self) -> bool:
        """Whether any column is scaled."""
        return any(own.scale != "none" for own in (self.form, *self.form.kept.values()))

    @property
    def names(self) -> tuple[str, ...]:
        """The columns after scaling; "ward=A" for a one-hot category."""
        return tuple(chain.from_iterable(self._columns.values()))

    @property
    def released(self) -> tuple[int, ...]:
        """The positions, after scaling, of columns with released moments.

        They are in the order of the declaration, which is the same at all sites.
        """
        widths = accumulate(map(len, self._columns.values()), initial=0)
        places = dict(zip(self._columns, widths, strict=False))
        return tuple(places[name] for name in self.form.released)

    @property
    def _columns(self) -> dict[str, list[str]]:
        found = {name: [name] for name in self.features}
        for name in self.features:
            own = self.form.of(name)
            if own.scale == "one-hot":
                found[name] = [f"{name}={category}" for category in own.categories or []]
        return found

    def example(self, record: Tensor) -> Tensor:
        """Return zeros of a scaled record's shape; column names are not needed."""
        if not self.used:
            return record
        own = self.form.kept.values()
        more = sum(len(c.categories or []) - 1 for c in own if c.scale == "one-hot")
        shape = (len(record) + more,) if record.ndim == 1 else record.shape
        return torch.zeros(shape)

    def __call__(self, x: Tensor) -> Tensor:
        """Return records x [n, *shape] scaled, float32 [n, ...]."""
        if not self.used:
            return x
        if not self.form.columns:
            return rescale(x.double(), self.form.general).float()
        whole = not x.is_floating_point()
        columns = [
            rescale(x[:, [k]].double(), self.form.of(n), whole) for k, n in enumerate(self.features)
        ]
        return torch.cat(columns, 1).float()


def rescale(x: Tensor, own: Column, whole: bool = False) -> Tensor:
    """Return numbers x [n, ...] scaled by one declaration, in float64. whole: were integers."""
    if own.scale == "one-hot":
        # As they were read: in float32, but for arrays of integers.
        kept = torch.tensor(own.as_numbers().categories, dtype=torch.float64)
        return (x == (kept if whole else kept.float().double())).double()
    if own.mean is not None and own.deviation is not None:
        return (x - own.mean) / own.deviation
    low, high = own.low or 0.0, own.high or 0.0
    if own.scale in ("range", "released"):
        return (2 * x - low - high) / (high - low)
    return (x - low) / (high - low) if own.scale == "unit" else x
