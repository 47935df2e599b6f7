"""Keys, masks and signatures of a session, and Shamir's shares of them.

TLS authenticates the machine, not the sender: anyone who reaches the port of Flower's SuperLink can
start a run or register a node. So every block is signed (ECDSA, SHA-384) by its sender, together
with its purpose: a signed reply cannot pass as a task, nor one site's message as another's.

A secret is the value at 0 of a random polynomial of degree threshold - 1 modulo a prime, and a
share is its value at some x >= 1. Fewer shares than the threshold reveal nothing.

X25519, HKDF-SHA256, AES-256 in counter mode and AES-GCM come from the library cryptography. Every
derivation includes the session, its slot and the two sites, so a key serves one sum only.
"""

import hashlib
import itertools
import json
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

import numpy as np
from cryptography.exceptions import InvalidSignature, InvalidTag, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedpact.common.errors import FedpactError, InputError
from fedpact.plan import Plan
from fedpact.simulation.secure_aggregation.encoding import fraction_bits
from fedpact.simulation.secure_aggregation.words import RingWords

_ALGORITHM = ec.ECDSA(hashes.SHA384())


def read_private_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Read an OpenSSH private key on a NIST curve. Raises InputError: missing, or another kind."""
    try:
        key = serialization.load_ssh_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise InputError(
            f"key {path} cannot be read ({error}): expected what `fedpact deploy init` wrote there"
        ) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise InputError(f"key {path} is a {type(key).__name__}: expected an ECDSA key")
    return key


@lru_cache(maxsize=1024)
def public_key(line: str) -> ec.EllipticCurvePublicKey:
    """Return the key of an OpenSSH public-key line. Raises InputError: anything else."""
    try:
        key = serialization.load_ssh_public_key(line.encode())
    except (ValueError, UnsupportedAlgorithm) as error:
        raise InputError(f"{line[:30]!r}... is not an OpenSSH public key ({error})") from None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise InputError(f"{line[:30]!r}... is not ECDSA: generate one with ssh-keygen -t ecdsa")
    return key


def sign(key: ec.EllipticCurvePrivateKey, purpose: str, block: bytes) -> bytes:
    """Return the signature of a block for one purpose."""
    return key.sign(_to_sign(purpose, block), _ALGORITHM)


def is_signed(key: ec.EllipticCurvePublicKey, purpose: str, block: bytes, signature: bytes) -> bool:
    """Whether the key's owner signed this block for this purpose."""
    try:
        key.verify(signature, _to_sign(purpose, block), _ALGORITHM)
    except InvalidSignature:
        return False
    return True


def signing_context(site: str, seen: tuple[int, str], agreed: str) -> str:
    """Return the purpose with which a question to a site is signed.

    seen: length and head of its ledger, (0, "") for none. agreed: see Federation.agreed.
    """
    length, head = seen
    entries = f" with {length} ledger entries up to {head}" if length else ""
    return f"task for {site}{entries} as agreed {agreed}"


def _to_sign(purpose: str, block: bytes) -> bytes:
    # The zero byte separates purpose and block unambiguously.
    return b"fedpact " + purpose.encode() + b"\0" + block


SHARE: Final = 33
"""Bytes of a share: one more than a secret, as the prime exceeds 2^256."""

_SECRET: Final = 32
_PRIME: Final = 2**256 + 297
"""The smallest prime that is larger than every secret."""


def split_secrets(
    secrets_: Sequence[bytes], threshold: int, at: Collection[int]
) -> dict[int, bytes]:
    """Return x -> a share of each secret, concatenated, SHARE bytes each, for every x in `at`.

    secrets_: 32 bytes each. threshold: the number of shares that recover one, >= 1. at: each >= 1.
    Raises InputError.
    """
    if {_SECRET} != {*map(len, secrets_)} or threshold < 1 or min(at, default=1) < 1:
        raise InputError(
            f"secrets with a threshold of {threshold}, at {sorted(at)}: expected at least one of "
            f"{_SECRET} bytes each, a threshold of at least 1, and shares at 1 and more"
        )
    found = dict.fromkeys(at, b"")
    for secret in secrets_:
        # Falling powers. The coefficient of x^0, the value at 0, is the secret.
        polynomial = [secrets.randbelow(_PRIME) for _ in range(threshold - 1)]
        polynomial.append(int.from_bytes(secret))
        for x in at:
            value = 0
            for coefficient in polynomial:
                value = (value * x + coefficient) % _PRIME
            found[x] += value.to_bytes(SHARE)
    return found


