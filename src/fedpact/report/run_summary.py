"""A run as read from its folder: the one source of terminal, JSON, page, notebook and comparison.

plan.json, privacy.json and rounds.jsonl are required. Without summary.json the run has not ended.
partition.json and environment.json are written by simulations, audit.json by `fedpact audit`, and
joining.json by `fedpact personalise`.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import numpy as np
from pydantic.dataclasses import dataclass as checked_dataclass

from fedpact.common.errors import DataError
from fedpact.common.format import size
from fedpact.common.messages import RoundRecord, SiteScore
from fedpact.common.run_folder import Folder
from fedpact.evaluation.metrics import Fairness, fairness, ranking
from fedpact.privacy.guarantee import Guarantee
from fedpact.report.audited import Audit, read_audit

Document = dict[str, Any]

BUDGETS: Final = ("privacy.epsilon", "privacy.delta", "privacy.sigma")
"""The settings of a budget: a list has one value for each site."""

ENDS: Final = {
    "finished": "finished",
    "stopped": "stopped on request; `fedpact resume` continues it",
    "budget": "ended early: the sites' budgets of ε did not allow the next round",
    "bytes": "ended early: the next round would exceed budget.bytes",
    "seconds": "ended early: budget.seconds is used up",
    "iterations": "ended: the local iterations are used up",
    "accuracy": "ended early: budget.accuracy was reached",
    "patience": "ended early: no better accuracy for budget.patience evaluations",
    "diverged": "ended early: the next model was not finite; lower the learning rate",
}
"""Each status of a run in words."""


_TERMS: Final = ("epsilon_reserved", "delta", "size", "rate", "clip", "steps", "sigmas")


@checked_dataclass(frozen=True)
class SitePrivacy:
    """One site's guarantee in a private run, and how much of it is spent.

    epsilon_spent: an upper bound at delta for all releases so far; NaN if not recorded.
    epsilon_allowed: the budget. epsilon_reserved: for all steps that the run may take.
    sigmas: channel -> noise over that channel's bound. sigma: for all channels together. steps: T.
    epsilon_alone: spent without any assumption about other sites.
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
    epsilon_alone: float


