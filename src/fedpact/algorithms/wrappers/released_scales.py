"""Scaling columns by means that the sites release, around any method.

In round 0 each site releases noisy means and mean squares of its columns, as a separate event
(privacy.column_scales); nothing is trained. The server averages them, weighted by records and less
if a site's noise is much larger than others', and computes means and deviations, which are sent
with every later task. Each site scales its records by them (`ColumnRecords`).

    columns/constants   [2 m], means then deviations, in the server's state and in each task; 0
                        before they are known
    columns/means       [2 m], c_i times a site's means: its reply to round 0
    columns/part        c_i, the site's weight (privacy.column_scales.site_weight)
    columns/noise       N_i times the variance of the noise in `means`, so that the weighted means
                        of all three give the variance of the sum's noise
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from fedpact.algorithms.common.steps import weighted_mean
from fedpact.algorithms.wrappers.base import Method, MethodWrapper
from fedpact.common.check import positive
from fedpact.common.errors import PlanError
from fedpact.common.messages import Local, Reply, State, Task, join, split_state
from fedpact.data.features.kinds import FeatureSettings
from fedpact.privacy import column_scales
from fedpact.privacy.oracle import Oracle, Range, Records, Terms, nearly
from fedpact.privacy.settings import Privacy

CONSTANTS: Final = "columns/constants"
_PREFIX: Final = "columns/"
_OWN: Final = "constants"
_MEANS: Final = "columns/means"
_NOISE: Final = "columns/noise"
_PART: Final = "columns/part"


def why_not(released: Sequence[str], features: FeatureSettings, privacy: Privacy) -> str:
    """Return why released columns exclude [features] or shared noise; "" if they do not."""
    if released and features.used:
        return (
            'records.columns of scale = "released" with [features]: features are computed once, '
            "before the first round, from records as declared; use another scale"
        )
    if released and privacy.shares_noise:
        return (
            'privacy.trust = "sum" cannot be combined with scale = "released" of a column: only '
            "what rounds release has shared noise; declare mean and deviation with scale = "
            '"standard", or use trust = "own"'
        )
    return ""


def check_as_declared(method: Method) -> None:
    """Raise PlanError if a method scales records by released means."""
    if method.facts.opens_run:
        raise PlanError(
            'records.columns of scale = "released": audits, comparisons and tuning need records '
            "that are scaled as declared, but this run's are scaled by what its sites released; "
            'run it with declared mean and deviation (scale = "standard")'
        )


class Released(MethodWrapper):
    """Releases the columns' scales in round 0; the outermost wrapper.

    count: m, the number of columns. quiet: m -> the least noise in a site's sums."""

    prefix = _PREFIX

    def __init__(self, inner: Method, count: int, quiet: Callable[[int], float]) -> None:
        super().__init__(inner, opens_run=True)
        self.count, self._quiet = count, quiet

    def init(self, w: Tensor) -> State:
        nothing = State({_OWN: torch.zeros(2 * self.count, dtype=torch.float64)})
        return join(nothing, _PREFIX, self.inner.init(w))

    def task(self, state: State) -> State:
        own, rest = split_state(state, _PREFIX)
        return join(own, _PREFIX, self.inner.task(rest))

    def public_numbers(self, task: Task, terms: Terms) -> Mapping[str, Range]:
        if task.round:
            return self.inner.public_numbers(_without(task), terms)
        noise = 0.0 if terms.columns is None else column_scales.deviation(terms.columns)
        return {
            name: nearly(value) for name, value in self._numbers_to_send(noise, terms.size).items()
        }

    def local(self, task: Task, oracle: Oracle, memory: State) -> Local:
        if task.round:
            return self.inner.local(_without(task), oracle, memory)
        found = oracle.columns()
        said = self._numbers_to_send(found.noise, found.size)
        return Local({_MEANS: said[_PART] * found.means}, said, memory)

    def _numbers_to_send(self, noise: float, size: float) -> dict[str, float]:
        """Return the numbers sent with the means. noise: the deviation in the sums. size: N_i."""
        quiet = self._quiet(self.count) if noise else 0.0
        part = column_scales.site_weight(noise, quiet)
        return {_NOISE: (part * noise) ** 2 / size, _PART: part}

    def update(self, state: State, replies: Iterable[Reply]) -> State:
        own, rest = split_state(state, _PREFIX)
        if bool(own.vectors[_OWN].any()):
            return join(own, _PREFIX, self.inner.update(rest, replies))
        replies = [*replies]
        mean = weighted_mean(replies, vectors=[_MEANS], numbers=[_NOISE, _PART])
        part = positive(part=mean.numbers[_PART])
        loud = math.sqrt(mean.numbers[_NOISE] / sum(reply.weight for reply in replies)) / part
        found = State({_OWN: column_scales.constants(mean.vectors[_MEANS] / part, loud)})
        return join(found, _PREFIX, rest)

    def decode_reply(self, reply: Reply, told: Mapping[str, Tensor]) -> Reply:
        if _MEANS in reply.vectors:
            return reply
        return self.inner.decode_reply(reply, {k: v for k, v in told.items() if k != CONSTANTS})


class ColumnRecords:
    """A site's records, scaled by the constants in its tasks."""

    def __init__(self, records: Records) -> None:
        self._records = self._scaled = records
        self._by: Tensor | None = None

    def __call__(self, task: Task) -> Records:
        """Return the records for a task."""
        by = task.vectors.get(CONSTANTS)
        if by is None or task.round == 0:
            return self._records
        if self._by is None or not torch.equal(by, self._by):
            x = column_scales.scale_columns(self._records.x, self._records.columns, by)
            self._scaled, self._by = replace(self._records, x=x), by.clone()
        return self._scaled


def find_examined(method: Method, task: Task, memory: State) -> tuple[Tensor, Tensor | None]:
    """Return the model [d] that a site evaluates for a task, and the columns' scales or None.

    memory: the site's; its own model, if it has one, is computed from this and the task's w.
    """
    w = task.vectors["w"]
    own = method.own_model(w, memory)
    return (w if own is None else own), task.vectors.get(CONSTANTS)


def _without(task: Task) -> Task:
    return replace(task, vectors={k: v for k, v in task.vectors.items() if k != CONSTANTS})
