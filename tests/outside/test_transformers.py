"""Hugging Face's models as they come: a family each, on tokenised text or images."""

import copy
import importlib.util

import numpy as np
import pytest
import torch

import fedpact
from fedpact.common.losses import UNLABELLED, pixel_entropy
from fedpact.models.hugging_face import with_named_inputs
from fedpact.models.initial import InitialSettings

if importlib.util.find_spec("transformers") is None:
    pytest.skip("needs transformers: pip install 'fedpact[outside]'", allow_module_level=True)

# It imports torchvision where that is installed, and warns in its own ways.
pytestmark = pytest.mark.filterwarnings("ignore")
hf = pytest.importorskip("transformers")

SIZE = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
BERT = {
    **SIZE, "vocab_size": 50, "intermediate_size": 64, "max_position_embeddings": 20,
    "num_labels": 2,
}  # fmt: skip
IMAGES = {**SIZE, "image_size": 32, "patch_size": 8, "intermediate_size": 64, "num_labels": 2}
TEXT = {
    "bert": lambda: hf.BertConfig(**BERT),
    "roberta": lambda: hf.RobertaConfig(**BERT),
    "distilbert": lambda: hf.DistilBertConfig(
        vocab_size=50, dim=32, n_layers=1, n_heads=2, hidden_dim=64, max_position_embeddings=20
    ),
    "albert": lambda: hf.AlbertConfig(embedding_size=16, **BERT),
    "electra": lambda: hf.ElectraConfig(embedding_size=16, **BERT),
    "deberta": lambda: hf.DebertaV2Config(**BERT),
    "gpt2": lambda: hf.GPT2Config(
        vocab_size=50, n_embd=32, n_layer=1, n_head=2, n_positions=20,
        bos_token_id=1, eos_token_id=2,
    ),
    "llama": lambda: hf.LlamaConfig(num_key_value_heads=1, **BERT),
    "opt": lambda: hf.OPTConfig(ffn_dim=64, word_embed_proj_dim=32, **BERT),
    "bloom": lambda: hf.BloomConfig(vocab_size=50, hidden_size=32, n_layer=1, n_head=2),
    "t5": lambda: hf.T5Config(vocab_size=50, d_model=32, d_kv=16, d_ff=64, num_layers=1),
    "bart": lambda: hf.BartConfig(
        vocab_size=50, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64,
        max_position_embeddings=20, num_labels=2,
    ),
}  # fmt: skip
PICTURES = {
    "vit": lambda: hf.ViTConfig(**IMAGES),
    "beit": lambda: hf.BeitConfig(**IMAGES),
    "convnext": lambda: hf.ConvNextConfig(
        hidden_sizes=[8, 8, 16, 16], depths=[1] * 4, num_labels=2
    ),
    "swin": lambda: hf.SwinConfig(
        image_size=32, patch_size=2, embed_dim=16, depths=[1, 1], num_heads=[1, 2], window_size=4
    ),
}

RNG = np.random.default_rng(0)
LABELS = (np.arange(48) % 2).tolist()
TABLE = {
    "text": ["as it was"] * 48,
    "input_ids": [[3 + k, *RNG.integers(5, 50, 3 + j % 7)] for j, k in enumerate(LABELS)],
    "label": LABELS,
}


@pytest.mark.parametrize("config", TEXT.values(), ids=TEXT)
def test_a_family_of_text_runs_as_it_comes(trained, config):
    """With its dropout, whose rate no configuration here sets to 0."""
    make = hf.AutoModelForSequenceClassification.from_config
    result = trained(lambda: make(config()), TABLE, label="label")
    assert result.predict({"input_ids": TABLE["input_ids"][:5]}).probabilities.shape == (5, 2)


@pytest.mark.parametrize("config", PICTURES.values(), ids=PICTURES)
def test_a_family_of_images_runs_as_it_comes(trained, config):
    make = hf.AutoModelForImageClassification.from_config
    trained(lambda: make(config()), (torch.randn(48, 3, 32, 32), torch.tensor(LABELS)))


