"""Which operations keep the records of a batch apart, and where every tensor has the batch.

A traced model is a list of operations on tensors. Where one of them is not in the table, or is used
along the batch, nothing is claimed of the model, and it is differentiated record by record.
"""

import operator
from collections.abc import Sequence
from typing import Any, Final, cast

from torch.fx import Node

from fedpact.per_sample.tracing import batch_rules as rules
from fedpact.per_sample.tracing.batch_rules import (
    Mixed,
    RecordNumber,
    Rule,
    Where,
    is_size,
    kind_of,
    multiple,
    names,
    shape_of,
)

State = Where | None | tuple["State", ...]
"""Where a node's tensor has the batch; None where it does not depend on records; or several."""

CHECKS: Final = ("_assert_tensor_metadata", "_assert_scalar", "sym_constrain_range_for_size")
"""They check what is known here, and give nothing back."""

_CONSTANT: Final = names(
    "zeros ones full empty new_zeros new_ones new_full new_empty rand randn randint normal"
)
# What leaves the record's number in its batch what it is, and what picks by it.
_OF_NUMBERS: Final = names(
    "view reshape unsqueeze expand slice permute transpose alias detach to clone _to_copy "
    "contiguous lift_fresh_copy index index_select"
)


def _by_name(rule: Rule, names: str) -> dict[str, Rule]:
    return {f"aten.{name if '.' in name else name + '.default'}": rule for name in names.split()}


