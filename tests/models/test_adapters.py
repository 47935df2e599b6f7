"""What a run checks of a model with adapters; see also tests/outside/test_transformers.py."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fedpact.common.errors import ModelError
from fedpact.common.losses import cross_entropy
from fedpact.common.params import FlatModel
from fedpact.models.hugging_face import NamedInputs, check_adapters
from fedpact.per_sample.kernel import PerSampleKernel


class Adapted(nn.Module):
    """As PEFT's LoRA of a frozen layer: a second factor that begins at 0."""

    def __init__(self):
        super().__init__()
        self.peft_config = {"default": None}
        self.base, self.used = nn.Linear(4, 3).requires_grad_(False), True
        self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 3, bias=False)
        nn.init.zeros_(self.up.weight)

    @property
    def base_model(self):
        return self

    def get_base_model(self):
        return self

    def forward(self, x):
        return (
            self.base(x) + self.up(self.down(x))
            if self.used
            else self.base(x) + 0 * self.up(x[:, :2])
        )


def kernel(model):
    return PerSampleKernel(FlatModel(NamedInputs(model, ())), cross_entropy)


def test_adapters_with_gradients_pass_and_stay_as_they_were():
    model, x, y = Adapted(), torch.randn(4, 4), torch.arange(4) % 3
    before = {name: v.clone() for name, v in model.state_dict().items()}
    check_adapters(kernel(model), x, y)
    assert all(torch.equal(v, before[name]) for name, v in model.state_dict().items())


def test_adapters_that_no_answer_follows_from_are_named():
    model, x, y = Adapted(), torch.randn(4, 4), torch.arange(4) % 3
    model.used = False
    with pytest.raises(ModelError, match=r"without a gradient of any record: .*down"):
        check_adapters(kernel(model), x, y)


def test_adapters_that_cannot_be_removed_are_refused_first():
    """After it what is stored could not be checked."""

    class Stuck(Adapted):
        def unload(self):
            raise AttributeError("no attribute 'weight'")

    with pytest.raises(ModelError, match=r"cannot remove .* \(AttributeError: no attribute"):
        check_adapters(kernel(Stuck()), torch.randn(4, 4), torch.arange(4) % 3)


def test_a_classifier_that_is_not_trained_is_told(caplog):
    model, x, y = Adapted(), torch.randn(4, 4), torch.arange(4) % 3
    model.active_peft_config = SimpleNamespace(task_type="TaskType.SEQ_CLS")
    check_adapters(kernel(model), x, y)
    assert "the classifier keeps the weights that it has" in caplog.text
    caplog.clear()
    model.modules_to_save = nn.Linear(1, 1)
    model.forward = lambda x: Adapted.forward(model, x) * model.modules_to_save(x[:, :1])
    check_adapters(kernel(model), x, y)
    assert not caplog.text


def test_a_base_that_a_pass_moves_is_found():
    class Moving(Adapted):
        def forward(self, x):
            with torch.no_grad():
                self.base.weight.add_(1e-3)
            return super().forward(x)

    with pytest.raises(ModelError, match=r"not trained: .*base\.weight"):
        check_adapters(kernel(Moving()), torch.randn(4, 4), torch.arange(4) % 3)
