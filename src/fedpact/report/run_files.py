"""A run's folder as it is read for the report.

Needed: plan.json, privacy.json, rounds.jsonl. Without summary.json the run has not ended yet;
partition.json and environment.json may be missing in a folder that did not come from a simulation;
audit.json is there where the run was audited, joining.json where `fedpact personalise` was asked.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from fedpact.common.errors import DataError
from fedpact.common.format import format_epsilon, lower, upper
from fedpact.common.messages import RoundRecord, SiteScore
from fedpact.common.run_folder import explain_not_a_run

_WORDS = {
    "ε": ("ε ≥ {}", "ε ≤ {}"),
    "σ": ("σ ≤ {}", "σ = {}"),
    "p": ("p = {}", "p ≥ {}"),
    "AUC": ("AUC ≥ {}", "AUC ≤ {}"),
    "Δ": ("Δ = {}", "Δ ≤ {}"),
}


@dataclass(frozen=True)
class AuditRow:
    """One bound that was measured, and what the accountant states of the same.

    quantity: "ε" at `delta` or "AUC", bounded from below; "σ", a noise multiplier, from above;
    "p", of a test of the mechanism, beside its level; "Δ", how far a record moved a channel's sum,
    relative to its sensitivity. power: the bound that the best attack would show, were all as
    claimed; None of a test.
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
    def wrong(self) -> bool:
        """Whether the numbers contradict each other, whatever else the file says of them."""
        above = self.quantity in ("σ", "p")
        return not (self.claimed <= self.bound if above else self.bound <= self.claimed)

    @property
    def cells(self) -> tuple[str, ...]:
        """Measured, at best, claimed, δ and confidence as text."""
        measured, claimed = _WORDS[self.quantity]
        told = upper if self.quantity in ("σ", "Δ") else lower
        digits = 6 if self.quantity == "Δ" else 4
        return (
            measured.format(told(self.bound, digits)),
            "–" if self.power is None else measured.format(told(self.power)),
            claimed.format(upper(self.claimed, digits)),
            "–" if self.delta is None else upper(self.delta),
            f"{100 * self.confidence:.4g} %",
        )


@dataclass(frozen=True)
class Audit:
    """What audit.json holds: the claim of one site, and the checks."""

    site: str
    epsilon: float
    delta: float
    adjacency: str
    accountant: str
    checks: tuple[AuditRow, ...]
    honest: int = 0
    epsilon_alone: float | None = None
    unit: str = "record"

    @staticmethod
    def of(document: Mapping[str, Any]) -> "Audit | None":
        """Return what `fedpact audit` wrote, None for an empty document. Raises DataError."""
        if not document:
            return None
        try:
            audit = Audit(
                site=str(document["site"]),
                epsilon=float(document["epsilon"]),
                delta=float(document["delta"]),
                adjacency=str(document["adjacency"]),
                accountant=str(document["accountant"]),
                checks=tuple(_check(raw) for raw in document["checks"]),
                honest=int(document.get("honest", 0)),
                epsilon_alone=document.get("epsilon_alone"),
                unit=str(document.get("unit", "record")),
            )
            # Taken here, so that a damaged file is found before anything is drawn.
            _ = [check.cells for check in audit.checks]
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"audit.json is not what `fedpact audit` writes ({type(error).__name__}: {error}): "
                "remove it, or audit the folder again"
            ) from error
        return audit

    @property
    def claim(self) -> str:
        """(ε, δ) as it was claimed, with adjacency and accountant."""
        epsilon = format_epsilon(self.epsilon, self.epsilon_alone, self.honest)
        return (
            f"(ε, δ) = ({epsilon}, {upper(self.delta)}) of site {self.site} for one "
            f"{self.unit}, {self.adjacency}; accountant {self.accountant}"
        )

    @property
    def wrong(self) -> bool:
        """Whether the claim is contradicted."""
        return any(check.wrong for check in self.checks)

    @property
    def most(self) -> AuditRow | None:
        """The largest lower bound on ε at the claim's own δ; None where none was sought."""
        found = [c for c in self.checks if c.quantity == "ε" and c.delta == self.delta]
        return max(found, key=lambda check: check.bound, default=None)


def _check(raw: Mapping[str, Any]) -> AuditRow:
    return AuditRow(
        method=str(raw["method"]),
        quantity=str(raw["quantity"]),
        bound=_number(raw["bound"]),
        claimed=_number(raw["claimed"]),
        delta=None if raw["delta"] is None else float(raw["delta"]),
        confidence=float(raw["confidence"]),
        found=str(raw["found"]),
        power=None if raw["power"] is None else float(raw["power"]),
    )


def _number(value: float | None) -> float:
    """null stands for an infinite number."""
    return math.inf if value is None else float(value)


@dataclass(frozen=True)
class LabelTable:
    """Training records of each label at each site; simulator only. counts[site][label]."""

    sites: list[str]
    labels: list[str]
    counts: list[list[int]]

    @staticmethod
    def of(partition: Mapping[str, Any]) -> "LabelTable":
        """Return partition.json's. Raises KeyError, TypeError or ValueError: it is no such file."""
        return LabelTable(
            sites=[str(name) for name in partition["train"]],
            labels=[str(label) for label in partition["classes"]],
            counts=[[int(n) for n in row] for row in partition["label_counts"]],
        )


