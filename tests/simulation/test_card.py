"""Whole runs by what is done otherwise on a card, tried on a CPU.

See tests/per_sample/test_cards.py.

The noise is left as it is on a CPU: then a run is the same run, up to rounding.
"""

import pytest
import torch
from tests.per_sample.taped import recorded

from fedpact.common.params import FlatModel
from fedpact.common.randomness import seeded as noise
from fedpact.data.load import from_arrays
from fedpact.per_sample import passes
from fedpact.plan import Plan
from fedpact.privacy.oracle import Records
from fedpact.simulation.simulate import simulate

# Sums of gradients and losses, of a batch, and of differences; the others are of these kinds.
KINDS = ("fedfdp", "ldp_fedsgd", "fedproxvr")
OTHERS = ("fedavg", "scaffold", "ali_dpfl")


@pytest.mark.parametrize(
    "algorithm", [*KINDS, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
)
def test_a_run_is_the_same_run(algorithm, request, tmp_path, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(120, 4, generator=generator), torch.arange(120) % 3
    plan = Plan.parse(
        {
            "algorithm": algorithm,
            "settings": {"iterations": 12} if algorithm == "ali_dpfl" else {},
            "rounds": 2,
            "sites": 2,
            "privacy": {"accountant": "rdp"},
        }
    )
    here = simulate(plan, tmp_path / "here", data=from_arrays(x, y))
    request.getfixturevalue("card")
    monkeypatch.setattr(noise, "on_cpu", lambda _: True)
    there = [simulate(plan, tmp_path / "there", data=from_arrays(x, y))]
    monkeypatch.setattr(passes, "recorder_for", lambda _: recorded)
    there.append(simulate(plan, tmp_path / "captured", data=from_arrays(x, y)))
    a, *others = (FlatModel(result.model).vector for result in (here, *there))
    for b in others:
        assert float((a - b).norm()) <= 1e-5 * float(a.norm())
    for result in there:
        assert [r.epsilon for r in here.records] == [r.epsilon for r in result.records]


def test_records_are_moved_to_the_device_once(tmp_path, monkeypatch):
    moved = []

    def to(self, device):
        moved.append(device)
        return before(self, device)

    before = Records.to
    monkeypatch.setattr(Records, "to", to)
    x, y = torch.randn(120, 4), torch.arange(120) % 3
    simulate(Plan.parse({"rounds": 3, "sites": 3}), tmp_path / "run", data=from_arrays(x, y))
    assert len(moved) == 3  # one a site, however many rounds


@pytest.mark.parametrize("mode", ["none", "per_sample", "batch"])
def test_a_run_in_bf16_is_nearly_the_same_run(mode, tmp_path):
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(120, 4, generator=generator), torch.arange(120) % 3
    kind = {"algorithm": "ldp_fedsgd"} if mode == "batch" else {"privacy": {"mode": mode}}
    # A coarse grid would round the two to the same model.
    kind["compression"] = {"kind": "none"}
    runs = [
        simulate(
            Plan.parse({"rounds": 3, "sites": 3, "run": {"precision": precision}, **kind}),
            tmp_path / precision,
            data=from_arrays(x, y),
        )
        for precision in ("float32", "bf16")
    ]
    a, b = (FlatModel(run.model).vector for run in runs)
    assert 0 < float((a - b).norm()) <= 2**-6 * float(a.norm())
    assert [r.epsilon for r in runs[0].records] == [r.epsilon for r in runs[1].records]
