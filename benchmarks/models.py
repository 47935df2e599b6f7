"""Networks of the kinds that people bring, built of torch's own layers and bare parameters.

Each is called with the shape of a record and the number of classes, and with sizes by name that the
tests make smaller.

Opacus wants every trainable parameter in a layer that it has a rule for, or in one small enough for
functorch. The classes called ...OfModules compute the same from the same weights, with each bare
parameter in a module of its own; only Opacus is given those.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 90  # about as many as a text has different characters
_LAYERS = 2


class Residual(nn.Module):
    """A basic block: relu(shortcut(x) + two convolutions of x), x [B, before, H, W].

    The shortcut is x itself, or a 1x1 convolution of it where channels or stride change its shape.
    """

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.first_norm = nn.GroupNorm(8, after)
        self.second = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.second_norm = nn.GroupNorm(8, after)
        kept = stride == 1 and before == after
        self.shortcut = nn.Identity() if kept else nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, after, H / stride, W / stride]."""
        inner = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(inner)) + self.shortcut(x))


def resnet(shape: tuple[int, ...], classes: int) -> nn.Module:
    """ResNet-8 with GroupNorm, for images [channels, H, W]."""
    return nn.Sequential(
        nn.Conv2d(shape[0], 16, 3, padding=1, bias=False),
        nn.GroupNorm(8, 16),
        nn.ReLU(),
        Residual(16, 16, 1),
        Residual(16, 32, 2),
        Residual(32, 64, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, classes),
    )


def resnet18(shape: tuple[int, ...], classes: int, *, width: int = 64) -> nn.Module:
    """ResNet-18 with GroupNorm, for small images [channels, H, W]: no stride before its blocks."""
    before, blocks = width, list[nn.Module]()
    for k in range(4):
        after, stride = width * 2**k, 1 if k == 0 else 2
        blocks += [Residual(before, after, stride), Residual(after, after, 1)]
        before = after
    return nn.Sequential(
        nn.Conv2d(shape[0], width, 3, padding=1, bias=False),
        nn.GroupNorm(8, width),
        nn.ReLU(),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(before, classes),
    )


def _twice(before: int, after: int) -> nn.Module:
    """Two convolutions of 3x3, each with GroupNorm and ReLU."""
    pairs = ((before, after), (after, after))
    layers = [(nn.Conv2d(*p, 3, padding=1), nn.GroupNorm(8, after), nn.ReLU()) for p in pairs]
    return nn.Sequential(*(layer for three in layers for layer in three))


class UNet(nn.Module):
    """Classifies the pixels of images [B, channels, H, W] by three levels, H and W in fours.

    Ronneberger, Fischer, Brox, arXiv 1505.04597, with GroupNorm and padding: up again by transposed
    convolutions, beside what was there on the way down.
    """

    def __init__(self, shape: tuple[int, ...], classes: int, *, width: int = 16) -> None:
        super().__init__()
        self.top, self.middle = _twice(shape[0], width), _twice(width, 2 * width)
        self.bottom = _twice(2 * width, 4 * width)
        self.up_middle = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2)
        self.again_middle = _twice(4 * width, 2 * width)
        self.up_top = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.again_top = _twice(2 * width, width)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, classes, H, W]."""
        top = self.top(x)
        middle = self.middle(F.max_pool2d(top, 2))
        bottom = self.bottom(F.max_pool2d(middle, 2))
        middle = self.again_middle(torch.cat([middle, self.up_middle(bottom)], 1))
        return self.head(self.again_top(torch.cat([top, self.up_top(middle)], 1)))


def _small(*shape: int, trainable: bool = True) -> nn.Parameter:
    """Return a parameter of small normal numbers."""
    return nn.Parameter(0.02 * torch.randn(*shape), requires_grad=trainable)


def _encoder(width: int, heads: int) -> nn.Module:
    """Two layers of torch's own encoder: [B, T, width] to the same shape."""
    layer = nn.TransformerEncoderLayer(
        width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True
    )
    return nn.TransformerEncoder(layer, _LAYERS, enable_nested_tensor=False)


