"""Grids of cases: a part of them in the suite, the others with those that are marked slow."""

import itertools

import pytest


def spread(*axes, one_in):
    """All combinations of the axes; the suite has one in `one_in`, and of each axis every value.

    axes: iterables of values. The others are marked slow: `pytest -m slow` has them.
    Raises ValueError: a value would be missing from the suite.
    """
    axes = [list(axis) for axis in axes]
    cases, kept = [], [set() for _ in axes]
    for places in itertools.product(*(range(len(axis)) for axis in axes)):
        values = [axis[i] for axis, i in zip(axes, places, strict=True)]
        suite = sum(places) % one_in == 0
        for of, i in zip(kept, places, strict=True):
            of.update([i] if suite else [])
        cases.append(pytest.param(*values, marks=() if suite else pytest.mark.slow))
    if any(len(of) < len(axis) for of, axis in zip(kept, axes, strict=True)):
        raise ValueError(f"one in {one_in} of these axes leaves a value out: {axes}")
    return cases
