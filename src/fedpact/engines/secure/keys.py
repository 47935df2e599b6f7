"""The cryptography of a session: what a site makes for it, masks, sealed shares, shared secrets.

X25519, HKDF-SHA256, AES-256 in counter mode and AES-GCM are the library cryptography's; Shamir's
secret sharing (over GF(2^128)) is the one that Flower has for its own secure aggregation. Every
derivation names the session and the two sites that it is for.
"""

import hashlib
import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedpact.engines.flower import seal
from fedpact.engines.secure.ring import Words, fraction_bits
from fedpact.errors import FedpactError, InputError
from fedpact.plan import Plan

_NONCE: Final = 12
_SECRET: Final = 32


class SecretsDoNotFit(FedpactError):
    """A key, a share or a signature of a session is not what its maker said: exchanged, or bad.

    by: the site whose doing it is, "" where that cannot be known.
    """

    def __init__(self, told: str, by: str = "") -> None:
        super().__init__(told)
        self.by = by


@dataclass(frozen=True)
class Place:
    """What a session's keys are for: run, round, and the session's own name."""

    run: str
    round: int
    session: str

    def about(self, *what: str) -> bytes:
        """Return bytes that stand for this place and what is meant in it, and nothing else."""
        return json.dumps(["fedpact", self.run, self.round, self.session, *what]).encode()


@dataclass(frozen=True)
class Advert:
    """What a site tells everybody: M, S, the hash of b, each of 32 bytes, and its signature."""

    mask: bytes
    seal: bytes
    commitment: bytes
    signature: bytes = b""

    def is_of(self, key: ec.EllipticCurvePublicKey, site: str, place: Place) -> bool:
        """Whether the owner of this long-term key signed it, as this site and for this session."""
        return seal.is_signed(key, _purpose(site), self._signed(place), self.signature)

    def signed(self, key: ec.EllipticCurvePrivateKey, site: str, place: Place) -> "Advert":
        """Return it with its site's signature."""
        signature = seal.sign(key, _purpose(site), self._signed(place))
        return Advert(self.mask, self.seal, self.commitment, signature)

    def _signed(self, place: Place) -> bytes:
        parts = (self.mask, self.seal, self.commitment)
        return place.about("keys", *(part.hex() for part in parts))


def signed_list(
    key: ec.EllipticCurvePrivateKey, site: str, survivors: Iterable[str], attempt: int, place: Place
) -> bytes:
    """Return a site's signature of a list of who is in the sum: it opens no sum over another."""
    return seal.sign(key, _purpose(site), _list(survivors, attempt, place))


def has_signed(
    key: ec.EllipticCurvePublicKey,
    site: str,
    survivors: Iterable[str],
    attempt: int,
    place: Place,
    signature: bytes,
) -> bool:
    """Whether the owner of this long-term key made a signature as `signed_list` does."""
    return seal.is_signed(key, _purpose(site), _list(survivors, attempt, place), signature)


def _list(survivors: Iterable[str], attempt: int, place: Place) -> bytes:
    return place.about("survivors", str(attempt), *sorted(survivors))


class Secrets:
    """What a site makes for one session and keeps in memory only: m, s and b."""

    def __init__(self) -> None:
        self._mask, self._seal = X25519PrivateKey.generate(), X25519PrivateKey.generate()
        self.seed = secrets.token_bytes(_SECRET)

    @property
    def mask_key(self) -> bytes:
        """m."""
        return self._mask.private_bytes_raw()

    def advert(self) -> Advert:
        """Return what goes to everybody, not signed yet."""
        return Advert(
            self._mask.public_key().public_bytes_raw(),
            self._seal.public_key().public_bytes_raw(),
            hashlib.sha256(self.seed).digest(),
        )

    def sealed(self, own: str, peer: str, key: bytes, content: bytes, place: Place) -> bytes:
        """Return content for a peer's eyes only. key: the peer's S."""
        nonce = secrets.token_bytes(_NONCE)
        cipher = AESGCM(_agreed(self._seal, key, place, "seal", own, peer))
        return nonce + cipher.encrypt(nonce, content, place.about("share", own, peer))

    def opened(self, own: str, peer: str, key: bytes, block: bytes, place: Place) -> bytes:
        """Return what a peer sealed for us. Raises SecretsDoNotFit: it did not, not here."""
        cipher = AESGCM(_agreed(self._seal, key, place, "seal", own, peer))
        try:
            about = place.about("share", peer, own)
            return cipher.decrypt(block[:_NONCE], block[_NONCE:], about)
        except (InvalidTag, ValueError):
            raise SecretsDoNotFit(f"what {peer} is said to have sealed for {own} is not") from None


