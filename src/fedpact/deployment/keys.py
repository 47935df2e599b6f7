"""Certificates and keys: the federation's own authority, the server's, and one key per party.

A party checks its own before it starts: a fault found here can be corrected by its owner; at the
other end it would be an error code of Flower. Connections use TLS with certificates on both ends,
based on the keys in federation.toml.
"""

import datetime
import hashlib
import ipaddress
from contextlib import suppress
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedpact.common.errors import InputError, PlanError
from fedpact.common.files import parse_errors, write_whole
from fedpact.deployment.federation import Federation
from fedpact.deployment.flower import program
from fedpact.simulation.secure_aggregation.keys import public_key, read_private_key

_CURVE = ec.SECP384R1()
_DAYS = datetime.timedelta(days=825)
_AGAIN = "take the file that `fedpact deploy init` wrote there"
_ALWAYS = datetime.datetime(2000, 1, 1), datetime.datetime(9999, 12, 31)
_PEM, _BARE = serialization.Encoding.PEM, serialization.NoEncryption()


def write_signing_key(path: Path) -> str:
    """Write a new ECDSA key (P-256, OpenSSH) and its .pub file; return the public line.

    It is as strong as X25519, which sites use to agree on masks, and verifies seven times faster
    than P-384; each site verifies the signatures of all others.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    form = serialization.PrivateFormat.OpenSSH
    write_whole(path, key.private_bytes(_PEM, form, _BARE))
    line = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    path.with_suffix(".pub").write_bytes(line + b"\n")
    return line.decode()


def write_authority(directory: Path) -> None:
    """Write ca.key and ca.crt. The key can certify any server, so it stays secret."""
    key, name = ec.generate_private_key(_CURVE), _name("fedpact federation authority")
    usage = x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=True,
        crl_sign=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    # It does not expire, so that the server's can be renewed without the other parties.
    certificate = (
        _certificate(name, name, key.public_key(), _ALWAYS, ca=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA384())
    )
    write_whole(directory / "ca.key", _private(key))
    (directory / "ca.crt").write_bytes(certificate.public_bytes(_PEM))


def renew(authority: Path, server: Path, host: str) -> None:
    """Renew the server's key and certificate. authority, server: their directories.

    The server's signing key need not be there, so a copy of its directory without it will do.
    Raises PlanError: the authority is missing or not this server's; or the directory is a site's.
    """
    if (server / "site.toml").exists():
        raise PlanError(f"{server} is a site's directory: name the server's")
    if _read_certificate(server / "ca.crt").public_key() != _signer(authority).public_key():
        raise PlanError(
            f"{authority} is the authority of another federation than {server / 'ca.crt'}: name "
            "the directory that `fedpact deploy init` wrote together with this server's"
        )
    write_server_certificate(authority, server, host)


def _signer(authority: Path) -> ec.EllipticCurvePrivateKey:
    path = authority / "ca.key"
    content = _read(path)
    with parse_errors(path, _AGAIN):
        found = serialization.load_pem_private_key(content, None)
        if not isinstance(found, ec.EllipticCurvePrivateKey):
            raise TypeError(f"ca.key is a {type(found).__name__}: expected an ECDSA key")
    return found


def write_server_certificate(authority: Path, directory: Path, host: str) -> None:
    """Write tls.key and tls.crt for `host`, signed by the authority in the directory `authority`.

    It also covers localhost, where the server's processes talk to each other.
    """
    signer, issuer = _signer(authority), _read_certificate(authority / "ca.crt")
    key = ec.generate_private_key(_CURVE)
    others = {_alternative(each) for each in (host, "localhost", "127.0.0.1")}
    signed_by = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    # Clocks of two machines may differ slightly.
    valid = now() - datetime.timedelta(hours=1), now() + _DAYS
    certificate = (
        _certificate(_name(host), issuer.subject, key.public_key(), valid, ca=False)
        .add_extension(x509.SubjectAlternativeName(list(others)), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(signed_by, critical=False)
        .sign(signer, hashes.SHA384())
    )
    write_whole(directory / "tls.key", _private(key))
    (directory / "tls.crt").write_bytes(certificate.public_bytes(_PEM))


def write_client_certificate(directory: Path, key: str) -> None:
    """Write a party's certificate for its connections, with a new key, signed by its `key` file.

    It proves only possession of the party's key, so it does not expire.
    """
    party, own = read_private_key(directory / key), ec.generate_private_key(ec.SECP256R1())
    issuer = _name_by_key(party.public_key())
    found = _certificate(_name("fedpact"), issuer, own.public_key(), _ALWAYS, ca=False)
    signed = found.sign(party, hashes.SHA256()).public_bytes(_PEM)
    write_whole(directory / program.CLIENT, signed, _private(own))


def write_anchors(directory: Path, federation: Federation) -> None:
    """Write the trust anchors with which a server's TLS accepts only the parties' keys.

    Each key is in a certificate that names it as its own issuer. The signature of a trust anchor is
    not verified (RFC 5280, 6.1), so a throwaway key signs them.
    """
    throwaway = ec.generate_private_key(ec.SECP256R1())
    parties = [federation.server_key, *(member.key for member in federation.sites.values())]
    names = ((_name_by_key(key), key) for key in map(public_key, parties))
    found = (_certificate(name, name, key, _ALWAYS, ca=True) for name, key in names)
    signed = (one.sign(throwaway, hashes.SHA256()).public_bytes(_PEM) for one in found)
    write_whole(directory / program.ANCHORS, *signed)


def _name_by_key(key: ec.EllipticCurvePublicKey) -> x509.Name:
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    digest = hashlib.sha256(key.public_bytes(serialization.Encoding.DER, form))
    return _name(digest.hexdigest())


def _certificate(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    valid: tuple[datetime.datetime, datetime.datetime],
    *,
    ca: bool,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder(issuer, subject, key, x509.random_serial_number())
        .not_valid_before(valid[0])
        .not_valid_after(valid[1])
        .add_extension(x509.BasicConstraints(ca, 0 if ca else None), critical=True)
    )


def now() -> datetime.datetime:
    """Return this machine's time."""
    return datetime.datetime.now(datetime.UTC)


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, _BARE)


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common[:64])])


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def check_site_keys(directory: Path, federation: Federation, name: str) -> None:
    """Raise InputError unless a site's key and certificate match the federation's."""
    line = federation.sites[name].key
    _check_keys(federation, directory / "site.key", line, f"sites.{name}.key")
    _read_certificate(directory / "ca.crt")


