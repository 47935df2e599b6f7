"""AFL's weights of sites over rounds in which some are missing."""

import math

import pytest
import torch

from fedpact.algorithms.afl import Settings, update
from fedpact.common.messages import Reply, State

SIZES = {"a": 30.0, "b": 10.0, "c": 20.0}
LOSSES = {"a": 2.0, "b": 3.0, "c": 0.5}


def test_a_missing_site_keeps_its_weight():
    """λ_i ← λ_i exp(γ F_i) over the sites that reply, whose λ_i add up to what they did; c comes
    late, with p_c. The models are unit vectors, so w has the weights of a round."""
    rate, p = 0.3, {site: size / sum(SIZES.values()) for site, size in SIZES.items()}
    models = dict(zip(SIZES, torch.eye(3).double(), strict=True))
    state, lam = State({"w": torch.zeros(3).double()}), dict(p)
    for number, arrive in enumerate(["ab", "ab", "a", "abc", "bc", "c", "abc"]):
        total = sum(lam[site] for site in arrive)
        expected = [lam[site] / total if site in arrive else 0.0 for site in SIZES]
        replies = [
            Reply("run", number, site, SIZES[site], {"w": models[site]}, {"loss": LOSSES[site]})
            for site in arrive
        ]
        state = update(state, iter(replies), Settings(mixture_rate=rate))
        assert state.vectors["w"].tolist() == pytest.approx(expected, rel=1e-12)
        stepped = {site: lam[site] * math.exp(rate * LOSSES[site]) for site in arrive}
        lam |= {s: total * after / sum(stepped.values()) for s, after in stepped.items()}
