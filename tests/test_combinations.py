"""docs/reference/combinations.md: its table and reasons are made from what plans refuse."""

from pathlib import Path

import pytest

from fedpact import algorithms
from fedpact.algorithms.wrappers.base import Method
from fedpact.algorithms.wrappers.combine import CONFLICTS
from fedpact.common.errors import PlanError
from fedpact.plan import Plan

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "combinations.md"
COLUMNS = {
    "fairness": {"fairness": {"weight": 0.1}},
    "control": {"control": {"kind": "ali", "iterations": 9}},
    "robust": {"robust": {"rule": "median"}},
    "secure_aggregation": {"secure_aggregation": {"threshold": 3}},
    "server": {"server": {"optimiser": "momentum"}},
    "local": {"local": {"schedule": "cosine"}},
    "sites_per_round": {"sites_per_round": 1},
    "per_sample": {"privacy": {"accountant": "rdp"}},
    "batch_clipped": {"privacy": {"mode": "batch_clipped", "accountant": "rdp"}},
    "none": {},
}


PARTS = ("fairness", "control", "robust", "local", "server")


def test_every_part_that_an_algorithm_excludes_is_one_of_a_plan():
    known = {*PARTS, "local.head", "server.average", "privacy.clip_schedule", "privacy.mode"}
    for name in algorithms.names():
        assert set(Method(name).facts.excludes) <= known, name


def runs(algorithm, column):
    """Whether a plan of this combination is taken, with the noise for its releases."""
    tables = {"algorithm": algorithm, **COLUMNS[column]}
    if "iterations" in algorithms.load(algorithm).Settings.model_fields:
        tables["settings"] = {"iterations": 9}
    if column not in ("per_sample", "batch_clipped"):
        tables["privacy"] = {"mode": "none"}
    try:
        Plan.parse(tables).terms({"a": 100.0})
    except PlanError:
        return False
    return True


def table():
    lines = [f"| algorithm | {' | '.join(COLUMNS)} |", "| --- |" + " --- |" * len(COLUMNS)]
    for name in algorithms.names():
        cells = ["+" if runs(name, column) else "" for column in COLUMNS]
        lines.append(f"| `{name}` | {' | '.join(cells)} |".replace("  ", " "))
    return "\n".join(lines)


def reasons():
    return "\n".join(
        f"* `[{part}]` with `{name}`: {reason}."
        for part in PARTS
        for name, reason in excluded(part).items()
    )


def excluded(part):
    """Algorithm -> why the part cannot be combined with it."""
    facts = {name: Method(name).facts for name in algorithms.names()}
    return {name: of.excludes[part] for name, of in facts.items() if part in of.excludes}


def single(refused):
    return "\n".join(f"* `[{part}]`: {why}." for part, why in refused.items())


def block(name):
    text = PAGE.read_text(encoding="utf-8")
    return text.split(f"<!-- {name} -->\n")[1].split(f"\n<!-- /{name} -->")[0]


def test_the_table_is_what_plans_do():
    assert block("table") == table()


def test_the_reasons_are_the_codes():
    assert block("reasons") == reasons()


def test_the_table_of_refusals_matches_the_code():
    assert block("single") == single(CONFLICTS["secure_aggregation"])
    assert block("reads") == single(CONFLICTS["robust"])
    assert block("plain") == single(CONFLICTS["local"])
    heads = {**excluded("local.head"), **CONFLICTS["local.head"]}
    assert block("heads") == "\n".join(f"* `{n}`: {why}." for n, why in heads.items())
    part = {name: Method(name).facts.needs_all_sites for name in algorithms.names()}
    assert block("part") == "\n".join(f"* `{n}`: {why}." for n, why in part.items() if why)
    assert CONFLICTS["sites_per_round"]["secure_aggregation"] in PAGE.read_text(encoding="utf-8")
    clip = excluded("privacy.clip_schedule")
    assert block("clip") == "\n".join(f"* `{n}`: {why}." for n, why in clip.items())
    automatic = excluded("privacy.mode")
    assert block("automatic") == "\n".join(f"* `{n}`: {why}." for n, why in automatic.items())


TABLES = {
    "robust": COLUMNS["robust"],
    "control": COLUMNS["control"],
    "fairness": COLUMNS["fairness"],
    "compression": {"compression": {"kind": "int8"}},
}


@pytest.mark.parametrize("table", CONFLICTS["secure_aggregation"])
def test_secure_aggregation_refuses_what_needs_single_replies(table):
    secure = COLUMNS["secure_aggregation"]
    Plan.parse(TABLES[table])
    with pytest.raises(PlanError, match=rf"cannot be combined with \[{table}\]"):
        Plan.parse({**TABLES[table], **secure})


@pytest.mark.parametrize("table", CONFLICTS["robust"])
def test_robust_aggregates_refuse_what_reads_single_replies(table):
    """As with ali_dpfl and qffl, which do so by themselves."""
    with pytest.raises(PlanError, match=rf"\[robust\] cannot be combined with \[{table}\]"):
        Plan.parse({**TABLES[table], **TABLES["robust"]})
    Plan.parse({**TABLES[table], "robust": {"rule": "mean"}})
