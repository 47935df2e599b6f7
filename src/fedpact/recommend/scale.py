"""Clip and bias of a linear model, by how long records are."""

from collections.abc import Mapping
from typing import Any, Final

# A share of the gradient's length at the zero model, which is about that of the row.
_CLIP: Final = 0.2
_BIAS: Final = 0.3  # for rows up to a length of _USUAL, as of the hospitals' table
_USUAL: Final = 6.0
_BIAS_SHARE: Final = 0.1  # of a longer record's length


def heaviest(document: Mapping[str, Any]) -> float:
    """Return by how much the largest class weight lengthens a gradient, which a clip would undo."""
    return max(1.0, *(document.get("task", {}).get("class_weights") or ()), 1.0)


def clip_of(length: float, heaviest: float) -> float:
    """Return C for records of about this length."""
    return float(f"{_CLIP * length * heaviest:.1g}")


def explain_clip(heaviest: float) -> str:
    """Return why it is that."""
    more = " and the largest class weight" if heaviest > 1 else ""
    return f"C, {_CLIP:g} of a record's length{more}: a share of its first gradient"


def bias_of(length: float) -> float:
    """Return the input for which a class has a weight.

    One of 1 takes as much of what a clip leaves of a row, and one-hot codes hold one; without a
    tenth of a longer row nothing answers how common a class is.
    """
    return min(1000.0, float(f"{_BIAS_SHARE * length:.1g}")) if length > _USUAL else _BIAS


def explain_bias(features: bool) -> str:
    """Return why it is that; of features there is none."""
    if features:
        return "it would take its part of every clip"
    return f"its input: {_BIAS:g}, or of records longer than {_USUAL:g} a tenth of that"