def check_server_keys(directory: Path, federation: Federation) -> None:
    """Raise InputError unless a server's key and certificate match and are valid today."""
    _check_keys(federation, directory / "server.key", federation.server_key, "server_key")
    _check_certificate(directory, federation.host)
    if not _read(secret := directory / "runtime.secret"):
        raise PlanError(f"{secret} is empty: write 32 random bytes into it, of this party's own")


def _check_keys(federation: Federation, key: Path, line: str, place: str) -> None:
    _check_public(federation)
    if read_private_key(key).public_key() != public_key(line):
        raise PlanError(
            f"{key} is not the key that federation.toml names as {place} ({line.split()[0]} "
            f"...{line.split()[1][-12:]}): the other parties would refuse what it signs. Put this "
            f"party's own key back, or put the public line of this one ({key.stem}.pub) into "
            "federation.toml at every party and start the server again"
        )


def _check_public(federation: Federation) -> None:
    lines = {"server_key": federation.server_key}
    lines |= {f'sites."{name}".key': member.key for name, member in federation.sites.items()}
    seen = dict[ec.EllipticCurvePublicNumbers, str]()
    for place, line in lines.items():
        try:
            found = public_key(line).public_numbers()
        except InputError as error:
            raise PlanError(
                f"federation.toml: {place}: {error}; expected the line that stands in the .pub "
                "file beside that party's key"
            ) from None
        if found in seen:
            raise PlanError(
                f"federation.toml: {place} and {seen[found]} are the same key: each party has one "
                "of its own, by which it is known"
            )
        seen[found] = place


def _check_certificate(directory: Path, host: str) -> None:
    authority, path = _read_certificate(directory / "ca.crt"), directory / "tls.crt"
    certificate, secret = _read_certificate(path), directory / "tls.key"
    content = _read(secret)
    with parse_errors(secret, _AGAIN):
        key = serialization.load_pem_private_key(content, None)
    if key.public_key() != certificate.public_key():
        raise PlanError(f"{secret} and {path} do not belong together: {_AGAIN}")
    try:
        certificate.verify_directly_issued_by(authority)
    except (InvalidSignature, ValueError, TypeError):
        raise PlanError(
            f"{path} was not issued by {directory / 'ca.crt'}: sites would not let this server "
            f"speak to them; {_AGAIN}"
        ) from None
    if not _names(certificate, host):
        raise PlanError(
            f"{path} does not hold for {host!r}, the server's address in federation.toml: make a "
            "certificate for that name (`fedpact deploy renew`), or put the address back that it "
            "was made for"
        )
    first, last = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if not first <= now() <= last:
        raise PlanError(
            f"{path} holds from {first:%Y-%m-%d %H:%M} to {last:%Y-%m-%d %H:%M} UTC, and this "
            f"machine's clock says {now():%Y-%m-%d %H:%M}: set the clock, or make a new one with "
            "`fedpact deploy renew`"
        )


def _read_certificate(path: Path) -> x509.Certificate:
    content = _read(path)
    with parse_errors(path, _AGAIN):
        return x509.load_pem_x509_certificate(content)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise PlanError(f"{path} cannot be read ({error.strerror}): {_AGAIN}") from None


def _names(certificate: x509.Certificate, host: str) -> bool:
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return False
    with suppress(ValueError):
        return ipaddress.ip_address(host) in found.get_values_for_type(x509.IPAddress)
    return host.lower() in map(str.lower, found.get_values_for_type(x509.DNSName))
