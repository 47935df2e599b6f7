"""Every algorithm, and what goes around one, on the federation of studies.conformance."""

import itertools
from functools import cache
from typing import Any

import pytest

from fedpact import algorithms
from fedpact.studies.conformance import HandFederation, method_of, variants

COMBINATIONS: list[dict[str, Any]] = [
    # The bias of the federation's model stays at each site.
    {
        "algorithm": "fedprox",
        "settings": {"local_steps": 3},
        "local": {"head": 3, "momentum": 0.5, "schedule": [1.0, 2.0, 0.5]},
        "server": {"optimiser": "adam"},
    },
    {"algorithm": "fedavg", "control": {"kind": "ali", "iterations": 7}},
    {
        "algorithm": "fedproxvr",
        "control": {"kind": "ali"},
        "server": {"optimiser": "yogi", "average": "exponential"},
    },
    {
        "algorithm": "fedavg",
        "fairness": {"weight": 0.3},
        "control": {"kind": "ali"},
        "server": {"optimiser": "momentum", "average": "tail"},
    },
]
"""Tables of a plan, for what goes around an algorithm."""


def of(tables):
    """The method of a plan's tables, with these beside it for the tests of an engine."""
    method = method_of(tables)
    method.tables = tables
    return method


def variants_of(name):
    """An algorithm's variants, each with its tables."""
    found = variants(name)
    for one in found:
        given = one.settings.model_dump(exclude_defaults=True)
        one.tables = {"algorithm": name, "settings": given}
    return found


def new_choice():
    """Whether a variant makes a choice that none before it made: algorithms share their rules."""
    seen = set[frozenset[tuple[str, Any]]]()

    def is_new(one):
        settings = one.tables["settings"].items()
        choice = frozenset(each for each in settings if each[0] != "local_steps")
        made = choice in seen
        seen.update([choice] if choice else [])
        return not made

    return is_new


def label(tables):
    """A test's name for a method."""
    rest = [f"{key}={value}" for key, value in tables.items() if key != "algorithm" and value]
    return "-".join([tables["algorithm"], *rest])


@cache
def methods():
    """Every method: each algorithm, and each choice of a setting. The usual suite has one variant
    of each algorithm, and what goes around it."""
    # What lets exact numbers out by design has tests of its own: test_ali_dpfl.
    own = [
        [one for one in variants_of(name) if not one.facts.unprotected]
        for name in algorithms.names()
    ]
    wrapped = [one for one in map(of, COMBINATIONS) if not one.facts.unprotected]
    # Defaults differ by their number of steps alone from three steps, which are a variant.
    differ = [
        some[1:] if hasattr(some[0].settings, "local_steps") else some for some in own if some
    ]
    usual = [*(some[:2][-1] for some in own if some), *wrapped]
    return [
        pytest.param(one, id=label(one.tables), marks=() if one in usual else pytest.mark.slow)
        for one in [*filter(new_choice(), itertools.chain(*differ)), *wrapped]
    ]


def pytest_generate_tests(metafunc):
    """`case` is every method, `choice` each that the usual suite has not among these, and
    `reducible` each algorithm that names a parent."""
    if "reducible" in metafunc.fixturenames:
        named = [name for name in algorithms.names() if algorithms.load(name).NEUTRAL]
        metafunc.parametrize("reducible", named)
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", methods())
    if "choice" in metafunc.fixturenames:
        others = [pytest.param(*one.values, id=one.id) for one in methods() if one.marks]
        metafunc.parametrize("choice", others)


@pytest.fixture(scope="session")
def federation():
    return HandFederation
