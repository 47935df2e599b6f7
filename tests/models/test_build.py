import pytest
import torch
from torch import nn

from fedpact.errors import ModelError, PlanError
from fedpact.models.build import build
from fedpact.models.papers import LogisticSettings
from fedpact.params import FlatModel
from fedpact.plan import Plan


@pytest.mark.parametrize(
    ("name", "shape", "d"),
    [
        ("cnn", (1, 28, 28), 582_026),
        ("cnn", (3, 32, 32), 878_538),
        ("cnn_padded", (1, 28, 28), 1_663_370),
        ("logistic", (13,), 13 * 10 + 10),
        ("mlp", (1, 8, 8), 64 * 128 + 128 + 128 * 10 + 10),
    ],
)
def test_the_papers_models_have_the_papers_sizes(name, shape, d):
    assert FlatModel(build(name, torch.zeros(shape), 10, 0)).size == d


def test_weights_follow_the_seed_and_leave_the_global_generator_alone():
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    one, same, other = (FlatModel(build("mlp", torch.zeros(4), 3, s)).vector for s in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def own(shape, classes):
    return nn.Linear(shape[0], classes)


def wide(shape, classes):
    return nn.Linear(shape[0], classes + 1)


def broken(shape, classes):
    raise RuntimeError("no weights today")


def no_module(shape, classes):
    return "a model"


def test_a_users_own_factory_is_found(monkeypatch):
    monkeypatch.syspath_prepend(str(__file__).rsplit("/", 1)[0])
    assert isinstance(build("test_build:own", torch.zeros(4), 3, 0), nn.Linear)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("resnet", "expected one of cnn, cnn_padded, logistic, lstm, mlp, transformer"),
        ("nowhere:make", "nowhere"),
        (":make", "package.module:factory"),
        ("..a:make", "package.module:factory"),
        ("test_build:nothing", "nothing"),
        ("test_build:wide", r"expected \(2, 3\)"),
        ("test_build:broken", "no weights today"),
        ("test_build:no_module", "expected an nn.Module"),
        ("cnn", "expected images"),
    ],
)
def test_a_model_that_cannot_be_had_is_told(monkeypatch, name, told):
    monkeypatch.syspath_prepend(str(__file__).rsplit("/", 1)[0])
    with pytest.raises(ModelError, match=told):
        build(name, torch.zeros(4), 3, 0)


def test_an_image_too_small_for_the_cnn_is_told():
    with pytest.raises(ModelError, match="too small"):
        build("cnn", torch.zeros(1, 8, 8), 10, 0)


def test_logistic_may_start_at_zero_and_have_no_bias():
    example = torch.zeros(4)
    settings = LogisticSettings(start="zero", bias=False)
    weights = dict(build("logistic", example, 3, 0, settings).named_parameters())
    assert {name: tuple(w.shape) for name, w in weights.items()} == {"1.weight": (3, 4)}
    assert not weights["1.weight"].any()
    # Left out, it is what it was: drawn from the seed, with a bias.
    drawn = build("logistic", example, 3, 0, LogisticSettings())
    for one, other in zip(
        drawn.parameters(), build("logistic", example, 3, 0).parameters(), strict=True
    ):
        assert torch.equal(one, other)
        assert one.any()


def test_settings_of_logistic_with_another_model_are_refused():
    with pytest.raises(PlanError, match="model is 'mlp' with a table \\[logistic\\]"):
        Plan.parse({"model": "mlp", "logistic": {"start": "zero"}})
    with pytest.raises(PlanError, match=r"logistic\.start"):
        Plan.parse({"logistic": {"start": "ones"}})
