import math

import pytest
from tests.policies import ALLOWED

from fedpact.common.errors import InputError, PlanError, PolicyRefused
from fedpact.privacy.accounting.accountant import Budget
from fedpact.privacy.ledger.ledger import Ledger
from fedpact.privacy.ledger.reservations import over_runs
from fedpact.privacy.policy import Policy, sum_reservations
from fedpact.privacy.terms import Terms

NOTHING = (0.0, 0.0)


def terms(*, epsilon=2.0, delta=1e-5, **sigmas):
    given = sigmas or {"gradient": 1.0}
    return Terms("a", 100.0, 0.1, 1.0, given, 10, Budget(epsilon, delta), "best")


def test_named_releases_are_allowed_up_to_the_limit():
    Policy.parse(ALLOWED).check_run("fedavg", terms(), (1.0, 1e-5))


def test_three_times_what_was_promised_is_three_times_that():
    """Binary sums of 0.1, 0.1 and 0.1, and of 1e-5 three times, are a bit beyond 0.3 and 3e-5."""
    reserved = over_runs((name, 0.1, 1e-5) for name in "abc")
    assert reserved == (0.3, 3e-5) < (0.1 + 0.1 + 0.1, 1e-5 + 1e-5 + 1e-5)
    policy = Policy.parse({**ALLOWED, "epsilon_ever": 0.3, "delta_ever": 3e-5})
    policy.check_run("fedavg", terms(epsilon=0.1), over_runs((n, 0.1, 1e-5) for n in "ab"))
    with pytest.raises(PolicyRefused, match="epsilon_ever"):
        policy.check_run("fedavg", terms(epsilon=0.1), reserved)


@pytest.mark.parametrize(
    ("algorithm", "asked", "reserved", "told"),
    [
        ("fedfdp", terms(), NOTHING, "fedfdp"),
        ("fedavg", None, NOTHING, "without privacy"),
        ("fedavg", terms(gradient=2.0, loss=5.0), NOTHING, "loss"),
        ("fedavg", terms(gradient=0.99), NOTHING, "smallest_sigma = 1"),
        ("fedavg", terms(epsilon=2.01), NOTHING, "epsilon_per_run = 2"),
        # Digits that make the difference are shown.
        ("fedavg", terms(epsilon=2.0000001), NOTHING, r"would be 2\.0000001: .*per_run = 2,"),
        ("fedavg", terms(gradient=0.9999999), NOTHING, r"0\.9999999: .*sigma = 1, which its owner"),
        ("fedavg", terms(delta=1.1e-5), NOTHING, "delta_per_run"),
        ("fedavg", terms(), (1.01, 0.0), "epsilon_ever = 3"),
        ("fedavg", terms(), (0.0, 1.1e-5), "delta_ever"),
        ("fedavg", terms(), (math.nan, 0.0), "epsilon_ever"),
    ],
)
def test_whatever_is_not_named_is_refused(algorithm, asked, reserved, told):
    with pytest.raises(PolicyRefused, match=told):
        Policy.parse(ALLOWED).check_run(algorithm, asked, reserved)


