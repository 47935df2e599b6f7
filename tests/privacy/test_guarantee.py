"""What a guarantee says, and what it never says too favourably."""

import math

import pytest

from fedpact.privacy.guarantee import Guarantee

SHARED = Guarantee(1.0, 1e-5, 4.2, 3)


@pytest.mark.parametrize("of", [SHARED, Guarantee(1.0, 1e-5, 1.0)])
def test_guarantee_survives_a_document(of):
    assert Guarantee.read({"epsilon": of.epsilon, "delta": of.delta, **of.entries}) == of


@pytest.mark.parametrize("name", ["epsilon", "epsilon_alone"])
def test_unknown_epsilon_is_infinite(name):
    document = {"epsilon": 1.0, "delta": 1e-5, "epsilon_alone": 4.2, "honest": 3, name: None}
    assert math.inf in (Guarantee.read(document).epsilon, Guarantee.read(document).alone)


def test_owner_counts_alone_unless_enough_are_trusted():
    assert [SHARED.counted(trusted) for trusted in (0, 2, 3, math.inf)] == [4.2, 4.2, 1.0, 1.0]


def test_largest_covers_all_and_nan_is_infinite():
    found = Guarantee.largest([SHARED, Guarantee(2.0, 1e-6, 2.0), Guarantee(math.nan, 0.0, 0.5)])
    assert found == Guarantee(math.inf, 1e-5, 4.2, 3)
