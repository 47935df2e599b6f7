"""The papers' models for images, tables and text, scaling in front of them, and views of images.

A record of text is [length] places in a vocabulary, and its label the next one's, so there are as
many classes as words. No operation mixes records.

Over views of an image a record's gradient is a mean before it is clipped: De, Berrada, Hayes,
Smith, Balle. Unlocking high-accuracy differentially private image classification through scale.
arXiv 2204.13650 ("augmentation multiplicity"). With views a_1, ..., a_K of a record, the image
itself among them,

    ℓ_j(w) = (1/K) Σ_k ℓ(w; a_k(x_j), y_j),    g_j = (1/K) Σ_k ∇ℓ(w; a_k(x_j), y_j)

is one record's loss and gradient, which is clipped and counted as any other: a record moves a sum
by at most C, as without views. To the kernel they are a part of the model. Views are the same for
every record and step. A model is evaluated on the images themselves.
"""

import copy
import math
from typing import Annotated, Final, Literal, cast

import torch
import torch.nn.functional as F
from pydantic import BaseModel, Field
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from fedpact.common.configuration import FROZEN
from fedpact.common.errors import ModelError
from fedpact.common.params import model_name
from fedpact.per_sample.layers import ScaledBias


def replace_batchnorm(module: nn.Module) -> nn.Module:
    """Return a copy with GroupNorm for every BatchNorm (1d, 2d, 3d, SyncBatchNorm).

    Weight, bias and eps are taken over, running statistics are dropped. The number of groups is
    the largest divisor of the channels that is at most 32 and leaves 4 channels a group, else 1.
    An InstanceNorm that tracks statistics stays one that does not.

    >>> replace_batchnorm(nn.Sequential(nn.Conv2d(1, 48, 3), nn.BatchNorm2d(48)))[1]
    GroupNorm(12, 48, ...)
    """
    module = copy.deepcopy(module)
    replaced = {layer: new for layer in module.modules() if (new := _replacement(layer))}
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if child in replaced:
                setattr(parent, name, replaced[child])
    return replaced.get(module, module)


def _replacement(old: nn.Module) -> nn.Module | None:
    if isinstance(old, _BatchNorm):
        channels = old.num_features
        fitting = [g for g in range(1, 33) if channels % g == 0 and channels // g >= 4]
        new = nn.GroupNorm(max(fitting, default=1), channels, eps=old.eps, affine=old.affine)
    elif isinstance(old, _InstanceNorm) and old.track_running_stats:
        new = type(old)(old.num_features, eps=old.eps, affine=old.affine)
    else:
        return None
    # The very parameters: their type, device and requires_grad come along.
    for name, parameter in old.named_parameters(recurse=False):
        setattr(new, name, parameter)
    return new.train(old.training)


class LogisticSettings(BaseModel):
    """How model = "logistic" begins."""

    model_config = FROZEN
    start: Literal["random", "zero"] = "random"
    """"random" draws the first weights from the seed, as torch does; "zero" starts where all
    classes are alike, which on unit rows is nearer to where it ends than any draw."""
    bias: bool | Annotated[float, Field(gt=0, le=1000)] = True
    """The input, in (0, 1000], for which a class has a weight; true is 1, false leaves it out.
    On unit rows an input of 1 is half of a gradient's squared length, so it takes 1 - 1/sqrt(2)
    of what a clip leaves of the rest; one of 0.3 takes 4 %."""

    def check_model(self, model: str) -> None:
        """Raise ValueError: another model, which has no use for it."""
        if self != LogisticSettings() and model != "logistic":
            raise ValueError(f"model is {model!r} with a table [logistic]: leave that out")


def logistic(
    shape: tuple[int, ...], classes: int, settings: LogisticSettings | None = None
) -> nn.Module:
    """Multinomial logistic regression (the convex task of FedProxVR)."""
    chosen = settings or LogisticSettings()
    if isinstance(chosen.bias, bool):
        linear = nn.Linear(math.prod(shape), classes, bias=chosen.bias)
    else:
        linear = ScaledBias.of(math.prod(shape), classes, chosen.bias)
    if chosen.start == "zero":
        for parameter in linear.parameters():
            nn.init.zeros_(parameter)
    return nn.Sequential(nn.Flatten(), linear)


def mlp(shape: tuple[int, ...], classes: int) -> nn.Module:
    """One hidden layer of 128 units with ReLU."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(math.prod(shape), 128), nn.ReLU(), nn.Linear(128, classes)
    )


def cnn_padded(shape: tuple[int, ...], classes: int) -> nn.Module:
    """The papers' 4-layer CNN with padding 2: d = 1,663,370 on 1x28x28."""
    return cnn(shape, classes, padding=2)


def cnn(shape: tuple[int, ...], classes: int, padding: int = 0) -> nn.Module:
    """The papers' 4-layer CNN without padding: d = 582,026 on 1x28x28, 878,538 on 3x32x32."""
    name = "cnn_padded" if padding else "cnn"
    channels, *sides = _image(name, shape)
    for _ in range(2):
        sides = [(side + 2 * padding - 4) // 2 for side in sides]
    if min(sides) < 1:
        # With padding 2 an image is halved twice.
        smaller = "cnn_padded" if not padding and min(shape[1:]) >= 4 else "cnn_group_norm"
        raise ModelError(
            f"model {name!r} got images of {shape[1]}x{shape[2]}: too small for two 5x5 "
            f"convolutions with padding {padding}, each followed by pooling; use {smaller!r} or "
            "'mlp'"
        )
    return nn.Sequential(
        nn.Conv2d(channels, 32, 5, padding=padding),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=padding),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * math.prod(sides), 512),
        nn.ReLU(),
        nn.Linear(512, classes),
    )


