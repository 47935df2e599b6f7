import math

import pytest
import torch
from tests.per_sample.small import by_autograd
from torch import nn

from fedpact.common.errors import ModelError, PlanError
from fedpact.common.losses import cross_entropy
from fedpact.common.params import FlatModel
from fedpact.models.build import build
from fedpact.models.zoo import LogisticSettings
from fedpact.per_sample.kernel import PerSampleKernel, PlainKernel
from fedpact.per_sample.layout import Placement
from fedpact.plan import Plan


@pytest.fixture(autouse=True)
def found_by_name(monkeypatch):
    monkeypatch.syspath_prepend(str(__file__).rsplit("/", 1)[0])


@pytest.mark.parametrize(
    ("name", "shape", "d"),
    [
        ("cnn", (1, 28, 28), 582_026),
        ("cnn", (3, 32, 32), 878_538),
        ("cnn_padded", (1, 28, 28), 1_663_370),
        # Convolutions and their norms, and a layer on 32 maps of 4x4.
        ("cnn_group_norm", (1, 28, 28), 192 + 4704 + 9312 + 5130),
        ("cnn_group_norm", (3, 32, 32), 480 + 4704 + 9312 + 5130),
        ("logistic", (13,), 13 * 10 + 10),
        ("mlp", (1, 8, 8), 64 * 128 + 128 + 128 * 10 + 10),
    ],
)
def test_the_papers_models_have_the_papers_sizes(name, shape, d):
    assert FlatModel(build(name, torch.zeros(shape), 10, 0)).size == d


def test_weights_follow_the_seed_not_the_global_generator():
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    one, same, other = (FlatModel(build("mlp", torch.zeros(4), 3, s)).vector for s in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def wide(shape, classes):
    return nn.Linear(shape[0], classes + 1)


def broken(shape, classes):
    raise RuntimeError("no weights today")


class Head(nn.Linear):
    def __init__(self):
        super().__init__(4, 3)


class Deep(Head):
    """Answers in training with a second head's scores."""

    def forward(self, x):
        found = super().forward(x)
        return torch.stack([found, found], 1) if self.training else found


class Pair(Head):
    def forward(self, x):
        return x.flip(1), super().forward(x)


class Scored(Head):
    def forward(self, x):
        return {"hidden": x, "scores": super().forward(x)}


class Aged(Head):
    def forward(self, x, age, scale=1):
        return super().forward(x) * age * scale


def no_module(shape, classes):
    return "a model"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (
            "resnet",
            "expected one of cnn, cnn_group_norm, cnn_padded, logistic, lstm, mlp, ngram, tr",
        ),
        ("nowhere:make", "nowhere"),
        (":make", "package.module:factory"),
        ("..a:make", "package.module:factory"),
        ("test_build:nothing", "nothing"),
        ("test_build:wide", r"expected \(2, 3\)"),
        ("test_build:broken", "no weights today"),
        ("test_build:no_module", "expected an nn.Module"),
        ("test_build:Deep", r"\(2, 3\) in evaluation and with \(2, 2, 3\) in training: .*deep_sup"),
        ("test_build:Pair", "the first tensor is taken, so return the logits first"),
        ("test_build:Scored", "with dict of hidden, scores: .* as 'logits' of a dict"),
        ("test_build:Aged", "takes such records and nothing else, .*'age'"),
        ("cnn", "expected images"),
        ("cnn_group_norm", "'cnn_group_norm' got records .* expected images"),
    ],
)
def test_a_model_that_cannot_be_loaded_is_reported(name, told):
    with pytest.raises(ModelError, match=told):
        build(name, torch.zeros(4), 3, 0)


class Squeezed(Head):
    def forward(self, x):
        return super().forward(x) if len(x) > 1 else super().forward(x[:, :2])


class PaddedNot(nn.Module):
    """A library's model of texts, which fails in the library's words."""

    main_input_name = "input_ids"

    def __init__(self):
        super().__init__()
        self.layer = nn.Embedding(9, 3)

    def forward(self, input_ids, attention_mask):
        if not bool(attention_mask.all()):
            raise RuntimeError("its own words")
        return self.layer(input_ids).mean(1)


class Short(PaddedNot):
    def forward(self, input_ids, attention_mask):
        return self.layer(input_ids + torch.arange(input_ids.shape[1]) * 4).mean(1)


class Shrunk(nn.Sequential):
    def __init__(self):
        super().__init__(nn.AvgPool2d(4), nn.InstanceNorm2d(1), nn.Flatten(), nn.Linear(1, 3))


class Grouped(nn.Sequential):
    """torch refuses one number a group in a batch of one record alone."""

    def __init__(self):
        super().__init__(nn.Conv2d(3, 8, 4), nn.GroupNorm(8, 8), nn.Flatten(), nn.Linear(8, 3))


class Unnamed(nn.Embedding):
    def __init__(self):
        super().__init__(9, 3)

    def forward(self, x):
        return (super().forward(x) + torch.zeros(7, 3)).mean(1)


TEXT = torch.zeros(2, 5, dtype=torch.int64)


@pytest.mark.parametrize(
    ("name", "record", "told"),
    [
        ("test_build:PaddedNot", TEXT, "it takes no text with padding"),
        ("test_build:Short", TEXT, "takes texts of at most 2 tokens: set records.length = 2 "),
        ("test_build:Unnamed", TEXT, r"is given \(2, 5\), tokens and their mask: name its inputs"),
        ("test_build:Shrunk", torch.zeros(1, 4, 4), "a layer normalises over a single number"),
        ("test_build:Grouped", torch.zeros(3, 4, 4), "a layer normalises over a single number"),
        ("test_build:Squeezed", torch.zeros(4), "a single made-up record, but accepts two, of"),
        ("logistic", TEXT[0], "does not accept .*whole numbers mean tokens: choose a"),
        ("cnn_group_norm", torch.zeros(8, 8), r"got records of shape \(8, 8\).* as \(1, 8, 8\)"),
    ],
)
def test_records_that_a_model_does_not_take_are_told(name, record, told):
    with pytest.raises(ModelError, match=told):
        build(name, record, 3, 0)


