"""`fedpact ledger`: what sites have reserved and spent, and whether the hash chain is intact."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedpact.cli import console
from fedpact.cli.console import AsJson, group, plain_console
from fedpact.common.errors import LedgerError
from fedpact.common.files import check_file, parse_errors, write_whole
from fedpact.common.format import count_noun, upper
from fedpact.common.notebook import print_table
from fedpact.common.records import strict

if TYPE_CHECKING:
    from fedpact.deployment.site_records import SiteSettings

_TORN = (
    "a last line that a crash left unreadable: until a site opens the ledger again, everything "
    "that its runs reserved counts as spent"
)

app = group("Show, verify and export what sites have reserved and spent.")

Where = Annotated[
    Path, typer.Argument(help="A ledger.jsonl, or a folder with the ledgers of several sites.")
]


@app.command()
def show(where: Where, as_json: AsJson = False) -> None:
    """Show what each run reserved and spent."""
    receipts = _receipts(where)
    console.show({"ledgers": receipts}, as_json, lambda: _print(receipts))


@app.command()
def verify(
    where: Annotated[
        Path,
        typer.Argument(help="A ledger.jsonl, a folder of ledgers, or an exported receipt."),
    ],
    federation: Annotated[
        Path | None,
        typer.Option(help="With a receipt: the federation.toml with the sites' public keys."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Verify each ledger's hash chain, or a receipt's signature; fail if it was altered."""
    if where.suffix == ".json" and where.is_file():
        _verify_signed(where, federation, as_json)
        return
    if federation is not None:
        raise LedgerError(
            f"--federation {federation} with {where}: keys are needed for an exported receipt, a "
            ".json file; leave --federation out, or name that file"
        )
    receipts = _receipts(where)
    checked = {path: each["entries"] for path, each in receipts.items()}
    torn = [path for path, each in receipts.items() if each["unreadable_last_line"]]
    heads = [
        f"{path}: intact: {count_noun(each['entries'], 'entry')} of {each['site']!r}, each sealed "
        "by the hash of the one before"
        for path, each in receipts.items()
    ]
    document = {"intact": True, "entries": checked, "unreadable_last_line": torn}
    console.show(document, as_json, lambda: _print(receipts, heads))


@app.command()
def export(
    where: Where,
    out: Annotated[Path, typer.Option(help="The file to write the receipt to.")],
    as_json: AsJson = False,
) -> None:
    """Write a receipt of budgets and purpose, signed at a deployed site."""
    from fedpact.deployment.signatures import build_receipt, sign_receipt

    check_file("--out", out, ".json")
    # Only a single site's directory is signed, by its owner.
    site = where if (where / "site.toml").exists() else None
    receipts = {str(path): strict(build_receipt(path, site)) for path in _ledgers(where)}
    if site is not None:
        # Others read it, whom the folders of this machine do not concern. A site has one ledger.
        ((path, receipt),) = receipts.items()
        receipts = {Path(path).name: sign_receipt(receipt, site)}
    text = json.dumps(receipts, indent=2, allow_nan=False)
    write_whole(out, text.encode() + b"\n", private=False)
    how = "unsigned" if site is None else f"signed with {site / 'site.key'}"
    console.show(
        {"receipt": str(out), "ledgers": len(receipts), "signed": site is not None},
        as_json,
        lambda: plain_console().print(
            f"receipt of {count_noun(len(receipts), 'ledger')}, {how}: {out}"
        ),
    )


def _verify_signed(where: Path, federation: Path | None, as_json: bool) -> None:
    from fedpact.deployment.federation import Federation
    from fedpact.deployment.signatures import check_signature

    known = None if federation is None else Federation.read(federation)
    with parse_errors(where, "ask the site's owner for the receipt again"):
        receipts = dict[str, Any](json.loads(where.read_bytes()))
    if not receipts:
        raise LedgerError(f"{where} has no receipt: ask the site's owner for it again")
    checked = {path: check_signature(told, known) for path, told in receipts.items()}
    with parse_errors(where, "ask the site's owner for the receipt again"):
        # Its age, as later entries of its ledger are not in it.
        heads = [
            f"{where}: {said}\n  of {of['site']!r}, written {of['date']}, up to entry "
            f"{of['entries']} of {of['last_entry'] or 'an unknown time'}"
            for said, of in zip(checked.values(), receipts.values(), strict=True)
        ]
        document = {"intact": True, "signatures": checked}
        console.show(document, as_json, lambda: _print(receipts, heads))


def _receipts(where: Path) -> dict[str, dict[str, Any]]:
    from fedpact.privacy.ledger.receipt import receipt

    name = None if (site := _settings(where)) is None else site.data_set
    return {str(path): receipt(path, name) for path in _ledgers(where)}