@dataclass(frozen=True, eq=False)
class RunSummary:
    """A run: the documents of its folder, {} for a missing one, and what follows from them.

    partition: "sites", "classes" and "label_counts", and a "digest" of each site's records.
    """

    path: Path
    plan: Document
    privacy: Document
    summary: Document
    environment: Document
    partition: Document
    joining: Document
    records: list[RoundRecord]
    audit: Audit | None

    @property
    def private(self) -> bool:
        """Whether releases were protected."""
        return self.privacy["private"]

    @property
    def seeded(self) -> bool:
        """Whether batches and noise came from the plan's seed, so that nothing is protected."""
        return "seed" in str(self.privacy["randomness"])

    @property
    def seed(self) -> int:
        """The plan's seed."""
        return int(self.plan.get("seed", 0))

    @property
    def status(self) -> str:
        """How the run ended; "not ended" without a summary."""
        return str(self.summary.get("status", "not ended"))

    @property
    def title(self) -> str:
        """The run's own name, or its algorithm and data."""
        named = self.plan.get("about", {}).get("name")
        # Data from Python is named with its digest, which the configuration shows.
        data = str(self.plan.get("data", "own data")).partition("@")[0]
        return named or f"{self.plan.get('algorithm')} on {data}"

    @property
    def ended(self) -> str:
        """The status in words."""
        return ENDS.get(self.status, self.status)

    @property
    def last(self) -> RoundRecord:
        """The record of the last round."""
        return self.records[-1]

    @property
    def head(self) -> int:
        """The number of entries at the end of w that each site keeps private, 0 for none."""
        settings, local = self.plan.get("settings", {}), self.plan.get("local", {})
        return int(local.get("head", 0) or settings.get("head", 0))

    @property
    def drawn(self) -> bool:
        """Whether each round had only some of the sites."""
        return any(record.asked for record in self.records)

    @cached_property
    def sites(self) -> list[str]:
        """The names of all sites that any file mentions, sorted."""
        names = {*self.privacy["sites"], *self.summary.get("epsilon", {})}
        names.update(self.partition.get("sites", ()))
        for record in self.records:
            names.update(record.scores, record.epsilon, record.refused)
        return sorted(names)

    # ------------------------------------------------------------ how good the model is

    @cached_property
    def evaluated(self) -> list[RoundRecord]:
        """The records with an accuracy."""
        return [record for record in self.records if record.accuracy is not None]

    @property
    def worse(self) -> bool:
        """Whether the loss is larger than before training, or not a number."""
        if not self.evaluated or self.evaluated[0].round:
            return False
        first, last = self.evaluated[0].loss, self.evaluated[-1].loss
        return first is not None and last is not None and not last <= first

    @property
    def released(self) -> Document | None:
        """The last evaluation that sites released, as summary.json has it; None without one."""
        return self.summary.get("evaluation")

    @property
    def measured(self) -> list[str]:
        """The names of all metrics and measures in any round."""
        return list(dict.fromkeys(name for record in self.records for name in record.metrics))

    @property
    def pooled(self) -> bool:
        """Whether accuracy is on held-out records, for lack of a public test set."""
        return bool(self.privacy.get("accuracy_pooled"))

    @cached_property
    def counted(self) -> bool:
        """Whether there is an accuracy, which regression does not have."""
        found = [score.accuracy for score in self.scores.values()]
        found += [record.accuracy or 0.0 for record in self.evaluated[-1:]]
        return not found or not all(map(math.isnan, found))

    @cached_property
    def scores(self) -> Mapping[str, SiteScore]:
        """Each site's score in the last evaluation; may be empty."""
        return next((record.scores for record in reversed(self.records) if record.scores), {})

    @property
    def accuracy(self) -> float | None:
        """The last model's accuracy on public test data or all held-out records, or None."""
        return self.evaluated[-1].accuracy if self.evaluated and self.counted else None

    @property
    def loss(self) -> float | None:
        """The last model's mean loss on the same records, or None."""
        return self.evaluated[-1].loss if self.evaluated else None

    def averaged(self, name: str) -> float | None:
        """Return "accuracy" or "loss" of the server's average of models; None without one."""
        found = self.evaluated[-1].average.get(name) if self.evaluated else None
        return found if self.counted or name != "accuracy" else None

    def metric(self, name: str) -> float | None:
        """Return a metric (evaluation.metrics.find_display) of the last model; None if unknown."""
        return next((r.metrics[name] for r in reversed(self.records) if name in r.metrics), None)

    @cached_property
    def fairness(self) -> Fairness | None:
        """The spread of the last model's accuracy over sites; None without held-out records."""
        return fairness(self.scores) if self.scores and self.counted else None

    @property
    def worst_loss(self) -> float | None:
        """The largest mean loss of any site; None if there are accuracies."""
        found = self.scores
        return found[ranking(found)[0]].loss if found and not self.counted else None

    @cached_property
    def figures(self) -> dict[str, float | None]:
        """The last model's figures and what it took, by their keys in JSON; None if unknown."""
        even = self.fairness
        return {
            "accuracy": self.accuracy,
            "loss": self.loss,
            "average_accuracy": self.averaged("accuracy"),
            "average_loss": self.averaged("loss"),
            "worst_accuracy": even and even["worst_accuracy"],
            "worst_loss": self.worst_loss,
            "worst_tenth": even and even["worst_tenth"],
            "accuracy_variance": even and even["variance"],
            "accuracy_deviation": even and even["variance"] ** 0.5,
            "accuracy_entropy": even and even["entropy"],
            "rounds": self.last.round,
            "iterations": self.iterations,
            "records_read": self.summary.get("records_read"),
            "bytes": self.bytes,
            "seconds": self.seconds,
            **{name: self.metric(name) for name in self.measured},
        }

    # ------------------------------------------------------------ what privacy it cost

    @cached_property
    def site_privacy(self) -> dict[str, SitePrivacy]:
        """Each site's guarantee; empty in a plain run."""
        spent, alone = self._largest("epsilon"), self._largest("epsilon_alone")
        # An ε that assumes nothing about other sites is also that without them.
        return {
            name: SitePrivacy(
                epsilon_spent=spent.get(name, math.nan),
                epsilon_allowed=terms["epsilon"],
                sigma=terms["sigma_joint"],
                epsilon_alone=(alone if _read_reserved(terms).condition else spent).get(
                    name, math.nan
                ),
                **{key: terms[key] for key in _TERMS},
            )
            for name, terms in sorted(self.privacy["sites"].items())
        }

    def _largest(self, name: str) -> dict[str, float]:
        """Return each site's largest ε of a kind: ε never decreases, so this is the safe value."""
        spent: dict[str, float] = {}
        for part in (*(getattr(r, name) for r in self.records), self.summary.get(name, {})):
            for site, epsilon in part.items():
                number = math.nan if epsilon is None else float(epsilon)
                known = spent.get(site, -math.inf)
                # NaN is kept: an ε that was unknown in one round may be large.
                spent[site] = known if math.isnan(known) or known > number else number
        return spent

    @cached_property
    def spent(self) -> Guarantee | None:
        """The cost of all releases so far; None for a plain run.

        A record is either trained on or held out for evaluations, so the larger cost counts.
        """
        if not self.private:
            return None
        sites, held = self.site_privacy, self.privacy.get("evaluation") or {}
        # The whole reservation counts while the run has not ended.
        cost = float(held.get("epsilon_reserved", 0.0))
        if held and self.released:
            cost = max(float(self.released["epsilon_spent"].get(site, 0.0)) for site in sites)
        return replace(
            self.training,
            epsilon=max(cost, largest_epsilon(site.epsilon_spent for site in sites.values())),
            delta=max(*(site.delta for site in sites.values()), float(held.get("delta", 0.0))),
            alone=max(cost, largest_epsilon(site.epsilon_alone for site in sites.values())),
        )

    @cached_property
    def training(self) -> Guarantee:
        """The guarantee of a private run's whole training, for records that are trained on."""
        return Guarantee.largest(map(_read_reserved, self.privacy["sites"].values()))

    @cached_property
    def reserved(self) -> Guarantee:
        """The guarantee of a whole private run, for all its records."""
        of, held = self.training, self.privacy.get("evaluation") or {}
        epsilon = max(of.epsilon, float(held.get("epsilon_reserved", 0.0)))
        delta = max(of.delta, float(held.get("delta", 0.0)))
        return replace(of, epsilon=epsilon, delta=delta, alone=max(epsilon, of.alone))

    # ------------------------------------------------------------ what was done for it

    @property
    def steps(self) -> tuple[int, int] | None:
        """The smallest and largest τ of a round; None before the first."""
        taken = [record.steps for record in self.records if record.round]
        return (min(taken), max(taken)) if taken else None

    @property
    def iterations(self) -> int:
        """Local iterations of all rounds, for a site that takes part in each."""
        return sum(record.steps for record in self.records)

    @property
    def learning_rate(self) -> tuple[float, float] | None:
        """η, as a range; None if the algorithm has none."""
        eta = self.plan.get("settings", {}).get("learning_rate")
        return None if eta is None else (eta, eta)

    @property
    def sigma(self) -> tuple[float, float] | None:
        """The smallest and largest σ of a site, for all channels together; None in a plain run."""
        found = [site.sigma for site in self.site_privacy.values()]
        return (min(found), max(found)) if found else None

    @property
    def epsilon_allowed(self) -> float | None:
        """The largest ε that a site's budget allows; None in a plain run."""
        return max((site.epsilon_allowed for site in self.site_privacy.values()), default=None)

    @property
    def bytes_down(self) -> int:
        """Bytes of all messages to the sites so far."""
        return sum(record.bytes_down for record in self.records)

    @property
    def bytes_up(self) -> int:
        """Bytes of all messages from the sites so far."""
        return sum(record.bytes_up for record in self.records)

    @property
    def sockets(self) -> str:
        """The bytes that sockets carried, in words; "" if a round was not counted."""
        counted = [record.sockets for record in self.records if record.round]
        if not counted or not all(counted):
            return ""
        down, up = map(sum, zip(*counted, strict=True))
        return f"with Flower's own and TLS {size(down)} and {size(up)}"

    @cached_property
    def course(self) -> list[tuple[RoundRecord, int, float]]:
        """Each round's record, with the bytes and the simulated seconds of all rounds up to it."""
        sent = accumulate(record.bytes_down + record.bytes_up for record in self.records)
        clock = accumulate(record.simulated_seconds for record in self.records)
        return list(zip(self.records, sent, clock, strict=True))

    @property
    def bytes(self) -> int:
        """Bytes of all messages so far, both ways."""
        return self.bytes_down + self.bytes_up

    @property
    def bytes_allowed(self) -> int | None:
        """The plan's budget of bytes, both ways; None without one."""
        allowed = self.plan.get("budget", {}).get("bytes")
        return None if allowed is None else int(allowed)

    @property
    def seconds(self) -> float:
        """Wall-clock seconds of all rounds so far."""
        return sum(record.seconds for record in self.records)


