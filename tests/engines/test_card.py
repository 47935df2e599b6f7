"""Whole runs by what is done otherwise on a card, tried on a CPU.

See tests/persample/test_cards.py.

The noise is left as it is on a CPU: then a run is the same run, up to rounding.
"""

import pytest
import torch

from fedpact.data.datasets import from_arrays
from fedpact.draws import seeded as noise
from fedpact.engines import stacked as seats
from fedpact.engines.simulation import simulate
from fedpact.params import FlatModel
from fedpact.plan import Plan

ALGORITHMS = {
    "fedavg": {},
    "fedprox": {},
    "scaffold": {},
    "feddyn": {},
    "qffl": {},
    "ldp_fedsgd": {},
    "fedproxvr": {},
    "fedfdp": {},
    "ali_dpfl": {"iterations": 12},
}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_run_is_the_same_run(algorithm, request, tmp_path, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(120, 4, generator=generator), torch.arange(120) % 3
    plan = Plan.parse(
        {
            "algorithm": algorithm,
            "settings": ALGORITHMS[algorithm],
            "rounds": 3,
            "sites": 3,
        }
    )
    here = simulate(plan, tmp_path / "here", data=from_arrays(x, y))
    request.getfixturevalue("card")
    for module in (noise, seats):
        monkeypatch.setattr(module, "at_hand", lambda _: True)
    there = simulate(plan, tmp_path / "there", data=from_arrays(x, y))
    a, b = (FlatModel(result.model).vector for result in (here, there))
    assert float((a - b).norm()) <= 1e-5 * float(a.norm())
    assert [r.epsilon for r in here.records] == [r.epsilon for r in there.records]
