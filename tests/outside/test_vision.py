"""timm's, torchvision's and MONAI's models as they come, or after `prepare`: one of each family."""

import importlib

import pytest
import torch

import fedpact

# Libraries warn in their own ways.
pytestmark = pytest.mark.filterwarnings("ignore")

VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 2}
FLAT = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2}
AS_THEY_COME = {
    "timm/vit": lambda timm: timm.create_model("vit_tiny_patch16_224", num_classes=2, **VIT),
    "torchvision/vit": lambda tv: tv.models.VisionTransformer(32, 8, 1, 2, 32, 64, num_classes=2),
    "torchvision/squeezenet": lambda tv: tv.models.squeezenet1_1(num_classes=2),
    "monai/unet": lambda monai: monai.networks.nets.UNet(
        **FLAT, channels=(4, 8), strides=(2,), num_res_units=1
    ),
}
PREPARED = {
    "timm/resnet": lambda timm: timm.create_model(
        "resnet10t", num_classes=2, channels=(8, 8, 8, 8), stem_width=8
    ),
    "torchvision/resnet": lambda tv: tv.models.ResNet(
        tv.models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=2
    ),
    "monai/densenet": lambda monai: monai.networks.nets.DenseNet(
        **FLAT, init_features=8, growth_rate=4, block_config=(1, 1)
    ),
}


def made(name, make):
    """What makes the model. Skips: its library is not installed."""
    library = name.partition("/")[0]
    found = pytest.importorskip(library, reason="pip install 'fedpact[outside]'")
    if library == "monai":
        importlib.import_module("monai.networks.nets")
    return lambda: make(found)


def images(name, pixels=False):
    x, y = torch.randn(40, 1 if "monai" in name else 3, 32, 32), torch.arange(40) % 2
    return (x, (x[:, 0] > 0).long()) if pixels else (x, y)


@pytest.mark.parametrize("name", AS_THEY_COME)
def test_a_family_of_vision_runs_as_it_comes(name, trained):
    pixels = "unet" in name
    task = {"task": "segmentation"} if pixels else {}
    trained(made(name, AS_THEY_COME[name]), images(name, pixels), **task)


@pytest.mark.parametrize("name", PREPARED)
def test_a_family_with_batchnorm_runs_prepared(name, trained):
    make = made(name, PREPARED[name])
    with pytest.raises(fedpact.FedpactError, match="BatchNorm mixes"):
        trained(make, images(name))
    trained(lambda: fedpact.prepare(make(), batch_norm="group").model, images(name))
