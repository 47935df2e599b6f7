"""A model tuned on a site's own records, exactly: min_w F(w) + λ ‖w - a‖², F their mean loss.

a is a model that the site has anyway: the released one (tuning), or the plan's initial one (a site
by itself). λ = ∞ gives a, λ = 0 the optimum of the records alone. Nothing is clipped and no noise
is added: what comes out is not private, and stays where the records are.

The solver is L-BFGS on all records at once (scipy's), from the solution of the next larger λ: it
has no step size to choose. Float32 models end where their rounding hides the descent.
"""

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedpact.losses import cross_entropy
from fedpact.params import FlatModel, all_finite, from_numpy

_AT_A_TIME = 1024  # records of one pass: a network's activations of all of them may be too many
_ITERATIONS = 50


def tune(
    model: FlatModel, x: Tensor, y: Tensor, anchor: Tensor, weight: float, start: Tensor
) -> Tensor:
    """Return the w [d] that minimises F(w) + λ ‖w - a‖² over records x [n, ...], y [n, ...].

    model: what computes; its weights are others afterwards. anchor: a [d]. weight: λ >= 0, may be
    infinite. start: where to begin [d]. Where no finite w is found, and without records, it is a.
    """
    if math.isinf(weight) or not len(y):
        return anchor.clone()
    # Few runs tune anything, and each would load it.
    from scipy.optimize import minimize

    centre = anchor.double().numpy()

    def objective(w: NDArray[Any]) -> tuple[float, NDArray[Any]]:
        loss, gradient = _loss(model, w, x, y)
        away = w - centre
        return loss + weight * float(away @ away), gradient + 2 * weight * away

    options = {"maxiter": _ITERATIONS, "ftol": 1e-9, "gtol": 1e-6}
    begin = start.double().numpy().copy()
    found = minimize(objective, begin, jac=True, method="L-BFGS-B", options=options)
    w = from_numpy(np.asarray(found.x)).to(anchor.dtype)
    return w if all_finite(w) else anchor.clone()


def _loss(model: FlatModel, w: NDArray[Any], x: Tensor, y: Tensor) -> tuple[float, NDArray[Any]]:
    """Return F and its gradient at w [d], in float64."""
    model.load(from_numpy(w).to(model.vector.dtype))
    model.module.eval()
    own = [p for p in model.module.parameters() if p.requires_grad]
    total, gradient = 0.0, np.zeros(len(w))
    for xs, ys in zip(x.split(_AT_A_TIME), y.split(_AT_A_TIME), strict=True):
        loss = cross_entropy(model.module(xs), ys).sum() / len(y)
        parts = torch.autograd.grad(loss, own, allow_unused=True, materialize_grads=True)
        total += float(loss.detach())
        gradient += torch.cat([part.reshape(-1) for part in parts]).double().numpy()
    return total, gradient


def answers(model: FlatModel, w: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return which records [n] the model w answers rightly, and their losses [n].

    A sequence is right where all of its positions are; a record whose scores hold NaN is wrong.
    """
    model.load(w)
    if not len(y):
        return torch.zeros(0, dtype=torch.bool), torch.zeros(0, dtype=torch.float64)
    model.module.eval()
    right, losses = list[Tensor](), list[Tensor]()
    with torch.no_grad():
        for xs, ys in zip(x.split(_AT_A_TIME), y.split(_AT_A_TIME), strict=True):
            outputs = model.module(xs)
            losses.append(cross_entropy(outputs, ys).double())
            hit = (outputs.argmax(-1) == ys) & ~outputs.isnan().any(-1)
            right.append(hit.reshape(len(ys), -1).all(1))
    return torch.cat(right), torch.cat(losses)
