"""A chain of known layers, run without autograd: a level of the kernel.

nn.Sequential, nested or not, of layers each with weights of its own, becomes a list of stages once.
A pass over it leaves the same shares as the graph does, some 20 to 40 % sooner. Two things that
autograd cannot do: ReLU goes behind the max-pooling that follows it, where it has a quarter of the
numbers to look at and the same result, and activations overwrite what no one reads again.

Records are kept apart by construction: each stage maps [B, ...] to [B, ...] record by record, as
its class says, and modules of any other class, or with a hook or a forward of their own, make no
chain. A stage keeps from forward what its backward needs, and lets go of it there; what `backward`
is given is its own to overwrite.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedpact.common.losses import Loss, cross_entropy, mask_known_classes
from fedpact.common.params import FlatModel
from fedpact.per_sample.convolution import Convolved, Geometry, Pooled, Pooled2d, sparse
from fedpact.per_sample.gradients import Made, Outer
from fedpact.per_sample.layout import overhead
from fedpact.per_sample.products import linear
from fedpact.per_sample.share import Share

_aten = cast(Any, torch.ops.aten)

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

Shares = dict[str, list[Share]]
"""What a pass leaves, by the model's parameter names."""


class Stage(ABC):
    """One layer. fresh: forward returns a tensor of its own that its backward does not read."""

    fresh = False

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """The layer's output."""

    @abstractmethod
    def backward(self, g: Tensor, wanted: bool) -> Tensor:
        """From ∂/∂output to ∂/∂input; anything where it is not wanted."""


