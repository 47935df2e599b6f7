"""Clipped sums of several sites at once: small models, each at its own weights, by products of
batches of matrices. And their noise.

A step of a small model is a dozen calls of torch, each of them short. Stacked, k sites share them:
weights [k, O, K], records [k, K, B], B the largest of their batches. No site's numbers enter
another's product, so what is summed for a site is what its own kernel sums, up to rounding: 1e-12
of the sum's length in float64, 1e-5 in float32 (tested).

For a chain of nn.Linear, ReLU, Tanh and Sigmoid, with layers without weights in front (Flatten),
and cross_entropy; it is the kernel's ghost norm, ‖g_j x_jᵀ‖ = ‖g_j‖‖x_j‖ a layer.
"""

from collections.abc import Callable, Container, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from fedpact.losses import Loss, cross_entropy
from fedpact.params import FlatModel
from fedpact.privacy.compiled import chain_of
from fedpact.privacy.kernel import weights_of
from fedpact.privacy.keystream import normals_of, together
from fedpact.privacy.parts import square_sums
from fedpact.privacy.seats import Noise, Sum

# How much larger than another site's batch one may be, to share a product with it.
_UNEVEN = 1.5

_Curve = Callable[[Tensor], Tensor]

# The function, and its derivative from its value.
_ACTIVATIONS: dict[type[nn.Module], tuple[_Curve, _Curve]] = {
    nn.ReLU: (torch.relu, lambda y: (y > 0).to(y.dtype)),
    nn.Tanh: (torch.tanh, lambda y: 1 - y * y),
    nn.Sigmoid: (torch.sigmoid, lambda y: y * (1 - y)),
}


class Stack:
    """Answers several sites' requests on models like `model`, which it only takes the form of."""

    def __init__(self, model: FlatModel, before: list[nn.Module], layers: list[nn.Module]) -> None:
        self._model, self._before, self._layers = model, before, layers
        named = {id(p): name for name, p in model.module.named_parameters()}
        places = {
            name: (view.storage_offset(), view.shape) for name, view in model.views(model.vector)
        }
        self._places = [
            {own: places[named[id(p)]] for own, p in layer.named_parameters()} for layer in layers
        ]

    @staticmethod
    def of(model: FlatModel, loss: Loss) -> "Stack | None":
        """Return what stacks the model, None where it is not such a chain."""
        chain = chain_of(model.module)
        if chain is None or loss is not cross_entropy:
            return None
        first = next((i for i, m in enumerate(chain) if type(m) is nn.Linear), len(chain))
        before, layers = chain[:first], chain[first:]
        fitting = all(type(m) is nn.Linear or type(m) in _ACTIVATIONS for m in layers)
        plain = not any(True for m in before for _ in m.buffers())
        linear = [m for m in layers if type(m) is nn.Linear]
        own = {id(p) for m in linear for p in m.parameters()}
        held = sum(p.numel() for m in linear for p in m.parameters())
        trained = held == model.size and all(id(p) in own for p in model.module.parameters())
        fits = linear and fitting and plain and trained and len(set(map(id, linear))) == len(linear)
        return Stack(model, before, layers) if fits else None

    def answers(self, questions: Sequence[Sum | Noise]) -> list[Tensor | None]:
        """Return each question's answer; None where a site has to answer it itself."""
        found: list[Tensor | None] = [None] * len(questions)
        sums = {i: one for i, one in enumerate(questions) if isinstance(one, Sum)}
        noise = {i: one for i, one in enumerate(questions) if isinstance(one, Noise)}
        for i, answer in zip(sums, self.sums(list(sums.values())), strict=True):
            found[i] = answer
        for i, answer in zip(noise, _with_noise(list(noise.values())), strict=True):
            found[i] = answer
        return found

    def sums(self, requests: Sequence[Sum]) -> list[Tensor | None]:
        """Return each request's sum [d]; None where a site has to compute its own.

        That is where a loss, a norm or a weight is not finite, and for what has another form.
        """
        answers: list[Tensor | None] = [None] * len(requests)
        with torch.no_grad():
            for group in _alike(requests):
                some = self._sums([requests[i] for i in group])
                for i, answer in zip(group, some, strict=True):
                    answers[i] = answer
        return answers

    def _sums(self, requests: list[Sum]) -> Sequence[Tensor | None]:
        inputs = self._inputs(requests)
        if inputs is None:
            return [None] * len(requests)
        records, y, real = inputs
        w = torch.stack([request.w for request in requests])
        values = [self._first(records, w, real)]
        for i, layer in enumerate(self._layers[1:], 1):
            values.append(_forward(layer, self._views(w, i), values[-1]))
        log = torch.log_softmax(values[-1], 1)
        losses = -log.gather(1, y[:, None]).squeeze(1)
        g = log.exp_().scatter_add_(1, y[:, None], torch.full_like(losses, -1)[:, None])
        grads = self._backward(g, values, w)
        squares = [_squares(g, values[i - 1], self._places[i]) for i, g in grads.items() if i]
        lengths = _lengths(records, real) + ("bias" in self._places[0])
        squares.append(_square_sums(grads[0]) * lengths)
        norms = torch.stack(squares).sum(0).sqrt_()
        c, good = _coefficients(requests, losses, norms, real)
        totals = torch.empty_like(w)
        for i, g in grads.items():
            g = g * c[:, None]
            own = self._views(totals, i)
            if "bias" in own:
                own["bias"].copy_(g.sum(2))
            if i:
                own["weight"].copy_(torch.bmm(g, values[i - 1].transpose(1, 2)))
                continue
            for weight, each, x in zip(own["weight"], g, records, strict=True):
                torch.mm(each[:, : x.shape[0]], x, out=weight)
        return [total if fine else None for total, fine in zip(totals, good, strict=True)]

    def _first(self, records: list[Tensor], w: Tensor, real: Tensor) -> Tensor:
        """Return the first layer's output [k, O, B] for records x [n, K] of each site.

        Site by site, as a product of batches is computed anyway: so the records, the largest of all
        matrices here, are read where they are.
        """
        own = self._views(w, 0)
        y = w.new_zeros(len(records), own["weight"].shape[1], real.shape[1])
        for place, weight, x in zip(y, own["weight"], records, strict=True):
            torch.mm(weight, x.t(), out=place[:, : x.shape[0]])
        return y.add_(own["bias"][:, :, None]) if "bias" in own else y

    def _views(self, vectors: Tensor, layer: int) -> dict[str, Tensor]:
        """A layer's weight [k, O, K] and bias [k, O] in vectors [k, d]."""
        return {
            own: vectors[:, start : start + shape.numel()].view(-1, *shape)
            for own, (start, shape) in self._places[layer].items()
        }

    def _inputs(self, requests: list[Sum]) -> tuple[list[Tensor], Tensor, Tensor] | None:
        """Return each site's x [n, K], y [k, B], and in [k, B] 1 for a record and 0 for none."""
        kinds = {(r.x.shape[1:], r.x.dtype, r.y.dtype, r.y.dim(), r.w.dtype) for r in requests}
        first = requests[0]
        if len(kinds) > 1 or first.y.dtype != torch.int64 or first.y.dim() != 1:
            return None
        records = [self._prepared(request.x) for request in requests]
        if records[0].dim() != 2 or records[0].dtype != first.w.dtype:
            return None
        y = pad_sequence([request.y for request in requests], batch_first=True)
        real = torch.zeros_like(y, dtype=first.w.dtype)
        for place, request in zip(real, requests, strict=True):
            place[: request.size] = 1
        return records, y, real

    def _prepared(self, x: Tensor) -> Tensor:
        for module in self._before:
            x = module(x)
        return x

    def _backward(self, g: Tensor, values: list[Tensor], w: Tensor) -> dict[int, Tensor]:
        """Return ∂ℓ_j/∂output [k, O, B] of every linear layer, by its place."""
        found: dict[int, Tensor] = {}
        for i in reversed(range(len(self._layers))):
            kind = type(self._layers[i])
            if kind is nn.Linear:
                found[i] = g
                g = torch.bmm(self._views(w, i)["weight"].transpose(1, 2), g) if i else g
            else:
                g = g * _ACTIVATIONS[kind][1](values[i])
        return found


