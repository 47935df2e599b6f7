"""The flat vector: the model's weights are views of it, and nothing else is."""

import contextlib
import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedpact.common.errors import InputError, ModelError
from fedpact.common.params import FlatModel, all_digits, all_finite, one_thread, state_of


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def test_vector_orders_parameters_and_computes_the_same():
    module, x = model(), torch.randn(5, 3)
    before, outputs = [p.detach().clone() for p in module.parameters()], module(x)
    flat = FlatModel(module)
    assert flat.size == 3 * 4 + 4 + 4 * 2 + 2
    assert flat.vector.is_contiguous()
    assert not flat.vector.requires_grad
    assert torch.equal(flat.vector, torch.cat([p.reshape(-1) for p in before]))
    assert torch.equal(module(x), outputs)


def test_vector_and_model_share_memory():
    module = model()
    flat = FlatModel(module)
    flat.load(torch.arange(float(flat.size)))
    assert torch.equal(module[0].weight, torch.arange(12.0).view(4, 3))
    flat.vector[-1] = -7
    assert module[2].bias[-1] == -7
    with torch.no_grad():
        module[0].bias.fill_(5)
    assert torch.equal(flat.vector[12:16], torch.full((4,), 5.0))


def test_load_copies_and_accepts_the_vector_itself():
    flat = FlatModel(model())
    w = torch.randn(flat.size)
    flat.load(w)
    assert torch.equal(flat.vector, w)
    w.zero_()
    assert not torch.equal(flat.vector, w)
    flat.load(flat.vector)
    tracked = torch.randn(flat.size, requires_grad=True)
    flat.load(tracked)
    assert not flat.vector.requires_grad


@pytest.mark.parametrize("shape", [(25,), (27,), (1, 26), (0,), ()])
def test_load_refuses_another_shape_and_leaves_the_model_alone(shape):
    flat = FlatModel(model())
    before = flat.vector.clone()
    with pytest.raises(ModelError, match=r"shape.*26 trainable"):
        flat.load(torch.zeros(shape))
    assert torch.equal(flat.vector, before)


def test_frozen_parameters_and_buffers_stay_where_they_are():
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    module[0].requires_grad_(False)
    module[2].bias.requires_grad_(False)
    places = [module[0].weight.data_ptr(), module[1].running_mean.data_ptr()]
    flat = FlatModel(module)
    assert [name for name, _ in flat.views(flat.vector)] == ["1.weight", "1.bias", "2.weight"]
    assert flat.size == 4 + 4 + 8
    assert [module[0].weight.data_ptr(), module[1].running_mean.data_ptr()] == places


def test_a_shared_parameter_is_in_the_vector_once():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    module = nn.Sequential(first, second, nn.Sequential(first))
    flat = FlatModel(module)
    assert flat.size == 16 + 4 + 4
    flat.load(torch.arange(24.0))
    assert second.weight is first.weight
    assert torch.equal(second.weight, torch.arange(16.0).view(4, 4))


def test_views_of_another_vector_are_views_laid_out_as_the_model():
    module = model()
    flat = FlatModel(module)
    other = torch.zeros(flat.size)
    views = dict(flat.views(other))
    assert {n: v.shape for n, v in views.items()} == {
        n: p.shape for n, p in module.named_parameters()
    }
    views["2.weight"].fill_(3)
    assert other.sum() == 24
    assert all(v.is_contiguous() for v in views.values())


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=1, max_size=5))
def test_any_shapes_fill_the_vector_without_gaps(shapes):
    module = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])
    flat = FlatModel(module)
    count = torch.zeros(flat.size)
    for _, view in flat.views(count):
        view += 1
    assert torch.equal(count, torch.ones(flat.size))


def test_a_model_without_trainable_parameters_is_refused():
    with pytest.raises(ModelError, match="Linear has no trainable parameter"):
        FlatModel(nn.Linear(2, 2).requires_grad_(False))


def test_parameters_of_several_types_are_refused():
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    with pytest.raises(ModelError, match=r"float32.*float64"):
        FlatModel(mixed)
    mixed[1].requires_grad_(False)
    assert FlatModel(mixed).vector.dtype == torch.float32


