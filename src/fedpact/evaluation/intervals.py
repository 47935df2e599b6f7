"""Figures with intervals from noisy sums, early stopping by them, and how they are stated.

A figure is a ratio θ = a/b of two sums that are known with Gaussian noise of known variance: ã and
b̃. As ã - θ b̃ has mean 0 at the true θ, all θ at which it is within z deviations of 0 form an
interval with exact coverage, however small b is (Fieller, Some problems in interval estimation,
J. R. Stat. Soc. B 16, 1954). Clipping it to the range of θ keeps the coverage. It is about the
held-out records only, not about the population.

The ROC area is a ratio of bilinear forms of two histograms; its variance is estimated from the
noisy histograms, which makes it too large on average. For the lower end, scores in the same bin
count as all wrong, for the upper end as all right.

Stopping a run by released numbers stays within the reservation (post-processing). The ε of what was
charged so far is then not a guarantee, as the length of the run depended on releases. Exact
accuracies on protected records must not stop a private run: it is stopped by what its sites
release, or by a public test set.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import NormalDist
from typing import Any, Final

import numpy as np

from fedpact.common.errors import PlanError
from fedpact.common.records import RoundRecord, SumsBySite
from fedpact.evaluation.held_out import EvaluationSettings, SumsForm
from fedpact.privacy.accounting.accountant import epsilon

# The factor by which noise on a grid may be larger (common.randomness.secure).
_GRID: Final = 1 + 2.0**-10

_Array = np.ndarray[Any, np.dtype[np.float64]]
_Interval = tuple[float, float, float]
"""A value, and the ends of its interval."""
_Ratio = tuple[float, float, tuple[float, float, float]]
"""Of a ratio a/b with noise: a, b, and the variances as estimate_ratio takes them."""
_Released = Sequence[Mapping[str, Sequence[float]]]
"""Each site's sums, flat, by channel."""


@dataclass(frozen=True)
class Figure:
    """One figure: its name, such as "accuracy"; its value, NaN if unknown; its interval.

    about: "all", "class 3", "group Female", or "groups" for the gap between groups.
    """

    name: str
    about: str
    value: float
    low: float
    high: float

    @property
    def of_part(self) -> bool:
        """Whether it is of one class or one group."""
        return self.about.startswith(("class ", "group "))


@dataclass(frozen=True)
class Sums:
    """Sums of one or more sites. noise: the variance of each entry, by channel."""

    of: Mapping[str, _Array]
    noise: Mapping[str, float]

    @staticmethod
    def add(each: _Released, noise: Mapping[str, float]) -> "Sums":
        """Add the releases of at least one site. noise: the deviation in each, by channel."""
        of = {c: np.sum([np.asarray(s[c], np.float64) for s in each], axis=0) for c in each[0]}
        return Sums(of, {c: len(each) * (noise[c] * _GRID) ** 2 for c in of})


def estimate_figures(sums: Sums, form: SumsForm) -> list[Figure]:
    """Return the figures of these sums, each with its interval at the settings' level.

    Without noise an interval is just the value, except for the ROC area, whose bins hide the order.
    """
    found, level = list[Figure](), form.settings.level
    if "hits" in sums.of:
        hits = sums.of["hits"].reshape(len(form.groups), len(form.classes), 2)
        said = sums.of.get("false_positives")
        said = None if said is None else said.reshape(hits.shape[:2])
        found += _accuracies(hits, sums.noise["hits"], form)
        if said is not None:
            together = _rates(hits.sum(0), said.sum(0), sums.noise, form.classes, len(hits))
            for name, ratio in together.items():
                if name.startswith("false"):
                    rate, _, about = name.partition(" of ")
                    found.append(Figure(rate, about, *estimate_ratio(*ratio, level)))
        if len(form.groups) > 1:
            each = zip(hits, hits if said is None else said, strict=True)
            groups = [
                _rates(own, None if said is None else wrong, sums.noise, form.classes)
                for own, wrong in each
            ]
            found += _of_groups(groups, form)
    if "roc" in sums.of:
        area = roc_area(sums.of["roc"].reshape(2, -1), sums.noise["roc"], level)
        found.append(Figure("roc area", "all", *area))
    if "loss" in sums.of and "hits" in sums.of:
        found.append(_loss(sums, form.settings))
    return found


def _accuracies(hits: _Array, noise: float, form: SumsForm) -> list[Figure]:
    """The number of records (or persons), accuracy, and accuracy by class, over all groups."""
    level, each, count = form.settings.level, noise * len(hits), float(hits.sum())
    deviation = _z(level) * math.sqrt(noise * hits.size)
    ends = max(0.0, count - deviation), max(0.0, count + deviation)
    found = [
        Figure(f"{form.unit}s", "all", count, *ends),
        Figure("accuracy", "all", *estimate_ratio(*_ratio_of(hits.sum(0), each), level)),
    ]
    for name, row in zip(form.classes, hits.sum(0), strict=True):
        rate = estimate_ratio(*_ratio_of(row[None], each), level)
        found.append(Figure("accuracy", f"class {name}", *rate))
    return found