def _settings(where: Path) -> "SiteSettings | None":
    """Return a deployed site's settings; None of another folder, or of a file."""
    if not (where / "site.toml").exists():
        return None
    from fedpact.deployment.site_records import SiteSettings

    return SiteSettings.read(where)


def _ledgers(where: Path) -> list[Path]:
    """Return the named ledger, all ledgers in a folder, or a deployed site's by its site.toml.

    Raises LedgerError: there is none, a folder is not readable, or a site's ledger is missing.
    """
    if (site := _settings(where)) is not None:
        own = where / site.ledger
        paths = [own] if own.exists() else []
    else:
        paths = _below(where) if where.is_dir() else [where]
    if not paths:
        raise LedgerError(
            f"{where} has no ledger: name a ledger.jsonl, or the folder of a private run or of its "
            "ledgers (run.ledgers of its plan)"
        )
    return paths


def _below(folder: Path) -> list[Path]:
    """Return the ledgers below a folder. Raises LedgerError rather than skip one silently."""
    from fedpact.common.run_folder import Folder

    def unseen(error: OSError) -> None:
        raise LedgerError(
            f"{error.filename} cannot be read ({error.strerror}), so it may contain ledgers: use "
            "an account that may read it, or name the ledgers one by one"
        ) from error

    names = [Path(at, n) for at, _, files in os.walk(folder, onerror=unseen) for n in files]
    paths = sorted(path for path in names if path.name.endswith("ledger.jsonl"))
    told = folder / "privacy.json"
    if told.is_file() and any(path.parent.parent == folder / "sites" for path in paths):
        sites = Folder(folder).read_json("privacy.json").get("sites", {})
        gone = [p for name in sites if (p := Folder(folder).ledger(name, None)) not in paths]
        if gone:
            raise LedgerError(
                f"{folder} has no ledger of {', '.join(path.parent.name for path in gone)}, which "
                f"took part in its run: restore {gone[0]} from a backup; without it, what the run "
                "has spent there is unknown"
            )
    return paths


def _print(receipts: dict[str, dict[str, Any]], heads: Sequence[str] = ()) -> None:
    out = plain_console()
    for head in heads:
        out.print(head)
    shared = any(run["honest"] for each in receipts.values() for run in each["runs"].values())
    columns = ["site", "run", "ε reserved", "ε spent", "δ", "events spent", "of"]
    columns += ["honest", "ε alone reserved", "ε alone spent"]
    shown = len(columns) if shared else len(columns) - 3
    rows = [
        (
            each["site"] + (" (hypothetical)" if each["hypothetical"] else ""),
            run,
            upper(spend["epsilon_reserved"]),
            upper(spend["epsilon_spent"]),
            upper(spend["delta"]),
            str(sum(event["spent"] for event in spend["events"])),
            str(sum(event["reserved"] for event in spend["events"])),
            str(spend["honest"] or "-"),
            upper(spend["epsilon_alone_reserved"]),
            upper(spend["epsilon_alone_spent"]),
        )[:shown]
        for each in receipts.values()
        for run, spend in each["runs"].items()
    ]
    print_table(out, columns[:shown], rows)
    if shared:
        out.print(
            "With distributed noise, ε holds if that many sites in each sum are honest; ε alone "
            "holds even if all others collude."
        )
    for path, each in receipts.items():
        if len(each["runs"]) > 1:
            epsilon, delta = upper(each["epsilon_reserved"]), upper(each["delta_reserved"])
            larger = any(run["beside"] for run in each["runs"].values())
            why = " (an evaluation is on other records than its run: the larger counts)" * larger
            out.print(f"{path}: all runs together reserve ε {epsilon}, δ {delta}{why}")
        if each["unreadable_last_line"]:
            out.print(f"{path} has {_TORN}")
    first = next(iter(receipts.values()))
    if len(receipts) == 1:
        out.print(first["sentence"])
    out.print(
        f"(ε, δ), {first['adjacency']}, accountant {first['accountant']}; covers "
        f"{first['covers']}. Runs on the same records add up. {_of_persons(receipts)}"
    )


def _of_persons(receipts: dict[str, dict[str, Any]]) -> str:
    """Return what the costliest run reserved for a person with several records."""
    from fedpact.deployment.signatures import cost_per_person

    each = [found for ledger in receipts.values() if (found := cost_per_person(ledger["runs"]))]
    if not each:
        return ""
    most = {k: max(one[k] for one in each) for k in each[0]}
    both = any(run["beside"] for ledger in receipts.values() for run in ledger["runs"].values())
    return (
        "A person with several records has less protection: in the costliest run, counted from "
        "these ledgers alone (`fedpact plan` counts the training, at the largest of all sites), a "
        f"patient with five visits has at most ε = {upper(most['5'])} ("
        + ", ".join(f"{k} records {upper(e)}" for k, e in most.items())
        + f"){', with evaluations the sum of both, at the sum of both δ' if both else ''}."
    )
