"""Shared noise under audit: an opened sum and one site's share, each against its own ε.

Draws are seeded, so nothing fails by chance; with other seeds a right mechanism fails in 0.2 %.
"""

import pytest
from tests.studies.audit.test_mechanism import Draws, noise_checks

from fedpact.studies.audit.noise import queries_of, sampling_tests
from fedpact.studies.audit.target import list_views

SHARED = (
    "sampling_rate=0.25",
    "rounds=20",
    "settings.local_steps=1",
    "secure_aggregation.threshold=4",
    "privacy.trust=sum",
    "privacy.honest=3",
)


@pytest.fixture(scope="module")
def target(audited):
    return audited.target(*SHARED)


class HalfShares(Draws):
    def share(self, total, unit, units, step, purpose):
        return self.inner.share(total, unit, units / 2, step, purpose)


class OneSiteWithout(Draws):
    def share(self, total, unit, units, step, purpose):
        quiet = 1e-9 if purpose.endswith("of share 1") else units
        return self.inner.share(total, unit, quiet, step, purpose)


class SameAtEveryStep(Draws):
    def share(self, total, unit, units, step, purpose):
        return self.inner.share(total, unit, units, 0, purpose)


class Right(Draws):
    def share(self, total, unit, units, step, purpose):
        return self.inner.share(total, unit, units, step, purpose)


@pytest.mark.parametrize("name", ["sum", pytest.param("alone", marks=pytest.mark.slow)])
def test_the_right_mechanism_passes(target, name):
    view = list_views(target)[name]
    asked = queries_of(view)
    found = [*noise_checks(view, asked), *sampling_tests(view, asked)]
    assert len(found) > 20
    assert not [test for test in found if not test.passed]


def test_right_shares_through_a_stand_in_pass(target):
    """Else the next test could pass for what it puts in place of the draws."""
    view = list_views(target, drawn=Right)["alone"]
    assert all(test.passed for test in noise_checks(view, queries_of(view)))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param("sum", HalfShares, marks=pytest.mark.slow),
        ("alone", HalfShares),
        ("sum", OneSiteWithout),
        pytest.param("alone", SameAtEveryStep, marks=pytest.mark.slow),
    ],
)
def test_wrong_shares_are_found(target, name, kind):
    view = list_views(target, drawn=kind)[name]
    assert not all(test.passed for test in noise_checks(view, queries_of(view)))


def test_each_view_claims_its_own_epsilon(target):
    """That of the terms: with h honest sites, and with none."""
    terms, found = target.terms, list_views(target)
    delta = terms.budget.delta
    assert found["sum"].claimed(terms.steps, delta) <= terms.budget.epsilon * (1 + 1e-9)
    alone = found["alone"].claimed(terms.steps, delta)
    assert alone == pytest.approx(terms.guarantee.alone, rel=1e-9)
    assert alone > 1.5 * terms.budget.epsilon


def test_own_noise_has_one_view(audited):
    own = audited.target("sampling_rate=0.25")
    assert list_views(own) == {"": own}
