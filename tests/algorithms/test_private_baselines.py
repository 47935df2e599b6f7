"""NbAFL, Adap DP-FL and PEDPFL: what each does beside its parent, by hand on one site."""

from types import MappingProxyType, SimpleNamespace

import pytest
import torch

from fedpact import algorithms
from fedpact.algorithms.wrappers.base import Method
from fedpact.common.messages import State, Task
from fedpact.privacy.batches import clip_for
from fedpact.studies.conformance import HandFederation

RATE = 0.1


def site(name, memory=State(), rate=1.0, counts=MappingProxyType({"a": 12}), **settings):  # noqa: B008
    """One site's reply to the task w, without noise and with all records in each batch."""
    made = algorithms.load(name).Settings(**{"learning_rate": RATE, **settings})
    bed = HandFederation(private=True, sigma=0.0, rate=rate, counts=counts, sizes={"a": 12.0})
    method = Method(name, made)
    task = Task("run", 1, name, {"w": bed.w}, {})
    return bed, method.local(task, bed.oracle("a", task, method.facts.channels), memory)


def clipped(bed, w, times=1.0):
    held = bed.records["a"]
    clip = times * clip_for(bed.clip, len(held.y))
    bed.model.load(w)
    rows = bed.kernel.alone(held.x, held.y)
    c = (clip / rows.norm(dim=1)).clamp_max(1)
    return (c[:, None] * rows).sum(0) / len(rows)


@pytest.mark.parametrize("clip", [0.3, 2.0, 50.0])
def test_nbafl_shortens_a_sites_model(clip):
    """In its own direction, to the bound, and only where it is longer."""
    local = site("nbafl", model_clip=clip, local_steps=3)[1]
    free = site("fedprox", local_steps=3)[1].vectors["w"]
    expected = free * min(1.0, clip / float(free.norm()))
    torch.testing.assert_close(local.vectors["w"], expected, rtol=1e-12, atol=0)


def test_adap_dpfl_follows_the_length_of_its_gradients():
    """C_2 = C (L_2/L_1)^α, by lengths that are known."""
    bed, first = site("adap_dpfl")
    length = float(clipped(bed, bed.w).norm())
    assert first.memory.numbers["first"] == pytest.approx(length, rel=1e-9)
    assert first.memory.numbers["clip"] == 1.0
    memory = State(numbers={"clip": 0.8, "first": 2 * length})
    bed, later = site("adap_dpfl", memory, clip_power=0.5)
    found = clipped(bed, bed.w, 0.8)
    torch.testing.assert_close(later.vectors["w"], bed.w - RATE * found, rtol=0, atol=1e-9)
    expected = (float(found.norm()) / (2 * length)) ** 0.5
    assert later.memory.numbers["clip"] == pytest.approx(expected, rel=1e-9)


def test_adap_dpfl_leaves_the_noise_out_of_the_length():
    """A step's square has d v of noise: (3² + 4² - 2 · 8)^½ = 3."""
    g = torch.tensor([3.0, 4.0], dtype=torch.float64)
    batch = SimpleNamespace(gradient=lambda w, weighting: g.clone())
    oracle = SimpleNamespace(batches=lambda count, *_: iter([batch] * count), noise_variance=8.0)
    algorithm = algorithms.load("adap_dpfl")
    task = Task("run", 1, "adap_dpfl", {"w": torch.zeros(2, dtype=torch.float64)}, {})
    local = algorithm.local(task, oracle, State(), algorithm.Settings(local_steps=1))
    assert local.memory.numbers["first"] == pytest.approx(3.0, rel=1e-12)


@pytest.mark.parametrize("power", [1.0, 2.0**100])
@pytest.mark.parametrize(("length", "clip"), [(1e9, 0.1), (1e-9, 2.0), (0.0, 1.0)])
def test_adap_dpfl_keeps_its_clip_within_bounds(length, clip, power):
    memory = State(numbers={"clip": 1.0, "first": length})
    assert site("adap_dpfl", memory, clip_power=power)[1].memory.numbers["clip"] == clip


def test_adap_dpfl_measures_by_its_first_length_above_0():
    """A first round whose noise was longer than its gradients must not be the measure for good."""
    memory = State(numbers={"clip": 1.0, "first": 0.0})
    bed, local = site("adap_dpfl", memory)
    length = float(clipped(bed, bed.w).norm())
    assert local.memory.numbers == pytest.approx({"clip": 1.0, "first": length}, rel=1e-9)


@pytest.mark.parametrize("held", [{}, {"clip": 0.8, "first": 2.0}])
def test_adap_dpfl_keeps_its_clip_where_it_measures_nothing(held):
    """A length of 0, here of no records: what noise hides is not short."""
    local = site("adap_dpfl", State(numbers=held), counts={"a": 0})[1]
    assert local.memory.numbers == (held or {"clip": 1.0, "first": 0.0})


def test_pedpfl_takes_the_second_gradient_uphill():
    bed, local = site("pedpfl", local_steps=2, perturbation=0.3)
    g = clipped(bed, bed.w)
    w = bed.w - RATE * g
    expected = w - RATE * clipped(bed, w + 0.3 * g / g.norm())
    torch.testing.assert_close(local.vectors["w"], expected, rtol=0, atol=1e-9)
    assert float((expected - (w - RATE * clipped(bed, w))).norm()) > 1e-3


def test_pedpfl_reads_no_number_in_its_steps():
    """The meta device has none, and a GPU would have to be waited for."""
    w = torch.ones(4, device="meta")
    batch = SimpleNamespace(gradient=lambda at: at + 1)
    oracle = SimpleNamespace(batches=lambda count, _: [batch] * count)
    method = Method("pedpfl", algorithms.load("pedpfl").Settings(local_steps=3))
    local = method.local(Task("run", 1, "pedpfl", {"w": w}, {}), oracle, State())
    assert local.vectors["w"].device == w.device


@pytest.mark.parametrize("rho", [0.0, 0.3])
def test_pedpfl_stays_where_nothing_leads_uphill(rho):
    """A gradient of zeros has no direction, and 0/0 is no number."""
    batch = SimpleNamespace(gradient=torch.zeros_like)
    oracle = SimpleNamespace(batches=lambda count, _: [batch] * count)
    method = Method("pedpfl", algorithms.load("pedpfl").Settings(perturbation=rho))
    w = torch.ones(4)
    local = method.local(Task("run", 1, "pedpfl", {"w": w}, {}), oracle, State())
    assert torch.equal(local.vectors["w"], w)
