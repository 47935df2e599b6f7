"""The rate bound beside measured bytes: its identity, its units, and where it is not given."""

import json
import math

import pytest

from fedpact.report.convergence import STEP, wire
from fedpact.report.run_summary import read_run

from .conftest import change

SITES = ["a", "b", "c"]
D, ROUNDS = 650, 4  # of the made-up folder, in which each site sends 2,000 bytes a round
SIGMA, CLIP = 2.5, 1.5


def ldp(folder):
    change(folder, "plan", algorithm="ldp_fedsgd")
    return change(folder, "privacy", mechanism="batch_clipped")


def test_the_bound_in_bits_follows_from_the_papers_quantities(build):
    # R - d ln s with s = 0.01 Cσ: C cancels, (d/2) log2(2πe (1 + 1/(dσ²))) + d log2(100).
    found = wire(read_run(ldp(build(SITES))))
    each = 0.5 * math.log2(2 * math.pi * math.e * (1 + 1 / (D * SIGMA**2))) - math.log2(STEP)
    assert coordinate(found[0].rows[2]) == pytest.approx(each, rel=1e-3)
    nats = 0.5 * math.log(2 * math.pi * math.e * CLIP**2 * (SIGMA**2 + 1 / D))
    assert found[0].rows[3][2] == f"{nats:.4g} nats"
    assert found[0].rows[3][1] == f"{D * nats:,.0f} nats"


def test_the_page_states_the_bounded_quantity_and_unit(build):
    from fedpact.report.page import render_run

    page = render_run(read_run(ldp(build(SITES))))
    for words in ("differential entropy", "nats", "no bound", "says nothing about privacy"):
        assert words in page
    # The bound is of one gradient a reply, whatever else is clipped so.
    folder = change(build(SITES), "privacy", mechanism="batch_clipped")
    assert "differential entropy" not in render_run(read_run(folder))


def coordinate(row):
    return float(row[2].removesuffix(" bits").replace(",", ""))


def test_bits_a_coordinate_are_those_of_all_messages(build):
    """Up over the replies, of which one is missing and one late; down over what was asked."""
    folder = build(SITES, refused={"b": "budget", "c": "late"})
    run = read_run(folder)
    found = wire(run)
    down, up = (sum(getattr(r, f"bytes_{way}") for r in run.records[1:]) for way in ("down", "up"))
    asked = len(SITES) * ROUNDS
    assert len(found[0].rows) == 2
    assert coordinate(found[0].rows[0]) == pytest.approx(8 * up / D / (asked - 1), rel=1e-3)
    assert coordinate(found[0].rows[1]) == pytest.approx(8 * down / D / asked, rel=1e-3)


def test_messages_of_evaluations_are_in_no_bits_a_coordinate(build):
    """Of rounds that are alike, one has an evaluation and takes more bytes."""
    folder = ldp(build(SITES))
    before = wire(read_run(folder))[0].rows
    *lines, last = (folder / "rounds.jsonl").read_text().splitlines()
    more = {"evaluation": {"a": {"hits": [1.0]}}, "bytes_up": 10**6, "bytes_down": 10**6}
    changed = json.dumps({**json.loads(last), **more})
    (folder / "rounds.jsonl").write_text("\n".join([*lines, changed, ""]))
    fewer = [[*map(coordinate, found[:2])] for found in (before, wire(read_run(folder))[0].rows)]
    assert fewer[0] == fewer[1]


@pytest.mark.parametrize(
    ("plan", "units"),
    [
        ({}, []),
        ({"compression": {"kind": "grid"}}, [4.0, 2.0]),
        ({"compression": {"kind": "grid"}, "secure_aggregation": {"threshold": 2}}, [2.0]),
        ({"privacy": {"trust": "sum"}, "secure_aggregation": {"threshold": 2}}, [4.0]),
    ],
)
def test_entropies_are_of_the_rounded_values(build, plan, units):
    found = wire(read_run(change(build(SITES), "plan", **plan)))
    bits = [coordinate(row) for row in found[0].rows[2:]]
    expected = [math.log2(each * math.sqrt(2 * math.pi * math.e)) for each in units]
    assert bits == pytest.approx(expected, abs=0.02)


def test_a_run_that_has_not_ended_has_no_bits_yet(build):
    assert "has not ended" in str(wire(read_run(build(SITES, rounds=0))))
