"""Small models of several kinds and a loss, for tests of what all of them go through."""

from torch import Tensor, nn

from fedpact.per_sample.kernel import PerSampleKernel


def off_by(outputs: Tensor, y: Tensor) -> Tensor:
    """Squared differences from the class's number, summed: traced in half of cross-entropy's time.

    outputs: [B, K]; y: [B]; the losses are [B].
    """
    return (outputs - y[:, None]).square().sum(1)


def by_autograd(kernel: PerSampleKernel, x: Tensor, y: Tensor, clip: float) -> Tensor:
    """The clipped sum of gradients that are made by ordinary autograd, record by record."""
    rows = kernel.alone(x, y)
    return (rows * (clip / rows.norm(dim=1)).clamp_max(1)[:, None]).sum(0)


def cnn() -> nn.Module:
    """As the papers' CNN, narrower, for images [B, 1, 12, 12] of three classes."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5, padding=2), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(288, 32), nn.ReLU(inplace=True), nn.Linear(32, 3),
    )  # fmt: skip


class Recurrent(nn.Module):
    """A layer, an LSTM over steps x [B, T, 5], and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.cell = nn.LSTM(5, 6, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(self.first(x))[0][:, -1])


class Attention(nn.Module):
    """A layer of a transformer over x [B, T, 8], and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x).mean(1))
