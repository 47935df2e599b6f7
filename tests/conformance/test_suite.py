"""What holds for every algorithm, plain and private: it is in here by its file's existence."""

import itertools

import pytest
import torch

from fedpact.algorithms import Neutral, fedavg
from fedpact.studies import conformance
from fedpact.studies.conformance import OF_METHOD, OF_NAME, Violation


def test_it_is_its_parent_under_neutral_settings_alone(reducible):
    for check, private in itertools.product(OF_NAME, (False, True)):
        check(reducible, private)


def test_every_check_holds(case):
    for check, private in itertools.product(OF_METHOD, (True, False)):
        check(case, private)


def test_every_check_holds_for_the_other_choices(choice):
    """Of a setting: in the private form, as the rest of a method is the same."""
    for check in OF_METHOD:
        check(choice, not choice.facts.plain_only)


class Silent:
    """FedAvg whose sites send their memory's size in place of anything released."""

    Settings, NEUTRAL = fedavg.Settings, None

    @staticmethod
    def local(task, oracle, memory, settings):
        del oracle, settings
        return conformance.Local({"w": task.vectors["w"] + 1}, {}, memory)


class Greedy:
    """One batch more than `steps` says."""

    Settings, NEUTRAL = fedavg.Settings, None

    @staticmethod
    def local(task, oracle, memory, settings):
        for batch in oracle.batches(settings.local_steps + 1, "gradient"):
            w = task.vectors["w"] - batch.gradient(task.vectors["w"])
        return conformance.Local({"w": w}, {}, memory)


class Spoiling:
    """Adds to the vector that it was given."""

    Settings, NEUTRAL = fedavg.Settings, None

    @staticmethod
    def local(task, oracle, memory, settings):
        task.vectors["w"].add_(1)
        return fedavg.local(task, oracle, memory, settings)


class Last:
    """Takes the last reply alone."""

    Settings, NEUTRAL = fedavg.Settings, None

    @staticmethod
    def update(state, replies, settings):
        del state, settings
        return conformance.State({"w": [*replies][-1].vectors["w"]})


class NotNeutral:
    """Says of itself that it is SCAFFOLD."""

    Settings, NEUTRAL = fedavg.Settings, Neutral("scaffold", {"local_steps": 3})


@pytest.mark.parametrize(
    ("broken", "check"),
    [
        (Silent, "check_noise_and_clip"),
        (Silent, "check_own_noise"),
        (Silent, "check_batches"),
        (Silent, "check_empty_site"),
        (Silent, "check_ledger"),
        (Greedy, "check_batches"),
        (Spoiling, "check_pure"),
        (Last, "check_order"),
    ],
)
def test_each_check_finds_its_fault(broken, check):
    (case, *_) = conformance.variants(f"{__name__}:{broken.__name__}")
    form = check not in ("check_order", "check_pure")  # plain, where the form makes no difference
    with pytest.raises(Violation):
        getattr(conformance, check)(case, form)


def test_an_algorithm_that_is_not_its_parent_is_found():
    with pytest.raises(Violation, match="from its parent's"):
        conformance.check_neutral(f"{__name__}:NotNeutral", False)
    assert torch.isfinite(conformance.HandFederation(False).w).all()


def test_a_bound_is_lifted_whether_or_not_it_is_named():
    class Batch:
        def loss(self, w, bound):
            return bound

        def difference(self, w, anchor, bound):
            return bound

    free = conformance.Unbounded(Batch())
    given = free.loss(0, 1), free.loss(w=0, bound=1), free.difference(0, 0, bound=1)
    assert min(*given, free.difference(0, 0, 1)) > 1e29
