import itertools
import json

import numpy as np
import pytest

from fedpact.cli import reference
from fedpact.cli.reference import algorithm, everything
from fedpact.common.configuration import read_configuration
from fedpact.common.errors import PlanError
from fedpact.common.format import toml_key
from fedpact.plan import Plan
from fedpact.privacy.accounting.accountant import SampledGaussian, epsilon

BAD = [
    ("nonsense=1", ["nonsense", "expected one of", "algorithm"]),
    ("privacy.eps=1", ["privacy.eps", "epsilon"]),
    ("privacy.epsilom=1", ["expected one of accountant", "the nearest is 'epsilon'"]),
    ("algorithm=fedprx", ["expected one of ", "the nearest is 'fedprox'"]),
    ("settings.foo=1", ["settings.foo", "learning_rate"]),
    ("privacy.epsilon=-1", ["privacy.epsilon", "-1", "greater than 0"]),
    ("privacy.epsilon=nan", ["privacy.epsilon", "nan", "finite"]),
    ("privacy.epsilon=inf", ["privacy.epsilon", "inf", "finite", 'privacy.mode = "none"']),
    ("privacy.epsilon=0", ["privacy.epsilon", 'privacy.mode = "none"']),
    ("privacy.epsilon=None", ["privacy.epsilon", 'privacy.mode = "none"']),
    ("privacy=none", ["privacy is 'none'", "a table", 'privacy.mode = "none"']),
    ("privacy.delta=1", ["privacy.delta", "1", "less than 1"]),
    ("rounds=abc", ["rounds", "abc", "integer"]),
    ("rounds=2.5", ["rounds", "2.5", "integer"]),
    ("rounds=0", ["rounds", "0"]),
    ("sampling_rate=1.5", ["sampling_rate", "1.5"]),
    ("settings.learning_rate=nan", ["settings.learning_rate", "nan"]),
    ("partition.kind=sharded", ["partition.kind", "sharded", "dirichlet"]),
    ("partition.nonsense=1", ["partition.nonsense", "beta"]),
    ("rounds=true", ["rounds is True", "integer"]),
    ("rounds='5'", ["rounds is '5'", "integer"]),
    ("privacy.epsilon=true", ["privacy.epsilon is True", "number"]),
    ("privacy.epsilon=[1.0, -2.0]", ["privacy.epsilon.1 is -2.0", "greater than 0"]),
    ("privacy.per_site.site-00.bogus=1", ["per_site.site-00.bogus", "sampling_rate"]),
    ("privacy.per_site.a.epsilon=-1", ["per_site.a.epsilon is -1", "greater than 0"]),
    ("seed=99999999999999999999", ["seed", "less than"]),
    ("sites", ["sites", "key=value"]),
    ("data.x=1", ["data.x", "not a table"]),
    ("records.classes=[0, 1]", ["records.classes.0 is 0", 'in quotes, as text: "0"']),
    ("records.columns.'b.m=1", ["records.columns.'b.m: expected a key as in TOML"]),
    ("records.columns.'a'\nb=1", [": expected a key as in TOML"]),
    ("records.columns.'a=b'.scale=range", [": expected a key as in TOML"]),
]


@pytest.mark.parametrize(("override", "told"), BAD)
def test_a_bad_value_error_has_name_value_and_remedy(override, told):
    with pytest.raises(PlanError) as refused:
        Plan.read(None, [override])
    for words in told:
        assert words in str(refused.value)
    assert "constrained" not in str(refused.value)
    assert "list[" not in str(refused.value)


@pytest.mark.parametrize("name", ["b.m.i", "a b", 'of "it"', "ä", "plain"])
def test_a_name_with_dots_is_quoted(name):
    """As the remedies have it: `common.format.toml_key`."""
    raw = read_configuration(None, [f"records.columns.{toml_key(name)}.scale=range"])
    assert raw["records"]["columns"] == {name: {"scale": "range"}}


def test_a_key_in_quotes_is_the_same_key():
    for plain in ("batch_size=64", "algorithm=fedprox"):
        quoted = '"{}"={}'.format(*plain.split("="))
        assert Plan.read(None, [quoted]) == Plan.read(None, [plain])
    # Whoever asks for protection of a method that has none is refused, not run without it.
    for asked in ("privacy.epsilon=1", '"privacy".epsilon=1'):
        with pytest.raises(PlanError, match="fedfair"):
            Plan.read(None, ["algorithm=fedfair", asked])


