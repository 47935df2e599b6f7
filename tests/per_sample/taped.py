"""A recorder with a CUDA graph's semantics, for capture.Recorder.

Replayed are the operations that torch was asked for, on the memory that they were asked for with,
and no line of Python: whatever is not read from there is as it was when it was recorded.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Tape(TorchDispatchMode):
    """Records operations, and does them again on the same memory."""

    def __init__(self):
        super().__init__()
        self.done = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        self.done.append((func, args, kwargs or {}, found))
        return found

    def replay(self):
        for func, args, kwargs, before in self.done:
            inputs = {t.untyped_storage().data_ptr() for t in tensors((args, kwargs))}
            now = func(*args, **kwargs)
            for place, value in zip(tensors(before), tensors(now), strict=True):
                # A view, or what was written in place, is there already.
                if place.untyped_storage().data_ptr() not in inputs:
                    place.copy_(value)


def tensors(tree):
    return [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor)]


def recorded(run):
    """See capture.Recorder."""
    run()
    with Tape() as tape:
        run()
    return tape.replay