def _with_noise(requests: Sequence[Noise]) -> list[Tensor]:
    """Return each request's total [d], with its noise."""
    kinds = {(one.total.numel(), one.total.dtype): list[Noise]() for one in requests}
    for one in requests:
        kinds[one.total.numel(), one.total.dtype].append(one)
    for (size, dtype), alike in kinds.items():
        some = together(size, dtype)
        for start in range(0, len(alike), some):
            now = alike[start : start + some]
            numbers = normals_of([one.key for one in now], size, dtype)
            for one, z in zip(now, numbers, strict=True):
                one.total.add_(z, alpha=one.scale)
    return [one.total for one in requests]


def _alike(requests: Sequence[Sum]) -> Iterator[list[int]]:
    """Yield the places of requests with batches of about one size."""
    order = sorted(range(len(requests)), key=lambda i: requests[i].size)
    group: list[int] = []
    for i in order:
        if group and requests[i].size > _UNEVEN * requests[group[0]].size:
            yield group
            group = []
        group.append(i)
    if group:
        yield group


def _forward(layer: nn.Module, own: dict[str, Tensor], x: Tensor) -> Tensor:
    """Return the layer's output [k, O, B] for x [k, K, B]; MKL likes this order best."""
    if type(layer) is not nn.Linear:
        return _ACTIVATIONS[type(layer)][0](x)
    y = torch.bmm(own["weight"], x)
    return y.add_(own["bias"][:, :, None]) if "bias" in own else y


def _squares(g: Tensor, x: Tensor, own: Container[str]) -> Tensor:
    """Return ‖g_j‖² (‖x_j‖² + 1) [k, B], without the 1 where the layer has no bias."""
    of_x = _square_sums(x)
    return _square_sums(g) * (of_x + 1 if "bias" in own else of_x)


def _square_sums(rows: Tensor) -> Tensor:
    """Return ‖v_j‖² [k, B] of v [k, K, B]."""
    return square_sums(rows.transpose(1, 2).flatten(0, 1)).view(len(rows), -1)


def _lengths(records: list[Tensor], real: Tensor) -> Tensor:
    """Return ‖x_j‖² [k, B] of each site's records x [n, K], 0 where there is no record."""
    found = torch.zeros_like(real)
    for place, x in zip(found, records, strict=True):
        place[: x.shape[0]] = square_sums(x)
    return found


def _coefficients(
    requests: list[Sum], losses: Tensor, norms: Tensor, real: Tensor
) -> tuple[Tensor, list[bool]]:
    """Return c [k, B], 0 where there is no record, and of which sites all is finite."""
    known = losses + norms
    w = torch.ones_like(norms)
    for i, request in enumerate(requests):
        if request.weights is not None:
            size = request.size
            w[i, :size] = weights_of(request.weights, losses[i, :size]).clamp_min(0)
            known[i, :size] += w[i, :size]
    clips = norms.new_tensor([[request.clip] for request in requests])
    c = torch.where(real > 0, torch.minimum(w, clips / norms), real)
    # Where there is no record, too: 0 times infinity would be in the sum.
    good = known.isfinite().all(1) & c.isfinite().all(1)
    return c, [bool(fine) for fine in good]
