"""Local steps with momentum, or of a length that changes: around a solver of SGD's steps.

Of step n of all T = rounds τ, counted through the rounds, a solver that asks for g(w) is given

    m ← β m + g(w),  m = 0 when a round begins;      f(n) m

and makes of it the step that it makes of a gradient: w ← w - η f(n) m. What goes in has its noise,
so this is post-processing: no privacy is spent. A reply that was a sum Σ c_k g_k of releases is now
one with convolved coefficients, and by Young's inequality neither Σ |c_k| nor (Σ c_k²)^(1/2) grows
by more than max f (1 - β^τ)/(1 - β), which is how much longer a reply may be.
"""

from collections.abc import Iterator
from dataclasses import replace

from pydantic import ConfigDict, Field
from torch import Tensor

from fedpact.draws.schedules import Scheduled
from fedpact.messages import Local, State, Task
from fedpact.methods import Method, MethodWrapper
from fedpact.privacy.around import BatchAround, OracleWrapper
from fedpact.privacy.oracle import UNIFORM, Batch, Oracle, ReplyBounds, Terms, Weighting, reach


class LocalSettings(Scheduled):
    """What becomes of a site's gradients on their way to its local steps, which are what f is of.

    momentum: β of m ← β m + g, m = 0 when a round begins. head: how many of the model's last
    numbers each site keeps to itself, 0 for none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
    momentum: float = Field(default=0.0, ge=0, lt=1)
    head: int = Field(default=0, ge=0)

    @property
    def plain(self) -> bool:
        """Whether steps are those of SGD."""
        return self.momentum == 0 and self.schedule == "constant"


class Stepped(MethodWrapper):
    """A method whose sites' steps have momentum or a schedule. rounds: of the run."""

    def __init__(self, inner: Method, local: LocalSettings, rounds: int) -> None:
        super().__init__(inner)
        self._local, self._rounds = local, rounds

    def bounds(self, task: Task, terms: Terms) -> ReplyBounds:
        """Return what an honest reply to the task can be, of a site with these terms."""
        inner, steps = self.inner.bounds(task, terms), self.inner.steps()
        done, total = (task.round - 1) * steps, self._rounds * steps
        longer = max(self._local.factor(done + k, total) for k in range(1, steps + 1))
        longer *= reach.geometric(self._local.momentum, steps)
        return replace(inner, vectors={n: longer * far for n, far in inner.vectors.items()})

    def local(self, task: Task, oracle: Oracle, memory: State) -> Local:
        """Return a site's reply and its next memory."""
        steps = self.inner.steps()
        total, done = self._rounds * steps, (task.round - 1) * steps
        return self.inner.local(task, _Moving(oracle, self._local, done, total), memory)


class _Moving(OracleWrapper):
    """An oracle whose gradients have momentum and a schedule. done: steps of earlier rounds."""

    def __init__(self, inner: Oracle, local: LocalSettings, done: int, total: int) -> None:
        super().__init__(inner)
        self._local, self._done, self._total = local, done, total
        self._momentum: Tensor | None = None

    def batches(self, count: int, *channels: str) -> Iterator[Batch]:
        """Yield `count` batches that answer the channels; each is closed by the next one."""
        for batch in self._inner.batches(count, *channels):
            self._done += 1
            yield _MovingBatch(batch, self)

    def moved(self, gradient: Tensor) -> Tensor:
        """Return f(n) m for this gradient [d], which is written over."""
        if self._local.momentum:
            if self._momentum is not None:
                gradient.add_(self._momentum, alpha=self._local.momentum)
            self._momentum = gradient.clone()
        return gradient.mul_(self._local.factor(self._done, self._total))


class _MovingBatch(BatchAround):
    """A batch whose gradients the optimiser turns into steps."""

    def __init__(self, inner: Batch, moving: _Moving) -> None:
        super().__init__(inner)
        self._moving = moving

    def gradient(self, w: Tensor, weighting: Weighting = UNIFORM) -> Tensor:
        """Return the mean weighted gradient at w: [d] -> [d], which the caller may write over."""
        return self._moving.moved(self._inner.gradient(w, weighting))
