"""Models and records as people bring them: they train, or an error says what to write instead."""

import copy

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedpact
from fedpact.api import with_own
from fedpact.common.errors import DataError, ModelError
from fedpact.common.losses import cross_entropy
from fedpact.common.params import FlatModel
from fedpact.per_sample.kernel import PerSampleKernel, PlainKernel
from fedpact.plan import Plan
from fedpact.simulation.workshop import TrainingSetup

MODES = pytest.mark.parametrize("mode", ["per_sample", "none"])
RNG = np.random.default_rng(0)
IMAGES = RNG.random((90, 12, 12, 3), dtype="float32"), RNG.integers(0, 3, 90)
NUMBERS = torch.randn(90, 6, generator=torch.Generator().manual_seed(0)), torch.arange(90) % 2


def run(tmp_path, model, data, mode="per_sample", **more):
    settings = {"sites": 2, "rounds": 2, "sampling_rate": 0.3, "seed": 0, **more}
    privacy = {"epsilon": 8.0} if mode == "per_sample" else {"mode": "none"}
    return fedpact.run(model, data, out=tmp_path / "run", privacy=privacy, **settings)


class Viewing(nn.Module):
    """As tutorials write it: what is behind a convolution, in one row."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4 * 25, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv(x)), 2)
        return self.head(x.view(x.size(0), -1))


class Flat(nn.Module):
    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(int(np.prod(shape)), classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.view(x.size(0), -1))


def test_records_may_have_any_memory_layout(tmp_path):
    """As of images whose channels stood last: a view behind them is of numbers in their order."""
    x, y = np.moveaxis(IMAGES[0], -1, 1), IMAGES[1]
    plain = run(tmp_path / "plain", Viewing, (np.ascontiguousarray(x), y), rounds=1)
    given = torch.from_numpy(IMAGES[0]).permute(0, 3, 1, 2)
    found = run(tmp_path / "permuted", Viewing, (given, y), rounds=1)
    assert found.records[-1].loss == plain.records[-1].loss
    assert found.evaluate((given, y)) == plain.evaluate((x, y))
    assert np.array_equal(found.predict(given).probabilities, plain.predict(x).probabilities)


def test_views_of_an_image_share_its_layout(tmp_path):
    data = np.ascontiguousarray(np.moveaxis(IMAGES[0], -1, 1)), IMAGES[1]
    assert run(tmp_path, Flat, data, views={"shift": 1, "mirror": True}).records[-1].loss


@MODES
def test_norms_that_are_frozen_stay_frozen(tmp_path, mode):
    """At public statistics, as an error about others advises; so a backbone's are."""

    def whole(shape: tuple[int, ...], classes: int) -> nn.Module:
        body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4).eval(), nn.ReLU())
        return nn.Sequential(body, nn.Flatten(), nn.Linear(400, classes))

    assert run(tmp_path, whole, (np.moveaxis(IMAGES[0], -1, 1), IMAGES[1]), mode).records[-1].loss


@pytest.mark.parametrize("norm", [nn.InstanceNorm2d, lambda c: nn.GroupNorm(8, c)])
def test_deep_networks_with_norms_are_not_said_to_mix_records(norm):
    """Rounding puts many of their units on either side of a kink, as at an empty image."""

    def block(i: int, o: int) -> list[nn.Module]:
        return [nn.Conv2d(i, o, 3, padding=1), norm(o), nn.ReLU()]

    layers = [*block(1, 8), *block(8, 8), nn.MaxPool2d(2), *block(8, 16), *block(16, 16)]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3))
    x, y = torch.randn(4, 1, 16, 16), torch.randint(3, (4,))
    PerSampleKernel(FlatModel(net), cross_entropy).verify(x, y)


def test_empty_images_have_the_gradient_that_they_have():
    """Normalised as they are given: by pixel torch takes a variance that is rounding there."""
    norms = nn.GroupNorm(4, 8), nn.GroupNorm(4, 8)
    layers = [nn.Conv2d(1, 8, 3, padding=1), norms[0], nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)]
    layers += [norms[1], nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 3)]
    x, y = torch.zeros(8, 1, 16, 16), torch.arange(8) % 3
    net = nn.Sequential(*layers)
    model, exact = FlatModel(net), FlatModel(copy.deepcopy(net).double())
    expected = PlainKernel(exact, cross_entropy).weighted_sum(x.double(), y)
    for found in (
        PlainKernel(model, cross_entropy).weighted_sum(x, y),
        PerSampleKernel(model, cross_entropy).clipped_sum(x, y, 1e9),
    ):
        assert float((found - expected).norm() / expected.norm()) < 1e-4


def test_a_loss_may_contain_constants(tmp_path):
    loss = nn.CrossEntropyLoss(reduction="none", weight=torch.tensor([1.0, 3.0]))
    assert run(tmp_path, lambda s, k: nn.Linear(6, k), NUMBERS, loss=loss).records[-1].loss