class Transformer(nn.Module):
    """A classifier of token ids [B, T]: its position embedding [T, width] is a bare parameter."""

    def __init__(
        self, shape: tuple[int, ...], classes: int, *, width: int = 128, heads: int = 4
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = _small(shape[0], width)
        self.encoder = _encoder(width, heads)
        self.head = nn.Linear(width, classes)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits [B, classes]."""
        return self.head(self.encoder(self.located(self.embedding(ids))).mean(1))

    def located(self, x: Tensor) -> Tensor:
        """Add its place's vector to each token's, x [B, T, width]."""
        return x + self.position


class ViT(nn.Module):
    """A classifier of images [B, channels, H, W], by patches of 4x4.

    The class token [1, width] and the position embedding [1 + patches, width] are bare parameters.
    """

    def __init__(
        self, shape: tuple[int, ...], classes: int, *, width: int = 128, heads: int = 4
    ) -> None:
        super().__init__()
        channels, height, broad = shape
        self.patches = nn.Conv2d(channels, width, 4, 4)
        self.token = _small(1, width)
        self.position = _small(1 + (height // 4) * (broad // 4), width)
        self.encoder = _encoder(width, heads)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, classes]."""
        return self.head(self.encoder(self.located(self.patches(x).flatten(2).mT))[:, 0])

    def located(self, x: Tensor) -> Tensor:
        """Put the class token before the patches x [B, patches, width], and add the positions."""
        return torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.position


class Recurrent(nn.Module):
    """Predicts what follows token ids [B, T], from the last output of two layers of nn.LSTM."""

    def __init__(self, shape: tuple[int, ...], classes: int, *, hidden: int) -> None:
        super().__init__()
        del shape  # any T will do
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.lstm = nn.LSTM(8, hidden, _LAYERS, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits [B, classes]."""
        return self.head(self.lstm(self.embedding(ids))[0][:, -1])


def _frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


class LowRank(nn.Module):
    """LoRA: x Wᵀ + b + x Aᵀ Bᵀ, x [..., before], W and b frozen, A [rank, before], B [after, rank].

    B begins at small noise: at zero, as it usually does, A's first gradient would be zero.
    """

    def __init__(self, before: int, after: int, rank: int = 8) -> None:
        super().__init__()
        self.base = _frozen(nn.Linear(before, after))
        self.down = _small(rank, before)
        self.up = _small(after, rank)

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., after]."""
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)


class LowRankBlock(nn.Module):
    """A layer as nn.TransformerEncoderLayer's with norm_first, x [B, T, width].

    The four products of the attention are LowRank; all else is frozen.
    """

    def __init__(self, width: int, heads: int, linear: type[LowRank]) -> None:
        super().__init__()
        self.heads = heads
        self.before = _frozen(nn.LayerNorm(width))
        self.query, self.key, self.value, self.out = (linear(width, width) for _ in range(4))
        self.between = _frozen(nn.LayerNorm(width))
        self.wide = _frozen(nn.Linear(width, 4 * width))
        self.narrow = _frozen(nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, T, width]."""
        x = x + self._attention(self.before(x))
        return x + self.narrow(F.relu(self.wide(self.between(x))))

    def _attention(self, x: Tensor) -> Tensor:
        by_head = [
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        ]
        return self.out(F.scaled_dot_product_attention(*by_head).transpose(1, 2).flatten(2))


class LowRankTransformer(nn.Module):
    """The transformer above, frozen, fine-tuned by low-rank factors and a new head."""

    def __init__(
        self,
        shape: tuple[int, ...],
        classes: int,
        *,
        width: int = 128,
        heads: int = 4,
        linear: type[LowRank] = LowRank,
    ) -> None:
        super().__init__()
        self.embedding = _frozen(nn.Embedding(VOCABULARY, width))
        self.position = _small(shape[0], width, trainable=False)
        self.blocks = nn.Sequential(*[LowRankBlock(width, heads, linear) for _ in range(_LAYERS)])
        self.norm = _frozen(nn.LayerNorm(width))
        self.head = nn.Linear(width, classes)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits [B, classes]."""
        return self.head(self.norm(self.blocks(self.embedding(ids) + self.position)).mean(1))


class _Plus(nn.Module):
    """x + p for x [B, T, width]."""

    def __init__(self, p: nn.Parameter) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return x + self.p


class _Behind(nn.Module):
    """x [B, T, width] behind p [1, width]."""

    def __init__(self, p: nn.Parameter) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.p.expand(len(x), -1, -1), x], 1)


def _move(owner: nn.Module, name: str, into: Callable[[nn.Parameter], nn.Module]) -> None:
    """Put a bare parameter into a module of its own, which takes its name."""
    parameter = owner.get_parameter(name)
    delattr(owner, name)
    setattr(owner, name, into(parameter))


class TransformerOfModules(Transformer):
    """See the file's head."""

    def __init__(self, shape: tuple[int, ...], classes: int, **sizes: int) -> None:
        super().__init__(shape, classes, **sizes)
        _move(self, "position", _Plus)

    def located(self, x: Tensor) -> Tensor:
        """See Transformer."""
        return self.position(x)


class ViTOfModules(ViT):
    """See the file's head."""

    def __init__(self, shape: tuple[int, ...], classes: int, **sizes: int) -> None:
        super().__init__(shape, classes, **sizes)
        _move(self, "token", _Behind)
        _move(self, "position", _Plus)

    def located(self, x: Tensor) -> Tensor:
        """See ViT."""
        return self.position(self.token(x))


class LowRankOfModules(LowRank):
    """See the file's head; factors that are linear layers are what the peft library has, too."""

    def __init__(self, before: int, after: int, rank: int = 8) -> None:
        super().__init__(before, after, rank)
        _move(self, "down", _linear)
        _move(self, "up", _linear)

    def forward(self, x: Tensor) -> Tensor:
        """See LowRank."""
        return self.base(x) + self.up(self.down(x))


def _linear(weight: nn.Parameter) -> nn.Linear:
    """Return x Wᵀ as a layer, without a draw that would change the weights of those after it."""
    after, before = weight.shape
    layer = nn.utils.skip_init(nn.Linear, before, after, bias=False)
    layer.weight = weight
    return layer
