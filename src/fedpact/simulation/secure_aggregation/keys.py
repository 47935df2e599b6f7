"""Keys, masks and signatures of a session, and Shamir's shares of them.

TLS says that the channel leads to the right machine. It does not say who put a message into it: in
Flower whoever reaches the SuperLink's port can start a run or register a node. So every block is
signed (ECDSA, SHA-384) with a key of its sender's, and what the signature says it is for is signed
with it: a reply is no task, and what one site signed is not another's.

A secret is the value at 0 of a random polynomial of degree threshold - 1 over the whole numbers
modulo a prime, a share its value at x >= 1. Fewer shares than the threshold say nothing about it.

X25519, HKDF-SHA256, AES-256 in counter mode and AES-GCM are the library cryptography's. Every
derivation names the session and the two sites that it is for,
and of a session the slot: what is made for one sum, and used for no other.
"""

import hashlib
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
        raise InputError(f"{line[:30]!r}... is no OpenSSH public key ({error})") from None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise InputError(f"{line[:30]!r}... is no ECDSA key: generate one with ssh-keygen -t ecdsa")
    return key


def same_key(line: str, pem: bytes) -> bool:
    """Whether an OpenSSH line and a PEM block are the same public key."""
    form = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    return public_key(line).public_bytes(*form).strip() == pem.strip()


def sign(key: ec.EllipticCurvePrivateKey, purpose: str, block: bytes) -> bytes:
    """Return the signature of a block for one purpose."""
    return key.sign(_signed(purpose, block), _ALGORITHM)


def is_signed(key: ec.EllipticCurvePublicKey, purpose: str, block: bytes, signature: bytes) -> bool:
    """Whether the key's owner signed this block for this purpose."""
    try:
        key.verify(signature, _signed(purpose, block), _ALGORITHM)
    except InvalidSignature:
        return False
    return True


def signing_context(site: str, seen: tuple[int, str], agreed: str) -> str:
    """Return what a question to a site is signed for.

    seen: of its ledger, (0, "") for nothing. agreed: on what, see Federation.agreed.
    """
    length, head = seen
    entries = f" with {length} ledger entries up to {head}" if length else ""
    return f"task for {site}{entries} as agreed {agreed}"


def _signed(purpose: str, block: bytes) -> bytes:
    # The purpose ends with a zero byte, so that no purpose and block read as others.
    return b"fedpact " + purpose.encode() + b"\0" + block


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
    # All polynomials at once, side by side in one number, so that Horner's rule is one
    # multiplication for all of them: forty secrets take as long as a few. Nothing is reduced on the
    # way, so a value has less than 2^257 times 2^(bits of x) for each coefficient; `room` is that.
    room = (257 + threshold * max(at, default=1).bit_length()) // 8 + 1
    falling = [
        _beside((secrets.randbelow(_PRIME) for _ in secrets_), room) for _ in range(threshold - 1)
    ]
    # The coefficient of x^0, and so the value at 0, is the secret itself.
    falling.append(_beside(map(int.from_bytes, secrets_), room))
    found = dict[int, bytes]()
    for x in at:
        value = 0
        for coefficients in falling:
            value = value * x + coefficients
        # Only now each secret's own part is reduced: none has run over into its neighbour's.
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
    # The prime is above 2^256, so a value at 0 may be no 32 bytes: then a share was wrong.
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
                # Π other / (other - x), by the inverse modulo the prime.
                above = above * other % _PRIME
                below = below * (other - x) % _PRIME
        found.append(above * pow(below, -1, _PRIME) % _PRIME)
    return tuple(found)


_NONCE: Final = 12

SUMS_AHEAD: Final = 20
"""For how many sums keys and shares are made at once, at most."""


class SecretsDoNotFit(FedpactError):
    """A key, a share or a signature of a session is not what its maker said: exchanged, or bad.

    by: the site whose doing it is, "" where that cannot be known.
    """

    def __init__(self, told: str, by: str = "") -> None:
        super().__init__(told)
        self.by = by


@dataclass(frozen=True)
class KeyContext:
    """What keys, shares and signatures are for: run, round, and the session's own name.

    A session agrees on its sites once (its round is the one that it began in), and has slots, one
    for each sum. A slot has a place of its own, with the round it is for.
    """

    run: str
    round: int
    session: str

    def of_slot(self, slot: int, number: int) -> "KeyContext":
        """Return the place of a slot of this session, 0 and up, used for a round."""
        return KeyContext(self.run, number, f"{self.session}/{slot}")

    def about(self, *what: str) -> bytes:
        """Return bytes that stand for this place and what is meant in it, and nothing else."""
        return json.dumps(["fedpact", self.run, self.round, self.session, *what]).encode()