Document = dict[str, Any]

BUDGETS: Final = ("privacy.epsilon", "privacy.delta", "privacy.sigma")
"""The settings of a budget: one value a site, where it is a list."""


@dataclass(frozen=True)
class SitePrivacy:
    """One site's guarantee in a private run, and what of it is spent.

    epsilon_spent: of everything released so far, an upper bound at delta; NaN if not recorded.
    epsilon_allowed: of the budget. epsilon_reserved: of all steps that the run may take.
    sigmas: channel -> noise over that channel's bound. honest: of how many sites of each sum these
    ε need the noise, 0 for none; epsilon_alone: spent without it, the same where it needs none.
    sigma: of all channels together. steps: T.
    """

    epsilon_spent: float
    epsilon_allowed: float
    epsilon_reserved: float
    delta: float
    size: float
    rate: float
    clip: float
    sigma: float
    steps: int
    sigmas: Mapping[str, float]
    honest: int
    epsilon_alone: float


@dataclass(frozen=True, eq=False)
class RunFolder:
    """What the folder holds. Made by `read_run`; its parts are as in the spine's files."""

    path: Path
    plan: Document
    privacy: Document
    summary: Document
    environment: Document
    records: list[RoundRecord]
    labels: LabelTable | None
    audit: Audit | None
    joining: Document | None

    @property
    def private(self) -> bool:
        """Whether releases were protected."""
        return self.privacy["private"]

    @property
    def seeded(self) -> bool:
        """Whether batches and noise came from the experiment's seed, which protects nobody."""
        return "seed" in str(self.privacy["randomness"])

    @property
    def status(self) -> str:
        """How the run ended; "not ended" without a summary."""
        return str(self.summary.get("status", "not ended"))

    @property
    def last(self) -> RoundRecord:
        """The record of the last round."""
        return self.records[-1]

    @property
    def own_models(self) -> bool:
        """Whether each site has a model of its own, which its scores are of."""
        return bool(self.privacy.get("own_models"))

    @property
    def head(self) -> int:
        """How many of w's last numbers each site has for itself, 0 for none."""
        return int(self.plan.get("local", {}).get("head", 0))

    @cached_property
    def evaluated(self) -> list[RoundRecord]:
        """The records with an accuracy."""
        return [record for record in self.records if record.accuracy is not None]

    @property
    def drawn(self) -> bool:
        """Whether a part of the sites took part in each round."""
        return any(record.asked for record in self.records)

    @property
    def released(self) -> Document | None:
        """The last evaluation that sites released, as summary.json has it; None without one."""
        return self.summary.get("evaluation")

    @property
    def held_out(self) -> Document | None:
        """Of a plain run what held-out records come to, exactly; simulator only, maybe None."""
        return self.summary.get("held_out")

    @property
    def measured(self) -> list[str]:
        """The metrics and measures that some round has, by name."""
        return list(dict.fromkeys(name for record in self.records for name in record.metrics))

    @property
    def pooled(self) -> bool:
        """Whether held-out records stand in for a public test set: simulator only."""
        return bool(self.privacy.get("accuracy_pooled"))

    @property
    def counted(self) -> bool:
        """Whether there is an accuracy: of labels that are numbers there is none."""
        found = [score.accuracy for score in self.scores.values()]
        found += [record.accuracy or 0.0 for record in self.evaluated[-1:]]
        return not found or not all(map(math.isnan, found))

    @property
    def scores(self) -> Mapping[str, SiteScore]:
        """Each site's score the last time that sites were evaluated; maybe none."""
        return next((record.scores for record in reversed(self.records) if record.scores), {})

    @cached_property
    def sites(self) -> list[str]:
        """The names of all sites that any file mentions, sorted."""
        names = {*self.privacy["sites"], *self.summary.get("epsilon", {})}
        names.update(self.labels.sites if self.labels else ())
        for record in self.records:
            names.update(record.scores, record.epsilon, record.refused)
        return sorted(names)

    @property
    def site_privacy(self) -> dict[str, SitePrivacy]:
        """Each site's guarantee; empty in a plain run."""
        return self._site_privacy

    @cached_property
    def _site_privacy(self) -> dict[str, SitePrivacy]:
        spent = self._largest("epsilon")
        alone = self._largest("epsilon_alone")
        return {
            name: SitePrivacy(
                epsilon_spent=spent.get(name, math.nan),
                epsilon_allowed=float(terms["epsilon"]),
                epsilon_reserved=float(terms["epsilon_reserved"]),
                delta=float(terms["delta"]),
                size=float(terms["size"]),
                rate=float(terms["rate"]),
                clip=float(terms["clip"]),
                sigma=float(terms["sigma_joint"]),
                steps=int(terms["steps"]),
                sigmas={str(name): float(sigma) for name, sigma in terms["sigmas"].items()},
                honest=int(terms.get("honest", 0)),
                epsilon_alone=(alone if terms.get("honest") else spent).get(name, math.nan),
            )
            for name, terms in sorted(self.privacy["sites"].items())
        }

    def _largest(self, name: str) -> dict[str, float]:
        """Return each site's largest ε of a kind: it never falls, so that is the safe one."""
        spent: dict[str, float] = {}
        for part in (*(getattr(r, name) for r in self.records), self.summary.get(name, {})):
            for site, epsilon in part.items():
                number = math.nan if epsilon is None else float(epsilon)
                known = spent.get(site, -math.inf)
                # NaN stays: an ε that was once unknown is not known to be small.
                spent[site] = known if math.isnan(known) or known > number else number
        return spent

    @property
    def bytes(self) -> tuple[int, int]:
        """Bytes of all messages so far: (to the sites, from the sites)."""
        return sum(r.bytes_down for r in self.records), sum(r.bytes_up for r in self.records)

    @property
    def bytes_allowed(self) -> int | None:
        """The plan's budget of bytes, both ways; None without one."""
        allowed = self.plan.get("budget", {}).get("bytes")
        return None if allowed is None else int(allowed)

    @property
    def seconds(self) -> float:
        """Wall-clock seconds of all rounds so far."""
        return sum(record.seconds for record in self.records)


