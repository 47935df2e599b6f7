"""From noisy sums to figures with intervals: accuracy, rates by class and group, loss, ROC area.

A figure is a ratio θ = a/b of sums, of which ã and b̃ are known, with Gaussian noise of known
variance. As ã - θ b̃ has mean 0 at the true θ, all θ at which it is at most z deviations away are an
interval that covers the true one as often as z says, however small b is (Fieller, Some problems in
interval estimation, J. R. Stat. Soc. B 16, 1954). Cut off at the ends of what θ can be, it covers
as often. It is about the records that were held out: what they say of others is not in it.

The ROC area is a ratio of bilinear forms of two histograms; there the variance is estimated from
the noisy histograms, which makes it too large on average. Scores that share a bin are counted as
all wrong for the lower end, and as all right for the upper one.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Final

import numpy as np

from fedpact.evaluation.settings import EvaluationSettings

# The grid's noise is so much larger at most (draws.grid).
_GRID: Final = 1 + 2.0**-10

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Figure:
    """One figure: its name, as "accuracy"; of whom; its value, NaN if unknown; its interval.

    about: "all", "class 3", "group Female", or "groups" for how far these are apart.
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
    """Sums of one site, or of several added up. noise: the variance of each entry, by channel."""

    of: Mapping[str, Array]
    noise: Mapping[str, float]

    @staticmethod
    def add(each: Sequence[Mapping[str, Sequence[float]]], noise: Mapping[str, float]) -> "Sums":
        """Add up what sites released, at least one. noise: of each, the deviation by channel."""
        of = {c: np.sum([np.asarray(s[c], np.float64) for s in each], axis=0) for c in each[0]}
        return Sums(of, {c: len(each) * (noise[c] * _GRID) ** 2 for c in of})


def estimate_figures(
    sums: Sums,
    settings: EvaluationSettings,
    classes: Sequence[str],
    groups: Sequence[str],
    unit: str = "record",
) -> list[Figure]:
    """Return the figures of these sums, each with its interval at settings.level.

    unit: what they count, records or persons.

    Without noise an interval is its value, but for the ROC area, where it is what a bin hides.
    """
    found = list[Figure]()
    shape = len(groups), len(classes), 2
    if "hits" in sums.of:
        hits, noise = sums.of["hits"].reshape(shape), sums.noise["hits"]
        found += _accuracies(hits, noise, settings.level, classes, f"{unit}s")
        counts = _Counts(hits, noise)
        if "false_positives" in sums.of:
            said, more = (
                sums.of["false_positives"].reshape(shape[:2]),
                sums.noise["false_positives"],
            )
            counts = _Counts(hits, noise, said, more)
            for c, name in enumerate(classes):
                rate = counts.together.false_positives(0, c, settings.level)
                found.append(Figure("false positive rate", f"class {name}", *rate))
        if len(groups) > 1:
            found += _of_groups(counts, settings.level, classes, groups)
    if "roc" in sums.of:
        area = roc_area(sums.of["roc"].reshape(2, -1), sums.noise["roc"], settings.level)
        found.append(Figure("roc area", "all", *area))
    if "loss" in sums.of and "hits" in sums.of:
        found.append(_loss(sums, settings))
    return found


def _accuracies(
    hits: Array, noise: float, level: float, classes: Sequence[str], units: str
) -> list[Figure]:
    """The number of records (or persons), accuracy, and accuracy by class, over all groups."""
    table, size = hits.sum(0), len(hits)
    deviation = _z(level) * math.sqrt(noise * hits.size)
    count = float(hits.sum())
    found = [
        Figure(units, "all", count, max(0.0, count - deviation), max(0.0, count + deviation)),
        Figure("accuracy", "all", *_share(table, noise * size, level)),
    ]
    for name, row in zip(classes, table, strict=True):
        found.append(Figure("accuracy", f"class {name}", *_share(row[None], noise * size, level)))
    return found


