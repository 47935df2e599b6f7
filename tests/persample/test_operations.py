"""Each operation that vmap may be given: a record's bits by place, by number and beside any values.

What `apart.vmapped` takes records together for is a list of names. Here is a use of each of them,
as a model of one's own would have it, and of what torch says is done number by number.
"""

import torch
import torch.nn.functional as F
from tests.persample.test_alike import bits
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedpact.params import FlatModel
from fedpact.persample.alone import Alone
from fedpact.persample.apart.vmapped import _ALIKE
from fedpact.persample.products import ALIKE

MATRIX, IMAGE, VOLUME = (5, 7), (3, 7, 9), (2, 4, 5, 6)


def places(x, count, size):
    """As many places below a size, which follow from the numbers of a record."""
    return (x.detach().flatten()[:count].abs() * 100).long() % size


def everywhere(x, size):
    return (x.detach() * 100).long().abs() % size


# u: a record [5, 7] times the weights; x: the record itself; w: the weights [7].
OF_MATRICES = {
    "made": lambda u, x, w: u + torch.full((7,), 2.0) * torch.arange(7) + torch.full_like(x, 3),
    "made like": lambda u, x, w: u + x.new_zeros(7) + x.new_ones(7) * x.new_full((7,), 2.0),
    "zeros and ones": lambda u, x, w: u + torch.ones(7) * torch.zeros_like(x) + torch.zeros(7),
    "ones like": lambda u, x, w: u * torch.ones_like(x).zero_() + torch.ones_like(u),
    "empty": lambda u, x, w: u + torch.empty_like(x).fill_(2) + x.new_empty(7).fill_(1),
    "constant": lambda u, x, w: u * torch.tensor([1.0, 2, 3, 4, 5, 6, 7]) + torch.scalar_tensor(2),
    "type": lambda u, x, w: (x.double() * w.double()).float(),
    "copied": lambda u, x, w: torch.ones_like(x).unsqueeze_(0).copy_(u[None]),
    "cat": lambda u, x, w: torch.cat([u, x.sin()], 1),
    "stack": lambda u, x, w: torch.stack([u, x.cos()]),
    "pad": lambda u, x, w: F.pad(u, (1, 2)),
    "diagonal": lambda u, x, w: torch.diagonal(u[:, :5]),
    "flip": lambda u, x, w: torch.flip(u, [0]),
    "roll": lambda u, x, w: torch.roll(u, 2, 1),
    "repeat": lambda u, x, w: u.repeat(3, 2),
    "triangles": lambda u, x, w: torch.tril(u) + torch.triu(u, 1) * 2,
    "select": lambda u, x, w: u[2],
    "slice": lambda u, x, w: u[1:4, ::2],
    "unfold": lambda u, x, w: u.unfold(1, 3, 1),
    "embedding": lambda u, x, w: F.embedding(places(x, 9, 5), w.expand(5, 7)),
    "gather": lambda u, x, w: torch.gather(u, 1, everywhere(x, 7)),
    "scatter": lambda u, x, w: torch.scatter(u, 1, everywhere(x, 7), u.sin()),
    "scatter_add": lambda u, x, w: torch.scatter_add(u, 1, everywhere(x, 7), u.sin()),
    "index": lambda u, x, w: u[places(x, 6, 5)],
    "index_select": lambda u, x, w: torch.index_select(u, 0, places(x, 6, 5)),
    "index_put": lambda u, x, w: torch.index_put(u, (places(x, 2, 5),), u[:2], accumulate=True),
    "masked_fill": lambda u, x, w: u.masked_fill(x > 0.3, 2.0),
    "where": lambda u, x, w: torch.where(x > 0.3, u, 2.5),
    "all": lambda u, x, w: torch.where((x > 0.1).all(1, keepdim=True), u, u * w),
    "any": lambda u, x, w: torch.where((x > 0.9).any(1, keepdim=True), u, u * w),
    "amax, amin": lambda u, x, w: u.amax(1) + u.amin(1),
    "aminmax": lambda u, x, w: torch.stack(torch.aminmax(u, dim=1)),
    "argmax, argmin": lambda u, x, w: u[:, 0] * u.argmax(1) + u.argmin(1),
    "max, min": lambda u, x, w: u.max(1)[0] + u.min(1)[0],
    "median": lambda u, x, w: u.median(1)[0],
    "kthvalue": lambda u, x, w: u.kthvalue(3, 1)[0],
    "sort": lambda u, x, w: u.sort(1)[0] * torch.arange(7),
    "topk": lambda u, x, w: u.topk(3, 1)[0],
    "cummax, cummin": lambda u, x, w: u.cummax(1)[0] + u.cummin(0)[0],
    "cdist": lambda u, x, w: torch.cdist(u, u.sin()),
    "cdist, p = 1": lambda u, x, w: torch.cdist(u, u.sin(), p=1),
    "fft": lambda u, x, w: torch.fft.irfft(torch.fft.rfft(u)) + torch.fft.fft(u).real[:, :6],
    "layer_norm": lambda u, x, w: F.layer_norm(u, (7,), w, w),
    "rms_norm": lambda u, x, w: F.rms_norm(u, (7,), w),
    "weight_norm": lambda u, x, w: torch._weight_norm(u, u[:, :1].contiguous(), 0),
    "prelu": lambda u, x, w: F.prelu(u - 0.3, w[:1]),
    "glu": lambda u, x, w: F.glu(u[:, :6], 1),
    "threshold": lambda u, x, w: F.threshold(u, 0.1, 0.2),
    "gelu": lambda u, x, w: F.gelu(u) + F.gelu(u, approximate="tanh"),
    "elu, selu, celu": lambda u, x, w: F.elu(u) + F.selu(u) + F.celu(u),
    "cross_entropy": lambda u, x, w: F.cross_entropy(u, places(x, 5, 7))[None],
    "nll_loss": lambda u, x, w: F.nll_loss(u.log_softmax(1), places(x, 5, 7), reduction="none"),
    "binary_cross_entropy": lambda u, x, w: F.binary_cross_entropy(u.sigmoid(), x.sigmoid())[None],
    "reflected steps": lambda u, x, w: F.pad(u, (2, 1), "reflect"),
    "replicated steps": lambda u, x, w: F.pad(u, (2, 1), "replicate"),
    "larger steps": lambda u, x, w: F.interpolate(u[None], scale_factor=2, mode="linear"),
    "repeated steps": lambda u, x, w: F.interpolate(u[None], scale_factor=2),
    "max_pool1d": lambda u, x, w: F.max_pool1d(u, 3, 1, 1),
    "product of a part": lambda u, x, w: F.linear(u[:, :4], w[:4, None] * w[:4]),
    "product of parts": lambda u, x, w: u[:, :4] @ x[:, :4].mT,
    "lerp": lambda u, x, w: torch.lerp(u, x.sin(), w),
    "addcmul, addcdiv": lambda u, x, w: torch.addcmul(u, w, x) + torch.addcdiv(u, w, x + 1),
    # What is drawn is left out of the result, which then has the same bits.
    "drawn": lambda u, x, w: u + (torch.rand_like(u) + torch.randn_like(u)).isnan().float(),
    "dropout": lambda u, x, w: u + F.dropout(u.detach(), 0.3, True).isnan().float(),
    "native_dropout": lambda u, x, w: u + torch.native_dropout(u, 0.0, True)[0],
    "std_mean, var_mean": lambda u, x, w: torch.stack(torch.std_mean(u, 1) + torch.var_mean(u, 1)),
}
OF_IMAGES = {
    "reflected": lambda u, x, w: F.pad(u, (2, 1, 1, 2), "reflect"),
    "replicated": lambda u, x, w: F.pad(u, (2, 1, 1, 2), "replicate"),
    "avg_pool2d": lambda u, x, w: F.avg_pool2d(u[None], 3, 1, 1),
    "adaptive_avg_pool2d": lambda u, x, w: F.adaptive_avg_pool2d(u[None], (2, 4)),
    "adaptive_max_pool2d": lambda u, x, w: F.adaptive_max_pool2d(u[None], (2, 4)),
    "max_pool2d": lambda u, x, w: F.max_pool2d(u[None], 3, 1, 1),
    "larger": lambda u, x, w: F.interpolate(u[None], scale_factor=2, mode="bilinear"),
    "repeated": lambda u, x, w: F.interpolate(u[None], scale_factor=2),
    "patches": lambda u, x, w: F.unfold(u[None], 3),
    "instance_norm": lambda u, x, w: F.instance_norm(u[None], None, None, w[:3], w[:3]),
    "group_norm": lambda u, x, w: F.group_norm(u[None], 3, w[:3], w[:3]),
    "held batch_norm": lambda u, x, w: F.batch_norm(
        u[None], torch.zeros(3), torch.ones(3), w[:3], None, training=False
    ),
    "fft2": lambda u, x, w: torch.fft.fft2(u).real,
    "softmax of channels": lambda u, x, w: u.softmax(0) + u.log_softmax(0),
    "loss of positions": lambda u, x, w: F.nll_loss(
        u.log_softmax(0)[None], everywhere(x[:1], 3), reduction="none"
    ),
}
OF_VOLUMES = {
    "max_pool3d": lambda u, x, w: F.max_pool3d(u[None], 2),
    "avg_pool3d": lambda u, x, w: F.avg_pool3d(u[None], 2),
    "adaptive_avg_pool3d": lambda u, x, w: F.adaptive_avg_pool3d(u[None], (2, 2, 3)),
}
REDUCED = "logsumexp mean prod std sum var softmax log_softmax _safe_softmax cumsum cumprod"
NUMBERS = """
    abs acos acosh asin asinh atan atanh ceil cos cosh digamma erf erfc erfinv exp exp2 expm1 floor
    frac lgamma log log10 log1p log2 logit neg reciprocal round rsqrt sigmoid sign sin sinc sinh
    sqrt square tan tanh trunc
"""
CURVES = """
    hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu relu6 silu softplus
    softshrink softsign tanhshrink
"""
PAIRS = "atan2 copysign div fmax fmin fmod hypot logaddexp maximum minimum pow remainder xlogy"
LOSSES = "binary_cross_entropy_with_logits huber_loss l1_loss mse_loss smooth_l1_loss"


