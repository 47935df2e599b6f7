"""Made-up sites, for tests of what an algorithm asks them and makes of their answers."""

import numpy as np
import torch
from scipy import stats

from fedpact.algorithms import fedavg
from fedpact.common.messages import Reply, State, Task

LEVEL = 1e-6
D, SIZES = 4, {"a": 30.0, "b": 10.0, "c": 25.0}
SMALL = {
    "rounds": 4,
    "sites": 3,
    "run": {"evaluate_every": 1, "workers": 1},
    "privacy": {"accountant": "rdp"},
}
"""Tables of a run that takes a moment."""


class Drawn:
    """An oracle of a site with ∇F(w) = A (w - b), and each gradient a draw of noise beside it."""

    def __init__(self, site, noise=0.0):
        generator = np.random.default_rng(ord(site))
        root = generator.normal(size=(D, D))
        self.a, self.b = root @ root.T / D, generator.normal(size=D)
        self.noise = noise * generator.normal(size=(1000, D))
        self.asked = 0

    def gradient_at(self, w, k=0):
        return self.a @ (w - self.b) + self.noise[k]

    def batches(self, count, *channels):
        assert channels == ("gradient",)
        for _ in range(count):
            yield self

    def gradient(self, w):
        self.asked += 1
        return torch.from_numpy(self.gradient_at(w.numpy(), self.asked - 1))


class NoiseAlone:
    """A site whose gradients are N(0, 1) in every coordinate, wherever they are taken."""

    def __init__(self, seed, size):
        self.generator, self.size = torch.Generator().manual_seed(seed), size

    def batches(self, count, *channels):
        for _ in range(count):
            yield self

    def gradient(self, w):
        return torch.randn(self.size, generator=self.generator, dtype=torch.float64)


class Told:
    """An oracle and batch whose k-th gradient is k ones, and which keeps what it was asked."""

    noise_variance = 0.0

    def __init__(self, loss=1.0, share=0.5):
        self.answers, self.asked, self.weightings = (loss, share), [], []

    def batches(self, count, *names):
        self.asked.append((count, names))
        for _ in range(count):
            yield self

    def gradient(self, w, weighting=None):
        self.weightings.append(weighting)
        return torch.full_like(w, float(len(self.weightings)))

    def loss(self, w, bound):
        self.asked.append((w.clone(), bound))
        return self.answers[0]

    def below(self, w, bound):
        self.asked.append((w.clone(), bound))
        return self.answers[1]


def accepts(values, variance):
    """Whether values could be N(0, variance): two-sided chi-square test of level 1e-6."""
    energy, n = float(values.square().sum() / variance), values.numel()
    return 2 * min(stats.chi2.cdf(energy, n), stats.chi2.sf(energy, n)) > LEVEL


def replies(algorithm, state, settings, oracles, memories, number):
    """The replies of sites of these SIZES in one round; their memories are kept in `memories`."""
    told = fedavg.task(state, settings)
    task = Task("run", number, algorithm.__name__, told.vectors, told.numbers)
    for site, oracle in oracles.items():
        local = algorithm.local(task, oracle, memories.get(site, State()), settings)
        memories[site] = local.memory
        yield Reply("run", number, site, SIZES[site], local.vectors, local.numbers)
