"""What is signed with a site's key: approvals, and receipts of its ledger.

Approvals say that people have read what a site will release and what it costs.

approval.toml in the site's directory has a table for each of them. It is signed with the site's own
key over name, time and a digest of plan, federation and policy, and becomes void if one of these
changes. It is checked when the site opens, and never leaves the site.

Of a receipt, with the data set's name and version, purpose and date, the site signs the canonical
JSON; the public part of its key is in federation.toml. The signature shows who wrote the receipt;
its truth can be checked only against the ledger, which stays at the site.
"""

import base64
import binascii
import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, cast

from cryptography.hazmat.primitives import serialization
from pydantic import BaseModel, ConfigDict, Field

from fedpact.common.errors import InputError, LedgerError, PolicyRefused
from fedpact.common.files import parse_errors, write_whole
from fedpact.common.format import count_noun, toml, upper
from fedpact.common.run_settings import About, OneLine
from fedpact.deployment.federation import Federation, parse_toml
from fedpact.deployment.site_records import SiteFiles, SiteSettings
from fedpact.plan import Plan
from fedpact.privacy.accounting.accountant import add_budgets
from fedpact.privacy.ledger.receipt import receipt
from fedpact.privacy.policy import Policy
from fedpact.privacy.terms import Terms
from fedpact.simulation.secure_aggregation import keys

APPROVAL_FILE: Final = "approval.toml"
_OF: Final = ("plan.json", "federation.toml", "policy.toml")


class Approval(BaseModel):
    """One person's approval. digest: see `digest_approved`; signature: hexadecimal."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    by: OneLine
    time: str
    digest: str
    signature: str = Field(pattern=r"^([0-9a-f]{2})+$")


class _Approvals(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    approvals: list[Approval] = []


@dataclass(frozen=True)
class ApprovalState:
    """The names that have approved a site's current run, and how many are needed."""

    site: str
    names: Sequence[str]
    needed: int

    @property
    def missing(self) -> int:
        """How many more approvals are needed."""
        return max(0, self.needed - len(self.names))


def _signed(by: str, time: str, digest: str) -> bytes:
    return json.dumps([by, time, digest]).encode()


def digest_approved(site: Path) -> str:
    """Return the SHA-256 over those of the three approved files, in this order."""
    parts = [hashlib.sha256((site / name).read_bytes()).digest() for name in _OF]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def read_approvals(site: Path) -> ApprovalState:
    """Return who has approved, by valid approvals alone. Raises PlanError: an unreadable file."""
    name = SiteSettings.read(site).name
    needed = Policy.read(site / "policy.toml").approvals
    return ApprovalState(name, [one.by for one in _valid(site, name)], needed)


def check_approved(site: Path) -> None:
    """Raise PolicyRefused if fewer people have approved than the policy requires."""
    found = read_approvals(site)
    if found.missing:
        have = f"approved so far by {', '.join(found.names) or 'no one'}"
        raise PolicyRefused(
            f"site {found.site} does not open: policy.toml has approvals = {found.needed}, "
            f"{have}. Read what the site will release with `fedpact deploy approve {site}`, then "
            "sign with --by NAME. A change of plan.json, federation.toml or policy.toml voids "
            "earlier approvals. Nothing was reserved or charged"
        )


def approve(site: Path, by: str) -> ApprovalState:
    """Sign for one person, and return who has approved. Void approvals are dropped.

    Raises InputError: an empty name, a name that has already approved, unreadable files.
    """
    name = SiteSettings.read(site).name
    kept = _valid(site, name)
    who = " ".join(by.split())
    if not who:
        raise InputError("--by is empty: expected the name of the person who approves")
    if _same(who) in {_same(one.by) for one in kept}:
        raise InputError(f"{who} has already approved this run of site {name}")
    time = datetime.now(UTC).isoformat(timespec="seconds")
    key, digest = keys.read_private_key(site / "site.key"), digest_approved(site)
    signature = keys.sign(key, f"approval of {name}", _signed(who, time, digest)).hex()
    own = Approval(by=who, time=time, digest=digest, signature=signature)
    text = "# Who has approved what this site releases: `fedpact deploy approve`.\n" + "".join(
        "\n[[approvals]]\n"
        + "".join(f"{key} = {toml(value)}\n" for key, value in one.model_dump().items())
        for one in (*kept, own)
    )
    write_whole(site / APPROVAL_FILE, text.encode())
    return read_approvals(site)


def _valid(site: Path, name: str) -> list[Approval]:
    if not (site / APPROVAL_FILE).exists():
        return []
    member = Federation.read(site / "federation.toml").sites.get(name)
    if member is None:
        return []
    key, digest = keys.public_key(member.key), digest_approved(site)
    found = dict[str, Approval]()
    for one in parse_toml(_Approvals, site / APPROVAL_FILE).approvals:
        signed, signature = _signed(one.by, one.time, one.digest), bytes.fromhex(one.signature)
        if one.digest == digest and keys.is_signed(key, f"approval of {name}", signed, signature):
            found.setdefault(_same(one.by), one)
    return [*found.values()]


def _same(name: str) -> str:
    return " ".join(name.casefold().split())


