"""The layers of a compiled model: forward and backward by hand, one small class each.

A stage keeps from forward what its backward needs, and lets go of it there. Layers with weights
leave a Call behind, from which the layers' rules compute norms and sums as they do for the tape.
What `backward` is given is its own to overwrite.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedpact.persample.convolution import Geometry
from fedpact.persample.owners import Owner
from fedpact.persample.products import linear
from fedpact.persample.tape import Call

_aten = cast(Any, torch.ops.aten)


class Unfit(Exception):
    """A model turned out not to be what its plan was made for."""


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
    """A layer with weights. call: what the pass left, for the layer's rule.

    owner: who answers for the weights, None where there are none to train.
    """

    fresh = True

    def __init__(self, module: nn.Module, owner: Owner | None) -> None:
        self._module = module
        layer = owner.layer if owner else None
        self._dimensions = layer.dimensions(module) if layer else 0
        self.call: Call | None = None

    def forward(self, x: Tensor) -> Tensor:
        """See Stage."""
        if x.dim() < self._dimensions:
            raise Unfit
        self.call = Call((x,), {})
        return self._apply(x)

    def backward(self, g: Tensor, wanted: bool) -> Tensor:
        """See Stage."""
        call = cast(Call, self.call)
        call.grad = g
        return self._input_grad(cast(Tensor, call.args[0]), g) if wanted else g

    def taken(self) -> Call:
        """The call of the last pass, which the stage holds no longer."""
        call, self.call = self.call, None
        return cast(Call, call)

    @abstractmethod
    def _apply(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def _input_grad(self, x: Tensor, g: Tensor) -> Tensor: ...


class Linear(Weighted):
    """y = x Wᵀ + b."""

    def _apply(self, x: Tensor) -> Tensor:
        return linear(x, self._own.weight, self._own.bias)

    def _input_grad(self, x: Tensor, g: Tensor) -> Tensor:  # noqa: ARG002
        return linear(g, self._own.weight.t())

    @property
    def _own(self) -> nn.Linear:
        return cast(nn.Linear, self._module)


class Conv2d(Weighted):
    """A convolution that torch pads by itself."""

    def __init__(self, module: nn.Module, owner: Owner | None) -> None:
        super().__init__(module, owner)
        self._geometry = Geometry.of(self._own)

    def _apply(self, x: Tensor) -> Tensor:
        return self._geometry.forward(x, self._own.weight, self._own.bias)

    def _input_grad(self, x: Tensor, g: Tensor) -> Tensor:
        return self._geometry.input_grad(x, g, self._own.weight)

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


class Curve(Stage):
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
        sides = [_pair(v) for v in (module.kernel_size, stride, module.padding, module.dilation)]
        self._settings = [*sides, module.ceil_mode]

    def forward(self, x: Tensor) -> Tensor:
        """See Stage."""
        y, self._index = _aten.max_pool2d_with_indices.default(x, *self._settings)
        self._x = x
        return y

    def backward(self, g: Tensor, wanted: bool) -> Tensor:  # noqa: ARG002
        """See Stage."""
        x, index, self._x, self._index = self._x, self._index, g, g
        if self._conv is not None and self._conv.call is not None:
            self._conv.call.pooled = g, index
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


class Other(Weighted):
    """Any other layer, differentiated by autograd on its own."""

    fresh = False

    def forward(self, x: Tensor) -> Tensor:
        """See Stage."""
        y = super().forward(x)
        if not isinstance(cast(object, y), Tensor) or y.shape[:1] != x.shape[:1]:
            raise Unfit
        return y

    def backward(self, g: Tensor, wanted: bool) -> Tensor:
        """See Stage."""
        result = super().backward(g, wanted)
        self._leaf = self._y = g
        return result

    def _apply(self, x: Tensor) -> Tensor:
        self._leaf = x.detach()
        if not x.is_floating_point():
            self._y = self._module(x)
            return self._y
        self._leaf.requires_grad_()
        inplace = getattr(self._module, "inplace", False)
        try:
            with torch.enable_grad():
                # A leaf must not be overwritten, as nn.ELU(inplace=True) would.
                self._y = self._module(self._leaf.clone() if inplace else self._leaf)
        except RuntimeError as error:
            raise Unfit from error
        return self._y.detach()

    def _input_grad(self, x: Tensor, g: Tensor) -> Tensor:
        if not self._leaf.requires_grad or not self._y.requires_grad:
            return torch.zeros_like(x)
        found = torch.autograd.grad(self._y, self._leaf, g, materialize_grads=True)
        # It may be an expanded number, or g itself.
        return found[0].clone()


def _pair(value: int | tuple[int, ...]) -> list[int]:
    return [value, value] if isinstance(value, int) else list(value)


def stage_of(module: nn.Module, owner: Owner | None, previous: Stage | None) -> Stage:
    """The stage that computes what the module does, where `previous` has run before it."""
    kind = type(module)
    if kind is nn.Linear:
        return Linear(module, owner)
    if kind is nn.Conv2d and Geometry.of(cast(nn.Conv2d, module)).plain:
        return Conv2d(module, owner)
    if kind is nn.ReLU:
        return ReLU(overwrite=previous is not None and previous.fresh)
    if kind is nn.Tanh:
        return Curve(torch.tanh, _aten.tanh_backward)
    if kind is nn.Sigmoid:
        return Curve(torch.sigmoid, _aten.sigmoid_backward)
    if kind is nn.MaxPool2d and not cast(nn.MaxPool2d, module).return_indices:
        return MaxPool2d(cast(nn.MaxPool2d, module), previous)
    if isinstance(module, nn.Flatten) and (module.start_dim, module.end_dim) == (1, -1):
        return Flatten()
    return Other(module, owner)