def test_predictions_are_those_of_the_model_itself(trained):
    """What was padded with a mask is answered as it would be without."""
    make = hf.AutoModelForSequenceClassification.from_config
    result = trained(lambda: make(TEXT["bert"]()), TABLE, label="label")
    found = result.predict(TABLE).probabilities
    model = hf.AutoModelForSequenceClassification.from_config(TEXT["bert"]()).eval()
    model.load_state_dict(result.model.state_dict())
    for row, ids in zip(found, TABLE["input_ids"], strict=True):
        with torch.no_grad():
            one = model(input_ids=torch.tensor([[int(i) for i in ids]])).logits.softmax(1)
        assert np.allclose(row, one[0], atol=1e-5)


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_a_classifier_that_reads_an_end_answers_as_its_own(kind):
    model = hf.AutoModelForSequenceClassification.from_config(TEXT[kind]()).eval()
    ids, mask = torch.randint(5, 50, (4, 9)), torch.ones(4, 9, dtype=torch.int64)
    for row, end in enumerate((8, 5, 3, 8)):
        ids[row, end] = model.config.eos_token_id
        mask[row, end + 1 :] = 0
    x = torch.stack([ids, mask], 1)
    found = with_named_inputs(model, x[0])(x)
    ids = ids.masked_fill(mask == 0, model.config.pad_token_id)
    assert torch.equal(found, model(input_ids=ids, attention_mask=mask).logits)


IDS = TABLE["input_ids"]
PICKED = [[t if k % 3 == 0 else -100 for k, t in enumerate(row)] for row in IDS]
ENDS = [[1, 2 + j % 2] for j in range(48)]
OF_TOKENS = {
    "next": ("CausalLM", "gpt2", 50, IDS, {"label": "input_ids", "records": {"vocabulary": 50}}),
    "masked": ("MaskedLM", "bert", 50, PICKED, {"classes": [str(k) for k in range(50)]}),
    "written": ("Seq2SeqLM", "t5", 50, IDS, {"classes": [str(k) for k in range(50)]}),
    "answers": (
        "QuestionAnswering",
        "bert",
        10,
        ENDS,
        {"classes": [str(k) for k in range(10)], "records": {"length": 10}},
    ),
    "tags": ("TokenClassification", "distilbert", 2, [[int(t) % 2 for t in r] for r in IDS], {}),
}


@pytest.mark.parametrize("task", OF_TOKENS)
def test_every_token_of_a_text_is_learned(trained, task):
    head, kind, classes, labels, settings = OF_TOKENS[task]
    make = getattr(hf, f"AutoModelFor{head}").from_config
    table = {"input_ids": IDS, "tags": labels}
    if task == "written":
        table["decoder_input_ids"] = [[0, *row[:-1]] for row in labels]
    given = {"label": "tags", "task": "tokens", **settings}
    result = trained(lambda: make(TEXT[kind]()), table, **given)
    few = {name: column[:2] for name, column in table.items() if name != "tags"}
    assert result.predict(few).probabilities.shape[:2] == (2, classes)


@pytest.mark.parametrize("kind", ["t5", "bart", "bert"])
def test_the_loss_of_a_record_is_the_librarys_own(kind):
    """Of a text that is written, and of an answer's two ends; without padding, record by record."""
    span = kind == "bert"
    head = "QuestionAnswering" if span else "Seq2SeqLM"
    model = getattr(hf, f"AutoModelFor{head}").from_config(TEXT[kind]()).eval()
    ids, labels = torch.randint(5, 50, (4, 9)), torch.randint(3, 50, (4, 9))
    ones, ends = torch.ones_like(ids), torch.tensor([[1, 3], [0, 0], [2, 8], [5, 6]])
    rows = [ids, ones]
    if not span:
        labels[:, 6:] = UNLABELLED
        model.config.decoder_start_token_id = 0  # which a configuration of T5 may leave out
        own = model.prepare_decoder_input_ids_from_labels(labels=labels)
        rows += [0 * ids, own]
    x = torch.stack(rows, 1)
    y = torch.nn.functional.pad(ends, (0, 7), value=UNLABELLED) if span else labels
    found = pixel_entropy(with_named_inputs(model, x[0], "pixels")(x), y)
    for j in range(4):
        one = {"input_ids": ids[j : j + 1], "attention_mask": ones[j : j + 1]}
        places = {"start_positions": ends[j, :1], "end_positions": ends[j, 1:]}
        own = model(**one, **(places if span else {"labels": labels[j : j + 1]})).loss
        assert torch.allclose(found[j], own, atol=1e-5)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bart"])
