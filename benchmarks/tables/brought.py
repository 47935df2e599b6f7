"""One private step beside one plain step on models that people bring, on one intra-op thread."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from benchmarks import child, steps
from benchmarks.problems import PROBLEMS, Problem
from benchmarks.results import Row
from benchmarks.scale import Scale
from benchmarks.tables.memory import peak
from benchmarks.timing import Turns, by_turns, milliseconds

TITLE = "One private step of models that people bring"
ABOUT = (
    "A step as above, of models that are not the papers' (`benchmarks/models.py`), beside the "
    "plain step of the same turn. resnet: ResNet-8 with GroupNorm on 3x32x32; "
    "transformer: two of torch's encoder layers of width 128 on 64 tokens; vit: the same layers on "
    "patches of 4x4 of 3x32x32; lstm: two layers of torch's LSTM, of 256 or 64 units, on 80 "
    "tokens; lora: a frozen transformer, low-rank factors on its attention's four products and a "
    "head, and the plain step trains the same. Opacus is given the model as its documents say: "
    "with its own layers in place of torch's LSTM and attention, and, as it has no rule for a "
    "parameter that lies bare in a model, with that in a module of its own. How many times as long "
    "as fedpact each peer takes has its goal at the best of them. Peak memory is that of three "
    "steps in a process of its own, less what it held after its imports, beside the plain steps'."
)

_OWN = {"fedpact": "fedpact", "kernel_alone": "fedpact's clipped sum alone"}
_PEERS = {
    "opacus_hooks": "Opacus, hooks",
    "opacus_ghost": "Opacus, ghost",
    "vmap_grad": "vmap(grad)",
}
_FOR_ATTENTION = {**_PEERS, "vmap_grad_products": "vmap(grad), attention by products"}
_FASTER: dict[str, Any] = {"goal": 1.5, "stretch": 3.0, "larger_is_better": True}
_SLOW_SECONDS = 1.0  # a peer whose step takes longer is timed a fifth as often


@dataclass(frozen=True)
class _Case:
    """A model of a table.

    goal, stretch: of fedpact's step beside the plain one. which: what ends its rows' titles.
    in_opacus: how Opacus takes the model, if not as it is. peers: methods and their titles.
    """

    model: str
    batch: int
    goal: float
    stretch: float
    which: str = "batch 64"
    in_opacus: str = ""
    peers: Mapping[str, str] = field(default_factory=lambda: _PEERS)

    def row(self, turns: Turns, title: str, method: str, to: str, **marks: Any) -> Row:
        """Return a row with a ratio, and how Opacus took the model where it is one of Opacus'."""
        row = turns.row(f"{title}, {self.which}", method, to, **marks)
        told = self.in_opacus and method.startswith("opacus")
        return replace(row, note=f"{row.note}; {self.in_opacus}") if told else row


# In Opacus 1.6 DPMultiheadAttention puts the heads together in another order than torch where
# batch_first is set: other numbers by the same work.
_ATTENTION = "with DPMultiheadAttention, bare parameters in modules"
_CASES = {
    "step-resnet": (_Case("resnet", 64, 1.2, 1.05),),
    "step-transformer": (
        _Case("transformer", 64, 1.2, 1.05, in_opacus=_ATTENTION, peers=_FOR_ATTENTION),
    ),
    "step-vit": (_Case("vit", 64, 1.2, 1.05, in_opacus=_ATTENTION, peers=_FOR_ATTENTION),),
    "step-lstm": (
        _Case("lstm256", 32, 2.0, 1.5, "2x256, batch 32", "with DPLSTM"),
        _Case("lstm64", 32, 2.0, 1.5, "2x64, batch 32", "with DPLSTM"),
    ),
    "step-lora": (
        _Case("lora", 64, 1.2, 1.0, in_opacus="factors in linear layers", peers=_FOR_ATTENTION),
    ),
}
NAMES = tuple(_CASES)


def run(name: str, scale: Scale) -> tuple[list[Row], bool]:
    """See tables."""
    torch.set_num_threads(1)
    rows: list[Row] = []
    busy = False
    for case in _CASES[name]:
        model = scale.of(case.model, f"tiny {case.model}")
        batch = scale.of(case.batch, 3)
        found, failed = _timed(case, PROBLEMS[model], batch, scale.repetitions)
        rows += [*_beside_plain(case, found, failed), *_beside_fedpact(case, found)]
        rows += _memory(case, model, batch)
        busy |= any(turns.busy for turns in found.values())
    return rows, busy


def _timed(
    case: _Case, problem: Problem, batch: int, repetitions: int
) -> tuple[dict[str, Turns], dict[str, str]]:
    """Return the turns that each method was timed in, and why the others fail."""
    own = {method: steps.METHODS[method](problem, batch) for method in ("plain", *_OWN)}
    quick, slow = dict(own), {method: own[method] for method in ("plain", "fedpact")}
    failed: dict[str, str] = {}
    for peer in case.peers:
        try:
            work = steps.METHODS[peer](problem, batch)
            work()
            started = time.perf_counter()
            work()
        except Exception as error:
            # Whatever a peer cannot do with a model is what there is to say of it.
            failed[peer] = f"fails: {type(error).__name__}: {error}".split("\n", 1)[0][:200]
        else:
            (slow if time.perf_counter() - started > _SLOW_SECONDS else quick)[peer] = work
    found = dict.fromkeys(quick, by_turns(quick, repetitions))
    if slow.keys() - quick:
        seldom = by_turns(slow, max(1, repetitions // 5))
        found |= dict.fromkeys(slow.keys() - quick, seldom)
    return found, failed


def _beside_plain(
    case: _Case, found: Mapping[str, Turns], failed: Mapping[str, str]
) -> Iterator[Row]:
    plain = milliseconds(found["plain"].time("plain").median)
    yield Row(f"plain, {case.which}", 1.0, note=plain)
    for method, title in {**_OWN, **case.peers}.items():
        if method in failed:
            yield Row(f"{title}, {case.which}", None, note=failed[method])
            continue
        marks = {"goal": case.goal, "stretch": case.stretch} if method == "fedpact" else {}
        yield case.row(found[method], title, method, "plain", **marks)


def _beside_fedpact(case: _Case, found: Mapping[str, Turns]) -> Iterator[Row]:
    """How many times as long as fedpact's step the peers' take; the marks are for the best."""
    peers = [peer for peer in case.peers if peer in found]
    best = min(peers, key=lambda peer: found[peer].ratio(peer, "fedpact").median, default="")
    for peer in peers:
        title = f"{case.peers[peer]} / fedpact"
        row = case.row(found[peer], title, peer, "fedpact", larger_is_better=True)
        if peer == best:
            row = replace(row, note=f"{row.note}; the best of the peers", **_FASTER)
        yield row


def _memory(case: _Case, model: str, batch: int) -> Iterator[Row]:
    plain, own = (child.call(peak, method, model, batch) for method in ("plain", "fedpact"))
    yield Row(f"peak memory, plain, {case.which}", 1.0, note=f"{plain:.0f} MiB")
    yield Row(
        f"peak memory, fedpact, {case.which}",
        own / max(plain, 1e-9),
        goal=1.2,
        stretch=1.0,
        note=f"{own:.0f} MiB",
    )
