"""Models that are a sequence of layers, by the classes of these."""

from collections.abc import Sequence

from torch import Tensor, nn

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class ScaledBias(nn.Linear):
    """y = W u + s b: a linear layer whose bias is the weight of a constant input s > 0."""

    input = 1.0

    @staticmethod
    def of(in_features: int, out_features: int, scale: float) -> "ScaledBias":
        """Return a layer with s = scale, drawn as nn.Linear's are."""
        layer = ScaledBias(in_features, out_features)
        layer.input = scale
        return layer

    def forward(self, input: Tensor) -> Tensor:
        """Map [B, ..., in] to [B, ..., out]."""
        return nn.functional.linear(input, self.weight, self.bias * self.input)


def sequence_of(module: nn.Module) -> list[nn.Module] | None:
    """The layers that a module runs one after another; None if it does anything else.

    So it is None for a module with a hook, or with a forward set on the instance.
    """
    state = vars(module)
    if "forward" in state or any(state[hooks] for hooks in _HOOKS):
        return None
    if type(module) is not nn.Sequential:
        return None if any(True for _ in module.children()) else [module]
    found: list[nn.Module] = []
    for child in module:
        inner = sequence_of(child)
        if inner is None:
            return None
        found += inner
    return found


def is_torchs(module: nn.Module) -> bool:
    """Whether a model is a sequence of torch's layers, which depend on shapes and not on values."""
    return all(
        type(layer) is ScaledBias or type(layer).__module__.startswith("torch.nn.modules.")
        for layer in sequence_of(module) or [module]
    )


def by_pixel(module: nn.Module) -> bool:
    """Whether images should be stored by pixel for a module: a sequence of torch's layers.

    Other code may depend on the memory format: `view` fails if channels do not come first, and
    `as_strided` reads other numbers.
    """
    return gains_by_pixel(sequence_of(module) or []) and is_torchs(module)


def gains_by_pixel(layers: Sequence[nn.Module]) -> bool:
    """Whether images stored by pixel are faster: max-pooling then takes a ninth of its time.

    Not if channels are normalised: torch then computes a variance as the mean square less the
    squared mean, which is rounding error for nearly equal numbers, as in an empty image.
    """

    def has(*kinds: type[nn.Module]) -> bool:
        return any(isinstance(layer, kinds) for layer in layers)

    return has(nn.Conv2d) and has(nn.MaxPool2d) and not has(nn.GroupNorm, nn.InstanceNorm2d)
