"""From records to what is trained or evaluated on: scaled columns, or features.

The same function serves simulations, deployed sites and the server's public test set. What a record
becomes follows from that record, the plan and the weights; no record makes it fail.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fedpact.common.errors import ModelError
from fedpact.data.features import extract
from fedpact.data.features.extract import Extractor, Found, MadeBy, extractor
from fedpact.data.features.settings import FeatureSettings
from fedpact.data.features.user_module import factory_of
from fedpact.data.schema import RecordForm, Scaling

_logger = logging.getLogger("fedpact")
_SHOWN = 3
_NOTHING = RecordForm()


@dataclass(frozen=True)
class FeatureStage:
    """A plan's features. seed: the plan's. at: where a relative path of weights begins.

    form: what is declared of the records, which are scaled by it first.
    """

    settings: FeatureSettings
    seed: int
    at: Path = Path()
    form: RecordForm = _NOTHING

    @property
    def used(self) -> bool:
        """Whether the records are changed."""
        return self.settings.used or self._scaling(torch.empty(0)).used

    def names(self, record: Tensor, features: Sequence[str]) -> tuple[str, ...]:
        """Return the columns that a table's become; () for features."""
        return () if self.settings.used else self._scaling(record, features).names

    def released(self, record: Tensor, features: Sequence[str]) -> tuple[int, ...]:
        """Return the places, in the result, of columns scaled by what sites release."""
        return () if self.settings.used else self._scaling(record, features).released

    def example(self, record: Tensor) -> Tensor:
        """Return zeros of the form that a record [*shape] becomes.

        Raises ModelError: records that these features are not made for.
        """
        if not self.settings.used:
            return self._scaling(record).example(record)
        return torch.zeros(self._extractor(record).width)

    def key(self, record: Tensor) -> str:
        """Return a public digest of all that features follow from, but for the records."""
        return self._extractor(record).key

    def made_by(self, record: Tensor) -> MadeBy:
        """Return what identifies features of a user's own module."""
        return self._extractor(record).made_by if self.settings.factory else MadeBy()

    def __call__(
        self,
        x: Tensor,
        example: Tensor,
        origin: str,
        kept: Path | None,
        features: Sequence[str] = (),
        known: Tensor | None = None,
    ) -> Found:
        """Return what replaces records x [n, *shape] on the CPU.

        example: a record [*shape]. origin: the records' file, for this machine's log alone. kept:
        where their features are cached, or None. features: a table's columns. known: bool [n], the
        records that are already left out, and reported elsewhere.
        """
        scaling = self._scaling(example, features)
        x = scaling(x)
        told = torch.zeros(len(x), dtype=torch.bool) if known is None else known
        good = torch.ones(len(x), dtype=torch.bool)
        if scaling.used:
            good = x.isfinite().flatten(1).all(1)
            x = torch.where(good.view(-1, *[1] * (x.dim() - 1)), x, 0)
            _warn(origin, good | told, "no finite numbers as they are scaled by [records]")
        if not self.settings.used:
            return Found(x, good)
        found = extract.features(x, self._extractor(example), kept)
        # Those without a scale are told of above.
        _warn(origin, found.good | ~good | told, f"no features of kind {self.settings.kind}")
        return Found(torch.where(good[:, None], found.x, 0).float(), good & found.good)

    def _scaling(self, record: Tensor, features: Sequence[str] = ()) -> Scaling:
        return Scaling.of(self.form, record.shape, features)

    def _extractor(self, record: Tensor) -> Extractor:
        """Return what makes the features of records of this form, once they are scaled."""
        record = self._scaling(record).example(record)
        if not record.is_floating_point():
            raise ModelError(
                f"features.kind = {self.settings.kind!r} with records of {record.dtype}: expected "
                "measurements; store them as float32, or leave [features] out for words"
            )
        # As it is by now: a notebook reloads the module that it is changing.
        own = id(factory_of(self.settings.kind)) if self.settings.factory else 0
        told, shape = self.settings.model_dump_json(), tuple(record.shape)
        return extractor(told, shape, self.seed, self.at.absolute(), own)


def _warn(origin: str, good: Tensor, what: str) -> None:
    bad = (~good).nonzero()[:, 0].tolist()
    if bad:
        _logger.warning(
            "%s: %d of %d records have %s and are left out: places %s (counted from 0)",
            *(origin, len(bad), len(good), what),
            ", ".join(map(str, bad[:_SHOWN])) + (", ..." if len(bad) > _SHOWN else ""),
        )