@dataclass(frozen=True)
class _Counts:
    """hits [groups, classes, 2]; said: misses by the class that was said [groups, classes].

    noise, of_said: the variance of each entry. said is None where nobody released it.
    """

    hits: Array
    noise: float
    said: Array | None = None
    of_said: float = 0.0

    @property
    def together(self) -> "_Counts":
        """All groups as one."""
        many, said = len(self.hits), None if self.said is None else self.said.sum(0)[None]
        return _Counts(self.hits.sum(0)[None], many * self.noise, said, many * self.of_said)

    @property
    def rates(self) -> list[tuple[str, int]]:
        """The rates of single classes that are known: (kind, class). Of two classes the second."""
        classes = self.hits.shape[1]
        chosen = [1] if classes == 2 else range(classes)
        known = classes == 2 or self.said is not None
        return [(kind, c) for kind in ("true", "false")[: 2 if known else 1] for c in chosen]

    def accuracy(self, group: int, level: float) -> tuple[float, float, float]:
        """Of a group: value and interval."""
        return _share(self.hits[group], self.noise, level)

    def rate(self, kind: str, group: int, c: int, level: float) -> tuple[float, float, float]:
        """The rate of true or false positives of a class in a group: value and interval."""
        if kind == "true":
            return _share(self.hits[group, c : c + 1], self.noise, level)
        return self.false_positives(group, c, level)

    def false_positives(self, group: int, c: int, level: float) -> tuple[float, float, float]:
        """The share of records of other classes that are said to be of this one."""
        others = np.delete(self.hits[group], c, axis=0)
        if self.said is None:
            # Two classes: a miss of the other one is said to be of this one.
            return _share(others[:, ::-1], self.noise, level)
        variance = self.of_said, 0.0, self.noise * others.size
        return estimate_ratio(float(self.said[group, c]), float(others.sum()), variance, level)


def _of_groups(
    counts: _Counts, level: float, classes: Sequence[str], groups: Sequence[str]
) -> list[Figure]:
    """Accuracy and rates of true and false positives by group, and how far groups are apart.

    Of two classes the positives are the second's; of more, each class's against all others. Gaps
    are of intervals that all cover together.
    """
    found, rates = list[Figure](), counts.rates
    each = 1 - (1 - level) / (len(groups) * (len(rates) + 1))
    about = [f"group {group}" for group in groups]
    whole = [counts.accuracy(g, each) for g in range(len(groups))]
    for g, group in enumerate(about):
        found.append(Figure("accuracy", group, *counts.accuracy(g, level)))
    gaps = list[tuple[float, float, float]]()
    for kind, c in rates:
        name = f"{kind} positive rate of class {classes[c]}"
        for g, group in enumerate(about):
            found.append(Figure(name, group, *counts.rate(kind, g, c, level)))
        gaps.append(_gap([counts.rate(kind, g, c, each) for g in range(len(groups))]))
    found.append(Figure("gap of accuracy", "groups", *_gap(whole)))
    # Equalised odds: the model is right, and wrong, as often, whatever the group.
    odds = any(kind == "false" for kind, _ in rates)
    value, low, high = (float(np.max(end)) for end in zip(*gaps, strict=True))
    name = "equalised-odds gap" if odds else "gap of true positive rates"
    found.append(Figure(name, "groups", value, low, high))
    return found


def _gap(intervals: Sequence[tuple[float, float, float]]) -> tuple[float, float, float]:
    """The largest less the least of some rates, (value, low, high) each, and what it lies in."""
    values = [value for value, _, _ in intervals]
    lows, highs = [low for _, low, _ in intervals], [high for _, _, high in intervals]
    value = math.nan if any(map(math.isnan, values)) else max(values) - min(values)
    return value, max(0.0, max(lows) - min(highs)), max(highs) - min(lows)


def _share(table: Array, noise: float, level: float) -> tuple[float, float, float]:
    """The share of hits in rows of (hits, misses) [k, 2], with its interval."""
    hits, misses = (float(n) for n in table.sum(0))
    part = noise * len(table)
    return estimate_ratio(hits, hits + misses, (part, part, 2 * part), level)


def _loss(sums: Sums, settings: EvaluationSettings) -> Figure:
    """The mean of the clipped losses, in [0, bound]."""
    table, bound = sums.of["hits"], settings.loss_bound
    variance = sums.noise["loss"], 0.0, sums.noise["hits"] * table.size
    found = estimate_ratio(float(sums.of["loss"][0]), float(table.sum()), variance, settings.level)
    return Figure("loss", f"clipped to {bound:g}", *(bound * part for part in found))


def roc_area(histogram: Array, noise: float, level: float) -> tuple[float, float, float]:
    """Return the area under the ROC curve of scores by class [2, bins], and its interval.

    histogram: negatives, then positives, by ascending score; noise: the variance of each entry. The
    value counts pairs within one bin as half right.
    """
    bins = histogram.shape[1]
    above = np.tril(np.ones((bins, bins)), -1)
    same = np.eye(bins)
    value, _, _ = _pairs(histogram, above + same / 2, noise, level)
    _, low, _ = _pairs(histogram, above, noise, level)
    _, _, high = _pairs(histogram, above + same, noise, level)
    return value, low, high


def _pairs(
    histogram: Array, right: Array, noise: float, level: float
) -> tuple[float, float, float]:
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
) -> tuple[float, float, float]:
    """Return θ = a/b, cut off at [0, 1], with its interval, of sums with Gaussian noise.

    variance: of a, covariance of a and b, variance of b. All of [0, 1] where the noise leaves
    nothing to say, and NaN as the value where b is not positive.
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


def _z(level: float) -> float:
    return NormalDist().inv_cdf((1 + level) / 2)
