"""Shamir's secret sharing (Communications of the ACM 22(11), 1979) of 32 bytes.

A secret is the value at 0 of a random polynomial of degree threshold - 1 over the whole numbers
modulo a prime, a share its value at x >= 1. Fewer shares than the threshold say nothing about it.
"""

import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Final

from fedpact.errors import InputError

SHARE: Final = 33
"""Bytes of a share."""

_SECRET: Final = 32
_PRIME: Final = 2**256 + 297
"""The first prime that is larger than every secret."""


def split_secrets(
    secrets_: Sequence[bytes], threshold: int, at: Collection[int]
) -> dict[int, bytes]:
    """Return x -> a share of each secret, SHARE bytes each in one row, for every x in `at`.

    secrets_: of 32 bytes each. threshold: how many shares give one back, 1 or more. at: 1 and more.
    Raises InputError.
    """
    if {_SECRET} != {*map(len, secrets_)} or threshold < 1 or min(at, default=1) < 1:
        raise InputError(
            f"secrets with a threshold of {threshold}, at {sorted(at)}: expected at least one of "
            f"{_SECRET} bytes each, a threshold of at least 1, and shares at 1 and more"
        )
    # All polynomials at once, side by side in one number: a value has less than 2^257 times
    # 2^(bits of x) for each coefficient, as it is reduced in the end only.
    room = (257 + threshold * max(at, default=1).bit_length()) // 8 + 1
    falling = [
        _beside((secrets.randbelow(_PRIME) for _ in secrets_), room) for _ in range(threshold - 1)
    ]
    falling.append(_beside(map(int.from_bytes, secrets_), room))
    found = dict[int, bytes]()
    for x in at:
        value = 0
        for coefficients in falling:
            value = value * x + coefficients
        row = value.to_bytes(room * len(secrets_))
        each = (int.from_bytes(row[i : i + room]) % _PRIME for i in range(0, len(row), room))
        found[x] = b"".join(share.to_bytes(SHARE) for share in each)
    return found


def _beside(numbers: Iterable[int], room: int) -> int:
    return int.from_bytes(b"".join(number.to_bytes(room) for number in numbers))


def recover_secret(shares: Mapping[int, bytes]) -> bytes:
    """Return the secret of exactly threshold shares by x. Raises InputError: they give none.

    Other shares than its own give another secret: check what comes out.
    """
    at = tuple(sorted(shares))
    if any(len(share) != SHARE for share in shares.values()):
        raise InputError(f"a share is not of {SHARE} bytes")
    values = (int.from_bytes(shares[x]) for x in at)
    secret = sum(a * b for a, b in zip(_at_zero(at), values, strict=True)) % _PRIME
    if secret >> (8 * _SECRET):
        raise InputError("the shares give no secret")
    return secret.to_bytes(_SECRET)


@lru_cache(maxsize=1024)
def _at_zero(at: tuple[int, ...]) -> tuple[int, ...]:
    """Lagrange's coefficients: what the values at these x are multiplied with to give that at 0."""
    found: list[int] = []
    for x in at:
        above = below = 1
        for other in at:
            if other != x:
                above = above * other % _PRIME
                below = below * (other - x) % _PRIME
        found.append(above * pow(below, -1, _PRIME) % _PRIME)
    return tuple(found)
