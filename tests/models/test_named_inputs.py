"""Models whose inputs have names: records reach them by these, and their logits are what counts."""

from typing import NamedTuple

import pytest
import torch
from torch import nn

from fedpact.common.errors import ModelError
from fedpact.common.losses import UNLABELLED, pixel_entropy
from fedpact.models.build import build
from fedpact.models.hugging_face import NamedInputs, reads_ahead, with_named_inputs

IDS = torch.tensor([[5, 3, 0], [2, 4, 6]])
MASK = torch.tensor([[1, 1, 0], [1, 1, 1]])
TYPES = torch.tensor([[0, 1, 0], [0, 0, 1]])


class Config:
    use_cache, pad_token_id, eos_token_id, vocab_size = True, None, 7, 8
    decoder_start_token_id = 7


class Text(nn.Module):
    """As a library's: inputs by name, a mapping as its output."""

    main_input_name = "input_ids"

    def __init__(self, classes=2):
        super().__init__()
        self.table, self.kinds = nn.Embedding(8, 4), nn.Embedding(2, 4)
        self.head, self.config, self.seen = nn.Linear(4, classes), Config(), {}

    def forward(self, input_ids=None, attention_mask=None, token_type_ids=None, labels=None):
        self.seen = {"ids": input_ids, "mask": attention_mask, "types": token_type_ids}
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        h = self.table(input_ids)
        if token_type_ids is not None:
            h = h + self.kinds(token_type_ids)
        mean = (h * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return {"loss": None, "logits": self.head(mean)}


class Picture(nn.Module):
    main_input_name = "pixel_values"

    def __init__(self, answer=lambda logits: {"logits": logits}):
        super().__init__()
        self.f, self.answer = nn.Conv2d(1, 2, 2, stride=2), answer

    def forward(self, pixel_values, return_dict=True):
        return self.answer(self.f(pixel_values))


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_rows_of_tokens_reach_the_model_by_name(rows):
    model = Text()
    given = (IDS, MASK, TYPES)[:rows]
    x = IDS if rows == 1 else torch.stack(given, 1)
    found = with_named_inputs(model, x[0])
    names = ("input_ids", "attention_mask", "token_type_ids")
    assert torch.equal(found(x), model(**dict(zip(names, given, strict=False)))["logits"])


def test_padding_is_the_models_own_token():
    model = Text()
    found = with_named_inputs(model, torch.stack([IDS, MASK], 1)[0])
    found(torch.stack([IDS, MASK], 1))
    # The end of a text, as the model names no token for padding.
    assert model.seen["ids"].tolist() == [[5, 3, 7], [2, 4, 6]]
    assert model.config.use_cache is False


def test_weights_keep_their_names_in_files():
    model = Text()
    found = with_named_inputs(model, IDS[0])
    assert found.state_dict().keys() == Text().state_dict().keys()
    found.load_state_dict({name: torch.ones_like(v) for name, v in model.state_dict().items()})
    assert all(bool((p == 1).all()) for p in model.parameters())


@pytest.mark.parametrize(
    "answer", [lambda v: {"out": v, "aux": v + 1}, lambda v: (v, v + 1), lambda v: v]
)
def test_scores_of_places_have_the_places_size(answer):
    model, x = Picture(answer), torch.randn(2, 1, 4, 4)
    found = with_named_inputs(model, x[0], "pixels")(x)
    whole = nn.functional.interpolate(model.f(x), (4, 4), mode="bilinear")
    assert torch.equal(found, whole)


def test_scores_of_tokens_have_classes_second():
    class Tagger(Text):
        def forward(self, input_ids=None, attention_mask=None):
            return {"logits": self.head(self.table(input_ids))}

    model = Tagger(classes=5)
    found = with_named_inputs(model, IDS[0], "pixels")(IDS)
    assert torch.equal(found, model(IDS)["logits"].movedim(2, 1))


def test_a_tensor_of_scores_has_classes_second_already():
    """As a model of one's own returns it, also if it names its inputs as libraries do."""

    class Decoder(Text):
        def forward(self, input_ids, attention_mask=None):
            return self.head(self.table(input_ids)).movedim(2, 1)

    model = Decoder(classes=5)
    assert torch.equal(with_named_inputs(model, IDS[0], "pixels")(IDS), model(IDS))


class Ends(Text):
    """Says where an answer begins and ends."""

    def forward(self, input_ids=None, attention_mask=None):
        start, end = self.head(self.table(input_ids)).unbind(2)
        return {"loss": None, "start_logits": start, "end_logits": end}


class Cut(Text):
    """Answers for the first two tokens alone."""

    def forward(self, input_ids=None, attention_mask=None):
        return {"logits": self.head(self.table(input_ids[:, :2]))}


def test_ends_of_a_span_are_two_labels_with_places_as_classes():
    model, y = Ends(), torch.tensor([[0, 2], [1, 1]])
    found = with_named_inputs(model, IDS[0], "pixels")(IDS)
    assert found.shape == (2, 3, 3)
    losses = pixel_entropy(found, nn.functional.pad(y, (0, 1), value=UNLABELLED))
    parts = model(IDS)["start_logits"], model(IDS)["end_logits"]
    each = [nn.functional.cross_entropy(p, y[:, k], reduction="none") for k, p in enumerate(parts)]
    assert torch.allclose(losses, (each[0] + each[1]) / 2)


class Writer(Text):
    """Its decoder reads a text of its own."""

    def forward(self, input_ids=None, attention_mask=None, decoder_input_ids=None):
        if decoder_input_ids is None:
            raise ValueError("no text to write")
        return {
            "logits": self.head(self.table(input_ids).mean(1, True) + self.table(decoder_input_ids))
        }


def test_places_of_a_prompt_have_no_labels():
    class Prompted(Text):
        peft_config = ()

        def get_base_model(self):
            return self

        def forward(self, input_ids=None, attention_mask=None):
            words = torch.cat(
                [self.table.weight[:2].expand(len(input_ids), -1, -1), self.table(input_ids)], 1
            )
            return {"logits": self.head(words)}

    model = Prompted(classes=5)
    found = with_named_inputs(model, IDS[0], "pixels")(IDS)
    assert torch.equal(found, model(IDS)["logits"][:, 2:].movedim(2, 1))


def test_what_a_decoder_reads_is_the_fourth_row():
    model, own = Writer(classes=8), torch.tensor([[7, 1, 2], [7, 3, 3]])
    x = torch.stack([IDS, MASK, 0 * IDS, own], 1)
    found = with_named_inputs(model, x[0], "pixels")(x)
    ids = IDS.masked_fill(MASK == 0, 7)
    assert torch.equal(found, model(ids, MASK, own)["logits"].movedim(2, 1))


@pytest.mark.parametrize(
    ("model", "classes", "kind", "remedy"),
    [
        (Writer(8), 8, "pixels", r'decoder_input_ids": \[7, \*row\["labels"\]\[:-1\]\]'),
        (Ends(), 2, "class", r"classes = \[str\(k\) for k in range\(3\)\]"),
        (Ends(), 2, "pixels", r"classes = \[str\(k\) for k in range\(3\)\]"),
        (Cut(), 5, "pixels", r"records\.length = 2"),
    ],
    ids=["decoder", "span", "span of tokens", "length"],
)
def test_outputs_of_another_task_get_a_line_to_write(monkeypatch, model, classes, kind, remedy):
    monkeypatch.setattr("fedpact.models.build.own_factory", lambda *_: lambda: model)
    with pytest.raises(ModelError, match=remedy):
        build("own:net", torch.stack([IDS, MASK], 1)[0], classes, 0, None, kind)


def test_a_model_with_wrong_outputs_gets_a_remedy(monkeypatch):
    class Headless(Text):
        def forward(self, input_ids=None):
            return {"last_hidden_state": self.table(input_ids)}

    for model, classes in ((Headless(), 2), (Text(), 3)):
        monkeypatch.setattr("fedpact.models.build.own_factory", lambda *_, m=model: lambda: m)
        with pytest.raises(ModelError, match=f"num_labels = {classes}"):
            build("own:net", IDS[0], classes, 0)


class Found(NamedTuple):
    hidden: torch.Tensor
    logits: torch.Tensor


class Several(nn.Linear):
    """Answers with more than its logits."""

    def __init__(self, answer, training):
        super().__init__(3, 2)
        self.answer, self.when = answer, training

    def forward(self, x):
        found = super().forward(x)
        return self.answer(found) if self.training in self.when else found


@pytest.mark.parametrize("training", [(True, False), (True,)], ids=["always", "in training"])
@pytest.mark.parametrize(
    "answer",
    [
        lambda v: (v, v.sum()),
        lambda v: [v],
        lambda v: {"logits": v, "hidden": v + 1},
        lambda v: {"loss": None, "scores": v},
        lambda v: {"hidden": v + 1, "prediction_outputs": v},
        lambda v: Found(v + 1, v),
    ],
    ids=["tuple", "list", "dict", "one tensor", "series", "named tuple"],
)
def test_outputs_other_than_logits_are_left_out(answer, training):
    model, x = Several(answer, training), torch.randn(4, 3)
    found = with_named_inputs(model, x[0])
    assert torch.equal(found.train()(x), nn.functional.linear(x, model.weight, model.bias))
    assert found.eval()(x).shape == (4, 2)


class Mixture(nn.Module):
    """Names the next of `tokens` tokens by a mixture of those of a text."""

    def __init__(self, mix, tokens=12, head=1.0):
        super().__init__()
        self.words, self.head = nn.Embedding(tokens, 8), nn.Linear(8, tokens)
        self.mix = mix
        nn.init.normal_(self.head.weight, std=head)

    def forward(self, x):
        return self.head(self.mix(self.words(x))).mT


def _behind(h):
    return torch.nn.functional.pad(h[:, 1:], (0, 0, 0, 1))


def _prefix(h):
    """The first two tokens see each other."""
    return torch.cat([h[:, :2].mean(1, keepdim=True).expand(-1, 2, -1), h[:, 2:]], 1)


class Gate(nn.Module):
    """Mixes by a weight that begins at 0."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, h):
        return h + self.weight * h.mean(1, keepdim=True)


@pytest.mark.parametrize("length", [2, 7])
def test_a_model_that_reads_ahead_is_known(length):
    x = torch.ones(2, length, dtype=torch.int64)
    for mix in (_behind, _prefix, Gate(), lambda h: h.mean(1, keepdim=True).expand_as(h)):
        assert reads_ahead(Mixture(mix), x, 12)
    assert reads_ahead(Mixture(_behind, tokens=3), x, 3)
    assert reads_ahead(Mixture(_behind, head=0.0), x, 12)


@pytest.mark.parametrize("length", [2, 7, 512])
def test_a_causal_model_reads_nothing_ahead(length):
    x = torch.ones(2, length, dtype=torch.int64)
    lstm = nn.LSTM(8, 8, batch_first=True)
    for mix in (lambda h: h.cumsum(1), lambda h: lstm(h)[0], lambda h: h):
        assert not reads_ahead(Mixture(mix), x, 12)


def test_a_model_that_is_built_is_given_named_inputs(monkeypatch):
    monkeypatch.setattr("fedpact.models.build.own_factory", lambda *_: Text)
    assert isinstance(build("own:net", torch.stack([IDS, MASK], 1)[0], 2, 0), NamedInputs)
