"""Who may take part: the server's checks of a site, and the ledgers it has seen.

ledgers.json    site -> [length, head] of its ledger by each of the last replies that it signed

Every question to a site says which ledger was seen last, and the site refuses it, before it
charges, where its own ledger does not go on from there (privacy.ledger.rollback_guard). So of a
ledger that was put back, and of two copies of one, no more than one goes on. A reply that shows a
shorter ledger, or another one, comes from a site that did not look, and is rejected. But for those
that were seen last: a server that died after an evaluation asks for the round's training again, and
the site sends what it has kept.

form        the vectors and numbers that the algorithm's own local part returns, in their shapes
    finite      no NaN, no infinity
    weight      the size that was declared for the site
    ledger      one that has become longer, or is the one that was seen (deployment.admission)
    far off     a number that is not the terms', or a vector beyond privacy.reply_bounds
    longest     no vector much farther from what was told than the others' (see `outliers`)

None of it is a defence against a site that lies within these bounds, and none of it costs a site
any privacy. The form is found by carrying out the local part on made-up records, so it is right for
every algorithm.
"""

import json
import logging
import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

import torch

from fedpact.algorithms.wrappers.base import Method
from fedpact.common.errors import InputError
from fedpact.common.files import parse_errors, write_whole
from fedpact.common.messages import EVALUATION, FREE, Numbers, Reply, State, Task, Vectors
from fedpact.common.params import FlatModel, all_finite
from fedpact.common.randomness.seeded import SeededDraws
from fedpact.per_sample.kernel import PlainKernel
from fedpact.privacy.ledger.rollback_guard import is_place
from fedpact.privacy.oracle import PlainOracle, Records
from fedpact.privacy.reply_bounds import Range, find_fault, longest_reply
from fedpact.privacy.terms import Terms
from fedpact.simulation.secure_aggregation.encoding import Form
from fedpact.simulation.workshop import TrainingSetup

_LOST = "it holds what the server knows of its sites' ledgers: put it back from a backup"
# Ledgers of a site that its last replies have shown: two a round, of training and an evaluation.
_KEPT: Final = 4


_Place = tuple[int, str]


class LedgerRegistry:
    """What is known of each site's ledger. folder: a run's. Raises DataError: unreadable."""

    def __init__(self, folder: Path) -> None:
        self._path, self._changed = folder / "ledgers.json", False
        self._seen = dict[str, list[_Place]]()
        with suppress(FileNotFoundError), parse_errors(self._path, _LOST):
            self._seen = {
                site: [(int(length), str(head)) for length, head in places]
                for site, places in json.loads(self._path.read_bytes()).items()
            }

    def last_seen(self, site: str) -> _Place:
        """Return length and head of a site's ledger, (0, "") where none was seen."""
        return self._seen.get(site, [(0, "")])[-1]

    def look(self, site: str, length: int, head: str, *, late: bool = False) -> bool:
        """Take notice of the ledger that a site's reply shows.

        late: it answers an earlier question. Whoever relays messages can keep such a reply, and
        repeat it, so a shorter ledger in it tells nothing; another one of the same length does.
        Returns whether nothing is wrong with it: it is longer, or is one of the last seen. Whether
        it goes on only the site can tell, and does.
        """
        place, last = (length, head), self.last_seen(site)
        if is_place(length, head) and length > last[0]:
            self._seen[site] = [*self._seen.get(site, []), place][-_KEPT:]
            self._changed = True
            return True
        if place == last or place in self._seen.get(site, []):
            return True
        return late and is_place(length, head) and length < last[0]

    def save(self) -> None:
        """Make durable what `look` has seen."""
        if self._changed:
            write_whole(self._path, json.dumps(self._seen, indent=2).encode() + b"\n")
            self._changed = False


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
    if task.algorithm in FREE:
        return Form.of({}, {})
    if task.algorithm == EVALUATION:
        return Form.of({c: torch.zeros(n, dtype=torch.float64) for c, n in sums.items()}, {})
    x, y = workshop.make_dummy_records()
    kernel = PlainKernel(FlatModel(workshop.module()), workshop.loss)
    records = Records(x, y, tuple(range(len(workshop.plan.records.released))))
    oracle = PlainOracle(records, kernel, 1.0, float(len(y)), SeededDraws(0))
    local = workshop.plan.method.local(task, oracle, State())
    return replace(Form.of(local.vectors, local.numbers), coded=workshop.plan.method.facts.coded)


