"""What one forward and backward pass leaves behind: each module's inputs and output gradients.

Weights do not require grad during the pass, so autograd computes the gradients of activations and
nothing else; the per-sample gradients of weights follow from what is recorded here.
"""

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fedpact.errors import ModelError


@dataclass(eq=False)
class Call:
    """One call of a module: its arguments and, after the backward pass, ∂Σℓ/∂output.

    grad stays None where no loss depends on the output: the call then adds nothing.
    pooled: where a max-pooling took the output, the numbers of grad that are not zero, with their
    places in it (see privacy.pooled).
    """

    args: tuple[object, ...]
    kwargs: dict[str, object]
    grad: Tensor | None = None
    pooled: tuple[Tensor, Tensor] | None = None

    _versions: list[tuple[Tensor, int]] = field(default_factory=list[tuple[Tensor, int]])

    @property
    def values(self) -> tuple[object, ...]:
        """All arguments, by position and by name."""
        return (*self.args, *self.kwargs.values())

    @property
    def tensors(self) -> list[Tensor]:
        """The arguments that are tensors."""
        return [a for a in self.values if isinstance(a, Tensor)]

    @property
    def input(self) -> Tensor:
        """The first of them."""
        return next(a for a in self.values if isinstance(a, Tensor))

    def rebuilt(self, tensors: Iterable[Tensor]) -> tuple[tuple[object, ...], dict[str, object]]:
        """The arguments with others in place of the tensors, in the same order."""
        others = iter(tensors)
        values = [next(others) if isinstance(a, Tensor) else a for a in self.values]
        count = len(self.args)
        return tuple(values[:count]), dict(zip(self.kwargs, values[count:], strict=True))

    def watch(self) -> "Call":
        """Remember what the inputs hold; returns the call itself."""
        self._versions = [(t, t._version) for t in self.tensors]
        return self

    def check(self, path: str) -> None:
        """Raise ModelError where a watched input no longer holds what the module saw."""
        if any(t._version != version for t, version in self._versions):
            raise ModelError(
                f"the input of layer {path!r} was changed in place after the layer had read it: "
                "its gradient cannot be computed; write x = x + ... for x += ... behind that layer"
            )


class _Tap(torch.autograd.Function):
    """Give a tensor without history one, in place, and keep the gradient that arrives at it."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor, call: Call) -> Tensor:  # noqa: ARG004
        # Marked as changed in place, not returned as a view: a view made by a custom function
        # must not be written to, and ReLU(inplace=True) may follow.
        ctx.mark_dirty(output)
        ctx.call = call
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        ctx.call.grad = grads[0]
        return None, None, None


def _tap(output: Tensor, call: Call, fresh: bool) -> Tensor:
    if output.requires_grad:
        # Overwritten, a view loses its hook; nn.Linear returns one for more than two dimensions.
        output = output.clone() if output._is_view() else output

        def keep(grad: Tensor) -> None:
            call.grad = grad

        # A later in-place operation leaves this hook with the value that the layer returned.
        cast(Any, output).register_hook(keep)
        return output
    anchor = torch.zeros((), requires_grad=True)
    # Only a module of ours is known to return a tensor of its own: any other may return its input.
    return cast(Tensor, cast(Any, _Tap).apply(output if fresh else output.clone(), anchor, call))


@dataclass(frozen=True)
class Recorded:
    """A module to record. accept raises where a call does not have the structure it needs."""

    module: nn.Module
    accept: Callable[[Call, object], None]
    fresh: bool


def record(
    entries: Iterable[Recorded], run: Callable[[], Tensor]
) -> tuple[Tensor, list[list[Call]]]:
    """Return run() and, for each entry, its module's calls in order. Leaves no hook behind."""
    calls: list[list[Call]] = []
    handles: list[RemovableHandle] = []
    try:
        for entry in entries:
            calls.append([])
            handles.append(_hook(entry, calls[-1]))
        return run(), calls
    finally:
        for handle in handles:
            handle.remove()


def _hook(entry: Recorded, calls: list[Call]) -> RemovableHandle:
    def hook(
        _: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], output: object
    ) -> object:
        if not torch.is_grad_enabled():
            return output
        call = Call(args, kwargs).watch()
        entry.accept(call, output)
        calls.append(call)
        return _tap(cast(Tensor, output), call, entry.fresh)

    # First in line: a hook of the model's own may replace the output that we need.
    return entry.module.register_forward_hook(hook, prepend=True, with_kwargs=True)


@contextmanager
def requiring_grad(
    parameters: Iterable[nn.Parameter], flag: bool = True
) -> Generator[list[nn.Parameter]]:
    """Let autograd record, and the parameters require grad or not; all is as before afterwards."""
    held = list(parameters)
    before = [p.requires_grad for p in held]
    try:
        for p in held:
            p.requires_grad_(flag)
        with torch.enable_grad():
            yield held
    finally:
        for p, earlier in zip(held, before, strict=True):
            p.requires_grad_(earlier)


def gradients(
    output: Tensor, parameters: list[nn.Parameter], grad: Tensor | None = None
) -> list[Tensor]:
    """∂output/∂parameters by one backward pass, zeros for a parameter that output ignores."""
    if not output.requires_grad:
        return [torch.zeros_like(p) for p in parameters]
    found = cast(
        tuple[Tensor | None, ...],
        torch.autograd.grad(output, parameters, grad, allow_unused=True),
    )
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]


def named_modules(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """Every (path, module), a module that stands at several paths once for each."""
    return list(cast(Any, root).named_modules(remove_duplicate=False))
