"""What a model asks of tensors while it is traced: their length, and whether a mask is causal."""

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import transformer
from torch.nn.modules.transformer import (
    _detect_is_causal_mask,  # pyright: ignore[reportPrivateUsage]
)

from fedpact.losses import Loss


@contextmanager
def sizes_by_len(module: nn.Module, loss: Loss) -> Generator[None]:
    """Let `len(x)` be x.shape[0] in the files of the model, which may be any number.

    Python's own has to give a number, so a model that calls it, as many do, would be traced for
    batches of one size alone.
    """
    functions = [vars(m).get("forward", type(m).forward) for m in module.modules()]
    scopes = [getattr(f, "__globals__", {}) for f in (*functions, loss)]
    own = {id(s): s for s in scopes if s and not str(s.get("__name__")).startswith("torch.")}
    changed = [s for s in own.values() if "len" not in s]
    for scope in changed:
        scope["len"] = _size
    try:
        yield
    finally:
        for scope in changed:
            del scope["len"]


def _size(of: Any) -> Any:
    size = of.shape[0] if isinstance(of, Tensor) and of.dim() else None
    return size if isinstance(size, torch.SymInt) else len(of)


@contextmanager
def masks_unseen() -> Generator[None]:
    """Let torch's transformers apply the mask that they are given, without a look into it.

    They look whether it is the causal one, for which there is a faster way to the same; a branch on
    its values would be the end of the trace. In this thread alone.
    """
    name, own = _detect_is_causal_mask.__name__, threading.get_ident()

    def told(mask: Any, is_causal: bool | None = None, *size: Any, **named: Any) -> bool:
        if threading.get_ident() == own:
            return is_causal is True
        return _detect_is_causal_mask(mask, is_causal, *size, **named)

    setattr(transformer, name, told)
    try:
        yield
    finally:
        setattr(transformer, name, _detect_is_causal_mask)
