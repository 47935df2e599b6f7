"""What the reference says of a key is what its class does; a plan to begin with is a plan."""

import json
import math
import re
import tomllib
from collections.abc import Callable
from typing import Annotated, Literal

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field

from fedpact import algorithms
from fedpact.algorithms.wrappers.base import Method
from fedpact.cli import reference
from fedpact.cli.commands.settings import starting_plan
from fedpact.cli.main import app
from fedpact.common.configuration import flatten, write_toml
from fedpact.common.errors import InputError, PlanError
from fedpact.plan import Plan
from fedpact.privacy.policy import Policy


def in_words(tables):
    return {key.name: key for table in tables for key in table.keys}


def test_reference_is_what_the_classes_say():
    written = reference.WRITTEN.read_text(encoding="utf-8")
    assert written == reference.to_json(), "run `make reference`"
    every = reference.everything()
    assert len(in_words(every)) > 150
    every += [reference.algorithm(name).settings for name in reference.algorithm_names()]
    assert [key.name for table in every for key in table.keys if not key.meaning] == []


def test_a_key_s_type_range_and_default_are_its_field_s():
    class Inner(BaseModel):
        """Of a name. More."""

        model_config = ConfigDict(use_attribute_docstrings=True)
        share: float | list[Annotated[float, Field(ge=0)]] | None = Field(default=None, lt=2**63)
        """What it is."""

    class Outer(BaseModel):
        """All."""

        kind: Literal["a", 3]
        per_site: dict[str, Inner] = Field(default_factory=dict)
        inner: Inner = Inner()

    top, named, inner = reference.describe_class(Outer)
    kind, per_site = top.keys
    assert (kind.type, kind.required, kind.default) == ('"a" | 3', True, None)
    assert (per_site.type, per_site.default, named.name) == ("table", {}, "per_site.NAME")
    (share,) = inner.keys
    assert share == reference.Key(
        "inner.share", "number | [number, ...]", ">= 0, < 2^63", None, False, "What it is."
    )
    assert inner.about == "Of a name."


def test_settings_of_a_user_s_algorithm_may_be_of_any_type():
    """They are described whenever a plan names it, to tell unknown keys."""

    class Settings(BaseModel):
        model_config = ConfigDict(arbitrary_types_allowed=True)
        rates: list = Field(default_factory=lambda: [0.5])
        rule: Callable[[float], float] = math.sqrt
        start: torch.Tensor | None = None

    (table,) = reference.describe_class(Settings)
    told = [(key.type, key.default) for key in table.keys]
    assert told == [("[anything, ...]", [0.5]), ("anything", None), ("anything", None)]


def uncommented(text):
    return re.sub(r"^#(?=\S)", "", text, flags=re.MULTILINE)


def test_a_plan_to_begin_with_is_the_embedded_default():
    assert Plan.parse(tomllib.loads(starting_plan())) == Plan.read(None)


@pytest.mark.parametrize("name", algorithms.names())
def test_all_of_its_comments_together_change_nothing(name):
    own = ["privacy.mode='none'"] if Method(name).facts.plain_only else []
    given = [f"algorithm={name}", *own]
    raw = tomllib.loads(uncommented(starting_plan(given)))
    whole, plan = Plan.parse(raw), Plan.read(None, given)
    assert whole.document() | {"defaults": []} == plan.document() | {"defaults": []}
    # Every key with a default stands in it; what has none would not be TOML.
    known = [t for t in reference.tables() if "NAME" not in t.name]
    keys = {k.name: k.default for t in [*known, reference.algorithm(name).settings] for k in t.keys}
    assert set(flatten(raw)) >= {k for k, v in keys.items() if v is not None and k != "settings"}


@pytest.mark.parametrize("name", algorithms.names())
def test_the_short_plan_has_at_most_60_lines(name):
    given = [f"algorithm={name}"]
    text = starting_plan(given, every=False)
    assert len(text.splitlines()) <= 60
    private = ["privacy.mode='none'"] if Method(name).facts.plain_only else []
    assert tomllib.loads(text)["rounds"] == Plan.read(None, [*given, *private]).rounds


