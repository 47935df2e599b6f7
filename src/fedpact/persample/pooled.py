"""Per-sample gradients of a convolution that a max-pooling follows.

Only one number of each pooling window passes a gradient back, so g is zero but for one position in
four or more, and Σ_t g_t u_tᵀ is a sum over those positions: for each output channel a weighted sum
of rows of a table, torch's embedding_bag. A row of the table is a row of the patch, kernel width
times channels, which lies together in an image stored by pixel; the rows of the kernel are as many
sums over the same table.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fedpact.params import at_hand
from fedpact.persample.convolution import Conv, Geometry
from fedpact.persample.norms import Outer, Sizes, Views

_WIDE = 64
"""From how many numbers a row on: shorter ones cost more to find than to add."""

Pooled = tuple[Tensor, Tensor]
"""(g at the windows' maxima [B, O, ...], their places in the convolution's output, h·w)."""


def applies(conv: Conv, grad: Tensor, pooled: Pooled | None) -> bool:
    """Whether the gradient `grad` is sparse enough, and the convolution of the kind meant here.

    On CPUs, where embedding_bag is a routine of its own and faster than a product; untried on GPUs.
    """
    if pooled is None or not at_hand(grad):
        return False
    geometry = Geometry.of(conv)
    simple = geometry.plain and geometry.stride == geometry.dilation == (1, 1)
    wide = geometry.kernel[1] * conv.in_channels >= _WIDE
    return simple and conv.groups == 1 and wide and grad.numel() >= 4 * pooled[0].numel()


class PooledConvolution(Outer):
    """A weight's gradients [O, h, w, C] from x [B, C, H, W] and what the pooling passed back."""

    def __init__(self, conv: Conv, x: Tensor, grad: Tensor, pooled: Pooled) -> None:
        self._geometry, self._weight, self._x, self._g = (
            Geometry.of(conv),
            conv.weight.detach(),
            x,
            grad,
        )
        values, index = pooled
        batch, out = values.shape[:2]
        self._values = values.reshape(batch, out, 1, -1)
        self._index = index.int().reshape(batch, out, 1, -1)
        length, width = grad[0, 0].numel(), self._weight[0].numel()
        self.sizes = Sizes(batch, 1, length, out, width, grad.element_size())

    def factors(self, chunk: slice) -> tuple[Tensor, Tensor]:
        """See Outer."""
        return self._g[chunk].flatten(2), self._geometry.patches(self._x[chunk])

    def gradients(self, chunk: slice) -> Tensor:
        """See Outer."""
        values, index = self._values[chunk], self._index[chunk]
        n, places = len(values), values.shape[3]
        kernel, columns = self._geometry.kernel[0], self._g.shape[3]
        table = self._table(self._x[chunk], columns)
        # A row of the kernel reads the table so many rows further down; a sample, its own part.
        down = torch.arange(0, kernel * columns, columns, dtype=torch.int32, device=index.device)
        first = torch.arange(n, dtype=torch.int32, device=index.device) * (len(table) // n)
        rows = (index + (first[:, None] + down)[:, None, :, None]).reshape(-1, places)
        weights = values.expand(-1, -1, kernel, -1).reshape(-1, places)
        return F.embedding_bag(rows, table, mode="sum", per_sample_weights=weights).view(n, -1)

    def _table(self, x: Tensor, columns: int) -> Tensor:
        """Every kernel row of the padded images, [n·height·columns, kernel width · C]."""
        x = self._geometry.padded(x).permute(0, 2, 3, 1).contiguous()
        n, height, width, channels = x.shape
        row = width * channels
        shape = (n, height, columns, self._geometry.kernel[1] * channels)
        return x.as_strided(shape, (height * row, row, channels, 1)).reshape(-1, shape[3])

    def arranged(self, total: Tensor) -> Tensor:
        """See Outer."""
        out, channels, *kernel = self._weight.shape
        return total.view(out, *kernel, channels).permute(0, 3, 1, 2)

    def write_sum(self, c: Tensor, views: Views) -> None:
        """See Outer."""
        scaled = self._g * c.view(-1, 1, 1, 1)
        views["weight"].add_(self._geometry.weight_sum(self._x, scaled, self._weight))