@settings(max_examples=200, deadline=None)
@given(
    entries=st.lists(st.floats(width=32), max_size=40),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
)
def test_a_vector_is_finite_when_every_entry_is(entries, dtype):
    vector = torch.tensor(entries, dtype=dtype)
    assert all_finite(vector) == bool(vector.isfinite().all())


def test_overflow_and_cancelling_infinities_are_detected():
    most = torch.finfo(torch.float32).max
    assert all_finite(torch.full((100,), most))
    assert all_finite(torch.full((100,), -most))
    assert not all_finite(torch.tensor([torch.inf, -torch.inf]))
    assert not all_finite(torch.tensor([most, most, torch.nan, -torch.inf]))
    assert all_finite(torch.arange(5))
    assert all_finite(torch.zeros(0))


def test_torch_computes_on_one_thread_meanwhile(two_threads):
    with contextlib.suppress(ZeroDivisionError), one_thread():
        assert torch.get_num_threads() == 1
        raise ZeroDivisionError
    assert torch.get_num_threads() == 2


PRODUCTS = ["matmul", "conv", "rnn"]


@pytest.fixture
def settings_of_torch():
    """They are as before afterwards."""
    places = [getattr(torch.backends.mkldnn, name) for name in PRODUCTS]
    before = [place.fp32_precision for place in places]
    tf32 = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    yield places
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = tf32
    for place, precision in zip(places, before, strict=True):
        place.fp32_precision = precision


def test_full_precision_lasts_until_the_last_holder_leaves(settings_of_torch):
    places = settings_of_torch

    def found():
        return [place.fp32_precision for place in places]

    first, second = all_digits(torch.zeros(1)), all_digits(torch.zeros(1))
    places[0].fp32_precision = places[1].fp32_precision = "bf16"
    before = found()
    first.__enter__()
    assert found() == ["ieee", "ieee", before[2]]
    places[2].fp32_precision = "tf32"  # as another thread may ask meanwhile
    second.__enter__()
    assert found() == ["ieee"] * 3
    first.__exit__(None, None, None)
    assert found() == ["ieee"] * 3
    second.__exit__(None, None, None)
    assert found() == ["bf16", "bf16", "tf32"]


@pytest.mark.parametrize("allowed", [True, False])
def test_gpu_products_are_full_precision_and_traceable(settings_of_torch, allowed):
    vector = types.SimpleNamespace(device=torch.device("cuda"))  # its settings need no GPU
    backends = torch.backends
    backends.cuda.matmul.allow_tf32 = backends.cudnn.allow_tf32 = allowed
    with all_digits(vector):
        assert not backends.cuda.matmul.allow_tf32
        assert not backends.cudnn.allow_tf32
        # To trace a model torch reads and writes them so.
        torch.export.export(nn.Linear(2, 2), (torch.ones(1, 2),))
    assert (backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32) == (allowed, allowed)


def test_contradictory_settings_are_refused(settings_of_torch):
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    with (
        pytest.raises(InputError, match="TF32 contradict each other"),
        all_digits(types.SimpleNamespace(device=torch.device("cuda"))),
    ):
        pass
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    with all_digits(types.SimpleNamespace(device=torch.device("cuda"))):
        pass


def test_callers_medium_precision_is_restored():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with all_digits(torch.zeros(1)):
            assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"
        assert torch.get_float32_matmul_precision() == "medium"
        assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_gpu_adds_in_the_same_order_every_time(settings_of_torch):
    vector = types.SimpleNamespace(device=torch.device("cuda"))
    enabled, filled = torch.are_deterministic_algorithms_enabled, torch.utils.deterministic
    before = filled.fill_uninitialized_memory
    with all_digits(vector):
        assert enabled()
        assert not filled.fill_uninitialized_memory
    assert not enabled()
    assert filled.fill_uninitialized_memory == before
    with all_digits(torch.zeros(1)):
        assert not enabled()


def test_a_state_is_stored_in_one_piece():
    layer = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    found = state_of(layer)
    assert torch.equal(found["weight"], layer.weight)
    assert found["weight"].is_contiguous()
    assert found["weight"].data_ptr() != layer.weight.data_ptr()
