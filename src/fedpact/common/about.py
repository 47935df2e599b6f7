"""What people say of a run: purpose, data, who publishes it. Nothing is computed from it."""

import datetime
import re
from typing import Annotated, Final, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, model_validator

from fedpact.common.configuration import FROZEN

_CONTROLS: Final = r"\x00-\x1f\x7f\u0085\u2028\u2029"


def _in_a_line(text: str) -> str:
    found = re.sub(f"[{_CONTROLS}]+", " ", text).strip()
    if not found:
        raise ValueError("it says nothing: expected words, on one line")
    return found


OneLine = Annotated[str, Field(pattern=f"^[^{_CONTROLS}]*$", max_length=2000)]
"""A text on one line: it stands in receipts, tables and files of other forms."""
JoinedText = Annotated[str, AfterValidator(_in_a_line)]
"""A text of any length, not empty, of which lines are joined to one."""


def _written(day: object) -> object:
    """TOML has days of its own; as a text they are the same everywhere."""
    return day.isoformat() if type(day) is datetime.date else day


class About(BaseModel):
    """What people say of a run, for its model card; "" is not stated."""

    model_config = FROZEN
    name: OneLine = ""
    """What the model is called."""
    purpose: OneLine = ""
    """What it is for."""
    data_version: OneLine = ""
    """Which version of the data set, whose name is the plan's data, or a site's data_set."""
    curators: list[OneLine] = Field(default_factory=list[str])
    """Who publishes it."""
    published: Annotated[str, BeforeValidator(_written)] = ""
    """YYYY-MM-DD."""
    authors: list[OneLine] = Field(default_factory=list[str])
    """Who writes the card."""
    licence: OneLine = ""
    """An identifier, as in apache-2.0."""
    contact: OneLine = ""
    """Whom to write to."""

    @model_validator(mode="after")
    def _is_a_day(self) -> Self:
        if self.published:
            try:
                day = datetime.date.fromisoformat(self.published)
            except ValueError:
                day = None
            if day is None or day.isoformat() != self.published:
                raise ValueError(
                    f"published is {self.published!r}: expected a day as in 2026-01-31"
                )
        return self
