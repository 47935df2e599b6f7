"""The audit on a run's page: the bound beside the claim, and a mark where the claim falls."""

import json

import pytest

from fedpact.common.errors import DataError
from fedpact.report.page import build_headline, write_report
from fedpact.report.run_summary import read_run

SITES = ["north", "south"]


def audit(**changes):
    """What `fedpact audit` writes: one ε of 0.23149, one noise, all as they should be."""
    whole = {
        "method": "one-run",
        "delta": None,
        "confidence": 0.95,
        "found": "guesses",
        "power": None,
    }
    return {
        "site": "north",
        "epsilon": 2.0,
        "delta": 1e-5,
        "adjacency": "add/remove one record",
        "accountant": "best",
        "passed": True,
        "checks": [
            {**whole, "quantity": "ε", "bound": 0.23149, "claimed": 1.9, "delta": 1e-5}
            | {"power": 0.85119},
            {**whole, "quantity": "σ", "bound": 2.6, "claimed": 2.5, "confidence": 0.999},
            {**whole, "quantity": "Δ", "bound": 0.99994, "claimed": 1.0000610352}
            | {"confidence": 1.0},
        ],
        **changes,
    }


def shown(folder, document):
    if document is not None:
        (folder / "audit.json").write_text(json.dumps(document))
    return " ".join(write_report(folder).read_text(encoding="utf-8").split())


def row(*cells):
    named = zip(("measured", "at best", "claimed", "δ", "confidence"), cells, strict=False)
    return "".join(f'<td class="n" data-of="{of}">{cell}</td>' for of, cell in named)


def test_the_bound_is_shown_with_the_claim(build):
    text = shown(build(SITES), audit())
    for part in (
        # A lower bound is rounded down, a claim up.
        # At best comes second; of a test there is none.
        row("ε ≥ 0.2314", "ε ≥ 0.8511", "ε ≤ 1.9", "1e-05", "95 %"),
        row("σ ≤ 2.6", "–", "σ = 2.5", "–", "99.9 %"),
        row("Δ = 0.99994", "–", "Δ ≤ 1.00007", "–", "100 %"),
        "of site north for one record, add/remove one record; accountant best",
        "No attack contradicts the claim",
    ):
        assert part in text
    assert "CONTRADICTS" not in text


@pytest.mark.parametrize(
    ("place", "bound"),
    [(0, 1.91), (1, 2.49), (2, 1.0001), (2, None), (0, None)],
    ids=["ε", "σ", "Δ", "Δ = ∞", "∞"],
)
def test_a_claim_that_falls_is_marked_whatever_the_file_says(build, place, bound):
    wrong = audit()
    wrong["checks"][place]["bound"] = bound
    assert wrong["passed"]
    folder = build(SITES)
    text = shown(folder, wrong)
    # Once in the headline, once in its row.
    assert text.count("CONTRADICTS THE CLAIM") == 2
    assert "THE CLAIM IS WRONG" in text
    (card,) = [c for c in build_headline(read_run(folder)) if c.label == "ε audited"]
    assert card.bad


def test_headline_is_the_largest_bound_at_the_budgets_delta(build):
    several = audit()
    several["checks"] += [
        {**several["checks"][0], "bound": 0.5, "method": "one-run, alone"},
        {**several["checks"][0], "bound": 0.9, "delta": 0.05},
    ]
    folder = build(SITES)
    shown(folder, several)
    (card,) = [c for c in build_headline(read_run(folder)) if c.label == "ε audited"]
    assert card.value == "≥ 0.5 of 2"
    assert not card.bad
    for part in ("one-run, alone", "site north", "(2, 1e-05)", "add/remove one record", "95 %"):
        assert part in card.note


def test_a_run_without_an_audit_says_so(build):
    folder = build(SITES)
    assert "Not audited" in shown(folder, None)
    assert "ε audited" not in [card.label for card in build_headline(read_run(folder))]


@pytest.mark.parametrize(
    "changes",
    [{"site": "east"}, {"epsilon": 3.0}, {"delta": 1e-6}, {"checks": 3}, {"checks": [{}]}],
)
def test_the_audit_of_another_run_or_half_an_audit_is_refused(build, changes):
    with pytest.raises(DataError, match="audit"):
        shown(build(SITES), audit(**changes))
