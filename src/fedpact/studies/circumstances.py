"""The public facts for a recommendation, and better ways to spend a plan's budget by them.

Site k with N_k records adds noise of deviation σ_k C / (q N_k) to its mean gradient g_k, and the
server computes Σ ω_k g_k. With equal budgets, or noise for the sum, ω_k = N_k / N. With different
budgets, the noise of one site with a small ε could dominate the sum, so sites are weighted by their
noise (algorithm ldp_fedsgd, privacy.accounting.planner). In each step this causes a bias of

    D Σ (ω_k - N_k / N)²,    D = Σ ‖g_k - ḡ‖²

Noise averages out over T rounds, a bias does not, so the penalty is T D. D is at most K C². If
records are assigned to sites at random, D is about Σ C² / N_k.

A plan's q, σ, rounds and τ are compared by signal-to-noise ratio.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

from fedpact.common.configuration import read_configuration
from fedpact.common.errors import DataError, InputError, PlanError
from fedpact.data.advice import KNOWN, find_configuration
from fedpact.data.cells import read_columns
from fedpact.data.dataset import Dataset
from fedpact.data.partition import make_partition
from fedpact.data.schema import PlanRecords
from fedpact.plan import Plan
from fedpact.privacy.accounting.accountant import Budget
from fedpact.privacy.accounting.calibration import smallest_sigma
from fedpact.privacy.accounting.planner import (
    MOST_STEPS,
    Choice,
    best,
    least_noise,
    signal_to_noise,
    useful_rounds,
)
from fedpact.privacy.mechanisms import mechanism_of
from fedpact.privacy.noise import calibrate
from fedpact.privacy.terms import FullDataRelease, Terms
from fedpact.simulation.setup import SimulationSetup

MOST_WORDS: Final = 1000
"""The largest vocabulary for which there is a recommendation."""

_NOTHING: Final = PlanRecords()
# The keys of a configuration that are used besides [records].
_BESIDE: Final = ("label", "site", "person", "task", "evaluation")


@dataclass(frozen=True)
class Circumstances:
    """What is known before training; see `fedpact recommend`. sites: 0 for the default."""

    data: str
    budgets: tuple[Budget, ...]  # one, or of each site in the order of their names
    rounds: int
    sites: int
    trust: str
    honest: int
    mirror: bool | None = None
    label: str | None = None
    site: str | None = None
    records: PlanRecords = _NOTHING
    little: tuple[str, ...] = ()  # columns that add little to the others
    partition: Mapping[str, Any] = field(default_factory=dict)
    task: dict[str, Any] = field(default_factory=dict[str, Any])
    person: str | None = None
    evaluation: dict[str, Any] = field(default_factory=dict[str, Any])
    features: bool = True  # of images
    size: int | None = None  # declared number of training records; None: counted

    @property
    def document(self) -> dict[str, Any]:
        """The keys that a plan takes unchanged."""
        found = {
            "data": self.data,
            "label": self.label,
            "site": self.site,
            "person": self.person,
            "partition": self.partition,
            "task": self.task,
            "evaluation": self.evaluation,
            # Last, as it may be long.
            "records": self.records.model_dump(mode="json", exclude_defaults=True),
        }
        return {key: value for key, value in found.items() if value not in (None, {})}

    @property
    def granted(self) -> dict[str, Any]:
        """`epsilon` and `delta` of [privacy]: a number, or one for each site."""
        of = self.budgets
        both = {"epsilon": [one.epsilon for one in of], "delta": [one.delta for one in of]}
        return {key: each if len(set(each)) > 1 else each[0] for key, each in both.items()}

    @property
    def guarantee(self) -> str:
        """The budgets in words."""
        few = sorted(set(self.budgets), key=attrgetter("epsilon", "delta"))
        told = [f"({one.epsilon:g}, {one.delta:g})" for one in few]
        return told[0] if len(few) == 1 else f"a site's own, from {told[0]} to {told[-1]},"

    def without_little(self) -> "Circumstances":
        """Return the circumstances without the columns that add little."""
        kept = {k: v for k, v in self.records.columns.items() if k not in self.little}
        changed = {"columns": kept, "drop": [*self.records.drop, *self.little]}
        return replace(self, records=self.records.model_copy(update=changed), little=())


def budgets(epsilon: str, delta: str) -> tuple[Budget, ...]:
    """Return (ε, δ) of all sites, or of each, from comma-separated numbers.

    Raises InputError: not a number, out of range, or different numbers of ε and δ.
    """
    epsilons, deltas = _numbers("--epsilon", epsilon), _numbers("--delta", delta)
    most = max(len(epsilons), len(deltas))
    if not {len(epsilons), len(deltas)} <= {1, most}:
        raise InputError(
            f"--epsilon is {epsilon} and --delta is {delta}: expected one number, or as many of "
            "both as there are sites"
        )
    each = zip(epsilons * (most // len(epsilons)), deltas * (most // len(deltas)), strict=True)
    return tuple(Budget(*one) for one in each)


def _numbers(name: str, text: str) -> list[float]:
    try:
        if "_" in text or not text.isascii():  # which float() accepts
            raise ValueError
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise InputError(
            f"{name} is {text!r}: expected a number, or one for each site, as 1,2,8"
        ) from None


def describe_columns(columns: Path | None, data: str, size: int | None) -> dict[str, Any]:
    """Return `records`, `little` and the keys of `_BESIDE` from a configuration file.

    size: see Circumstances; then `data` may be one site's file, without a column of sites.
    Raises PlanError: nothing is declared, or privacy.unit is not "record".
    """
    given = columns or find_configuration(data)
    if given is None:
        return {}
    raw = read_configuration(given)
    if not raw.get("records"):
        raise PlanError(
            f"--columns {columns} has no table [records]: expected a configuration that declares "
            "what columns may hold, as [records.columns.age] with range = [0, 120]"
        )
    if raw.get("privacy", {}).get("unit", "record") != "record":
        raise PlanError(
            f'--columns {columns} has privacy.unit = "{raw["privacy"]["unit"]}": recommendations '
            "are for records; leave it out, and set it in the written plan, with your own steps"
        )
    taken = {key: raw[key] for key in _BESIDE if key in raw}
    if size is not None and "site" in taken and not _has(data, str(taken["site"])):
        del taken["site"]
    found = {**taken, "records": Plan.parse({**taken, "records": raw["records"]}).records}
    return found if columns else {**found, "little": KNOWN.get(data, ())}


def _has(data: str, column: str) -> bool:
    """Whether a table has a column; true if the file cannot be read, which is reported later."""
    path = Path(data)
    if path.suffix.lower() not in (".csv", ".parquet"):
        return True
    try:
        return column in read_columns(path).cells
    except DataError:
        return True


def check_kind(data: Dataset, vocabulary: int | None) -> None:
    """Raise InputError: no recommended model learns these records or labels.

    vocabulary: the declared number of words, for texts.
    """
    begin = "recommended models are linear, for numbers and classes; begin with `fedpact plan`"
    if data.kind != "class":
        raise InputError(f"labels of {data.name} are not classes: see [task]; {begin}")
    if data.x.is_floating_point():
        return
    words = f"records of {data.name} are whole numbers, which mean words of a text"
    if vocabulary is None:
        raise InputError(
            f"{words}: declare their number, as vocabulary = 65 in [records], by --columns; or "
            "store measurements as float32"
        )
    if data.x.dim() != 2 or vocabulary != len(data.classes):
        raise InputError(
            f"{words}, {vocabulary} of them, in the form {tuple(data.x.shape[1:])}, and there are "
            f"{len(data.classes)} classes: expected rows whose next word is the label; {begin}"
        )
    if vocabulary > MOST_WORDS:
        raise InputError(
            f"{words}, {vocabulary:,} of them: the recommended model has a weight for each pair, "
            f"for at most {MOST_WORDS:,}, such as characters; {begin}"
        )


def with_sites(asked: Circumstances, data: Dataset) -> Circumstances:
    """Return the circumstances with a number of sites, a [partition] table and a budget for each.

    Data with sites keep them. Raises InputError: another number of sites or budgets is given.
    """
    asked = _with_partition(asked, data)
    if len(asked.budgets) not in (1, asked.sites):
        raise InputError(
            f"--epsilon or --delta lists {len(asked.budgets)} values for {asked.sites} sites: "
            "expected one for all of them, or one for each in the order of their names"
        )
    if asked.size is not None and asked.size < asked.sites:
        raise InputError(
            f"--records is {asked.size} for {asked.sites} sites: expected how many records train "
            "at all of them together"
        )
    return replace(asked, budgets=asked.budgets * (asked.sites // len(asked.budgets)))


def sizes_of(asked: Circumstances, data: Dataset, plan: Plan) -> dict[str, float]:
    """Return each site's number of training records; equal shares of a declared number."""
    if asked.size is not None:
        return {f"site {k + 1}": asked.size / asked.sites for k in range(asked.sites)}
    parts = make_partition(data, plan.partition, plan.sites, plan.seed).train
    held, count = plan.held_out, len(data.y)
    if isinstance(held, str):
        training = count - (0 if data.held is None else int(data.held.sum()))
    else:
        training = max(1, round((1 - held) * count))
    share = training / sum(map(len, parts.values()))
    return {name: len(part) * share for name, part in parts.items()}


