"""`fedpact audit`: attack a configuration, and set what comes out beside what it claims."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from fedpact.audit.many_runs import ManyRuns, many_runs
from fedpact.audit.membership import Membership, membership
from fedpact.audit.one_run import OneRun, one_run
from fedpact.audit.target import Target
from fedpact.cli.console import show
from fedpact.cli.run import AsJson, Config, Overrides
from fedpact.engines.scene import Scene
from fedpact.errors import InputError, PrivacyError
from fedpact.plan import Plan
from fedpact.privacy.terms import ADJACENCY

CONFIDENCE = 0.95
# A run of this many events takes minutes on a model above this size.
_SMALL_MODEL = 20_000

Finding = OneRun | ManyRuns | Membership


class Method(StrEnum):
    """Which attack."""

    one_run = "one-run"
    many_runs = "many-runs"
    membership = "membership"
    all = "all"


def audit(
    config: Config = None,
    overrides: Overrides = [],  # noqa: B006 - typer reads the default, nobody changes it
    method: Annotated[
        Method, typer.Option(help="The attack; all leaves out many-runs for large models.")
    ] = Method.all,
    canaries: Annotated[int, typer.Option(help="Records to insert in the one run, >= 1.")] = 1000,
    as_json: AsJson = False,
) -> None:
    """Attack a configuration on made-up canaries: a lower bound on ε beside the claimed one.

    It cannot prove a claim right, only wrong: then it ends with exit code 2.
    """
    scene = Scene.of(Plan.read(config, overrides))
    target = Target.of(scene)
    document, findings = _document(target), dict[Method, Finding]()
    with _one_thread():
        for chosen in _methods(method, target):
            findings[chosen] = _carry_out(chosen, scene, target, canaries)
    document["methods"] = {
        m.value: {**dataclasses.asdict(f), "passed": f.passed} for m, f in findings.items()
    }
    document["passed"] = all(finding.passed for finding in findings.values())
    show(document, as_json, lambda: _print(document, findings))
    if not document["passed"]:
        failed = ", ".join(m.value for m, f in findings.items() if not f.passed)
        raise PrivacyError(
            f"the audit of site {target.terms.site!r} contradicts its claim (method {failed}): at "
            f"{CONFIDENCE:.0%} confidence the mechanism is not what its accountant was told; do "
            "not run it on data"
        )


@contextmanager
def _one_thread() -> Iterator[None]:
    # Thousands of tiny steps: threads would cost more than they bring.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _methods(method: Method, target: Target) -> list[Method]:
    if method is not Method.all:
        return [method]
    small = target.w.numel() <= _SMALL_MODEL
    return [Method.one_run, *([Method.many_runs] if small else []), Method.membership]


def _carry_out(method: Method, scene: Scene, target: Target, canaries: int) -> Finding:
    match method:
        case Method.one_run:
            return one_run(target, canaries, CONFIDENCE)
        case Method.many_runs:
            return many_runs(target, confidence=CONFIDENCE)
        case Method.membership:
            return membership(scene, CONFIDENCE)
        case _:
            raise InputError(f"method is {method!r}: expected one method")


def _document(target: Target) -> dict[str, Any]:
    terms = target.terms
    return {
        "site": terms.site,
        "epsilon": terms.budget.epsilon,
        "delta": terms.budget.delta,
        "adjacency": ADJACENCY,
        "accountant": terms.accountant,
        "confidence": CONFIDENCE,
        "events": terms.steps,
        "model_parameters": target.w.numel(),
    }


def _print(document: dict[str, Any], findings: dict[Method, Finding]) -> None:
    out = Console(highlight=False, soft_wrap=True)
    out.print(
        f"site {document['site']}: claimed ε = {document['epsilon']:g} at δ = "
        f"{document['delta']:g}, {document['adjacency']}, accountant {document['accountant']}. "
        f"Each method's bounds hold with {document['confidence']:.0%} confidence."
    )
    for method, finding in findings.items():
        for line in _lines(finding):
            out.print(f"{method.value:<11} {line}", markup=False)
    if Method.many_runs not in findings and len(findings) > 1:
        out.print(
            f"many-runs   left out: the model has {document['model_parameters']:,} parameters"
        )
    good = document["passed"]
    out.print("no attack contradicts the claim" if good else "THE CLAIM IS WRONG")


def _lines(finding: Finding) -> list[str]:
    match finding:
        case OneRun():
            return [
                f"ε >= {finding.epsilon:.3f} of {finding.claimed:.3f} at δ = {finding.delta:g}: "
                f"{finding.correct} of {finding.guesses} guesses right, "
                f"{finding.canaries} canaries, {finding.events} events"
            ]
        case ManyRuns():
            return [
                *(
                    f"ε >= {b.epsilon:.3f} of {b.claimed:.3f} at δ = {b.delta:g}, "
                    f"{finding.events} events: seen in {b.counts.seen_with} runs of "
                    f"{b.counts.runs_with} with the canary, {b.counts.seen_without} without "
                    f"({finding.attack})"
                    for b in finding.bounds
                ),
                *(
                    f"noise of {n.channel}: σ <= {n.at_most:.4f}, measured {n.measured:.4f}, "
                    f"claimed {n.claimed:.4f}"
                    for n in finding.noise
                ),
            ]
        case Membership():
            a = finding.auc
            return [
                f"AUC {a.value:.3f} ({a.low:.3f} to {a.high:.3f}) of at most "
                f"{finding.ceiling:.3f}: {finding.members} members, {finding.others} others, "
                f"advantage {finding.advantage:.3f}"
            ]