def _rates(
    hits: _Array,
    said: _Array | None,
    noise: Mapping[str, float],
    classes: Sequence[str],
    groups: int = 1,
) -> dict[str, _Ratio]:
    """Return accuracy and the known rates of true and false positives, of records added up.

    hits [classes, 2]; said [classes]: misses by predicted class, None if not released. noise: the
    variance of an entry of one group, by channel. groups: how many were added up. With two classes,
    the second is positive; with more, each class against all others.
    """
    each = groups * noise["hits"]
    chosen = [1] if len(classes) == 2 else range(len(classes))
    found = {"accuracy": _ratio_of(hits, each)}
    for c in chosen:
        found[f"true positive rate of class {classes[c]}"] = _ratio_of(hits[c : c + 1], each)
    for c in chosen:
        name, others = f"false positive rate of class {classes[c]}", np.delete(hits, c, axis=0)
        if said is not None:
            # The share of records of other classes that are predicted as this one.
            variance = groups * noise["false_positives"], 0.0, each * others.size
            found[name] = float(said[c]), float(others.sum()), variance
        elif len(classes) == 2:
            # A miss of the other class is predicted as this one.
            found[name] = _ratio_of(others[:, ::-1], each)
    return found


def _of_groups(groups: Sequence[Mapping[str, _Ratio]], form: SumsForm) -> list[Figure]:
    """Return every rate by group, and the gaps between groups.

    Gaps are computed from intervals with joint coverage.
    """
    level, names = form.settings.level, list(groups[0])
    joint = 1 - (1 - level) / (len(groups) * len(names))
    found, gaps = list[Figure](), list[_Interval]()
    for name in names:
        for group, rates in zip(form.groups, groups, strict=True):
            found.append(Figure(name, f"group {group}", *estimate_ratio(*rates[name], level)))
        gaps.append(_gap([estimate_ratio(*rates[name], joint) for rates in groups]))
    found.append(Figure("gap of accuracy", "groups", *gaps[0]))
    # Equalised odds: equal rates of true and of false positives in every group.
    odds = any(name.startswith("false") for name in names)
    value, low, high = (float(np.max(end)) for end in zip(*gaps[1:], strict=True))
    name = "equalised-odds gap" if odds else "gap of true positive rates"
    return [*found, Figure(name, "groups", value, low, high)]


def _gap(intervals: Sequence[_Interval]) -> _Interval:
    """The largest minus the smallest of some rates, with its interval."""
    values, lows, highs = zip(*intervals, strict=True)
    value = math.nan if any(map(math.isnan, values)) else max(values) - min(values)
    return value, max(0.0, max(lows) - min(highs)), max(highs) - min(lows)


def _ratio_of(table: _Array, noise: float) -> _Ratio:
    """The share of hits in rows of (hits, misses) [k, 2], for estimate_ratio."""
    hits, misses = (float(n) for n in table.sum(0))
    part = noise * len(table)
    return hits, hits + misses, (part, part, 2 * part)


def _loss(sums: Sums, settings: EvaluationSettings) -> Figure:
    """The mean of the clipped losses, in [0, bound]."""
    table, bound = sums.of["hits"], settings.loss_bound
    variance = sums.noise["loss"], 0.0, sums.noise["hits"] * table.size
    found = estimate_ratio(float(sums.of["loss"][0]), float(table.sum()), variance, settings.level)
    return Figure("loss", f"clipped to {bound:g}", *(bound * part for part in found))


def roc_area(histogram: _Array, noise: float, level: float) -> _Interval:
    """Return the area under the ROC curve from scores by class [2, bins], and its interval.

    histogram: negatives, then positives, by ascending score; noise: the variance of each entry.
    Pairs within one bin count as half right.
    """
    bins = histogram.shape[1]
    above, same = np.tril(np.ones((bins, bins)), -1), np.eye(bins)
    ways = above + same / 2, above, above + same
    (value, *_), (_, low, _), (*_, high) = (_pairs(histogram, w, noise, level) for w in ways)
    return value, low, high


