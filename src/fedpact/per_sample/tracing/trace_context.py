"""Changes to torch and Python while a model is traced, undone afterwards.

Packed sequences are traced as padded rows with their lengths. torch concatenates the steps of all
records, sorted by length, which would mix them. Here a PackedSequence has data [B, T, ...], zero
after each record's last step, and the lengths [B] as `batch_sizes`; layers use these lengths for
each record separately.
"""

import inspect
import logging
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Final, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._export.utils import _compiling_state_context  # pyright: ignore[reportPrivateUsage]
from torch.nn.modules import transformer
from torch.nn.modules.transformer import _detect_is_causal_mask  # pyright: ignore[reportPrivateUsage]
from torch.nn.utils import rnn
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode

from fedpact.common.losses import Loss
from fedpact.common.params import model_name
from fedpact.per_sample.tracing.replacements import WITH_LENGTHS, embedding_bag

_RECURRENT: Final = (nn.LSTM, nn.GRU, nn.RNN)
_LOGGERS: Final = ("torch.fx", "torch._subclasses", "torch._dynamo", "torch._export")
_logger = logging.getLogger("fedpact")


@contextmanager
def announce(words: str, module: nn.Module, seconds: float, level: int) -> Generator[None]:
    """Log what is being done with a model if it takes longer than so many seconds."""
    timer = threading.Timer(seconds, _logger.log, (level, words, model_name(module)))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def state_kept(whole: nn.Module) -> Generator[None]:
    """Restore the modules' attributes afterwards: a trace would leave tensors without values."""
    states = [vars(m) for m in whole.modules()]
    # Their hooks too, which some put there in a first pass.
    states += [held for state in states for held in state.values() if isinstance(held, dict)]
    before = [dict(state) for state in states]
    try:
        yield
    finally:
        for state, held in zip(states, before, strict=True):
            state.clear()
            state.update(held)


class WritableDropout(TorchFunctionMode):
    """Let a model write to what dropout returned, which torch's tracer forbids.

    It may be dropout's input itself, and is where nothing is dropped; elsewhere it is copied.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See TorchFunctionMode."""
        del types
        named: dict[str, Any] = kwargs or {}
        found = func(*args, **named)
        if func not in (F.dropout, torch.dropout):
            return found
        named = {"training" if name == "train" else name: value for name, value in named.items()}
        given = inspect.signature(F.dropout).bind(*args, **named)
        given.apply_defaults()
        x, rate, drops, in_place = given.args
        return found if in_place else found.clone() if drops and rate else x


@contextmanager
def while_tracing(model: nn.Module, loss: Loss) -> Generator[None]:
    """Let models find a tracer at work, `len(x)` be any number, and masks not be looked into.

    Many models ask torch.compiler.is_compiling() before they look at values. Python's own len has
    to give a number, so a model that calls it would be traced for batches of one size alone: within
    the files of the model it is x.shape[0]. torch's transformers look whether a mask is the causal
    one, for which there is a faster way to the same; a branch on its values would end the trace.
    x.data is x.detach(), as the tracer takes it for a constant without values.
    Code given to torch.compile runs as it was written.
    """
    functions = [vars(m).get("forward", type(m).forward) for m in model.modules()]
    # Here, as these take a second to import, which most commands do without.
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.distributions import Distribution

    scopes = [getattr(f, "__globals__", {}) for f in (*functions, loss)]
    own = {id(s): s for s in scopes if s and not str(s.get("__name__")).startswith("torch.")}
    ours: list[tuple[Any, str, Any]] = [
        (transformer, _detect_is_causal_mask.__name__, _causal),
        (FakeTensor, "tolist", _list),
        (FakeTensor, "__getitem__", _pick),
        (FakeTensor, "data", property(torch.Tensor.detach, _set_data)),
        (F, "embedding_bag", embedding_bag),
        # The search for an einsum's order compares sizes, also the batch's.
        (torch.backends.opt_einsum, "is_available", lambda: False),
        *((kind, "forward", _forward_packed) for kind in _RECURRENT),
    ]
    for instead in (pack_padded_sequence, pad_packed_sequence):
        theirs = getattr(rnn, name := instead.__name__)
        ours.append((rnn, name, instead))
        for scope in own.values():
            ours += [(scope, n, instead) for n, v in scope.items() if v is theirs]
    ours += [(scope, "len", _size) for scope in own.values() if "len" not in scope]
    checks: bool = vars(Distribution)["_validate_args"]  # by looking at values
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [one.level for one in loggers]
    try:
        for one in loggers:  # the tracer's messages are for its developers
            one.setLevel(logging.CRITICAL)
        Distribution.set_default_validate_args(False)
        as_written = torch.compiler.set_stance("force_eager")
        with _compiling_state_context(), as_written, _in_place_of(ours):
            yield
    finally:
        Distribution.set_default_validate_args(checks)
        for one, level in zip(loggers, levels, strict=True):
            one.setLevel(level)


