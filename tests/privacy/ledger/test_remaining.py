"""What a ledger leaves for one more run: sums within the whole, sequences only if fixed."""

import json
import math

import pytest
from typer.testing import CliRunner

from fedpact.cli.main import app
from fedpact.common.errors import BudgetExhausted, InputError, LedgerError
from fedpact.privacy.accounting.accountant import Budget, SampledGaussian, epsilon
from fedpact.privacy.ledger.ledger import Ledger
from fedpact.privacy.ledger.receipt import receipt, remaining

EVENTS = {SampledGaussian(0.1, 5.0): 100, SampledGaussian(1.0, 10.0): 1}
OTHER = {SampledGaussian(0.1, 5.0): 50, SampledGaussian(0.02, 1.6): 200}
WHOLE = Budget(4.0, 5e-5)


@pytest.fixture
def path(tmp_path):
    """Two runs of fixed events, of which the second has spent nothing yet."""
    where = tmp_path / "site.ledger.jsonl"
    with Ledger(where, "site", hypothetical=False) as ledger:
        ledger.reserve("first", Budget(1.3, 1e-5), EVENTS)
        ledger.charge(
            "first",
            "task",
            SampledGaussian(0.1, 5.0),
            30,
            purpose=("gradient",),
            round_number=1,
        )
        ledger.reserve("second", Budget(1.1, 1e-5), OTHER)
    return where


def test_a_receipt_lists_each_reservation(path):
    """Whoever has the receipt finds every ε again from the events of its own run."""
    for name, planned, spent in (("first", EVENTS, 30), ("second", OTHER, 0)):
        run = receipt(path)["runs"][name]
        lines = {SampledGaussian(e["q"], e["sigma"]): e for e in run["events"]}
        assert {event: line["reserved"] for event, line in lines.items()} == planned
        assert sum(line["spent"] for line in lines.values()) == spent
        assert epsilon(planned, run["delta"]) <= run["epsilon_reserved"]
        counted = {event: line["spent"] for event, line in lines.items()}
        assert epsilon(counted, run["delta"]) == run["epsilon_spent"]


def account(path, *arguments):
    whole = ("--epsilon", str(WHOLE.epsilon), "--delta", str(WHOLE.delta))
    result = CliRunner().invoke(app, ["account", "--ledger", str(path), *whole, *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.stdout


def test_separate_reservations_add_up_to_the_whole(path):
    left = remaining(path, WHOLE)
    assert (left.site, left.runs, left.spent) == ("site", 2, {})
    assert left.budget.epsilon + math.fsum([1.3, 1.1]) <= WHOLE.epsilon
    assert left.budget.epsilon == pytest.approx(1.6)
    assert left.budget.delta + 2e-5 <= WHOLE.delta
    assert left.budget.delta == pytest.approx(3e-5)


@pytest.mark.parametrize("whole", [(2.4, 5e-5), (2.0, 5e-5), (4.0, 2e-5), (4.0, 1e-6)])
def test_an_empty_rest_has_no_answer(path, whole):
    with pytest.raises(BudgetExhausted, match=r"\(2.4, 2e-05\) for 2 runs, add/remove one record"):
        remaining(path, Budget(*whole))


def test_joint_pricing_counts_reserved_not_spent_events(path):
    left = remaining(path, WHOLE, joint=True)
    assert left.budget == WHOLE
    assert left.spent == {
        SampledGaussian(0.1, 5.0): 150,
        SampledGaussian(1.0, 10.0): 1,
        SampledGaussian(0.02, 1.6): 200,
    }


def test_an_altered_or_invalid_ledger_is_refused(path, tmp_path):
    with pytest.raises(LedgerError):
        remaining(tmp_path / "nowhere", WHOLE)
    path.write_text(path.read_text().replace("1.3", "0.3"))
    with pytest.raises(LedgerError, match="altered"):
        remaining(path, WHOLE)


@pytest.mark.parametrize(
    ("given", "solved", "joint"),
    [
        (("--q", "0.1", "--steps", "100"), "sigma", True),
        (("--q", "0.1", "--sigma", "4"), "steps", False),
        (("--sigma", "4", "--steps", "100"), "q", True),
    ],
)
def test_one_more_run_keeps_the_whole_budget_and_fills_it(path, given, solved, joint):
    said = json.loads(account(path, *given, "--json", *(["--joint"] if joint else [])))
    assert said["solved_for"] == solved
    assert said["ledger"]["combined"] == ("joint" if joint else "apart")
    event = SampledGaussian(said["q"], said["sigma"])
    if joint:
        history = remaining(path, WHOLE, joint=True).spent
        # The new event may be one of the old ones.
        history = {**history, event: history.get(event, 0) + said["steps"]}
        cost, limit = epsilon(history, WHOLE.delta), WHOLE.epsilon
    else:
        limit = remaining(path, WHOLE).budget.epsilon
        cost = epsilon({event: said["steps"]}, remaining(path, WHOLE).budget.delta)
    assert cost == said["epsilon"]
    assert 0.98 * limit < cost <= limit


def test_one_sequence_needs_less_noise_than_sums(path):
    sigma = {
        way: json.loads(account(path, "--q", "0.1", "--steps", "100", "--json", *way))["sigma"]
        for way in ((), ("--joint",))
    }
    assert sigma["--joint",] < sigma[()]


def test_the_text_says_on_what_it_rests(path):
    apart = " ".join(account(path, "--q", "0.1", "--steps", "100").split())
    assert "the 2 earlier runs of site site reserved, (ε, δ) = (2.4, 2e-05)" in apart
    joint = " ".join(account(path, "--q", "0.1", "--steps", "100", "--joint").split())
    assert "if no setting of the new run depends on what they released" in joint


def test_half_a_question_is_refused(path):
    without = ["account", "--ledger", str(path), "--q", "0.1", "--steps", "9", "--sigma", "1"]
    assert isinstance(CliRunner().invoke(app, without).exception, InputError)
    alone = ["account", "--joint", "--q", "0.1", "--steps", "9", "--sigma", "1"]
    assert isinstance(CliRunner().invoke(app, alone).exception, InputError)