def _pairs(histogram: _Array, right: _Array, noise: float, level: float) -> _Interval:
    """The share of pairs (positive in bin b, negative in b') that count as right[b, b']."""
    negative, positive = histogram
    of_positives, of_negatives = right @ negative, right.T @ positive
    a, n, p = float(positive @ of_positives), float(negative.sum()), float(positive.sum())
    variance = (
        noise * float(of_positives @ of_positives + of_negatives @ of_negatives),
        noise * float(n * of_positives.sum() + p * of_negatives.sum()),
        noise * len(negative) * (n * n + p * p),
    )
    return estimate_ratio(a, n * p, variance, level)


def estimate_ratio(
    a: float, b: float, variance: tuple[float, float, float], level: float
) -> _Interval:
    """Return θ = a/b with its interval, both clipped to [0, 1], from sums with Gaussian noise.

    variance: of a, covariance of a and b, variance of b. The interval is [0, 1] if the noise
    dominates, and the value NaN if b is not positive.
    """
    value = min(max(a / b, 0.0), 1.0) if b > 0 else math.nan
    z2 = _z(level) ** 2
    v_a, v_ab, v_b = variance
    # θ² square - 2 θ middle + rest <= 0
    square, middle, rest = b * b - z2 * v_b, a * b - z2 * v_ab, a * a - z2 * v_a
    if not square > 0:
        return value, 0.0, 1.0
    spread = math.sqrt(max(0.0, middle * middle - square * rest))
    low, high = (middle - spread) / square, (middle + spread) / square
    if high < 0 or low > 1:
        return value, 0.0, 1.0
    return value, max(low, 0.0), min(high, 1.0)


def wilson_interval(share: float, count: int, level: float = 0.95) -> tuple[float, float]:
    """Return an interval for the probability behind a share of `count` independent records.

    share: in [0, 1]. count: >= 1. It is Wilson's (Journal of the American Statistical Association
    22, 1927): all θ with (share - θ)² <= z² θ (1 - θ) / count.

    >>> [round(end, 3) for end in wilson_interval(1.0, 10)]
    [0.722, 1.0]
    """
    z2 = _z(level) ** 2 / count
    middle = share + z2 / 2
    half = math.sqrt(z2 * (share * (1 - share) + z2 / 4))
    return max(0.0, (middle - half) / (1 + z2)), min(1.0, (middle + half) / (1 + z2))


def _z(level: float) -> float:
    return NormalDist().inv_cdf((1 + level) / 2)


def outcome(
    records: Sequence[RoundRecord], form: SumsForm, *, whole: bool = False
) -> dict[str, Any] | None:
    """Return the last evaluation as plain data, None if the run released none.

    figures: of all sites together; sites: of each. by_round: of all sites together after each
    evaluated round, without single classes and groups. In a simulation each figure also has its
    value without noise, `exact`. commonest: the accuracy of always predicting the most frequent
    class, by the released counts. epsilon_spent: site -> ε of what it has released, at delta. It
    is that of the reservation for a site that missed an evaluation, and for all if `whole`: if the
    number of evaluations may have followed from releases.
    """
    done, once = [record for record in records if record.evaluation], form.once
    if once is None or not done:
        return None
    spent = dict[str, float]()
    # An answer that did not arrive, or was rejected, may have been charged.
    missed = {site for record in records for site in record.unevaluated}
    for site in sorted(missed.union(*(record.evaluation for record in done))):
        counted = sum(site in record.evaluation for record in done)
        count = once.times if whole or site in missed else counted
        spent[site] = epsilon({once.event: count}, once.budget.delta, once.accountant)
    released = [(record.round, record.evaluation, record.held_out) for record in done]
    return {
        "level": form.settings.level,
        "epsilon": once.budget.epsilon,
        "delta": once.budget.delta,
        "epsilon_spent": spent,
        "unevaluated": dict(done[-1].unevaluated),
        **_over_rounds(form, form.noise, released),
    }


