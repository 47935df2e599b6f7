"""The server's checks of sites' replies, and the ledgers it has seen.

ledgers.json    site -> [length, head] of its ledger in each of its last signed replies

Every task names the ledger that the server saw last. A site whose own ledger does not continue from
there refuses before it charges (its RollbackGuard). So of a restored ledger and of two copies of
one, at most one can continue. A reply with a shorter or different ledger comes from a modified site
and is rejected, but for one of the last few: a server that died after an evaluation asks for the
round's training again, and the site repeats its stored reply.

A reply is rejected unless it passes each of these checks:

    form        vectors and numbers, with shapes, as the algorithm's own local part returns them
    not finite  no NaN or infinity
    weight      the declared size of the site
    ledger      longer than the one last seen, or equal to it
    far off     numbers that follow from the terms, and vectors within privacy.reply_bounds
    outlier     no vector much farther from the task's than the others' (see `outliers`)

The checks do not stop a site that lies within these bounds, and cost a site no privacy. The form is
found by running the local part on synthetic records, so it is right for every algorithm.
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
from fedpact.privacy.ledger.ledger import is_place
from fedpact.privacy.oracle import PlainOracle, Records
from fedpact.privacy.reply_bounds import Range, find_fault, longest_reply
from fedpact.privacy.terms import Terms
from fedpact.simulation.secure_aggregation.encoding import Form
from fedpact.simulation.workshop import TrainingSetup

_LOST = "it holds the server's knowledge of the sites' ledgers: restore it from a backup"
# How many ledger heads are kept per site: a round has two, for training and evaluation.
_KEPT: Final = 4
FARTHEST: Final = 100.0
"""The largest distance of a reply's vector from the task's, relative to the round's median."""
_Place = tuple[int, str]


class LedgerRegistry:
    """The ledger heads that each site has shown. directory: the server's.

    A later run there continues with them, as a site's ledger does. Raises DataError: unreadable.
    """

    def __init__(self, directory: Path) -> None:
        self._path, self._changed = directory / "ledgers.json", False
        self._seen = dict[str, list[_Place]]()
        with suppress(FileNotFoundError), parse_errors(self._path, _LOST):
            self._seen = {
                site: [(int(length), str(head)) for length, head in places]
                for site, places in json.loads(self._path.read_bytes()).items()
            }

    def last_seen(self, site: str) -> _Place:
        """Return length and head of a site's ledger; (0, "") if none was seen."""
        return self._seen.get(site, [(0, "")])[-1]

    def look(self, site: str, length: int, head: str, *, late: bool = False) -> bool:
        """Record the ledger shown by a site's reply; return whether it is acceptable.

        It is if it is longer than the last one, or one of the last seen. Only the site can tell
        whether it continues the earlier one, and checks that. late: the reply answers an earlier
        task. A relay can delay and repeat such a reply, so a shorter ledger in it means nothing;
        a different one of the same length does.
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
        """Store the ledgers recorded by `look`."""
        if self._changed:
            write_whole(self._path, json.dumps(self._seen, indent=2).encode() + b"\n")
            self._changed = False


_log = logging.getLogger("fedpact.server")

REFUSALS: Final = frozenset(
    {
        *("error", "policy", "run", "budget", "ledger", "task"),
        *("stale", "attempt", "model", "unsigned", "terms"),
        *("session", "asked", "keys", "few", "opened", "range"),
    }
)
"""The codes with which sites refuse a task, or (the last line) a step of secure aggregation."""


def expect_form(
    workshop: TrainingSetup, task: Task, sums: Mapping[str, int] = MappingProxyType({})
) -> Form:
    """Return the form of every honest reply to this task, found with synthetic records.

    sums: for an evaluation, channel -> number of values.
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
    """Checks replies in one run of a method. terms: each site's.

    standing: the sites' ledgers, updated by every reply. longest_sums: returns channel -> longest
    sum of a site's answer to an evaluation.
    """

    def __init__(
        self,
        method: Method,
        terms: Mapping[str, Terms],
        standing: LedgerRegistry,
        longest_sums: Callable[[Terms], Mapping[str, float]] = lambda _: {},
    ) -> None:
        self._method, self._terms = method, terms
        self.standing, self._longest_sums = standing, longest_sums

    def fault(self, site: str, task: Task, reply: Reply, form: Form) -> str | None:
        """Return the fault of a site's reply to a task, in a word; None if there is none."""
        if reply.run != task.run:
            return "stale"
        if reply.site != site:
            return "another's"
        # Before all other checks: the budget of this reply is spent in any case.
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
        if beyond := self.far_off(site, task, opened.vectors, reply.numbers):
            _log.warning("site %s: round %d: %s", site, task.round, beyond)
            return "far off"
        return None

    def far_off(self, site: str, task: Task, vectors: Vectors, numbers: Numbers) -> str | None:
        """Describe how a decoded reply exceeds privacy.reply_bounds; None if it does not."""
        terms = self._terms[site]
        if task.algorithm == EVALUATION:
            return find_fault(vectors, numbers, {}, self._longest_sums(terms), {})
        longest = self._longest_vectors(task, terms, vectors)
        public = {} if task.algorithm in FREE else self._method.public_numbers(task, terms)
        return find_fault(vectors, numbers, task.vectors, longest, public)

    def _longest_vectors(self, task: Task, terms: Terms, vectors: Vectors) -> dict[str, float]:
        rate = self._method.settings.step_size or 1.0
        # Masked words and encoded positions are integers, and have no length.
        return {
            name: longest_reply(terms, rate, task.vectors.get(name), len(vector))
            for name, vector in vectors.items()
            if vector.is_floating_point()
        }

    def mean_fault(self, task: Task, sites: Iterable[str], mean: State, error: float) -> str | None:
        """Describe how the mean of sites' replies exceeds the bounds; None if it does not.

        error: the possible error of the mean in each coordinate.
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
        """Undo the compression of a reply. Raises InputError: it cannot be decoded."""
        plain = task.algorithm in (EVALUATION, *FREE)
        return reply if plain else self._method.decode_reply(reply, task.vectors)

    def outliers(self, task: Task, replies: Mapping[str, Reply]) -> list[str]:
        """Return the sites with a vector FARTHEST times as far from the task's as the median.

        With fewer than three replies it cannot be decided which one is wrong. Evaluations are
        exempt: their sums differ much between sites. A vector that is not in the task is measured
        from 0.
        """
        if len(replies) < 3 or task.algorithm in (EVALUATION, *FREE):
            return []
        found = set[str]()
        replies = {site: self.decode_reply(reply, task) for site, reply in replies.items()}
        for name in next(iter(replies.values())).vectors:
            sent = task.vectors.get(name)
            far = {
                site: float(
                    torch.linalg.vector_norm(r.vectors[name] - (0 if sent is None else sent))
                )
                for site, r in replies.items()
            }
            limit = FARTHEST * statistics.median(far.values())
            # If the median is 0, most sites returned the task's vector.
            found |= {site for site, distance in far.items() if 0 < limit < distance}
        return sorted(found)