def cases():
    """Yield each use's name, the shape of its records, and the function of x and w."""
    for shape, uses in ((MATRIX, OF_MATRICES), (IMAGE, OF_IMAGES), (VOLUME, OF_VOLUMES)):
        for name, use in uses.items():
            yield name, shape, lambda x, w, use=use: use(x * w, x, w)
    for name in REDUCED.split():
        of = getattr(torch, name)
        yield name, MATRIX, lambda x, w, of=of: of(x * w, 1)
        yield f"{name} of columns", (17, 33), lambda x, w, of=of: of(x * w, 0)
    for p in (1, 2, 3):
        of = torch.linalg.vector_norm
        yield f"norm {p}", MATRIX, lambda x, w, of=of, p=p: of(x * w, p, 1)
        yield f"norm {p} of columns", (17, 33), lambda x, w, of=of, p=p: of(x * w, p, 0)
    for name in NUMBERS.split():
        of = getattr(torch, name)
        yield name, MATRIX, lambda x, w, of=of: of(x * w)
    for name in CURVES.split():
        of = getattr(F, name)
        yield name, MATRIX, lambda x, w, of=of: of(x * w - 0.3)
    for name in PAIRS.split():
        of = getattr(torch, name)
        yield name, MATRIX, lambda x, w, of=of: of(x * w, (x * w).sin() + 1.5)
    for name in LOSSES.split():
        of = getattr(F, name)
        yield name, MATRIX, lambda x, w, of=of: of(x * w, x.sin(), reduction="none")
        yield f"mean {name}", MATRIX, lambda x, w, of=of: of(x * w, x.sin())[None]


