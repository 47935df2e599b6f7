"""`fedpact audit`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedpact.cli.console import AsJson, Overrides, plain_console, show
from fedpact.common.check import count
from fedpact.common.errors import DataError, PlanError, PrivacyError
from fedpact.common.format import upper
from fedpact.privacy.guarantee import Guarantee

if TYPE_CHECKING:
    from fedpact.report.audited import AuditRow
    from fedpact.simulation.setup import SimulationSetup
    from fedpact.studies.audit.target import Target

CONFIDENCE = 0.95

SENSITIVITY = "sensitivity"
"""The name of the measurement that does not depend on chance."""


def audit(
    config: Annotated[
        Path | None,
        typer.Argument(
            help="A .toml or .json configuration, none for the embedded default; or the folder of "
            "a run, which then keeps the outcome and shows it in its report."
        ),
    ] = None,
    overrides: Overrides = [],  # noqa: B006 - typer reads the default, nobody changes it
    canaries: Annotated[
        int, typer.Option(help="Canary records to insert in the one run, >= 1.")
    ] = 1000,
    as_json: AsJson = False,
) -> None:
    """Test and attack a plan with synthetic records: a lower bound on ε next to the claimed one.

    An audit cannot prove a claim, only disprove it; then the exit code is 2.
    """
    run = config if config is not None and config.is_dir() else None
    from fedpact.common.params import one_thread
    from fedpact.common.run_folder import Folder
    from fedpact.plan import Plan
    from fedpact.report.page import write_report
    from fedpact.simulation.setup import SimulationSetup
    from fedpact.studies.audit.noise import check_mechanism, why_untested
    from fedpact.studies.audit.one_run import one_run
    from fedpact.studies.audit.sensitivity import measure_sensitivity
    from fedpact.studies.audit.target import Target, list_views

    count(canaries=canaries)
    scene = (
        SimulationSetup.of(Plan.read(config, overrides))
        if run is None
        else _scene_of(run, overrides)
    )
    target = Target.of(scene)
    untested = why_untested(target)
    with one_thread():
        found = [channel.row for channel in measure_sensitivity(target)]
        for view, attacked in list_views(target).items():
            methods = {"one-run": one_run(attacked, canaries, CONFIDENCE)}
            methods |= {} if untested else {"noise": check_mechanism(attacked)}
            for name, rows in methods.items():
                named = f"{name}, {view}" if view else name
                found += [dataclasses.replace(row, method=named) for row in rows]
    document = _document(target, found)
    if run is not None:
        Folder(run).write_json("audit.json", document)
        write_report(run)
    show(document, as_json, lambda: _print(document, found, untested, run))
    if not document["passed"]:
        raise PrivacyError(_contradiction(target.terms.site, [c for c in found if not c.passed]))


def _contradiction(site: str, failed: list[AuditRow]) -> str:
    exact = [check.found for check in failed if check.method == SENSITIVITY]
    names = ", ".join(dict.fromkeys(check.method for check in failed))
    if exact:
        how = (
            f"one record changes a sum by more than its sensitivity ({'; '.join(exact)}): clip "
            "each record's whole gradient, all parameters together, before adding the records, "
            "and divide by the expected batch size, never the actual one"
        )
    else:
        how = (
            f"at {CONFIDENCE:.0%} confidence the mechanism is not the one that was accounted for; "
            "do not run it on data"
        )
    return f"the audit of site {site!r} contradicts its claim (method {names}): {how}"


def _scene_of(run: Path, overrides: list[str]) -> SimulationSetup:
    from fedpact.common.run_folder import Folder, check_writable
    from fedpact.data.partition import Partition
    from fedpact.plan import Plan
    from fedpact.report.run_summary import read_run
    from fedpact.simulation.setup import SimulationSetup

    if overrides:
        raise PlanError(
            f"--set {overrides[0]} with the folder of a run: its report would show the audit of "
            f"another configuration; audit {run / 'plan.json'} with --set instead"
        )
    # Checked before the attacks, which take minutes.
    read_run(run)
    check_writable(run)
    folder = Folder(run)
    if not folder.partition.exists():
        raise DataError(
            f"{run} has no partition.json: the run's records are not on this machine; audit "
            f"{run / 'plan.json'}, which tries its mechanism on a partition made anew"
        )
    return SimulationSetup.of(
        Plan.parse(folder.read_json("plan.json")), None, Partition.load(folder.partition)
    )


def _document(target: Target, found: list[AuditRow]) -> dict[str, Any]:
    terms = target.terms
    return {
        "site": terms.site,
        "epsilon": terms.budget.epsilon,
        **terms.guarantee.entries,
        "delta": terms.budget.delta,
        "adjacency": terms.adjacency,
        "unit": terms.protects,
        "accountant": terms.accountant,
        "mechanism": terms.mechanism,
        "confidence": CONFIDENCE,
        "events": terms.steps,
        "model_parameters": target.w.numel(),
        "checks": [check.document() for check in found],
        "passed": all(check.passed for check in found),
    }


def _print(
    document: dict[str, Any], found: list[AuditRow], untested: str, run: Path | None
) -> None:
    out = plain_console()
    out.print(
        f"site {document['site']}: claimed ε = {Guarantee.read(document)} at δ = "
        f"{upper(document['delta'])}, {document['adjacency']}, accountant "
        f"{document['accountant']}. Each method's bounds hold with {document['confidence']:.0%} "
        "confidence; the sensitivity is measured exactly, without noise."
    )
    for check in found:
        out.print(f"{check.method:<11} {check.text}")
    if untested:
        out.print(f"noise       skipped: {untested}")
    good = document["passed"]
    out.print("no attack contradicts the claim" if good else "THE CLAIM IS WRONG")
    if run is not None:
        out.print(f"{run / 'audit.json'}, shown in {run / 'report.html'}")
