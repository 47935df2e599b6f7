"""Per-sample gradients of modules without a rule: exact, sample by sample, and slower.

A unit is replayed on its recorded inputs: by vmap over a vjp where torch can batch it, else in a
loop of ordinary backward passes. A unit that draws random numbers cannot be replayed, as it would
draw others; then the whole model is differentiated sample by sample, in one go with its loss.
"""

import logging
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vjp, vmap

from fedpact.losses import Loss
from fedpact.params import FlatModel
from fedpact.persample import norms
from fedpact.persample.norms import Part, Views, kept
from fedpact.persample.tape import Call, gradients, requiring_grad

CHUNK = 16
"""Samples that one vmap replays at a time."""

_logger = logging.getLogger("fedpact")
_announced: set[str] = set()


class Random(Exception):
    """A unit draws random numbers, so it cannot be replayed."""


def _announce(level: int, message: str) -> None:
    if message not in _announced:
        _announced.add(message)
        _logger.log(level, message)


def _describe(path: str, module: nn.Module) -> str:
    return f"{type(module).__name__} ({path or 'the whole model'})"


@contextmanager
def _without_advice() -> Generator[None]:
    """Without torch's warning that an operation is slow under vmap: `_announce` says it once.

    Not warnings.catch_warnings, which other threads would see.
    """
    switch = cast(Any, torch)._C._functorch._set_vmap_fallback_warning_enabled
    switch(False)
    try:
        yield
    finally:
        switch(True)


class Unit:
    """Replays a module for the gradients of the named parameters of its subtree."""

    def __init__(self, path: str, module: nn.Module, names: frozenset[str]) -> None:
        self._what = _describe(path, module)
        self._module = module
        self._parameters = {n: p for n, p in module.named_parameters() if n in names}
        # Recurrent layers keep their weights in a list of their own, out of vmap's sight.
        self._loop = any(isinstance(m, nn.RNNBase) for m in module.modules())

    def measure(self, calls: list[Call]) -> Part:
        """The unit's Part. Raises Random where a replay is not possible."""
        batch = len(calls[0].tensors[0])
        size = sum(p.numel() * p.element_size() for p in self._parameters.values())
        step = max(1, min(CHUNK, norms.KEEP_BYTES // size))
        chunks = [slice(i, i + step) for i in range(0, batch, step)]
        if batch * size <= norms.KEEP_BYTES:
            rows = [self._gradients(calls, chunk) for chunk in chunks]
            return kept({n: torch.cat([r[n] for r in rows]) for n in self._parameters})
        squares = [kept(self._gradients(calls, chunk)).squares for chunk in chunks]

        def write(c: Tensor, views: Views) -> None:
            for chunk in chunks:
                kept(self._gradients(calls, chunk)).write(c[chunk], views)

        return Part(torch.cat(squares), write)

    def _gradients(self, calls: list[Call], chunk: slice) -> dict[str, Tensor]:
        """Per-sample gradients [b, ...] by name, summed over the calls."""
        found = [self._replay(call, chunk) for call in calls]
        return {n: torch.stack([f[n] for f in found]).sum(0) for n in self._parameters}

    def _replay(self, call: Call, chunk: slice) -> dict[str, Tensor]:
        if not self._loop:
            _announce(logging.INFO, f"{self._what} has no gradient rule: vmap replays it")
            try:
                return self._vmapped(call, chunk)
            except RuntimeError as error:
                if "random" in str(error):
                    raise Random(self._what) from error
                self._loop = True
        _announce(
            logging.WARNING,
            f"{self._what} cannot be batched by vmap: its per-sample gradients come from a loop, "
            "exact but slow",
        )
        return self._looped(call, chunk)

    def _vmapped(self, call: Call, chunk: slice) -> dict[str, Tensor]:
        weights = {n: p.detach() for n, p in self._parameters.items()}

        def pull(inputs: list[Tensor], grad: Tensor) -> dict[str, Tensor]:
            args, kwargs = call.rebuilt([x.unsqueeze(0) for x in inputs])

            def run(w: dict[str, Tensor]) -> Tensor:
                return cast(Tensor, functional_call(self._module, w, args, kwargs))

            back = cast(Callable[[Tensor], tuple[dict[str, Tensor]]], vjp(run, weights)[1])
            return back(grad.unsqueeze(0))[0]

        inputs = [x.detach()[chunk] for x in call.tensors]
        with _without_advice():
            return cast(Any, vmap(pull, randomness="error"))(inputs, cast(Tensor, call.grad)[chunk])

    def _looped(self, call: Call, chunk: slice) -> dict[str, Tensor]:
        state = torch.get_rng_state()
        found: list[list[Tensor]] = []
        grad = cast(Tensor, call.grad)
        with requiring_grad(self._parameters.values()) as parameters:
            for j in range(len(grad))[chunk]:
                args, kwargs = call.rebuilt([x.detach()[j : j + 1] for x in call.tensors])
                output = self._module(*args, **kwargs)
                found.append(gradients(output, parameters, grad[j : j + 1]))
        if not torch.equal(state, torch.get_rng_state()):
            raise Random(self._what)
        return _stacked(self._parameters, found)


class Whole:
    """Differentiates the model and its loss for each sample: what is left where no unit works."""

    def __init__(self, model: FlatModel, loss: Loss) -> None:
        self._module, self._loss = model.module, loss
        named = dict(model.module.named_parameters())
        self._parameters = {name: named[name] for name, _ in model.views(model.vector)}
        size = model.size * model.vector.element_size()
        self.step = max(1, min(CHUNK, norms.KEEP_BYTES // size))
        self._loop = False

    def share(self, rows: dict[str, Tensor]) -> tuple[dict[str, str], Part]:
        """(The model's parameter names, as its own; the Part of per-sample gradients by name)."""
        return {name: name for name in self._parameters}, kept(rows)

    def rows(self, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Losses [B] and per-sample gradients [B, ...] by name, for at most `step` samples."""
        what = _describe("", self._module)
        _announce(
            logging.INFO,
            f"{what} holds a module without a gradient rule that draws random numbers, or is asked "
            "for at two points: vmap differentiates the whole model",
        )
        if not self._loop:
            try:
                return self._vmapped(x, y)
            except RuntimeError:
                self._loop = True
        _announce(logging.WARNING, f"{what} is differentiated record by record, exact but slow")
        losses: list[Tensor] = []
        found: list[list[Tensor]] = []
        with requiring_grad(self._parameters.values()) as parameters:
            for j in range(len(x)):
                losses.append(self._loss(self._module(x[j : j + 1]), y[j : j + 1]))
                found.append(gradients(losses[-1].sum(), parameters))
        return torch.cat(losses).detach(), _stacked(self._parameters, found)

    def _vmapped(self, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        def one(w: dict[str, Tensor], record: Tensor, target: Tensor) -> Tensor:
            output = cast(Tensor, functional_call(self._module, w, (record.unsqueeze(0),)))
            return self._loss(output, target.unsqueeze(0)).sum()

        weights = {n: p.detach() for n, p in self._parameters.items()}
        batched = vmap(grad_and_value(one), in_dims=(None, 0, 0), randomness="different")
        with _without_advice():
            found, losses = cast(Any, batched)(weights, x, y)
        return losses, cast(dict[str, Tensor], found)


def _stacked(names: Iterable[str], rows: list[list[Tensor]]) -> dict[str, Tensor]:
    return {
        n: torch.stack(column) for n, column in zip(names, zip(*rows, strict=True), strict=True)
    }