class Of(nn.Module):
    def __init__(self, use, width):
        super().__init__()
        self.w, self.use = nn.Parameter(torch.randn(width)), use

    def forward(self, x):
        return self.use(x[0], self.w)[None]


def loss(out, y):
    out = out.flatten(1)
    return (out * (torch.arange(out.shape[1]) * 7 % 11 + 1.0)).sum(1) + 0 * y


class Seen(TorchDispatchMode):
    """Keeps the names of the operations that vmap comes down to."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(str(func).split(".")[1])
        return func(*args, **(kwargs or {}))


@bits
def test_each_operation_known_as_alike_gives_records_the_same_bits_wherever_they_lie():
    """All of them in one test, which also finds a name on the list that none of them is for."""
    seen, torch_threads, count, place = Seen(), torch.get_num_threads(), 3 * ALIKE, 5
    torch.set_num_threads(1)
    try:
        for name, shape, use in cases():
            torch.manual_seed(0)
            model, x = FlatModel(Of(use, shape[-1])), torch.rand(count, *shape)
            y = torch.arange(count) % 3
            alone = Alone(model, loss, x[:ALIKE], y[:ALIKE], "a test")
            assert alone._by_vmap, name
            others = (torch.arange(count) != place).view(-1, *[1] * len(shape))
            with seen:
                found = gradients(alone, x, y)
                for start, stop in ((0, ALIKE), (7, 7 + 2 * ALIKE)):
                    some = gradients(alone, x[start:stop].clone(), y[start:stop])
                    assert torch.equal(some, found[start:stop]), name
                for factor in (0.0, 1e30, -torch.inf):
                    x_others = torch.where(others, x * factor, x)
                    assert torch.equal(gradients(alone, x_others, y)[place], found[place]), name
    finally:
        torch.set_num_threads(torch_threads)
    assert sorted(_ALIKE - seen.names) == []


def gradients(alone, x, y):
    """Losses beside gradients [B, 1 + d], with a number for each NaN, which equals none."""
    losses, shares = alone.run(x, y)
    (rows,) = [share.rows(slice(0, len(x))) for share in shares["w"]]
    return torch.cat([losses.detach()[:, None], rows], 1).nan_to_num(7.0)
