"""The pages that name tests name tests that exist, and no test of an erratum is left out."""

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def defined_in(files):
    return {
        name
        for path in files
        for name in re.findall(r"^ *def (test_\w+)\(", path.read_text(encoding="utf-8"), re.M)
    }


def named_in(page):
    return Counter(re.findall(r"`(test_\w+)`", (ROOT / "docs" / page).read_text(encoding="utf-8")))


@pytest.mark.parametrize("page", ["notes/errata.md", "notes/pitfalls.md"])
def test_every_named_test_exists(page):
    named = named_in(page)
    assert named
    assert set(named) - defined_in((ROOT / "tests").rglob("*.py")) == set()


def test_every_erratum_has_its_tests_and_every_test_its_erratum():
    page = (ROOT / "docs" / "notes" / "errata.md").read_text(encoding="utf-8")
    files = [p for p in (ROOT / "tests/reference").glob("test_errata_*.py") if p != Path(__file__)]
    listed = set()
    for entry in re.split(r"^### ", page, flags=re.M)[1:]:
        label = entry.split(".")[0].lower()
        names = set(re.findall(r"`(test_\w+)`", entry))
        assert names or "no test" in entry, label
        assert all(name.startswith(f"test_{label}_") for name in names), label
        listed |= names
    assert listed == defined_in(files)