def test_named_tables_and_keys_without_default_list_names():
    text = starting_plan()
    for table in reference.tables():
        for key in table.keys:
            own = rf"^#? ?{key.last} =" if key.name != "settings" else r"^\[settings\]"
            assert re.search(own, text, re.MULTILINE), key.name


def test_given_values_are_shown(tmp_path):
    given = ["records.columns.age={range=[0,120], scale='range'}", "privacy.per_site.a.epsilon=1.5"]
    raw = tomllib.loads(starting_plan(given))
    assert raw["records"]["columns"]["age"] == {"range": [0, 120], "scale": "range"}
    assert raw["privacy"]["per_site"] == {"a": {"epsilon": 1.5}}


def cli(*arguments):
    app([*arguments], standalone_mode=False)


def test_init_writes_once_and_only_plans(tmp_path, capsys):
    file = tmp_path / "mine.toml"
    with pytest.raises(PlanError, match=r"privacy\.epsilon is -1"):
        cli("init", str(file), "--set", "privacy.epsilon=-1")
    assert not file.exists()
    cli("init", str(file), "--set", "algorithm=fedprox", "--json")
    assert json.loads(capsys.readouterr().out) == {"file": str(file)}
    assert Plan.read(file).algorithm == "fedprox"
    with pytest.raises(InputError, match="exists already: name a new file"):
        cli("init", str(file))


def test_a_table_and_a_key_are_found_by_name():
    (privacy, _) = reference.find("privacy")
    assert {"privacy.epsilon", "privacy.delta"} <= {key.name for key in privacy.keys}
    ((clip,),) = [table.keys for table in reference.find("clip")]
    assert [table.name for table in reference.find("alpha")] == ["partition"]
    assert (clip.name, clip.type, clip.range, clip.default) == ("privacy.clip", "number", "> 0", 1)
    # η is the algorithms' own, and the server's.
    found = {table.name for table in reference.find("learning_rate")}
    assert found == {"server", *(f"settings of {name}" for name in algorithms.names())}
    assert {key.name for table in reference.find("policy.toml") for key in table.keys} == set(
        Policy.model_fields
    )


def test_an_unknown_name_gets_the_nearest_one():
    with pytest.raises(PlanError, match=r"expected one of about, .*; the nearest is 'privacy'"):
        reference.find("privvacy")
    with pytest.raises(PlanError, match="the nearest is 'clip'"):
        reference.find("clipp")
    with pytest.raises(PlanError, match="zzz is no known table or key: expected one of"):
        reference.find("zzz")


@pytest.mark.parametrize(("word", "table"), [("shards", "partition"), ("topk", "compression")])
def test_words_of_meanings_and_allowed_values_are_found(word, table):
    assert f"{table}.kind" in [key.name for one in reference.find(word) for key in one.keys]


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


WORDS = st.text("aZ0 _-.,:#='\"\\[]{}\n\r\t\0\x7fé\u2028😀", max_size=4)


@settings(max_examples=40)
@given(
    raw=st.dictionaries(
        WORDS,
        st.recursive(
            st.booleans() | st.integers(-99, 99) | WORDS | st.floats(allow_nan=False),
            lambda inner: st.dictionaries(WORDS, inner, max_size=4),
            max_leaves=12,
        ),
        max_size=5,
    )
)
@example(raw={"a": math.inf, "b": {"c": [-math.inf]}})
def test_a_written_configuration_reads_as_what_was_written(raw):
    """However its tables lie in each other, whatever its keys are called."""
    assert tomllib.loads(write_toml(raw, {})) == raw


def test_text_after_a_key_is_a_comment():
    """A column may be called anything: a reason that names it ends no line and is no key."""
    odd = 'columns "a\nb = 3", c\x7f, d\x01\r\u2028 of no range'
    written = write_toml({"a": {"c": 2}}, {"a.c": odd})
    assert tomllib.loads(written) == {"a": {"c": 2}}
    assert "b = 3" in written
