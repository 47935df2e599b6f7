"""Who takes part in a round: a draw that anybody can make again, each set as likely as another."""

import hashlib
import json
import math
from collections import Counter
from itertools import combinations, pairwise

import pytest

from fedpact.common.errors import PlanError
from fedpact.common.randomness.seeded import Participants

NAMES = tuple("edcba")


def drawn(seed, names, each, number):
    """The module's recipe once more, on whole numbers alone."""
    block = hashlib.shake_256(f'[{seed}, "participants", {number}]'.encode()).digest(8 * each)
    left = sorted(names)
    for i in range(each):
        j = i + int.from_bytes(block[8 * i : 8 * i + 8], "little") % (len(left) - i)
        left[i], left[j] = left[j], left[i]
    return tuple(sorted(left[:each]))


@pytest.mark.parametrize("each", [1, 3, 4])
def test_anybody_can_draw_the_same(each):
    of = Participants(7, NAMES, each)
    assert of.partial
    for number in (1, 2, 30, 10**6):
        assert of.of(number) == drawn(7, NAMES, each, number)
        assert len(set(of.of(number))) == each
    assert json.dumps([7, "participants", 2]) == '[7, "participants", 2]'


@pytest.mark.parametrize("each", [None, 5])
def test_all_sites_take_part_if_none_is_left_out(each):
    of = Participants(7, NAMES, each)
    assert (of.partial, of.of(3), of.describe()) == (False, tuple("abcde"), "")
    assert of.rounds(9) == dict.fromkeys(NAMES, 9)
    assert (of.last_of("a", 9), of.newcomers(9)) == (9, 0)


def test_every_set_is_as_likely_as_any_other():
    """χ² over the ten pairs of five: 27.88 is passed once in a thousand, and the seed is fixed."""
    of, rounds = Participants(0, NAMES, 2), 4000
    counts = Counter(of.of(number) for number in range(1, rounds + 1))
    assert set(counts) == set(combinations("abcde", 2))
    expected = rounds / math.comb(5, 2)
    assert sum((n - expected) ** 2 / expected for n in counts.values()) < 27.88


def test_rounds_are_counted_as_they_are_drawn():
    of = Participants(3, NAMES, 2)
    everybody = [of.of(number) for number in range(1, 21)]
    for site in NAMES:
        own = [number for number, part in enumerate(everybody, 1) if site in part]
        assert of.rounds(20)[site] == len(own)
        assert of.last_of(site, 20) == own[-1]
    new = sum(len(set(now) - set(was)) for was, now in pairwise(everybody))
    assert of.newcomers(20) == new
    # Before the first round something may be released, by everybody.
    assert of.of(0) == tuple("abcde")
    assert of.last_of("nobody", 20) == 0


def test_more_than_there_are_is_an_error():
    with pytest.raises(PlanError, match="sites_per_round is 6 with 5 sites: expected at most"):
        Participants(0, NAMES, 6)
