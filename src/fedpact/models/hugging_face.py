"""Models with named inputs, such as those of Hugging Face, and checks of PEFT's adapters.

A record of integers holds tokens in rows of length T:

    [T]       input_ids
    [2, T]    input_ids, attention_mask
    [3, T]    input_ids, attention_mask, token_type_ids
    [4, T]    the same, and decoder_input_ids

A record of floats is passed as the model's main input, such as pixel_values. The logits of the
model's output are used. A model that answers with the two ends of a span, among T places, has
logits [B, T, T], of which the first two columns are those of start and end, and the others 0.

Adapters, such as LoRA, are checked before training, on made-up records: every trained tensor gets a
gradient, and no other weight changes. After it, the stored adapters and the merged model answer as
the trained model.
"""

import copy
import inspect
import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedpact.common.errors import ModelError
from fedpact.common.format import list_some
from fedpact.common.params import TOKENS, keeping_modes, model_name
from fedpact.common.randomness.seeded import seeded_generator
from fedpact.per_sample.kernel import PerSampleKernel

_MEASURED: Final = ("pixel_values", "input_values", "input_features", "inputs_embeds")
_SERIES: Final = ("prediction_logits", "prediction_outputs", "regression_outputs")
_OUTPUTS: Final = ("logits", "out", *_SERIES)
_SPAN: Final = ("start_logits", "end_logits")


class NamedInputs(nn.Module):
    """Pass records to a model by the names of its inputs, and return its logits.

    names: the model's inputs; empty to pass records as they are. by_place: every token or pixel
    has a label, so logits are [B, K, T] or [B, K, height, width]. copied: pass copies, for a model
    that writes to its input. The state_dict is the model's own.
    """

    def __init__(
        self,
        model: nn.Module,
        names: tuple[str, ...],
        *,
        by_place: bool = False,
        copied: bool = False,
    ) -> None:
        super().__init__()
        self.model, self.names, self._by_place = model, names, by_place
        self.called, self._copied = model_name(model), copied

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of records x: tokens [B, T] or [B, rows, T], or [B, ...]."""
        x = x.clone() if self._copied else x
        if _reads_an_end(self.model):
            return _at_the_end(self.model, self.named(x))
        output = self.model(**self.named(x)) if self.names else self.model(x)
        if self._by_place and is_span(output):
            ends = torch.stack([output[name] for name in _SPAN], 2)
            return F.pad(ends, (0, ends.shape[1] - len(_SPAN)))
        found = _logits_of(output)
        if not self._by_place or not isinstance(found, Tensor):
            return found
        if found.dim() == 3 and self.names and not isinstance(output, Tensor):
            # Libraries' models answer with more than a tensor, and classes last. The places of a
            # prompt, which PEFT puts in front, have no labels.
            prompted = is_adapted(self.model) and not x.is_floating_point()
            return (found[:, -x.shape[-1] :] if prompted else found).movedim(2, 1)
        if found.dim() == x.dim() == 4 and found.shape[2:] != x.shape[2:]:
            # Many models of segmentation return smaller maps, which are enlarged for training.
            found = F.interpolate(found, x.shape[2:], mode="bilinear", align_corners=False)
        return found

    def around(self, model: nn.Module) -> "NamedInputs":
        """Return the same around another model."""
        return NamedInputs(model, self.names, by_place=self._by_place, copied=self._copied)

    def lacks_decoder(self, x: Tensor) -> bool:
        """Whether its decoder reads a text of its own, which records x [B, ...] do not have."""
        reads = "decoder_input_ids" in self.names and not _reads_an_end(self.model)
        return reads and not x.is_floating_point() and x.shape[1:-1] != (len(TOKENS),)

    def shifts_labels(self, x: Tensor) -> bool:
        """Whether the library's own loss shifts labels: that of the first token has no effect.

        x: made-up records of tokens. False where there is no loss.
        """
        if "labels" not in self.names or x.is_floating_point() or x.shape[-1] < 2:
            return False
        # A prompt, which PEFT puts in front, has labels of its own.
        below = without_adapters(self.model)
        with keeping_modes(self), torch.no_grad(), suppress(Exception):
            classes = self.eval()(x).shape[1]
            y = torch.arange(x.shape[-1]).remainder(classes).expand(len(x), -1)
            first, last = y.clone(), y.clone()
            first[:, 0], last[:, -1] = (y[:, 0] + 1) % classes, (y[:, -1] + 1) % classes
            losses = [below(**self.named(x), labels=one)["loss"] for one in (y, first, last)]
            return torch.equal(losses[0], losses[1]) and not torch.equal(losses[0], losses[2])
        return False

    def named(self, x: Tensor) -> dict[str, Tensor]:
        """Return records x by the names of the model's inputs."""
        if x.is_floating_point() or "input_ids" not in self.names:
            main = getattr(self.model, "main_input_name", None)
            measured = (main, *(name for name in _MEASURED if name in self.names), *self.names)
            return {next(name for name in measured if name in self.names): x}
        rows = x.unbind(1) if x.dim() == 3 else (x,)
        given = dict(zip(TOKENS, rows, strict=False))
        padding = getattr(getattr(self.model, "config", None), "pad_token_id", None)
        if padding is not None and padding >= 0 and len(rows) > 1:
            # Some models look for padding by its token, not by the mask.
            given["input_ids"] = rows[0].masked_fill(rows[1] == 0, padding)
        return {name: row for name, row in given.items() if name in self.names}

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's state."""
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load the model's state."""
        return self.model.load_state_dict(*args, **kwargs)


