"""Hugging Face's models with the attention that they come with, which reports were about."""

import pytest
import torch
from torch import nn

from fedpact.common.losses import cross_entropy
from fedpact.common.params import FlatModel
from fedpact.models.hugging_face import with_named_inputs
from fedpact.per_sample.kernel import PerSampleKernel

pytestmark = pytest.mark.filterwarnings("ignore")
hf = pytest.importorskip("transformers", reason="pip install 'fedpact[outside]'")


def check(model, x):
    """Traced many records at a time, with the sum of each record's clipped gradient."""
    y = torch.arange(len(x)) % 3
    kernel = PerSampleKernel(FlatModel(model.train()), cross_entropy)
    assert kernel.way(x, y) == "graph"
    each = kernel.alone(x, y)
    expected = (each * (0.5 / each.norm(dim=1)).clamp_max(1)[:, None]).sum(0)
    assert torch.allclose(kernel.clipped_sum(x, y, 0.5), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
def test_bert_keeps_its_masks_with_either_attention(attention, lora):
    config = hf.BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, num_labels=3, attn_implementation=attention,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = hf.BertForSequenceClassification(config)
    if lora:
        peft = pytest.importorskip("peft")
        adapters = peft.LoraConfig(r=2, target_modules=["query", "value"], task_type="SEQ_CLS")
        model = peft.get_peft_model(model, adapters)
    ids = torch.randint(1, 50, (6, 12))
    ids[:, 9:] = 0
    x = torch.stack([ids, (ids != 0).long()], 1)
    check(with_named_inputs(model, x[0]), x)


class Mean(nn.Module):
    """A head on the mean of T5's encoder."""

    def __init__(self, encoder, masked):
        super().__init__()
        self.encoder, self.head, self.masked = encoder, nn.Linear(16, 3), masked

    def forward(self, x):
        mask = (x != 1).long() if self.masked else None
        return self.head(self.encoder(input_ids=x, attention_mask=mask).last_hidden_state.mean(1))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(("layers", "masked"), [(1, False), (1, True), (2, True)])
def test_t5_learns_its_bias_with_either_attention(attention, layers, masked):
    config = hf.T5Config(
        vocab_size=60, d_model=16, d_kv=8, d_ff=32, num_layers=layers, num_heads=2,
        dropout_rate=0.0, attn_implementation=attention,
    )  # fmt: skip
    check(Mean(hf.T5EncoderModel(config), masked), torch.randint(0, 60, (6, 12)))