@pytest.mark.parametrize("value", [0.5, "faster", True])
def test_a_word_or_list_error_names_both(value):
    with pytest.raises(PlanError, match="'inverse' or 'cosine', or a valid list; set"):
        Plan(local={"schedule": value})


@pytest.mark.parametrize("value", [-1, [-1]])
def test_a_number_where_a_key_belongs_is_reported_as_one(value):
    with pytest.raises(PlanError) as told:
        Plan(privacy={"epsilon": value})
    assert "greater than 0" in str(told.value)
    assert "list" not in str(told.value)


def test_too_small_scheduled_clip_names_round_and_key():
    inverse = {"clip": 1e-12, "clip_schedule": "inverse", "clip_halved_after": 2.5}
    with pytest.raises(PlanError, match=r"round 2, by privacy\.clip_halved_after, is 7\.14"):
        Plan(rounds=3, privacy=inverse)


def test_both_ways_to_set_the_batch_are_one_too_many(tmp_path):
    with pytest.raises(PlanError, match="leave one out"):
        Plan.parse({"sampling_rate": 0.1, "batch_size": 10})
    for typed in itertools.permutations(["sampling_rate=0.1", "batch_size=3"]):
        with pytest.raises(
            PlanError, match=r"sampling_rate = 0\.1 and batch_size = 3.*leave one out"
        ):
            Plan.read(None, typed)
    file = tmp_path / "p.toml"
    file.write_text("sampling_rate = 0.1")
    plan = Plan.read(file, ["batch_size=3"])
    assert (plan.batch_size, plan.sampling_rate) == (3, None)


@pytest.mark.parametrize("suffix", [".toml", ".json"])
def test_a_missing_or_broken_file_is_reported(tmp_path, suffix):
    path = tmp_path / f"plan{suffix}"
    with pytest.raises(PlanError, match=r"cannot be read.*name a \.toml or \.json file"):
        Plan.read(path)
    path.write_text("{ = ")
    with pytest.raises(PlanError, match="is not valid"):
        Plan.read(path)


@pytest.mark.parametrize("suffix", [".csv", ".npz", ".parquet"])
def test_records_instead_of_a_plan_get_a_remedy(tmp_path, suffix):
    path = tmp_path / f"p{suffix}"
    path.write_bytes(b"age,sick\n\xff,1\n")
    with pytest.raises(PlanError, match=f"is not a plan.*--set data={path}"):
        Plan.read(path)


def test_a_file_may_be_named_by_a_string(tmp_path):
    (tmp_path / "p.toml").write_text("rounds = 7\n")
    assert Plan.read(str(tmp_path / "p.toml")) == Plan.read(tmp_path / "p.toml")


def test_a_resolved_plan_reads_back_as_itself(tmp_path):
    plan = Plan.read(None, ["algorithm=fedfdp", "batch_size=20", "privacy.sigma=2"])
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan.model_dump(mode="json")))
    assert Plan.read(path) == plan


def test_terms_spend_the_budget_and_not_more():
    plan = Plan.read(None, ["rounds=20", "privacy.epsilon=1.5"])
    terms = plan.terms({"a": 100.0, "b": 300.0})
    for each in terms.values():
        whole = epsilon({each.event: each.steps}, 1e-5)
        assert 1.5 * 0.99 < whole <= 1.5
        assert each.steps == 20


def test_given_noise_allows_as_many_steps_as_the_budget():
    plan = Plan.read(None, ["rounds=100000", "privacy.sigma=1", "sampling_rate=0.1"])
    (terms,) = plan.terms({"a": 100.0}).values()
    event = SampledGaussian(0.1, 1.0)
    assert terms.event == event
    assert epsilon({event: terms.steps}, 1e-5) <= 2 < epsilon({event: terms.steps + 1}, 1e-5)
    with pytest.raises(PlanError, match=r"privacy\.sigma is 0\.1"):
        Plan.read(None, ["privacy.sigma=0.1"]).terms({"a": 100.0})


def test_an_expected_batch_gives_each_site_its_rate():
    plan = Plan.read(None, ["batch_size=30"])
    for size in (31.0, 100.0, 1234.0):
        assert 30 / size <= plan.rate("a", size) <= min(1.0, 1.3 * 30 / size)
    assert plan.rate("a", 20.0) == 1


def test_a_plain_run_has_no_terms_and_has_to_be_asked_for():
    assert Plan().private
    assert Plan.read(None, ["privacy.mode=none"]).terms({"a": 1.0}) == {}