def _read_reserved(terms: Mapping[str, Any]) -> Guarantee:
    return Guarantee.read(terms, "epsilon_reserved")


def largest_epsilon(values: Iterable[Any]) -> float:
    """Return the largest of these ε; infinity if one is unknown."""
    found = [math.inf if value is None else float(value) for value in values]
    return math.inf if any(map(math.isnan, found)) else max(found, default=math.inf)


def read_run(folder: Path, *, begun: bool = True) -> RunSummary:
    """Read a run's folder. Raises DataError: a file is missing or is not what a run writes.

    begun: False also reads a run without any round; it gets an empty round 0.
    """
    of, rounds = Folder(folder), folder / "rounds.jsonl"
    names = ("summary", "environment", "partition", "joining", "audit")
    try:
        # summary.json among others is written later, or by another command.
        other = {
            name: of.read_json(file) if (folder / (file := f"{name}.json")).exists() else {}
            for name in names
        }
        audit, partition = other.pop("audit"), other.pop("partition")
        run = RunSummary(
            path=folder,
            plan=of.read_json("plan.json"),
            privacy=of.read_json("privacy.json"),
            records=_read_records(rounds) if begun or rounds.exists() else [RoundRecord(round=0)],
            audit=read_audit(audit) if audit else None,
            partition=_without_records(partition) if partition else {},
            **other,
        )
        _check(run)
        # Computed here, so that a damaged file is found before anything is drawn.
        _ = run.site_privacy, run.sites, run.bytes_allowed
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"the run's folder {folder} cannot be read ({type(error).__name__}: {error}): its "
            "files are not what `fedpact run` writes; restore them, or run the plan again into a "
            "new folder"
        ) from error
    return run


