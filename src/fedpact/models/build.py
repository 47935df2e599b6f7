"""From a name to a module, and what to do about one that fails on made-up records.

A name is the papers', one for text, or the user's `package.module:factory`.
"""

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedpact.common.errors import ModelError
from fedpact.common.params import keeping_modes
from fedpact.common.user_code import own_factory
from fedpact.models import zoo
from fedpact.models.hugging_face import NamedInputs, is_span, with_named_inputs
from fedpact.models.prepare import find_in_pass, find_obstacles, join_obstacles, with_lines

_FORM = "factory(shape, classes) -> nn.Module, or factory()"
_OF_IMAGES = (zoo.cnn, zoo.cnn_group_norm, zoo.cnn_padded, zoo.logistic, zoo.mlp)
_KNOWN = {f.__name__: f for f in (*_OF_IMAGES, zoo.ngram, zoo.lstm, zoo.transformer)}


def build(
    name: str,
    example: Tensor,
    classes: int,
    seed: int,
    settings: zoo.LogisticSettings | None = None,
    kind: str = "class",
) -> nn.Module:
    """Return the named model with weights drawn from `seed`, tried on two made-up records.

    name: of a function of models.zoo; or "package.module:factory", where factory(shape, classes)
    returns a module that maps records [B, *shape] to logits [B, classes] and one that needs no
    argument is called without; or what was handed in (common.user_code). example: one record
    [*shape], for its shape and type only. settings: of "logistic" alone. kind: as in
    schema.LabelForm; of "pixels" a model answers [B, classes, ...], of a "number" [B, 1] or [B].
    Raises ModelError: an unknown name, a factory that fails, outputs that do not fit the labels.
    """
    factory: Callable[..., Any]
    if name == "logistic":
        factory = partial(zoo.logistic, settings=settings)
    else:
        factory = _KNOWN.get(name) or own_factory(name, "model", list(_KNOWN), _FORM)
    shape = tuple(example.shape)
    given: tuple[Any, ...] = () if _needs_nothing(factory) else (shape, classes)
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed: it seeds cards too, which no factory of ours uses, and where there
        # is none yet it keeps a formatted stack of whoever called.
        torch.default_generator.manual_seed(seed)
        try:
            module = factory(*given)
        except ModelError:
            raise
        except Exception as error:
            raise ModelError(
                f"model {name!r}: calling it with shape {shape} and {classes} classes failed with "
                f"{type(error).__name__}: {error}; expected {_FORM}: its first "
                "argument is a record's shape, so one that takes the number of features is handed "
                "in as lambda shape, classes: Net(shape[0], classes)"
            ) from error
        if not isinstance(module, nn.Module):
            raise ModelError(
                f"model {name!r} returned {type(module).__name__}: expected an nn.Module"
            )
        found = list[str]()
        if name not in _KNOWN:  # ours map one tensor to another, by layers that can be trained
            found = list(find_obstacles(module))
            module = with_named_inputs(module, example, kind)
        if found:
            raise ModelError(
                f"model {name!r} cannot be trained"
                + join_obstacles([*found, *find_in_pass(module, example)])
            )
        # From the same seed, as lazy layers draw their weights only here.
        two = torch.zeros(2, *shape, dtype=example.dtype)
        try:
            _try(name, module, two, classes, kind)
        except ModelError as error:
            raise with_lines(error, module, example) from error.__cause__
    return module


def _needs_nothing(factory: Callable[..., Any]) -> bool:
    """Whether it is called without arguments: nothing it takes is needed, nor called a shape."""
    try:
        taken = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return False
    return not any(
        p.name == "shape"
        or p.kind is p.VAR_POSITIONAL
        or (p.default is p.empty and p.kind is not p.VAR_KEYWORD)
        for p in taken
    )


def _form(outputs: Any) -> tuple[int, ...] | str:
    """Return a tensor's shape, of anything else its type and what a mapping holds."""
    if isinstance(outputs, Tensor):
        return tuple(outputs.shape)
    names = f" of {', '.join(map(str, outputs))}" if isinstance(outputs, Mapping) else ""
    return f"{type(outputs).__name__}{names}"