def test_what_is_moved_to_a_gpu_is_not_what_others_hold():
    """A loss has constants there too, and a layer that several models hold stays on the CPU."""
    loss = nn.CrossEntropyLoss(reduction="none", weight=torch.tensor([1.0, 3.0]))
    frozen = nn.Linear(6, 6).requires_grad_(False)
    model = lambda shape, classes: nn.Sequential(frozen, nn.Linear(6, 2))  # noqa: E731
    plan, _ = with_own(Plan.parse({"privacy": {"mode": "none"}}), model=model, loss=loss)
    there = TrainingSetup(plan, torch.zeros(6), 2).on("meta")
    x, y = (value.to("meta") for value in there.make_dummy_records())
    assert there.bench().kernel.losses(x, y).device.type == "meta"
    assert {frozen.weight.device.type, loss.weight.device.type} == {"cpu"}
    alone = nn.Linear(6, 2)
    alone.generator = torch.Generator()  # which cannot be copied
    assert there.move(alone).weight.device.type == "meta"


def test_a_model_and_its_loss_may_call_their_numbers_alike():
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.loss = nn.Linear(6, 3)
            self.loss.register_buffer("factor", torch.tensor(2.0))

        def forward(self, x: Tensor) -> Tensor:
            return self.loss(x) * self.loss.factor

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("factor", torch.tensor(5.0))

        def forward(self, outputs: Tensor, y: Tensor) -> Tensor:
            return cross_entropy(outputs, y) * self.factor

    model, (x, y) = FlatModel(Weighted()), NUMBERS
    found = PerSampleKernel(model, Loss()).clipped_sum(x, y, 1e9)
    expected = PlainKernel(model, cross_entropy).weighted_sum(x, y) * 5
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("look", "mode"), [("embedding", "per_sample"), ("one_hot", "none")])
def test_a_declared_category_may_be_looked_up(tmp_path, mode, look):
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(3, 3), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            at = x[:, 1].long()
            found = self.words(at) if look == "embedding" else F.one_hot(at, 3).float()
            return self.head(torch.cat([found, x[:, :1]], 1))

    frame = pd.DataFrame({"age": RNG.uniform(0, 120, 400), "ward": RNG.choice(list("ABC"), 400)})
    frame["ill"] = np.where(frame.ward == "B", "yes", "no")
    age, ward = {"range": [0, 120], "scale": "range"}, {"categories": ["A", "B", "C"]}
    records = {"classes": ["no", "yes"], "columns": {"age": age, "ward": ward}}
    found = run(tmp_path, Table, frame, mode, label="ill", records=records, rounds=30)
    assert found.records[-1].accuracy > 0.9  # two thirds are "no"


class Squeezing(Flat):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(x).squeeze()


class Dropping(Flat):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.dropout(x, 0.5))


class Starting(Flat):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + 0.1 * torch.randn(6))


@MODES
@pytest.mark.parametrize(
    ("model", "told"),
    [
        (Squeezing, r"a batch of 1 with \(2,\) and one of 2 with \(2, 2\).*write squeeze\(1\)"),
        (Dropping, "draws random numbers when it is evaluated"),
        (Starting, "draws random numbers when it is evaluated"),
    ],
)
def test_the_error_says_what_to_write_instead(tmp_path, mode, model, told):
    with pytest.raises(ModelError, match=told):
        run(tmp_path, model, NUMBERS, mode)


class Guarded(Flat):
    def forward(self, x: Tensor) -> Tensor:
        if torch.isnan(x).any():
            raise ValueError
        return self.head(x)


def test_a_branch_error_gives_its_line_only(tmp_path, capfd):
    with pytest.raises(ModelError, match=r"line \d+: if torch.isnan\(x\).any\(\)") as raised:
        run(tmp_path, Guarded, NUMBERS)
    assert str(raised.value).count("test_everyday_models.py") == 1
    assert "def forward" not in "".join(capfd.readouterr())


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_compiled_code_is_reported_if_it_must_be_inspected(tmp_path):
    def scripted(shape: tuple[int, ...], classes: int) -> nn.Module:
        return torch.jit.script(nn.Linear(6, classes))

    assert run(tmp_path, scripted, NUMBERS, "none").records[-1].loss
    with pytest.raises(ModelError, match="hand in the module it was made of"):
        run(tmp_path / "private", scripted, NUMBERS)


@MODES
def test_a_run_may_stand_where_nothing_is_to_be_trained(tmp_path, mode):
    with torch.inference_mode():
        found = run(tmp_path, Flat, NUMBERS, mode)
        assert found.evaluate(NUMBERS).accuracy > 0


def test_records_of_other_types_are_accepted_or_reported(tmp_path):
    x, y = NUMBERS
    assert run(tmp_path, Flat, (x.bfloat16(), y)).records[-1].loss
    with pytest.raises(DataError, match="to_dense"):
        run(tmp_path, Flat, (x.to_sparse(), y))
    with pytest.raises(DataError, match=r"frame, DESCR, which are not columns.*bunch.target"):
        run(tmp_path, Flat, {"data": x, "target": y, "frame": None, "DESCR": "a table"})