def recover_secret(shares: Mapping[int, bytes]) -> bytes:
    """Return the secret from exactly threshold shares by x.

    Wrong shares give another secret, which the caller has to check, or raise InputError.
    """
    at = tuple(sorted(shares))
    if any(len(share) != SHARE for share in shares.values()):
        raise InputError(f"a share is not of {SHARE} bytes")
    # The prime is above 2^256, so a value at 0 that is longer than 32 bytes shows a wrong share.
    values = (int.from_bytes(shares[x]) for x in at)
    secret = sum(a * b for a, b in zip(_at_zero(at), values, strict=True)) % _PRIME
    if secret >> (8 * _SECRET):
        raise InputError("the shares give no secret")
    return secret.to_bytes(_SECRET)


@lru_cache(maxsize=1024)
def _at_zero(at: tuple[int, ...]) -> tuple[int, ...]:
    """Return Lagrange's coefficients of the values at these x for the value at 0."""
    found: list[int] = []
    for x in at:
        above = below = 1
        for other in at:
            if other != x:
                # Π other / (other - x), by the inverse modulo the prime.
                above = above * other % _PRIME
                below = below * (other - x) % _PRIME
        found.append(above * pow(below, -1, _PRIME) % _PRIME)
    return tuple(found)


_NONCE: Final = 12

SUMS_AHEAD: Final = 20
"""The most sums for which a session creates keys and shares."""


class SecretsDoNotFit(FedpactError):
    """A key, share or signature of a session is invalid, or not the one its site announced.

    by: the site at fault, "" if unknown.
    """

    def __init__(self, told: str, by: str = "") -> None:
        super().__init__(told)
        self.by = by


@dataclass(frozen=True)
class KeyContext:
    """What keys, shares and signatures are valid for: run, round and session.

    A session agrees on its sites once, in the round in which it began, and has slots, one for each
    sum. A slot has its own context, with the round it is used in.
    """

    run: str
    round: int
    session: str

    @staticmethod
    def new(run: str, number: int) -> "KeyContext":
        """Return the context of a session that begins in a round, with a unique name."""
        # Random, as a restarted server must not repeat a name.
        return KeyContext(run, number, secrets.token_hex(8))

    def of_slot(self, slot: int, number: int) -> "KeyContext":
        """Return the context of a slot >= 0 of this session, used for a round."""
        return KeyContext(self.run, number, f"{self.session}/{slot}")

    def about(self, *what: str) -> bytes:
        """Return bytes that encode this context and a purpose in it unambiguously."""
        return json.dumps(["fedpact", self.run, self.round, self.session, *what]).encode()


@dataclass(frozen=True)
class Advert:
    """A site's public keys of a session: M, S, the hash of b, and its signature of them.

    S has 32 bytes; M and the hash have 32 for each slot, concatenated.
    """

    mask: bytes
    seal: bytes
    commitment: bytes
    signature: bytes = b""

    def mask_of(self, slot: int) -> bytes:
        """Return M for a slot."""
        return _part(self.mask, slot)

    def commitment_of(self, slot: int) -> bytes:
        """Return the hash of b for a slot."""
        return _part(self.commitment, slot)

    def pack(self) -> bytes:
        """Return it as one block, in which only the signature's length is free."""
        return self.seal + self.mask + self.commitment + self.signature

    @staticmethod
    def unpack(block: bytes, slots: int) -> "Advert":
        """Return the keys of so many slots from `pack`'s block; of a short one unsigned keys."""
        ends = _SECRET, _SECRET * (1 + slots), _SECRET * (1 + 2 * slots)
        seal, mask, commitment, signature = (
            block[i:j] for i, j in itertools.pairwise((0, *ends, None))
        )
        return Advert(mask, seal, commitment, signature)

    def sign(self, key: ec.EllipticCurvePrivateKey, site: str, place: KeyContext) -> "Advert":
        """Return a copy with its site's signature."""
        signature = sign(key, _purpose(site), self.to_sign(place))
        return Advert(self.mask, self.seal, self.commitment, signature)

    def to_sign(self, place: KeyContext) -> bytes:
        """Return the bytes that its site signs."""
        parts = (self.mask, self.seal, self.commitment)
        return place.about("keys", *(part.hex() for part in parts))


