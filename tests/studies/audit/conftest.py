"""A target that gives itself away fast, and the four mistakes an audit has to find."""

import dataclasses
import math
from types import SimpleNamespace

import pytest

from fedpact.plan import Plan
from fedpact.simulation.setup import SimulationSetup
from fedpact.studies.audit.target import Target, private_oracle


def target(*overrides):
    """One release of every record, at a large ε: few runs tell what the noise hides."""
    quick = ["rounds=1", "sampling_rate=1.0", "privacy.epsilon=6.0"]
    return Target.of(SimulationSetup.of(Plan.read(None, [*quick, *overrides])))


def scaled_noise(factor, make=private_oracle):
    """An oracle that adds so many times the noise."""

    def scaled(records, kernel, terms, draws):
        sigmas = {channel: factor * sigma for channel, sigma in terms.sigmas.items()}
        return make(records, kernel, dataclasses.replace(terms, sigmas=sigmas), draws)

    return scaled


class Kernel:
    """A kernel that goes wrong in its clipped sum and nowhere else."""

    def __init__(self, kernel):
        self.inner, self.model, self.losses = kernel, kernel.model, kernel.losses
        self.seed = kernel.seed


class Unclipped(Kernel):
    def clipped_sum(self, x, y, clip, weights=None, most=None, shares=None, layout=None):
        return self.inner.clipped_sum(x, y, math.inf, weights)


class Constant(Kernel):
    """Clips to one length, whatever the terms of the round say."""

    def __init__(self, kernel, longest):
        super().__init__(kernel)
        self.longest = longest

    def clipped_sum(self, x, y, clip, weights=None, most=None, shares=None, layout=None):
        return self.inner.clipped_sum(x, y, self.longest, weights)


class Unclamped(Kernel):
    """FedFDP's contribution as printed: min(1 + λ (ℓ - F), C/‖g‖) g, with no lower bound."""

    def clipped_sum(self, x, y, clip, weights=None, most=None, shares=None, layout=None):
        if weights is None:
            return self.inner.clipped_sum(x, y, clip)

        def below_zero(losses):
            return -(1 + weights.lam * (losses - weights.reference))

        # The kernel takes no negative weights; these records are added with their sign turned.
        return self.inner.clipped_sum(x, y, clip, weights) - self.inner.clipped_sum(
            x, y, math.inf, below_zero
        )


class Realised:
    """Divides by the realised size of the batch, as FedFDP's Algorithm 2 does."""

    def __init__(self, inner):
        self.inner = inner
        self.batch_size, self.noise_variance = inner.batch_size, inner.noise_variance
        self.sampling_rate = inner.sampling_rate

    def batches(self, count, *channels):
        for batch in self.inner.batches(count, *channels):
            size = max(1, len(batch._y))
            batch.gradient = lambda *query, ask=batch.gradient, size=size: (
                ask(*query) * (self.batch_size / size)
            )
            yield batch


BROKEN = {
    "noise halved": scaled_noise(0.5),
    "clip not applied": lambda r, k, t, d: private_oracle(r, Unclipped(k), t, d),
    "weight not clamped": lambda r, k, t, d: private_oracle(r, Unclamped(k), t, d),
    "realised batch size": lambda r, k, t, d: Realised(private_oracle(r, k, t, d)),
}


@pytest.fixture(scope="session")
def audited():
    return SimpleNamespace(target=target, broken=BROKEN, Constant=Constant)