@dataclass(frozen=True)
class Advert:
    """What a site tells everybody of a session: M, S, the hash of b, and its signature.

    S has 32 bytes; M and the hash have 32 for each slot, in one row.
    """

    mask: bytes
    seal: bytes
    commitment: bytes
    signature: bytes = b""

    def mask_of(self, slot: int) -> bytes:
        """Return M of a slot."""
        return _part(self.mask, slot)

    def commitment_of(self, slot: int) -> bytes:
        """Return the hash of b of a slot."""
        return _part(self.commitment, slot)

    def has(self, slots: int) -> bool:
        """Whether its parts have the lengths of those for so many slots."""
        lengths = len(self.mask), len(self.seal), len(self.commitment)
        return lengths == (_SECRET * slots, _SECRET, _SECRET * slots)

    def is_of(self, key: ec.EllipticCurvePublicKey, site: str, place: KeyContext) -> bool:
        """Whether the owner of this long-term key signed it, as this site and for this session."""
        return is_signed(key, _purpose(site), self._signed(place), self.signature)

    def sign(self, key: ec.EllipticCurvePrivateKey, site: str, place: KeyContext) -> "Advert":
        """Return it with its site's signature."""
        signature = sign(key, _purpose(site), self._signed(place))
        return Advert(self.mask, self.seal, self.commitment, signature)

    def _signed(self, place: KeyContext) -> bytes:
        parts = (self.mask, self.seal, self.commitment)
        return place.about("keys", *(part.hex() for part in parts))


def sign_list(
    key: ec.EllipticCurvePrivateKey, site: str, what: str, names: Iterable[str], place: KeyContext
) -> bytes:
    """Return a site's signature of a list of sites. what: `roster_of` or `of_attempt`."""
    return sign(key, _purpose(site), place.about(what, *sorted(names)))


def has_signed(
    key: ec.EllipticCurvePublicKey,
    site: str,
    what: str,
    names: Iterable[str],
    place: KeyContext,
    signature: bytes,
) -> bool:
    """Whether the owner of this long-term key made a signature as `sign_list` does."""
    return is_signed(key, _purpose(site), place.about(what, *sorted(names)), signature)


def roster_of(adverts: Mapping[str, Advert]) -> str:
    """Return what the list of a session's sites is called, which names their keys.

    Its signers mask with no others, nor without one of them. A site that was started again has
    other keys, so what it signs then counts in no session of its first life.
    """
    # Signatures are left out: they are random, and the keys are what is agreed on.
    parts = ((name, a.mask, a.seal, a.commitment) for name, a in sorted(adverts.items()))
    told = json.dumps([[name, *(part.hex() for part in rest)] for name, *rest in parts])
    return f"roster {hashlib.sha256(told.encode()).hexdigest()}"


def of_attempt(attempt: int, roster: str) -> str:
    """Return what a list of who is in a sum is called: its signers open no sum over another."""
    return f"survivors {attempt} of {roster}"


class Secrets:
    """What a site makes for one session and keeps in memory only: s, and for each slot m and b."""

    def __init__(self, slots: int) -> None:
        self._seal = X25519PrivateKey.generate()
        self._masks = [X25519PrivateKey.generate() for _ in range(slots)]
        self._seeds = [secrets.token_bytes(_SECRET) for _ in range(slots)]
        self._ciphers = dict[str, AESGCM]()

    @property
    def slots(self) -> int:
        """For how many sums they are."""
        return len(self._seeds)

    def mask_key(self, slot: int) -> X25519PrivateKey:
        """Return the key pair's private half of a slot, m: its public half M is in `advert`."""
        return self._masks[slot]

    def seed(self, slot: int) -> bytes:
        """Return the seed of a slot's own mask, b: `advert` has its hash."""
        return self._seeds[slot]

    def advert(self) -> Advert:
        """Return what goes to everybody, not signed yet."""
        return Advert(
            b"".join(m.public_key().public_bytes_raw() for m in self._masks),
            self._seal.public_key().public_bytes_raw(),
            b"".join(hashlib.sha256(seed).digest() for seed in self._seeds),
        )

    def encrypt(self, own: str, peer: str, key: bytes, content: bytes, place: KeyContext) -> bytes:
        """Return content for a peer's eyes only. key: the peer's S."""
        # A key seals once each way, so a nonce by chance does not come twice.
        nonce, about = secrets.token_bytes(_NONCE), place.about("share", own, peer)
        return nonce + self._cipher(own, peer, key, place).encrypt(nonce, content, about)

    def decrypt(self, own: str, peer: str, key: bytes, block: bytes, place: KeyContext) -> bytes:
        """Return what a peer sealed for us. Raises SecretsDoNotFit: it did not, not here."""
        about = place.about("share", peer, own)
        try:
            return self._cipher(own, peer, key, place).decrypt(
                block[:_NONCE], block[_NONCE:], about
            )
        except (InvalidTag, ValueError):
            raise SecretsDoNotFit(f"what {peer} is said to have sealed for {own} is not") from None

    def _cipher(self, own: str, peer: str, key: bytes, place: KeyContext) -> AESGCM:
        # One key for both ways: from whom to whom a block is, is authenticated with it.
        if peer not in self._ciphers:
            self._ciphers[peer] = AESGCM(_agreed(self._seal, key, place, "seal", own, peer))
        return self._ciphers[peer]