class Tagger(nn.Embedding):
    def __init__(self, shape, classes):
        super().__init__(9, classes)
        self.longer = shape[0] == 7

    def forward(self, x):
        out = super().forward(x)
        return torch.cat([out, out], 1).mT if self.longer else out


@pytest.mark.parametrize("length", [4, 7])
def test_tokens_with_classes_last_or_of_another_length_are_told(length):
    record = torch.zeros(length, dtype=torch.int64)
    with pytest.raises(ModelError, match=rf"so expected \(2, 3, {length}\), classes first"):
        build("test_build:Tagger", record, 3, 0, kind="pixels")


@pytest.mark.parametrize(
    ("name", "side", "instead"),
    [("cnn", 8, "cnn_padded"), ("cnn", 3, "cnn_group_norm"), ("cnn_padded", 3, "cnn_group_norm")],
)
def test_an_image_too_small_for_the_cnn_gets_a_remedy(name, side, instead):
    image = torch.zeros(1, side, side)
    with pytest.raises(ModelError, match=f"model '{name}' got .* too small .* use '{instead}' or"):
        build(name, image, 10, 0)
    assert build(instead, image, 10, 0)(image[None]).shape == (1, 10)


def test_logistic_may_start_at_zero_and_have_no_bias():
    example = torch.zeros(4)
    settings = LogisticSettings(start="zero", bias=False)
    weights = dict(build("logistic", example, 3, 0, settings).named_parameters())
    assert {name: tuple(w.shape) for name, w in weights.items()} == {"1.weight": (3, 4)}
    assert not weights["1.weight"].any()


def test_a_scaled_bias_is_a_weight_of_an_input_of_that_size():
    """Rows [u, s] and weights [W, b] in one layer without a bias, by every way of the kernel, and
    each record's gradient by autograd; float64."""
    scale, generator = 0.3, torch.Generator().manual_seed(1)
    x = torch.randn(40, 5, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (40,), generator=generator)
    settings = LogisticSettings(bias=scale)
    ours = FlatModel(build("logistic", x[0].float(), 3, 0, settings).double())
    rows = torch.cat([x, torch.full((40, 1), scale, dtype=torch.float64)], 1)
    layer = nn.Linear(6, 3, bias=False, dtype=torch.float64)
    w, b = ours.vector[:15].reshape(3, 5), ours.vector[15:].reshape(3, 1)
    layer.weight.data = torch.cat([w, b], 1)
    assert torch.allclose(ours.module(x), rows @ layer.weight.T, rtol=1e-12)
    each = PerSampleKernel(FlatModel(layer), cross_entropy).alone(rows, y)
    kernel = PerSampleKernel(ours, cross_entropy)
    kernel.verify(x[:5], y[:5])
    assert kernel.way(x, y) == "dense"
    dense, plain = kernel._passes.dense, PlainKernel(ours, cross_entropy)
    for clip in (0.05, 1.0, math.inf):
        factors = (clip / each.norm(dim=1, keepdim=True)).clamp_max(1)
        wanted = (each * factors).sum(0).reshape(3, 6)
        wanted = torch.cat([wanted[:, :5].reshape(-1), wanted[:, 5]])
        for way in (None, dense):
            kernel._passes.dense = way
            torch.testing.assert_close(kernel.clipped_sum(x, y, clip), wanted, rtol=0, atol=1e-12)
    torch.testing.assert_close(plain.weighted_sum(x, y, None), wanted, rtol=0, atol=1e-12)


def test_a_bias_of_one_is_a_bias():
    example, one = torch.zeros(4), LogisticSettings(bias=1.0)
    ours, usual = (build("logistic", example, 3, 0, s) for s in (one, None))
    x = torch.randn(7, 4)
    assert torch.equal(ours(x), usual(x))
    for bias in (0.0, -0.3, math.nan, math.inf, 1e30, "x"):
        # One sentence, though the value has two forms.
        with pytest.raises(
            PlanError, match=r"^logistic\.bias is [^;]*; set logistic\.bias to [^;]*$"
        ):
            Plan.parse({"logistic": {"bias": bias}})
    most = build("logistic", example, 3, 0, LogisticSettings(bias=1000.0))
    assert torch.isfinite(most(x)).all()


def test_the_group_norm_cnn_trains_in_private():
    """Its ways keep records apart, and a clipped sum is that of single gradients; float64."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(5, 1, 28, 28, generator=generator, dtype=torch.float64)
    y = torch.tensor([0, 1, 2, 3, 9])
    model = FlatModel(build("cnn_group_norm", x[0].float(), 10, 0).double())
    kernel = PerSampleKernel(model, cross_entropy)
    kernel.verify(x, y)
    layout = Placement(length=8)
    clip = float(kernel.norms(x, y, layout).median())
    found, wanted = kernel.clipped_sum(x, y, clip, layout=layout), by_autograd(kernel, x, y, clip)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def test_settings_of_logistic_with_another_model_are_refused():
    with pytest.raises(PlanError, match="model is 'mlp' with a table \\[logistic\\]"):
        Plan.parse({"model": "mlp", "logistic": {"start": "zero"}})
    with pytest.raises(PlanError, match=r"logistic\.start"):
        Plan.parse({"logistic": {"start": "ones"}})
