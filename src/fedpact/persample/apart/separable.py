"""Which operations keep the records of a batch apart, and where each leaves the batch.

A traced model is a list of operations on tensors. Of each tensor that depends on records it is
known which dimension holds them; an operation in the table below computes what belongs to one
record from what belongs to the same record alone, and says where its result has the batch. What is
not in the table, or is used along the batch, is Mixed: then nothing is claimed, and the model is
differentiated record by record.
"""

import operator
from collections.abc import Sequence
from typing import Any, cast

from torch.fx import Node

from fedpact.persample.apart.forms import (
    contracted,
    copied,
    expanded,
    gathered,
    indexed,
    joined,
    overwritten,
    parts,
    permuted,
    regrouped,
    reordered,
    repeated,
    selected,
    sliced,
    squeezed,
    swapped,
    unbound,
    unsqueezed,
    with_padding,
)
from fedpact.persample.apart.places import (
    At,
    Mixed,
    Rule,
    State,
    Where,
    along,
    batched,
    before,
    from_the_end,
    is_size,
    is_size_arg,
    kind_of,
    multiple,
    only,
    option,
    pointwise,
    records_in,
    reduced,
    shape_of,
    unreduced,
)


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
        elif node.op == "call_function":
            found[node] = _state(node, at, found)
    return found


# They check what is known here, and give nothing back.
CHECKS = ("_assert_tensor_metadata", "_assert_scalar", "sym_constrain_range_for_size")


def _state(node: Node, at: At, found: dict[Node, State]) -> State:
    if node.target is operator.getitem:
        several = found[cast(Node, node.args[0])]
        return (
            None if several is None else cast(tuple[State, ...], several)[cast(int, node.args[1])]
        )
    if is_size(node) or kind_of(node) in CHECKS:
        return None
    inputs = node.all_input_nodes
    if any(found.get(n) is not None for n in inputs):
        rule = RULES.get(str(node.target))
        if rule is None:
            raise Mixed(
                f"operation {node.target} is not in the table of those that keep records apart"
            )
        return _checked(node, rule(node, at))
    return _from_size(node) if any(is_size(n) for n in inputs) else None


def _checked(node: Node, state: State) -> State:
    """Raise Mixed unless each result has the batch where it is said to be, and nowhere else."""
    value = node.meta["val"]
    if state is None and kind_of(node) in _LIKE and not any(map(multiple, shape_of(node))):
        return None
    results = [value] if isinstance(state, Where) else list(value)
    places = [state] if isinstance(state, Where) else list(cast(tuple[Where, ...], state or ()))
    for one, where in zip(results, places, strict=True):
        found = {d: m for d, size in enumerate(one.shape) if (m := multiple(size)) is not None}
        if found != {where.dim: where.outer * where.inner}:
            raise Mixed(f"operation {node.target} has the batch in dimensions {sorted(found)}")
    return state


_LIKE = ("new_zeros", "new_ones", "new_full")
_CONSTANT = ("zeros", "ones", "full", *_LIKE, "rand", "randn")


def _from_size(node: Node) -> State:
    """Where a tensor that no record enters has the batch's size: the same entry for each record."""
    kind = kind_of(node)
    if kind not in (*_CONSTANT, "expand", "repeat"):
        raise Mixed(f"operation {node.target} depends on the batch's size")
    if kind == "full" and any(map(is_size_arg, (*node.args[1:], *node.kwargs.values()))):
        raise Mixed(f"operation {node.target} depends on the batch's size")
    places = [(d, m) for d, s in enumerate(shape_of(node)) if (m := multiple(s)) is not None]
    if len(places) != 1:
        raise Mixed(f"operation {node.target} has the batch in {len(places)} dimensions")
    dim, times = places[0]
    if kind in ("expand", "repeat"):
        source = shape_of(node.args[0])
        before = dim - (len(shape_of(node)) - len(source))
        if times != 1 or (before >= 0 and source[before] != 1):
            raise Mixed(f"operation {node.target} does not give each record the same")
    return Where(dim, 1, times)


def _made_like(node: Node, at: At) -> State:
    """x.new_zeros(...): of x it takes the type alone. None: it has nothing of the batch."""
    del at
    if any(map(is_size_arg, (*node.args[2:], *node.kwargs.values()))):
        raise Mixed(f"operation {node.target} depends on the batch's size")
    sized = any(multiple(size) is not None for size in shape_of(node))
    return _from_size(node) if sized else None


