"""Signatures: a site answers its own server only, and the server takes a site's word from it only.

TLS says that the channel leads to the right machine. It does not say who put a message into it: in
Flower whoever reaches the SuperLink's port can start a run or register a node. So every block is
signed (ECDSA, SHA-384) with a key of its sender's, and what the signature says it is for is signed
with it: a reply is no task, and what one site signed is not another's.
"""

from functools import lru_cache
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedpact.errors import InputError

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
    return b"fedpact " + purpose.encode() + b"\0" + block
