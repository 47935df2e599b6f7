"""Ledgers of an earlier version, with a run under a Rényi filter: read, counted, not gone on with.

ledger/old/filter.jsonl: runs "fixed" (5 events reserved) and "free" (a filter), both for
(2, 1e-5), two events charged to each. filter_torn.jsonl: the same, opened again after a torn line.
"""

import shutil
from pathlib import Path

import pytest

from fedpact.cli import ledger as command
from fedpact.errors import BudgetExhausted, InputError, PolicyRefused
from fedpact.ledger.ledger import Ledger
from fedpact.ledger.receipt import receipt
from fedpact.ledger.remaining import remaining
from fedpact.ledger.reservations import Beside
from fedpact.theory.accounting import Budget, SampledGaussian, epsilon

BUDGET = Budget(2.0, 1e-5)
EVENT = SampledGaussian(0.1, 2.25)
TINY = SampledGaussian(1e-6, 1e3)
OLD = Path(__file__).parent / "old"


@pytest.fixture(params=["filter", "filter_torn"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return Path(shutil.copy(OLD / f"{request.param}.jsonl", tmp_path / "ledger.jsonl"))


def charge(ledger: Ledger, run: str, event: SampledGaussian, count: int = 1) -> None:
    ledger.charge(run, "x", event, count, purpose=("gradient",), round_number=2)


def test_it_is_opened_and_counted(path: Path) -> None:
    torn = "torn" in path.read_text()
    for _ in range(2):
        with Ledger(path, "a", hypothetical=False) as ledger:
            assert ledger.total() == (4.0, 2e-5)
            assert ledger.spent("free") == {EVENT: 2}
            assert ledger.spent("fixed") == {EVENT: 4 if torn else 2}
            assert ledger.last_round("free") == 1


def test_nothing_more_is_charged_under_the_filter_and_the_other_run_goes_on(path: Path) -> None:
    with Ledger(path, "a", hypothetical=False) as ledger:
        length = ledger.length
        for event in (EVENT, TINY):
            with pytest.raises(
                PolicyRefused, match=r"'free'.*filter.*earlier version.*new run name"
            ):
                charge(ledger, "free", event)
        with pytest.raises(PolicyRefused, match="other terms"):
            ledger.reserve("free", BUDGET, {EVENT: 1})
        assert ledger.length == length
        charge(ledger, "fixed", EVENT)
        with pytest.raises(BudgetExhausted):
            charge(ledger, "fixed", EVENT, 3)
        ledger.reserve("next", BUDGET, {EVENT: 1})
        charge(ledger, "next", EVENT)
    with Ledger(path, "a", hypothetical=False) as ledger:
        assert ledger.total() == (6.0, pytest.approx(3e-5))


def test_a_line_that_a_crash_left_under_the_filter_spends_all_of_it(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b'{"number": 9, "kind": "charge", "q": 1.0, "sig')
    assert receipt(path)["runs"]["free"]["epsilon_spent"] == 2.0
    with Ledger(path, "a", hypothetical=False) as ledger:
        assert ledger.total() == (4.0, 2e-5)
    assert receipt(path)["runs"]["free"]["epsilon_spent"] == 2.0


def test_a_receipt_says_which_accounting_was_used(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torn = "torn" in path.read_text()
    runs = receipt(path)["runs"]
    assert {run: said["accounting"] for run, said in runs.items()} == {
        "fixed": "fixed sequence",
        "free": "Rényi filter",
    }
    assert [run["events"][0]["reserved"] for run in runs.values()] == [5, None]
    assert runs["fixed"]["epsilon_spent"] == epsilon({EVENT: 4 if torn else 2}, 1e-5)
    assert runs["free"]["epsilon_spent"] == (2.0 if torn else epsilon({EVENT: 2}, 1e-5))
    command.show_spend(path, as_json=False)
    assert capsys.readouterr().out.count("filter") == 1


def test_it_leaves_what_was_not_reserved_and_is_no_fixed_sequence(path: Path) -> None:
    left = remaining(path, Budget(5.0, 5e-5)).budget
    assert (left.epsilon, left.delta) == (1.0, pytest.approx(3e-5))
    with pytest.raises(InputError, match=r"'free'.*no fixed sequence"):
        remaining(path, Budget(5.0, 5e-5), joint=True)


def test_of_a_run_and_what_stands_beside_it_the_larger_counts(tmp_path: Path) -> None:
    """A record is one of those trained on or one of those held out, and bears one of both."""
    path, beside = tmp_path / "ledger.jsonl", Beside("run", "split")
    with Ledger(path, "a", hypothetical=True) as ledger:
        ledger.reserve("run", Budget(2.0, 1e-5), {EVENT: 1})
        ledger.reserve("run/evaluation", Budget(3.0, 1e-6), {EVENT: 1}, beside=beside)
        ledger.reserve("other", Budget(1.0, 1e-5), {EVENT: 1})
        assert ledger.total() == (4.0, 2e-5)
        assert ledger.total(without="run") == (1.0, 1e-5)
        # Told apart in another way, a record could have been both.
        again = Beside("run", "another split")
        with pytest.raises(PolicyRefused, match="other terms"):
            ledger.reserve("run/evaluation", Budget(3.0, 1e-6), {EVENT: 1}, beside=again)
        # Nor do two stand there, of which the same record could bear both.
        for another in (beside, again):
            with pytest.raises(PolicyRefused, match="as 'run/evaluation' does"):
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