def pair_seed(
    mask_key: X25519PrivateKey, public: bytes, one: str, other: str, place: KeyContext, attempt: int
) -> bytes:
    """Return k_ij, 32 bytes, from m of one of two sites and M of the other, either way round.

    place: the slot's. attempt: the task's. A server may ask one site for a new attempt, with new
    noise, and the others for the old one again: were the masks the same, two such sums would differ
    by that site's own vectors alone.
    """
    return _agreed(mask_key, public, place, f"mask of attempt {attempt}", one, other)


def is_of_advert(advert: Advert, slot: int, mask_key: bytes) -> bool:
    """Whether m belongs to M of a slot."""
    # Compared by its public half, which its owner has signed: no other secret fits it.
    key = X25519PrivateKey.from_private_bytes(mask_key)
    return key.public_key().public_bytes_raw() == advert.mask_of(slot)


def is_committed(advert: Advert, slot: int, seed: bytes) -> bool:
    """Whether b is the one that its site has told the hash of, for a slot."""
    return hashlib.sha256(seed).digest() == advert.commitment_of(slot)


def expand_seed(seed: bytes, like: RingWords) -> RingWords:
    """Return PRG(seed): as many words, of as many bits, as `like` has. A seed is for one stream.

    AES-256 in counter mode.
    """
    # A counter from 0 is safe as no seed is used for two streams.
    encryptor = Cipher(algorithms.AES(seed), modes.CTR(bytes(16))).encryptor()
    return np.frombuffer(encryptor.update(bytes(like.nbytes)), dtype=like.dtype.newbyteorder("<"))


def check_adverts(
    adverts: Mapping[str, Advert], keys: Mapping[str, ec.EllipticCurvePublicKey], place: KeyContext
) -> None:
    """Raise SecretsDoNotFit: keys that a site did not sign for this session, or of no site."""
    for name, advert in adverts.items():
        if name not in keys or not advert.is_of(keys[name], name, place):
            raise SecretsDoNotFit(f"the keys of {name} are not signed by {name} for this session")


def check_usable(advert: Advert, slots: int, site: str) -> None:
    """Raise SecretsDoNotFit: a site signed what are no keys, which would stop all the others."""
    if not advert.has(slots):
        raise SecretsDoNotFit(
            f"the keys of {site} are not {_SECRET} bytes for each of {slots} sums, or what it "
            "commits itself to are no hashes"
        )
    # Tried with a key of nobody: a point of small order gives everybody the same secret.
    own = X25519PrivateKey.generate()
    for public in (advert.seal, *map(advert.mask_of, range(slots))):
        _exchanged(own, public, site)


def _agreed(
    own: X25519PrivateKey, public: bytes, place: KeyContext, what: str, one: str, other: str
) -> bytes:
    secret = _exchanged(own, public, f"{one} or {other}")
    # Sorted, so that both find the same key; the place keeps it from any other session's or slot's.
    about = place.about(what, *sorted((one, other)))
    return HKDF(hashes.SHA256(), 32, salt=None, info=about).derive(secret)


def _exchanged(own: X25519PrivateKey, public: bytes, whose: str) -> bytes:
    try:
        return own.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:  # not 32 bytes, or a point that gives everybody the same
        raise SecretsDoNotFit(f"a key of {whose} is no X25519 key") from None


def _part(row: bytes, slot: int) -> bytes:
    return row[_SECRET * slot : _SECRET * (slot + 1)]


def _purpose(site: str) -> str:
    return f"secure aggregation of {site}"


def check_secure(plan: Plan, sites: int) -> None:
    """Raise InputError of some kind where a plan's secure aggregation cannot be had by so many."""
    if plan.secure_aggregation.threshold:
        plan.secure_aggregation.check_sites(sites)
        fraction_bits(sites)