def test_budgets_may_differ_by_list_and_by_table():
    own = {"b": {"epsilon": 0.5, "sampling_rate": 0.1}, "c": {"sigma": 9.0, "delta": 1e-6}}
    plan = Plan.parse({"rounds": 4, "privacy": {"epsilon": [1.0, 2.0, 4.0], "per_site": own}})
    terms = plan.terms({"c": 50.0, "a": 100.0, "b": 200.0})
    budgets = {name: (t.budget.epsilon, t.budget.delta) for name, t in terms.items()}
    assert budgets == {"a": (1.0, 1e-5), "b": (0.5, 1e-5), "c": (4.0, 1e-6)}
    assert (terms["b"].rate, terms["c"].sigmas["gradient"]) == (0.1, 9.0)
    for each in terms.values():
        assert epsilon({each.event: each.steps}, each.budget.delta) <= each.budget.epsilon


@pytest.mark.parametrize(
    ("privacy", "told"),
    [
        ({"epsilon": [1.0, 2.0]}, "lists 2 values for 3 sites"),
        ({"per_site": {"z": {"epsilon": 1.0}}}, "per_site names z"),
    ],
)
def test_budgets_that_do_not_match_the_sites_are_refused(privacy, told):
    with pytest.raises(PlanError, match=told):
        Plan.parse({"privacy": privacy}).terms({"a": 1.0, "b": 1.0, "c": 1.0})


@pytest.mark.parametrize("algorithm", ["fedavg", "fedproxvr"])
def test_spare_rounds_are_reserved_within_the_same_budget(algorithm):
    """R + S rounds' events are calibrated for together: what a longer plan would reserve."""
    spare = Plan.parse({"algorithm": algorithm, "rounds": 8, "budget": {"spare_rounds": 2}})
    longer = Plan.parse({"algorithm": algorithm, "rounds": 10})
    assert spare.terms({"a": 100.0}) == longer.terms({"a": 100.0})
    assert spare.steps * 10 == longer.steps * 8


def test_spare_rounds_are_refused_with_budget_controlled_tau():
    with pytest.raises(PlanError, match="spare_rounds"):
        Plan.parse({"control": {"kind": "ali", "iterations": 9}, "budget": {"spare_rounds": 1}})


def test_every_key_and_algorithm_setting_has_a_meaning():
    # From the docstring of its class, "key: what it means.", or an algorithm's table of symbols.
    tables = [*everything(), *(algorithm(name).settings for name in reference.algorithm_names())]
    assert len(tables) > 30
    assert [key.name for table in tables for key in table.keys if len(key.meaning) < 5] == []


def test_numpys_numbers_and_arrays_are_settings_too():
    """A sweep over np.arange hands such in."""
    given = {
        "sites": np.int64(2),
        "rounds": np.int32(3),
        "sampling_rate": np.float64(0.25),
        "privacy": {"epsilon": np.array([2.0, 1.0])},
        "records": {"classes": np.array(["a", "b"])},
    }
    same = Plan.parse(
        {
            "sites": 2,
            "rounds": 3,
            "sampling_rate": 0.25,
            "privacy": {"epsilon": [2.0, 1.0]},
            "records": {"classes": ["a", "b"]},
        }
    )
    assert Plan(**given) == Plan.parse(given) == same
    with pytest.raises(PlanError, match=r"sites is 2\.5"):
        Plan(sites=np.float64(2.5))


def test_sites_take_turns_on_a_gpu():
    with pytest.raises(PlanError, match=r"run\.workers = 2 with run\.device"):
        Plan.parse({"run": {"device": "cuda", "workers": 2}})


@pytest.mark.parametrize(
    ("privacy", "more", "told"),
    [
        (
            {"per_site": {"site-00": {"epsilon": 8.0, "delta": 1e-3}}},
            {},
            ("ε 8 per", "0.001"),
        ),
        ({"epsilon": 0.5}, {"evaluation": {"share": 0.2, "epsilon": 4.0}}, ("ε 4 per record",)),
        (
            {"trust": "sum", "honest": 3},
            {"secure_aggregation": {"threshold": 4}},
            ("if 3 sites of each sum are honest",),
        ),
    ],
)
def test_a_plans_card_states_the_largest_epsilon(privacy, more, told):
    card = str(Plan.parse({"sites": 5, "privacy": privacy, **more}))
    assert all(part in card for part in told)