def describe(site: Path) -> str:
    """Describe for the owner what a site will release, to whom, and at what cost.

    Raises InputError: its files do not match.
    """
    files, policy = SiteFiles.read(site), Policy.read(site / "policy.toml")
    federation, plan, terms = files.federation, files.plan, files.terms
    return "\n".join(
        [
            f"Site {files.name} will take part in run {federation.run}: {plan.algorithm}, at "
            f"most {count_noun(plan.rounds, 'round')}, with "
            f"{count_noun(len(federation.sites), 'site')} in all.",
            f"Purpose: {plan.about.purpose or 'not stated (about.purpose of the plan)'}",
            "",
            "What leaves it:",
            *(f"- {line}" for line in _list_released(plan, terms)),
            "",
            "What that costs:",
            *(f"- {line}" for line in _costs(plan, terms, policy)),
            "",
            "Not covered, to be released by a person:",
            "- the ledger's receipt (`fedpact ledger export`): budgets and purpose, no records;",
            "- the exact figures of `deploy check`, `deploy status` and `personalise`: "
            "unprotected, for the owner alone;",
            "- the final model: every site has it. Passing it on costs no more ε.",
        ]
    )


def _list_released(plan: Plan, terms: Terms) -> list[str]:
    meanings = {
        "gradient": "noisy sums of the model's clipped gradients",
        "difference": "the noisy change of the model",
        "loss": "noisy sums of the loss",
        "size": f"a noisy count of its {terms.protects}s",
    }
    threshold = plan.secure_aggregation.threshold
    to = (
        f"the server sees only sums over at least {threshold} sites"
        if threshold
        else "the server sees each one"
    )
    found = [
        f"{meanings.get(name, name)} ({name}: noise of {sigma:.4g} times the most that one "
        f"{terms.protects} can add)"
        for name, sigma in terms.releases.items()
    ]
    once = plan.evaluation_terms
    if once is not None:
        names = ", ".join(once.releases)
        found.append(f"noisy counts of how the model performs on held-out records ({names})")
    return [*found, f"{to}; no record and no exact number is sent"]


def _costs(plan: Plan, terms: Terms, policy: Policy) -> list[str]:
    budget = terms.budget
    found = [
        f"(ε, δ) = ({upper(budget.epsilon)}, {upper(budget.delta)}) for each {terms.protects} "
        f"({terms.adjacency}), reserved when the run begins and never exceeded;",
        f"the policy allows ε = {upper(policy.epsilon_ever)} on these records, over all runs;",
    ]
    if terms.shares_noise:
        found.append(f"ε = {terms.guarantee};")
    once = plan.evaluation_terms
    if once is not None:
        cost = upper(once.budget.epsilon), upper(once.budget.delta)
        found.append(f"({cost[0]}, {cost[1]}) for records held out for evaluations;")
    return [*found, "a spent budget cannot be restored."]


_HOW = "ECDSA with SHA-384, of the rest as JSON with sorted keys and no spaces"


def build_receipt(ledger: Path, site: Path | None = None) -> dict[str, Any]:
    """Return a ledger's receipt with data set, purpose and today's date.

    These are read from a deployed site's directory (`site`, or that of the ledger), or from the
    simulated run that contains the ledger; unknown ones are None. Raises LedgerError, PlanError or
    DataError.
    """
    run, about = "", About()
    site, folder = site or ledger.parent, ledger.parent.parent.parent
    name, version = None, None
    settings = SiteSettings.read(site) if (site / "site.toml").exists() else None
    told = receipt(ledger, settings and settings.data_set)
    if settings is not None:
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
    told["delta_per_person_of_costliest_run"] = delta_per_person(told["runs"])
    told["data_set"] = {"name": name, "version": version or None}
    told["date"] = datetime.now(UTC).isoformat(timespec="seconds")
    return told


def cost_per_person(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, float] | None:
    """Return k -> ε of the costliest run for a person with k records; None if not by record.

    runs: of a receipt. A person's records may be in both the training and the held-out part of a
    run, so a run's costs add up, at the sum of both δ.
    """
    each = [
        {
            k: sum(run["epsilon_per_person"][k] for run in parts)
            for k in parts[0]["epsilon_per_person"]
        }
        for parts in _by_run(runs)
    ]
    return {k: max(one[k] for one in each) for k in each[0]} if each else None


def delta_per_person(runs: Mapping[str, Mapping[str, Any]]) -> float | None:
    """Return the δ of `cost_per_person`: of any run and its evaluations, the most."""
    each = (add_budgets(run["delta"] for run in parts) for parts in _by_run(runs))
    return max(each, default=None)


def _by_run(runs: Mapping[str, Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Return each run that has costs of persons, together with its evaluations."""
    found = defaultdict[str, list[Mapping[str, Any]]](list)
    for name, run in runs.items():
        if run["epsilon_per_person"]:
            found[run["beside"] or name].append(run)
    return [*found.values()]


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
    value = keys.sign(key, f"receipt of {name}", _canonical(told))
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
    if not keys.is_signed(key, f"receipt of {name}", _canonical(rest), value):
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


def _canonical(told: Mapping[str, Any]) -> bytes:
    form = {"sort_keys": True, "separators": (",", ":"), "allow_nan": False}
    return json.dumps(told, **form).encode()
