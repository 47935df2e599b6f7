"""The same code on a graphics card: run where torch finds one, else skipped with the reason."""

import copy
import math

import pytest
import torch
from tests.per_sample.test_capture import MODELS

from fedpact.common.losses import cross_entropy
from fedpact.common.params import FlatModel
from fedpact.common.randomness.secure import SecureDraws
from fedpact.common.randomness.seeded import SeededDraws
from fedpact.data.load import from_arrays
from fedpact.models import zoo
from fedpact.per_sample.kernel import PerSampleKernel
from fedpact.per_sample.layout import Placement
from fedpact.plan import Plan
from fedpact.privacy import batches
from fedpact.privacy.accounting.accountant import Budget
from fedpact.privacy.ledger.hash_chain import read_entries
from fedpact.privacy.oracle import PrivateOracle, Records
from fedpact.privacy.terms import Terms
from fedpact.simulation.simulate import simulate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device here"),
]
CARD = "cuda"


def said(caplog):
    """What fedpact has logged; torch's tracer logs each of its own steps."""
    return [record for record in caplog.records if record.name == "fedpact"]


@pytest.mark.parametrize("way", ["graph", "records"])
@pytest.mark.parametrize("name", ["logistic", "mlp", "cnn", "cnn_padded"])
def test_the_kernels_sums_are_those_of_the_cpu(reference, name, way):
    shape = (1, 28, 28)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(17, *shape, generator=generator, dtype=torch.float64)
    y = torch.randint(10, (17,), generator=generator)
    module = getattr(zoo, name)(shape, 10).double()
    here = PerSampleKernel(FlatModel(module), cross_entropy)
    expected = [here.clipped_sum(x, y, clip) for clip in (0.1, math.inf)]
    there = reference.forced(way, module.to(CARD), cross_entropy)
    for clip, total in zip((0.1, math.inf), expected, strict=True):
        found = there.clipped_sum(x.to(CARD), y.to(CARD), clip)
        assert found.device.type == CARD
        assert float((found.cpu() - total).norm()) <= 1e-10 * float(total.norm())


def test_gpu_noise_has_its_variance_and_repeats():
    """A million numbers: a right σ is rejected once in 10^6, one 1 % off passes less often."""
    total = torch.zeros(10**6, device=CARD)
    draws = SeededDraws(0, "site", 1)
    noise = draws.add_noise(total.clone(), 2.0, 3.0, 0, "gradient")
    assert noise.device.type == CARD
    assert torch.equal(noise, draws.add_noise(total.clone(), 2.0, 3.0, 0, "gradient"))
    assert not torch.equal(noise, draws.add_noise(total.clone(), 2.0, 3.0, 1, "gradient"))
    # The mean square of n normal numbers has the relative spread sqrt(2/n); 4.9 of them here.
    for sigma, good in ((6.0, True), (6.06, False), (5.94, False)):
        ratio = float(noise.double().square().mean()) / sigma**2
        assert (abs(ratio - 1) < 4.9 * math.sqrt(2 / len(total))) == good


@pytest.fixture
def nobody_waits(monkeypatch):
    """Whoever waits for the card gets an exception, which is not taken for a record's fault."""

    def refused(take, count, error):
        raise error

    monkeypatch.setattr(batches, "_good", refused)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode(before)


@pytest.mark.parametrize("way", ["any", "graph"])
@pytest.mark.parametrize("name", ["logistic", "mlp", "cnn", "cnn_padded"])
@pytest.mark.parametrize("secure", [False, True])
def test_a_step_waits_for_nothing(reference, name, secure, way, request, caplog):
    shape = (1, 28, 28)
    model = FlatModel(getattr(zoo, name)(shape, 10).to(CARD))
    records = Records(torch.rand(40, *shape, device=CARD), torch.arange(40, device=CARD) % 10)
    terms = Terms("site", 20.0, 0.5, 0.5, {"gradient": 1.0}, 10**6, Budget(1.0, 1e-5), "best")
    draws = SecureDraws() if secure else SeededDraws(0, "site", 1)
    kernel = PerSampleKernel(model, cross_entropy)
    if way == "graph":
        kernel = reference.forced(way, model.module, cross_entropy)
    oracle = PrivateOracle(records, kernel, terms, draws, lambda *_: None, placement="scattered")
    w = model.vector.clone()
    # What is made once, as the capture, may wait.
    for batch in oracle.batches(1, "gradient"):
        w -= 0.1 * batch.gradient(w)
    request.getfixturevalue("nobody_waits")
    for batch in oracle.batches(2, "gradient"):
        w -= 0.1 * batch.gradient(w)
    assert not said(caplog)  # of what cannot be captured


