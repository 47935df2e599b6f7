"""Robust aggregation, and leaving out replies that make the update fail.

A reply is left out if the update fails on it alone. If it fails only on several together, the reply
with the largest entry is removed until the update succeeds. Under secure aggregation there are no
single replies, so either all are left out or none.

    median    of each coordinate, over the sites' replies
    trimmed   of each coordinate, the mean without the f smallest and the f largest values
    krum      the reply with the least sum of squared distances to its n - f - 2 nearest others; of
              several, the first by site name

median, trimmed: Yin, Chen, Kannan, Bartlett, arXiv 1803.01498. krum: Blanchard, El Mhamdi,
Guerraoui, Stainer, NeurIPS 2017. Of the n sites that a round asks, f may lie: median and trimmed
need n > 2f, krum n >= 2f + 3, and a plan with fewer sites is refused. A round with fewer replies
trims fewer, so that one or two values are left, and krum uses at least one neighbour.

Effects. Privacy is unchanged: it is post-processing. The objective is the unweighted sum of F_i,
as every reply counts equally; with heterogeneous sites or noise the result lies somewhere between
the sites, as a site with rare records is an outlier too. Noise: a median of n Gaussian releases has
up to π/2 times the mean's variance, krum n times. Numbers in a reply are treated like coordinates.
[control] and [fairness] read single replies and cannot be combined with it; see combine.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch
from pydantic import BaseModel, Field
from torch import Tensor

from fedpact.algorithms.wrappers.base import Method, MethodWrapper
from fedpact.common.configuration import FROZEN
from fedpact.common.errors import InputError, PlanError
from fedpact.common.messages import Refusal, Reply, State, encoded_length
from fedpact.common.params import all_finite


def fold_replies(
    method: Method, state: State, replies: Sequence[Reply]
) -> tuple[State, dict[str, str]]:
    """Return the next state, and why replies were left out, by site.

    Those are left out with which the update raises or is not finite. If no reply can be used, the
    outcome is that with all replies: a state that is not finite, or the exception.
    """
    after, why = _try(method, state, replies)
    if after is not None:
        return after, {}
    good, blamed = list[Reply](), dict[str, str]()
    for reply in replies:
        alone, why = _try(method, state, [reply])
        if alone is None:
            blamed[reply.site] = why
        else:
            good.append(reply)
    while good:
        after, why = _try(method, state, good)
        if after is not None:
            return after, blamed
        worst = max(good, key=_largest)
        good.remove(worst)
        blamed[worst.site] = why
    return method.update(state, iter(replies)), {}


class Tally:
    """Counts answers on their way to `update`, and removes refusals.

    late: returns, from the lengths of answers by site and the sites that replied, which miss a
    simulated deadline. lengths: of the answers, by site. answered: the sites that did not refuse.
    """

    def __init__(
        self, late: Callable[[Mapping[str, int], Collection[str]], frozenset[str]] | None = None
    ) -> None:
        self._late = late
        self.lengths: dict[str, int] = {}
        self.answered: set[str] = set()
        self.replied: list[str] = []
        self.refused: dict[str, str] = {}

    def through(self, answers: Iterator[Reply | Refusal]) -> Iterator[Reply]:
        """Yield the replies among the answers."""
        late, sized = frozenset[str](), ((answer, encoded_length(answer)) for answer in answers)
        if self._late is not None:  # known only when all have answered
            held = [*sized]
            replied = {one.site for one, _ in held if not isinstance(one, Refusal)}
            late = self._late({one.site: length for one, length in held}, replied)
            sized = iter(held)
        for answer, length in sized:
            self.lengths[answer.site] = length
            if isinstance(answer, Refusal):
                self.refused[answer.site] = answer.code
                continue
            self.answered.add(answer.site)
            if answer.site in late:
                self.refused[answer.site] = "late"
            else:
                self.replied.append(answer.site)
                yield answer

    @property
    def bytes(self) -> int:
        """The length of all answers together."""
        return sum(self.lengths.values())

    def reject(self, site: str) -> None:
        """Count a reply as a refusal, after it was counted as taken."""
        self.replied.remove(site)
        self.refused[site] = "rejected: update"


def _try(method: Method, state: State, replies: Sequence[Reply]) -> tuple[State | None, str]:
    """Return the next state; or None and the reason."""
    try:
        after = method.update(state, iter(replies))
    except Exception as error:  # an algorithm may raise anything at a malicious reply
        return None, f"{type(error).__name__}: {error}"
    finite = all(map(all_finite, after.vectors.values()))
    if finite and all(map(math.isfinite, after.numbers.values())):
        return after, ""
    return None, "the state is not finite any more"


def _largest(reply: Reply) -> float:
    """The largest entry of a reply, in absolute value; NaN counts as infinite."""
    parts = [float(v.double().abs().max()) for v in reply.vectors.values() if v.numel()]
    parts += [abs(number) for number in reply.numbers.values()]
    return max((math.inf if math.isnan(part) else part for part in parts), default=0.0)


class RobustSettings(BaseModel):
    """An aggregate that a few malicious sites cannot control, instead of the weighted mean."""

    model_config = FROZEN
    rule: Literal["mean", "median", "trimmed", "krum"] = "mean"
    """"mean" is the algorithm's own; "median" of each coordinate; "trimmed", the mean without
    the f smallest and f largest; "krum", the one reply that is nearest to its neighbours."""
    liars: int = Field(default=1, ge=0)
    """f, the number of sites asked in a round that may be malicious: fewer than half of them;
    krum needs at least 2f + 3 sites."""

    def check_round(self, sites: int) -> None:
        """Raise PlanError: a round asks so few sites that the liars could decide it."""
        more = 3 if self.rule == "krum" else 1
        if self.rule != "mean" and sites < 2 * self.liars + more:
            raise PlanError(
                f"[robust] rule = {self.rule!r}, liars = {self.liars} with {sites} sites in a "
                f"round: expected at least {2 * self.liars + more}, 2 liars + {more}, as all "
                "liars may be in one round and would then decide it; ask more sites "
                "(sites_per_round, sites), or lower robust.liars"
            )


class Robust(MethodWrapper):
    """A method whose aggregate of replies is robust: the innermost wrapper, and not "mean"."""

    def __init__(self, inner: Method, robust: RobustSettings) -> None:
        super().__init__(inner)
        self._rule, self._liars = robust.rule, robust.liars

    def update(self, state: State, replies: Iterable[Reply]) -> State:
        """Return the server's next state, folding the replies. All replies are held at once. Raises
        InputError: none."""
        return self.inner.update(state, [self._one(list(replies))])

    def _one(self, replies: list[Reply]) -> Reply:
        """Return one reply with the aggregate, and weight 1."""
        if not replies:
            raise InputError("replies is empty: expected the reply of at least one site")
        if self._rule == "krum":
            return replace(replies[_nearest(replies, self._liars)], weight=1.0)
        first, n = replies[0], len(replies)
        # The median leaves one or two values of each coordinate; no trimming goes further.
        cut = (n - 1) // 2 if self._rule == "median" else min(self._liars, (n - 1) // 2)
        vectors: Mapping[str, Tensor] = {
            name: _trim(torch.stack([reply.vectors[name] for reply in replies]), cut)
            for name in first.vectors
        }
        numbers = {
            name: float(_trim(torch.tensor([r.numbers[name] for r in replies]).double(), cut))
            for name in first.numbers
        }
        return replace(first, vectors=vectors, numbers=numbers, weight=1.0)


def _trim(values: Tensor, cut: int) -> Tensor:
    """Return the mean over the first axis of values [n, ...] without `cut` at either end."""
    ordered = values.sort(dim=0).values
    return ordered[cut : len(values) - cut].mean(dim=0)


def _nearest(replies: list[Reply], liars: int) -> int:
    """Return the index of Krum's choice; the vectors of a reply are joined to one."""
    whole = torch.stack(
        [torch.cat([v.double().reshape(-1) for _, v in sorted(r.vectors.items())]) for r in replies]
    )
    n = len(replies)
    if n == 1:
        return 0
    squares = torch.stack([(whole - one).square().sum(dim=1) for one in whole])
    # Each row's smallest entry is the distance to itself, 0.
    neighbours = min(max(1, n - liars - 2), n - 1)
    scores = squares.sort(dim=1).values[:, 1 : neighbours + 1].sum(dim=1)
    # NaN would pass for the smallest; it is far from everything.
    return int(scores.nan_to_num(math.inf, math.inf).argmin())
