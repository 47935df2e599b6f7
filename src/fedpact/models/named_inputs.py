"""Models whose inputs have names, as those of Hugging Face: records reach them by these names.

A record of whole numbers is tokens, with their mask behind them in rows of one length T:

    [T]       input_ids
    [2, T]    input_ids, attention_mask
    [3, T]    input_ids, attention_mask, token_type_ids

and one of fractions is what the model calls its main input, as pixel_values of an image. Of what
such a model returns its logits are used.
"""

import inspect
from collections.abc import Mapping
from typing import Any, Final, cast

import torch.nn.functional as F
from torch import Tensor, nn

from fedpact.common.params import TOKENS, model_name

_MEASURED: Final = ("pixel_values", "input_values", "input_features", "inputs_embeds")
_OUTPUTS: Final = ("logits", "out")


class NamedInputs(nn.Module):
    """A model that is given records by name, and answers with its logits.

    names: of the model's inputs. by_place: a label is a class at each place of a record, so the
    classes come second: [B, K, T] of a sequence, [B, K, height, width] of an image. The weights
    have the names that they have in the model itself.
    """

    def __init__(self, model: nn.Module, names: tuple[str, ...], *, by_place: bool = False) -> None:
        super().__init__()
        self.model, self._names, self._by_place = model, names, by_place
        self.called = model_name(model)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of records x: [B, T] or [B, rows, T] of tokens, [B, ...] else."""
        found = _logits_of(self.model(**self._named(x)))
        if not self._by_place or not isinstance(found, Tensor) or found.dim() < 3:
            return found
        if found.dim() == 3:
            return found.movedim(2, 1)
        if x.dim() == 4 and found.shape[2:] != x.shape[2:]:
            # Many answer at a fraction of the image's size, and are trained on it enlarged.
            found = F.interpolate(found, x.shape[2:], mode="bilinear", align_corners=False)
        return found

    def _named(self, x: Tensor) -> dict[str, Tensor]:
        if x.is_floating_point() or "input_ids" not in self._names:
            main = getattr(self.model, "main_input_name", None)
            measured = (main, *(name for name in _MEASURED if name in self._names), *self._names)
            return {next(name for name in measured if name in self._names): x}
        rows = x.unbind(1) if x.dim() == 3 else (x,)
        given = dict(zip(TOKENS, rows, strict=False))
        padding = getattr(getattr(self.model, "config", None), "pad_token_id", None)
        if padding is not None and len(rows) > 1:
            # Some look for it instead of the mask; what stands there is padding.
            given["input_ids"] = rows[0].masked_fill(rows[1] == 0, padding)
        return {name: row for name, row in given.items() if name in self._names}

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's own state."""
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load the model's own state."""
        return self.model.load_state_dict(*args, **kwargs)


def with_named_inputs(module: nn.Module, record: Tensor, kind: str = "class") -> nn.Module:
    """Return a module that maps records [B, ...] to logits: itself, or one around it.

    record: one, for its form alone. kind: what is learnt, as schema.LabelForm has it.
    """
    names = _input_names(module)
    several = not record.is_floating_point() and record.dim() == 2
    of_library = hasattr(module, "main_input_name") or _is_adapted(module)
    if not of_library and not (several and {*TOKENS[:2]} <= {*names}):
        return module
    _configure(module)
    return NamedInputs(module, names, by_place=kind == "pixels")


def _configure(module: nn.Module) -> None:
    """Switch off what generation keeps between steps, and name a token that stands for none."""
    config: Any = getattr(module, "config", None)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    if getattr(config, "pad_token_id", 0) is None:
        # As the library's own documents advise; a classifier without one takes single records.
        end = getattr(config, "eos_token_id", None)
        known = isinstance(end, int) and 0 <= end < getattr(config, "vocab_size", 0)
        config.pad_token_id = end if known else 0


def _is_adapted(module: nn.Module) -> bool:
    """Whether it is a model with PEFT's adapters in it."""
    return hasattr(module, "peft_config") and hasattr(module, "get_base_model")


def _input_names(module: nn.Module) -> tuple[str, ...]:
    """Return what a model's forward calls its inputs; with adapters what the model below does."""
    below = cast(Any, module).get_base_model() if _is_adapted(module) else module
    try:
        return tuple(inspect.signature(below.forward).parameters)
    except (TypeError, ValueError):
        return ()


def _logits_of(output: Any) -> Any:
    """Return the logits of a model's output; as it is where none of them is."""
    if isinstance(output, Mapping):
        named = cast(Mapping[str, Any], output)
        return next((named[name] for name in _OUTPUTS if name in named), output)
    first = output[0] if isinstance(output, tuple) and output else output
    return first if isinstance(first, Tensor) else output
