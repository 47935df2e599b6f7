"""What the methods found, in one form: a bound beside a claim, with everything that it needs."""

from collections.abc import Mapping, Sequence

from fedpact.report.audited import AuditRow
from fedpact.studies.audit.attacks import ManyRuns, Membership, OneRun
from fedpact.studies.audit.bounds import auc_power
from fedpact.studies.audit.noise import JOINT_CONFIDENCE as NOISE_CONFIDENCE
from fedpact.studies.audit.noise import Tested
from fedpact.studies.audit.sensitivity import Sensitivity

Finding = Sensitivity | OneRun | ManyRuns | Membership


def checks(findings: Mapping[str, Finding], confidence: float) -> list[AuditRow]:
    """Return what all methods found; each method's bounds hold together with the confidence."""
    return [
        check for method, finding in findings.items() for check in _of(method, finding, confidence)
    ]


def _of(method: str, finding: Finding, confidence: float) -> list[AuditRow]:
    match finding:
        case Sensitivity():
            return [
                AuditRow(method, "Δ", c.ratio, 1 + c.slack, None, 1.0, c.text)
                for c in finding.channels
            ]
        case OneRun():
            told = (
                f"{finding.correct} of {finding.guesses} guesses right, {finding.canaries} "
                f"canaries, {finding.events} events"
            )
            return [
                AuditRow(
                    method,
                    "ε",
                    finding.epsilon,
                    finding.claimed,
                    finding.delta,
                    confidence,
                    told,
                    finding.power,
                ),
                *_of_tests(method, (finding.curve,)),
            ]
        case ManyRuns():
            return [
                *_of_runs(method, finding, confidence),
                *_of_noise(method, finding),
                *_of_tests(method, finding.tests),
            ]
        case Membership():
            a = finding.auc
            told = (
                f"AUC {a.value:.3f} ({a.low:.3f} to {a.high:.3f}), {finding.members} members, "
                f"{finding.others} others, advantage {finding.advantage:.3f}"
            )
            best = auc_power(finding.ceiling, finding.members, finding.others, confidence)
            return [AuditRow(method, "AUC", a.low, finding.ceiling, None, confidence, told, best)]


def _of_runs(method: str, finding: ManyRuns, confidence: float) -> list[AuditRow]:
    made = list[AuditRow]()
    for b in finding.bounds:
        told = (
            f"{finding.events} events, seen in {b.counts.seen_with} runs of {b.counts.runs_with} "
            f"with the canary, {b.counts.seen_without} without ({finding.attack})"
        )
        made.append(AuditRow(method, "ε", b.epsilon, b.claimed, b.delta, confidence, told, b.power))
    return made


def _of_noise(method: str, finding: ManyRuns) -> list[AuditRow]:
    return [
        AuditRow(
            method,
            "σ",
            n.at_most,
            n.claimed,
            None,
            NOISE_CONFIDENCE,
            f"noise of {n.channel}, measured {n.measured:.4f}, from releases of a site without "
            "records",
            n.at_best,
        )
        for n in finding.noise
    ]


def _of_tests(method: str, tests: Sequence[Tested]) -> list[AuditRow]:
    """Those that failed, each, and the others by the one that came nearest to it."""
    failed = [t for t in tests if not t.passed]
    good = sorted((t for t in tests if t.passed), key=lambda t: t.p / t.level)
    nearest = f" (nearest of {len(good)} that pass)" if len(good) > 1 else ""
    return [
        AuditRow(method, "p", t.p, t.level, None, 1 - t.level, f"test that {t.what}{note}")
        for t, note in [*((t, "") for t in failed), *((t, nearest) for t in good[:1])]
    ]