def test_a_next_tokens_loss_is_the_librarys_own(trained, kind):
    """Labels name the tokens themselves, as collators write them, -100 where none is learned."""
    make, ids = hf.AutoModelForCausalLM.from_config, TABLE["input_ids"]
    labels = [[UNLABELLED, UNLABELLED, *row[2:]] for row in ids]
    table = {"input_ids": ids, "labels": labels}
    given = {"task": "next_token", "records": {"vocabulary": 50}}
    result = trained(lambda: make(TEXT[kind]()), table, label="labels", **given)
    model, own = result.model.model.eval(), []
    for row, named in zip(ids, labels, strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([row])).logits[0]
            if kind != "bart":  # whose loss takes labels that are shifted already
                loss = model(input_ids=torch.tensor([row]), labels=torch.tensor([named])).loss
                own.append(float(loss))
                continue
        own.append(float(torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(named[1:]))))
    assert result.evaluate(table).loss == pytest.approx(np.mean(own), rel=1e-5)
    assert result.evaluate({"input_ids": ids}, labels).loss == pytest.approx(np.mean(own), rel=1e-5)


READERS = {
    "masked": lambda: hf.AutoModelForMaskedLM.from_config(TEXT["bert"]()),
    "no decoder": lambda: hf.AutoModelForCausalLM.from_config(TEXT["bert"]()),
    "tagger": lambda: hf.BertForTokenClassification(hf.BertConfig(**{**BERT, "num_labels": 50})),
    "writer": lambda: hf.AutoModelForSeq2SeqLM.from_config(TEXT["t5"]()),
}


@pytest.mark.parametrize("kind", READERS)
def test_a_model_that_reads_ahead_learns_no_next_token(trained, kind):
    ids = TABLE["input_ids"]
    table = {"input_ids": ids, "labels": ids}
    if kind == "writer":
        table["decoder_input_ids"] = [[0, *row[:-1]] for row in ids]
    given = {"label": "labels", "task": "next_token", "records": {"vocabulary": 50}}
    with pytest.raises(fedpact.FedpactError, match="reads the token that it is to name"):
        trained(READERS[kind], table, **given)


ADAPTERS = {
    "none": {},
    "LoraConfig": {"target_modules": ["c_attn"]},
    "PromptTuningConfig": {"num_virtual_tokens": 3},
}


@pytest.mark.parametrize("kind", ADAPTERS)
def test_labels_that_a_library_shifts_need_the_task(trained, kind):
    """Adapters do not hide that it shifts them."""
    peft = pytest.importorskip("peft")

    def make():
        base = hf.AutoModelForCausalLM.from_config(TEXT["gpt2"]())
        if kind == "none":
            return base
        settings = getattr(peft, kind)(task_type="CAUSAL_LM", **ADAPTERS[kind])
        return peft.get_peft_model(base, settings)

    table = {"input_ids": TABLE["input_ids"], "labels": TABLE["input_ids"]}
    with pytest.raises(fedpact.FedpactError, match='set kind = "next_token"'):
        trained(make, table, label="labels", task="tokens", classes=[str(k) for k in range(50)])


@pytest.mark.parametrize("token", [1, 7])
def test_single_tokens_of_a_table_are_trained(trained, token):
    """Which the made-up records of a check need not hold."""
    peft = pytest.importorskip("peft")

    def make():
        base = hf.AutoModelForCausalLM.from_config(TEXT["llama"]())
        settings = peft.LoraConfig(
            task_type="CAUSAL_LM", r=2, target_modules=["q_proj"], trainable_token_indices=[token]
        )
        return peft.get_peft_model(base, settings)

    given = {"label": "input_ids", "task": "next_token", "records": {"vocabulary": 50}}
    trained(make, {"input_ids": TABLE["input_ids"]}, **given)


LONG = {"input_ids": [[5 + j % 40] * 24 for j in range(48)], "label": LABELS}


@pytest.mark.parametrize(
    ("kind", "most"), [("bert", 20), ("roberta", 18), ("gpt2", 20), ("bart", 20)]
)
def test_a_text_that_is_too_long_is_told_by_its_length(trained, kind, most):
    """RoBERTa's positions begin behind its padding token's number."""
    make = hf.AutoModelForSequenceClassification.from_config
    with pytest.raises(fedpact.FedpactError, match=f"set records.length = {most} "):
        trained(lambda: make(TEXT[kind]()), LONG, label="label")


def test_constants_of_the_library_need_no_statement():
    """Rotary tables, slowed ones, sines, states of Mamba, places in squares and distances."""
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    audio = hf.WhisperConfig(
        vocab_size=64, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, num_mel_bins=16, max_source_positions=64, pad_token_id=0,
    )  # fmt: skip
    for make in (
        lambda: hf.LlamaModel(hf.LlamaConfig(**BERT, rope_parameters=rope)),
        lambda: hf.WhisperModel(audio),
        lambda: hf.MambaModel(hf.MambaConfig(vocab_size=50, hidden_size=32, num_hidden_layers=1)),
        lambda: hf.ViTMAEModel(hf.ViTMAEConfig(**{**IMAGES, "decoder_hidden_size": 32})),
        lambda: hf.PatchTSTModel(hf.PatchTSTConfig(context_length=32, patch_length=8, d_model=16)),
        lambda: hf.LevitModel(hf.LevitConfig(image_size=64, depths=[1, 1, 1])),
    ):
        InitialSettings().check_drawn("model", make(), make())
        made = make()
        with pytest.raises(fedpact.FedpactError, match="whatever the seed"):
            InitialSettings().check_drawn("model", made, copy.deepcopy(made))


