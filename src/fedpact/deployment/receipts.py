"""Signed receipts of a ledger, with the data set's name and version, purpose and date.

A deployed site signs the receipt's canonical JSON with site.key, whose public part is in
federation.toml. The signature shows who wrote the receipt; its truth can be checked only against
the ledger, which stays at the site.
"""

import base64
import binascii
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from cryptography.hazmat.primitives import serialization

from fedpact.common.errors import LedgerError
from fedpact.common.files import parse_errors
from fedpact.common.run_settings import About
from fedpact.deployment.federation import Federation
from fedpact.deployment.site_records import SiteSettings
from fedpact.privacy.ledger.receipt import receipt
from fedpact.simulation.secure_aggregation import keys

_HOW = "ECDSA with SHA-384, of the rest as JSON with sorted keys and no spaces"


def build_receipt(ledger: Path, site: Path | None = None) -> dict[str, Any]:
    """Return a ledger's receipt with data set, purpose and today's date.

    These are read from a deployed site's directory (`site`, or that of the ledger), or from the
    simulated run that contains the ledger; unknown ones are None. Raises LedgerError, PlanError or
    DataError.
    """
    told, run, about = receipt(ledger), "", About()
    site, folder = site or ledger.parent, ledger.parent.parent.parent
    name, version = None, None
    if (site / "site.toml").exists():
        settings = SiteSettings.read(site)
        run = Federation.read(site / "federation.toml").run
        about, _ = _plan(site)
        name, version = settings.data_set, settings.data_version
    elif ledger.parent.parent.name == "sites" and (folder / "environment.json").exists():
        with parse_errors(folder / "environment.json", "restore the run's folder from a backup"):
            run = json.loads((folder / "environment.json").read_bytes())["run"]
        about, name = _plan(folder)
        version = about.data_version
    for other, spend in told["runs"].items():
        spend["purpose"] = about.purpose or None if (spend["beside"] or other) == run else None
    told["epsilon_per_person_of_costliest_run"] = cost_per_person(told["runs"])
    told["data_set"] = {"name": name, "version": version or None}
    told["date"] = datetime.now(UTC).isoformat(timespec="seconds")
    return told


def cost_per_person(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, float] | None:
    """Return k -> ε of the costliest run for a person with k records; None if not by record.

    runs: of a receipt. A person's records may be in both the training and the held-out part of a
    run, so a run's costs add up, at the sum of both δ.
    """
    together = dict[str, dict[str, float]]()
    for name, run in runs.items():
        whole = together.setdefault(run["beside"] or name, {})
        for k, cost in (run["epsilon_per_person"] or {}).items():
            whole[k] = whole.get(k, 0.0) + cost
    each = [found for found in together.values() if found]
    return {k: max(one[k] for one in each) for k in each[0]} if each else None


def _plan(directory: Path) -> tuple[About, str]:
    path = directory / "plan.json"
    with parse_errors(path, "restore it from a backup, or from another party"):
        raw = json.loads(path.read_bytes())
        return About.model_validate(raw["about"]), Path(raw["data"]).name


def sign_receipt(told: Mapping[str, Any], site: Path) -> dict[str, Any]:
    """Return a receipt with the signature of the deployed site in this directory.

    told: strict JSON values. Raises InputError: an unreadable key.
    """
    key = keys.read_private_key(site / "site.key")
    name = SiteSettings.read(site).name
    form = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    value = keys.sign(key, _purpose(name), _canonical(told))
    signature = {
        "by": name,
        "key": key.public_key().public_bytes(*form).decode(),
        "how": _HOW,
        "value": base64.b64encode(value).decode(),
    }
    return {**told, "signature": signature}


def check_signature(told: object, federation: Federation | None) -> str:
    """Describe who signed a receipt. federation: whose keys are accepted; None accepts any.

    Raises LedgerError: no signature, an invalid one, or one by a key that is not the site's.
    """
    if not (isinstance(told, dict) and isinstance(told.get("signature"), dict)):
        raise LedgerError(
            "the receipt has no signature, so its origin is unknown: ask the site's owner to "
            "write it with `fedpact ledger export SITE_DIR`"
        )
    whole = cast(dict[str, Any], told)
    signature = whole["signature"]
    try:
        name, line = str(signature["by"]), str(signature["key"])
        value = base64.b64decode(str(signature["value"]), validate=True)
        key = keys.public_key(line)
    except (KeyError, ValueError, binascii.Error) as error:
        raise LedgerError(f"the receipt's signature cannot be read ({error})") from None
    rest = {field: entry for field, entry in whole.items() if field != "signature"}
    if not keys.is_signed(key, _purpose(name), _canonical(rest), value):
        raise LedgerError(
            f"the signature of {name!r} does not match the receipt: it was altered, or belongs to "
            "another; ask the site's owner for it again"
        )
    if federation is None:
        return (
            f"intact, signed as {name!r} by {line.split()[1][-16:]}; give --federation to check "
            "that this is the site's key"
        )
    member = federation.sites.get(name)
    if member is None or keys.public_key(member.key) != key:
        raise LedgerError(
            f"the receipt is signed as {name!r} by another key than federation.toml has for that "
            "site: it is not from the site"
        )
    runs = whole.get("runs")
    has = isinstance(runs, dict) and federation.run in runs
    nothing = "" if has else ", about which it says nothing"
    return f"intact, signed by site {name!r} of run {federation.run!r}{nothing}"


def _purpose(site: str) -> str:
    return f"receipt of {site}"


def _canonical(told: Mapping[str, Any]) -> bytes:
    form = {"sort_keys": True, "separators": (",", ":"), "allow_nan": False}
    return json.dumps(told, **form).encode()
