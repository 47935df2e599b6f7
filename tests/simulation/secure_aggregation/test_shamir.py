"""Shamir's secret sharing against its definition, and what fewer shares say."""

import itertools
import secrets

import pytest

from fedpact.common.errors import InputError
from fedpact.simulation.secure_aggregation import keys

PRIME = 2**256 + 297


def test_the_modulus_is_prime():
    """Miller and Rabin's test with 40 bases: wrong less than once in 4^40."""
    odd, twos = PRIME - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for _ in range(40):
        x = pow(secrets.randbelow(PRIME - 3) + 2, odd, PRIME)
        assert x == 1 or any(pow(x, 2**i, PRIME) == PRIME - 1 for i in range(twos))


@pytest.mark.parametrize(("threshold", "at"), [(1, [4]), (2, [1, 2, 3]), (3, [1, 2, 5, 100, 7])])
def test_any_threshold_of_shares_gives_each_secret_back(threshold, at):
    given = [bytes(32), b"\xff" * 32, secrets.token_bytes(32)]
    found = keys.split_secrets(given, threshold, at)
    assert {len(row) for row in found.values()} == {3 * keys.SHARE}
    for place, secret in enumerate(given):
        cut = slice(place * keys.SHARE, (place + 1) * keys.SHARE)
        for some in itertools.combinations(at, threshold):
            assert keys.recover_secret({x: found[x][cut] for x in some}) == secret


def test_fewer_shares_go_with_every_secret_alike():
    """Two shares of three that are needed, and a third that makes any other secret of them."""
    found = keys.split_secrets([secrets.token_bytes(32)], 3, [1, 2, 3])
    y1, y2 = (int.from_bytes(found[x]) for x in (1, 2))
    for other in (0, 1, 2**256 - 1, secrets.randbelow(2**256)):
        # The parabola through (0, other), (1, y1), (2, y2) at 3: f(3) = 3 f(2) - 3 f(1) + f(0).
        third = (3 * y2 - 3 * y1 + other) % PRIME
        shares = {1: found[1], 2: found[2], 3: third.to_bytes(keys.SHARE)}
        assert keys.recover_secret(shares) == other.to_bytes(32)


@pytest.mark.parametrize("bad", [b"", b"x" * 32, b"\xff" * 33])
def test_invalid_shares_give_no_secret(bad):
    found = keys.split_secrets([b"s" * 32], 2, [1, 2])
    if len(bad) == keys.SHARE:
        assert keys.recover_secret({1: bad, 2: found[2]}) != b"s" * 32
        return
    with pytest.raises(InputError, match="33 bytes"):
        keys.recover_secret({1: bad, 2: found[2]})


def test_an_invalid_secret_is_not_split():
    for given, threshold, at in (([b"short"], 2, [1]), ([], 1, [1]), ([bytes(32)], 0, [1])):
        with pytest.raises(InputError, match="expected at least one of 32 bytes"):
            keys.split_secrets(given, threshold, at)
    with pytest.raises(InputError, match="shares at 1 and more"):
        keys.split_secrets([bytes(32)], 1, [0])
