"""A party whose keys or certificates do not fit is told so by itself, and what to do."""

import datetime
import json
import shutil
import stat

import pytest
from cryptography import x509
from cryptography.x509.verification import PolicyBuilder, Store
from typer.testing import CliRunner

from fedpact.cli.main import app
from fedpact.common.errors import InputError
from fedpact.deployment import keys
from fedpact.deployment.federation import Federation


def federation(party):
    return Federation.read(party / "federation.toml")


def check_site(site):
    keys.check_site_keys(site, federation(site), "site-00")


def check_server(server):
    keys.check_server_keys(server, federation(server))


def test_the_written_table_fits(deployment):
    check_site(deployment / "sites" / "site-00")
    check_server(deployment / "server")


def another_key(party, name):
    keys.write_signing_key(party / name)


def changed(party, old, new):
    path = party / "federation.toml"
    path.write_text(path.read_text().replace(old, new))


def same_keys(party):
    members = federation(party).sites
    changed(party, members["site-01"].key, members["site-00"].key)


SITE = {
    "another key": (
        lambda site: another_key(site, "site.key"),
        r"site\.key is not the key that federation\.toml names as sites\.site-00\.key",
    ),
    "no key": (lambda site: (site / "site.key").unlink(), r"key .*site\.key cannot be read"),
    "a truncated server key": (
        lambda site: changed(site, federation(site).server_key, federation(site).server_key[:60]),
        r"federation\.toml: server_key: .* is not an OpenSSH public key",
    ),
    "two sites with one key": (same_keys, r"are the same key: each party has one of its own"),
    "garbage for the authority": (
        lambda site: (site / "ca.crt").write_bytes(b"\xff\xfe"),
        r"ca\.crt cannot be understood",
    ),
    "no authority": (
        lambda site: (site / "ca.crt").unlink(),
        r"^[^ ]*ca\.crt cannot be read \(No such file or directory\): take the file",
    ),
}


@pytest.mark.parametrize("what", SITE)
def test_a_site_says_which_of_its_files_is_wrong(site_dir, what):
    spoil, told = SITE[what]
    spoil(site_dir)
    with pytest.raises(InputError, match=told):
        check_site(site_dir)


def of_another_authority(server):
    keys.write_authority(server / "other")
    shutil.copy(server / "other" / "ca.crt", server / "ca.crt")


SERVER = {
    "another key": (
        lambda server: another_key(server, "server.key"),
        r"server\.key is not the key that federation\.toml names as server_key",
    ),
    "another authority": (of_another_authority, r"tls\.crt was not issued by .*ca\.crt"),
    "a key of another certificate": (
        lambda server: shutil.copy(server.parent / "authority" / "ca.key", server / "tls.key"),
        r"tls\.key and .*tls\.crt do not belong together",
    ),
    "an address it does not hold for": (
        lambda server: changed(server, "127.0.0.1:", "10.1.2.3:"),
        r"tls\.crt does not hold for '10\.1\.2\.3'",
    ),
    "a name it does not hold for": (
        lambda server: changed(server, "127.0.0.1:", "server.example.org:"),
        r"tls\.crt does not hold for 'server\.example\.org'",
    ),
    "an empty secret": (
        lambda server: (server / "runtime.secret").write_bytes(b""),
        r"runtime\.secret is empty: write 32 random bytes",
    ),
}


@pytest.mark.parametrize("what", SERVER)
def test_a_server_says_which_of_its_files_is_wrong(deployment, what):
    spoil, told = SERVER[what]
    spoil(deployment / "server")
    with pytest.raises(InputError, match=told):
        check_server(deployment / "server")


def at(monkeypatch, days):
    """Have the clock be so many days ahead, where certificates are made and looked at."""
    there = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
    monkeypatch.setattr(keys, "now", lambda: there)
    return there


@pytest.mark.parametrize("days", [-1, 826])
def test_a_server_whose_certificate_does_not_hold_today_says_so(deployment, monkeypatch, days):
    """Or whose clock is wrong: which it is, its owner sees."""
    there = at(monkeypatch, days)
    with pytest.raises(InputError, match=f"clock says {there:%Y-%m-%d}"):
        check_server(deployment / "server")


def renew(deployment):
    done = CliRunner().invoke(
        app, ["deploy", "renew", str(deployment / "authority"), str(deployment / "server")]
    )
    assert done.exit_code == 0, done.output


def test_renewal_replaces_the_servers_certificate_alone(deployment, monkeypatch):
    server, authority = deployment / "server", (deployment / "server" / "ca.crt").read_bytes()
    for days in (826, 4000):
        at(monkeypatch, days)
        with pytest.raises(InputError, match="fedpact deploy renew"):
            check_server(server)
        # The authority renews a copy that lacks the server's key.
        (server / "server.key").rename(deployment / "server.key")
        renew(deployment)
        (deployment / "server.key").rename(server / "server.key")
        check_server(server)
    assert (server / "ca.crt").read_bytes() == authority
    assert stat.S_IMODE((server / "tls.key").stat().st_mode) == 0o600
    issued = x509.load_pem_x509_certificate((server / "tls.crt").read_bytes())
    issued.verify_directly_issued_by(x509.load_pem_x509_certificate(authority))


def test_another_federations_authority_renews_nothing(deployment, tmp_path):
    keys.write_authority(tmp_path)
    before = (deployment / "server" / "tls.crt").read_bytes()
    with pytest.raises(InputError, match="of another federation"):
        keys.renew(tmp_path, deployment / "server", "127.0.0.1")
    with pytest.raises(InputError, match=r"ca\.key cannot be read"):
        keys.renew(tmp_path / "none", deployment / "server", "127.0.0.1")
    site = deployment / "sites" / "site-00"
    with pytest.raises(InputError, match=r"site-00 is a site's directory: name the"):
        keys.renew(deployment / "authority", site, "127.0.0.1")
    assert not (site / "tls.key").exists()
    (deployment / "authority" / "ca.crt").write_bytes(b"none")
    with pytest.raises(InputError, match=r"ca\.crt cannot be understood"):
        keys.renew(deployment / "authority", deployment / "server", "127.0.0.1")
    assert (deployment / "server" / "tls.crt").read_bytes() == before


def test_strict_verifiers_accept_the_servers_certificate(deployment):
    """As Python's own contexts are from 3.13 on: RFC 5280 without exceptions."""
    root, own = (
        x509.load_pem_x509_certificate((deployment / "server" / name).read_bytes())
        for name in ("ca.crt", "tls.crt")
    )
    verifier = PolicyBuilder().store(Store([root])).build_server_verifier(x509.DNSName("localhost"))
    assert verifier.verify(own, []) == [own, root]


def test_a_comment_is_not_part_of_a_key(deployment):
    """A comment at the end of the public line is no part of the key."""
    site = deployment / "sites" / "site-00"
    line = federation(site).sites["site-00"].key
    changed(site, json.dumps(line), json.dumps(line + " somebody@somewhere"))
    check_site(site)
