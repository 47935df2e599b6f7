"""What the methods found, in one form: a bound beside a claim, with everything that it needs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fedpact.studies.audit.attacks import ManyRuns, Membership, OneRun
from fedpact.studies.audit.bounds import auc_power
from fedpact.studies.audit.noise import JOINT_CONFIDENCE as NOISE_CONFIDENCE
from fedpact.studies.audit.noise import Tested
from fedpact.studies.audit.sensitivity import Sensitivity

Finding = Sensitivity | OneRun | ManyRuns | Membership

_SIGN = {"ε": ">=", "σ": "<=", "AUC": ">=", "p": "="}


@dataclass(frozen=True)
class Check:
    """One bound that was measured, and what the accountant states of the same.

    quantity: "ε" at `delta`, bounded from below; "σ", a channel's noise multiplier, bounded from
    above; "AUC" of a membership attack, bounded from below, where the claim is the most that
    (ε, δ) leaves room for; "p" of a test of the mechanism, beside the level it may not fall below;
    "Δ", how far a record moved a channel's sum, relative to its sensitivity; exact.
    confidence: with which the bound holds. found: how it came about. power: the bound that the
    best attack would show, were the mechanism exactly as claimed: one below it is no evidence of
    privacy; None of a test, which bounds nothing.
    """

    method: str
    quantity: str
    bound: float
    claimed: float
    delta: float | None
    confidence: float
    found: str
    power: float | None = None

    @property
    def passed(self) -> bool:
        """Whether the claim stands. Not, where one of the two is not a number."""
        if self.quantity in ("σ", "p"):
            return self.claimed <= self.bound
        return self.bound <= self.claimed

    @property
    def text(self) -> str:
        """One line for a reader."""
        if self.quantity == "Δ":
            return self.found
        at = "" if self.delta is None else f" at δ = {self.delta:g}"
        best = "" if self.power is None else f", at best {self.power:.4g}"
        return (
            f"{self.quantity} {_SIGN[self.quantity]} {self.bound:.4g}{best}, claimed "
            f"{self.claimed:.4g}{at}: {self.found}"
        )

    def document(self) -> dict[str, Any]:
        """Return it as plain data for a JSON file, which knows no infinity: null is no number."""
        numbers = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in asdict(self).items()
        }
        return {**numbers, "passed": self.passed}


def checks(findings: Mapping[str, Finding], confidence: float) -> list[Check]:
    """Return what all methods found; each method's bounds hold together with the confidence."""
    return [
        check for method, finding in findings.items() for check in _of(method, finding, confidence)
    ]


def _of(method: str, finding: Finding, confidence: float) -> list[Check]:
    match finding:
        case Sensitivity():
            return [
                Check(method, "Δ", c.ratio, 1 + c.slack, None, 1.0, c.text)
                for c in finding.channels
            ]
        case OneRun():
            told = (
                f"{finding.correct} of {finding.guesses} guesses right, {finding.canaries} "
                f"canaries, {finding.events} events"
            )
            return [
                Check(
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
            return [Check(method, "AUC", a.low, finding.ceiling, None, confidence, told, best)]


def _of_runs(method: str, finding: ManyRuns, confidence: float) -> list[Check]:
    made = list[Check]()
    for b in finding.bounds:
        told = (
            f"{finding.events} events, seen in {b.counts.seen_with} runs of {b.counts.runs_with} "
            f"with the canary, {b.counts.seen_without} without ({finding.attack})"
        )
        made.append(Check(method, "ε", b.epsilon, b.claimed, b.delta, confidence, told, b.power))
    return made


def _of_noise(method: str, finding: ManyRuns) -> list[Check]:
    return [
        Check(
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


def _of_tests(method: str, tests: Sequence[Tested]) -> list[Check]:
    """Those that failed, each, and the others by the one that came nearest to it."""
    failed = [t for t in tests if not t.passed]
    good = sorted((t for t in tests if t.passed), key=lambda t: t.p / t.level)
    nearest = f" (nearest of {len(good)} that pass)" if len(good) > 1 else ""
    return [
        Check(method, "p", t.p, t.level, None, 1 - t.level, f"test that {t.what}{note}")
        for t, note in [*((t, "") for t in failed), *((t, nearest) for t in good[:1])]
    ]
