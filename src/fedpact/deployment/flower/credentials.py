"""Checks a party's keys and certificates before it starts, and writes those for its connections.

A fault found here can be corrected by its owner; at the other end it would be an error code of
Flower. Connections use TLS with certificates on both ends, based on the keys in federation.toml.
"""

import ipaddress
from contextlib import suppress
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedpact.common.errors import InputError, PlanError
from fedpact.common.files import parse_errors, write_whole
from fedpact.deployment.federation import Federation
from fedpact.deployment.flower import program
from fedpact.deployment.keys import now, render_anchors, write_client_certificate
from fedpact.simulation.secure_aggregation import keys

_AGAIN = "take the file that `fedpact deploy init` wrote for this party"


def check_site_keys(directory: Path, federation: Federation, name: str) -> None:
    """Raise InputError unless a site's key and certificate match the federation's."""
    _check_public(federation)
    key, line = directory / "site.key", federation.sites[name].key
    if keys.read_private_key(key).public_key() != keys.public_key(line):
        raise PlanError(
            f"{key} is not the key that federation.toml names for {name!r} ({_short(line)}): no "
            "server would let this site in. Put the site's own key back, or put the public line "
            "of this one (site.pub) into federation.toml at every party and start the server again"
        )
    _certificate(directory / "ca.crt")


def check_server_keys(directory: Path, federation: Federation) -> None:
    """Raise InputError unless a server's key and certificate match and are valid today."""
    _check_public(federation)
    key, line = directory / "server.key", federation.server_key
    if keys.read_private_key(key).public_key() != keys.public_key(line):
        raise PlanError(
            f"{key} is not the key that federation.toml names as server_key ({_short(line)}): "
            "every site would refuse what it signs. Put the server's own key back, or put the "
            "public line of this one (server.pub) into federation.toml at every party"
        )
    _check_certificate(directory, federation.host)
    if not _read(secret := directory / "runtime.secret"):
        raise PlanError(f"{secret} is empty: write 32 random bytes into it, of this party's own")


def write_site_connection(directory: Path) -> None:
    """Write the client certificate of a site."""
    own = keys.read_private_key(directory / "site.key")
    write_client_certificate(directory / program.CLIENT, own)


def write_server_connections(directory: Path, federation: Federation) -> None:
    """Write the trust anchors of a server's SuperLink, and the server's client certificate."""
    own = keys.read_private_key(directory / "server.key")
    write_client_certificate(directory / program.CLIENT, own)
    parties = [federation.server_key, *(member.key for member in federation.sites.values())]
    write_whole(directory / program.ANCHORS, render_anchors(map(keys.public_key, parties)))


def _check_public(federation: Federation) -> None:
    lines = {"server_key": federation.server_key}
    lines |= {f'sites."{name}".key': member.key for name, member in federation.sites.items()}
    seen = dict[ec.EllipticCurvePublicNumbers, str]()
    for place, line in lines.items():
        try:
            found = keys.public_key(line).public_numbers()
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
    authority, path = _certificate(directory / "ca.crt"), directory / "tls.crt"
    certificate, secret = _certificate(path), directory / "tls.key"
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


def _certificate(path: Path) -> x509.Certificate:
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


def _short(line: str) -> str:
    return f"{line.split()[0]} ...{line.split()[1][-12:]}"