def _with_partition(asked: Circumstances, data: Dataset) -> Circumstances:
    own = len(set(data.site or ()))
    wanted = asked.sites or (len(asked.budgets) if len(asked.budgets) > 1 else 0)
    if own == 1 and asked.size is not None and not wanted:
        raise InputError(
            f"--records is {asked.size} and {data.name} has one site, {(data.site or ('',))[0]!r}: "
            "say of how many sites they are by --sites, or by one --epsilon for each"
        )
    if own and asked.size is not None and wanted not in (0, own):
        # The file of some sites represents all; its column of sites is dropped.
        drop = [*asked.records.drop, *([asked.site] if asked.site else [])]
        records = asked.records.model_copy(update={"drop": drop})
        return replace(asked, sites=wanted, site=None, records=records)
    if not own:
        return replace(asked, sites=wanted or 10)
    if asked.sites not in (0, own):
        raise InputError(
            f"--sites is {asked.sites} and {data.name} has {own} sites of its own: leave it out"
        )
    held = {} if data.held is None else {"held_out": "own"}
    return replace(asked, sites=own, partition={"kind": "natural", **held})


@dataclass(frozen=True)
class SiteNoise:
    """The public facts that determine the noise.

    budgets, sizes: (ε, δ) and N_k > 0 of each of the K sites. columns: each site's release of
    columns' scales, if any. clip: C. shared: whether sites share the noise of a sum, and do not
    each add their own. dealt: whether records are assigned to sites at random.
    """

    budgets: Sequence[Budget]
    sizes: Sequence[float]
    columns: Sequence[FullDataRelease | None]
    clip: float
    shared: bool
    dealt: bool

    @property
    def releases(self) -> list[tuple[FullDataRelease | None, float]]:
        """Each site's release of columns' scales, and N_k."""
        return list(zip(self.columns, self.sizes, strict=True))

    @property
    def weighed(self) -> bool:
        """Whether sites are weighted by their noise."""
        return not self.shared and len(set(self.budgets)) > 1

    def sigma(self, rate: float, rounds: int, weights: int) -> float:
        """Return the σ of K equal sites that would give the same total noise.

        rate: q in (0, 1]. rounds: T >= 1. weights: d >= 1, of the model.
        """
        each = self.site_sigmas(rate, rounds)
        if not self.weighed:
            # With noise for the sum, all sites add what the smallest budget needs.
            return max(each)
        return sigma_together(each, self.sizes, self.clip, rate, self.penalty(rounds) / weights)

    def penalty(self, rounds: int) -> float:
        """Return T D, which is the `bias_penalty` of ldp_fedsgd."""
        apart = sum(1 / n for n in self.sizes) if self.dealt else len(self.sizes)
        return rounds * apart * self.clip**2

    def settings(self, rounds: int) -> dict[str, Any]:
        """Return the name of the suitable algorithm, and its settings without η."""
        if not self.weighed:
            return {"algorithm": "fedavg", "settings": {"local_steps": 1}}
        own = {"step_schedule": "constant", "aggregation": "least_noise"}
        own |= {"bias_penalty": float(f"{self.penalty(rounds):.3g}")}
        return {"algorithm": "ldp_fedsgd", "settings": own}

    def site_sigmas(self, rate: float, rounds: int) -> list[float]:
        """Return each site's own σ for its budget."""
        found = {
            budget: smallest_sigma(budget, rate, rounds, spent=once.history if once else None)
            for budget, once in dict(zip(self.budgets, self.columns, strict=True)).items()
        }
        return [found[budget] for budget in self.budgets]


