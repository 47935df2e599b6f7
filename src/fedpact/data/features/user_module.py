"""Features by a user's module, which is traced once into a fixed list of operations.

It is traced (per_sample.tracing) on a made-up record before any record is read. The operations run
on each record by itself with the weights of that moment, so no state is carried to the next one.
What cannot be traced is refused: branches on values, passes that change weights or buffers,
TorchScript, random numbers. The weights are the factory's, or a file's with the plan's SHA-256.
"""

import hashlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedpact.common.errors import ModelError
from fedpact.common.params import one_thread
from fedpact.common.user_code import own_factory, read_checked, tensors_of
from fedpact.data.features.kinds import FeatureSettings
from fedpact.per_sample.tracing.export import Trace, Untraceable, WithLoss, trace_of
from fedpact.per_sample.tracing.program import draws, evaluate_nodes

_FORM = "factory(shape) -> nn.Module"
# The random state belongs to the process, so threads must not draw at the same time.
_DRAWING = threading.Lock()
_TOLD = 32  # numbers of `answer`


class Backbone:
    """A frozen module that maps records [1, *shape] to numbers [1, ...] deterministically.

    shape: of a record. seed: for weights that the factory draws. at: the base of a relative path
    of weights. Raises ModelError: the factory fails, or the file or the output is unusable.
    """

    def __init__(
        self, settings: FeatureSettings, shape: tuple[int, ...], seed: int, at: Path
    ) -> None:
        self._name = f"features.kind = {settings.kind!r}"
        # Keep a reference, so that its id stays unique.
        self._factory = factory_of(settings.kind)
        with _DRAWING, one_thread(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            try:
                module = self._factory(shape)
            except (Exception, SystemExit) as error:
                raise ModelError(
                    f"{self._name}: calling it with shape {shape} failed with "
                    f"{type(error).__name__}: {error}; expected {_FORM}"
                ) from error
        if not isinstance(module, nn.Module):
            raise ModelError(f"{self._name} returned {type(module).__name__}: expected {_FORM}")
        if settings.weights is not None:
            self._fill(module, at / settings.weights, settings.sha256)
        if any(map(is_lazy, (*module.parameters(), *module.buffers()))):
            raise ModelError(
                f"{self._name} has lazy layers: expected weights with values; have the factory "
                "call the module once"
            )
        whole = WithLoss(module.eval(), self._numbers)
        self._trace = self._trace_for(whole, shape)
        held = whole.tensors() | self._trace.constants
        self._given = {
            name: held[target].detach().clone()
            for name, (kind, target) in self._trace.inputs.items()
            if kind != "record"
        }
        self._try(shape)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the features [p] of a record x [1, *shape] as float32, times a power of two.

        The power makes the largest magnitude lie in [0.5, 1), unless all are 0, so that the norm
        does not overflow. Errors of the module's operations are passed on.
        """
        given = dict(self._given)
        for name, (kind, target) in self._trace.inputs.items():
            if kind == "record":
                given[name] = x if target == "x" else x.new_zeros(1)
        with one_thread(), torch.no_grad():
            found = evaluate_nodes(self._trace.nodes, given)[self._trace.result]
        values = found.reshape(-1).double().numpy()
        exponent = np.frexp(np.abs(values).max())[1]
        return torch.from_numpy(np.ldexp(values, -exponent)).float()

    def _numbers(self, found: Any, y: Tensor) -> Tensor:
        """Return the module's output for a record as numbers [1, p]."""
        del y
        if not isinstance(found, Tensor) or found.dim() < 2 or len(found) != 1:
            what = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise ModelError(
                f"{self._name} answers a batch of one record with {what}: expected [1, ...]"
            )
        if found.is_complex() or not found.numel():
            raise ModelError(
                f"{self._name} answers a record with {found.numel()} numbers of {found.dtype}: "
                "expected at least one, and real numbers, as torch.view_as_real makes of others"
            )
        return found.flatten(1)

    def _trace_for(self, whole: WithLoss, shape: tuple[int, ...]) -> Trace:
        x = torch.zeros(1, *shape)
        try:
            trace = trace_of(whole, x, torch.zeros(1), 1)
        except Untraceable as why:
            raise ModelError(
                f"{self._name} cannot be traced: {why}; expected operations of torch on the "
                "record, the same for all records, that leave weights and buffers as they are"
            ) from why
        if any(map(draws, trace.nodes)):
            raise ModelError(
                f"{self._name} draws random numbers at a record: expected a module without, such "
                "as one whose dropout is off in evaluation"
            )
        return trace

    def _try(self, shape: tuple[int, ...]) -> None:
        """Compute width, answer and fingerprint from made-up records."""
        drawn = torch.rand(1, *shape, generator=torch.Generator().manual_seed(0))
        answers = list[Tensor]()
        for x in (torch.zeros(1, *shape), torch.ones(1, *shape), drawn):
            try:
                answers.append(self(x))
            except Exception as error:
                raise ModelError(
                    f"{self._name} failed at a made-up record with {type(error).__name__}: "
                    f"{error}; expected numbers, which say how many a record has"
                ) from error
        self.width = len(answers[0])
        self.answer: tuple[float, ...] = tuple(F.normalize(answers[-1][None])[0, :_TOLD].tolist())
        parts = ["\n".join(str(node.format_node()) for node in self._trace.nodes).encode()]
        for name, tensor in self._given.items():
            parts.append(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            parts.append(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        self.fingerprint = hashlib.sha256(b"\0".join(parts)).hexdigest()

    def _fill(self, module: nn.Module, path: Path, sha256: str | None) -> None:
        block = read_checked(path, sha256, "features.weights")
        tensors = tensors_of(path, block, "features.weights")
        try:
            module.load_state_dict(tensors)
        except Exception as error:
            raise ModelError(
                f"features.weights: {path} does not fill the module of {self._name} "
                f"({type(error).__name__}: {error}): expected its state_dict, as "
                "safetensors.torch.save_file or torch.save writes it"
            ) from error


def factory_of(kind: str) -> Callable[..., Any]:
    """Return the current factory of the name 'package.module:factory'. Raises ModelError."""
    return own_factory(kind, "features.kind", (), _FORM)
