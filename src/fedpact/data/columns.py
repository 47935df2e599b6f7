"""A site's own columns, renamed and converted to what the federation declares.

    [columns]                  of site.toml, the owner's
    bmi = "body_mass_index"    the declared column bmi is this one of the file
    lactate = { column = "lactate_mgdl", factor = 0.111 }
    temperature = { column = "temp_f", factor = 0.5556, offset = -17.78 }
    sex = { column = "gender", values = { "F" = "female", "M" = "male" } }

What a cell becomes follows from that cell and these lines alone. A cell that is not a number stays
as it is, and is left out or filled like any other.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from fedpact.common.errors import DataError, nearest
from fedpact.common.format import list_some, toml, toml_key
from fedpact.data.cells import Cells, find_named, to_numbers


class FileColumn(BaseModel):
    """A column of a site's file that provides a declared one. See the module."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )
    column: str
    """Its name in the file."""
    factor: float = 1.0
    """What its numbers are multiplied by, from the file's unit to the declared one."""
    offset: float = 0.0
    """What is added to that."""
    values: dict[str, str | float] = Field(default_factory=dict[str, str | float])
    """A cell in the file, as text, and what the federation calls it; other cells stay as they
    are."""

    @model_validator(mode="before")
    @classmethod
    def _of_a_name(cls, raw: Any) -> Any:
        return {"column": raw} if isinstance(raw, str) else raw

    @model_validator(mode="after")
    def _converts(self) -> "FileColumn":
        if self.factor == 0:
            raise ValueError("factor = 0 makes all numbers one: expected another number")
        if self.values and self.scaled:
            raise ValueError(
                f"values beside factor = {self.factor:g} and offset = {self.offset:g}: expected "
                "words to rename, or numbers of another unit; leave one out"
            )
        return self

    @property
    def scaled(self) -> bool:
        """Whether its numbers are of another unit."""
        return (self.factor, self.offset) != (1.0, 0.0)

    def convert(self, cells: Cells) -> Cells:
        """Return cells [n] in the declared unit and words."""
        if self.values:
            return [find_named(cell, self.values, cell) for cell in cells]
        if not self.scaled:
            return cells
        with np.errstate(over="ignore"):
            converted = (to_numbers(cells) * self.factor + self.offset).tolist()
        return [
            cell if math.isnan(number) else number
            for cell, number in zip(cells, converted, strict=True)
        ]


@dataclass(frozen=True)
class ColumnDifference:
    """How a file's columns differ from the declared ones: missing, and not declared.

    renamed: of the missing, the unexpected column that is probably meant.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    renamed: Mapping[str, str]

    @staticmethod
    def of(wanted: Collection[str], found: Collection[str]) -> "ColumnDifference":
        """Return it for names that are declared and names that a file has."""
        missing = tuple(name for name in wanted if name not in found)
        unexpected = tuple(name for name in found if name.strip() and name not in wanted)
        renamed = dict[str, str]()
        for name in missing:
            free = {other.lower(): other for other in unexpected if other not in renamed.values()}
            for alike in get_close_matches(name.lower(), free, n=1):
                renamed[name] = free[alike]
        return ColumnDifference(missing, unexpected, renamed)

    def describe(self) -> str:
        """Return in words which are missing, probably renamed, and unexpected."""
        told = [
            f"{name} (probably its {self.renamed[name]!r})" if name in self.renamed else name
            for name in self.missing
        ]
        others = [name for name in self.unexpected if name not in self.renamed.values()]
        return f"{', '.join(told)}; its other columns are " + (list_some(others) or "no other")

    def mend(self) -> str:
        """Return the line of site.toml that would name the first of the missing."""
        name = next(iter(self.renamed), self.missing[0])
        return f"{toml_key(name)} = {toml(self.renamed.get(name, '...'))}"


def declared_columns(
    origin: str,
    columns: Mapping[str, Cells],
    wanted: Sequence[str],
    sources: Mapping[str, FileColumn],
    optional: Collection[str] = (),
) -> dict[str, Cells]:
    """Return the wanted columns of a file by their declared names, converted; no others.

    sources: of which column each is made, if not of that of its name. optional: those of `wanted`
    that a file need not have. Raises DataError: one is not there, or a source is not wanted.
    """
    if odd := [name for name in sources if name not in wanted]:
        raise DataError(
            f"[columns] of site.toml names {', '.join(odd)}: expected the names that the "
            f"federation declares, {list_some(wanted)}{nearest(odd[0], wanted)}"
        )
    for name, source in sources.items():
        if source.column not in columns:
            raise DataError(
                f"{origin} has no column {source.column!r}, of which [columns] of site.toml makes "
                f"{name}: expected one of its columns, {list_some(columns)}"
                f"{nearest(source.column, columns)}"
            )
    wanted = [n for n in wanted if n in sources or n in columns or n not in optional]
    taken = {source.column for source in sources.values()}
    free = [name for name in columns if name not in taken or name in wanted]
    difference = ColumnDifference.of([name for name in wanted if name not in sources], free)
    if difference.missing:
        raise DataError(
            f"{origin} has {len(wanted) - len(difference.missing)} of the {len(wanted)} columns "
            f"that this site's records are made of. Missing: {difference.describe()}. Say under "
            "[columns] of site.toml which column of the file each is, as "
            f"{difference.mend()}, or add it to the file"
        )
    return {
        name: sources[name].convert(columns[sources[name].column])
        if name in sources
        else columns[name]
        for name in wanted
    }
