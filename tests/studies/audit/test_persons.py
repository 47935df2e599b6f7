"""Canaries who are persons: k equal records, sampled together or each for itself.

Draws are seeded, so the tests do not fail by chance; with other seeds a right mechanism fails the
bounds for 5 % of seeds at most.
"""

import dataclasses

import numpy as np
import pytest

from fedpact.data.load import from_arrays, load_dataset
from fedpact.plan import Plan
from fedpact.privacy.accounting.group_privacy import epsilon_per_person
from fedpact.simulation.setup import SimulationSetup
from fedpact.studies.audit.attacks import many_runs, one_run
from fedpact.studies.audit.target import Target, private_oracle


def target(**privacy):
    digits = load_dataset("digits")
    x, y = digits.x[:400], digits.y[:400]
    whose = [f"p{i}" for i in np.random.default_rng(1).integers(0, 110, len(y))]
    data = from_arrays(x, y, classes=digits.classes, person=whose)
    plan = {"rounds": 4, "sites": 2, "sampling_rate": 0.5, "privacy": privacy}
    return Target.of(SimulationSetup.of(Plan.parse(plan), data))


pytestmark = pytest.mark.usefixtures("bounds_alone")


@pytest.fixture(scope="module")
def persons():
    return target(unit="person", person_records=5, epsilon=3.0)


def test_a_person_with_five_records_costs_the_claimed_epsilon(persons):
    found = many_runs(persons, runs=100, events=4)
    assert persons.canary_records == 5
    assert all(bound.passed for bound in found.bounds), found
    assert one_run(persons, 100).passed


def test_a_clip_for_each_record_of_a_person_is_found(persons):
    """Persons are sampled, and their records count as if each were somebody: five times as much."""

    class Each(type(persons.records)):
        def batch(self, draws, rate, step, *, lent=False):
            x, y, _ = super().batch(draws, rate, step, lent=lent)
            return x, y, None

    def broken(records, kernel, terms, draws):
        whole = Each(records.x, records.y, persons=records.persons)
        return private_oracle(whole, kernel, terms, draws)

    found = many_runs(dataclasses.replace(persons, make=broken), runs=100, events=4)
    assert not all(bound.passed for bound in found.bounds)


def test_persons_cost_the_mixture_epsilon_and_more_beyond_k():
    """Each record sampled for itself: up to five it stands; thirty of one person break it."""
    of_records = target(epsilon=0.3)
    history = {of_records.terms.event: 4}

    def bounds(k):
        one = dataclasses.replace(of_records, canary_records=k)
        found = many_runs(one, runs=100, events=4).bounds
        return [(bound.epsilon, epsilon_per_person(history, bound.delta, 5)) for bound in found]

    of_five = bounds(5)
    assert all(measured <= claimed for measured, claimed in of_five)
    assert any(measured > claimed for measured, claimed in bounds(30))
