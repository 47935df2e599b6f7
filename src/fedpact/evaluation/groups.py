"""Grouping of records by one of their columns, whose categories are declared, never discovered."""

from collections.abc import Sequence
from typing import Self

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from fedpact.data.form import RecordForm
from fedpact.errors import PlanError
from fedpact.text import toml_key


class Grouping(BaseModel):
    """Groups of records, by one of their columns.

    column: which place of a record [d] decides, from 0. values: what it is in each group. names:
    the groups', in the same order.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    column: int = Field(ge=0)
    values: tuple[float, ...] = Field(min_length=2)
    names: tuple[str, ...]

    @model_validator(mode="after")
    def _fit(self) -> Self:
        if not len(self.values) == len(self.names) == len(set(self.values)):
            raise ValueError(
                f"values = {self.values} and names = {self.names}: expected one name a value, and "
                "each value once"
            )
        return self

    def of(self, x: Tensor) -> Tensor:
        """Return each record's group, int64 [n], of records x [n, d] whose values are declared."""
        values = torch.tensor(self.values, dtype=x.dtype)
        return (x[:, self.column, None].cpu() == values).long().argmax(1)

    @staticmethod
    def declared(name: str, form: RecordForm, features: Sequence[str], width: int) -> "Grouping":
        """Return the groups of a column: of a table with these features, or of arrays [n, width].

        Raises PlanError: no such column, or one without at least two declared categories.
        """
        places = list(features) or [str(place) for place in range(width)]
        own = form.columns.get(name)
        categories = own.categories if own is not None else None
        if name not in places or categories is None or len(categories) < 2:
            raise PlanError(
                f'evaluation.groups = "{name}": expected a column of the records with at least two '
                f"declared categories, as [records.columns.{toml_key(name)}] categories = "
                f'["a", "b"]; the columns are {", ".join(places[:20])}'
            )
        texts = isinstance(categories[0], str)
        values = tuple(float(i if texts else c) for i, c in enumerate(categories))
        return Grouping(column=places.index(name), values=values, names=tuple(map(str, categories)))
