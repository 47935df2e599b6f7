"""What a site asks for whose answer may be worked out together with other sites'."""

from dataclasses import dataclass

from torch import Tensor

from fedpact.params import FlatModel
from fedpact.privacy.weighting import Weights


@dataclass(eq=False, slots=True)
class Sum:
    """One site's question: Σ_j c_j g_j at the model's weights over x, y [n, ...].

    c_j = min(w_j, C/‖g_j‖) with C = clip; infinity for c_j = w_j. See PerSampleKernel. plain: what
    is not finite is not left out but spreads, as without privacy.
    """

    model: FlatModel
    x: Tensor
    y: Tensor
    clip: float
    weights: Weights | None
    plain: bool = False


@dataclass(eq=False, slots=True)
class Noise:
    """One site's question: total [d] plus `scale` times the normal numbers of `key`.

    Where it is answered, total is written over.
    """

    total: Tensor
    scale: float
    key: bytes
