"""Operations that are safe for any record.

Some of torch's operations read or write out of bounds, and crash or reach another record. Others
run as long, or allocate as much, as a record says, or keep state for the next call. Records are
given only to operations that are known to check their input: they raise or return NaN. An operation
like x[x > 0] or x.nonzero() is safe, as it allocates only what is selected.
"""

import operator
from collections.abc import Iterable, Sequence
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.fx import Node

from fedpact.per_sample.tracing.batch_rules import is_size, kind_of, names
from fedpact.per_sample.tracing.batch_table import CHECKS, RULES
from fedpact.per_sample.tracing.replacements import DONE_AS

# Beside operations of each number by itself, views, and what is in the tables. All of which torch
# has samples of arguments are given them with numbers from the least to the largest, infinity and
# NaN in place of each, by tests/per_sample/test_extremes.py; the others are further names of these,
# or are made of them.
CHECKED: Final = names(
    """
    _stack _unsafe_index _unsafe_index_put addbmm addmv addr all any argsort atleast_1d
    atleast_2d atleast_3d baddbmm block_diag broadcast_tensors bucketize cartesian_prod
    chain_matmul column_stack combinations complex corrcoef count_nonzero cov cross
    cumulative_trapezoid det diag diag_embed diagflat diagonal_scatter diff dist dot dstack
    fliplr flipud ger gradient hstack inner isclose isin isreal kron lift linspace logspace max
    mean median meshgrid min mode msort nanmean nanmedian nanquantile nansum new_full new_ones
    new_zeros norm outer polar quantile renorm rot90 row_stack std std_mean stft sum sum_to_size
    take_along_dim tensordot trace trapezoid trapz unsafe_chunk unsafe_split
    unsafe_split_with_sizes vander var var_mean vdot vstack zero __and__ __lshift__ __or__
    __rshift__ __xor__ arccos arccosh arcsin arcsinh arctan arctanh special_digamma special_erf
    special_erfc special_erfinv special_exp2 special_expit special_expm1 special_gammainc
    special_gammaincc special_gammaln special_i0 special_log1p special_log_softmax special_logit
    special_logsumexp special_multigammaln special_ndtr special_psi special_round special_sinc
    special_softmax special_xlogy _assert_scalar _assert_tensor_metadata sym_numel sym_size
    sym_stride nonzero nonzero_numpy argwhere masked_select where aminmax embedding_bag
    index_add index_copy index_fill index_put index_reduce kthvalue masked_scatter prod put
    scatter scatter_add scatter_reduce searchsorted segment_reduce take
    cosine_embedding_loss cosine_similarity hinge_embedding_loss
    margin_ranking_loss multi_margin_loss multilabel_margin_loss pairwise_distance
    poisson_nll_loss triplet_margin_loss _adaptive_avg_pool2d _adaptive_avg_pool3d
    _cdist_forward _convolution _masked_softmax _native_batch_norm_legit_no_training
    _pad_circular _pad_enum _pdist_forward _safe_softmax _upsample_bicubic2d_aa
    _upsample_bilinear2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d
    _upsample_nearest_exact3d _weight_norm _weight_norm_interface affine_grid_generator cdist
    col2im conv_tbc convolution gru_cell log_sigmoid_forward lstm_cell max_unpool2d max_unpool3d
    native_batch_norm native_channel_shuffle native_dropout native_group_norm native_layer_norm
    norm_except_dim pdist reflection_pad3d replication_pad3d rnn_relu_cell rnn_tanh_cell
    upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d
    upsample_nearest2d upsample_nearest3d upsample_trilinear3d cholesky cholesky_inverse
    cholesky_solve frobenius_norm geqrf inverse linalg_cholesky linalg_cholesky_ex linalg_cond
    linalg_cross linalg_det linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh
    linalg_householder_product linalg_inv linalg_inv_ex linalg_lu linalg_lu_factor
    linalg_lu_solve linalg_matrix_exp linalg_matrix_norm linalg_matrix_power linalg_matrix_rank
    linalg_multi_dot linalg_norm linalg_pinv linalg_qr linalg_slogdet linalg_solve
    linalg_solve_ex linalg_solve_triangular linalg_svd linalg_svdvals linalg_tensorinv
    linalg_tensorsolve linalg_vander linalg_vecdot logdet lu_solve lu_unpack matrix_exp
    matrix_power nuclear_norm pinverse qr slogdet svd triangular_solve _fft_c2c _fft_c2r
    _fft_r2c fft_fft fft_fft2 fft_fftn fft_fftshift fft_hfft fft_hfft2 fft_hfftn fft_ifft
    fft_ifft2 fft_ifftn fft_ifftshift fft_ihfft fft_ihfft2 fft_ihfftn fft_irfft fft_irfft2
    fft_irfftn fft_rfft fft_rfft2 fft_rfftn istft multiply subtract divide true_divide negative
    absolute greater greater_equal less less_equal not_equal fix arctan2
    """
)

# Of each number by itself, but for as long as a record says, or ended by the least whole number.
UNBOUNDED: Final = ("polynomial", "polygamma", "zeta", "lcm")

