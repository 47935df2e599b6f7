"""The [records] table: what a record may hold, declared before anybody looks at one.

It stands in federation.toml, the same at every party, and in a plan, for own data that a simulation
reads. What a record has to be follows from it and never from the other records: not from the type
that a file's arrays happen to have, and not from the values that happen to occur.

    [records]
    low = 0.0                  every value is at least this, and at most `high`
    high = 255.0
    clamp = true               a number beyond becomes the nearer bound; else the record is left out
    vocabulary = 50            instead: values are whole numbers, words 0, ..., 49
    labels = "names"           how labels in arrays are meant; see RecordForm

    [records.columns.age]      for one column: its own range, or the values that there are
    low = 0
    high = 120
    [records.columns.ward]
    categories = ["A", "B"]    text: becomes 0.0, 1.0, ...; numbers stay what they are

In an array of records [n, d] the columns are called "0", "1", ...
"""

from collections.abc import Sequence
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

_FROZEN = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class ValueRange(BaseModel):
    """Numbers from low to high, either of which may be left out. See the module."""

    model_config = _FROZEN
    low: float | None = None
    high: float | None = None
    clamp: bool = False

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if self.low is not None and self.high is not None and not self.low <= self.high:
            raise ValueError(f"low = {self.low:g} and high = {self.high:g}: expected low <= high")
        if self.clamp and self.low is None and self.high is None:
            raise ValueError("clamp = true without low or high: say where values are clamped")
        return self

    @property
    def bounded(self) -> bool:
        """Whether there is a bound."""
        return self.low is not None or self.high is not None


class Column(ValueRange):
    """One column: its range, or its categories. See the module."""

    categories: list[str] | list[float] | None = Field(default=None, min_length=1)

    @model_validator(mode="after")
    def _range_or_categories(self) -> Self:
        if self.categories is not None:
            if self.bounded:
                raise ValueError("a column has low and high, or categories: leave one out")
            if len(set(self.categories)) < len(self.categories):
                raise ValueError(f"categories = {self.categories}: expected each once")
        return self

    @property
    def names(self) -> list[str] | None:
        """The categories, where they are text."""
        found = [c for c in self.categories or [] if isinstance(c, str)]
        return found or None


class RecordForm(ValueRange):
    """See the module.

    labels: of arrays, "numbers" for the classes' places from 0, "names" for their names. Left out,
    numbers are places and text is names; it has to be given where a class's name is the number of
    another. Tables have names.
    """

    vocabulary: int | None = Field(default=None, ge=1)
    labels: Literal["numbers", "names"] | None = None
    columns: dict[str, Column] = Field(default_factory=dict[str, Column])

    @model_validator(mode="after")
    def _words_or_numbers(self) -> Self:
        if self.vocabulary is not None and (self.bounded or self.columns):
            raise ValueError(
                f"vocabulary = {self.vocabulary} beside low, high or columns: words have none; "
                "leave one out"
            )
        return self

    def of(self, column: str) -> ValueRange:
        """Return a column's own form, else that of all."""
        return self.columns.get(column, self)

    def in_arrays(self, features: Sequence[str]) -> "RecordForm":
        """Return the form of the same records as arrays, which hold what was made of a table.

        features: the table's columns in order.
        """
        place = {name: str(i) for i, name in enumerate(features)}
        columns = {place.get(name, name): _as_numbers(c) for name, c in self.columns.items()}
        return self.model_copy(update={"columns": columns, "labels": "numbers"})


class PlanRecords(RecordForm):
    """The form of a plan's own data. classes: the labels' names, else those that are found."""

    classes: list[str] | None = Field(default=None, min_length=1)

    def shared(self) -> RecordForm:
        """Return it without the classes, as federation.toml has it, which names them itself."""
        return RecordForm(**self.model_dump(exclude={"classes"}))


def _as_numbers(column: Column) -> Column:
    if column.names is None:
        return column
    return Column(categories=[float(i) for i in range(len(column.names))])