def with_named_inputs(module: nn.Module, record: Tensor, kind: str = "class") -> nn.Module:
    """Return a module that maps records [B, ...] to logits: `module`, or a wrapper of it.

    record: only its shape and type are used. kind: the kind of schema.LabelForm.
    """
    names = _input_names(module)
    several = not record.is_floating_point() and record.dim() == 2
    of_library = hasattr(module, "main_input_name") or is_adapted(module)
    by_place = kind == "pixels"
    if of_library or (several and {*TOKENS[:2]} <= {*names}):
        _configure(module)
        return NamedInputs(module, names, by_place=by_place)
    more, writes = _try(module, record)
    return NamedInputs(module, (), by_place=by_place, copied=writes) if more or writes else module


def _try(module: nn.Module, record: Tensor) -> tuple[bool, bool]:
    """Return whether it returns more than a tensor, and whether it writes to its input.

    Two made-up records are passed in evaluation and in training mode.
    """
    with torch.inference_mode(False):
        two = torch.zeros(2, *record.shape, dtype=record.dtype)
    more = False
    try:
        with keeping_modes(module), torch.no_grad():
            for train in (False, True):
                # A pass in training may change buffers: change copies.
                kept = {name: buffer.clone() for name, buffer in module.named_buffers()}
                found = torch.func.functional_call(module.train(train), kept, (two,))
                more |= not isinstance(found, Tensor)
    except Exception:  # reported by build, which tries it next
        pass
    return more, two._version > 0


def _reads_an_end(module: nn.Module) -> bool:
    """Whether it classifies by the state at a text's last end token, as T5 and BART do."""
    below = without_adapters(module)
    encodes = getattr(getattr(below, "config", None), "is_encoder_decoder", False)
    return bool(encodes) and hasattr(below, "classification_head")


