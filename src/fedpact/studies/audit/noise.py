"""Statistical tests of the noise level and of the sampling, on releases only.

They find at once the mistakes that an attack with a single canary takes longest to find.

Sampling is tested on a small made-up site with hardly any noise. A batch's sum then shows which of
a few marked records, at the first, last and other positions, it contains, and how many of the
others, which are all equal. This finds batches of the first records, of fixed size, drawn without
replacement, or at another rate. It does not find what an oracle does only to its real site, or only
with its real noise.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from scipy import stats

from fedpact.common.randomness.seeded import SeededDraws, seeded_generator
from fedpact.privacy.mechanisms import mechanism_of
from fedpact.privacy.oracle import Records
from fedpact.report.audited import AuditRow
from fedpact.studies.audit.target import (
    Target,
    bound_of,
    draw_mislabelled,
    simulate_rounds,
)

_CHANNELS = {"gradient", "loss", "below"}
_SMALL_MODEL = 20_000  # the tests take minutes for larger models
_EVENTS = 200
_REQUESTS = 5
_LONG = 64  # with this many numbers, equal vectors are distinguishable from chance
_SAMPLE = 20_000
# Correct noise is exactly as claimed, so this is how often the check fails for it.
_ERROR = 1e-3
_JOINT = 1 - _ERROR  # the confidence of the upper bounds on all channels' noise together


def row_of_test(what: str, p: float, level: float) -> AuditRow:
    """Return the test of a hypothesis that holds for a correct mechanism.

    level: a correct mechanism has p < level with at most this probability.
    """
    return AuditRow("noise", "p", p, level, None, 1 - level, f"test that {what}")


def pick_tests(tests: Sequence[AuditRow]) -> list[AuditRow]:
    """Return each failed test, and the one that nearly failed."""
    good = sorted((t for t in tests if t.passed), key=lambda t: t.bound / t.claimed)
    nearest = f" (nearest of {len(good)} that pass)" if len(good) > 1 else ""
    failed = [t for t in tests if not t.passed]
    return failed + [replace(t, found=t.found + nearest) for t in good[:1]]


def why_untested(target: Target) -> str:
    """Return why a target's noise and sampling are not tested; "" if they are."""
    if target.w.numel() > _SMALL_MODEL:
        return f"the model has {target.w.numel():,} parameters"
    if target.terms.openings or not set(target.terms.sigmas) <= _CHANNELS:
        return f"only {', '.join(sorted(_CHANNELS))} of batches without an opening can be tested"
    return ""


def check_mechanism(target: Target) -> list[AuditRow]:
    """Return the noise's levels and the tests to show, by the algorithm's second round's queries.

    If the clip changes with the round, all events are the last round's; multipliers are the same.
    """
    target = target.at(target.rounds)
    queries = queries_of(target)
    alone = noise_over(target, queries, target.no_records)
    tests = (*noise_tests(target, queries, alone), *sampling_tests(target, queries))
    return [*noise_levels(target, alone), *pick_tests(tests)]


def queries_of(target: Target) -> dict[str, tuple[Any, ...]]:
    """Return the queries to the first batch of the algorithm's second round, by channel."""
    *_, asked = simulate_rounds(target, target.records, min(2, target.rounds), "questions")
    return {a.channel: a.query for a in asked if a.batch == asked[0].batch}


ChannelNoise = Mapping[str, torch.Tensor]
"""Each channel's noise in units of what the terms state, [requests, events, numbers]."""


def noise_levels(target: Target, alone: ChannelNoise) -> tuple[AuditRow, ...]:
    """Return the level of every channel; all bounds hold jointly with probability 0.999.

    alone: of releases of the site without any records.

    The sum of squares over σ² is chi-square with as many degrees of freedom as numbers. Squares are
    about the mean of all events, with one degree less for each coordinate, as a constant is no
    noise.
    """
    levels = list[AuditRow]()
    for channel, noise in alone.items():
        flat = noise.flatten(0, 1)
        squares = float((flat - flat.mean(0)).square().sum())
        numbers = (len(flat) - 1) * flat.shape[1]
        claimed = target.terms.multipliers[channel]
        least = float(stats.chi2.ppf(_ERROR / len(alone), numbers))
        at_most = claimed * (squares / least) ** 0.5
        measured = claimed * (squares / numbers) ** 0.5
        at_best = claimed * (numbers / least) ** 0.5
        told = (
            f"noise of {channel}, measured {measured:.4f}, from releases of a site without records"
        )
        levels.append(AuditRow("noise", "σ", at_most, claimed, None, _JOINT, told, at_best))
    return tuple(levels)


