"""Views of an image, over which a record's gradient is a mean before it is clipped.

De, Berrada, Hayes, Smith, Balle. Unlocking high-accuracy differentially private image
classification through scale. arXiv 2204.13650 ("augmentation multiplicity"). With views a_1, ...,
a_K of a record, the image itself among them,

    ℓ_j(w) = (1/K) Σ_k ℓ(w; a_k(x_j), y_j),    g_j = (1/K) Σ_k ∇ℓ(w; a_k(x_j), y_j)

is one record's loss and gradient, which is clipped and counted as any other: a record moves a sum
by at most C, as without views. To the kernel they are a part of the model. Views are the same for
every record and step. A model is evaluated on the images themselves.
"""

import torch
import torch.nn.functional as F
from pydantic import BaseModel, Field
from torch import Tensor, nn

from fedpact.common.configuration import FROZEN
from fedpact.common.errors import ModelError
from fedpact.common.params import model_name


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
    found = [x, *_shifted(x, settings.shift)]
    return found + [view.flip(-1) for view in found] if settings.mirror else found


def _shifted(x: Tensor, by: int) -> list[Tensor]:
    if not by:
        return []
    height, width = x.shape[-2:]
    # torch pads images by reflection only with a dimension of channels.
    wide = F.pad(x.unsqueeze(1) if x.dim() == 3 else x, (by, by, by, by), mode="reflect")
    wide = wide.squeeze(1) if x.dim() == 3 else wide
    places = (0, by), (2 * by, by), (by, 0), (by, 2 * by)
    # Each in one piece, as the images are: a model may ask how its numbers lie (`view`).
    return [wide[..., a : a + height, b : b + width].contiguous() for a, b in places]
