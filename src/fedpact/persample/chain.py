"""A model that is a chain of layers, run without autograd: the second level of the kernel.

nn.Sequential, nested or not, of layers each with weights of its own, becomes a list of stages once.
A pass over it leaves the same calls as the tape does, some 20 to 40 % sooner. Two things that
autograd cannot do: ReLU goes behind the max-pooling that follows it, where it has a quarter of the
numbers to look at and the same result, and activations overwrite what no one reads again.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn

from fedpact.losses import Loss, cross_entropy
from fedpact.params import FlatModel
from fedpact.persample.layers import layer_of
from fedpact.persample.owners import Owner
from fedpact.persample.stages import Other, Stage, Weighted, stage_of
from fedpact.persample.tape import Call, requiring_grad

_aten = cast(Any, torch.ops.aten)

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Plan:
    """The stages of one model, in order."""

    def __init__(self, model: FlatModel, stages: list[Stage], weighted: list[Weighted]) -> None:
        self._model, self._stages, self._weighted = model, stages, weighted
        self._first = min(stages.index(stage) for stage in weighted)
        self._states = [vars(module) for module in model.module.modules()]
        self._hooks = [state[hooks] for state in self._states for hooks in _HOOKS]
        self._by_autograd = any(isinstance(stage, Other) for stage in stages)

    @staticmethod
    def of(model: FlatModel, owners: list[Owner]) -> "Plan | None":
        """Compile the model, or return None where it is not a chain of layers with rules."""
        chain = chain_of(model.module)
        if chain is None or any(owner.layer is None for owner in owners):
            return None
        of_module = {id(owner.module): owner for owner in owners}
        layers = [m for m in chain if any(True for _ in m.parameters())]
        # A layer that runs twice leaves two calls: that is the tape's to tell apart.
        if len({id(m) for m in layers}) < len(layers) or not of_module.keys() <= set(
            map(id, layers)
        ):
            return None
        stages: list[Stage] = []
        weighted: dict[int, Weighted] = {}
        for module in _relu_last(chain):
            owner = of_module.get(id(module))
            stages.append(stage_of(module, owner, stages[-1] if stages else None))
            if owner is not None:
                weighted[id(module)] = cast(Weighted, stages[-1])
        return Plan(model, stages, [weighted[id(owner.module)] for owner in owners])

    @property
    def holds(self) -> bool:
        """Whether the modules are still no more than their layers: hooks may have been added."""
        return not (any(self._hooks) or any("forward" in state for state in self._states))

    def run(self, x: Tensor, y: Tensor, loss: Loss) -> tuple[Tensor, list[list[Call]]]:
        """Losses, and the calls of each owner: one, or none where no loss depends on the output.

        Raises Unfit where an output is not one tensor with the batch as leading dimension.
        """
        if not self._by_autograd:
            return self._run(x, y, loss)
        with requiring_grad(self._model.module.parameters(), False), torch.no_grad():
            return self._run(x, y, loss)

    def _run(self, x: Tensor, y: Tensor, loss: Loss) -> tuple[Tensor, list[list[Call]]]:
        for stage in self._stages:
            x = stage.forward(x)
        losses, g = _differentiated(loss, x, y)
        del x
        if g is None:
            return losses, [[] for _ in self._weighted]
        for i in reversed(range(self._first, len(self._stages))):
            g = self._stages[i].backward(g, wanted=i > self._first)
        return losses, [[stage.taken()] for stage in self._weighted]


def _differentiated(loss: Loss, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor | None]:
    """Losses as `loss` gives them, and ∂Σ losses/∂outputs, a tensor of its own."""
    if loss is cross_entropy and outputs.dim() == 2 and y.dim() == 1 and y.dtype == torch.int64:
        return _cross_entropy(outputs, y)
    outputs = outputs.detach().requires_grad_()
    with torch.enable_grad():
        losses = loss(outputs, y)
        if not losses.requires_grad:
            return losses, None
        g = torch.autograd.grad(losses, outputs, torch.ones_like(losses), materialize_grads=True)
    return losses.detach(), g[0].clone()


def _cross_entropy(outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    log = torch.log_softmax(outputs, 1)
    losses, total = _aten.nll_loss_forward.default(log, y, None, 0, -100)
    ones = torch.ones_like(losses)
    g = _aten.nll_loss_backward.default(ones, log, y, None, 0, -100, total)
    return losses, _aten._log_softmax_backward_data.default(g, log, 1, log.dtype)


def chain_of(module: nn.Module) -> list[nn.Module] | None:
    """The layers that a module runs one after another, None where it does anything else."""
    if _changed(module):
        return None
    if type(module) is not nn.Sequential:
        alone = layer_of(module) is not None or not any(True for _ in module.parameters())
        return [module] if alone and not any(True for _ in module.children()) else None
    chain: list[nn.Module] = []
    for child in module:
        inner = chain_of(child)
        if inner is None:
            return None
        chain += inner
    return chain


def _relu_last(chain: list[nn.Module]) -> list[nn.Module]:
    found = list(chain)
    for i in range(len(found) - 1):
        if type(found[i]) is nn.ReLU and isinstance(found[i + 1], nn.MaxPool2d):
            found[i], found[i + 1] = found[i + 1], found[i]
    return found


def _changed(module: nn.Module) -> bool:
    """Whether the module does more than its class says."""
    state = vars(module)
    return "forward" in state or any(state[hooks] for hooks in _HOOKS)