def _matmul(node: Node, at: At) -> State:
    a, b = node.args[0], node.args[1]
    (wa, na), (wb, nb) = (_with_count(x, at) for x in (a, b))
    found: set[Where] = set()
    out = len(shape_of(node))
    if wa is not None:
        from_end = wa.dim - na
        if from_end == -1 or (wb is not None and from_end == -2):
            raise Mixed(f"operation {node.target} sums over the batch")
        # Of a vector b the result has no columns.
        found.add(wa._replace(dim=from_end + (nb == 1)))
    if wb is not None:
        from_end = wb.dim - nb
        if nb == 1 or from_end == -2 or (wa is not None and from_end == -1):
            raise Mixed(f"operation {node.target} sums over the batch")
        # Of a vector a the result has no rows.
        found.add(wb._replace(dim=from_end + (na == 1 and from_end < -1)))
    if len(found) != 1:
        raise Mixed(f"operation {node.target} pairs records with others")
    where = found.pop()
    return where._replace(dim=out + where.dim)


def _with_count(arg: Any, at: At) -> tuple[Where | None, int]:
    return at(arg), len(shape_of(arg))


def _addmm(node: Node, at: At) -> State:
    """b + x W with records in the rows of x alone."""
    only(node, at, 1)
    where, _ = records_in(node, at, 1)
    if where.dim != 0:
        raise Mixed(f"operation {node.target} sums over the batch")
    return where


def _attention(node: Node, at: At) -> State:
    """Queries, keys, values [..., T, E], and a mask: the batch in front of the last two."""
    found: set[Where] = set()
    for arg in node.all_input_nodes:
        where = at(arg)
        if where is not None:
            found.add(where._replace(dim=where.dim - len(shape_of(arg))))
    where = from_the_end(node, found)
    if where.dim >= len(shape_of(node)) - 2 or any(at(node.args[i]) is None for i in range(3)):
        raise Mixed(f"operation {node.target} attends to others' records")
    return where


def _bilinear(node: Node, at: At) -> State:
    where, count = records_in(node, at)
    only(node, at, 0, 1)
    if at(node.args[1]) != where or where.dim == count - 1:
        raise Mixed(f"operation {node.target} pairs records with others")
    return where


def _layer_norm(node: Node, at: At) -> State:
    return before(len(cast(Sequence[int], node.args[1])))(node, at)


def _frozen_norm(node: Node, at: At) -> State:
    """Batch norm by statistics that are there; those of a batch mix its records."""
    if node.args[5]:
        raise Mixed(f"operation {node.target} uses the batch's statistics")
    return batched(-2)(node, at)


def _instance_norm(node: Node, at: At) -> State:
    if not node.args[5] or node.args[3] is not None:
        raise Mixed(f"operation {node.target} uses or keeps statistics")
    return batched(-3)(node, at)


def _embedding(node: Node, at: At) -> State:
    where, _ = records_in(node, at, 1)
    only(node, at, 1)
    return where


def _one_hot(node: Node, at: At) -> State:
    """Of whole numbers [...] a one among K zeros, [..., K]; K as large as the largest mixes."""
    classes = option(node, 1, "num_classes", -1)
    if not isinstance(classes, int) or classes < 1:
        raise Mixed(f"operation {node.target} looks for the largest number of the batch")
    return records_in(node, at)[0]


def _classes(node: Node, at: At) -> State:
    """Cross-entropy of logits [N, K, ...] and classes [N, ...], one loss each."""
    where, count = records_in(node, at)
    only(node, at, 0, 1)
    by_index = len(shape_of(node.args[1])) == count - 1
    if option(node, 3, "reduction", 1) != 0 or count < 2 or where.dim != 0 or not by_index:
        raise Mixed(f"operation {node.target} reduces over the batch")
    if at(node.args[1]) != where:
        raise Mixed(f"operation {node.target} pairs records with others' classes")
    return where


def _recurrent(node: Node, at: At) -> State:
    """(output, last states): outputs [B, T, H] or [T, B, H], states [layers, B, H]."""
    where, count = records_in(node, at)
    first = bool(node.args[-1])
    hidden = node.args[1] if isinstance(node.args[1], (list, tuple)) else [node.args[1]]
    given = [at(h) for h in hidden]
    others = [n for n in node.all_input_nodes if n not in (node.args[0], *hidden)]
    right = where == Where(0 if first else 1) and count == 3
    if not right or any(h not in (None, Where(1)) for h in given) or any(map(at, others)):
        raise Mixed(f"operation {node.target} has its batch elsewhere")
    return (where, *[Where(1)] * len(hidden))


def _named(rule: Rule, names: str) -> dict[str, Rule]:
    return {f"aten.{name if '.' in name else name + '.default'}": rule for name in names.split()}


