"""What to do about a model that fails on made-up records, or whose answers do not fit."""

from contextlib import suppress
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedpact.common.params import keeping_modes
from fedpact.models.named_inputs import NamedInputs, is_span


def explain_failure(module: nn.Module, x: Tensor, count: int, error: Exception) -> str:
    """Return what to do about a model that raised `error` at records x [B, ...].

    count: how many of them it was given; 1 if it takes B. The library's words belong beside it, as
    what a model lacks may not be why it failed.
    """
    if "Expected more than 1" in str(error):
        return (
            "a layer normalises over a single number, which makes 0 of it: give larger records, "
            "or take a model that shrinks them less often"
        )
    if reads_mask(module, x):
        x = x.clone()
        x[:, 1] = 1
        if _passes(module, x):
            return "it takes no text with padding: choose another model"
    if told := _of_another_size(module, x):
        return told
    if isinstance(module, NamedInputs) and (told := _of_another_kind(module)):
        return told
    if not isinstance(module, NamedInputs) and x.dim() == 3 and not x.is_floating_point():
        return (
            f"it is given {tuple(x.shape[1:])}, tokens and their mask: name its inputs, as "
            "forward(self, input_ids, attention_mask)"
        )
    if count == 1:
        return "let it take any number of records, and compute each by itself"
    types = {str(p.dtype) for p in module.parameters() if p.is_floating_point()}
    if others := sorted(types - {"torch.float32"}):
        return f"its weights are {', '.join(others)}: make them float32, as by .float()"
    if isinstance(module, NamedInputs) and module.lacks_decoder(x):
        start = cast(Any, module.model).config.decoder_start_token_id
        return (
            "its decoder reads the text that it is to write, shifted by one token: add that "
            'column, as data = data.map(lambda row: {"decoder_input_ids": '
            f'[{start}, *row["labels"][:-1]]}})'
        )
    if not x.is_floating_point():
        return (
            "whole numbers mean tokens: choose a model, and adapters, that take nothing else, "
            "such as one that begins with an embedding, and one text of a record; or store "
            "measurements as float32"
        )
    return "choose a model that takes such records and nothing else, or give them another shape"


def explain_outputs(module: nn.Module, outputs: Any, length: int, classes: int, kind: str) -> str:
    """Return what to do about outputs that do not fit. length: of a text."""
    if is_span(outputs):
        return (
            'learn both ends by task = "tokens", with a label column of lists [start, end], '
            f"records.length = {length} and a class for each place, classes = "
            f"[str(k) for k in range({length})]"
        )
    wrapped = isinstance(module, NamedInputs)
    names = module.names if wrapped else ()
    by_token = "input_ids" in names and kind == "pixels"
    if by_token and isinstance(outputs, Tensor) and outputs.dim() == 3:
        _, own, places = outputs.shape
        if places != length:
            return f"give texts of the length that it answers to, records.length = {places}"
        return (
            f"name as many classes, as classes = [str(k) for k in range({own})], or for the next "
            f"token records.vocabulary = {own}"
        )
    if names:
        return (
            f"give its configuration num_labels = {classes}, and take one with a head that "
            "answers with logits, as AutoModelForSequenceClassification"
        )
    if not isinstance(outputs, Tensor):
        return "return the logits alone, or as 'logits' of a dict"
    taken = "; of what it returns the first tensor is taken, so return the logits first"
    sized = f"let the factory size its last layer by `classes`, as by num_classes = {classes}"
    return sized + taken * wrapped


def reads_mask(module: nn.Module, x: Tensor) -> bool:
    """Whether records x [B, ...] are texts with a mask, which the model reads."""
    return isinstance(module, NamedInputs) and x.dim() == 3 and "attention_mask" in module.names


def make_whole_text(module: nn.Module, x: Tensor) -> Tensor:
    """Return ones in the form of x [B, ...]; of a text with a mask, the last token is padding.

    Where 1 is the model's token of padding, as RoBERTa's, it is 2.
    """
    x = torch.ones_like(x)
    if reads_mask(module, x):
        if getattr(_config(module), "pad_token_id", None) == 1:
            x[:, 0] = 2
        x[:, 1, -1] = 0
    return x


def _of_another_kind(module: NamedInputs) -> str:
    """Return what to take in place of a model of records that there are none of; "" if unknown."""
    if {"input_ids", "pixel_values"} <= {*module.names}:
        return (
            "it reads a text together with an image, and a record is one of the two: choose a "
            "model of texts, as AutoModelForSequenceClassification, or of images, as "
            "AutoModelForImageClassification"
        )
    if module.called.endswith("MultipleChoice"):
        return (
            "it chooses among several texts, and a record is one text: make a record of each "
            "choice, with a label of whether it is right, for AutoModelForSequenceClassification"
        )
    adapters = getattr(module.model, "peft_config", {}).values()
    if any(getattr(one, "peft_type", "") == "PREFIX_TUNING" for one in adapters):
        return (
            "prefix tuning puts keys and values in front of a text's own, which this model may not "
            "take: choose another kind of adapter, as peft.LoraConfig"
        )
    return ""


def _passes(module: nn.Module, x: Tensor) -> bool:
    with keeping_modes(module), torch.no_grad(), suppress(Exception):
        module.eval()(x)
        return True
    return False


def _of_another_size(module: nn.Module, x: Tensor) -> str:
    if x.is_floating_point():
        for size in _own_sizes(module):
            if size != x.shape[1:] and _passes(module, x.new_zeros(len(x), *size)):
                return f"it takes images of {size}: give such, or build it for the shape of yours"
        return ""
    takes, fails = 0, x.shape[-1] if x.dim() == 2 or isinstance(module, NamedInputs) else 0
    while fails - takes > 1:
        middle = (takes + fails) // 2
        takes, fails = (middle, fails) if _passes(module, x[..., :middle]) else (takes, middle)
    if not takes:
        return ""
    return (
        f"it takes texts of at most {takes} tokens: set records.length = {takes} "
        f"(records={{'length': {takes}}} in Python), or build it with more positions"
    )


def _config(module: nn.Module) -> Any:
    return getattr(module.model if isinstance(module, NamedInputs) else module, "config", None)


def _own_sizes(module: nn.Module) -> list[tuple[int, ...]]:
    """Return the shapes of images that a model of transformers or timm says it was built for."""
    below: Any = module.model if isinstance(module, NamedInputs) else module
    known = getattr(below, "default_cfg", None) or {}
    found = [tuple(known.get("input_size", ()))]
    config = _config(module)
    patches = getattr(below, "patch_embed", None)
    for one in (config, patches):
        side = getattr(one, "image_size", getattr(one, "img_size", None))
        sides = (side, side) if isinstance(side, int) else tuple(side or ())
        found.append((getattr(one, "num_channels", 3), *sides))
    return [size for size in found if len(size) == 3]