RULES: Final[dict[str, Rule]] = {
    **_by_name(
        rules.pointwise,
        "relu gelu silu mish tanh sigmoid exp exp2 expm1 log log1p log2 log10 sqrt rsqrt abs neg "
        "sin cos tan asin acos atan sinh cosh erf erfc sign square reciprocal floor ceil round "
        "trunc clamp clamp.Tensor clamp_min clamp_max hardtanh hardswish hardsigmoid relu6 selu "
        "celu elu leaky_relu softplus softshrink hardshrink log_sigmoid threshold rrelu "
        "add.Tensor add.Scalar sub.Tensor sub.Scalar mul.Tensor mul.Scalar div.Tensor div.Scalar "
        "div.Tensor_mode div.Scalar_mode rsub.Scalar rsub.Tensor pow.Tensor_Scalar "
        "pow.Tensor_Tensor pow.Scalar maximum minimum fmod.Scalar fmod.Tensor remainder.Scalar "
        "remainder.Tensor atan2 lerp.Scalar lerp.Tensor addcmul addcdiv where.self "
        "where.ScalarSelf where.ScalarOther where.Scalar masked_fill.Scalar masked_fill.Tensor "
        "eq.Scalar eq.Tensor ne.Scalar ne.Tensor lt.Scalar lt.Tensor le.Scalar le.Tensor "
        "gt.Scalar gt.Tensor ge.Scalar ge.Tensor logical_and logical_or logical_not logical_xor "
        "bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor bitwise_not __and__.Tensor "
        "__or__.Tensor __xor__.Tensor isnan isinf isfinite nan_to_num dropout feature_dropout "
        "alpha_dropout feature_alpha_dropout native_dropout uniform normal_functional empty_like "
        "detach alias clone contiguous lift_fresh_copy to.dtype to.dtype_layout to.device "
        "_to_copy zeros_like ones_like full_like rand_like randn_like randint_like "
        "randint_like.low_dtype bernoulli exponential "
        "normal.float_Tensor normal.Tensor_float normal.Tensor_Tensor prelu fill.Scalar "
        "fill.Tensor bernoulli.p floor_divide floor_divide.Scalar xlogy.Tensor frac real imag "
        "complex view_as_real view_as_complex asinh atanh erfinv lgamma digamma logit angle sgn "
        "polar _conj logaddexp hypot copysign.Tensor",
    ),
    **_by_name(
        rules.unreduced(2), "mse_loss l1_loss smooth_l1_loss huber_loss kl_div soft_margin_loss"
    ),
    **_by_name(rules.unreduced(3), "binary_cross_entropy"),
    **_by_name(rules.unreduced(4), "binary_cross_entropy_with_logits"),
    **_by_name(rules.regroup, "view reshape _unsafe_view flatten.using_ints unflatten.int"),
    **_by_name(
        rules.move,
        "permute transpose.int swapaxes swapdims t numpy_T mT movedim.int movedim.intlist "
        "moveaxis.int moveaxis.intlist expand broadcast_to unsqueeze squeeze.dim "
        "squeeze.dims repeat tile",
    ),
    **_by_name(
        rules.choose,
        "select.int slice.Tensor split.Tensor split.sizes split_with_sizes chunk "
        "tensor_split.sections unbind.int",
    ),
    **_by_name(rules.join_batches, "cat concat concatenate stack"),
    **_by_name(rules.select, "index_select"),
    **_by_name(rules.overwritten, "slice_scatter select_scatter"),
    **_by_name(rules.along(2, default=None), "roll repeat_interleave.self_int"),
    **_by_name(rules.along(2), "fft_fft fft_ifft fft_rfft fft_irfft"),
    **_by_name(rules.along(2, default=(-2, -1)), "fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2"),
    **_by_name(rules.along(2, default=None), "fft_fftn fft_ifftn fft_rfftn fft_irfftn"),
    **_by_name(
        rules.along(1),
        "narrow unfold flip cumsum cumprod logcumsumexp softmax.int log_softmax.int _softmax "
        "_log_softmax sort cummax cummin glu",
    ),
    **_by_name(rules.along(2), "sort.stable topk"),
    **_by_name(
        rules.along(1, default=None),
        "sum.dim_IntList mean.dim amax amin logsumexp any.dim all.dim argmax argmin any.dims "
        "all.dims count_nonzero.dim_IntList var.correction std.correction var_mean.correction "
        "std_mean.correction var.dim std.dim var_mean.dim std_mean.dim max.dim min.dim median.dim",
    ),
    **_by_name(rules.along(2, default=None), "linalg_vector_norm norm.ScalarOpt_dim"),
    **_by_name(rules.index, "index.Tensor"),
    **_by_name(
        rules.within(1),
        "linear max_pool1d avg_pool1d adaptive_avg_pool1d multinomial max_pool1d_with_indices "
        "adaptive_max_pool1d stft",
    ),
    **_by_name(rules.within(2), "max_pool2d avg_pool2d adaptive_avg_pool2d tril triu"),
    **_by_name(rules.within(2), "max_pool2d_with_indices adaptive_max_pool2d pixel_unshuffle"),
    **_by_name(rules.within(3), "max_pool3d avg_pool3d adaptive_avg_pool3d pixel_shuffle"),
    **_by_name(rules.within(3), "max_pool3d_with_indices adaptive_max_pool3d"),
    **_by_name(rules.matmul, "matmul mm bmm mv linalg_matmul"),
    **_by_name(rules.scatter_within, "gather scatter_add scatter.src scatter.value index_add"),
    **_by_name(rules.contract, "einsum"),
    **_by_name(rules.of_matrices, "scaled_dot_product_attention cdist"),
    **_by_name(rules.sample, "grid_sampler"),
    **_by_name(rules.in_front(3, 3), "conv1d conv_transpose1d col2im"),
    **_by_name(rules.in_front(4, 4), "conv2d conv_transpose2d.input im2col"),
    **_by_name(rules.in_front(5, 5), "conv3d conv_transpose3d.input"),
    **_by_name(
        rules.in_front(3),
        "upsample_nearest1d.vec upsample_linear1d.vec upsample_nearest2d.vec "
        "upsample_bilinear2d.vec upsample_bicubic2d.vec upsample_nearest3d.vec "
        "upsample_trilinear3d.vec channel_shuffle",
    ),
    **_by_name(rules.pad, "pad constant_pad_nd reflection_pad1d reflection_pad2d"),
    **_by_name(rules.pad, "replication_pad1d replication_pad2d"),
    **_by_name(rules.layer_norm, "layer_norm rms_norm"),
    **_by_name(rules.in_front(2), "group_norm"),
    **_by_name(rules.frozen_norm, "batch_norm"),
    **_by_name(rules.instance_norm, "instance_norm"),
    **_by_name(rules.embedding, "embedding searchsorted.Tensor"),
    **_by_name(rules.choose, "bucketize.Tensor"),
    **_by_name(rules.one_hot, "one_hot"),
    **_by_name(rules.classes, "cross_entropy_loss nll_loss_nd nll_loss nll_loss2d"),
    **_by_name(rules.recurrent, "lstm.input gru.input rnn_tanh.input rnn_relu.input"),
}
"""By the operation's name."""


