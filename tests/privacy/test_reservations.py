"""A ledger's reservation by a Rényi filter: what it admits, restores, counts and shows."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dp_accounting
import pytest
from dp_accounting.rdp import RdpAccountant

from fedpact.cli import ledger as command
from fedpact.errors import BudgetExhausted, InputError, PolicyRefused
from fedpact.privacy.ledger import Ledger, read_entries
from fedpact.privacy.receipt import receipt
from fedpact.theory.accounting import Budget, SampledGaussian, max_steps
from fedpact.theory.filters import RenyiFilter, order_for

BUDGET = Budget(2.0, 1e-5)
EVENT = SampledGaussian(0.1, 2.25)
ORDERS = (4.0, 9.0, 20.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


def opened(path: Path, *, hypothetical: bool = False) -> Ledger:
    return Ledger(path, "a", hypothetical=hypothetical)


def charge(ledger: Ledger, event: SampledGaussian, count: int = 1, **other: Any) -> None:
    asked: dict[str, Any] = {"run": "run", "request": "x", "purpose": ("gradient",)}
    asked |= {"round_number": 1} | other
    ledger.charge(event=event, count=count, **asked)


def charged(path: Path) -> list[tuple[SampledGaussian, int]]:
    entries = [e for e in read_entries(path) if e["kind"] == "charge"]
    return [(SampledGaussian(e["q"], e["sigma"]), e["count"]) for e in entries]


def greedy(ledger: Ledger, draw: random.Random, refusals: int = 12) -> None:
    """An adversary that answers every charge with a dearer wish, and every refusal with a cheaper.

    What it asks for depends on what the ledger says was spent, so nothing is fixed in advance.
    """
    sigma = 4.0
    while refusals:
        q = 1.0 if sum(ledger.spent("run").values()) % 3 else draw.choice((0.02, 0.1, 0.5))
        try:
            charge(ledger, SampledGaussian(q, sigma), draw.choice((1, 1, 2, 5)))
            sigma = max(0.5, 0.8 * sigma)
        except BudgetExhausted:
            sigma, refusals = 1.5 * sigma, refusals - 1


@pytest.mark.parametrize("orders", [None, (6.0,), ORDERS])
def test_an_adaptive_adversary_never_exceeds_the_budget(
    path: Path, orders: tuple[float, ...] | None
) -> None:
    for seed in range(4):
        place = path.with_name(f"{seed}.jsonl")
        with opened(place) as ledger:
            ledger.reserve_filter("run", BUDGET, orders)
            greedy(ledger, random.Random(seed))
        accountant = RdpAccountant(
            orders or RenyiFilter(BUDGET).orders,
            dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
        )
        assert len(charged(place)) > 5
        for event, count in charged(place):
            gaussian = dp_accounting.GaussianDpEvent(event.sigma)
            accountant.compose(dp_accounting.PoissonSampledDpEvent(event.q, gaussian), count)
        # At δ/m for m orders: some order still converts to the budget, by another library.
        share = BUDGET.delta / len(orders or RenyiFilter(BUDGET).orders)
        assert 0.5 * BUDGET.epsilon < accountant.get_epsilon(share) <= BUDGET.epsilon * (1 + 1e-6)


def test_every_answer_is_that_of_a_filter_computed_anew(path: Path) -> None:
    draw, asked, refused = random.Random(1), 0, 0
    with opened(path) as ledger:
        ledger.reserve_filter("run", BUDGET, ORDERS)
        while refused < 20:
            event = SampledGaussian(10 ** draw.uniform(-2, 0), 10 ** draw.uniform(0, 1.2))
            count = draw.randint(1, 4)
            fresh = RenyiFilter(BUDGET, ORDERS)
            for before, number in charged(path):
                fresh.record(before, number)
            try:
                charge(ledger, event, count)
                assert fresh.admits(event, count)
            except BudgetExhausted:
                assert not fresh.admits(event, count)
                refused += 1
            asked += 1
        assert ledger.spent("run") == fresh.history
    assert asked > 30


def test_reopening_at_any_point_changes_nothing(path: Path) -> None:
    def play(place: Path, reopen: Callable[[int], bool]) -> list[tuple[SampledGaussian, int]]:
        draw, ledger = random.Random(5), opened(place)
        ledger.reserve_filter("run", BUDGET)
        for number in range(60):
            if reopen(number):
                ledger.close()
                ledger = opened(place)
                ledger.reserve_filter("run", BUDGET)
            event = SampledGaussian(10 ** draw.uniform(-2, 0), 10 ** draw.uniform(0, 1))
            try:
                charge(ledger, event, draw.randint(1, 3))
            except BudgetExhausted:
                continue
        ledger.close()
        return charged(place)

    whole = play(path, lambda _: False)
    assert 5 < len(whole) < 60
    assert play(path.with_name("again.jsonl"), lambda number: number % 3 == 0) == whole


def test_one_fitting_order_admits_as_much_as_rdp_of_fixed_events(path: Path) -> None:
    most = max_steps(EVENT, BUDGET, "rdp")
    with opened(path) as ledger:
        ledger.reserve_filter("run", BUDGET, (order_for(BUDGET, EVENT),))
        charge(ledger, EVENT, most - 3)
        with pytest.raises(BudgetExhausted, match=r"δ = 1e-05\), add/remove.*what is left"):
            charge(ledger, EVENT, 4)
        charge(ledger, EVENT, 3)
        with pytest.raises(BudgetExhausted):
            charge(ledger, EVENT)
        assert ledger.spent("run") == {EVENT: most}
        assert ledger.total() == (2.0, 1e-5)


def test_a_torn_line_closes_the_filter_and_counts_all_of_its_budget(path: Path) -> None:
    with opened(path) as ledger:
        ledger.reserve_filter("run", BUDGET)
        ledger.reserve("fixed", BUDGET, {EVENT: 5})
        charge(ledger, EVENT)
    assert receipt(path)["runs"]["run"]["epsilon_spent"] < 2
    with path.open("ab") as file:
        file.write(b'{"number": 4, "kind": "charge", "q": 1.0, "sig')
    tiny = SampledGaussian(1e-6, 1e3)
    for _ in range(2):
        with opened(path) as ledger:
            with pytest.raises(BudgetExhausted, match="lost in a crash"):
                charge(ledger, tiny)
            assert ledger.spent("run") == {EVENT: 1}
            assert ledger.spent("fixed") == {EVENT: 1}
            assert ledger.total() == (4.0, 2e-5)
        assert receipt(path)["runs"]["run"]["epsilon_spent"] == 2.0
    with opened(path) as ledger:
        ledger.reserve_filter("next", BUDGET)
        charge(ledger, tiny, run="next")


def test_a_promise_is_kept_as_it_was_made(path: Path) -> None:
    with opened(path, hypothetical=True) as ledger:
        ledger.reserve_filter("run", BUDGET, ORDERS)
        ledger.reserve_filter("run", BUDGET, ORDERS)
        assert ledger.length == 2
        for orders in (None, ORDERS[:2]):
            with pytest.raises(PolicyRefused, match="other terms"):
                ledger.reserve_filter("run", BUDGET, orders)
        with pytest.raises(PolicyRefused, match="other terms"):
            ledger.reserve("run", BUDGET, {EVENT: 1})
        with pytest.raises(InputError, match="none leaves any room"):
            ledger.reserve_filter("other", BUDGET, (1.01,))
        # In a simulation a request that comes again is the same release.
        for _ in range(2):
            charge(ledger, EVENT, 2)
        assert ledger.spent("run") == {EVENT: 2}
        assert ledger.length == 3


def test_a_receipt_says_which_accounting_was_used(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with opened(path) as ledger:
        ledger.reserve("fixed", BUDGET, {EVENT: 3})
        ledger.reserve_filter("free", BUDGET)
        charge(ledger, EVENT, 2, run="fixed")
        charge(ledger, EVENT, 2, run="free")
    runs = receipt(path)["runs"]
    assert {run: said["accounting"] for run, said in runs.items()} == {
        "fixed": "fixed sequence",
        "free": "Rényi filter",
    }
    assert [run["events"][0]["reserved"] for run in runs.values()] == [3, None]
    assert runs["free"]["epsilon_spent"] == runs["fixed"]["epsilon_spent"]
    command.show_spend(path, as_json=False)
    shown = capsys.readouterr().out
    assert shown.count("filter") == 1