def _at_the_end(module: nn.Module, given: dict[str, Tensor]) -> Tensor:
    """Return the logits of a classifier such as T5's and BART's, for each record by itself.

    The library selects the end tokens of all records with one mask, and refuses batches with
    different numbers of them. A text without an end token is read at its last token.
    """
    below = without_adapters(module)
    ids = given["input_ids"]
    read = given.get("attention_mask", torch.ones_like(ids))
    ends = ids.eq(below.config.eos_token_id).long()
    places = torch.arange(ids.shape[1], device=ids.device)
    last = ((places + len(places) * ends) * read).argmax(1)
    start = torch.full_like(ids[:, :1], below.config.decoder_start_token_id)
    if below.config.model_type in ("mbart", "plbart"):
        # Their texts end with a language, which their decoder begins with.
        start = ids.gather(1, last[:, None])
    shifted = torch.cat([start, ids[:, :-1]], 1)
    states: Tensor = below.base_model(**{**given, "decoder_input_ids": shifted})[0]
    index = last[:, None, None].expand(-1, 1, states.shape[-1])
    return below.classification_head(states.gather(1, index).squeeze(1))


def _configure(module: nn.Module) -> None:
    config: Any = getattr(module, "config", None)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    if getattr(config, "pad_token_id", 0) is None:
        # As the library's documentation advises; without one a classifier takes single records.
        end = getattr(config, "eos_token_id", None)
        known = isinstance(end, int) and 0 <= end < getattr(config, "vocab_size", 0)
        config.pad_token_id = end if known else 0
    starts = getattr(config, "decoder_start_token_id", None)
    if getattr(config, "is_encoder_decoder", False) and starts is None:
        # Of a forecaster, whose decoder takes numbers, there is none.
        config.decoder_start_token_id = getattr(config, "pad_token_id", None)


def reads_ahead(module: nn.Module, x: Tensor, tokens: int) -> bool:
    """Whether a model's answers [B, K, T] at tokens depend on the tokens behind; False if it fails.

    Its weights are moved, as some begin with such that hide it. x: records [B, T] or [B, rows, T],
    for their shape. tokens: the size of the vocabulary.
    """
    generator = seeded_generator("tokens")
    x = torch.ones_like(x)
    rows = x if x.dim() == 2 else x[:, 0]
    rows.copy_(torch.randint(tokens, rows.shape, generator=generator))
    with torch.no_grad(), suppress(Exception):
        module.eval()
        for p in module.parameters():
            if p.is_floating_point():
                p.add_(torch.randn(p.shape, generator=generator), alpha=0.05)
        found = module(x).nan_to_num()
        for place in {1, x.shape[-1] // 2, x.shape[-1] - 1} - {0}:
            kept = rows[:, place].clone()
            rows[:, place] = (kept + 1) % tokens
            difference = (module(x).nan_to_num() - found)[..., :place].abs().max()
            if difference > 1e-4 * found.abs().max():
                return True
            rows[:, place] = kept
    return False


def is_adapted(module: nn.Module) -> bool:
    """Whether it is a model with PEFT's adapters in it."""
    return hasattr(module, "peft_config") and hasattr(module, "get_base_model")


def without_adapters(module: nn.Module) -> Any:
    """Return the model that PEFT's adapters were added to; the module itself without any."""
    return cast(Any, module).get_base_model() if is_adapted(module) else module


def _input_names(module: nn.Module) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(without_adapters(module).forward).parameters)
    except (TypeError, ValueError):
        return ()


def is_span(output: Any) -> bool:
    """Whether a model's output is where a span of its text begins and ends."""
    return isinstance(output, Mapping) and {*_SPAN} <= {*cast(Mapping[str, Any], output)}


def _logits_of(output: Any) -> Any:
    if isinstance(output, Mapping):
        named = cast(Mapping[str, Any], output)
        alone = [name for name, value in named.items() if isinstance(value, Tensor)]
        known = [*_OUTPUTS, *(alone if len(alone) == 1 else ())]
        return next((named[name] for name in known if name in named), output)
    fields = getattr(output, "_fields", ())
    if isinstance(output, tuple) and (known := [name for name in _OUTPUTS if name in fields]):
        return getattr(output, known[0])
    several = isinstance(output, (tuple, list)) and output
    first = cast(Any, output)[0] if several else output
    return first if isinstance(first, Tensor) else output


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
