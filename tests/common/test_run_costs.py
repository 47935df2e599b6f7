"""Seconds of a round and of a local iteration, told apart by least squares."""

import numpy as np
import pytest

from fedpact.common.run_folder import Costs


def costs(rounds):
    total = Costs()
    for steps, seconds in rounds:
        total = total.after(10, steps, seconds)
    return total


def test_time_split_is_exact_for_rounds_on_a_line():
    found = costs([(t, 2.0 + 0.25 * t) for t in (1, 4, 2, 9)])
    assert found.split_seconds() == pytest.approx((2.0, 0.25), rel=1e-12)
    assert (found.rounds, found.sent, found.steps) == (4, 40, 16)


def test_it_is_the_least_squares_line():
    steps, seconds = np.array([1, 2, 3, 5, 8]), np.array([3.0, 3.1, 3.9, 4.2, 6.0])
    slope, level = np.polyfit(steps, seconds, 1)
    found = costs(zip(steps.tolist(), seconds.tolist(), strict=True))
    assert found.split_seconds() == pytest.approx((level, slope), rel=1e-9)


def test_rounds_of_one_tau_count_as_communication():
    assert costs([(3, 2.0), (3, 4.0)]).split_seconds() == (3.0, 0.0)
    assert Costs().split_seconds() == (0.0, 0.0)


@pytest.mark.parametrize("rounds", [[(1, 5.0), (2, 1.0)], [(1, 1.0), (2, 9.0)]])
def test_both_parts_stay_at_least_zero(rounds):
    """A slope below 0, or a level below 0, is no cost."""
    per_round, per_step = costs(rounds).split_seconds()
    assert per_round >= 0
    assert per_step >= 0