@pytest.mark.parametrize("name", MODELS)
def test_captured_sums_are_those_of_the_cpu(name, caplog):
    make, shape = MODELS[name]
    module = make().double()
    x, y = torch.randn(40, *shape, dtype=torch.float64), torch.arange(40) % 3
    here = PerSampleKernel(FlatModel(copy.deepcopy(module)), cross_entropy)
    there = PerSampleKernel(FlatModel(module.to(CARD)), cross_entropy)
    for step in range(3):
        some = slice(step, 20 + 5 * step)
        layout = Placement(length=16)
        expected = here.clipped_sum(x[some], y[some], 0.1 * (step + 1), layout=layout)
        x_there, y_there = x[some].to(CARD), y[some].to(CARD)
        found = there.clipped_sum(x_there, y_there, 0.1 * (step + 1), layout=layout)
        assert float((found.cpu() - expected).norm()) <= 1e-8 * float(expected.norm())
        here.model.vector -= 0.1 * expected
        there.model.vector -= 0.1 * found
    assert not said(caplog)


def test_a_pass_is_as_long_as_fits():
    module = zoo.cnn((1, 28, 28), 10).to(CARD)
    kernel = PerSampleKernel(FlatModel(module), cross_entropy)
    x, y = torch.rand(4, 1, 28, 28, device=CARD), torch.arange(4, device=CARD)
    length = kernel.scattered_length(x, y, 1000)
    assert length >= 64
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kernel.clipped_sum(x, y, 0.5, layout=Placement(length=length))
    taken = torch.cuda.max_memory_allocated() - before
    assert taken < torch.cuda.mem_get_info()[1] / 2


@pytest.mark.parametrize("way", ["graph", "records"])
def test_records_that_are_not_finite_add_nothing(reference, way):
    shape = (1, 28, 28)
    kernel = reference.forced(way, zoo.cnn(shape, 10).to(CARD), cross_entropy)
    x, y = torch.rand(9, *shape, device=CARD), torch.arange(9, device=CARD)
    others = torch.tensor([0, 2, 3, 5, 6, 7], device=CARD)
    expected = kernel.clipped_sum(x[others], y[others], 0.5)
    x[1], x[4, 0, 3, 3], x[8] = math.nan, math.inf, 1e30
    found = kernel.clipped_sum(x, y, 0.5)
    assert float((found - expected).norm()) <= 1e-4 * 0.5 * 6


@pytest.mark.parametrize("mode", ["none", "per_sample"])
def test_a_run_on_the_card_trains_and_charges_as_on_the_cpu(mode, tmp_path):
    generator = torch.Generator().manual_seed(0)
    data = from_arrays(
        torch.randn(90, 4, generator=generator), torch.randint(3, (90,), generator=generator)
    )
    results = [
        simulate(
            Plan.parse(
                {
                    "rounds": 3,
                    "sites": 3,
                    "privacy": {"mode": mode},
                    "run": {"device": device},
                }
            ),
            tmp_path / device,
            data=data,
        )
        for device in ("cpu", CARD)
    ]
    here, there = (FlatModel(result.model).vector for result in results)
    if mode == "none":  # without noise, which is a card's own, it is the same training
        assert float((here - there).norm()) <= 1e-4 * float(here.norm())
    charges = [
        [(e["q"], e["sigma"], e["count"]) for e in read_entries(path) if e["kind"] == "charge"]
        for result in results
        for path in sorted(result.folder.rglob("ledger.jsonl"))
    ]
    assert charges[: len(charges) // 2] == charges[len(charges) // 2 :]