@pytest.mark.parametrize("honest", [1, 2, 3])
def test_noise_of_more_honest_sites_than_declared_is_refused(honest, tmp_path):
    """The run's ε, and that of runs before it, count only as far as the owner believes."""
    shared = Terms(
        *("a", 100.0, 0.1, 1.0, {"gradient": 2.0}, 10, Budget(2.0, 1e-5), "best"), honest=2
    )
    alone = {"honest": honest, "epsilon_alone_per_run": 99.0, "epsilon_alone_ever": 99.0}
    policy = Policy.parse({**ALLOWED, **alone})
    with Ledger(tmp_path / "ledger.jsonl", "a", hypothetical=True) as ledger:
        ledger.reserve("before", shared.guarantee, shared.history(10))
        counted = shared.guarantee.alone if honest < 2 else 2.0
        assert sum_reservations(ledger, "new", policy) == ((counted, 1e-5), shared.guarantee.alone)
    if honest >= 2:
        policy.check_run("fedavg", shared, NOTHING)
    else:
        with pytest.raises(PolicyRefused, match=r"needs the noise of 2 honest.*honest = 1"):
            policy.check_run("fedavg", shared, NOTHING)
    # By itself a release has this site's own share of noise, though the sum has more.
    assert shared.event.sigma > 2.5
    with pytest.raises(PolicyRefused, match=r"sigma would be 2: .*smallest_sigma = 2\.5"):
        Policy.parse({**ALLOWED, **alone, "smallest_sigma": 2.5}).check_run(
            "fedavg", shared, NOTHING
        )
    with pytest.raises(PolicyRefused, match="honest = 0"):
        Policy.parse(ALLOWED).check_run("fedavg", shared, NOTHING)


def opened(sigma=5.0, **others):
    """Terms whose rounds open with a gradient of noise `sigma`."""
    given = {"opening_sigmas": {"gradient": sigma}, "openings": 3, **others}
    return Terms("a", 100.0, 0.1, 1.0, {"gradient": 2.0}, 10, Budget(2.0, 1e-5), "best", **given)


@pytest.mark.parametrize(
    "names",
    [["gradient"], ["gradient", "opening"], ["gradient", "opening_gradient", "Opening gradient"]],
)
def test_an_opening_release_is_allowed_only_by_its_name(names):
    with pytest.raises(PolicyRefused, match="releases opening gradient are not allowed"):
        Policy.parse({**ALLOWED, "releases": names}).check_run("fedavg", opened(), NOTHING)
    named = Policy.parse({**ALLOWED, "releases": ["gradient", "opening gradient"]})
    named.check_run("fedavg", opened(), NOTHING)
    with pytest.raises(PolicyRefused, match="smallest_sigma"):
        named.check_run("fedavg", opened(0.5), NOTHING)


@pytest.mark.parametrize("name", ["size", "opening gradient", "opening "])
def test_no_channel_has_the_name_of_another_release(name):
    """Its noise would stand where the other's does, and the smaller of the two be hidden."""
    with pytest.raises(InputError, match="a channel is called"):
        terms(gradient=2.0, **{name: 0.01})
    with pytest.raises(InputError, match="a channel is called"):
        opened(opening_sigmas={name: 0.01})


@pytest.mark.parametrize("missing", sorted(ALLOWED))
def test_a_policy_that_leaves_something_out_allows_nothing(missing):
    with pytest.raises(PlanError, match=missing):
        Policy.parse({key: value for key, value in ALLOWED.items() if key != missing})


def test_a_policy_that_cannot_be_read_allows_nothing(tmp_path):
    with pytest.raises(PlanError, match="cannot be read"):
        Policy.read(tmp_path / "missing.toml")
    (tmp_path / "policy.toml").write_text("epsilon_ever = nan\n")
    with pytest.raises(PlanError, match="epsilon_ever"):
        Policy.read(tmp_path / "policy.toml")


@pytest.mark.parametrize("value", ["1", True, "all", None, math.nan, math.inf, 0, -1.0, [1.0]])
@pytest.mark.parametrize("key", [k for k in sorted(ALLOWED) if not isinstance(ALLOWED[k], list)])
def test_an_invalid_number_allows_nothing(key, value):
    with pytest.raises(PlanError, match=key) as told:
        Policy.parse({**ALLOWED, key: value})
    # Name, value, and what was expected.
    assert repr(value) in str(told.value)


@pytest.mark.parametrize("value", ["fedavg", [1], None, {"fedavg": True}])
@pytest.mark.parametrize("key", ["algorithms", "releases"])
def test_invalid_names_allow_nothing(key, value):
    with pytest.raises(PlanError, match=key):
        Policy.parse({**ALLOWED, key: value})