def released_so_far(
    records: Sequence[RoundRecord], of: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """Return `outcome` of a running run, without costs and exact values.

    of: `evaluation` of the run's privacy statement, None if nothing is released.
    """
    done = [(record.round, record.evaluation, {}) for record in records if record.evaluation]
    if not (of and done):
        return None
    # `groups` are names there, and not the column that has them.
    known = {name: of[name] for name in EvaluationSettings.model_fields if name != "groups"}
    settings = EvaluationSettings.model_validate(known)
    form = SumsForm(settings, tuple(of["classes"]), tuple(of["groups"]), of["unit"])
    return _over_rounds(form, dict.fromkeys(form.shapes, float(of["sigma"])), done)


def exact_outcome(records: Sequence[RoundRecord], form: SumsForm) -> dict[str, Any] | None:
    """Return the exact `outcome` of a plain run, None if nothing is held out. Simulator only."""
    done = [(record.round, record.held_out, {}) for record in records if record.held_out]
    return _over_rounds(form, form.noise, done) if done else None


def _over_rounds(
    form: SumsForm,
    noise: Mapping[str, float],
    done: Sequence[tuple[int, SumsBySite, SumsBySite]],
) -> dict[str, Any]:
    """Return the figures of the last round and by round. done: (round, sums, exact sums)."""

    def figures(sums: SumsBySite, exact: SumsBySite) -> list[dict[str, Any]]:
        return _beside(form, noise, [*sums.values()], [exact[s] for s in sums if s in exact])

    whole = [(at, figures(sums, exact)) for at, sums, exact in done]
    number, sums, exact = done[-1]
    return {
        "round": number,
        "unit": form.unit,
        "figures": whole[-1][1],
        "by_round": [
            {"round": at, "figures": [f for f in found if not f["of_part"]]} for at, found in whole
        ],
        "sites": {site: figures({site: own}, exact) for site, own in sums.items()},
        "commonest": _commonest(form, sums),
    }


def _commonest(form: SumsForm, sums: SumsBySite) -> dict[str, Any] | None:
    """Return the most frequent class of held-out records and its share; None without counts."""
    if "hits" not in form.shapes:
        return None
    table = np.sum([np.asarray(site["hits"], np.float64) for site in sums.values()], axis=0)
    counts = table.reshape(form.shapes["hits"]).sum(axis=(0, 2)).clip(min=0)
    most = int(counts.argmax())
    if not counts[most] > 0:
        return None
    return {"name": form.classes[most], "accuracy": float(counts[most] / counts.sum())}


def released_accuracy(record: RoundRecord, form: SumsForm) -> float | None:
    """Return the released accuracy of all sites together, None if there is none."""
    if not record.evaluation:
        return None
    found = estimate_figures(Sums.add([*record.evaluation.values()], form.noise), form)
    values = (_number(f.value) for f in found if (f.name, f.about) == ("accuracy", "all"))
    return next(values, None)


def exact_figures(sums: Mapping[str, Sequence[float]], form: SumsForm) -> list[Figure]:
    """Return the figures of sums without noise, as a site's owner sees them."""
    return estimate_figures(Sums.add([sums], dict.fromkeys(form.shapes, 0.0)), form)


def _beside(
    form: SumsForm, noise: Mapping[str, float], released: _Released, exact: _Released
) -> list[dict[str, Any]]:
    """Return figures as plain data, with those of the exact sums, if there are any, beside them."""
    found = [
        {**asdict(figure), "value": _number(figure.value), "of_part": figure.of_part}
        for figure in estimate_figures(Sums.add(released, noise), form)
    ]
    if exact:
        known = estimate_figures(Sums.add(exact, dict.fromkeys(noise, 0.0)), form)
        for figure, without in zip(found, known, strict=True):
            figure["exact"] = _number(without.value)
    return found


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


@dataclass
class Early:
    """Early stopping by released accuracies.

    accuracy, patience: see common.run_settings.Limits. form: of the sites' releases about
    held-out records; if they release nothing, the public accuracy in a round's record counts.
    """

    accuracy: float | None = None
    patience: int | None = None
    form: SumsForm | None = None
    seen: list[float] = field(default_factory=list[float])

    def see(self, records: Sequence[RoundRecord]) -> None:
        """Add rounds, in order."""
        for record in records:
            found = record.accuracy
            if self.form is not None and self.form.once is not None:
                found = released_accuracy(record, self.form)
            if found is not None and record.round:
                self.seen.append(found)

    @property
    def status(self) -> str:
        """Why the run ends: "accuracy" or "patience"; "" if it continues."""
        wait, seen = self.patience, self.seen
        if self.accuracy is not None and seen and seen[-1] >= self.accuracy:
            return "accuracy"
        if wait is not None and len(seen) > wait and max(seen[-wait:]) <= max(seen[:-wait]):
            return "patience"
        return ""


def check_public(early: bool, private: bool, form: SumsForm, *, test: bool, held: bool) -> None:
    """Raise PlanError if early stopping needs an accuracy that is not available.

    early: whether an accuracy may end the run. test: whether the shared model is evaluated on a
    public test set. held: whether there are held-out records, for the accuracy of a plain run.
    """
    if not early or test or (private and form.once is not None):
        return
    if not private and held:
        return
    if not private:
        how = "set partition.held_out = 0.1"
    elif form.share:
        how = 'set evaluation.releases = ["hits"], and evaluation.every = 1'
    else:
        how = "declare [evaluation] share = 0.2, every = 1"
    raise PlanError(
        f"budget.accuracy or budget.patience in a {'private' if private else 'plain'} run without "
        f"a public test set: no accuracy is {'released' if private else 'known'} that could stop "
        f"the run; {how}"
    )
