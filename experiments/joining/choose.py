"""Which rounds, η and λ suit heart disease, found on records that are set aside from training.

    FEDPACT_DATA=... python -m experiments.joining.choose        (two minutes)

Sixteen cuts of a quarter of each hospital's training records, twelve draws of noise each; FLamby's
test parts are left alone. `mr_mtl` from zero on full batches with C = 1, many draws side by side in
numpy; λ = 0 is each site alone under the same privacy, λ = ∞ the federated model. What is chosen is
written to choice-heart_disease.json.
"""

import json
from itertools import product
from pathlib import Path

import numpy as np
from experiments.made import made

from fedpact.data.public import load_flamby
from fedpact.privacy.accounting.accountant import Budget, SampledGaussian
from fedpact.privacy.accounting.calibration import smallest_scale

HERE = Path(__file__).parent
EPSILONS, DELTA = (0.5, 1.0, 2.0), 1e-4
ROUNDS, RATES = (3, 10, 30), (0.05, 0.1, 0.2, 0.5, 1.0)
WEIGHTS = {"fedavg": (np.inf,), "local": (0.0,), "mr_mtl": (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)}
CUTS, DRAWS = 16, 12
Parts = list[tuple[np.ndarray, np.ndarray]]


def cut(seed: int) -> tuple[Parts, Parts]:
    """Return each hospital's records (x with a one at the end, y): to train on, and set aside."""
    data, rng, trained, aside = load_flamby(), np.random.default_rng(seed), Parts(), Parts()
    if data.held is None or data.site is None:
        raise ValueError("FLamby's cut has hospitals and test parts")
    x = np.concatenate([data.x.numpy(), np.ones((len(data.y), 1))], 1).astype(float)
    y, held, sites = data.y.numpy(), data.held.numpy(), np.array(data.site)
    for site in sorted(set(data.site)):
        own = rng.permutation(np.flatnonzero((sites == site) & ~held))
        some = round(0.25 * len(own))
        aside.append((x[own[:some]], y[own[:some]]))
        trained.append((x[own[some:]], y[own[some:]]))
    return trained, aside


def step(w: np.ndarray, x: np.ndarray, y: np.ndarray, rng: np.random.Generator, sigma: float):
    """Return the noisy mean gradient of the softmax at w [draws, 2, d], each clipped to 1."""
    scores = np.einsum("rkd,nd->rnk", w, x)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    shares[:, np.arange(len(y)), y] -= 1
    norms = np.linalg.norm(shares, axis=-1) * np.linalg.norm(x, axis=1)
    shares *= np.minimum(1, 1 / np.maximum(norms, 1e-12))[..., None]
    total = np.einsum("rnk,nd->rkd", shares, x)
    return (total + sigma * rng.standard_normal(total.shape)) / len(y)


def accuracy(
    parts: tuple[Parts, Parts], sigma: float, rounds: int, rate: float, weight: float, seed: int
) -> float:
    """Return the mean over hospitals and draws of the own models' accuracy on what is set aside."""
    (trained, aside), rng = parts, np.random.default_rng(seed)
    sizes = np.array([len(y) for _, y in trained], float)
    mean = np.zeros((DRAWS, 2, trained[0][0].shape[1]))
    own, left = [mean] * len(trained), 1 / (1 + rate * weight)
    for _ in range(rounds):
        held = [mean + left * (w - mean) for w in own]
        moved = [-rate * step(w, *part, rng, sigma) for w, part in zip(held, trained, strict=True)]
        own = [w + m for w, m in zip(held, moved, strict=True)]
        mean = mean + np.tensordot(sizes / sizes.sum(), np.stack(moved), 1)
    held = [mean + left * (w - mean) for w in own]
    hits = [
        (np.einsum("rkd,nd->rnk", w, x).argmax(-1) == y).mean()
        for w, (x, y) in zip(held, aside, strict=True)
    ]
    return float(np.mean(hits))


def main() -> None:
    """Choose, print and write."""
    chosen, parts = dict[str, dict[str, object]](), [cut(seed) for seed in range(CUTS)]
    for epsilon, (entrant, weights) in product(EPSILONS, WEIGHTS.items()):
        best = -np.inf, {}
        for rounds, rate, weight in product(ROUNDS, RATES, weights):
            once = {SampledGaussian(1.0, 1.0): rounds}
            sigma = smallest_scale(Budget(epsilon, DELTA), once)
            each = [accuracy(p, sigma, rounds, rate, weight, s) for s, p in enumerate(parts)]
            found = {"rounds": rounds, "rate": rate, "aside": round(float(np.mean(each)), 4)}
            found["weight"] = 0.0 if np.isinf(weight) else weight
            best = max(best, (float(np.mean(each)), found), key=lambda one: one[0])
        chosen[f"{entrant} ε={epsilon:g}"] = best[1] | {"made": made()}
        print(entrant, epsilon, best[1], flush=True)
    path = HERE / "choice-heart_disease.json"
    path.write_text(json.dumps(chosen, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
