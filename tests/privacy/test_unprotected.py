"""Exact numbers leave a site only where the run says of itself that it protects nobody."""

import math

import pytest
import torch
from torch import nn

from fedpact.common.errors import PolicyRefused
from fedpact.common.losses import cross_entropy
from fedpact.common.params import FlatModel
from fedpact.common.randomness.seeded import SeededDraws
from fedpact.per_sample.kernel import PerSampleKernel, PlainKernel
from fedpact.privacy.accounting.accountant import Budget
from fedpact.privacy.ledger.ledger import Ledger
from fedpact.privacy.ledger.receipt import receipt
from fedpact.privacy.oracle import Charge, PlainOracle, PrivateOracle, Records
from fedpact.privacy.terms import Terms

COUNT = 1100  # more than two slices of the sum
TERMS = Terms("a", float(COUNT), 0.5, 1.0, {"gradient": 5.0}, 3, Budget(2.0, 1e-5), "best")


@pytest.fixture
def model():
    return FlatModel(nn.Linear(3, 3))


@pytest.fixture
def records():
    draws = torch.Generator().manual_seed(0)
    return Records(
        torch.randn(COUNT, 3, generator=draws), torch.randint(3, (COUNT,), generator=draws)
    )


@pytest.fixture
def ledger(tmp_path):
    with Ledger(tmp_path / "ledger.jsonl", "a", hypothetical=True) as opened:
        opened.reserve("run", TERMS.budget, TERMS.history(TERMS.steps))
        yield opened


def private(model, records, ledger, exact):
    kernel, charge = PerSampleKernel(model, cross_entropy), Charge(ledger, "run", 1, "task")
    return PrivateOracle(records, kernel, TERMS, SeededDraws(0), charge, exact=exact)


def test_it_is_the_mean_over_all_records(model, records):
    w = torch.randn(model.size, generator=torch.Generator().manual_seed(1))
    oracle = PlainOracle(records, PlainKernel(model, cross_entropy), 0.1, 9.0, SeededDraws(0))
    loss, gradient = oracle.unprotected(w)
    matrix, bias = w[:9].view(3, 3).requires_grad_(), w[9:].requires_grad_()
    mean = nn.functional.cross_entropy(records.x @ matrix.T + bias, records.y)
    mean.backward()
    assert loss == pytest.approx(mean.item(), rel=1e-5)
    expected = torch.cat([matrix.grad.reshape(-1), bias.grad])
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6)


def test_without_records_it_is_zero(model):
    nothing = Records(torch.zeros(0, 3), torch.zeros(0, dtype=torch.long))
    oracle = PlainOracle(nothing, PlainKernel(model, cross_entropy), 0.1, 9.0, SeededDraws(0))
    loss, gradient = oracle.unprotected(model.vector)
    assert loss == 0
    assert not gradient.any()


def test_a_private_run_has_no_such_door(model, records, ledger):
    with pytest.raises(PolicyRefused, match="this run is private"):
        private(model, records, ledger, None).unprotected(model.vector)
    assert ledger.total() == (2.0, 1e-5)


def test_the_ledger_says_so_first_and_for_ever(model, records, ledger, tmp_path):
    private(model, records, ledger, PlainKernel(model, cross_entropy)).unprotected(model.vector)
    assert ledger.total() == (math.inf, 1e-5)
    ledger.close()
    told = receipt(ledger.path)
    assert told["epsilon_reserved"] == math.inf
    assert told["runs"]["run"]["epsilon_spent"] == math.inf
    with Ledger(ledger.path, "a", hypothetical=True) as again:
        assert again.total() == (math.inf, 1e-5)


def test_a_deployments_ledger_lets_none_out(tmp_path):
    with (
        Ledger(tmp_path / "real.jsonl", "a", hypothetical=False) as ledger,
        pytest.raises(PolicyRefused, match="exact numbers"),
    ):
        ledger.expose("run", 1)
