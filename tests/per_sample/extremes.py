"""Give operations that records may be given to extreme numbers; run as a script.

    python tests/per_sample/extremes.py [NAME ...]

Operations that are named come first, in a process of their own, whether or not records may be given
to them; it says how that process ended.

Says which operation it is at before it begins, on a line of its own. So where one ends the process,
or goes on for ever, the last line tells which.
"""

import os
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from fedpact.per_sample.tracing.batch_table import RULES
from fedpact.per_sample.tracing.record_safety import CHECKED, UNBOUNDED
from fedpact.per_sample.tracing.replacements import DONE_AS

# Of indices, far enough that nothing lies there; of points, as a record may hold.
WHOLE = (-(2**63), 2**63 - 1, -(10**12), 10**9, -1)
POINTS = (torch.nan, torch.inf, 1e30, -1e15 - 0.5, -(2.0**22) - 0.5)
# What torch is not asked, as something else is done instead.
REPLACED = {str(target).split(".")[1] for target in DONE_AS}
TABLE = {name.split(".")[1] for name in RULES}
# Does not look where offsets, or lengths, are a record's: those are refused.
BY_ARGUMENT = ("embedding_bag", "segment_reduce")
# Make as many as a number in a tensor says, which is refused.
UNTRACED = ("one_hot", "repeat_interleave", "tensor_split")


def tried(op: Any) -> bool:
    name = op.aten_name.split(".")[-1]
    pointwise = torch.Tag.pointwise in getattr(
        getattr(getattr(torch.ops.aten, name, None), "default", None), "tags", ()
    )
    known = name in CHECKED or name in TABLE or pointwise
    return (
        known
        and name.lstrip("_") not in BY_ARGUMENT + UNTRACED
        and not op.name.startswith("sparse.")
        and name not in REPLACED
        and not any(word in name for word in UNBOUNDED)
    )


def extreme(given: Any) -> Iterator[Any]:
    """The arguments with one of their tensors, or its last entry, extreme; and of two, both."""
    flat, form = tree_flatten(given)

    def with_these(values: dict[int, Any]) -> Any:
        return tree_unflatten([values.get(i, v) for i, v in enumerate(flat)], form)

    tensors = {i: t for i, t in enumerate(flat) if isinstance(t, Tensor) and t.numel()}
    for i, t in tensors.items():
        whole = not (t.is_floating_point() or t.is_complex() or t.dtype == torch.bool)
        points = (*POINTS, torch.finfo(t.dtype).max) if t.is_floating_point() else ()
        for value in WHOLE if whole else points:
            if whole:
                info = torch.iinfo(t.dtype)
                value = min(max(value, info.min), info.max)
            last = t.detach().clone(memory_format=torch.contiguous_format)
            last.view(-1)[-1] = value
            for one in (torch.full_like(t, value), last):
                yield with_these({i: one.requires_grad_(t.requires_grad)})
        if whole:
            least = torch.full_like(t, torch.iinfo(t.dtype).min)
            minus: dict[int, Any] = {
                j: torch.full_like(o, -1) for j, o in tensors.items() if o.dtype == t.dtype
            }
            minus |= {j: -1 for j, o in enumerate(flat) if type(o) is int}
            yield with_these(minus | {i: least})


def try_one(op: Any, given: Any) -> None:
    """Forwards and back; an error is an answer."""
    try:
        x, args, kwargs = given
        found = tree_leaves(op.op(x, *args, **kwargs))
        back = [t for t in found if isinstance(t, Tensor) and t.requires_grad]
        if back:
            torch.stack([t.abs().sum() for t in back]).sum().backward()
    except Exception:
        pass


def main() -> None:
    # Here, as it keeps torch's settings from being changed, in whichever process imports it.
    from torch.testing._internal.common_methods_invocations import op_db

    torch.set_num_threads(1)
    names = sys.argv[1:]
    if names:
        child = os.fork()
        if not child:
            try_all(op for op in op_db if op.name in names)
            os._exit(0)
        print(
            "ended by signal", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) * -1, flush=True
        )
    try_all(op for op in op_db if tried(op))
    print("done", flush=True)


def try_all(ops: Iterable[Any]) -> None:
    for op in ops:
        for dtype in (torch.float32, torch.int64):
            if not op.supports_dtype(dtype, "cpu"):
                continue
            print(op.name, op.variant_test_name, dtype, flush=True)
            back = dtype.is_floating_point and op.supports_autograd
            samples = op.sample_inputs("cpu", dtype, requires_grad=back)
            # Of whole numbers the first sample is often a single number beside another.
            for sample in islice(samples, 1 if dtype.is_floating_point else 2):
                for given in extreme((sample.input, sample.args, sample.kwargs)):
                    try_one(op, given)


if __name__ == "__main__":
    main()