def sigma_together(
    sigmas: Sequence[float],
    sizes: Sequence[float],
    clip: float,
    rate: float = 1.0,
    penalty: float | None = None,
) -> float:
    """Return the σ of K equal sites whose mean over records has the same noise as these sites.

    sigmas, sizes: σ_k and N_k > 0. clip: C. rate: q. penalty: κ of privacy.accounting.planner, if
    sites are weighted by their noise; None: all records have equal weights.
    """
    deviations = [clip * s / (rate * n) for s, n in zip(sigmas, sizes, strict=True)]
    counted = [n / sum(sizes) for n in sizes]
    if penalty is not None:
        counted = least_noise(sizes, [v * v for v in deviations], penalty)
    noise = math.hypot(*(a * v for a, v in zip(counted, deviations, strict=True)))
    return noise * sum(sizes) * rate / clip / math.sqrt(len(sizes))


LINEAR_MODELS: Final = ("logistic", "ngram")
"""Models for which the rule for rounds is known."""


def optimise_budgets(scene: SimulationSetup, passes: float | None) -> dict[str, Any]:
    """Return the configured and the best (q, σ, T, τ) for each distinct budget.

    Raises PlanError: a plain run, partial participation, or a τ chosen during the run.
    """
    plan, rounds = scene.plan, scene.plan.rounds
    for name, why, found in (
        (plan.why_unprotected, "it chooses how to spend ε, and there is none", not plan.private),
        (
            f"sites_per_round = {plan.sites_per_round}",
            "it chooses for sites that take part in every round; leave one of them out",
            scene.participants.partial,
        ),
        ("a τ that follows the budgets", "τ is chosen on the way", plan.method.facts.controlled),
    ):
        if found:
            raise PlanError(f"--optimise with {name}: {why}")
    unlike = len({terms.budget for terms in scene.terms.values()}) > 1
    full = unlike and all(terms.rate == 1.0 for terms in scene.terms.values())
    of_all = _useful(scene, 1.0, _joint_sigma(scene), rounds) if full else None
    cases = dict[tuple[Budget, float, float], dict[str, Any]]()
    for terms in scene.terms.values():
        key = (terms.budget, terms.rate, terms.event.sigma)
        if key not in cases:
            # With a given σ the budget may end the run early, even in the first round.
            tau = min(plan.method.steps(), terms.steps)
            now = Choice(terms.rate, terms.event.sigma, min(rounds, terms.steps // tau), tau)
            most = now.passes if passes is None else passes
            best_one = _best(scene, terms, rounds, most)
            kept = now
            useful = of_all
            if useful is None:
                useful = _useful(scene, best_one.rate, best_one.sigma, best_one.steps)
            if useful is not None and useful < rounds:
                best_one = _best(scene, terms, useful, most)
            if useful is not None and useful < now.rounds:
                kept = _calibrate(scene, terms, replace(now, rounds=useful), useful)
            if kept.snr > best_one.snr and kept.passes <= most:
                best_one = kept
            cases[key] = {
                "epsilon": terms.budget.epsilon,
                "delta": terms.budget.delta,
                "configured": now.to_dict(),
                "chosen": best_one.to_dict(),
                "gain": best_one.snr / now.snr,
                "useful_rounds": useful,
            }
    return {"cases": list(cases.values())}


def _best(scene: SimulationSetup, terms: Terms, rounds: int, passes: float) -> Choice:
    """Return the best choice, with σ calibrated as for a plan."""
    plan, own = scene.plan, scene.plan.algorithm_settings
    # A noisy size and the openings of rounds are paid for first.
    fixed = terms.history(0, min(terms.openings, rounds))
    alone = plan.privacy.shares_noise or "local_steps" not in type(own).model_fields
    one = best(terms.budget, rounds, passes, fixed, 1 if alone else MOST_STEPS)
    return _calibrate(scene, terms, one, rounds)


def _calibrate(scene: SimulationSetup, terms: Terms, one: Choice, rounds: int) -> Choice:
    """Return a choice with a site's σ; with distributed noise, the largest of any site."""
    plan, whose = scene.plan, [terms]
    if plan.privacy.shares_noise:
        whose = list({one.budget: one for one in scene.terms.values()}.values())
    sigmas = list[float]()
    for each in whose:
        asked = plan.terms_at_unit_noise(each.site, each.size, tuple(scene.terms), rounds)
        steps = asked.steps // plan.method.steps() * one.local_steps
        opening = plan.method.facts.opening if asked.openings else None
        noise = opening.ratios(one.rate, one.local_steps) if opening else {}
        asked = replace(asked, rate=one.rate, steps=steps, opening_sigmas=noise)
        sigmas.append(calibrate(asked).event.sigma)
    return replace(one, sigma=max(sigmas))


def _useful(scene: SimulationSetup, rate: float, sigma: float, steps: int) -> int | None:
    """Return the useful number of rounds at the signal-to-noise ratio of these; None if unknown.

    The ratio is nearly the same for 1 and for 200 rounds, but the accuracy is not.
    """
    summed = all(mechanism_of(terms.mechanism).summed for terms in scene.terms.values())
    if scene.plan.model not in LINEAR_MODELS or not summed:
        return None
    records, shares = sum(scene.sizes.values()), scene.plan.privacy.noise_copies(len(scene.sites))
    return useful_rounds(signal_to_noise(rate, sigma, steps, records, shares, scene.workshop.size))


def _joint_sigma(scene: SimulationSetup) -> float:
    """Return the σ of all sites together, all records in every step, weighted as the plan says."""
    plan, rounds, own = scene.plan, scene.plan.rounds, scene.plan.algorithm_settings
    each = [_calibrate(scene, t, Choice(1.0, 1.0, rounds, 1), rounds) for t in scene.terms.values()]
    sigmas = [one.sigma for one in each]
    if plan.privacy.shares_noise:
        return max(sigmas)
    weighed = getattr(own, "aggregation", "") == "least_noise"
    penalty = getattr(own, "bias_penalty", 0.0) / scene.workshop.size if weighed else None
    return sigma_together(sigmas, list(scene.sizes.values()), plan.privacy.clip, penalty=penalty)
