"""Which replies the server lets in: a site may be broken, or lie, without stopping the others.

    form        the vectors and numbers that the algorithm's own local part returns, in their shapes
    finite      no NaN, no infinity
    weight      the size that was declared for the site
    ledger      one that has become longer, or is the one that was seen (engines.standing)
    longest     no vector much farther from what was told than the others' (see `outliers`)

None of it is a defence against a site that lies within these bounds, and none of it costs a site
any privacy. The form is found by carrying out the local part on made-up records, so it is right for
every algorithm.
"""

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedpact.engines.standing import Standing
from fedpact.engines.workshop import Workshop
from fedpact.errors import InputError
from fedpact.losses import cross_entropy
from fedpact.messages import Reply, State, Task
from fedpact.methods import Method
from fedpact.params import FlatModel, all_finite
from fedpact.persample.kernel import PlainKernel
from fedpact.privacy.noise import SeededDraws
from fedpact.privacy.oracle import PlainOracle, Records


@dataclass(frozen=True)
class Form:
    """What a reply has to be made of: vectors in shapes and types, and the names of numbers."""

    vectors: Mapping[str, tuple[torch.Size, torch.dtype]]
    numbers: frozenset[str]

    @staticmethod
    def of(vectors: Mapping[str, Tensor], numbers: Iterable[str]) -> "Form":
        """Return the form of these vectors and numbers."""
        return Form({n: (v.shape, v.dtype) for n, v in vectors.items()}, frozenset(numbers))


def expected_form(workshop: Workshop, task: Task) -> Form:
    """Return the form of every honest reply to this task, on records that are nobody's."""
    x, y = workshop.made_up()
    kernel = PlainKernel(FlatModel(workshop.module()), cross_entropy)
    oracle = PlainOracle(Records(x, y), kernel, 1.0, float(len(y)), SeededDraws(0))
    local = workshop.plan.method.local(task, oracle, State())
    return Form.of(local.vectors, local.numbers)


class Admission:
    """Checks replies to one run of a method. sizes: what each site declared. longest: `outliers`.

    standing: what is known of the sites' ledgers; every reply to the question asked adds to it.
    """

    def __init__(
        self, method: Method, sizes: Mapping[str, float], longest: float, standing: Standing
    ) -> None:
        self._method, self._sizes, self._longest = method, sizes, longest
        self.standing = standing

    def fault(self, site: str, task: Task, reply: Reply, form: Form) -> str | None:
        """Return what is wrong with a site's reply to a task, in a word; None if nothing is."""
        if (reply.run, reply.round) != (task.run, task.round):
            return "stale"
        if reply.site != site:
            return "another's"
        # Before all else that may be wrong: what was released for this reply is spent.
        if not self.standing.look(site, reply.ledger_length, reply.ledger_head):
            return "ledger"
        if reply.weight != self._sizes[site]:
            return "weight"
        if Form.of(reply.vectors, reply.numbers) != form:
            return "form"
        try:
            reply = self.opened(reply, task)
        except InputError:
            return "form"
        finite = all(map(all_finite, reply.vectors.values()))
        if not (finite and all(map(math.isfinite, reply.numbers.values()))):
            return "not finite"
        return None

    def opened(self, reply: Reply, task: Task) -> Reply:
        """Return a reply as the algorithm made it. Raises InputError: it cannot be."""
        return self._method.opened(reply, task.vectors)

    def outliers(self, task: Task, replies: Mapping[str, Reply]) -> list[str]:
        """Return the sites with a vector farther from the task's than `longest` times the median.

        Of fewer than three replies nobody can say which is off. A vector that the task does not
        have is measured from 0.
        """
        if len(replies) < 3:
            return []
        found = set[str]()
        replies = {site: self.opened(reply, task) for site, reply in replies.items()}
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