RULES: dict[str, Rule] = {
    **_named(
        pointwise,
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
        "__or__.Tensor __xor__.Tensor isnan isinf isfinite nan_to_num "
        "dropout feature_dropout alpha_dropout feature_alpha_dropout "
        "detach alias clone contiguous lift_fresh_copy to.dtype to.dtype_layout to.device "
        "_to_copy type_as zeros_like ones_like full_like rand_like randn_like bernoulli prelu "
        "fill.Scalar fill.Tensor bernoulli.p floor_divide floor_divide.Scalar xlogy.Tensor frac",
    ),
    **_named(unreduced(2), "mse_loss l1_loss smooth_l1_loss huber_loss kl_div soft_margin_loss"),
    **_named(unreduced(3), "binary_cross_entropy"),
    **_named(unreduced(4), "binary_cross_entropy_with_logits"),
    **_named(_made_like, "new_zeros new_ones new_full"),
    **_named(regrouped, "view reshape _unsafe_view flatten.using_ints unflatten.int view_as"),
    **_named(permuted, "permute"),
    **_named(swapped, "transpose.int swapaxes swapdims t numpy_T mT"),
    **_named(reordered, "movedim.int movedim.intlist moveaxis.int moveaxis.intlist"),
    **_named(expanded, "expand expand_as broadcast_to"),
    **_named(unsqueezed, "unsqueeze"),
    **_named(squeezed, "squeeze.dim squeeze.dims"),
    **_named(selected, "select.int"),
    **_named(sliced, "slice.Tensor"),
    **_named(parts, "split.Tensor split.sizes split_with_sizes chunk tensor_split.sections"),
    **_named(unbound, "unbind.int"),
    **_named(joined(new=False), "cat concat concatenate"),
    **_named(joined(new=True), "stack"),
    **_named(repeated, "repeat tile"),
    **_named(along(2, default=None), "repeat_interleave.self_int"),
    **_named(gathered, "gather"),
    **_named(copied, "copy"),
    **_named(overwritten, "slice_scatter select_scatter"),
    **_named(along(1), "index_select narrow unfold flip cumsum cumprod logcumsumexp glu"),
    **_named(along(2, default=None), "roll"),
    **_named(along(1), "softmax.int log_softmax.int _softmax _log_softmax"),
    **_named(along(1, several=2), "sort cummax cummin"),
    **_named(along(2, several=2), "sort.stable topk"),
    **_named(indexed, "index.Tensor"),
    **_named(reduced(1, 2), "sum.dim_IntList mean.dim amax amin logsumexp any.dim"),
    **_named(reduced(1, 2), "all.dim argmax argmin any.dims all.dims count_nonzero.dim_IntList"),
    **_named(reduced(1, 9), "var.correction std.correction"),
    **_named(reduced(1, 9, several=2), "var_mean.correction std_mean.correction"),
    **_named(reduced(1, 2, several=2), "max.dim min.dim median.dim"),
    **_named(reduced(2, 3), "linalg_vector_norm norm.ScalarOpt_dim"),
    **_named(before(2), "tril triu"),
    **_named(before(1), "linear"),
    **_named(_matmul, "matmul mm bmm mv linalg_matmul"),
    **_named(_addmm, "addmm"),
    **_named(contracted, "einsum"),
    **_named(_bilinear, "bilinear"),
    **_named(_attention, "scaled_dot_product_attention"),
    **_named(batched(3), "conv1d conv1d.padding conv_transpose1d"),
    **_named(batched(4), "conv2d conv2d.padding conv_transpose2d.input im2col"),
    **_named(batched(5), "conv3d conv3d.padding conv_transpose3d.input"),
    **_named(before(1), "max_pool1d avg_pool1d adaptive_avg_pool1d"),
    **_named(before(2), "max_pool2d avg_pool2d adaptive_avg_pool2d pixel_unshuffle"),
    **_named(before(3), "max_pool3d avg_pool3d adaptive_avg_pool3d pixel_shuffle"),
    **_named(before(1, several=2), "max_pool1d_with_indices adaptive_max_pool1d"),
    **_named(before(2, several=2), "max_pool2d_with_indices adaptive_max_pool2d"),
    **_named(before(3, several=2), "max_pool3d_with_indices adaptive_max_pool3d"),
    **_named(batched(-3), "upsample_nearest1d.vec upsample_linear1d.vec upsample_nearest2d.vec"),
    **_named(batched(-3), "upsample_bilinear2d.vec upsample_bicubic2d.vec channel_shuffle"),
    **_named(with_padding, "pad constant_pad_nd reflection_pad1d reflection_pad2d"),
    **_named(with_padding, "replication_pad1d replication_pad2d"),
    **_named(_layer_norm, "layer_norm rms_norm"),
    **_named(batched(-2), "group_norm"),
    **_named(_frozen_norm, "batch_norm"),
    **_named(_instance_norm, "instance_norm"),
    **_named(_embedding, "embedding"),
    **_named(_one_hot, "one_hot"),
    **_named(_classes, "cross_entropy_loss nll_loss_nd nll_loss nll_loss2d"),
    **_named(_recurrent, "lstm.input gru.input rnn_tanh.input rnn_relu.input"),
}