def _in_training(module: nn.Module, x: Tensor) -> tuple[int, ...] | str | None:
    held = {name: v.detach().clone() for name, v in module.named_buffers()}
    with keeping_modes(module), torch.random.fork_rng(devices=[]), suppress(Exception):
        return _form(torch.func.functional_call(module.train(), held, (x,)))
    return None  # the kernel, which traces such a pass, reports why


def _try(name: str, module: nn.Module, x: Tensor, classes: int, kind: str) -> None:
    count = len(x)
    try:
        with keeping_modes(module), torch.no_grad():
            module.eval()
            if reads_mask(module, x):
                x = make_whole_text(module, x)
            try:
                outputs = module(x)
            except Exception:  # at an empty record, as one that looks for a last word does
                x = make_whole_text(module, x)
                outputs = module(x)
            # Behind the first pass, in which lazy layers draw their weights.
            before, count = torch.default_generator.get_state(), 1
            one = module(x[:1])
        drawn = not torch.equal(before, torch.default_generator.get_state())
        trained = _in_training(module, x)
    except Exception as error:
        alone = "a single made-up record, but accepts two,"
        many = f"{count} made-up records" if count > 1 else alone
        hint = explain_failure(module, x, count, error)
        raise ModelError(
            f"model {name!r} does not accept {many} of shape {tuple(x.shape[1:])}: {hint} "
            f"({type(error).__name__}: {error})"
        ) from error
    if drawn:
        raise ModelError(
            f"model {name!r} draws random numbers when it is evaluated: expected answers that "
            "follow from weights and records alone; draw in training alone, as by "
            "F.dropout(x, p, self.training)"
        )
    shape = _form(outputs)
    whole = shape == (2, classes)
    tokens = None if x.is_floating_point() else (2, classes, x.shape[-1])
    fits, many = whole, f"the labels have {classes} classes, so expected (2, {classes})"
    if kind == "number":
        fits = whole or shape == (2,)
        many = "the labels are numbers, so expected (2, 1) or (2,)"
    elif kind == "several":
        many = f"there are {classes} labels, so expected (2, {classes})"
    elif kind == "pixels":
        fits = len(shape) > 2 and shape[:2] == (2, classes) and tokens in (None, shape)
        form = f"{tokens}, classes first" if tokens else f"(2, {classes}, height, width)"
        place = "token" if tokens else "pixel"
        many = f"each {place} has one of {classes} classes, so expected {form}"
    if not fits:
        advice = explain_outputs(module, outputs, x.shape[-1], classes, kind)
        raise ModelError(f"model {name!r} answers a batch of 2 with {shape}: {many}; {advice}")
    if trained not in (None, shape):
        raise ModelError(
            f"model {name!r} answers a batch of 2 with {shape} in evaluation and with {trained} in "
            "training: expected the same; leave out what it adds, as by deep_supervision=False"
        )
    alone = tuple(getattr(one, "shape", ()))
    if alone != (1, *shape[1:]):
        raise ModelError(
            f"model {name!r} answers a batch of 1 with {alone} and one of 2 with {shape}"
            ": expected the number of records first, always; write squeeze(1) or flatten(1) for a "
            "squeeze(), which takes that away too"
        )


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
    if not x.is_floating_point() and (told := _of_another_length(module, x)):
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
        if getattr(getattr(module.model, "config", None), "pad_token_id", None) == 1:
            x[:, 0] = 2
        x[:, 1, -1] = 0
    return x


def _passes(module: nn.Module, x: Tensor) -> bool:
    with keeping_modes(module), torch.no_grad(), suppress(Exception):
        module.eval()(x)
        return True
    return False


def _of_another_length(module: nn.Module, x: Tensor) -> str:
    """Return the longest text that a model takes, found by bisection; "" if it takes none."""
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
