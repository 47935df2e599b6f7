"""Every check lets through exactly what it says, and its message names what it refused."""

import math
import sys
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpact.common import check
from fedpact.common.errors import InputError

LARGEST = sys.float_info.max
RANGES = {
    check.finite: lambda v: True,
    check.positive: lambda v: v > 0,
    check.non_negative: lambda v: v >= 0,
    check.probability: lambda v: 0 <= v <= 1,
    check.rate: lambda v: 0 < v <= 1,
    check.fraction: lambda v: 0 < v < 1,
}
INTEGERS = {check.count: 1, check.natural: 0}
EVERY = [*RANGES, *INTEGERS]

numbers = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False),
    st.floats(-1, 2),
    st.integers(-(10**400), 10**400),
    st.sampled_from([0.0, -0.0, 5e-324, 1.0, math.nextafter(1, 2), math.nextafter(1, 0), 0, 1]),
)


def outcome(checked, value):
    """The value let through, or the message of the refusal."""
    try:
        return checked(eta=value)
    except InputError as error:
        return error


@pytest.mark.parametrize("checked", RANGES)
@given(value=numbers)
def test_a_number_passes_exactly_in_its_range(checked, value):
    # Compared as fractions, which neither round nor overflow.
    good = abs(Fraction(value)) <= LARGEST and RANGES[checked](Fraction(value))
    result = outcome(checked, value)
    assert (result is value) == good
    if not good:
        assert f"eta is {value!r}: expected" in str(result)


@pytest.mark.parametrize("checked", INTEGERS)
@given(value=numbers)
def test_an_integer_passes_exactly_in_its_range(checked, value):
    good = isinstance(value, int) and value >= INTEGERS[checked]
    result = outcome(checked, value)
    assert (result is value) == good
    if not good:
        assert f"eta is {value!r}: expected an integer with eta >= {INTEGERS[checked]}" in str(
            result
        )


@pytest.mark.parametrize("checked", EVERY)
def test_numbers_that_are_not_finite_fail_every_check(checked):
    for value in (math.nan, math.inf, -math.inf, True, False, "1", "0.5", None, 0.5j, [1], (1,)):
        result = outcome(checked, value)
        assert isinstance(result, InputError), value
        assert f"eta is {value!r}: expected" in str(result)


@pytest.mark.parametrize("checked", EVERY)
def test_the_message_says_what_was_expected_in_the_callers_words(checked):
    with pytest.raises(
        InputError, match=r"^sampling_rate is nan: expected an? .*(sampling_rate|number)"
    ):
        checked(sampling_rate=math.nan)
