"""Public models as people bring them: small random configurations, by name.

Needs transformers, timm, torchvision and MONAI. Each entry makes a model of three classes.
"""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

CLASSES, TOKENS, LENGTH = 3, 64, 32
_SIDE = 32


@dataclass(frozen=True)
class Brought:
    """A model and the records that it takes.

    form: "tokens" [2, length] with their mask, "image" [channels, side, side], or "volume"
    [channels, side, side, side]. pixels: it classifies every pixel, or names the next token of
    each. batch: the number of records of a step. tokens: the size of the vocabulary.
    """

    library: str
    name: str
    make: Callable[[], nn.Module]
    form: str = "image"
    channels: int = 3
    side: int = _SIDE
    pixels: bool = False
    batch: int = 16
    classes: int = CLASSES
    tokens: int = TOKENS
    length: int = LENGTH

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a record."""
        if self.form == "tokens":
            return (2, self.length)
        return (self.channels, *[self.side] * (3 if self.form == "volume" else 2))


def catalogue() -> dict[str, Brought]:
    """Return every model by "library/name"."""
    found = [*_text(), *_images(), *_torchvision(), *_timm(), *_monai(), *_sized()]
    return {f"{one.library}/{one.name}": one for one in found}


_BERT = {
    "vocab_size": TOKENS,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 2 * LENGTH,
    "num_labels": CLASSES,
}
_DECODER = {**_BERT, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_T5 = {
    "vocab_size": TOKENS,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_layers": 2,
    "num_heads": 4,
    "num_labels": CLASSES,
}
_BART = {
    "vocab_size": TOKENS,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "max_position_embeddings": 2 * LENGTH,
    "num_labels": CLASSES,
}

_OF_TEXT: dict[str, tuple[str, dict[str, Any]]] = {
    "BERT": ("Bert", _BERT),
    "DistilBERT": (
        "DistilBert",
        {
            "vocab_size": TOKENS,
            "dim": 64,
            "n_layers": 2,
            "n_heads": 4,
            "hidden_dim": 128,
            "max_position_embeddings": LENGTH,
            "num_labels": CLASSES,
        },
    ),
    "RoBERTa": ("Roberta", _BERT),
    "ALBERT": ("Albert", {**_BERT, "embedding_size": 32}),
    "DeBERTa-v2": ("DebertaV2", _BERT),
    "DeBERTa": ("Deberta", _BERT),
    "ELECTRA": ("Electra", {**_BERT, "embedding_size": 32}),
    "MPNet": ("MPNet", _BERT),
    "ModernBERT": ("ModernBert", _DECODER | {"cls_token_id": 1, "sep_token_id": 2}),
    "GPT-2": (
        "GPT2",
        {
            "vocab_size": TOKENS,
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": LENGTH,
            "num_labels": CLASSES,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "GPT-Neo": (
        "GPTNeo",
        {
            "vocab_size": TOKENS,
            "hidden_size": 64,
            "num_layers": 2,
            "attention_types": [[["global", "local"], 1]],
            "num_heads": 4,
            "max_position_embeddings": LENGTH,
            "num_labels": CLASSES,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "GPT-NeoX": ("GPTNeoX", _DECODER),
    "OPT": ("OPT", {**_DECODER, "ffn_dim": 128, "word_embed_proj_dim": 64}),
    "BLOOM": (
        "Bloom",
        {
            "vocab_size": TOKENS,
            "hidden_size": 64,
            "n_layer": 2,
            "n_head": 4,
            "num_labels": CLASSES,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "Llama": ("Llama", {**_DECODER, "num_key_value_heads": 2}),
    "Mistral": ("Mistral", {**_DECODER, "num_key_value_heads": 2, "sliding_window": 16}),
    "Qwen2": ("Qwen2", {**_DECODER, "num_key_value_heads": 2}),
    "Qwen3": ("Qwen3", {**_DECODER, "num_key_value_heads": 2, "head_dim": 16}),
    "Gemma": ("Gemma", {**_DECODER, "num_key_value_heads": 2, "head_dim": 16}),
    "Gemma 2": ("Gemma2", {**_DECODER, "num_key_value_heads": 2, "head_dim": 16}),
    "Phi": ("Phi", _DECODER),
    "Phi-3": ("Phi3", _DECODER),
    "Falcon": ("Falcon", _DECODER),
    "Mixtral": ("Mixtral", {**_DECODER, "num_key_value_heads": 2, "num_local_experts": 2}),
    "T5": ("T5", _T5),
    "mT5": ("MT5", _T5),
    "BART": ("Bart", _BART),
    "MBart": ("MBart", _BART),
}


def _text() -> Iterator[Brought]:
    for name, (kind, settings) in _OF_TEXT.items():
        yield Brought(
            "transformers", name, _hugging(kind, "SequenceClassification", settings), "tokens"
        )


def _hugging(kind: str, task: str, settings: dict[str, Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        hf: Any = importlib.import_module("transformers")
        config = getattr(hf, f"{kind}Config")(**settings)
        return getattr(hf, f"AutoModelFor{task}").from_config(config)

    return make


_SWIN = {
    "image_size": _SIDE,
    "patch_size": 2,
    "embed_dim": 16,
    "depths": [1, 1],
    "num_heads": [2, 2],
    "window_size": 4,
    "num_labels": CLASSES,
}
_VIT = {
    "image_size": _SIDE,
    "patch_size": 8,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "num_labels": CLASSES,
}
_VISION = {"vision_config": _VIT, "num_labels": CLASSES}
_OF_IMAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "ViT": ("ViT", _VIT),
    "CLIP": ("CLIP", _VISION),
    "SigLIP": ("Siglip", _VISION),
    "DeiT": ("DeiT", _VIT | {"architectures": ["DeiTForImageClassification"]}),
    "BEiT": ("Beit", _VIT),
    "DINOv2": ("Dinov2", _VIT),
    "Swin": ("Swin", _SWIN),
    "Swin v2": ("Swinv2", _SWIN),
    "ConvNeXt v2": (
        "ConvNextV2",
        {"hidden_sizes": [16, 16, 32, 32], "depths": [1] * 4, "num_labels": CLASSES},
    ),
    "ConvNeXt": (
        "ConvNext",
        {"hidden_sizes": [16, 16, 32, 32], "depths": [1] * 4, "num_labels": CLASSES},
    ),
    "SegFormer": (
        "Segformer",
        {
            "hidden_sizes": [16, 16, 32, 32],
            "depths": [1] * 4,
            "num_attention_heads": [1, 1, 2, 2],
            "decoder_hidden_size": 32,
            "num_labels": CLASSES,
        },
    ),
    "ResNet": (
        "ResNet",
        {
            "embedding_size": 16,
            "hidden_sizes": [16, 16, 32, 32],
            "depths": [1] * 4,
            "layer_type": "basic",
            "num_labels": CLASSES,
        },
    ),
    "MobileViT": (
        "MobileViT",
        {
            "image_size": _SIDE,
            "hidden_sizes": [16, 16, 32],
            "neck_hidden_sizes": [8, 8, 8, 16, 16, 16, 32],
            "num_labels": CLASSES,
        },
    ),
    "PoolFormer": (
        "PoolFormer",
        {"hidden_sizes": [16, 16, 32, 32], "depths": [1] * 4, "num_labels": CLASSES},
    ),
}


def _images() -> Iterator[Brought]:
    for name, (kind, settings) in _OF_IMAGES.items():
        make = _hugging(kind, "ImageClassification", settings)
        yield Brought("transformers", name, make, side=64 if name == "MobileViT" else _SIDE)
    segment = _hugging("Segformer", "SemanticSegmentation", _OF_IMAGES["SegFormer"][1])
    yield Brought("transformers", "SegFormer, pixels", segment, pixels=True)


def _of(module: str, function: str, *given: Any, **settings: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(importlib.import_module(module), function)(*given, **settings)


def _torchvision() -> Iterator[Brought]:
    for name in (
        "resnet18", "regnet_y_400mf", "efficientnet_b0",
        "mobilenet_v2", "mobilenet_v3_small", "densenet121", "squeezenet1_1",
        "shufflenet_v2_x0_5", "mnasnet0_5",
    ):  # fmt: skip
        make = _of("torchvision.models", name, num_classes=CLASSES)
        yield Brought("torchvision", name, make)
    transformer = _of(
        "torchvision.models", "VisionTransformer", _SIDE, 8, 2, 4, 64, 128, num_classes=CLASSES
    )
    yield Brought("torchvision", "VisionTransformer", transformer)
    yield Brought("torchvision", "googlenet", _of(
        "torchvision.models", "googlenet", num_classes=CLASSES, aux_logits=False, init_weights=False
    ), side=64)  # fmt: skip
    for name in ("deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large"):
        settings = {"weights_backbone": None, "num_classes": CLASSES}
        make = _of("torchvision.models.segmentation", name, **settings)
        yield Brought("torchvision", name, make, pixels=True)


_SMALL = {"embed_dim": 64, "depth": 2, "num_heads": 4, "img_size": _SIDE, "patch_size": 8}
_OF_TIMM: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": _SMALL,
    "deit_tiny_patch16_224": _SMALL,
    "convnext_atto": {},
    "resnet18": {},
    "efficientnet_b0": {},
    "mobilenetv3_small_050": {},
    "regnety_002": {},
    "swin_tiny_patch4_window7_224": {
        "img_size": _SIDE, "patch_size": 2, "window_size": 4, "embed_dim": 16,
        "depths": (1, 1), "num_heads": (2, 2),
    },
    "cait_xxs24_224": {**_SMALL},
    "repvgg_a0": {},
    "edgenext_xx_small": {},
    "beit_base_patch16_224": _SMALL,
}  # fmt: skip


def _timm() -> Iterator[Brought]:
    for name, settings in _OF_TIMM.items():
        yield Brought(
            "timm", name, _of("timm", "create_model", name, num_classes=CLASSES, **settings)
        )

    mixer = {"img_size": _SIDE, "patch_size": 8, "num_blocks": 2, "embed_dim": 64}
    for name, blocks, ratio in (
        ("MLP-Mixer", "MixerBlock", (0.5, 4.0)), ("ResMLP", "ResBlock", 4),
    ):  # fmt: skip

        def make(blocks: str = blocks, ratio: Any = ratio) -> nn.Module:
            of: Any = importlib.import_module("timm.models.mlp_mixer")
            block = getattr(of, blocks)
            return of.MlpMixer(num_classes=CLASSES, block_layer=block, mlp_ratio=ratio, **mixer)

        yield Brought("timm", name, make)
    vgg = _of("timm", "create_model", "vgg11_bn", num_classes=CLASSES, mlp_ratio=1 / 16)
    yield Brought("timm", "vgg11_bn", vgg)


def _monai() -> Iterator[Brought]:
    flat: dict[str, Any] = {"spatial_dims": 2, "in_channels": 1}
    of = "monai.networks.nets"
    yield Brought("MONAI", "UNet", _of(
        of, "UNet", **flat, out_channels=CLASSES, channels=(8, 16, 32), strides=(2, 2),
        num_res_units=1,
    ), channels=1, pixels=True)  # fmt: skip
    segment = {**flat, "out_channels": CLASSES, "init_filters": 8}
    yield Brought("MONAI", "SegResNet", _of(of, "SegResNet", **segment), channels=1, pixels=True)
    dense = _of(of, "DenseNet121", **flat, out_channels=CLASSES)
    yield Brought("MONAI", "DenseNet121", dense, channels=1)
    vit = _of(
        of, "ViT", 1, (_SIDE, _SIDE), (8, 8), hidden_size=64, mlp_dim=128, num_layers=2,
        num_heads=4, classification=True, num_classes=CLASSES, spatial_dims=2,
    )  # fmt: skip
    yield Brought("MONAI", "ViT", vit, channels=1)
    yield Brought("MONAI", "AttentionUnet", _of(
        of, "AttentionUnet", **flat, out_channels=CLASSES, channels=(8, 16, 32), strides=(2, 2)
    ), channels=1, pixels=True)  # fmt: skip
    basic = _of(of, "BasicUNet", **flat, out_channels=CLASSES, features=(8, 8, 16, 32, 32, 8))
    yield Brought("MONAI", "BasicUNet", basic, channels=1, pixels=True)
    dynamic = _of(
        of, "DynUNet", **flat, out_channels=CLASSES, kernel_size=[3] * 3, strides=[1, 2, 2],
        upsample_kernel_size=[2, 2], filters=[8, 16, 32],
    )  # fmt: skip
    yield Brought("MONAI", "DynUNet", dynamic, channels=1, pixels=True)
    unetr = _of(
        of, "UNETR", 1, CLASSES, (_SIDE, _SIDE), feature_size=8, hidden_size=48, mlp_dim=96,
        num_heads=4, spatial_dims=2,
    )  # fmt: skip
    yield Brought("MONAI", "UNETR", unetr, channels=1, pixels=True)
    solid: dict[str, Any] = {"spatial_dims": 3, "in_channels": 1, "out_channels": CLASSES}
    yield Brought("MONAI", "UNet, 3D", _of(
        of, "UNet", **solid, channels=(4, 8, 16), strides=(2, 2), num_res_units=1
    ), "volume", 1, 16, pixels=True)  # fmt: skip


def _sized() -> Iterator[Brought]:
    """Larger models in full and with LoRA, and a ResNet at several batches and sizes of images."""
    bert = {
        "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
        "intermediate_size": 1024, "num_labels": CLASSES,
    }  # fmt: skip
    full = _hugging("Bert", "SequenceClassification", bert)
    text: dict[str, Any] = {"form": "tokens", "length": 64}
    for name, make in (("", full), (", LoRA", _lora(full, "SEQ_CLS", ["query", "value"]))):
        yield Brought("sizes", f"BERT, 4 layers, 16 x 64{name}", make, tokens=30522, **text)
    full = _hugging("GPT2", "CausalLM", {})
    words = {"tokens": 50257, "classes": 50257, "pixels": True, "batch": 4}
    for name, make in (("", full), (", LoRA", _lora(full, "CAUSAL_LM", ["c_attn"]))):
        yield Brought("sizes", f"GPT-2 small, tied head, 4 x 64{name}", make, **text, **words)
    for batch, side in ((8, 32), (32, 32), (16, 64)):
        make = _of("torchvision.models", "resnet18", num_classes=CLASSES)
        yield Brought("sizes", f"ResNet-18, {batch} x {side} px", make, side=side, batch=batch)


def _lora(base: Callable[[], nn.Module], task: str, layers: list[str]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        peft: Any = importlib.import_module("peft")
        return peft.get_peft_model(
            base(), peft.LoraConfig(r=8, task_type=task, target_modules=layers)
        )

    return make