def cnn_group_norm(shape: tuple[int, ...], classes: int) -> nn.Module:
    """A small CNN, as private training likes it: d = 19,338 on 1x28x28, 19,626 on 3x32x32.

    Three 3x3 convolutions of stride 2 (16, 32, 32 maps), each with GroupNorm over groups of 8 and
    Tanh (Papernot, Thakurta, Song, Chien, Erlingsson, arXiv 2007.14191); then one linear layer.
    """
    channels, *sides = _image("cnn_group_norm", shape)
    layers: list[nn.Module] = []
    for maps in (16, 32, 32):
        layers += [nn.Conv2d(channels, maps, 3, stride=2, padding=1)]
        layers += [nn.GroupNorm(maps // 8, maps), nn.Tanh()]
        channels, sides = maps, [(side + 1) // 2 for side in sides]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * math.prod(sides), classes))


def _image(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    if len(shape) != 3:
        remedy = "use 'logistic' or 'mlp' for other records"
        if len(shape) == 2:
            remedy = f"give images without channels as {(1, *shape)}, or {remedy}"
        raise ModelError(
            f"model {name!r} got records of shape {shape}: expected images (channels, height, "
            f"width); {remedy}"
        )
    return shape


_PLACES: Final = 3
_FURTHER: Final = 0.7
_BIAS: Final = 0.3


class NextByLSTM(nn.Module):
    """The last state of an LSTM of 64 units over embeddings of 16."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(classes, 16)
        self.lstm = nn.LSTM(16, 64, batch_first=True)
        self.last = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, classes] of records x [B, length]."""
        states, _ = self.lstm(self.embedding(x))
        return self.last(states[:, -1])


class NextByAttention(nn.Module):
    """One block of attention, four heads over embeddings of 32, and what its last position says."""

    def __init__(self, length: int, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(classes, 32)
        self.position = nn.Parameter(0.02 * torch.randn(length, 32))
        self.before, self.between = nn.LayerNorm(32), nn.LayerNorm(32)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.wide, self.narrow = nn.Linear(32, 64), nn.Linear(64, 32)
        self.last = nn.Linear(32, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, classes] of records x [B, length]."""
        h = self.embedding(x) + self.position
        n = self.before(h)
        h = h + cast(Tensor, self.attention(n, n, n, need_weights=False)[0])
        h = h + self.narrow(torch.relu(self.wide(self.between(h))))
        return self.last(h[:, -1])


class LastOneHot(nn.Module):
    """The last places of a record, each one-hot, as one row of unit length.

    Each place counts 0.7 of the one behind it: what stands nearest says most.
    """

    weights: Tensor  # [places, 1]

    def __init__(self, places: int, vocabulary: int) -> None:
        super().__init__()
        self._places, self._vocabulary = places, vocabulary
        weights = torch.tensor([[_FURTHER**k] for k in reversed(range(places))])
        self.register_buffer("weights", F.normalize(weights, dim=0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return rows [B, places · vocabulary] of records x [B, length]."""
        last = F.one_hot(x[:, -self._places :].long(), self._vocabulary)
        return (last * self.weights).flatten(1)


def ngram(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Logistic regression on the last three places: 12,740 weights with 65 characters.

    It begins where all characters are alike. A bias of input 0.3 takes little of what a clip leaves
    of rows of unit length.
    """
    places = min(_PLACES, _length("ngram", shape))
    last = ScaledBias.of(places * classes, classes, _BIAS)
    for parameter in last.parameters():
        nn.init.zeros_(parameter)
    return nn.Sequential(LastOneHot(places, classes), last)


def lstm(shape: tuple[int, ...], classes: int) -> nn.Module:
    """An LSTM for the next character: 26,257 weights with 65 of them."""
    _length("lstm", shape)
    return NextByLSTM(classes)


def transformer(shape: tuple[int, ...], classes: int) -> nn.Module:
    """A small transformer for the next character: 14,049 weights with 65 of them and length 40."""
    return NextByAttention(_length("transformer", shape), classes)


def _length(name: str, shape: tuple[int, ...]) -> int:
    if len(shape) == 1:
        return shape[0]
    raise ModelError(
        f"model {name!r} got records of shape {shape}: expected words, (length,), whole numbers "
        "that are places in a vocabulary of as many entries as there are classes"
    )


def check_vocabulary(model: str, vocabulary: int | None, classes: int) -> None:
    """Raise ModelError: a model of text with more words than classes, which it predicts."""
    of_text = {f.__name__ for f in (ngram, lstm, transformer)}
    if model in of_text and vocabulary is not None and vocabulary > classes:
        raise ModelError(
            f"model {model!r} with records.vocabulary = {vocabulary} and {classes} classes: it "
            "predicts the next word, so expected a class for each; name all of them in "
            "records.classes, or use a model of your own"
        )


class ViewSettings(BaseModel):
    """Which views of an image are averaged before the clip."""

    model_config = FROZEN
    mirror: bool = False
    """The image's mirror image, left for right, too."""
    shift: int = Field(default=0, ge=0, le=64)
    """So many pixels, >= 0, by which it is moved up, down, left and right, too; what moves in
    at an edge is the image mirrored there."""

    @property
    def count(self) -> int:
        """K: 1, 2, 5 or 10."""
        return (1 + self.mirror) * (5 if self.shift else 1)

    @property
    def used(self) -> bool:
        """Whether there is another view than the image itself."""
        return self.count > 1

    def check_goes(self, plain: bool, features: bool) -> None:
        """Raise ValueError where views would not mean what they say.

        plain: the task is of classes with their cross entropy.
        """
        for beside, found, why in (
            ("a [task]", not plain, "views are averaged for classes and their cross entropy alone"),
            ("[features]", features, "features are no images; features.mirror averages both's"),
        ):
            if self.used and found:
                raise ValueError(f"[views] with {beside}: {why}; leave one out")

    def describe(self) -> str:
        """Return in a sentence what a record's gradient is; "" where it is that of the image."""
        if not self.used:
            return ""
        return (
            f"A record's gradient is the mean over {self.count} views of it (mirror = "
            f"{str(self.mirror).lower()}, shift = {self.shift}), made of that record alone, and "
            "clipped as one: a record moves a sum as far as without views."
        )


class Views(nn.Module):
    """A model of images, asked about K views of each while it trains, and about itself otherwise.

    Maps records [B, (c,) h, w] to logits [B, K, classes], [B, 1, classes] in evaluation. Its
    parameters are the module's, in their order. Raises ModelError: records that are no images.
    """

    def __init__(self, module: nn.Module, settings: ViewSettings, shape: tuple[int, ...]) -> None:
        super().__init__()
        if len(shape) not in (2, 3) or settings.shift >= min(shape[-2:]):
            raise ModelError(
                f"[views] with mirror = {str(settings.mirror).lower()} and shift = "
                f"{settings.shift} of records of shape {shape}: expected images (height, width) or "
                "(channels, height, width), each side longer than the shift; leave [views] out "
                "for other records"
            )
        self.module, self._settings = module, settings
        self.called = f"{model_name(module)} with [views]"

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of every view [B, K, ...]; outside training of the image alone."""
        each = make_views(x, self._settings) if self.training else [x]
        return torch.stack([self.module(view) for view in each], 1)


def make_views(x: Tensor, settings: ViewSettings) -> list[Tensor]:
    """Return K times the images x [B, (c,) h, w], first as they are, each view of that image alone.

    >>> make_views(torch.tensor([[[1.0, 2.0]]]), ViewSettings(mirror=True))[1]
    tensor([[[2., 1.]]])
    """
    found = [x, *_shift(x, settings.shift)]
    return found + [view.flip(-1) for view in found] if settings.mirror else found


def _shift(x: Tensor, by: int) -> list[Tensor]:
    if not by:
        return []
    height, width = x.shape[-2:]
    # torch pads images by reflection only with a dimension of channels.
    wide = F.pad(x.unsqueeze(1) if x.dim() == 3 else x, (by, by, by, by), mode="reflect")
    wide = wide.squeeze(1) if x.dim() == 3 else wide
    places = (0, by), (2 * by, by), (by, 0), (by, 2 * by)
    # Each in one piece, as the images are: a model may ask how its numbers lie (`view`).
    return [wide[..., a : a + height, b : b + width].contiguous() for a, b in places]