def pair_seed(mask_key: bytes, public: bytes, one: str, other: str, place: Place) -> bytes:
    """Return k_ij, 32 bytes, from m of one of two sites and M of the other, either way round."""
    return _agreed(X25519PrivateKey.from_private_bytes(mask_key), public, place, "mask", one, other)


def is_of_advert(advert: Advert, mask_key: bytes) -> bool:
    """Whether m belongs to M."""
    key = X25519PrivateKey.from_private_bytes(mask_key)
    return key.public_key().public_bytes_raw() == advert.mask


def is_committed(advert: Advert, seed: bytes) -> bool:
    """Whether b is the one that its site has told the hash of."""
    return hashlib.sha256(seed).digest() == advert.commitment


def stream(seed: bytes, like: Words) -> Words:
    """Return PRG(seed): as many words, of as many bits, as `like` has. A seed is for one stream.

    AES-256 in counter mode.
    """
    encryptor = Cipher(algorithms.AES(seed), modes.CTR(bytes(16))).encryptor()
    return np.frombuffer(encryptor.update(bytes(like.nbytes)), dtype=like.dtype.newbyteorder("<"))


def shares(secret: bytes, threshold: int, sites: int) -> list[bytes]:
    """Return one share a site; `threshold` of them give the secret of 32 bytes, fewer nothing."""
    from flwr.common.secure_aggregation.crypto.shamir import create_shares

    return create_shares(secret, threshold, sites)


def combined(parts: Sequence[bytes]) -> bytes:
    """Return the secret of at least its threshold of shares. Raises SecretsDoNotFit: they differ.

    Fewer shares than the threshold give something else: check what comes out.
    """
    from flwr.common.secure_aggregation.crypto.shamir import combine_shares

    try:
        secret = combine_shares(list(parts))
    except (ValueError, IndexError):
        secret = b""
    if len(secret) != _SECRET:
        raise SecretsDoNotFit("the shares of a site's secret do not belong together")
    return secret


def check_adverts(
    adverts: Mapping[str, Advert], keys: Mapping[str, ec.EllipticCurvePublicKey], place: Place
) -> None:
    """Raise SecretsDoNotFit: keys that a site did not sign for this session, or of no site."""
    for name, advert in adverts.items():
        if name not in keys or not advert.is_of(keys[name], name, place):
            raise SecretsDoNotFit(f"the keys of {name} are not signed by {name} for this session")


def check_usable(advert: Advert, site: str, place: Place) -> None:
    """Raise SecretsDoNotFit: a site signed what are no keys, which would stop all the others."""
    if len(advert.commitment) != _SECRET:
        raise SecretsDoNotFit(f"what {site} commits itself to is no hash of {_SECRET} bytes")
    own = X25519PrivateKey.generate()
    for public in (advert.mask, advert.seal):
        _agreed(own, public, place, "check", site, "server")


def _agreed(
    own: X25519PrivateKey, public: bytes, place: Place, what: str, one: str, other: str
) -> bytes:
    try:
        secret = own.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:  # not 32 bytes, or a point that gives everybody the same
        raise SecretsDoNotFit(f"a key of {one} or {other} is no X25519 key") from None
    about = place.about(what, *sorted((one, other)))
    return HKDF(hashes.SHA256(), 32, salt=None, info=about).derive(secret)


def _purpose(site: str) -> str:
    return f"secure aggregation of {site}"


def check_secure(plan: Plan, sites: int) -> None:
    """Raise InputError of some kind where a plan's secure aggregation cannot be had by so many."""
    if plan.secure_aggregation.threshold:
        plan.secure_aggregation.check_sites(sites)
        fraction_bits(sites)
        _need_flower()


def _need_flower() -> None:
    if find_spec("flwr") is None:
        raise InputError(
            "[secure_aggregation] takes its secret sharing from Flower, which is not installed: "
            "run pip install 'fedpact[deploy]', or leave the table out"
        )
