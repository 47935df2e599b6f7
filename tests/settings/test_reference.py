"""What the reference says of a key is what its class does; a plan to begin with is a plan."""

import json
import math
import re
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import BaseModel

from fedpact import algorithms
from fedpact.algorithms.wrappers.base import Method
from fedpact.cli.main import app
from fedpact.common import reference
from fedpact.common.configuration import flatten
from fedpact.common.errors import InputError, PlanError
from fedpact.common.reference import declared_keys
from fedpact.deployment.federation import Federation
from fedpact.deployment.site_records import SiteSettings
from fedpact.plan import Plan
from fedpact.privacy.policy import Policy
from fedpact.studies import starting_plan

SETTINGS = [algorithms.load(name).Settings for name in algorithms.names()]
CLASSES = [Plan, Federation, SiteSettings, Policy, *SETTINGS]


def inner(model: type[BaseModel]) -> list[type[BaseModel]]:
    """A class of settings with those of all tables in it, found through the running classes."""
    found, asked = {model}, [field.annotation for field in model.model_fields.values()]
    while asked:
        part: Any = asked.pop()
        asked += get_args(part)
        if isinstance(part, type) and issubclass(part, BaseModel):
            found |= set(inner(part))
    return list(found)


ALL = sorted({one for model in CLASSES for one in inner(model)}, key=repr)


SIGNS = {">": "gt", ">=": "ge", "<": "lt", "<=": "le"}


def limits(text: str) -> dict[str, float]:
    pairs = re.findall(r"([<>]=?) (\S+?)(?:,|$| and)", text)
    return {SIGNS[sign]: eval(value.replace("^", "**")) for sign, value in pairs}


@pytest.mark.parametrize("model", ALL, ids=lambda model: f"{model.__module__}.{model.__name__}")
def test_default_range_and_optionality_match_the_class(model):
    known = declared_keys((model.__module__, model.__name__))
    assert list(known) == list(model.model_fields)
    for name, field in model.model_fields.items():
        form, default = reference.form(known[name]), reference.find_default(known[name])
        assert (default is reference.REQUIRED) == field.is_required(), name
        if not field.is_required() and form.table is None:
            assert default == field.get_default(call_default_factory=True), name
        assert limits(form.range) == asked_of(field), name
        left_out = not field.is_required() and field.default is None
        assert form.optional == left_out, name


def asked_of(field: Any) -> dict[str, float]:
    """The bounds of a field and of the forms that it may have."""
    found: dict[str, float] = {}
    asked = [field]
    while asked:
        part = asked.pop()
        asked += [*get_args(part), *getattr(part, "metadata", ())]
        found |= {
            n: v for n in SIGNS.values() if isinstance(v := getattr(part, n, None), int | float)
        }
        asked += [part.annotation] if hasattr(part, "annotation") else []
    return found


def uncommented(text: str) -> str:
    return re.sub(r"^#(?=\S)", "", text, flags=re.MULTILINE)


def test_a_plan_to_begin_with_is_the_embedded_default():
    assert Plan.parse(tomllib.loads(starting_plan.starting_plan())) == Plan.read(None)


@pytest.mark.parametrize("name", algorithms.names())
def test_all_of_its_comments_together_change_nothing(name):
    own = ["privacy.mode='none'"] if Method(name).facts.plain_only else []
    given = [f"algorithm={name}", *own]
    raw = tomllib.loads(uncommented(starting_plan.starting_plan(given)))
    whole, plan = Plan.parse(raw), Plan.read(None, given)
    assert whole.document() | {"defaults": []} == plan.document() | {"defaults": []}
    # Every key with a default stands in it; what has none would not be TOML.
    known = [t for t in reference.tables() if "NAME" not in t.name]
    keys = {k.name: k.default for t in [*known, reference.algorithm(name).settings] for k in t.keys}
    assert set(flatten(raw)) >= {k for k, v in keys.items() if v is not None and k != "settings"}


def test_named_tables_and_keys_without_default_list_names():
    text = starting_plan.starting_plan()
    for table in reference.tables():
        for key in table.keys:
            own = rf"^#? ?{key.last} =" if key.name != "settings" else r"^\[settings\]"
            assert re.search(own, text, re.MULTILINE), key.name


