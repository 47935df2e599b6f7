"""All that stands in a model's way at once, and what is done about it without being asked."""

import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import fedpact
from fedpact.common.errors import InputError, ModelError
from fedpact.models.build import build
from fedpact.models.prepare import find_obstacles


def net():
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(4 * 36, 3))


def test_a_ready_model_is_left_as_it_is():
    model = nn.Linear(3, 2)
    found = fedpact.prepare(model)
    assert (found.done, found.left) == ((), ())
    assert found.model is not model
    assert torch.equal(found.model.weight, model.weight)


def test_harmless_changes_are_made_and_others_reported():
    model, x = net().eval(), torch.randn(2, 1, 8, 8)
    found = fedpact.prepare(model.train())
    assert found.done == ("inplace = False: 2",)
    (left,) = found.left
    assert "BatchNorm" in left
    assert "(1)" in left
    assert model[2].inplace
    assert torch.equal(found.model.eval()(x), model.eval()(x))


def test_batchnorm_is_replaced_on_request():
    found = fedpact.prepare(net(), batch_norm="group")
    assert found.left == ()
    assert isinstance(found.model[1], nn.GroupNorm)
    assert "GroupNorm in place of BatchNorm: 1" in str(found)
    with pytest.raises(InputError, match="batch_norm is 'layer'"):
        fedpact.prepare(net(), batch_norm="layer")


class Experts(nn.Linear):
    """As mixtures of experts of Hugging Face's."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.config = SimpleNamespace(_experts_implementation="grouped_mm")

    def set_experts_implementation(self, kind):
        self.config._experts_implementation = kind


def test_experts_are_computed_by_batched_products():
    model = Experts(3, 2)
    found = fedpact.prepare(model)
    assert "grouped_mm" in next(find_obstacles(model))
    assert (found.left, found.model.config._experts_implementation) == ((), "batched_mm")


def test_half_precision_becomes_float32():
    found = fedpact.prepare(nn.Linear(3, 2).half())
    assert found.model.weight.dtype == torch.float32


class Skipping(nn.Linear):
    layerdrop = 0.1


class Encoder(nn.Linear):
    """As wav2vec 2.0's encoder, whose configuration says what is skipped."""

    def __init__(self, **rates):
        super().__init__(3, 3)
        self.config = SimpleNamespace(**rates)

    def _mask_hidden_states(self, hidden):
        raise NotImplementedError


class LycorisLayer(nn.Linear):
    """By PEFT's name of what LoHa and LoKr have in common."""


class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(3, dtype=torch.complex64))


class Adjacent(nn.Linear):
    def __init__(self):
        super().__init__(3, 3)
        self.register_buffer("edges", torch.eye(3).to_sparse())


@pytest.mark.parametrize(
    ("layer", "told"),
    [
        (nn.BatchNorm1d(3), "GroupNorm"),
        (nn.InstanceNorm1d(3, affine=True, track_running_stats=True), "track_running_stats=False"),
        (nn.Embedding(3, 2, max_norm=1.0), "max_norm"),
        (nn.utils.spectral_norm(nn.Linear(3, 3)), "remove_spectral_norm"),
        (parametrizations.spectral_norm(nn.Linear(3, 3)), "remove_parametrizations"),
        (Skipping(3, 3), "layerdrop = 0.0"),
        (Encoder(layerdrop=0.1), "layerdrop = 0.0"),
        (Encoder(mask_time_prob=0.05), "apply_spec_augment = False"),
        (LycorisLayer(3, 3), "LoraConfig"),
        (Spectral(), r"^weights are torch.complex64: .*view_as_real"),
        (nn.Linear(3, 3).half(), r"\.float\(\)"),
        (nn.Linear(3, 3).requires_grad_(False), "requires_grad"),
        (nn.Linear(3, 3, device="meta"), "no values"),
        (Adjacent(), "to_dense"),
    ],
    ids=lambda v: type(v).__name__,
)
def test_each_obstacle_has_a_remedy(layer, told):
    (found,) = find_obstacles(layer)
    assert re.search(told, found)


class Listed(nn.Module):
    """Holds layers in an attribute."""

    def __init__(self, **held):
        super().__init__()
        self.head = nn.Linear(3, 4)
        vars(self).update(held)


def test_layers_that_torch_does_not_find_are_an_obstacle():
    layer, head = nn.Linear(3, 3), nn.Linear(3, 4)
    for held in ([layer], (nn.ReLU(), layer), {"a": layer}):
        (found,) = find_obstacles(nn.Sequential(Listed(layers=held)))
        assert re.search(r"neither trained nor stored \(0\.layers\): .*nn\.ModuleList", found)
    ordinary = nn.Sequential(head, Listed(layers=[head, nn.ReLU()], sizes=[3], _teacher=[layer]))
    assert list(find_obstacles(ordinary)) == []


def test_recordings_without_masks_are_no_obstacle():
    rates = {"apply_spec_augment": False, "mask_time_prob": 0.05, "layerdrop": 0.0}
    assert list(find_obstacles(Encoder(**rates))) == []


def test_a_single_obstacle_has_a_remedy(monkeypatch):
    make = lambda: nn.utils.spectral_norm(nn.Linear(3, 4))  # noqa: E731
    monkeypatch.setattr("fedpact.models.build.own_factory", lambda *_: make)
    with pytest.raises(ModelError, match=r"trained: spectral norm.*remove_spectral_norm"):
        build("own:net", torch.zeros(3), 4, 0)


def test_a_refused_model_lists_all_obstacles(monkeypatch):
    def make():
        return nn.Sequential(nn.utils.spectral_norm(nn.Linear(3, 4)), nn.BatchNorm1d(4))

    monkeypatch.setattr("fedpact.models.build.own_factory", lambda *_: make)
    with pytest.raises(ModelError, match=r"2 reasons(.|\n)*BatchNorm(.|\n)*spectral norm"):
        build("own:net", torch.zeros(3), 4, 0)
