"""Passes of fewer digits: what one record moves a sum by is bounded as it is in float32.

bfloat16 is computed on the CPU by torch itself. TF32, which no CPU has, is put in by a mode that
rounds what products are made of, wherever a pass asks for it.
"""

import contextlib
import copy
import math
from types import SimpleNamespace

import pytest
import torch
from tests.per_sample.attacked import made, records
from tests.spread import spread
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from fedpact.common.errors import ModelError
from fedpact.common.losses import cross_entropy
from fedpact.common.params import FlatModel, all_digits, fewer_digits
from fedpact.models import zoo
from fedpact.per_sample import passes
from fedpact.per_sample.clipping import slack
from fedpact.per_sample.kernel import PerSampleKernel, PlainKernel
from fedpact.per_sample.layout import Placement

CLIP, SLOTS = 0.5, 64


NAMES = ("rows", "positions", "gram", "pooled", "groups", "lstm", "attention", "records")


class Tf32(TorchDispatchMode):
    """Rounds what products are made of to TF32's 11 digits, while somebody allows it."""

    PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "convolution", "dot", "linear")
    allowed = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__.strip("_")
        if self.allowed and name.removesuffix("_backward") in self.PRODUCTS:
            written = func._schema.is_mutable
            # What is written to, in place, is no factor.
            first = args[:1] if written and name != "bmm" else ()
            args = (*first, *tree_map(rounded, args[len(first) :]))
        return func(*args, **(kwargs or {}))


def rounded(value):
    if not isinstance(value, torch.Tensor) or value.dtype != torch.float32:
        return value
    mantissa, exponent = torch.frexp(value)
    found = torch.ldexp((mantissa * 2**11).round() / 2**11, exponent)
    return torch.where(value.isfinite(), found, value)


PRECISIONS = ("float32", "tf32", "bf16")


@pytest.fixture(params=PRECISIONS)
def precision(request, monkeypatch):
    """Each precision; TF32 as it would be on a GPU."""
    if request.param != "tf32":
        yield request.param
        return
    mode = Tf32()

    @contextlib.contextmanager
    def allowing(model):
        before, mode.allowed = mode.allowed, model.precision != "float32"
        yield
        mode.allowed = before

    monkeypatch.setattr(passes, "fewer_digits", allowing)
    monkeypatch.setattr(passes.Dense, "of", lambda *_: None)  # which is the CPU's
    with mode:
        yield request.param


def case(name, precision):
    kernel = PerSampleKernel(FlatModel(made(name), precision), cross_entropy)
    return kernel, *records(name, 60, 1)


def strange(x):
    """Records like x [...]: of extreme sizes, at kinks, and with positions that cancel."""
    signs = torch.ones_like(x).view(-1)
    signs[::2] = -1
    cancelling = x.view(-1)[:1].expand_as(signs) * signs
    return {
        "ordinary": x,
        "huge": 1e30 * x,
        "tiny": 1e-30 * x,
        "cancelling": 1e3 * cancelling.view(x.shape),
        "nearly cancelling": (1e3 * cancelling + x.view(-1)).view(x.shape),
        "one number": torch.zeros_like(x).index_fill(-1, torch.tensor(0), 3e38),
        "not a number": torch.full_like(x, math.nan),
    }


def scattered(count):
    places = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(2))[:count]
    return Placement(places=places, slots=SLOTS, length=32)


@pytest.mark.parametrize(
    ("name", "precision"), spread(NAMES, PRECISIONS, one_in=3), indirect=["precision"]
)
def test_no_record_moves_a_sum_by_more(name, precision):
    kernel, x, y = case(name, precision)
    layout, most = scattered(len(x)), CLIP * (1 + slack(len(x)))
    without = kernel.clipped_sum(x[1:], y[1:], CLIP, layout=layout.of(slice(1, None))).double()
    moved = {}
    for kind, record in strange(x[0]).items():
        one = torch.cat([record[None], x[1:]])
        moved[kind] = float((kernel.clipped_sum(one, y, CLIP, layout=layout) - without).norm())
        assert moved[kind] <= most, kind
    # Some are as long as they may be, so that a bound a little lower would be too low.
    assert max(moved.values()) > 0.99 * CLIP