# They make room that is yet to be written.
_UNWRITTEN: Final = ("empty", "new_empty", "resize")

# Lengths and offsets that kernels of these take as they are.
_TAKEN_AS_THEY_ARE = {
    "embedding_bag": ("offsets",),
    "embedding_bag_forward_only": ("offsets",),
    "segment_reduce": ("lengths", "indices", "offsets"),
}


def by_argument(node: Node) -> list[tuple[Any, Any]]:
    """An operation's declared arguments with the node's values."""
    schema = getattr(node.target, "_schema", None)
    arguments: list[Any] = [] if schema is None else schema.arguments
    values = dict(zip([a.name for a in arguments], node.args, strict=False)) | node.kwargs
    return [(a, values[a.name]) for a in arguments if a.name in values]


def follow(nodes: Iterable[Node], records: Iterable[str]) -> set[Node]:
    """The nodes that depend on records. records: the names of the records' placeholders."""
    names, found = set(records), set[Node]()
    for node in nodes:
        if node.name in names or any(n in found for n in node.all_input_nodes):
            found.add(node)
    return found


def unsafe(nodes: Sequence[Node], entered: set[Node]) -> str | None:
    """The reason why an operation is not safe for records; None if all are safe."""
    counted = _counts(nodes)
    for node in nodes:
        kind = _kind(node)
        values = {argument.name: value for argument, value in by_argument(node)}
        # It depends on a record's numbers, not only on the batch size.
        tensors = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), Tensor)]
        if any(n in entered for n in tensors) and not _checks(node):
            return f"{node.target} is not known to look at what a record gives it"
        if any(n in counted for n in node.all_input_nodes) and not _takes_counts(node):
            return f"{node.target} would make of a record as many numbers as it says"
        if kind.startswith(_UNWRITTEN) and node.target not in DONE_AS:
            return f"{node.target} leaves what lay in memory before"
        if any(values.get(name) in entered for name in _TAKEN_AS_THEY_ARE.get(kind, ())):
            return f"{node.target} does not look at what a record gives it"
        if kind.startswith("max_pool") and _pools_padding(node, values):
            return f"{node.target} has a window that lies wholly in its padding"
        if not kind.endswith("no_training") and _keeps_statistics(values):
            return f"{node.target} changes a tensor in place"
    return None


def _pools_padding(node: Node, values: dict[str, Any]) -> bool:
    """Whether a max-pooling has a window that consists of padding: its steps jump over the input.

    torch returns an index out of bounds for it, and writes its gradient there: to the next channel
    or record.
    """
    sizes = cast(Any, node.args[0]).meta["val"].shape[-int(_kind(node)[len("max_pool")]) :]

    def each(name: str, default: int) -> list[int]:
        value = values.get(name) or default
        given = list(cast(Any, value)) if isinstance(value, (list, tuple)) else [value]
        return given * (len(sizes) // len(given))

    dims = zip(sizes, each("padding", 0), each("dilation", 1), strict=True)
    return any(pad and step > size for size, pad, step in dims)


def _counts(nodes: Iterable[Node]) -> set[Node]:
    """The nodes that are Python numbers derived from a record (the batch size is not)."""
    batch, found = set[Any](), set[Node]()
    for node in nodes:
        value = node.meta.get("val")
        if node.op == "placeholder":
            sizes: list[Any] = [s for s in getattr(value, "shape", ()) if not isinstance(s, int)]
            batch |= {symbol for size in sizes for symbol in size.node.expr.free_symbols}
        elif is_size(node) and cast(Any, value).node.expr.free_symbols - batch:
            found.add(node)
    return found


def _takes_counts(node: Node) -> bool:
    """Whether an operation allocates nothing of a number's size, such as checks and selections."""
    target = cast(Any, node.target)
    checks = kind_of(node) in CHECKS or target in (operator.ge, operator.le)
    return checks or torch.Tag.pointwise in getattr(target, "tags", ())


def _checks(node: Node) -> bool:
    """Whether an operation checks its input; Python arithmetic needs no check."""
    kind, target = kind_of(node), cast(Any, node.target)
    if not kind or kind in CHECKED or str(target) in RULES or target in DONE_AS:
        return True
    each = torch.Tag.pointwise in target.tags and not any(word in kind for word in UNBOUNDED)
    return each or bool(target.is_view)


def _keeps_statistics(values: dict[str, Any]) -> bool:
    """Whether a normalisation updates running statistics, which its schema does not declare."""
    if values.get("running_mean") is None and values.get("running_var") is None:
        return False
    names = ("training", "train", "use_input_stats")
    return next((values[name] for name in names if name in values), True) is not False


def own_tables(nodes: Iterable[Node], entered: set[Node]) -> list[Node]:
    """Operations for which vmap concatenates the records' tables.

    An index beyond a record's table would read an entry of another record. These are look-ups in a
    table computed from a record, and writes at positions given by a record.
    """
    by_record = {"embedding": 0, "index_fill": 2}
    return [n for n in nodes if _kind(n) in by_record and n.args[by_record[_kind(n)]] in entered]


def _kind(node: Node) -> str:
    """An operation's name; torch's internal ones begin with an underscore."""
    return kind_of(node).lstrip("_")
