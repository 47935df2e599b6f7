"""What every vmap over records runs in, so that it gives each of them the same bits at every place.

vmap makes one operation of as many as there are records, and a library may make some of them by
other code, for where their numbers begin or how many are left. So what vmap comes down to is looked
at: products are made by evenly_matmul; a convolution whose kernel is each record's own, which vmap
makes one of as many groups, is taken group by group; and an operation that is not known to treat
all alike raises Uneven, upon which whoever asked takes the records one after the other.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Final, cast

import torch
from torch import Tensor

from fedpact.persample.apart.places import names
from fedpact.persample.products import Evenly, lying

_aten = cast(Any, torch.ops.aten)


class Uneven(RuntimeError):
    """An operation is not known to give records the same bits at every place under vmap."""


class _Looked(Evenly):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _CONVOLVING:
            return _CONVOLVING[func](func, args, kwargs or {})
        if not (self.replaces(func) or _alike(func)):
            raise Uneven(f"vmap is not known to make {func} of each record by the same code")
        return super().__torch_dispatch__(func, types, args, kwargs)


@contextmanager
def for_vmap() -> Generator[None]:
    """What every vmap runs in: records get the same bits, and torch gives no advice on speed.

    Raises, from within, Uneven. Not warnings.catch_warnings, which other threads would see; one
    pass has few slow operations.
    """
    switch = cast(Any, torch)._C._functorch._set_vmap_fallback_warning_enabled
    switch(False)
    try:
        with _Looked():
            yield
    finally:
        switch(True)


def _alike(func: Any) -> bool:
    moves = func.is_view or torch.Tag.pointwise in func.tags
    return moves or str(func).split(".")[1] in _ALIKE


# Of each, tests/persample/test_operations.py has a use, bit for bit. One that is in doubt is taken
# out: records are then looped over, slow and exact.
_ALIKE: Final = names(
    """
    _assert_tensor_metadata _to_copy _unsafe_view arange cat constant_pad_nd copy_ diagonal_backward
    embedding embedding_dense_backward empty empty_like fill fill_ flip full full_like gather index
    index_add index_put masked_fill masked_fill_ new_empty new_full
    new_ones new_zeros ones ones_like repeat roll scalar_tensor scatter scatter_add select_backward
    slice_backward stack tril triu unfold_backward unsqueeze_ zero zeros zeros_like

    reflection_pad1d reflection_pad1d_backward reflection_pad2d reflection_pad2d_backward
    replication_pad1d replication_pad1d_backward replication_pad2d replication_pad2d_backward

    all amax amin aminmax any argmax argmin linalg_vector_norm logsumexp max mean min prod std
    std_mean sum var var_mean cummax cummin cumprod cumsum kthvalue median sort topk

    _log_softmax _log_softmax_backward_data _safe_softmax _softmax _softmax_backward_data
    binary_cross_entropy binary_cross_entropy_backward huber_loss mse_loss smooth_l1_loss

    native_batch_norm native_batch_norm_backward
    native_group_norm native_layer_norm native_layer_norm_backward _weight_norm_interface

    _prelu_kernel _prelu_kernel_backward elu_backward glu glu_backward hardshrink_backward
    hardsigmoid_backward hardswish hardswish_backward hardtanh_backward leaky_relu_backward
    log_sigmoid_backward log_sigmoid_forward softplus_backward softshrink_backward

    _adaptive_avg_pool2d _adaptive_avg_pool2d_backward adaptive_max_pool2d
    adaptive_max_pool2d_backward avg_pool2d avg_pool2d_backward
    max_pool2d_with_indices max_pool2d_with_indices_backward
    _adaptive_avg_pool3d _adaptive_avg_pool3d_backward avg_pool3d avg_pool3d_backward
    max_pool3d_with_indices max_pool3d_with_indices_backward
    col2im im2col upsample_bilinear2d upsample_bilinear2d_backward upsample_linear1d
    upsample_linear1d_backward upsample_nearest1d upsample_nearest1d_backward upsample_nearest2d
    upsample_nearest2d_backward

    _cdist_backward _cdist_forward _fft_c2c _fft_c2r _fft_r2c
    bernoulli native_dropout rand_like randn_like
    """
)


def _convolved(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Group by group where records are groups: vmap then leaves one image."""
    x, weight, bias, stride, padding, dilation, transposed, more, groups = args
    if len(x) != 1 or groups == 1:
        return func(*args, **kwargs)
    settings = stride, padding, dilation, transposed, more, 1
    each = [
        func(lying(one), lying(kernel), b, *settings)
        for one, kernel, b in zip(
            x.chunk(groups, 1), weight.chunk(groups), _parts(bias, groups), strict=True
        )
    ]
    return torch.cat(each, 1)


def _convolved_back(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same of its three gradients."""
    g, x, weight, biases, stride, padding, dilation, transposed, more, groups, mask = args
    if len(x) != 1 or groups == 1:
        return func(*args, **kwargs)
    biases = None if biases is None else [biases[0] // groups]
    settings = biases, stride, padding, dilation, transposed, more, 1, mask
    each = [
        func(lying(of), lying(one), lying(kernel), *settings)
        for of, one, kernel in zip(
            g.chunk(groups, 1), x.chunk(groups, 1), weight.chunk(groups), strict=True
        )
    ]
    return tuple(
        torch.cat(column, dim) if wanted else None
        for column, dim, wanted in zip(zip(*each, strict=True), (1, 0, 0), mask, strict=True)
    )


def _parts(bias: Tensor | None, groups: int) -> list[Tensor | None]:
    return [None] * groups if bias is None else [*bias.chunk(groups)]


_CONVOLVING: dict[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    _aten.convolution.default: _convolved,
    _aten.convolution_backward.default: _convolved_back,
}
