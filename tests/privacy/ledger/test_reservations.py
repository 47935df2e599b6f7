"""A run's promise, and one that stands beside it for other records of the same site."""

import pytest

from fedpact.common.errors import PolicyRefused
from fedpact.privacy.accounting.accountant import Budget, SampledGaussian
from fedpact.privacy.ledger.ledger import Ledger
from fedpact.privacy.ledger.receipt import receipt
from fedpact.privacy.ledger.reservations import CompanionReservation

EVENT = SampledGaussian(0.1, 2.25)


def test_the_larger_of_training_and_evaluation_counts(tmp_path):
    """A record is one of those trained on or one of those held out, and bears one of both."""
    path, beside = tmp_path / "ledger.jsonl", CompanionReservation("run", "split")
    with Ledger(path, "a", hypothetical=True) as ledger:
        ledger.reserve("run", Budget(2.0, 1e-5), {EVENT: 1})
        ledger.reserve("run/evaluation", Budget(3.0, 1e-6), {EVENT: 1}, beside=beside)
        ledger.reserve("other", Budget(1.0, 1e-5), {EVENT: 1})
        assert ledger.total() == (4.0, 2e-5)
        assert ledger.total(without="run") == (1.0, 1e-5)
        # Told apart in another way, a record could have been both.
        again = CompanionReservation("run", "another split")
        with pytest.raises(PolicyRefused, match="other terms"):
            ledger.reserve("run/evaluation", Budget(3.0, 1e-6), {EVENT: 1}, beside=again)
        # Nor do two stand there, of which the same record could bear both.
        for another in (beside, again):
            with pytest.raises(PolicyRefused, match="beside 'run/evaluation'"):
                ledger.reserve("more", Budget(3.0, 1e-6), {EVENT: 1}, beside=another)
    with Ledger(path, "a", hypothetical=True) as ledger:
        ledger.reserve("run/evaluation", Budget(3.0, 1e-6), {EVENT: 1}, beside=beside)
        assert ledger.total() == (4.0, 2e-5)
    found = receipt(path)
    assert (found["epsilon_reserved"], found["delta_reserved"]) == (4.0, 2e-5)
    assert {name: run["beside"] for name, run in found["runs"].items()} == {
        "run": None,
        "run/evaluation": "run",
        "other": None,
    }