@contextmanager
def _in_place_of(ours: list[tuple[Any, str, Any]]) -> Generator[None]:
    """Replace functions of modules, classes and scopes by ours, in this thread."""
    thread = threading.get_ident()

    def here(instead: Any, theirs: Any) -> Any:
        def run(*args: Any, **named: Any) -> Any:
            found: Any = NotImplemented
            if threading.get_ident() == thread:
                found = instead(*args, **named)
            return theirs(*args, **named) if found is NotImplemented else found

        return run

    theirs: list[Any] = [
        cast(Any, at if isinstance(at, dict) else vars(at)).get(name) for at, name, _ in ours
    ]
    try:
        for (at, name, instead), before in zip(ours, theirs, strict=True):
            # Python's own functions are used for anything but a traced batch.
            _put(at, name, here(instead, before) if before else instead)
        yield
    finally:
        for (at, name, _), before in zip(ours, theirs, strict=True):
            _put(at, name, before)


def _put(at: Any, name: str, value: Any) -> None:
    if not isinstance(at, dict):
        if value is None:
            delattr(at, name)
        else:
            setattr(at, name, value)
    elif value is None:
        del at[name]
    else:
        at[name] = value


def _causal(_: Any, is_causal: bool | None = None, *__: Any, **___: Any) -> bool:
    return is_causal is True


def _list(of: Tensor) -> Any:
    """Return the tensor itself for a list of one number for each record, as of lengths."""
    return of if isinstance(_size(of), torch.SymInt) else NotImplemented


def _set_data(of: Tensor, value: Tensor) -> None:
    """Refuse x.data = y, of which a trace would have nothing; a layer that is moved has x = y."""
    if value is not of:
        raise RuntimeError("a pass changes a tensor by its .data")


def _pick(of: Tensor, index: Any) -> Any:
    """x[..., n] by a number n that is a tensor: torch's own would ask for its value."""
    parts: list[Any] = [*cast(Any, index)] if isinstance(index, tuple) else [index]
    numbers = [
        i
        for i, n in enumerate(parts)
        if isinstance(n, Tensor) and n.dim() == 0 and n.dtype in (torch.int64, torch.int32)
    ]
    simple = all(isinstance(one, (int, slice)) for i, one in enumerate(parts) if i not in numbers)
    if len(numbers) != 1 or not simple:
        return Tensor.__getitem__(of, cast(Any, index))
    (place,) = numbers
    # Whole numbers in front are dimensions that have gone when this one is looked at.
    dim = sum(isinstance(one, slice) for one in parts[:place])
    rest = Tensor.__getitem__(of, (*parts[:place], slice(None), *parts[place + 1 :]))
    at = (*[slice(None)] * dim, parts[place].view(1))
    return Tensor.__getitem__(rest, at).squeeze(dim)


def _size(of: Any) -> Any:
    size = of.shape[0] if isinstance(of, Tensor) and of.dim() else None
    return size if isinstance(size, torch.SymInt) else len(of)


@contextmanager
def for_vmap() -> Generator[None]:
    """Turn off torch's warning about operations that vmap runs record by record.

    Not by warnings.catch_warnings, which would affect other threads.
    """
    switch = cast(Any, torch)._C._functorch._set_vmap_fallback_warning_enabled
    switch(False)
    try:
        yield
    finally:
        switch(True)


def _present(data: Tensor, lengths: Tensor) -> Tensor:
    """The mask of steps that are not padding, [B, T, 1, ...]."""
    steps = torch.arange(data.shape[1], device=data.device)
    present = steps < lengths.to(data.device).unsqueeze(1)
    return present[(..., *[None] * (data.dim() - 2))]


def pack_padded_sequence(
    input: Tensor,
    lengths: Any,
    batch_first: bool = False,
    enforce_sorted: bool = True,  # noqa: ARG001
) -> PackedSequence:
    """Like torch's, but always in the records' own order. A length of 0 counts as 1."""
    data = input if batch_first else input.transpose(0, 1)
    lengths = torch.as_tensor(lengths).to("cpu", torch.int64).clamp(1, data.shape[1])
    return PackedSequence(torch.where(_present(data, lengths), data, 0), lengths)


def pad_packed_sequence(
    sequence: PackedSequence,
    batch_first: bool = False,
    padding_value: float = 0.0,
    total_length: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Like torch's, but as long as the packed tensor instead of the longest record."""
    data, lengths = sequence[:2]
    out = torch.where(_present(data, lengths), data, padding_value)
    if total_length is not None:
        more = [0, 0] * (out.dim() - 2)
        out = F.pad(out, [*more, 0, total_length - out.shape[1]], value=padding_value)
    return out if batch_first else out.transpose(0, 1), lengths


def _forward_packed(layer: nn.RNNBase, input: Any, hx: Any = None) -> Any:
    """The forward pass of nn.LSTM, nn.GRU or nn.RNN over such sequences."""
    if not isinstance(input, PackedSequence):
        return NotImplemented
    data, lengths = input[:2]
    count = layer.num_layers * (2 if layer.bidirectional else 1)
    if hx is None:
        widths = [layer.proj_size or layer.hidden_size, layer.hidden_size]
        states = [data.new_zeros(count, data.shape[0], width) for width in widths]
        hx = states if layer.mode == "LSTM" else states[0]
    weights = [weight for each in layer.all_weights for weight in each]
    settings: list[Any] = [layer.bias, layer.num_layers, layer.dropout, layer.training]
    out, *last = WITH_LENGTHS[layer.mode.lower()](
        data, hx, weights, *settings, layer.bidirectional, True, lengths=lengths
    )
    return PackedSequence(out, lengths), tuple(last) if layer.mode == "LSTM" else last[0]