def sign_list(
    key: ec.EllipticCurvePrivateKey, site: str, what: str, names: Iterable[str], place: KeyContext
) -> bytes:
    """Return a site's signature of a list of sites. what: from `roster_of` or `of_attempt`."""
    return sign(key, _purpose(site), place.about(what, *sorted(names)))


def has_signed(
    key: ec.EllipticCurvePublicKey,
    site: str,
    what: str,
    names: Iterable[str],
    place: KeyContext,
    signature: bytes,
) -> bool:
    """Whether a signature is `sign_list`'s with this long-term key."""
    return is_signed(key, _purpose(site), place.about(what, *sorted(names)), signature)


def roster_of(adverts: Mapping[str, Advert]) -> str:
    """Return a name for the list of a session's sites that includes their keys.

    Its signers mask with exactly these sites. A restarted site has other keys, so its signatures
    are invalid in earlier sessions.
    """
    # Without the signatures, which are random.
    parts = ((name, a.mask, a.seal, a.commitment) for name, a in sorted(adverts.items()))
    told = json.dumps([[name, *(part.hex() for part in rest)] for name, *rest in parts])
    return f"roster {hashlib.sha256(told.encode()).hexdigest()}"


def of_attempt(attempt: int, roster: str) -> str:
    """Return a name for the list of sites in a sum; its signers open no sum over another list."""
    return f"survivors {attempt} of {roster}"


class Secrets:
    """A site's secrets of one session, in memory only: s, and for each slot m and b."""

    def __init__(self, slots: int) -> None:
        self._seal = X25519PrivateKey.generate()
        self._masks = [X25519PrivateKey.generate() for _ in range(slots)]
        self._seeds = [secrets.token_bytes(_SECRET) for _ in range(slots)]
        self._ciphers = dict[str, AESGCM]()

    @property
    def slots(self) -> int:
        """The number of sums."""
        return len(self._seeds)

    def mask_key(self, slot: int) -> X25519PrivateKey:
        """Return the private key m of a slot; its public key M is in `advert`."""
        return self._masks[slot]

    def seed(self, slot: int) -> bytes:
        """Return the seed b of a slot's own mask; its hash is in `advert`."""
        return self._seeds[slot]

    def advert(self) -> Advert:
        """Return the public part, unsigned."""
        return Advert(
            b"".join(m.public_key().public_bytes_raw() for m in self._masks),
            self._seal.public_key().public_bytes_raw(),
            b"".join(hashlib.sha256(seed).digest() for seed in self._seeds),
        )

    def encrypt(self, own: str, peer: str, key: bytes, content: bytes, place: KeyContext) -> bytes:
        """Return content sealed for a peer. key: the peer's S."""
        # A key seals once in each direction, so random nonces do not repeat.
        nonce, about = secrets.token_bytes(_NONCE), place.about("share", own, peer)
        return nonce + self._cipher(own, peer, key, place).encrypt(nonce, content, about)

    def decrypt(self, own: str, peer: str, key: bytes, block: bytes, place: KeyContext) -> bytes:
        """Return what a peer sealed for this site. Raises SecretsDoNotFit: not sealed by it."""
        about = place.about("share", peer, own)
        try:
            return self._cipher(own, peer, key, place).decrypt(
                block[:_NONCE], block[_NONCE:], about
            )
        except (InvalidTag, ValueError):
            raise SecretsDoNotFit(f"what {peer} is said to have sealed for {own} is not") from None

    def _cipher(self, own: str, peer: str, key: bytes, place: KeyContext) -> AESGCM:
        # One key for both directions: sender and recipient are authenticated with each block.
        if peer not in self._ciphers:
            self._ciphers[peer] = AESGCM(_agree(self._seal, key, place, "seal", own, peer))
        return self._ciphers[peer]


