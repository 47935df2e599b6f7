"""Fairness around any solver of one gradient a step: FedFDP's weights and loss (arXiv 2402.16028).

Each record counts by 1 + λ (ℓ_j - F), clamped inside its clip; on the round's last batch the site
also releases its loss at the model it sends. The solver itself does not change: around fedavg this
is fedfdp. Kept under "fair/": F in the server's state and the reply, C_l in the site's memory.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from pydantic import ConfigDict, Field
from torch import Tensor

from fedpact.fairness import FAIR_LOSS, FairOracle, LossRelease, WeightRule, weighting
from fedpact.messages import Local, Reply, State, Task
from fedpact.methods import Around, Method, join, split
from fedpact.privacy.oracle import Bounds, Oracle, Range, Terms

_PREFIX = "fair/"


class FairnessSettings(LossRelease):
    """The [fairness] table of a plan. weight: λ >= 0; 0 leaves the algorithm as it is.

    weight_rule: fairness.WeightRule. The rest is fairness.LossRelease: how each site releases the
    round's loss.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
    weight: float = Field(default=0.0, ge=0)
    weight_rule: WeightRule = "fixed"


class FairMethod(Around):
    """A method whose sites weigh their records by loss; its replies have "w"."""

    def __init__(self, inner: Method, fairness: FairnessSettings) -> None:
        super().__init__(inner)
        self._fairness = fairness

    @property
    def channels(self) -> Mapping[str, float]:
        """See Method."""
        return {**self.inner.channels, **self._fairness.loss_channels}

    @property
    def weighs_records(self) -> bool:
        """See Method."""
        return True

    def init(self, w: Tensor) -> State:
        """See Method."""
        return self.inner.init(w)

    def steps(self, state: State | None = None) -> int:
        """See Method."""
        return self.inner.steps(None if state is None else split(state, _PREFIX)[1])

    def task(self, state: State) -> State:
        """See Method."""
        own, rest = split(state, _PREFIX)
        return join(own, _PREFIX, self.inner.task(rest))

    def asked(self) -> Mapping[str, Range]:
        """See Method."""
        return {**self.inner.asked(), _PREFIX + "loss": FAIR_LOSS}

    def bounds(self, task: Task, terms: Terms) -> Bounds:
        """See Method. A record's weight stays within its clip, so the vectors' do not change."""
        inner = self.inner.bounds(task, terms)
        loss = self._fairness.loss_range(terms)
        return replace(inner, numbers={**inner.numbers, _PREFIX + "loss": loss})

    def local(self, task: Task, oracle: Oracle, memory: State) -> Local:
        """See Method."""
        fairness, (own, rest) = self._fairness, split(memory, _PREFIX)
        reference = task.numbers.get(_PREFIX + "loss", math.nan)
        weights = weighting(fairness.weight_rule, fairness.weight, reference)
        fair = FairOracle(oracle, weights, tuple(fairness.loss_channels))
        local = self.inner.local(task, fair, rest)
        bound = own.numbers.get("loss_bound", fairness.loss_bound)
        loss, bound = fairness.released(fair.last_batch, local.vectors["w"], bound)
        memory = join(State(numbers={"loss_bound": bound}), _PREFIX, local.memory)
        return Local(local.vectors, {**local.numbers, _PREFIX + "loss": loss}, memory)

    def update(self, state: State, replies: Iterable[Reply]) -> State:
        """See Method."""
        _, rest = split(state, _PREFIX)
        losses = _Mean(_PREFIX + "loss")
        after = self.inner.update(rest, losses.through(replies))
        return join(State(numbers={"loss": losses.value}), _PREFIX, after)


class _Mean:
    """Σ p_i x_i of a number of the replies, taken while they are folded by somebody else."""

    def __init__(self, name: str) -> None:
        self._name, self._total, self.value = name, 0.0, 0.0

    def through(self, replies: Iterable[Reply]) -> Iterator[Reply]:
        for reply in replies:
            self._total += reply.weight
            share = reply.weight / self._total
            self.value += share * (reply.numbers[self._name] - self.value)
            yield reply