def test_what_is_given_stands_in_it(tmp_path):
    given = ["records.columns.age={range=[0,120], scale='range'}", "privacy.per_site.a.epsilon=1.5"]
    raw = tomllib.loads(starting_plan.starting_plan(given))
    assert raw["records"]["columns"]["age"] == {"range": [0, 120], "scale": "range"}
    assert raw["privacy"]["per_site"] == {"a": {"epsilon": 1.5}}


def cli(*arguments: str) -> None:
    app([*arguments], standalone_mode=False)


def test_init_writes_once_and_nothing_that_is_no_plan(tmp_path: Path, capsys):
    file = tmp_path / "mine.toml"
    with pytest.raises(PlanError, match=r"privacy\.epsilon is -1"):
        cli("init", str(file), "--set", "privacy.epsilon=-1")
    assert not file.exists()
    cli("init", str(file), "--set", "algorithm=fedprox", "--json")
    assert json.loads(capsys.readouterr().out) == {"file": str(file)}
    assert Plan.read(file).algorithm == "fedprox"
    with pytest.raises(InputError, match="name a file that is not"):
        cli("init", str(file))


def test_a_table_and_a_key_are_found_by_name():
    (privacy, _) = reference.find("privacy")
    assert {"privacy.epsilon", "privacy.delta"} <= {key.name for key in privacy.keys}
    ((clip,),) = [table.keys for table in reference.find("clip")]
    assert (clip.name, clip.type, clip.range, clip.default) == ("privacy.clip", "number", "> 0", 1)
    # η is the algorithms' own, and the server's.
    found = {table.name for table in reference.find("learning_rate")}
    assert found == {"server", *(f"settings of {name}" for name in algorithms.names())}
    assert {key.name for table in reference.find("policy.toml") for key in table.keys} == set(
        Policy.model_fields
    )


def test_what_there_is_none_of_gets_the_nearest():
    with pytest.raises(PlanError, match=r"expected one of about, .*; the nearest is 'privacy'"):
        reference.find("privvacy")
    with pytest.raises(PlanError, match="the nearest is 'clip'"):
        reference.find("clipp")
    with pytest.raises(PlanError, match="zzz is no known table or key: expected one of"):
        reference.find("zzz")


def test_settings_and_algorithms_print_what_there_is(capsys):
    cli("settings", "--json")
    told = json.loads(capsys.readouterr().out)["tables"]
    assert [one["name"] for one in told] == [table.name for table in reference.everything()]
    cli("algorithms", "--json")
    told = json.loads(capsys.readouterr().out)["algorithms"]
    assert [one["name"] for one in told] == algorithms.names()
    for one in told:
        names = {key["name"].removeprefix("settings.") for key in one["settings"]["keys"]}
        assert names == set(algorithms.load(one["name"]).Settings.model_fields)
    cli("algorithms", "fedavg")
    assert "arXiv 1602.05629" in capsys.readouterr().out


def test_a_key_that_no_docstring_names_has_no_meaning():
    assert set(reference.parse_meanings("Of it. a: x: y; b, c: z.", ["a", "b", "c", "d"])) == {
        "a",
        "b",
        "c",
    }
    assert reference.symbols("Title.\n\nClient does what it does") == {}


def test_what_cannot_be_read_is_an_error_and_no_guess():
    with pytest.raises(LookupError):
        declared_keys(("fedpact.plan", "Plann"))


@given(
    raw=st.dictionaries(
        st.text(max_size=4),
        st.recursive(
            st.booleans() | st.integers(-99, 99) | st.text(max_size=5) | st.floats(allow_nan=False),
            lambda inner: st.dictionaries(st.text(max_size=4), inner, max_size=4),
            max_leaves=12,
        ),
        max_size=5,
    )
)
@example(raw={"a": math.inf, "b": {"c": [-math.inf]}})
def test_a_written_configuration_reads_as_what_was_written(raw):
    """However its tables lie in each other, whatever its keys are called."""
    assert tomllib.loads(starting_plan.configuration(raw, {})) == raw


def test_text_beside_a_key_is_a_comment():
    """A column may be called anything: a reason that names it ends no line and is no key."""
    odd = 'columns "a\nb = 3", c\x7f, d\x01\r\u2028 of no range'
    written = starting_plan.configuration({"a": {"c": 2}}, {"a.c": odd})
    assert tomllib.loads(written) == {"a": {"c": 2}}
    assert "b = 3" in written