def pair_seed(
    mask_key: X25519PrivateKey, public: bytes, one: str, other: str, place: KeyContext, attempt: int
) -> bytes:
    """Return k_ij, 32 bytes, from m of either site and M of the other.

    place: the slot's. attempt: the task's. A server may ask one site for a new attempt, with new
    noise, and the others for the old one: with the same masks, two such sums would differ by that
    site's vectors alone.
    """
    return _agree(mask_key, public, place, f"mask of attempt {attempt}", one, other)


def is_of_advert(advert: Advert, slot: int, mask_key: bytes) -> bool:
    """Whether m is the private key of a slot's M."""
    key = X25519PrivateKey.from_private_bytes(mask_key)
    return key.public_key().public_bytes_raw() == advert.mask_of(slot)


def is_committed(advert: Advert, slot: int, seed: bytes) -> bool:
    """Whether b has the hash that its site announced for a slot."""
    return hashlib.sha256(seed).digest() == advert.commitment_of(slot)


def expand_seed(seed: bytes, like: RingWords) -> RingWords:
    """Return PRG(seed), AES-256 in counter mode: as many words, of the same type, as `like`."""
    # Starting the counter at 0 is safe, as each seed is used for one stream.
    encryptor = Cipher(algorithms.AES(seed), modes.CTR(bytes(16))).encryptor()
    return np.frombuffer(encryptor.update(bytes(like.nbytes)), dtype=like.dtype.newbyteorder("<"))


def check_adverts(
    adverts: Mapping[str, Advert], keys: Mapping[str, ec.EllipticCurvePublicKey], place: KeyContext
) -> None:
    """Raise SecretsDoNotFit if keys are not signed by their site for this session."""
    for name, advert in adverts.items():
        signed = _purpose(name), advert.to_sign(place), advert.signature
        if name not in keys or not is_signed(keys[name], *signed):
            raise SecretsDoNotFit(f"the keys of {name} are not signed by {name} for this session")


def check_usable(advert: Advert, slots: int, site: str) -> None:
    """Raise SecretsDoNotFit if a site's keys are malformed, which would stop all other sites."""
    # Tried with a throw-away key: a point of small order gives everybody the same secret.
    own = X25519PrivateKey.generate()
    for public in (advert.seal, *map(advert.mask_of, range(slots))):
        _exchange(own, public, site)


def _agree(
    own: X25519PrivateKey, public: bytes, place: KeyContext, what: str, one: str, other: str
) -> bytes:
    secret = _exchange(own, public, f"{one} or {other}")
    # Sorted, so that both sites derive the same key.
    about = place.about(what, *sorted((one, other)))
    return HKDF(hashes.SHA256(), 32, salt=None, info=about).derive(secret)


def _exchange(own: X25519PrivateKey, public: bytes, whose: str) -> bytes:
    try:
        return own.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:  # not 32 bytes, or a point of small order
        raise SecretsDoNotFit(f"a key of {whose} is not a valid X25519 key") from None


def _part(row: bytes, slot: int) -> bytes:
    return row[_SECRET * slot : _SECRET * (slot + 1)]


def _purpose(site: str) -> str:
    return f"secure aggregation of {site}"


def check_secure(plan: Plan, sites: int) -> None:
    """Raise InputError if a plan's secure aggregation does not allow this number of sites."""
    if plan.secure_aggregation.threshold:
        plan.secure_aggregation.check_sites(sites)
        fraction_bits(sites)
