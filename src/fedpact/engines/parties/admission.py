"""Which replies the server lets in: a site may be broken, or lie, without stopping the others.

    form        the vectors and numbers that the algorithm's own local part returns, in their shapes
    finite      no NaN, no infinity
    weight      the size that was declared for the site
    ledger      one that has become longer, or is the one that was seen (engines.parties.standing)
    far off     what is beyond what the site's terms allow (see algorithms.Algorithm.bounds)
    longest     no vector much farther from what was told than the others' (see `outliers`)

None of it is a defence against a site that lies within these bounds, and none of it costs a site
any privacy. The form is found by carrying out the local part on made-up records, so it is right for
every algorithm.
"""

import logging
import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

import torch

from fedpact.draws.seeded import SeededDraws
from fedpact.engines.parties.standing import LedgerRegistry
from fedpact.engines.secure.ring import Form
from fedpact.engines.workshop import TrainingSetup
from fedpact.errors import InputError, PlanError
from fedpact.messages import EVALUATION, FINAL, Reply, State, Task
from fedpact.methods import Method
from fedpact.params import FlatModel, all_finite
from fedpact.persample.kernel import PlainKernel
from fedpact.privacy.oracle import PlainOracle, Records
from fedpact.privacy.reach import ReplyBounds
from fedpact.privacy.terms import Terms

_log = logging.getLogger("fedpact.server")

_OF_A_QUESTION = (
    "error",
    "policy",
    "run",
    "budget",
    "ledger",
    "task",
    "stale",
    "attempt",
    "model",
    "unsigned",
    "terms",
)
_OF_A_STEP = ("session", "asked", "keys", "few", "opened", "range")
REFUSALS: Final = frozenset({*_OF_A_QUESTION, *_OF_A_STEP})
"""The codes with which sites refuse: any question, or a step of secure aggregation."""


def expect_form(
    workshop: TrainingSetup, task: Task, sums: Mapping[str, int] = MappingProxyType({})
) -> Form:
    """Return the form of every honest reply to this task, on records that are nobody's.

    sums: of an evaluation, how many numbers each channel has.
    """
    if task.algorithm == FINAL:
        return Form.of({}, {})
    if task.algorithm == EVALUATION:
        return Form.of({c: torch.zeros(n, dtype=torch.float64) for c, n in sums.items()}, {})
    x, y = workshop.make_dummy_records()
    kernel = PlainKernel(FlatModel(workshop.module()), workshop.loss)
    records = Records(x, y, tuple(range(len(workshop.plan.records.released))))
    oracle = PlainOracle(records, kernel, 1.0, float(len(y)), SeededDraws(0))
    local = workshop.plan.method.local(task, oracle, State())
    return replace(Form.of(local.vectors, local.numbers), coded=workshop.plan.method.coded)


class Admission:
    """Checks replies to one run of a method. terms: each site's. longest: see `outliers`.

    standing: what is known of the sites' ledgers; every reply to the question asked adds to it.
    examined: the bounds of a site's answer to an evaluation.
    """

    def __init__(
        self,
        method: Method,
        terms: Mapping[str, Terms],
        longest: float,
        standing: LedgerRegistry,
        examined: Callable[[Terms], ReplyBounds] = lambda _: ReplyBounds({}, {}),
    ) -> None:
        self._method, self._terms, self._longest = method, terms, longest
        self.standing, self._examined = standing, examined

    def check(self, form: Form, task: Task) -> None:
        """Raise PlanError where the algorithm has not declared a bound on all that it sends."""
        any_terms = next(iter(self._terms.values()))
        missing = self._bounds(task, any_terms).find_undeclared(form.vectors, form.numbers)
        if missing:
            raise PlanError(
                f"algorithm {self._method.name!r} sends {', '.join(missing)} without a bound, "
                "so that any lie would pass: expected all that `local` sends in its `bounds`"
            )

    def fault(self, site: str, task: Task, reply: Reply, form: Form) -> str | None:
        """Return what is wrong with a site's reply to a task, in a word; None if nothing is."""
        if reply.run != task.run:
            return "stale"
        if reply.site != site:
            return "another's"
        # Before all else that may be wrong: what was released for this reply is spent.
        late = reply.round != task.round
        shown = site, reply.ledger_length, reply.ledger_head, task.algorithm
        if not self.standing.look(*shown, late=late):
            return "ledger"
        if late:
            return "stale"
        if reply.weight != self._terms[site].size:
            return "weight"
        if not form.fits(reply.vectors, reply.numbers):
            return "form"
        try:
            opened = self.decode_reply(reply, task)
        except InputError:
            return "form"
        finite = all(map(all_finite, opened.vectors.values()))
        if not (finite and all(map(math.isfinite, reply.numbers.values()))):
            return "not finite"
        bounds = self._bounds(task, self._terms[site])
        beyond = bounds.fault(opened.vectors, reply.numbers, task.vectors)
        if beyond is not None:
            _log.warning("site %s: round %d: %s", site, task.round, beyond)
            return "far off"
        return None

    def _bounds(self, task: Task, terms: Terms) -> ReplyBounds:
        if task.algorithm == FINAL:
            return ReplyBounds({}, {})
        if task.algorithm == EVALUATION:
            return self._examined(terms)
        return self._method.bounds(task, terms)

    def mean_fault(self, task: Task, sites: Iterable[str], mean: State, error: float) -> str | None:
        """Return what shows that one of these sites lied, in words, in the mean of their replies.

        error: of the mean, in each coordinate.
        """
        terms = [self._terms[site] for site in sites]
        bounds = [self._method.bounds(task, one) for one in terms]
        # Where replies count by their declared sizes, which are public, so do their bounds.
        weights = [] if self._method.summed.weight else [one.size for one in terms]
        joint = ReplyBounds.of_mean(bounds, len(task.vectors["w"]), error, weights)
        return joint.fault(mean.vectors, mean.numbers, task.vectors)

    def decode_reply(self, reply: Reply, task: Task) -> Reply:
        """Return a reply as the algorithm made it. Raises InputError: it cannot be."""
        if task.algorithm in (EVALUATION, FINAL):
            return reply
        return self._method.decode_reply(reply, task.vectors)

    def outliers(self, task: Task, replies: Mapping[str, Reply]) -> list[str]:
        """Return the sites with a vector farther from the task's than `longest` times the median.

        Of fewer than three replies nobody can say which is off, and sums over records of unlike
        sites are far apart as they are. A vector that the task does not have is measured from 0.
        """
        if len(replies) < 3 or task.algorithm in (EVALUATION, FINAL):
            return []
        found = set[str]()
        replies = {site: self.decode_reply(reply, task) for site, reply in replies.items()}
        for name in next(iter(replies.values())).vectors:
            told = task.vectors.get(name)
            far = {
                site: float(
                    torch.linalg.vector_norm(r.vectors[name] - (0 if told is None else told))
                )
                for site, r in replies.items()
            }
            limit = self._longest * statistics.median(far.values())
            # A median of 0 says that most sites sent back what they were told.
            found |= {site for site, distance in far.items() if 0 < limit < distance}
        return sorted(found)