def _without_records(partition: Document) -> Document:
    """Return a partition with a digest in place of the records' numbers, which may be many."""
    records = json.dumps([partition["train"], partition.get("held_out")], sort_keys=True)
    digest = hashlib.blake2b(records.encode(), digest_size=16).hexdigest()
    sites, classes = [*partition["train"]], [*map(str, partition["classes"])]
    counts = np.array(partition["label_counts"], np.float64).reshape(len(sites), len(classes))
    return {"sites": sites, "classes": classes, "label_counts": counts, "digest": digest}


def _read_records(path: Path) -> list[RoundRecord]:
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    records = list[RoundRecord]()
    for number, line in enumerate(lines, start=1):
        try:
            records.append(RoundRecord.from_json(line))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            # An incomplete last line is being written, or the run was killed.
            if number == len(lines) and not line.endswith("\n"):
                break
            raise DataError(
                f"line {number} of {path} is not a round record ({type(error).__name__}): run "
                "`fedpact resume`, which drops unfinished rounds, or run the plan again"
            ) from error
    if not records:
        raise DataError(
            f"{path} has no round: expected at least round 0, the initial model; wait for it, or "
            "run the plan again"
        )
    return records


_STATEMENT = {
    *("accountant", "adjacency", "covers", "does_not_cover", "private", "randomness"),
    *("simulator_only", "sites", "sizes", "unit"),
}


def _check(run: RunSummary) -> None:
    if missing := _STATEMENT - set(run.privacy):
        raise DataError(
            f"privacy.json in {run.path} lacks {', '.join(sorted(missing))}: expected the whole "
            "privacy statement, which a report needs; restore the file, or run the "
            "plan again into a new folder"
        )
    private, sites = run.privacy["private"], run.privacy["sites"]
    if private is not bool(sites):
        raise DataError(
            f"privacy.json in {run.path} has private = {private!r} and the terms of {len(sites)} "
            "sites: expected true with terms, or false without; restore the file"
        )
    if (audit := run.audit) is None:
        return
    site = run.site_privacy.get(audit.site)
    granted = (site.epsilon_allowed, site.delta) if site else None
    if (audit.guarantee.epsilon, audit.guarantee.delta) != granted:
        raise DataError(
            f"audit.json in {run.path} speaks of {audit.claim}, which privacy.json does not grant: "
            "expected the audit of this run; remove it, or audit the folder again"
        )
