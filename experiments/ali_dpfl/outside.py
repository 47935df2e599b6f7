"""Variants of ALI-DPFL at τ = 1 that no plan can say, in plain torch.

    FEDPACT_DATA=DIR python -m experiments.ali_dpfl.outside [NAME ...]      outside.json

A site's oracle clips a record's gradient as a whole and releases noisy sums alone. So no plan clips
each layer by itself, or keeps sums without their noise from round to round. Here nothing protects
and nothing is charged. The rest is as in ../evidence/ali_dpfl.toml: ten sites of 2 labels each,
the papers' network, q = 0.015, C = 0.1, σ = 1.1. At τ = 1 and sites of one size a step is the same
for any partition, so their batches are drawn as one, with the noise of a mean of ten.
Results are stored as they come, and what is stored is not run again.
"""

import argparse
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from experiments.evidence.ali import batch_size
from experiments.evidence.variants import ROW
from experiments.made import made
from torch import Tensor, nn

from fedpact.data.load import load_dataset
from fedpact.models.zoo import cnn

STORED: Final = Path(__file__).with_name("outside.json")
SITES, CLIP, SIGMA = 10, 0.1, 1.1


@dataclass(frozen=True)
class Outside:
    """layers: clip each layer's gradient by itself to C. kept: never clear the sum of gradients.

    moved: by how many C one record can move all releases together, as one vector.
    """

    rate: float
    moved: float
    layers: bool = False
    kept: bool = False


VARIANTS: Final = {
    "each layer clipped by itself, η = 0.5": Outside(0.5, 2.0, layers=True),
    "each layer clipped by itself, η = 4": Outside(4.0, 2.0, layers=True),
    "sums never cleared, fresh noise": Outside(0.5, math.sqrt(ROW[-1]), kept=True),
}
OF_DATA: Final = {"fashion_mnist": tuple(VARIANTS), "cifar10": tuple(VARIANTS)[-1:]}


def clipped_sums(model: nn.Module, x: Tensor, y: Tensor, layers: bool) -> list[Tensor]:
    """Return the sum over records of each parameter's clipped gradient.

    model: of convolutions without padding and linear layers, with biases. layers: whether each
    layer's gradient is clipped by itself.
    """
    seen = list[tuple[nn.Module, Tensor, Tensor]]()
    parts = [part for part in model.modules() if isinstance(part, nn.Conv2d | nn.Linear)]
    hooks = [
        part.register_forward_hook(lambda part, given, out: seen.append((part, given[0], out)))
        for part in parts
    ]
    loss = F.cross_entropy(model(x), y, reduction="sum")
    for hook in hooks:
        hook.remove()
    by_output = torch.autograd.grad(loss, [out for _, _, out in seen])
    squares, weighted = list[Tensor](), list[Callable[[Tensor], list[Tensor]]]()
    for (part, given, _), back in zip(seen, by_output, strict=True):
        of = _of_convolution if isinstance(part, nn.Conv2d) else _of_linear
        square, sums = of(given.detach(), back)
        squares.append(square)
        weighted.append(sums)
    each = torch.stack(squares)
    norms = (each if layers else each.sum(0).expand_as(each)).sqrt()
    factors = (CLIP / norms).clamp(max=1)
    return [g for sums, factor in zip(weighted, factors, strict=True) for g in sums(factor)]


def _of_linear(x: Tensor, back: Tensor) -> tuple[Tensor, Callable[[Tensor], list[Tensor]]]:
    square = back.square().sum(1) * (x.square().sum(1) + 1)
    return square, lambda factor: [(factor[:, None] * back).T @ x, factor @ back]


def _of_convolution(x: Tensor, back: Tensor) -> tuple[Tensor, Callable[[Tensor], list[Tensor]]]:
    windows = F.unfold(x, (5, 5))  # [n, inputs of a window, places]
    weights, bias = back.flatten(2) @ windows.mT, back.sum((2, 3))
    square = weights.square().sum((1, 2)) + bias.square().sum(1)
    shape = (back.shape[1], x.shape[1], 5, 5)
    return square, lambda factor: [
        (factor @ weights.flatten(1)).reshape(shape),
        factor @ bias,
    ]


def steps(data: str, variant: Outside, seed: int) -> Iterator[tuple[int, nn.Module]]:
    """Yield the model after the iterations of ROW."""
    torch.manual_seed(seed)
    dataset, batch = load_dataset(data), batch_size(data)
    model = cnn(tuple(dataset.x.shape[1:]), 10)
    parameters = [*model.parameters()]
    total = [torch.zeros_like(w) for w in parameters]
    for step in range(1, ROW[-1] + 1):
        taken = (torch.rand(len(dataset.y)) < 0.015).nonzero().flatten()
        if not variant.kept:
            total = [torch.zeros_like(w) for w in parameters]
        for some in taken.split(90):
            new = clipped_sums(model, dataset.x[some], dataset.y[some], variant.layers)
            total = [before + more for before, more in zip(total, new, strict=True)]
        with torch.no_grad():
            for w, found in zip(parameters, total, strict=True):
                noise = math.sqrt(SITES) * SIGMA * CLIP * torch.randn(w.shape)
                w -= variant.rate * (found + noise) / (SITES * batch)
        if step in ROW:
            yield step, model


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return the share of records whose label is found."""
    with torch.no_grad():
        found = torch.cat([model(some).argmax(1) for some in x.split(1000)])
    return float((found == y).double().mean())


def stored() -> dict[str, Any]:
    """Return what is stored: data set and variant -> accuracy by iterations, and what made it."""
    return json.loads(STORED.read_text(encoding="utf-8")) if STORED.exists() else {}


def main(names: list[str]) -> None:
    """Run what is missing, and print it."""
    for data, own in OF_DATA.items():
        for name in own:
            title = f"{data} {name}"
            if title not in stored() and all(part in title for part in names):
                test = load_dataset(data)
                looks = {
                    str(step): accuracy(model, test.x_test, test.y_test)
                    for step, model in steps(data, VARIANTS[name], 0)
                }
                # Read again: another process may have stored some meanwhile.
                found = stored() | {title: {"looks": looks, "made": made()}}
                text = json.dumps(found, indent=1, ensure_ascii=False) + "\n"
                STORED.write_text(text, encoding="utf-8")
            print(title, stored().get(title, {}).get("looks", "not run"), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="words of the titles to run")
    main(parser.parse_args().names)
