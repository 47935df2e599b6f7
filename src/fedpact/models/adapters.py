"""Checks of models with PEFT's adapters, such as LoRA, before and after training.

Before, on made-up records: every trained tensor gets a gradient, and no other weight changes.
After: the stored adapters and the merged model answer as the trained model.
"""

import copy
import logging
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from fedpact.common.errors import ModelError
from fedpact.common.format import list_some
from fedpact.common.params import keeping_modes
from fedpact.common.randomness.seeded import seeded_generator
from fedpact.models.named_inputs import NamedInputs, is_adapted
from fedpact.per_sample.kernel import PerSampleKernel

FOLDER: Final = "adapters"
"""The folder in a run's folder with the adapters in PEFT's format."""
_BESIDE: Final = 0.05
_TOLERANCE: Final = 1e-3
_FEW: Final = 3
_logger = logging.getLogger("fedpact")


def check_adapters(kernel: PerSampleKernel, x: Tensor, y: Tensor) -> None:
    """Check the adapters of a model on made-up records x, y [B, ...], if it has any.

    Warns if the classifier is not trained. Raises ModelError: an adapter without a gradient of any
    record, a base that moves, or adapters that PEFT cannot remove.
    """
    flat = kernel.model
    if not _has_adapters(flat.module):
        return
    adapted: Any = cast(NamedInputs, flat.module).model
    try:
        _bare(copy.deepcopy(adapted))
    except Exception as error:  # whatever PEFT may raise
        raise ModelError(
            f"PEFT cannot remove these adapters again ({type(error).__name__}: {error}), so what "
            "is stored in the end could not be checked: choose another kind, such as LoraConfig, "
            "or name other modules in its configuration"
        ) from error
    task = getattr(adapted, "active_peft_config", None)
    if "_CLS" in str(getattr(task, "task_type", "")) and not any(
        "modules_to_save" in name for name, _ in flat.views(flat.vector)
    ):
        layer = [name for name, _ in adapted.get_base_model().named_children()][-1]
        _logger.warning(
            "only adapters are trained, and the classifier keeps the weights that it has: if these "
            "are random, the model learns next to nothing; train it with the adapters, as by "
            "LoraConfig(..., modules_to_save=[%r])",
            layer,
        )
    base = [(n, p, p._version) for n, p in flat.module.named_parameters() if not p.requires_grad]
    start = flat.vector.clone()
    # LoRA's second factor is 0 at first, which makes the first one's gradient 0.
    beside = torch.randn(len(start), generator=seeded_generator("adapters")).to(start)
    try:
        with torch.random.fork_rng(devices=[]):
            flat.load(start + _BESIDE * beside)
            found = kernel.alone(x, y).abs().sum(0)
    finally:
        flat.load(start)
    # The made-up records need not hold the tokens that PEFT's trainable_token_indices names.
    views = ((n, part) for n, part in flat.views(found) if "trainable_tokens" not in n)
    idle = [name for name, part in views if not bool((part > 0).any())]
    if idle:
        raise ModelError(
            f"adapters without a gradient of any record: {list_some(idle, _FEW)}. The layers they "
            "were added to do not contribute to the output, or another adapter is active: name "
            "target_modules that the model uses, activate one adapter (model.set_adapter), or "
            "choose another kind than prompts, such as LoraConfig"
        )
    moved = [name for name, p, version in base if p._version != version]
    if moved:
        raise ModelError(f"a pass changes weights that are not trained: {list_some(moved, _FEW)}")


def store_adapters(module: nn.Module, start: nn.Module, x: Tensor, folder: Path) -> None:
    """Store the adapters of a trained model in folder/adapters, if it has any.

    start: the model before training, which is modified. x: made-up records [B, ...].
    Raises ModelError: the reloaded or the merged model gives other outputs.
    """
    if not _has_adapters(module):
        return
    trained = cast(NamedInputs, module)
    adapted: Any = trained.model
    with keeping_modes(module):
        answers = _answers(trained, adapted, x)
        adapted.save_pretrained(str(folder / FOLDER))
        again = type(adapted).from_pretrained(_bare(cast(Any, start).model), str(folder / FOLDER))
        kinds = {"loaded again": again}
        if hasattr(adapted.base_model, "merge_and_unload"):
            kinds["merged"] = copy.deepcopy(adapted).merge_and_unload()
        for how, other in kinds.items():
            error = float((_answers(trained, other, x) - answers).abs().amax())
            if not error <= _TOLERANCE * (1 + float(answers.abs().amax())):
                raise ModelError(
                    f"the adapters in {folder / FOLDER}, {how}, answer otherwise than the trained "
                    f"model, by {error:.3g}: use {folder / 'model.safetensors'}, which has all of "
                    "its weights; add what is trained beside adapters to modules_to_save"
                )


def _has_adapters(module: nn.Module) -> bool:
    return isinstance(module, NamedInputs) and is_adapted(module.model)


def _answers(trained: NamedInputs, other: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return trained.around(other.eval())(x)


def _bare(model: Any) -> nn.Module:
    if not hasattr(model.base_model, "unload"):
        return model.get_base_model()
    for part in model.modules():
        before: Any = getattr(part, "original_module", None)
        for one in getattr(part, "modules_to_save", {}).values() if before is not None else ():
            one.load_state_dict(cast(Any, before).state_dict())
    return model.unload()
