"""Unknown, misplaced and mistyped keys of a configuration, and files that hold none."""

import pytest

from fedpact import algorithms
from fedpact.cli.reference import algorithm, tables
from fedpact.common.configuration import OTHER_NAMES
from fedpact.common.errors import PlanError
from fedpact.plan import Plan


def refused(*overrides):
    with pytest.raises(PlanError) as caught:
        Plan.read(None, overrides)
    return str(caught.value)


TOP_LEVEL = "(a top-level key: in a file, put it above all [tables])"
MISTYPED = [
    "rouns=3",
    "privcy.epsilon=1",
    "privacy.epsilom=1",
    "run.worker=2",
    "robust.knd='x'",
    "epsilon=2",
    "learning_rate=0.1",
    "privacy.rounds=3",
]


@pytest.mark.parametrize("name", algorithms.names())
def test_of_each_algorithm_a_mistyped_setting_too(name):
    given = (f"algorithm={name}", "settings={nothing=1}")
    assert "settings.nothing is not a known key" in refused(*given)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("epsilon=2", ["evaluation.epsilon", "privacy.epsilon"]),
        ("learning_rate=0.1", ["settings.learning_rate", "server.learning_rate"]),
        ("local.views.mirror=true", ["the table [views]"]),
        ("partition.alpha=1", ["partition.beta"]),
        ("concentration=1", ["partition.beta"]),
        ("partition.num_classes_per_partition=2", ["partition.labels_per_site"]),
        ("noise_multiplier=1", ["privacy.sigma"]),
        ("settings.epsilon=2", ["evaluation.epsilon", "privacy.epsilon"]),
        ("settings.batch_size=2", [f"batch_size {TOP_LEVEL}"]),
        ("privacy.rounds=3", [f"rounds {TOP_LEVEL}"]),
    ],
)
def test_a_misplaced_key_error_names_its_table(typed, meant):
    key = typed.split("=")[0].removesuffix(".mirror")
    told = f"{key} is not a known key: expected {' or '.join(meant)}"
    assert refused(typed) == told


def test_other_names_lead_to_keys_of_the_plan():
    known = {key.name for table in tables() for key in table.keys}
    known |= {key.name for key in algorithm("fedavg").settings.keys}
    assert set(OTHER_NAMES.values()) <= known


def test_every_mistyped_key_is_named():
    told = refused(*MISTYPED)
    assert all(f"{override.partition('=')[0].split('.')[0]}" in told for override in MISTYPED)
    assert told.count("is not a known key") == len(MISTYPED)


@pytest.mark.parametrize("content", ["", " \n\n", "\ufeff"])
@pytest.mark.parametrize("name", ["empty.toml", "empty.json"])
def test_empty_file_of_a_refused_command_is_not_all_defaults(tmp_path, name, content):
    path = tmp_path / name
    path.write_text(content, encoding="utf-8")
    with pytest.raises(PlanError, match=rf"configuration \S*{name} is empty: expected keys"):
        Plan.read(path)


@pytest.mark.parametrize(
    ("path", "overrides", "told"),
    [
        ("2", ["privacy.epsilon"], "= and no space between them"),
        ("rounds=3", [], "a key is set as --set rounds=3"),
    ],
)
def test_a_key_given_in_another_way_is_told_how(path, overrides, told):
    with pytest.raises(PlanError, match=told):
        Plan.read(path, overrides)


def test_a_utf8_byte_order_mark_is_accepted(tmp_path):
    path = tmp_path / "notepad.toml"
    path.write_text("rounds = 7\n", encoding="utf-8-sig")
    assert Plan.read(path).rounds == 7
