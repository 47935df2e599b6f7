"""All that stands in a model's way at once, in layers and in the lines of a pass; what is done."""

import re
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

import fedpact
from fedpact.common.errors import InputError, ModelError
from fedpact.models.build import build
from fedpact.models.prepare import find_in_pass, find_obstacles, with_lines


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
    model = nn.Sequential(Experts(3, 2))
    found = fedpact.prepare(model)
    assert "grouped_mm, for all records at once (0)" in next(find_obstacles(model))
    assert (found.left, found.model[0].config._experts_implementation) == ((), "batched_mm")


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


class Net(nn.Module):
    """Does something to hidden numbers h [B, 4] of records x [B, 3]."""

    def __init__(self, act=lambda net, h: h):
        super().__init__()
        self.first, self.last, self.act = nn.Linear(3, 4), nn.Linear(4, 2), act
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        return self.last(self.act(self, self.first(x)))


def keep(net, h):
    net.mean.mul_(0.9)
    return h - net.mean


def rounded(net, h):
    with torch.autocast("cpu", torch.bfloat16):
        return net.first(h[:, :3]).float()


SEEN = {
    "branch": (lambda net, h: h if h.sum() > 0 else -h, "a branch follows from values"),
    "any": (lambda net, h: h.relu() if (h > 3).any() else h, "a branch follows from values"),
    "weight": (lambda net, h: h if net.first.weight.norm() > 1 else -h, "a branch follows"),
    "item": (lambda net, h: h / h.abs().max().item(), "a number leaves its tensor"),
    "float": (lambda net, h: h * float(h[0, 0]), "a number leaves its tensor"),
    "numpy": (lambda net, h: h + h.detach().numpy().shape[0], "a number leaves its tensor"),
    "mean": (lambda net, h: h - h.mean(0), "records of a batch meet"),
    "sort": (lambda net, h: h.sort(0)[0], "records of a batch meet"),
    "product": (lambda net, h: (h @ h.t()).softmax(1) @ h, "records of a batch meet"),
    "order": (lambda net, h: h + h.flip(0), "records of a batch meet"),
    "state": (keep, "changes the model's own state"),
    "autocast": (rounded, "rounded by torch.autocast"),
}


@pytest.mark.parametrize("kind", SEEN)
def test_each_obstructing_line_is_named(kind):
    act, told = SEEN[kind]
    (found, *_) = [one for one in find_in_pass(Net(act), torch.zeros(3)) if told in one]
    assert "test_prepare.py, line" in found


def test_a_table_of_tokens_has_its_lines_too():
    class Words(Net):
        def forward(self, x):
            h = nn.functional.embedding(x, self.first.weight).mean(1)
            return h - h.mean(0)

    (found,) = find_in_pass(Words(), torch.zeros(5, dtype=torch.int64))
    assert "records of a batch meet" in found


ORDINARY = {
    "plain": lambda net, h: F.dropout(F.relu_(h), 0.5),
    "in place": lambda net, h: h.mul_(2).add_(1)[:, :4],
    "turned": lambda net, h: (h.t() * 2).t().flatten().view(-1, 4),
    "windows": lambda net, h: h.view(-1, 2, 2).softmax(2).flatten(1),
    "shape": lambda net, h: h if len(h) > 1 or h.shape[0] else -h,
    "mask": lambda net, h: torch.where(h > 0, h, 0.1 * h).cumsum(1),
}


@pytest.mark.parametrize("act", ORDINARY.values(), ids=ORDINARY)
def test_nothing_is_reported_for_independent_models(act):
    model = Net(act)
    before = {name: v.clone() for name, v in model.state_dict().items()}
    state = torch.get_rng_state()
    assert not list(find_in_pass(model, torch.zeros(3)))
    assert all(torch.equal(v, before[name]) for name, v in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())


def test_positions_that_lead_are_not_taken_for_records():
    class Turned(Net):
        def forward(self, x):
            return super().forward((2 * x.transpose(0, 1)).mean(0))

    assert not list(find_in_pass(Turned(), torch.zeros(12, 3)))


class Obstructed(Net):
    """Three obstacles: a layer's, a branch and a mean."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        h = self.norm(self.first(x))
        if h.sum() > 0:
            h = 2 * h
        return self.last(h - h.mean(0))


def test_a_refusal_lists_layers_and_lines(monkeypatch):
    monkeypatch.setattr("fedpact.models.build.own_factory", lambda *_: Obstructed)
    told = r"3 reasons(.|\n)*BatchNorm(.|\n)*if h.sum\(\) > 0(.|\n)*h - h.mean\(0\)"
    with pytest.raises(ModelError, match=told):
        build("own:net", torch.zeros(3), 2, 0)
    found = fedpact.prepare(Obstructed(), batch_norm="group", records=torch.zeros(2, 3))
    assert [one.partition(" (")[0] for one in found.left] == [
        "a branch follows from values", "records of a batch meet",
    ]  # fmt: skip


def test_refusals_of_the_kernel_list_every_line(tmp_path):
    def act(net, h):
        scale = h.abs().max().item()
        return h / scale if scale > 1 else h.sort(0)[0]

    data = torch.randn(20, 3), torch.arange(20) % 2
    with pytest.raises(ModelError, match=r"1\. a number leaves its tensor(.|\n)*max\(\)\.item"):
        fedpact.run(
            lambda: Net(act), data, sites=2, rounds=1, sampling_rate=0.5,
            privacy={"epsilon": 8.0}, out=tmp_path / "run",
        )  # fmt: skip


def test_a_model_that_writes_over_its_records_is_given_copies(monkeypatch):
    class Writing(Net):
        def forward(self, x):
            x[x < 0] = 0
            return super().forward(x)

    monkeypatch.setattr("fedpact.models.build.own_factory", lambda *_: Writing)
    x = torch.randn(4, 3)
    given, model = x.clone(), build("own:net", torch.zeros(3), 2, 0)
    found = model(given)
    assert torch.equal(given, x)
    assert torch.equal(found, model.model(x.relu()))


def test_a_line_with_brackets_is_named_once():
    def act(net, h):
        return h * float(h.max().item())

    module = Net(act)
    seen = next(one for one in find_in_pass(module, torch.zeros(3)) if "item" in one)
    line = seen.partition("(")[2].rpartition("): ")[0]
    found = str(
        with_lines(ModelError(f"no way (a number in {line}), so not"), module, torch.zeros(3))
    )
    assert found.startswith("no way (a number), so not\n")