def read_run(folder: Path) -> RunFolder:
    """Read a run's folder. Raises DataError: a file is missing or is not what a run writes."""
    labels = _read(folder / "partition.json", needed=False)
    try:
        run = RunFolder(
            path=folder,
            plan=_read(folder / "plan.json"),
            privacy=_read(folder / "privacy.json"),
            summary=_read(folder / "summary.json", needed=False),
            environment=_read(folder / "environment.json", needed=False),
            records=_read_records(folder / "rounds.jsonl"),
            labels=LabelTable.of(labels) if labels else None,
            audit=Audit.of(_read(folder / "audit.json", needed=False)),
            joining=_read(folder / "joining.json", needed=False) or None,
        )
        _reading_check(run)
        # Taken here, so that a damaged file is found before anything is drawn.
        _ = run.site_privacy, run.sites, run.bytes_allowed
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"the run's folder {folder} cannot be read ({type(error).__name__}: {error}): its "
            "files are not what `fedpact run` writes; restore them, or run the plan again into a "
            "new folder"
        ) from error
    return run


def _read(path: Path, *, needed: bool = True) -> Document:
    if not needed and not path.exists():
        return {}
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except PermissionError:
        raise DataError(
            f"{path} may not be read by this account: use the one whose run it is, or have it "
            "made readable"
        ) from None
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} cannot be read ({type(error).__name__}): expected a file of a run's folder; "
            f"{explain_not_a_run(path.parent)}"
        ) from error
    if not isinstance(document, dict):
        raise DataError(
            f"{path} holds a {type(document).__name__}: expected one JSON object, as `fedpact run` "
            "writes it; run the plan again into a new folder"
        )
    return document


def _read_records(path: Path) -> list[RoundRecord]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} cannot be read ({type(error).__name__}): expected one line a round; give the "
            "folder that `fedpact run` wrote, after its round 0"
        ) from error
    records: list[RoundRecord] = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(RoundRecord.from_json(line))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            # A line without its end is being written, or was when the run was killed.
            if number == len(lines) and not line.endswith("\n"):
                break
            raise DataError(
                f"line {number} of {path} is no record of a round ({type(error).__name__}): run "
                "`fedpact resume`, which drops what was never finished, or run the plan again"
            ) from error
    if not records:
        raise DataError(
            f"{path} holds no round: expected at least round 0, the initial model; wait for it, or "
            "run the plan again"
        )
    return records


_STATEMENT = {
    "accountant",
    "adjacency",
    "covers",
    "does_not_cover",
    "private",
    "randomness",
    "simulator_only",
    "sites",
    "sizes",
    "unit",
}


def _reading_check(run: RunFolder) -> None:
    if missing := _STATEMENT - set(run.privacy):
        raise DataError(
            f"privacy.json in {run.path} lacks {', '.join(sorted(missing))}: expected the whole "
            "privacy statement, without which no report is written; restore the file, or run the "
            "plan again into a new folder"
        )
    private, sites = run.privacy["private"], run.privacy["sites"]
    if not (private is True or private is False):
        raise DataError(
            f"privacy.json in {run.path} has private = {private!r}: expected true or false; a "
            "report that does not know whether a run was private is not written"
        )
    if private != bool(sites):
        raise DataError(
            f"privacy.json in {run.path} has private = {private} and the terms of {len(sites)} "
            "sites: expected terms in a private run and none in a plain one; restore the file"
        )
    if run.audit:
        _check_audit(run, run.audit)


def _check_audit(run: RunFolder, audit: Audit) -> None:
    site = run.site_privacy.get(audit.site)
    granted = (site.epsilon_allowed, site.delta) if site else None
    if (audit.epsilon, audit.delta) != granted:
        raise DataError(
            f"audit.json in {run.path} speaks of {audit.claim}, which privacy.json does not grant: "
            "expected the audit of this run; remove it, or audit the folder again"
        )