@pytest.mark.parametrize(
    ("name", "precision"), spread(NAMES, PRECISIONS, one_in=3), indirect=["precision"]
)
def test_clipped_gradients_have_the_clips_length(name, precision):
    """Of numbers that are measured before they are rounded it would be off by 2^-9, 2^-11."""
    kernel, x, y = case(name, precision)
    layout = Placement(length=32)
    for j in range(4):
        one = slice(j, j + 1)
        length = float(kernel.clipped_sum(x[one], y[one], math.inf, layout=layout).double().norm())
        clip = length / 3
        found = kernel.clipped_sum(x[one], y[one], clip, layout=layout).double().norm()
        assert abs(float(found) - clip) <= 2**-13 * clip


@pytest.mark.parametrize(
    ("name", "precision"), spread(NAMES, PRECISIONS, one_in=3), indirect=["precision"]
)
def test_sums_are_near_those_of_all_digits_and_not_the_same(name, precision):
    kernel, x, y = case(name, precision)
    exact = PerSampleKernel(FlatModel(copy.deepcopy(kernel.model.module)), cross_entropy)
    layout = Placement(length=32)
    a = kernel.clipped_sum(x, y, CLIP, layout=layout)
    b = exact.clipped_sum(x, y, CLIP, layout=layout)
    off = float((a - b).norm() / b.norm())
    digits = {"float32": 0.0, "tf32": 2**-11, "bf16": 2**-8}[precision]
    assert off <= 100 * digits
    assert (off > 0) == (digits > 0)


def test_a_sum_of_fewer_digits_breaks_the_bound():
    """Were what adds records of fewer digits, too, one of many equal records would show it."""
    kernel, x, y = case("pooled", "bf16")
    x, y = x[:1].expand_as(x), y[:1].expand_as(y)
    layout, most = scattered(len(x)), CLIP * (1 + slack(len(x)))
    gradients = kernel._passes.gradients

    def rounding(x, y):
        found = gradients(x, y)

        def add(c, good, total):
            found.add(c, good, total)
            total.copy_(total.bfloat16())

        return passes.Measured(found.losses, found.norms, add, found.factors)

    kernel._passes.gradients = rounding
    sums = [
        kernel.clipped_sum(x[r], y[r], CLIP, layout=layout.of(r)).double()
        for r in (slice(0, None), slice(1, None))
    ]
    assert float((sums[0] - sums[1]).norm()) > most


def test_a_plain_run_s_sums_and_a_private_one_s_agree(precision):
    kernel, x, y = case("pooled", precision)
    plain = PlainKernel(FlatModel(copy.deepcopy(kernel.model.module), precision), cross_entropy)
    layout = Placement(length=32)
    a, b = kernel.clipped_sum(x, y, math.inf, layout=layout), plain.weighted_sum(x, y)
    # Beside the lengths of what was summed: the sum itself cancels, by more than its terms round.
    off = float((a - b).norm() / kernel.norms(x, y, layout).sum())
    assert off <= {"float32": 1e-6, "tf32": 2**-8, "bf16": 2**-8}[precision]


def test_a_gpu_allows_tf32_in_passes_and_only_there():
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    vector = SimpleNamespace(device=torch.device("cuda"))
    for precision in ("float32", "tf32", "bf16"):
        model = SimpleNamespace(vector=vector, precision=precision)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(torch, "is_autocast_enabled", lambda kind: False)
            with all_digits(vector):
                assert (matmul.allow_tf32, cudnn.allow_tf32) == (False, False)
                with fewer_digits(model):
                    allowed = precision != "float32"
                    assert (matmul.allow_tf32, cudnn.allow_tf32) == (allowed, allowed)
                assert (matmul.allow_tf32, cudnn.allow_tf32) == (False, False)
    assert (matmul.allow_tf32, cudnn.allow_tf32) == before


def test_float64_has_no_fewer_digits():
    model = FlatModel(zoo.logistic((1, 6, 6), 3).double(), "bf16")
    with pytest.raises(ModelError, match=r"precision is 'bf16' .*torch\.float64: expected float32"):
        PerSampleKernel(model, cross_entropy)


def test_a_model_is_verified_in_float32_and_trained_in_bf16():
    kernel, x, y = case("attention", "bf16")
    kernel.verify(x[:4], y[:4])
    assert kernel.model.precision == "bf16"