class Weighted(Stage):
    """A layer with weights. names: its own parameters' names -> the model's, of those to train."""

    fresh = True

    def __init__(self, module: nn.Module, names: dict[str, str]) -> None:
        self._module, self._names = module, names
        self._taken: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """See Stage."""
        self._x = x
        return self._apply(x)

    def backward(self, g: Tensor, wanted: bool) -> Tensor:
        """See Stage."""
        x, self._x = self._x, g
        self._taken = x, g
        return self._input_grad(x, g) if wanted else g

    @property
    def weight(self) -> Tensor:
        """The layer's weight [O, ...]."""
        return cast(Tensor, self._module.weight)

    def shares(self) -> Shares:
        """What the last pass left, which the stage holds no longer."""
        (x, g), self._taken = cast(tuple[Tensor, Tensor], self._taken), None
        found: Shares = {}
        for local, name in self._names.items():
            found[name] = [self._weight(x, g) if local == "weight" else self._bias(g)]
        return found

    @abstractmethod
    def _apply(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def _input_grad(self, x: Tensor, g: Tensor) -> Tensor: ...

    @abstractmethod
    def _weight(self, x: Tensor, g: Tensor) -> Share: ...

    @abstractmethod
    def _bias(self, g: Tensor) -> Share: ...


class Linear(Weighted):
    """y = x Wᵀ + b for x [B, ..., K]."""

    def _apply(self, x: Tensor) -> Tensor:
        return linear(x, self._own.weight, self._own.bias)

    def _input_grad(self, x: Tensor, g: Tensor) -> Tensor:  # noqa: ARG002
        return linear(g, self._own.weight.t(), None)

    def _weight(self, x: Tensor, g: Tensor) -> Share:
        return Outer(_positions(g), _positions(x))

    def _bias(self, g: Tensor) -> Share:
        return Made(g if g.dim() == 2 else _positions(g).sum(1))

    @property
    def _own(self) -> nn.Linear:
        return cast(nn.Linear, self._module)


class Conv2d(Weighted):
    """A convolution of x [B, C, H, W] that torch pads by itself.

    pooled: where a max-pooling took the output, the numbers of its gradient that are not zero.
    """

    def __init__(self, module: nn.Module, names: dict[str, str]) -> None:
        super().__init__(module, names)
        self.geometry = Geometry.of(self._own)
        self.pooled: Pooled | None = None

    def _apply(self, x: Tensor) -> Tensor:
        return self.geometry.forward(x, self._own.weight, self._own.bias)

    def _input_grad(self, x: Tensor, g: Tensor) -> Tensor:
        return self.geometry.input_grad(x, g, self._own.weight)

    def _weight(self, x: Tensor, g: Tensor) -> Share:
        pooled, self.pooled = self.pooled, None
        weight = self._own.weight
        if pooled is not None and sparse(self.geometry, weight, g, pooled):
            return Pooled2d(self.geometry, weight, x, g, pooled)
        return Convolved(self.geometry, weight, x, g)

    def _bias(self, g: Tensor) -> Share:
        return Made(g.flatten(2).sum(2))

    @property
    def _own(self) -> nn.Conv2d:
        return cast(nn.Conv2d, self._module)


class ReLU(Stage):
    """y = max(x, 0), on top of x where no one else reads it."""

    def __init__(self, overwrite: bool) -> None:
        self.fresh, self._overwrite = False, overwrite

    def forward(self, x: Tensor) -> Tensor:
        """See Stage."""
        self._y = x.relu_() if self._overwrite else x.relu()
        return self._y

    def backward(self, g: Tensor, wanted: bool) -> Tensor:  # noqa: ARG002
        """See Stage."""
        y, self._y = self._y, g
        return _aten.threshold_backward.grad_input(g, y, 0, grad_input=g)


class Activation(Stage):
    """A function of each number whose derivative follows from its value: tanh, sigmoid."""

    def __init__(
        self, function: Callable[[Tensor], Tensor], derivative: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        self._function, self._derivative = function, derivative

    def forward(self, x: Tensor) -> Tensor:
        """See Stage."""
        self._y = self._function(x)
        return self._y

    def backward(self, g: Tensor, wanted: bool) -> Tensor:  # noqa: ARG002
        """See Stage."""
        y, self._y = self._y, g
        return self._derivative(g, y)


class MaxPool2d(Stage):
    """The largest of each window; where several are, the first has the gradient.

    Windows may overlap: then a place stands several times among those told to the convolution.
    """

    fresh = True

    def __init__(self, module: nn.MaxPool2d, previous: Stage | None) -> None:
        self._conv = previous if isinstance(previous, Conv2d) else None
        stride = module.stride or module.kernel_size
        sides = [_both(v) for v in (module.kernel_size, stride, module.padding, module.dilation)]
        self._settings = [*sides, module.ceil_mode]

    def forward(self, x: Tensor) -> Tensor:
        """See Stage."""
        y, self._index = _aten.max_pool2d_with_indices.default(x, *self._settings)
        self._x = x
        return y

    def backward(self, g: Tensor, wanted: bool) -> Tensor:  # noqa: ARG002
        """See Stage."""
        x, index, self._x, self._index = self._x, self._index, g, g
        if self._conv is not None:
            self._conv.pooled = g, index
        return _aten.max_pool2d_with_indices_backward.default(g, x, *self._settings, index)


class Flatten(Stage):
    """Records [B, ...] as [B, m]."""

    def forward(self, x: Tensor) -> Tensor:
        """See Stage."""
        self._shape = x.shape
        self._by_pixel = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
        return x.flatten(1)

    def backward(self, g: Tensor, wanted: bool) -> Tensor:  # noqa: ARG002
        """See Stage."""
        g = g.view(self._shape)
        return g.contiguous(memory_format=torch.channels_last) if self._by_pixel else g


class Chain:
    """The stages of one model, in order."""

    def __init__(self, model: FlatModel, stages: list[Stage]) -> None:
        self._stages = stages
        self._weighted = [s for s in stages if isinstance(s, Weighted)]
        self._first = next(i for i, s in enumerate(stages) if isinstance(s, Weighted))
        self._by_image = any(isinstance(s, Conv2d) for s in stages)
        self._size = model.size
        self._costs: dict[torch.Size, tuple[int, int, float]] = {}
        self._states = [vars(module) for module in model.module.modules()]
        self._hooks = [state[hooks] for state in self._states for hooks in _HOOKS]

    @staticmethod
    def of(model: FlatModel) -> "Chain | None":
        """Return the stages, or None where the model is no chain of layers that are known."""
        chain = chain_of(model.module)
        layers = [m for m in chain or [] if any(True for _ in m.parameters())]
        parameters = [id(p) for m in layers for p in m.parameters()]
        # A layer that runs twice, or shares its weights, has several shares: that is the graph's.
        if chain is None or not layers or len(set(parameters)) < len(parameters):
            return None
        of_parameter = {id(p): name for name, p in model.module.named_parameters()}
        stages: list[Stage] = []
        for module in _relu_last(chain):
            names = {
                local: of_parameter[id(p)]
                for local, p in module.named_parameters()
                if of_parameter[id(p)] in model.own
            }
            stage = _stage_of(module, names, stages[-1] if stages else None)
            if stage is None:
                return None
            stages.append(stage)
        return Chain(model, stages)

    @property
    def holds(self) -> bool:
        """Whether the modules are still no more than their layers: hooks may have been added."""
        return not (any(self._hooks) or any("forward" in state for state in self._states))

    def takes(self, x: Tensor) -> bool:
        """Whether x has its batch where the layers look for it: in front of a record's own."""
        return x.dim() == 4 if self._by_image else x.dim() >= 2

    def run(self, x: Tensor, y: Tensor, loss: Loss) -> tuple[Tensor, Shares]:
        """Losses [P], and each parameter's shares: none where no loss depends on the output."""
        losses, g = _differentiated(loss, self._outputs(x), y)
        if g is None:
            return losses, {}
        for i in reversed(range(self._first, len(self._stages))):
            g = self._stages[i].backward(g, wanted=i > self._first)
        return losses, {n: s for stage in self._weighted for n, s in stage.shares().items()}

    def losses(self, x: Tensor, y: Tensor, loss: Loss) -> Tensor:
        """Losses [P] with the bits of `run`; what stages keep, the next pass replaces."""
        return _differentiated(loss, self._outputs(x), y)[0]

    def cost(self, x: Tensor) -> tuple[int, int, float]:
        """Bytes of a record's largest gradient, 0, and a pass's overhead in records."""
        shape = x.shape[1:]
        if shape not in self._costs:
            with torch.no_grad():
                flops, given = 0.0, x.new_zeros(2, *shape)
                for stage in self._stages:
                    given = stage.forward(given)
                    if isinstance(stage, Weighted):
                        flops += 6.0 * given[0].numel() * stage.weight[0].numel()
            gradients = max(
                (s.weight.nbytes for s in self._weighted if s.weight.dim() > 2), default=0
            )
            self._costs[shape] = gradients, 0, overhead(len(self._stages), flops, self._size)
        return self._costs[shape]

    def _outputs(self, x: Tensor) -> Tensor:
        for stage in self._stages:
            x = stage.forward(x)
        return x


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
    known, y = mask_known_classes(y, outputs.shape[1])
    losses, total = _aten.nll_loss_forward.default(log, y, None, 0, -100)
    ones = torch.ones_like(losses)
    g = _aten.nll_loss_backward.default(ones, log, y, None, 0, -100, total)
    # A record without a class of the model's has no loss, so it is left out.
    losses = torch.where(known, losses, math.nan)
    return losses, _aten._log_softmax_backward_data.default(g, log, 1, log.dtype)


def chain_of(module: nn.Module) -> list[nn.Module] | None:
    """The layers that a module runs one after another, None where it does anything else."""
    if _changed(module):
        return None
    if type(module) is not nn.Sequential:
        return None if any(True for _ in module.children()) else [module]
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


def _stage_of(module: nn.Module, names: dict[str, str], previous: Stage | None) -> Stage | None:
    """The stage that computes what the module does, where `previous` has run before it.

    Only of the very classes below: a subclass or a parametrisation computes something else.
    """
    kind = type(module)
    if kind is nn.Linear:
        return Linear(module, names)
    if kind is nn.Conv2d and Geometry.of(cast(nn.Conv2d, module)).plain:
        return Conv2d(module, names)
    if kind is nn.ReLU:
        return ReLU(overwrite=previous is not None and previous.fresh)
    if kind is nn.Tanh:
        return Activation(torch.tanh, _aten.tanh_backward)
    if kind is nn.Sigmoid:
        return Activation(torch.sigmoid, _aten.sigmoid_backward)
    if kind is nn.MaxPool2d and not cast(nn.MaxPool2d, module).return_indices:
        return MaxPool2d(cast(nn.MaxPool2d, module), previous)
    if flattens(module):
        return Flatten()
    return None


def flattens(module: nn.Module) -> bool:
    """Whether a module makes [B, m] of records [B, ...], and is nothing else."""
    return type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1)


def _positions(t: Tensor) -> Tensor:
    """[B, ..., N] as [B, T, N]."""
    return t.reshape(t.shape[0], -1, t.shape[-1])


def _both(value: int | tuple[int, ...]) -> list[int]:
    return [value, value] if isinstance(value, int) else list(value)