def states(nodes: Sequence[Node], records: set[str]) -> dict[Node, State]:
    """The state of every node of a graph. records: the names of the placeholders that hold them.

    Raises Mixed where an operation is not known to keep records apart.
    """
    found: dict[Node, State] = {}

    def at(arg: Any) -> Where | None:
        state = found.get(arg) if isinstance(arg, Node) else None
        if isinstance(state, tuple) and not isinstance(state, Where):
            raise Mixed("several tensors where one was expected")
        return state

    for node in nodes:
        if node.op == "placeholder":
            found[node] = Where(0) if node.name in records else None
        elif node.target is operator.getitem:
            several = found[cast(Node, node.args[0])]
            found[node] = several and cast(Any, several)[node.args[1]]
        elif is_size(node) or kind_of(node) in CHECKS:
            found[node] = None
        elif any(found.get(n) is not None for n in node.all_input_nodes):
            found[node] = _of_records(node, at)
        elif any(map(is_size, node.all_input_nodes)):
            found[node] = _of_size(node)
        else:
            found[node] = None
    return found


def _of_records(node: Node, at: Any) -> State:
    kind = kind_of(node)
    if kind.startswith("new_") and kind in _CONSTANT:
        # x.new_zeros(...) takes of x the type alone.
        if any(map(is_size, (*node.args[2:], *node.kwargs.values()))):
            raise Mixed(f"operation {node.target} depends on the batch's size")
        return _of_size(node) if any(map(multiple, shape_of(node))) else None
    rule = RULES.get(str(node.target))
    if rule is None:
        raise Mixed(f"operation {node.target} is not in the table of those that keep records apart")
    counted = any(isinstance(at(n), RecordNumber) for n in node.all_input_nodes)
    if counted and kind not in _OF_NUMBERS:
        raise Mixed(f"operation {node.target} depends on a record's place in the batch")
    where = rule(node, at)
    picked = counted and kind not in ("index", "index_select")
    value = node.meta["val"]
    if not isinstance(value, (list, tuple)):
        return _in_shape(node, where, value, RecordNumber if picked else Where)
    return tuple(_in_shape(node, where, one) for one in cast(Sequence[Any], value))


def _in_shape(node: Node, where: Where, value: Any, kind: type[Where] = Where) -> Where:
    """The batch's place in a result. Raises Mixed unless one dimension has it, and all of it."""
    found = {d: m for d, size in enumerate(value.shape) if (m := multiple(size)) is not None}
    if [*found.values()] != [where.outer * where.inner]:
        raise Mixed(f"operation {node.target} has the batch in dimensions {sorted(found)}")
    return kind(next(iter(found)), where.outer, where.inner)


def _of_size(node: Node) -> State:
    """A tensor that no record enters and that has the batch's size: the same for each record."""
    kind = kind_of(node)
    if kind == "arange" and (*node.args[:-1], 0)[0] == 0 and (*node.args, 1, 1)[2] == 1:
        return _in_shape(node, Where(0), node.meta["val"], RecordNumber)
    if kind not in (*_CONSTANT, "expand", "broadcast_to", "repeat"):
        raise Mixed(f"operation {node.target} depends on the batch's size")
    # Their other arguments are numbers: which is the size has one place in each.
    others = {"full": node.args[1:], "randint": node.args[:-1], "normal": node.args[:-1]}
    if any(map(is_size, (*others.get(kind, ()), *node.kwargs.values()))):
        raise Mixed(f"operation {node.target} depends on the batch's size")
    places = [(d, m) for d, s in enumerate(shape_of(node)) if (m := multiple(s)) is not None]
    if len(places) != 1:
        raise Mixed(f"operation {node.target} has the batch in {len(places)} dimensions")
    dim, times = places[0]
    # Repeated B times or more, whole: as often for each record.
    return Where(dim, 1, times)
