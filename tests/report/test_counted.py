"""What trying costs, from ledgers that were made for it: every figure is known."""

import math
from types import SimpleNamespace

import pytest

from fedpact.common.errors import DataError
from fedpact.privacy.accounting import shared_noise
from fedpact.privacy.accounting.accountant import Budget, SampledGaussian, epsilon
from fedpact.privacy.accounting.tuning_cost import winner_epsilon
from fedpact.privacy.guarantee import Guarantee
from fedpact.privacy.ledger.ledger import Ledger
from fedpact.privacy.ledger.reservations import CompanionReservation
from fedpact.report.tuning_cost import count_tuning_cost

DELTA = 1e-5
CHEAP = {SampledGaussian(0.05, 4.0): 100}
DEAR = {SampledGaussian(0.1, 2.0): 30}


def run(path, *, honest=0, expose=False, delta=DELTA, unit="record", held=None, split="", **sites):
    """A run's folder with the ledgers of its sites, of which a run may have charged nothing.

    held: what is promised for the records that `split` holds out.
    """
    for site, events in sites.items():
        promise = Guarantee.of(events, delta, honest)
        file = path / "sites" / site / "ledger.jsonl"
        with Ledger(file, site, hypothetical=True) as ledger:
            ledger.reserve(path.name, promise, events, unit=unit)
            if held:
                budget, beside = (
                    Budget(epsilon(held, delta), delta),
                    CompanionReservation(path.name, split),
                )
                ledger.reserve(f"{path.name} looks", budget, held, beside=beside, unit=unit)
            if expose:
                ledger.expose(path.name, 1)
    return SimpleNamespace(path=path, site_privacy=dict.fromkeys(sites))


def test_settings_add_up_by_site_and_the_largest_is_shown(tmp_path):
    one = run(tmp_path / "one", a=CHEAP, b=CHEAP)
    two = run(tmp_path / "two", a=DEAR, b=CHEAP)
    (found,) = count_tuning_cost({"one": {0: one}, "two": {0: two}})
    at_a, at_b = {**CHEAP, **DEAR}, {SampledGaussian(0.05, 4.0): 200}
    both = epsilon(at_a, DELTA), epsilon(at_b, DELTA)
    assert found.found.every == max(both) > found.found.one == epsilon(DEAR, DELTA)
    assert found.found.runs == 2
    assert found.found.winner == winner_epsilon([CHEAP, DEAR], DELTA, 2)
    assert found.alone is None
    assert "2 settings, each once: one, two" in found.told
    assert found.document["epsilon_of_every"] == max(both)


LOOKS = {SampledGaussian(1.0, 6.0): 1}


def test_record_pays_for_training_or_for_evaluation(tmp_path):
    """Two runs of one split: one of both sides in both. Unlike splits: any of four ways."""

    def found(second):
        there = tmp_path / second
        runs = [
            run(there / name, held=LOOKS, split=split, a=events)
            for name, split, events in (("one", "first", CHEAP), ("two", second, DEAR))
        ]
        (told,) = count_tuning_cost({"one": {0: runs[0]}, "two": {0: runs[1]}})
        return told.found

    trained, looked = (
        epsilon({**CHEAP, **DEAR}, DELTA),
        epsilon({SampledGaussian(1, 6.0): 2}, DELTA),
    )
    mixed = [epsilon({**LOOKS, **events}, DELTA) for events in (CHEAP, DEAR)]
    assert found("first").every == max(trained, looked) < max(mixed)
    assert found("another").every == max(trained, looked, *mixed)
    each = [epsilon(events, DELTA) for events in (CHEAP, DEAR, LOOKS)]
    assert found("first").one == found("another").one == max(each)


def test_of_more_splits_than_are_gone_through_both_sides_count(tmp_path):
    runs = {n: run(tmp_path / str(n), held=LOOKS, split=f"s{n}", a=CHEAP) for n in range(7)}
    _, found = count_tuning_cost({"one": runs, "two": {n: runs[n] for n in range(7)}})
    (event,), (look,) = CHEAP, LOOKS
    assert found.found.every == epsilon({event: 1400, look: 14}, DELTA)


def test_seeds_are_alternatives_and_cost_more_together(tmp_path):
    runs = {
        name: {seed: run(tmp_path / f"{name}-{seed}", a=events) for seed in (0, 1, 2)}
        for name, events in (("one", CHEAP), ("two", DEAR))
    }
    once, every = count_tuning_cost(runs)
    assert once.found.every == epsilon({**CHEAP, **DEAR}, DELTA)
    thrice = {event: 3 * count for event, count in {**CHEAP, **DEAR}.items()}
    assert (every.found.runs, every.found.every) == (6, epsilon(thrice, DELTA))
    # Of one setting the seeds alone are what is chosen from; of one run, nothing is.
    (seeds,) = count_tuning_cost({"one": runs["one"]})
    assert seeds.found.runs == 3
    assert count_tuning_cost({"one": {0: runs["one"][0]}}) == []


def test_shared_noise_has_epsilon_with_and_without_others(tmp_path):
    events = {SampledGaussian(1.0, 8.0): 10}
    runs = {name: {0: run(tmp_path / name, honest=4, a=events)} for name in ("one", "two")}
    (found,) = count_tuning_cost(runs)
    whole = {SampledGaussian(1.0, 8.0): 20}
    assert found.alone is not None
    assert found.honest == 4
    # A little δ is taken off for the shares' law, of each run.
    assert found.found.every >= epsilon(whole, DELTA - 2 * shared_noise.ADDED_DELTA)
    assert found.found.every == pytest.approx(epsilon(whole, DELTA), rel=1e-6)
    assert found.alone.every == epsilon(shared_noise.all_alone(whole, 4), DELTA) > found.found.every
    assert "at least 4 sites" in found.lines[0]
    assert "no other site is honest" in found.lines[2]


def test_exact_and_unknown_numbers_have_no_epsilon(tmp_path):
    one = run(tmp_path / "one", a=CHEAP)
    exact = run(tmp_path / "exact", expose=True, a=CHEAP)
    (found,) = count_tuning_cost({"one": {0: one}, "exact": {0: exact}})
    assert math.isinf(found.found.every)
    assert found.found.winner == math.inf
    assert found.document["epsilon_of_every"] is None
    (tmp_path / "one" / "sites" / "a" / "ledger.jsonl").unlink()
    with pytest.raises(DataError, match=r"ledger\.jsonl is missing"):
        count_tuning_cost({"one": {0: one}, "exact": {0: exact}})


def test_ledgers_of_unlike_units_do_not_add_up(tmp_path):
    one = run(tmp_path / "one", a=CHEAP)
    two = run(tmp_path / "two", unit="person", a=CHEAP)
    with pytest.raises(DataError, match="per person and per record"):
        count_tuning_cost({"one": {0: one}, "two": {0: two}})


def test_the_largest_delta_counts_for_all(tmp_path):
    one = run(tmp_path / "one", a=CHEAP)
    two = run(tmp_path / "two", delta=1e-6, a=CHEAP)
    (found,) = count_tuning_cost({"one": {0: one}, "two": {0: two}})
    assert found.found.delta == DELTA
    assert found.found.every == epsilon({SampledGaussian(0.05, 4.0): 200}, DELTA)
