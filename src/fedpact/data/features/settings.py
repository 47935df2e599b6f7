"""The [features] table of a plan: what replaces each record before training.

All of it is public, the same at every party, and part of the plan.
"""

import re
from typing import Annotated, Any, Final, Self

from pydantic import AfterValidator, BaseModel, Field, model_validator

from fedpact.common.configuration import FROZEN, check_kinds
from fedpact.common.errors import InputError
from fedpact.common.run_settings import JoinedText
from fedpact.common.weights import lower_digest
from fedpact.data.features.kinds import FEATURE_KINDS

_OWN: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_FACTORY: Final = "package.module:factory"
_OF_KINDS: Final = ("whiten", "mirror", "seed")
_OF_FACTORIES: Final = ("weights", "sha256", "trained_on", "seed")
_SMALLEST_IMAGE: Final = 8


def _known(kind: str) -> str:
    if kind != "none" and kind not in FEATURE_KINDS and not _OWN.fullmatch(kind):
        raise ValueError(
            f"{kind!r} is no kind of features: expected one of none, {', '.join(FEATURE_KINDS)}, "
            "or your own as 'package.module:factory'"
        )
    return kind


class FeatureSettings(BaseModel):
    """What replaces each record before training. See the module.

    A setting that the kind does not use is refused.
    """

    model_config = FROZEN
    kind: Annotated[str, AfterValidator(_known)] = "none"
    """"none" trains on the records as they are; "scattering", "patches", or your own as
    package.module:factory."""
    cells: int | None = Field(default=None, ge=1, le=64)
    """c of the grid of c x c that maps are averaged over, by default 5 for scattering and 2 for
    patches."""
    filters: int = Field(default=320, ge=2, le=10_000)
    """Of patches, how many."""
    size: int = Field(default=6, ge=2, le=64)
    """Of patches, how many pixels wide."""
    threshold: float = Field(default=0.25, ge=0)
    """Of patches, what a filter's answer has to exceed to count."""
    mirror: bool = False
    """The mean of a record's features and its mirror image's, for images that mean the same
    mirrored, as clothes do and digits do not."""
    whiten: bool = True
    """Whether features are decorrelated by the covariance that they have on made images."""
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    """What made images follow from, by default the plan's."""
    weights: str | None = None
    """The file (.safetensors) with the weights of a module of your own."""
    sha256: Annotated[str | None, AfterValidator(lower_digest)] = None
    """Of that file, in hexadecimal."""
    trained_on: JoinedText | None = None
    """What those weights were chosen by; without it no ε is stated."""

    @property
    def used(self) -> bool:
        """Whether features replace the records."""
        return self.kind != "none"

    @property
    def factory(self) -> bool:
        """Whether the kind is a user's own module."""
        return self.used and self.kind not in FEATURE_KINDS

    @property
    def why_unstated(self) -> str:
        """Why no ε can be stated with these features; "" where it can."""
        if not self.factory or self.trained_on is not None:
            return ""
        return (
            f"features.kind = {self.kind!r} without features.trained_on: weights that were chosen "
            "by a site's records release them before anything is charged, so no ε can be stated; "
            'say what they were trained on (trained_on = "ImageNet-1k", or "nothing: drawn from a '
            'seed")'
        )

    @property
    def uncovered(self) -> str:
        """What ε does not cover of these features, "" for nothing."""
        if not self.factory:
            return ""
        what = "What the features' weights were trained on, which counts as public"
        return f"{what}: {self.trained_on}."

    def describe(self) -> str:
        """Return in a sentence what replaces the records; "" for nothing."""
        if not self.used:
            return ""
        of = "filters and whitening from made images: no record takes part"
        if self.factory:
            of = f"weights trained on: {self.trained_on or 'not said'}"
        return f"Features in place of the records, each of one record alone: {self.kind}; {of}."

    @model_validator(mode="after")
    def _fits_the_kind(self) -> Self:
        own = ("kind", *_own(self.kind))
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if name not in own and value != field.default:
                kinds = [kind for kind in (*FEATURE_KINDS, _FACTORY) if name in _own(kind)]
                of = " and ".join(kinds)
                raise ValueError(
                    f"{name} is {value!r} with kind = {self.kind!r}: it is a setting of {of}; "
                    "leave it out or change the kind"
                )
        if (self.weights is None) != (self.sha256 is None):
            raise ValueError(
                f"weights = {self.weights!r} with sha256 = {self.sha256!r}: a file counts with its "
                "SHA-256 alone, so that all parties have the same; give both (sha256sum FILE)"
            )
        return self


def _own(kind: str) -> tuple[str, ...]:
    if kind == "none":
        return ()
    return (*_OF_KINDS, *FEATURE_KINDS[kind].own) if kind in FEATURE_KINDS else _OF_FACTORIES


SETTINGS_OF_NO_KIND: Final = ("kind", *_OF_KINDS, *_OF_FACTORIES)
"""The settings that no kind has as its own."""
check_kinds(FEATURE_KINDS, FeatureSettings, SETTINGS_OF_NO_KIND)


def suggest_features(shape: tuple[int, ...], mirror: bool | None) -> dict[str, Any]:
    """Return the [features] table for records of this shape; none for tables.

    mirror: whether mirrored images mean the same; None: yes for colour images. Raises InputError:
    it is given, and the records are not images.
    """
    if len(shape) not in (2, 3) or min(shape[-2:]) < _SMALLEST_IMAGE:
        if mirror is not None:
            raise InputError(
                f"mirror is {mirror} for records of shape {shape}, which get no features: expected "
                f"images of {_SMALLEST_IMAGE} x {_SMALLEST_IMAGE} or more; leave it out"
            )
        return {}
    channels = shape[0] if len(shape) == 3 else 1
    mirrored = channels > 1 if mirror is None else mirror
    if channels > 1:
        return {"kind": "patches", "filters": 640, "mirror": mirrored, "seed": 0}
    return {"kind": "scattering", "mirror": mirrored, "seed": 0}