def test_a_series_runs_and_a_recording_says_what_to_set(trained):
    """What PatchTSMixer calls its logits is known; wav2vec's masks and skipped layers are told."""
    config = hf.PatchTSMixerConfig(
        context_length=32, patch_length=8, patch_stride=8, num_input_channels=2, d_model=8,
        num_layers=1, num_targets=2,
    )  # fmt: skip
    series = torch.randn(48, 32, 2), torch.tensor(LABELS)
    trained(lambda: hf.PatchTSMixerForTimeSeriesClassification(config), series)
    left = fedpact.prepare(hf.Wav2Vec2Model(hf.Wav2Vec2Config(num_hidden_layers=1))).left
    assert ["layerdrop = 0.0" in left[0], "apply_spec_augment = False" in left[1]] == [True, True]


def test_a_module_with_weights_has_to_say_where_they_are_from(trained):
    model = hf.AutoModelForSequenceClassification.from_config(TEXT["bert"]())
    with pytest.raises(fedpact.FedpactError, match="trained_on"):
        trained(model, TABLE, label="label")
    trained(model, TABLE, label="label", initial={"trained_on": "nothing: drawn"})


def lora(kind):
    """A family's classifier with adapters, and a head, that are trained alone."""
    peft = pytest.importorskip("peft")
    base = hf.AutoModelForSequenceClassification.from_config(TEXT[kind]())
    settings = peft.LoraConfig(r=2, target_modules=ADAPTED[kind], task_type="SEQ_CLS")
    return peft.get_peft_model(base, settings)


ADAPTED = {
    "bert": ["query", "value"], "gpt2": ["c_attn"], "llama": ["q_proj", "v_proj"],
    "t5": ["q", "v"],
}  # fmt: skip


@pytest.mark.parametrize("kind", ADAPTED)
def test_lora_trains_and_sends_adapters_alone(trained, kind):
    made, start = [], {}

    def make():
        model = lora(kind)
        made.append(sum(p.numel() for p in model.parameters() if p.requires_grad))
        start.update({n: v.clone() for n, v in model.state_dict().items()} if not start else {})
        return model

    result = trained(make, TABLE, label="label", rounds=2)
    # Of 4 bytes a weight, each of two sites is sent no more than those that are trained.
    record = result.records[-1]
    assert record.bytes_down < 8 * made[0] + 1000
    model = result.model.model
    after = model.state_dict()
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert all("lora" in n or "modules_to_save" in n for n in trained)
    assert {n for n in after if not torch.equal(after[n], start[n])} == trained

    # What the run stored, and what is merged, answer as the model does.
    ids = torch.randint(3, 50, (4, 7))
    ids[:, -1] = 1  # T5 reads where its text ends
    answer = model.eval()(input_ids=ids).logits
    again = bare(kind, start)
    again.config.pad_token_id = model.config.pad_token_id
    again.config.decoder_start_token_id = again.config.pad_token_id
    peft = pytest.importorskip("peft")
    again = peft.PeftModel.from_pretrained(again, result.folder / "adapters").eval()
    assert torch.allclose(again(input_ids=ids).logits, answer, atol=1e-5)
    assert torch.allclose(model.merge_and_unload()(input_ids=ids).logits, answer, atol=1e-5)


def bare(kind, start):
    """The model that adapters were added to, of the state that it began with."""
    found = hf.AutoModelForSequenceClassification.from_config(TEXT[kind]())
    found.load_state_dict(
        {
            n.replace("base_model.model.", "").replace("base_layer.", ""): v
            for n, v in start.items()
            if "lora" not in n and "modules_to_save" not in n
        },
        strict=False,
    )
    return found


def test_features_missing_from_adapters_are_reported(trained, tmp_path):
    def make():
        model = lora("bert")
        model.get_base_model().bert.embeddings.requires_grad_(True)
        return model

    with pytest.raises(fedpact.FedpactError, match="loaded again, answer otherwise"):
        trained(make, TABLE, label="label")
    assert (tmp_path / "run" / "model.safetensors").exists()