def noise_tests(
    target: Target, queries: Mapping[str, tuple[Any, ...]], alone: ChannelNoise
) -> tuple[AuditRow, ...]:
    """Test that every channel's noise is N(0, 1) in its own units, and drawn anew each time.

    On a site without records, and on all records in every batch. A correct mechanism passes all
    tests jointly with probability 0.999. alone: as in `noise_levels`.
    """
    found = list[tuple[str, float]]()
    for noises, where in (
        (alone, "no records"),
        (noise_over(target, queries, target.records), "all records"),
    ):
        for channel, noise in noises.items():
            found += [(f"{channel}, {where}: {what}", p) for what, p in _tests(noise)]
    # Bonferroni: each test has its share of the error.
    return tuple(row_of_test(what, p, _ERROR / len(found)) for what, p in found)


def _tests(noise: torch.Tensor) -> Iterator[tuple[str, float]]:
    """Yield p-values, each exact or too large, of noise [requests, events, numbers]."""
    numbers = noise.shape[2]
    flat = noise.flatten(0, 1)
    squares = flat.square()
    for what, sums, size in (
        ("each coordinate's noise is large enough", squares.sum(0), len(flat)),
        ("each event's noise is large enough", squares.sum(1), numbers),
    ):
        p = float(stats.chi2.cdf(float(sums.min()), size))
        yield what, min(1.0, p * len(sums))
    # Bounded noise does not hide larger records. P[all |z| <= a] = (2 Φ(a) - 1)^n.
    within = 1 - 2 * float(stats.norm.sf(float(flat.abs().max())))
    yield "its largest values are large", within ** flat.numel()
    some = flat.flatten()[:: max(1, flat.numel() // _SAMPLE)].numpy()
    yield "it is normal", float(stats.kstest(some, "norm", method="asymp").pvalue)
    # Given one of two independent vectors, their product over its length is N(0, 1).
    yield "requests are independent", _together(noise.flatten(1))
    if numbers >= _LONG:
        yield "events are independent", _together(flat)
    for lag in (1, 2):
        products = (noise[:, lag:] * noise[:, :-lag])[:, :: 2 * lag].flatten()
        # No event is in two products, so given one side their sum is normal.
        length = float(noise[:, :-lag][:, :: 2 * lag].norm())
        z = abs(float(products.sum())) / max(length, 1e-300)
        yield f"events {lag} apart are independent", float(2 * stats.norm.sf(z))


def _together(vectors: torch.Tensor) -> float:
    """Return a p-value for the two most correlated of the vectors [n, d]."""
    lengths = vectors.norm(dim=1).clamp_min(1e-300)
    z = (vectors @ vectors.T).abs() / lengths[:, None]
    z.fill_diagonal_(0)
    n = len(vectors)
    return min(1.0, n * (n - 1) * float(stats.norm.sf(float(z.max()))) * 2)


def noise_over(
    target: Target, queries: Mapping[str, tuple[Any, ...]], records: Records
) -> ChannelNoise:
    """Return each channel's noise over records, at rate 1, where the sum is known."""
    whole = replace(target, terms=replace(target.terms, rate=1.0))
    answers = {channel: list[torch.Tensor]() for channel in queries}
    for request in range(_REQUESTS):
        draws = SeededDraws(target.plan.seed, "audit", "noise", len(records.y), request)
        for batch in whole.oracle(records, draws).batches(_EVENTS // _REQUESTS, *queries):
            for channel, query in queries.items():
                answer = torch.as_tensor(getattr(batch, channel)(*query)).reshape(-1).double()
                answers[channel].append(answer)
    made = dict[str, torch.Tensor]()
    for channel, query in queries.items():
        stacked = torch.stack(answers[channel])
        if len(records.y):
            # Differences of neighbours, since the sum is known only up to rounding.
            centred = (stacked[0::2] - stacked[1::2]) / 2**0.5
        else:
            # Even without records a count's sum is not 0, as 1/2 is added to a share.
            centred = stacked - whole.answer(records, channel, query).double()
        # As claimed; see privacy.oracle.
        bound = bound_of(channel, query, whole.terms)
        deviation = whole.terms.sigmas[channel] * bound / whole.terms.batch_size
        if channel == "gradient":
            deviation = whole.terms.noise_variance**0.5
        if whole.terms.units:
            # Integers on a coarse grid are not normal. With uniform noise of the grid's width added
            # they nearly are; rounding and this noise add to the variance. Differences, divided
            # by sqrt(2), have a finer grid.
            spread = seeded_generator(target.plan.seed, "audit", "spread", channel)
            unit = deviation / whole.terms.units
            width = unit / 2**0.5 if len(records.y) else unit
            centred += width * (
                torch.rand(centred.shape, generator=spread, dtype=centred.dtype) - 0.5
            )
            deviation = (deviation**2 + (unit**2 + width**2) / 12) ** 0.5
        centred /= deviation
        made[channel] = centred.unflatten(0, (_REQUESTS, -1))
    return made


_RECORDS = 40
_SAMPLING_EVENTS = 240
_MARKED = 4
_QUIET = 1e-4  # the factor of the noise
_READ = 0.25  # the largest distance of a sum from a whole number of records


def sampling_tests(target: Target, queries: Mapping[str, tuple[Any, ...]]) -> tuple[AuditRow, ...]:
    """Return the tests; none if a batch's sum is not that of its records (batch clipping).

    Where no records of a made-up site can be told apart, one row says so.
    A correct mechanism passes all with probability 0.999, up to the normal approximation in the
    test of the batches' variance.
    """
    if not mechanism_of(target.terms.mechanism).summed or "gradient" not in queries:
        return ()
    query = queries["gradient"]
    made = draw_mislabelled(target, 40 * _MARKED)
    records, places, parts = _site(target, made, query)
    if parts is None:
        told = "sampling is not tested: fewer than three records of this model have sums apart"
        return (row_of_test(told, 1.0, _ERROR),)
    drawn = _count_drawn(target, records, queries, parts)
    whole = np.round(drawn)
    off = float(np.abs(drawn - whole).max())
    found = [("a batch's sum is that of whole records, each clipped", 1.0 if off < _READ else 0.0)]
    if off < _READ:
        found += _sampling_tests(whole, places, target.terms.rate)
    return tuple(row_of_test(what, p, _ERROR / len(found)) for what, p in found)


def _site(
    target: Target, made: Records, query: tuple[Any, ...]
) -> tuple[Records, list[int], torch.Tensor | None]:
    """Return a site, the positions of its marked records, and each kind's sum [1 + marked, d]."""
    parts, chosen, size = list[torch.Tensor](), list[int](), target.terms.batch_size
    for i in range(len(made.y)):
        one = Records(made.x[i : i + 1], made.y[i : i + 1])
        # Clipped as in a batch of the site.
        part = target.answer(one, "gradient", query, size=size).double() * size
        rows = torch.stack([*parts, part])
        # Kept unless it is nearly a linear combination of those before. Under a large clip none is
        # as long as that.
        longest = min(float(rows.norm(dim=1).max()), target.terms.clip)
        if float(torch.linalg.svdvals(rows)[-1]) > 0.2 * longest > 0:
            parts.append(part)
            chosen.append(i)
        if len(parts) == 1 + _MARKED:
            break
    if len(parts) < 3:
        return made, [], None
    places = [0, _RECORDS - 1, _RECORDS // 2, _RECORDS // 3][: len(parts) - 1]
    order = [chosen[0]] * _RECORDS
    for place, record in zip(places, chosen[1:], strict=False):
        order[place] = record
    return Records(made.x[order], made.y[order]), places, torch.stack(parts)


def _count_drawn(
    target: Target, records: Records, queries: Mapping[str, tuple[Any, ...]], parts: torch.Tensor
) -> np.ndarray:
    """Return the number of records of each kind in each batch [events, kinds], by least squares."""
    quiet_by = _QUIET * min(1.0, float(parts.norm(dim=1).max()) / target.terms.clip)
    sigmas = {channel: quiet_by * sigma for channel, sigma in target.terms.sigmas.items()}
    quiet = replace(target, terms=replace(target.terms, sigmas=sigmas))
    rows = list[torch.Tensor]()
    draws = SeededDraws(target.plan.seed, "audit", "sampling")
    for batch in quiet.oracle(records, draws).batches(_SAMPLING_EVENTS, *queries):
        answer = torch.as_tensor(batch.gradient(*queries["gradient"])).reshape(-1).double()
        rows.append(answer * target.terms.batch_size)
    return np.asarray(torch.linalg.lstsq(parts.T, torch.stack(rows).T).solution.T)


def _sampling_tests(drawn: np.ndarray, places: list[int], rate: float) -> list[tuple[str, float]]:
    """Return p-values: of each marked record, of the batches' sizes, and of successive events."""
    found = list[tuple[str, float]]()
    sizes = drawn.sum(1)
    if rate == 1:
        return [("every record is in every batch", float((sizes == _RECORDS).all()))]
    for place, column in zip(places, drawn.T[1:], strict=True):
        p = stats.binomtest(int(column.clip(0, 1).sum()), len(column), rate).pvalue
        found.append((f"record {place + 1} of {_RECORDS} is sampled at its rate", float(p)))
    p = stats.binomtest(int(sizes.sum()), _RECORDS * len(sizes), rate).pvalue
    found.append(("batches have the size that their rate gives", float(p)))
    spread = float(((sizes - _RECORDS * rate) ** 2).sum() / (_RECORDS * rate * (1 - rate)))
    tail = min(stats.chi2.cdf(spread, len(sizes)), stats.chi2.sf(spread, len(sizes)))
    found.append(("batches vary in size as independent records do", min(1.0, float(2 * tail))))
    # Disjoint pairs of neighbouring batches, so that products are independent.
    z = (drawn[:, 1:] - rate) / np.sqrt(rate * (1 - rate))
    products = z[0::2][: len(z) // 2] * z[1::2]
    score = abs(float(products.sum())) / np.sqrt(products.size)
    found.append(("successive batches are independent", float(2 * stats.norm.sf(score))))
    return found