class Admission:
    """Checks replies to one run of a method. terms: each site's. longest: see `outliers`.

    standing: what is known of the sites' ledgers; every reply to the question asked adds to it.
    longest_sums: of a site's answer to an evaluation, channel -> its longest sum.
    """

    def __init__(
        self,
        method: Method,
        terms: Mapping[str, Terms],
        longest: float,
        standing: LedgerRegistry,
        longest_sums: Callable[[Terms], Mapping[str, float]] = lambda _: {},
    ) -> None:
        self._method, self._terms, self._longest = method, terms, longest
        self.standing, self._longest_sums = standing, longest_sums

    def fault(self, site: str, task: Task, reply: Reply, form: Form) -> str | None:
        """Return what is wrong with a site's reply to a task, in a word; None if nothing is."""
        if reply.run != task.run:
            return "stale"
        if reply.site != site:
            return "another's"
        # Before all else that may be wrong: what was released for this reply is spent.
        late = reply.round != task.round
        shown = site, reply.ledger_length, reply.ledger_head
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
        beyond = self.far_off(site, task, opened.vectors, reply.numbers)
        if beyond is not None:
            _log.warning("site %s: round %d: %s", site, task.round, beyond)
            return "far off"
        return None

    def far_off(self, site: str, task: Task, vectors: Vectors, numbers: Numbers) -> str | None:
        """Return what of a decoded reply is beyond privacy.reply_bounds, in words, or None."""
        terms = self._terms[site]
        if task.algorithm == EVALUATION:
            return find_fault(vectors, numbers, {}, self._longest_sums(terms), {})
        longest = self._longest_vectors(task, terms, vectors)
        public = {} if task.algorithm in FREE else self._method.public_numbers(task, terms)
        return find_fault(vectors, numbers, task.vectors, longest, public)

    def _longest_vectors(self, task: Task, terms: Terms, vectors: Vectors) -> dict[str, float]:
        rate = self._method.settings.step_size or 1.0
        # Masked words and places of numbers are integers, and have no length.
        return {
            name: longest_reply(terms, rate, task.vectors.get(name), len(vector))
            for name, vector in vectors.items()
            if vector.is_floating_point()
        }

    def mean_fault(self, task: Task, sites: Iterable[str], mean: State, error: float) -> str | None:
        """Return what shows that one of these sites lied, in words, in the mean of their replies.

        error: of the mean, in each coordinate.
        """
        terms = [self._terms[site] for site in sites]
        each = [self._longest_vectors(task, one, mean.vectors) for one in terms]
        longest = {
            name: max(one[name] for one in each) + error * math.sqrt(len(mean.vectors[name]))
            for name in each[0]
        }
        said = [self._method.public_numbers(task, one) for one in terms]
        public = {
            name: Range(
                min(one[name].least for one in said) - error,
                max(one[name].most for one in said) + error,
            )
            for name in said[0]
        }
        return find_fault(mean.vectors, mean.numbers, task.vectors, longest, public)

    def decode_reply(self, reply: Reply, task: Task) -> Reply:
        """Return a reply as the algorithm made it. Raises InputError: it cannot be."""
        if task.algorithm in (EVALUATION, *FREE):
            return reply
        return self._method.decode_reply(reply, task.vectors)

    def outliers(self, task: Task, replies: Mapping[str, Reply]) -> list[str]:
        """Return the sites with a vector farther from the task's than `longest` times the median.

        Of fewer than three replies nobody can say which is off, and sums over records of unlike
        sites are far apart as they are. A vector that the task does not have is measured from 0.
        """
        if len(replies) < 3 or task.algorithm in (EVALUATION, *FREE):
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
