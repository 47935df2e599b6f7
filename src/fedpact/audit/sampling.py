"""Is every record in a batch with the probability that the terms state, by itself and anew?

Seen through the oracle with hardly any noise left: on a small made-up site the sum of a batch tells
which of a few marked records, at the first, the last and other places, are in it and how many of
the rest, as these are all alike. A batch of always the first records, one of fixed size, one drawn
without replacement and one at another rate all show. What an oracle does only to its real site, or
only with its real noise, does not.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from scipy import stats

from fedpact.audit.noise_level import Tested
from fedpact.audit.target import Target, draw_mislabelled, private_oracle
from fedpact.draws.seeded import SeededDraws
from fedpact.privacy.mechanisms import mechanism_of
from fedpact.privacy.oracle import Records

_RECORDS = 40
_EVENTS = 240
_MARKED = 4
_QUIET = 1e-4  # of the noise
_ERROR = 1e-3  # all tests together, for a right mechanism
_READ = 0.25  # so far from a whole number of records a sum may be


def sampling_tests(target: Target, queries: Mapping[str, tuple[Any, ...]]) -> tuple[Tested, ...]:
    """Return the tests; none where a batch's sum is not that of its records (batch clipping).

    A right mechanism passes them all with probability 0.999, but for the normal approximation to
    the batch's dispersion.
    """
    if not mechanism_of(target.terms.mechanism).summed or "gradient" not in queries:
        return ()
    query = queries["gradient"]
    made = draw_mislabelled(target, 40 * _MARKED)
    records, places, parts = _site(target, made, query)
    if parts is None:
        return ()
    drawn = _drawn(target, records, queries, parts)
    whole = np.round(drawn)
    off = float(np.abs(drawn - whole).max())
    found = [("a batch's sum is that of whole records, each clipped", 1.0 if off < _READ else 0.0)]
    if off < _READ:
        found += _tests(whole, places, target.terms.rate)
    return tuple(Tested(what, p, _ERROR / len(found)) for what, p in found)


def _site(
    target: Target, made: Records, query: tuple[Any, ...]
) -> tuple[Records, list[int], torch.Tensor | None]:
    """Return a site, the places of its marked records, and what each kind adds [1 + marked, d]."""
    parts, chosen = list[torch.Tensor](), list[int]()
    for i in range(len(made.y)):
        part = _sum(target, Records(made.x[i : i + 1], made.y[i : i + 1]), query)
        rows = torch.stack([*parts, part])
        # Kept where it is not nearly a sum of those before.
        if float(torch.linalg.svdvals(rows)[-1]) > 0.2 * target.terms.clip:
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


def _sum(target: Target, records: Records, query: tuple[Any, ...]) -> torch.Tensor:
    """Return what these records add to a gradient's sum, clipped as in a batch of the site [d]."""
    terms = target.terms
    # The clip's allowance for rounding follows from the expected size of a batch.
    whole = replace(terms, rate=1.0, size=terms.batch_size, sigmas=dict.fromkeys(terms.sigmas, 0.0))
    oracle = private_oracle(records, target.kernel, whole, SeededDraws(0))
    batch = next(iter(oracle.batches(1, "gradient")))
    return torch.as_tensor(batch.gradient(*query)).reshape(-1).double() * terms.batch_size


def _drawn(
    target: Target, records: Records, queries: Mapping[str, tuple[Any, ...]], parts: torch.Tensor
) -> np.ndarray:
    """Return how many of each kind of record each batch had [events, kinds], by least squares."""
    sigmas = {channel: _QUIET * sigma for channel, sigma in target.terms.sigmas.items()}
    quiet = replace(target, terms=replace(target.terms, sigmas=sigmas))
    rows = list[torch.Tensor]()
    draws = SeededDraws(target.plan.seed, "audit", "sampling")
    for batch in quiet.oracle(records, draws).batches(_EVENTS, *queries):
        answer = torch.as_tensor(batch.gradient(*queries["gradient"])).reshape(-1).double()
        rows.append(answer * target.terms.batch_size)
    return np.asarray(torch.linalg.lstsq(parts.T, torch.stack(rows).T).solution.T)


def _tests(drawn: np.ndarray, places: list[int], rate: float) -> list[tuple[str, float]]:
    """Return p-values: of each marked record, of the batches' sizes, and of one event's next."""
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
    # Neighbouring batches: pairs of events that share none, so products are independent.
    z = (drawn[:, 1:] - rate) / np.sqrt(rate * (1 - rate))
    products = z[0::2][: len(z) // 2] * z[1::2]
    score = abs(float(products.sum())) / np.sqrt(products.size)
    found.append(("a batch does not follow from the one before", float(2 * stats.norm.sf(score))))
    return found
