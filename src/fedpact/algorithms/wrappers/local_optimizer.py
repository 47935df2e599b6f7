"""A site's optimiser (momentum and schedules), and a head of the model that each site keeps.

Heads: Arivazhagan, Aggarwal, Singh, Choudhary. Federated learning with personalization layers.
arXiv 1912.00818. Let w = (u, v), with v the last `head` numbers. The server sends u, and a site
with its own head v_i continues from (u, v_i):

    local     the algorithm's local part from (u, v_i) instead of w, which ends at (u', v_i')
    sent      (u', v), with v as received: nothing of v_i'
    stored    v_i', in the site's memory

The head's gradient is clipped and noised together with the body's: later replies depend on v_i, so
a head trained without noise would leak exact numbers through u. Events, noise and ε are those of
the algorithm without heads, and the bound on a reply holds, as a part of it is left out.

The server's v never changes, so w itself is not a useful model. A site's model is (u, v_i); it is
computed from released numbers only, and as private as w.

Momentum and schedule: in step n of all T = rounds τ steps, a solver that asks for g(w) gets

    m ← β m + g(w),  m = 0 at the start of a round;      f(n) m

so its step is w ← w - η f(n) m. The gradient already has its noise, so this is post-processing and
costs no privacy. A reply Σ c_k g_k of releases becomes one with convolved coefficients, and by
Young's inequality neither Σ |c_k| nor (Σ c_k²)^(1/2) grows by more than
max f (1 - β^τ)/(1 - β), the factor by which a reply may be longer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import torch
from pydantic import Field
from torch import Tensor, nn

from fedpact.algorithms.common.steps import HookedBatch
from fedpact.algorithms.wrappers.base import Method, MethodWrapper
from fedpact.common.configuration import FROZEN
from fedpact.common.errors import PlanError
from fedpact.common.messages import Local, State, Task, join, split_state
from fedpact.common.randomness.schedules import Scheduled
from fedpact.privacy.oracle import Batch, Oracle, OracleWrapper, Weighting

_PREFIX: Final = "heads/"
_OWN: Final = "own"

TOLD: Final = (
    "Each site's own head, of {head} numbers: it is trained by noisy, charged gradients and never "
    "sent. A site's whole model may be shown as the server's may. The run's final model has the "
    "initial head."
)
"""The line on heads in a privacy statement."""

MEASURED: Final = (
    "The accuracy: each site's own model on its own held-out records, as the shared part alone is "
    "not a model."
)
"""The line on what only a simulation knows about heads."""


class Headed(MethodWrapper):
    """A method in which each site has its own last `head` >= 1 numbers of w."""

    def __init__(self, inner: Method, head: int) -> None:
        super().__init__(
            inner,
            needs_own_noise="with [local] head each site's gradient is at its own head, which it "
            "stores",
            sums_releases=False,
        )
        self._head = head

    def local(self, task: Task, oracle: Oracle, memory: State) -> Local:
        own, rest = split_state(memory, _PREFIX)
        told = task.vectors["w"]
        began = replace(task, vectors={**task.vectors, "w": self._whole(told, own)})
        local = self.inner.local(began, oracle, rest)
        ended = local.vectors["w"][-self._head :].clone()
        if not bool(ended.isfinite().all()):
            # A shared part that is not finite must not spoil the site's head for good.
            ended = began.vectors["w"][-self._head :].clone()
        sent = torch.cat([local.vectors["w"][: -self._head], told[-self._head :]])
        kept = join(State({_OWN: ended}), _PREFIX, local.memory)
        return Local({**local.vectors, "w": sent}, local.numbers, kept)

    def own_model(self, w: Tensor, memory: State) -> Tensor | None:
        return self._whole(w, split_state(memory, _PREFIX)[0])

    def _whole(self, w: Tensor, own: State) -> Tensor:
        """Return (u, v_i), or w if the site has no head yet."""
        head = own.vectors.get(_OWN)
        return w if head is None else torch.cat([w[: -self._head], head])


def check_head(module: nn.Module, head: int, key: str = "local.head") -> None:
    """Raise PlanError unless the last `head` numbers are whole tensors, and not the whole model.

    head: 0 for none. key: by which the plan sets it.
    """
    tensors = [(name, p.numel()) for name, p in module.named_parameters() if p.requires_grad]
    ends, total = list[tuple[int, str]](), 0
    for name, count in reversed(tensors[1:]):
        total += count
        ends.append((total, name))
    if head and head not in (end for end, _ in ends):
        raise PlanError(
            f"{key} is {head}: expected the size of the model's last tensors: {_told(ends)}"
        )


def _told(ends: Sequence[tuple[int, str]]) -> str:
    if not ends:
        return "0, as the model has only one tensor and nothing would be shared"
    return " or ".join(f"{end} (from {name!r} on)" for end, name in ends[:4])


class LocalSettings(Scheduled):
    """Momentum and schedule f of a site's local steps, and the head that it keeps."""

    model_config = FROZEN
    momentum: float = Field(default=0.0, ge=0, lt=1)
    """β of m ← β m + g, with m = 0 at the start of a round."""
    head: int = Field(default=0, ge=0)
    """How many of the model's last numbers are each site's own, 0 for none."""

    @property
    def plain(self) -> bool:
        """Whether steps are plain SGD."""
        return self.momentum == 0 and self.schedule == "constant"


class Stepped(MethodWrapper):
    """A method whose sites' steps have momentum or a schedule. rounds: of the run."""

    def __init__(self, inner: Method, local: LocalSettings, rounds: int) -> None:
        super().__init__(inner)
        self._local, self._rounds = local, rounds

    def local(self, task: Task, oracle: Oracle, memory: State) -> Local:
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
        for batch in self._inner.batches(count, *channels):
            self._done += 1
            yield HookedBatch(batch, self._moved)

    def _moved(self, batch: Batch, w: Tensor, weighting: Weighting) -> Tensor:
        """Return f(n) m for the gradient [d] at w."""
        gradient = batch.gradient(w, weighting)
        if self._local.momentum:
            if self._momentum is not None:
                gradient.add_(self._momentum, alpha=self._local.momentum)
            self._momentum = gradient.clone()
        return gradient.mul_(self._local.factor(self._done, self._total))
