"""A whole private step on a device whose numbers the host cannot read, tried without such a device.

Tensors on torch's meta device have a shape and no numbers, so whatever reads one raises, as does a
shape that follows from numbers, a boolean mask, and a copy to the CPU. On a GPU each of these would
make the host wait for all that it has queued.
"""

import pytest
import torch
from tests.per_sample.attacked import MODELS, made, records

from fedpact.common.losses import cross_entropy
from fedpact.common.params import FlatModel
from fedpact.common.randomness.secure import SecureDraws
from fedpact.per_sample import passes
from fedpact.per_sample.kernel import PerSampleKernel
from fedpact.per_sample.tracing import export
from fedpact.privacy import batches
from fedpact.privacy.accounting.accountant import Budget
from fedpact.privacy.accounting.shared_noise import SHARE_DEVIATION
from fedpact.privacy.oracle import UNIFORM, Fair, PrivateOracle, Records, Terms

META = torch.device("meta")

READ = (RuntimeError, TypeError)
"""What torch raises where a number is asked for that is not there."""


@pytest.fixture(autouse=True)
def nothing_is_caught(monkeypatch):
    """Let what a step raises through, in place of taking it for a record's fault."""

    def refused(take, count, error):
        raise error

    monkeypatch.setattr(batches, "_good", refused)
    monkeypatch.setattr(passes, "slots_that_fit", lambda run, device: 64)
    # Traces are moved to the device here, and other tests must not find those.
    monkeypatch.setattr(export, "_traces", {})


def on_meta(name):
    """A kernel that was traced on the CPU, and its model moved; records x, y [20, ...]."""
    module, (x, y) = made(name), records(name, 20, 1)
    model = FlatModel(module)
    kernel = PerSampleKernel(model, cross_entropy)
    assert kernel.way(x, y) == MODELS[name][2]
    for traced in kernel._passes._ways.values():
        for node in traced._program.nodes:
            if "device" in node.kwargs:  # zeros to begin with, as a recurrence has
                node.update_kwarg("device", META)
        constants = traced._program._constants
        constants.update({name: value.to(META) for name, value in constants.items()})
    model.__init__(module.to(META))
    kernel = moved_kernel(kernel, model)
    return kernel, x.to(META), y.to(META)


def moved_kernel(kernel, model):
    moved = PerSampleKernel(model, cross_entropy)
    # The form of the records is the same, so what was traced of them is found.
    moved._passes._ways = {
        (moved._passes.state(), *key[1:]): way for key, way in kernel._passes._ways.items()
    }
    return moved


def step(kernel, x, y, channel="gradient", persons=None, weighting=UNIFORM, **terms):
    sigmas, budget = {channel: 1.0}, Budget(1.0, 1e-5)
    terms = Terms("site", 20.0, 0.5, 0.5, sigmas, 10**6, budget, "best", **terms)
    records = Records(x, y, persons=persons)
    oracle = PrivateOracle(
        records, kernel, terms, SecureDraws(), lambda *_: None, placement="scattered"
    )
    w = kernel.model.vector.clone()
    for batch in oracle.batches(2, channel):
        if channel == "gradient":
            w -= 0.1 * batch.gradient(w, weighting)
        else:
            w -= 0.1 * batch.difference(w, w + 1, 0.5)
    return w


@pytest.mark.parametrize(
    ("name", "channel"),
    [*((n, "gradient") for n in ("dense", "lstm", "words")), ("pooled", "difference")],
)
def test_a_step_reads_no_number(name, channel):
    kernel, x, y = on_meta(name)
    w = step(kernel, x, y, channel)
    assert w.device == META
    assert w.shape == kernel.model.vector.shape


def test_a_step_of_persons_weights_and_a_grid_reads_no_number():
    kernel, x, y = on_meta("pooled")
    assert step(kernel, x, y, persons=torch.arange(20) // 2).device == META
    assert step(kernel, x, y, weighting=Fair(1.0, 0.5), grid=SHARE_DEVIATION).device == META


def test_a_read_in_the_step_is_found(monkeypatch):
    kernel, x, y = on_meta("pooled")
    once = kernel._passes.gradients

    def looking(*one):
        found = once(*one)
        found.norms.max().item()
        return found

    monkeypatch.setattr(kernel._passes, "gradients", looking)
    with pytest.raises(READ):
        step(kernel, x, y)
